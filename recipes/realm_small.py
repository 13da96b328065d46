"""Makes `package:realm-small` from public questions and text, by the commands of this project.

    python recipes/realm_small.py DATA OUT

DATA holds passages and articles, JSON Lines {"id", "title", "text"}, and questions, JSON Lines {"id", "question", "answers",
"passage_id"} or as their sources write them; some are compressed by xz.

    squad_train/passages.jsonl.xz    SQuAD 1.1 train
    squad_train/questions.jsonl.xz
    qed/passages.jsonl               Natural Questions (train) with their paragraphs (QED)
    qed/train.jsonl
    nq_train8k/questions.jsonl       Natural Questions (train, as DPR has them) without passages
    webquestions/*.json              WebQuestions train in its three parts, without passages
    curatedtrec/curatedtrec-train.tsv
    nq_open/*.jsonl                  questions to measure with: of those above they are left out
    wiki10k_qa/*.jsonl
    factbook_qa/*.jsonl
    simplewiki/articles.jsonl.xz     Simple English Wikipedia
    enwiki_core/articles.jsonl.xz    articles of English Wikipedia

Each command is printed before it runs. What is there is not made again and a stage that was interrupted goes on, so the same
call continues after any end. OUT/realm-small is the model; two CPU cores take an afternoon.
"""

import json
import lzma
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from realm.model.folder import load_model, save_model
from realm.qa.metrics import has_answer
from realm.qa.question_files import read_questions

ARTICLES_READ = {"simplewiki": 5, "enwiki_core": 3}
"""Of Simple English Wikipedia every 5th article is read to learn to fill gaps, of the other every 3rd."""
PAIRS = ("nq_train8k/questions.jsonl", "webquestions/*.json", "curatedtrec/curatedtrec-train.tsv")
"""Questions with answers and no passages."""
MEASURED = ("nq_open", "wiki10k_qa", "factbook_qa")
"""Folders of questions that are never trained on."""
QED_COPIES = 4
"""Of each question of qed among the training questions: they are real, and SQuAD has 15 times as many."""
SQUAD_AGAIN = 6000
"""Questions of SQuAD that are read again beside passages that do not answer."""
PAIR_COPIES = 2
"""Of each question without a passage of its own among them."""
FIRST = 5
"""Such a question counts as answered where one of so many passages found for it holds an answer."""
CALIBRATED_BY = 200
"""Dev questions of SQuAD and of qed by which probabilities are fitted, and of the questions without passages one in ten."""
STEERED_BY = 200
"""Dev questions of either kind by which the best step is chosen; the others are measured with."""

READER = (
    "--kb kb --train {}.jsonl --dev steering.jsonl --config realm-small --set passages=contrast --set reader_gradient=all "
    "--set read={} --set steps={} --set batch_size={} --set learning_rate={} --set head_rate={}"
)
STAGES: tuple[tuple[str, str | Callable[[Path], None]], ...] = (
    ("kb", "kb build paragraphs.jsonl package:vital-articles --out kb --config realm-small"),
    ("start", "mlm --kb kb --out start --config realm-small --set steps=0"),
    ("kb/indexes", "index --kb kb --model start"),
    # The span reader: passages that answer, then these beside the best two that do not, so that scores compare across passages.
    # This second part is learnt twice, from questions written to a passage and from ones that people asked without one; their
    # mean answers either kind.
    ("gold", f"finetune --model start --out gold {READER.format('train', 1, 7000, 24, 1e-4, 1e-3)}"),
    (
        "hits.jsonl",
        f"retrieve --kb kb --model start --questions pairs.jsonl --method hybrid --top-k {FIRST} --out hits.jsonl",
    ),
    ("asked.jsonl", lambda out: mix(out)),
    ("contrast", f"finetune --model gold --out contrast {READER.format('train', 3, 1200, 12, 6e-5, 3e-4)}"),
    (
        "asked",
        f"finetune --model gold --out asked --method hybrid {READER.format('asked', 3, 1500, 12, 6e-5, 3e-4)}",
    ),
    ("both", lambda out: average(out)),
    ("wiki", "kb build articles.jsonl --out wiki --config realm-small"),
    ("filled", "mlm --kb wiki --init both --out filled --config realm-small"),
    (
        "calibrated.json",
        "calibrate --kb kb --model filled --questions calibration.jsonl --method hybrid --json",
    ),
    ("realm-small", "convert filled realm-small --to compact"),
)
"""What each stage makes, and the command, or the function of this file."""


