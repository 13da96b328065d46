"""Makes `package:realm-small` from public questions and texts and made-up tables, with the commands of `realm`.

    python recipes/realm_small.py DATA OUT

DATA is a folder with the following files. Passages and articles are JSON Lines {"id", "title", "text"}. Questions are JSON
Lines {"id", "question", "answers", "passage_id"}, or files in the original format of a data set.

    squad_train/passages.jsonl.xz      passages of SQuAD 1.1 train
    squad_train/questions.jsonl.xz     questions of SQuAD 1.1 train
    qed/passages.jsonl                 paragraphs of Natural Questions train (QED)
    qed/train.jsonl                    questions of Natural Questions train (QED)
    nq_train8k/questions.jsonl         questions of Natural Questions train (DPR), without passages
    webquestions/*.json                questions of WebQuestions train in three parts, without passages
    curatedtrec/curatedtrec-train.tsv  questions of CuratedTREC train, without passages
    nq_open/*.jsonl                    questions for measurements, which are left out of the training
    wiki10k_qa/*.jsonl                 questions for measurements
    factbook_qa/*.jsonl                questions for measurements
    simplewiki/articles.jsonl.xz       articles of Simple English Wikipedia
    enwiki_core/articles.jsonl.xz      articles of English Wikipedia

Each command is printed before it runs. If the program was interrupted, repeat the call: finished stages are skipped, and an
interrupted stage continues. OUT/realm-small is the model. The program takes an afternoon on two CPU cores.
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

from realm.files import write_json_lines
from realm.model.folder import load_model, save_model
from realm.qa.question_files import read_questions
from realm.qa.scoring.metrics import has_answer

ARTICLES_READ = {"simplewiki": 5, "enwiki_core": 3}
"""The masked-LM training uses every 5th article of Simple English Wikipedia, and every 3rd article of English Wikipedia."""
PAIRS = ("nq_train8k/questions.jsonl", "webquestions/*.json", "curatedtrec/curatedtrec-train.tsv")
"""Questions with answers and without passages."""
MEASURED = ("nq_open", "wiki10k_qa", "factbook_qa")
"""Folders of questions for measurements, which are never used in training."""
QED_COPIES = 4
"""Copies of each question of qed in the training questions. People asked these questions, but SQuAD has 15 times as many."""
SQUAD_AGAIN = 6000
"""Number of SQuAD questions in the training of `asked`, which reads passages without an answer too."""
PAIR_COPIES = 2
"""Copies of each question without a passage in the training of `asked`."""
FIRST = 5
"""A question without a passage is used if one of the first `FIRST` retrieved passages contains an answer."""
CALIBRATED_BY = 200
"""Number of dev questions of SQuAD, and of qed, for the calibration. Questions without passages are not
used: their answers come from other texts, so many right answers would count as wrong."""
STEERED_BY = 200
"""Number of dev questions of SQuAD, of qed, and about rows, that select the best step. The remaining dev questions of SQuAD and
qed are for measurements."""
TABLED = 0.75
"""Weight of the reader `tabled` in the mean with the reader before, chosen among 0.25, 0.5, 0.75 and 1 by its dev questions."""


def reader(
    train: str,
    read: int,
    steps: int,
    batch: int,
    rate: float,
    head: float,
    kb: str = "kb",
    dev: str = "steering",
) -> str:
    """The options of `realm finetune` for a span reader that reads `read` passages of each question."""
    return (
        f"--kb {kb} --train {train}.jsonl --dev {dev}.jsonl --config realm-small --set passages=contrast "
        f"--set reader_gradient=all --set read={read} --set steps={steps} --set batch_size={batch} "
        f"--set learning_rate={rate} --set head_rate={head}"
    )


STAGES: tuple[tuple[str, str | Callable[[Path], None]], ...] = (
    ("kb", "kb build paragraphs.jsonl package:vital-articles --out kb --config realm-small"),
    ("start", "mlm --kb kb --out start --config realm-small --set steps=0"),
    ("kb/indexes", "index --kb kb --model start"),
    # The span reader is first trained on passages with an answer ("gold"). Then it is trained on one passage with an answer and
    # the best two passages without an answer, so that scores of different passages are comparable. This second part is done
    # twice: "contrast" is trained on the questions of SQuAD and qed, "asked" on fewer of these questions and on the questions
    # without passages. The mean of the two readers answers both kinds of questions.
    (
        "gold",
        f"finetune --model start --out gold {reader('train', 1, 7000, 24, 1e-4, 1e-3)}",
    ),
    (
        "hits.jsonl",
        f"retrieve --kb kb --model start --questions pairs.jsonl --method hybrid --top-k {FIRST} --out hits.jsonl",
    ),
    ("asked.jsonl", lambda out: mix(out)),
    (
        "contrast",
        f"finetune --model gold --out contrast {reader('train', 3, 1200, 12, 6e-5, 3e-4)}",
    ),
    (
        "asked",
        f"finetune --model gold --out asked --method hybrid {reader('asked', 3, 1500, 12, 6e-5, 3e-4)}",
    ),
    ("both", lambda out: average(out, "contrast", "asked", 0.5, "both")),
    # Then a reader learns to choose a cell of a row ("tabled"). The mean with the reader before keeps the usual boundaries of
    # answers in prose.
    ("row_questions.jsonl", lambda out: make_rows(out)),
    ("tabled.jsonl", lambda out: mix_rows(out)),
    (
        "tables",
        "kb build paragraphs.jsonl package:vital-articles rows.jsonl --out tables --config realm-small",
    ),
    ("tables/indexes", "index --kb tables --model both"),
    (
        "tabled",
        "finetune --model both --out tabled --method hybrid "
        + reader("tabled", 3, 1000, 12, 6e-5, 3e-4, kb="tables", dev="tabled_dev"),
    ),
    ("reading", lambda out: average(out, "both", "tabled", TABLED, "reading")),
    ("wiki", "kb build articles.jsonl --out wiki --config realm-small"),
    ("filled", "mlm --kb wiki --init reading --out filled --config realm-small"),
    (
        "calibrated.json",
        "calibrate --kb kb --model filled --questions calibration.jsonl --method hybrid --json",
    ),
    ("realm-small", "convert filled realm-small --to compact"),
)
"""For each stage, the file or folder that it makes, and its command or its function in this file."""


def main(data: Path, out: Path) -> None:
    """Writes the input files of the stages, then runs the stages whose product is missing."""
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
                report = subprocess.run(command, cwd=out, check=True, stdout=subprocess.PIPE).stdout
                (out / product).write_bytes(report)
            else:
                subprocess.run(command, cwd=out, check=True)
        else:
            stage(out)


def prepare(data: Path, out: Path) -> None:
    """Splits the questions by article into training and dev questions, and writes the questions and texts of all stages."""
    squad = list(rows(data / "squad_train/questions.jsonl.xz"))
    qed = list(rows(data / "qed/train.jsonl"))
    paragraphs = {
        "squad_train": list(rows(data / "squad_train/passages.jsonl.xz")),
        "qed": list(rows(data / "qed/passages.jsonl")),
    }
    squad, squad_dev = split(squad, paragraphs["squad_train"], one_in=11, seed=0)
    qed, qed_dev = split(qed, paragraphs["qed"], one_in=6, seed=1)
    write_json_lines(out / "train.jsonl", shuffled(squad + copies(qed, QED_COPIES)))
    write_json_lines(out / "again.jsonl", qed + random.Random(0).sample(squad, min(SQUAD_AGAIN, len(squad))))
    write_json_lines(out / "steering.jsonl", squad_dev[:STEERED_BY] + qed_dev[:STEERED_BY])
    used = STEERED_BY + CALIBRATED_BY
    write_json_lines(out / "calibration.jsonl", squad_dev[STEERED_BY:used] + qed_dev[STEERED_BY:used])
    write_json_lines(out / "squad_dev.jsonl", squad_dev[used:])
    write_json_lines(out / "qed_dev.jsonl", qed_dev[used:])
    measured = {plain(row["question"]) for row in squad_dev + qed_dev}
    for folder in MEASURED:
        measured |= {plain(row["question"]) for file in (data / folder).glob("*.jsonl") for row in rows(file)}
    write_json_lines(out / "pairs.jsonl", unpaired(data, measured))
    write_json_lines(out / "paragraphs.jsonl", [row for mine in paragraphs.values() for row in mine])
    write_json_lines(
        out / "articles.jsonl",  # written last: if this file exists, all files exist
        (
            row
            for name, each in ARTICLES_READ.items()
            for number, row in enumerate(rows(data / name / "articles.jsonl.xz"))
            if number % each == 0
        ),
    )


def unpaired(data: Path, measured: set[str]) -> Iterator[dict[str, Any]]:
    """The questions without passages that are not in `measured`, each once."""
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
    """The words of a question in lower case; two questions with the same words count as equal."""
    return " ".join(re.findall(r"\w+", question.lower()))


def mix(out: Path) -> None:
    """Writes the training questions of `asked`."""
    questions = zip(read_questions(out / "pairs.jsonl"), rows(out / "pairs.jsonl"), strict=True)
    found = [
        row
        for (question, row), hit in zip(questions, rows(out / "hits.jsonl"), strict=True)
        if any(has_answer(passage["text"], question) for passage in hit["passages"])
    ]
    write_json_lines(out / "asked.jsonl", shuffled([*rows(out / "again.jsonl"), *copies(found, PAIR_COPIES)]))


def make_rows(out: Path) -> None:
    """Writes made-up rows of tables and questions about them."""
    script = Path(__file__).with_name("table_questions.py")
    subprocess.run([sys.executable, script, "kb", "rows.jsonl", "row_questions.jsonl"], cwd=out, check=True)


def mix_rows(out: Path) -> None:
    """Writes the training questions and the dev questions of `tabled`."""
    asked = list(rows(out / "row_questions.jsonl"))
    dev, train = asked[:STEERED_BY], asked[STEERED_BY:]
    write_json_lines(out / "tabled_dev.jsonl", shuffled([*rows(out / "steering.jsonl"), *dev]))
    write_json_lines(out / "tabled.jsonl", shuffled([*rows(out / "asked.jsonl"), *train]))


def average(out: Path, first: str, second: str, share: float, mean: str) -> None:
    """Makes the model `mean`, whose span reader has a weighted mean of the weights of two (a model soup: Wortsman et al. 2022).

    The second reader has the weight `share`.
    """
    one, other = load_model(out / first), load_model(out / second)
    assert one.span_reader is not None and other.span_reader is not None
    weights = one.span_reader.state_dict()
    other.span_reader.load_state_dict(
        {
            name: share * weight + (1 - share) * weights[name] if weight.is_floating_point() else weight
            for name, weight in other.span_reader.state_dict().items()
        }
    )
    other.stages = [*one.stages, other.stages[-1]]
    save_model(other, out / mean)


def copies(questions: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Each question `count` times, with a different id for each copy."""
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
    """Training questions, and dev questions in random order; these are all questions about one in `one_in` articles."""
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
