"""Makes `package:realm-small` from public questions and text, by the commands of this project.

    python recipes/realm_small.py DATA OUT

DATA holds JSON Lines, some compressed by xz: passages and articles as {"id", "title", "text"}, questions as {"id", "question",
"answers", "passage_id"}.

    squad_train/passages.jsonl.xz    SQuAD 1.1 train
    squad_train/questions.jsonl.xz
    qed/passages.jsonl               Natural Questions (train) with their paragraphs (QED)
    qed/train.jsonl
    simplewiki/articles.jsonl.xz     Simple English Wikipedia
    enwiki_core/articles.jsonl.xz    articles of English Wikipedia

Each command is printed before it runs. What is there is not made again and a stage that was interrupted goes on, so the same
call continues after any end. OUT/realm-small is the model; two CPU cores take an afternoon.
"""

import json
import lzma
import random
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ARTICLES_READ = {"simplewiki": 5, "enwiki_core": 3}
"""Of Simple English Wikipedia every 5th article is read to learn to fill gaps, of the other every 3rd."""
QED_COPIES = 4
"""Of each question of qed among the training questions: they are real, and SQuAD has 15 times as many."""
STEERED_BY = 200
"""Dev questions of either kind by which the best step is chosen; the others are measured with."""

READER = (
    "--kb kb --train train.jsonl --dev steering.jsonl --config realm-small --set passages=contrast --set reader_gradient=all "
    "--set read={} --set steps={} --set batch_size={} --set learning_rate={} --set head_rate={}"
)
STAGES = (
    ("kb", "kb build paragraphs.jsonl package:vital-articles --out kb --config realm-small"),
    ("start", "mlm --kb kb --out start --config realm-small --set steps=0"),
    ("kb/indexes", "index --kb kb --model start"),
    # The span reader: passages that answer, then these beside the best two that do not, so that scores compare across passages.
    ("gold", f"finetune --model start --out gold {READER.format(1, 7000, 24, 1e-4, 1e-3)}"),
    ("contrast", f"finetune --model gold --out contrast {READER.format(3, 1200, 12, 6e-5, 3e-4)}"),
    ("wiki", "kb build articles.jsonl --out wiki --config realm-small"),
    ("filled", "mlm --kb wiki --init contrast --out filled --config realm-small"),
    (
        "calibrated.json",
        "calibrate --kb kb --model filled --questions calibration.jsonl --method hybrid --json",
    ),
    ("realm-small", "convert filled realm-small --to compact"),
)
"""What each command makes, and the command."""


def main(data: Path, out: Path) -> None:
    """Writes what the stages read, then runs those whose product is missing."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "articles.jsonl").exists():
        prepare(data, out)
    for product, stage in STAGES:
        if not (out / product).exists():
            print(f"$ realm {stage}", flush=True)
            command = [sys.executable, "-m", "realm", *shlex.split(stage)]
            if product.endswith(".json"):
                said = subprocess.run(command, cwd=out, check=True, stdout=subprocess.PIPE).stdout
                (out / product).write_bytes(said)
            else:
                subprocess.run(command, cwd=out, check=True)


def prepare(data: Path, out: Path) -> None:
    """Cuts dev questions off by article, and writes the questions and texts of all stages."""
    squad = list(rows(data / "squad_train/questions.jsonl.xz"))
    qed = list(rows(data / "qed/train.jsonl"))
    paragraphs = {
        "squad_train": list(rows(data / "squad_train/passages.jsonl.xz")),
        "qed": list(rows(data / "qed/passages.jsonl")),
    }
    squad, squad_dev = split(squad, paragraphs["squad_train"], one_in=11, seed=0)
    qed, qed_dev = split(qed, paragraphs["qed"], one_in=6, seed=1)
    train = squad + [
        {**row, "id": f"{row['id']}-{copy}"} if copy else row for row in qed for copy in range(QED_COPIES)
    ]
    random.Random(0).shuffle(train)
    write(out / "train.jsonl", train)
    write(out / "steering.jsonl", squad_dev[:STEERED_BY] + qed_dev[:STEERED_BY])
    rest = squad_dev[STEERED_BY:], qed_dev[STEERED_BY:]
    write(out / "calibration.jsonl", [row for dev in rest for row in dev[: len(dev) // 2]])
    for name, dev in zip(("squad", "qed"), rest, strict=True):
        write(out / f"{name}_dev.jsonl", dev[len(dev) // 2 :])
    write(out / "paragraphs.jsonl", [row for mine in paragraphs.values() for row in mine])
    write(
        out / "articles.jsonl",  # the last: with it all is there
        (
            row
            for name, each in ARTICLES_READ.items()
            for number, row in enumerate(rows(data / name / "articles.jsonl.xz"))
            if number % each == 0
        ),
    )


def split(
    questions: list[dict[str, Any]], passages: list[dict[str, Any]], one_in: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Questions to train on, and dev questions in random order: all those about one article in so many."""
    title = {passage["id"]: passage["title"] for passage in passages}
    titles = sorted(set(title.values()))
    random.Random(seed).shuffle(titles)
    dev_titles = set(titles[: len(titles) // one_in])
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for question in questions:
        parts[title[question["passage_id"]] in dev_titles].append(question)
    random.Random(3).shuffle(parts[1])
    return parts


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON Lines."""
    with lzma.open(file, "rt") if file.suffix == ".xz" else file.open() as lines:
        yield from map(json.loads, lines)


def write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes a file of JSON Lines; it is there when it is whole."""
    part = file.with_suffix(".part")
    with part.open("w") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    part.replace(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