def main(data: Path, out: Path) -> None:
    """Writes what the stages read, then runs those whose product is missing."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "articles.jsonl").exists():
        prepare(data, out)
    for product, stage in STAGES:
        if (out / product).exists():
            continue
        if isinstance(stage, str):
            print(f"$ realm {stage}", flush=True)
            command = [sys.executable, "-m", "realm", *shlex.split(stage)]
            if product.endswith(".json"):
                said = subprocess.run(command, cwd=out, check=True, stdout=subprocess.PIPE).stdout
                (out / product).write_bytes(said)
            else:
                subprocess.run(command, cwd=out, check=True)
        else:
            stage(out)


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
    write(out / "train.jsonl", shuffled(squad + copies(qed, QED_COPIES)))
    write(out / "again.jsonl", qed + random.Random(0).sample(squad, min(SQUAD_AGAIN, len(squad))))
    write(out / "steering.jsonl", squad_dev[:STEERED_BY] + qed_dev[:STEERED_BY])
    for name, dev in (("squad", squad_dev), ("qed", qed_dev)):
        write(out / f"{name}_calibration.jsonl", dev[STEERED_BY : STEERED_BY + CALIBRATED_BY])
        write(out / f"{name}_dev.jsonl", dev[STEERED_BY + CALIBRATED_BY :])
    measured = {plain(row["question"]) for row in squad_dev + qed_dev}
    for folder in MEASURED:
        measured |= {plain(row["question"]) for file in (data / folder).glob("*.jsonl") for row in rows(file)}
    write(out / "pairs.jsonl", unpaired(data, measured))
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


def unpaired(data: Path, measured: set[str]) -> Iterator[dict[str, Any]]:
    """The questions without passages that nothing is measured with, each once."""
    asked = set(measured)
    for name in PAIRS:
        for file in sorted(data.glob(name)):
            for question in read_questions(file):
                if plain(question.question) not in asked:
                    asked.add(plain(question.question))
                    yield {
                        "id": f"{file.stem}-{question.id}",
                        "question": question.question,
                        "answers": question.answers,
                        "regex": question.regex,
                    }


def plain(question: str) -> str:
    """The words of a question, by which two are the same."""
    return " ".join(re.findall(r"\w+", question.lower()))


def mix(out: Path) -> None:
    """Writes the questions of the span reader's second part, and those by which probabilities are fitted."""
    questions = zip(read_questions(out / "pairs.jsonl"), rows(out / "pairs.jsonl"), strict=True)
    found = [
        row
        for (question, row), hit in zip(questions, rows(out / "hits.jsonl"), strict=True)
        if any(has_answer(passage["text"], question) for passage in hit["passages"])
    ]
    random.Random(4).shuffle(found)
    dev, train = found[: len(found) // 10], found[len(found) // 10 :]
    known = [row for name in ("squad", "qed") for row in rows(out / f"{name}_calibration.jsonl")]
    write(out / "calibration.jsonl", known + dev)
    write(out / "asked.jsonl", shuffled([*rows(out / "again.jsonl"), *copies(train, PAIR_COPIES)]))


def average(out: Path) -> None:
    """Makes the model whose span reader has the mean weights of two (a model soup: Wortsman et al. 2022)."""
    contrast, asked = load_model(out / "contrast"), load_model(out / "asked")
    assert contrast.span_reader is not None and asked.span_reader is not None
    other = contrast.span_reader.state_dict()
    asked.span_reader.load_state_dict(
        {
            name: (weight + other[name]) / 2 if weight.is_floating_point() else weight
            for name, weight in asked.span_reader.state_dict().items()
        }
    )
    asked.stages = [*contrast.stages, asked.stages[-1]]
    save_model(asked, out / "both")


def copies(questions: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Each question so many times, under ids of its own."""
    return [
        {**row, "id": f"{row['id']}-{copy}"} if copy else row for row in questions for copy in range(count)
    ]


def shuffled(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same list in random order."""
    random.Random(0).shuffle(questions)
    return questions


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
