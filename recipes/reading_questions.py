"""Makes questions with passages, for `[data.reading]` of a table, from the files that SQuAD and QED publish.

    python recipes/reading_questions.py train-v1.1.json data/squad_train/passages.jsonl.xz data/squad_train/questions.jsonl.xz
    python recipes/reading_questions.py qed-train.jsonlines data/qed/passages.jsonl data/qed/train.jsonl

The first file is in SQuAD's nested JSON, or in the JSON Lines of QED (Natural Questions with their paragraphs). Each paragraph
becomes a passage {"id", "title", "text"}, and each question a line {"id", "question", "answers", "passage_id"}. Questions
without an answer that is one piece of their paragraph are left out. The paragraphs of QED are texts of separate tokens, whose
usual spacing is restored.
"""

import json
import lzma
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """A question about a paragraph."""

    id: str
    question: str
    answers: list[str]
    title: str
    paragraph: str


def main(source: Path, passages: Path, questions: Path) -> None:
    """Writes the passages and the questions of a file."""
    asked = list(asked_of(source.read_text(encoding="utf-8")))
    name = source.name.partition(".")[0]
    ids = {
        text: f"{name}-{number}" for number, text in enumerate(dict.fromkeys(one.paragraph for one in asked))
    }
    titles = {one.paragraph: one.title for one in asked}
    kept = [one._replace(answers=[text for text in one.answers if text in one.paragraph]) for one in asked]
    kept = [one for one in kept if one.answers]
    write(passages, ({"id": ids[text], "title": titles[text], "text": text} for text in ids))
    write(
        questions,
        (
            {"id": one.id, "question": one.question, "answers": one.answers, "passage_id": ids[one.paragraph]}
            for one in kept
        ),
    )
    print(f"{len(ids):,} passages, {len(kept):,} of {len(asked):,} questions")


def asked_of(text: str) -> Iterator[Asked]:
    """The questions in SQuAD's nested JSON, or in the JSON Lines of QED."""
    try:
        articles = json.loads(text).get("data")
    except json.JSONDecodeError:  # several lines
        articles = None
    if articles is None:
        yield from (of_qed(json.loads(line)) for line in text.split("\n") if line.strip())
        return
    for article in articles:
        for paragraph in article["paragraphs"]:
            for pair in paragraph["qas"]:
                answers = list(dict.fromkeys(answer["text"] for answer in pair["answers"]))
                title = article["title"].replace("_", " ")
                yield Asked(pair["id"], pair["question"], answers, title, paragraph["context"])


def of_qed(row: dict[str, Any]) -> Asked:
    """A question of QED. Answers in several pieces, and answers that QED's annotators found to be wrong, are left out."""
    pieces = [] if row["annotation"]["explanation_type"] == "none" else row["original_nq_answers"]
    answers = dict.fromkeys(spaced(spans[0]["string"]) for spans in pieces if len(spans) == 1)
    return Asked(
        f"qed{row['example_id']}",
        row["question_text"],
        list(answers),
        row["title_text"],
        spaced(row["paragraph_text"]),
    )


_SPACING = (
    (r"`` ?| ?''", '"'),
    (r" -- ", " – "),
    (r"(?<=\w) - (?=\w)", "-"),
    (r" (?=[,.;:!?%)\]])|(?<=[(\[$]) ", ""),
    (r" (?=(?:'(?:s|re|ve|ll|d|m)|n't)\b)", ""),
)


def spaced(text: str) -> str:
    """A text of separate tokens with the usual spacing.

    >>> print(spaced("The door 's name was `` the Gap '' ( it was half - open ) , 1940 -- 1942 ."))
    The door's name was "the Gap" (it was half-open), 1940 – 1942.
    """
    for pattern, replacement in _SPACING:
        text = re.sub(pattern, replacement, text)
    return text


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes JSON Lines, compressed if the name ends in .xz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python recipes/reading_questions.py SOURCE PASSAGES QUESTIONS")
    main(*map(Path, sys.argv[1:]))
