"""The documents, the encoder and the questions of the tables, and what the tests of a table share."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from realm import cli
from realm.compare import plots
from tests.towns import TOWNS, write_corpus, write_encoder

TESTS = ("spans", "patterns")


def printed(*words: str) -> str:
    """What a command prints."""
    out = StringIO()
    with redirect_stdout(out):
        assert cli.main(words) == 0
    return out.getvalue()


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Home(NamedTuple):
    """A folder with the documents, the encoder and the settings of the tables."""

    folder: Path

    def words(self, command: str, folder: Path, *more: str, asked: bool = True) -> list[str]:
        """A command with these settings on these documents, and on the questions if they are `asked`."""
        data = {
            "corpus": f'["{self.folder / "towns.jsonl"}"]',
            "text": f'["{self.folder / "towns.jsonl"}"]',
            "encoder": self.folder / "encoder",
            "documents": 0,
        }
        if asked:
            data["train"] = f'["{self.folder / "train.jsonl"}"]'
            data |= {f"tests.{test}": self.folder / f"{test}.jsonl" for test in TESTS}
        given = [word for key, value in data.items() for word in ("--set", f"data.{key}={value}")]
        return [command, str(self.folder / "tables.toml"), "--dir", str(folder), *given, *more]

    @property
    def table1(self) -> Path:
        return self.folder / "table1"

    @property
    def table2(self) -> Path:
        return self.folder / "table2"


@contextmanager
def undrawn_tables() -> Iterator[None]:
    """Tables are made without their pictures, which take a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", lambda report, file: None)
        yield


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("tables"))
    texts = write_corpus(home.folder / "towns.jsonl")
    write_encoder(home.folder / "encoder", texts)
    write_questions(home.folder, texts)
    write_settings(home.folder / "tables.toml")
    return home


def write_settings(file: Path) -> None:
    """The preset `tables-tiny` with fewer steps of pre-training, because each step builds an index.

    These steps are too few for the row `stale`, whose index is 30 times as old: a test that makes this row lowers the 30.
    """
    file.write_text('base = "tables-tiny"\n[pretrain]\nsteps = 4\n')


def write_questions(folder: Path, texts: list[str]) -> None:
    """Questions that models with random weights answer and find in part.

    Every other question of a test has the name of its town as the answer, so that only one document holds it. The answers of
    the others are all spans of up to six words of the document in "spans", and any letter in "patterns". One question is for
    training and in a test.
    """
    asked: dict[str, list[dict[str, Any]]] = {"train": [], "spans": [], "patterns": []}
    for place, (town, text) in enumerate(zip(TOWNS, texts, strict=True)):
        words = text.split()
        every = [
            " ".join(words[start : start + width]) for start in range(len(words)) for width in range(1, 7)
        ]
        year = re.findall(r"\d+", text)[0]
        asked["train"].append({"question": f"when was {town} founded?", "answers": [year]})
        asked["train"].append({"question": f"on which river lies {town}?", "answers": ["Ystra"]})
        spans, pattern = ([town], town) if place % 2 else (every, "[a-z]")
        other = TOWNS[place - 1]
        asked["spans"].append({"question": f"what stands near {other}?", "answers": spans})
        asked["patterns"].append(
            {"question": f"who keeps bees near {other}?", "answers": [pattern], "regex": True}
        )
    asked["spans"].append(asked["train"][0])
    for name, lines in asked.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
