"""The recipe of realm-small: what it trains on is none of what it measures with, and its commands are ones that exist."""

import json
import lzma
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm import cli
from realm.cli.arguments import settings
from tests.test_cli import config_classes

RECIPE = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parent.parent / "recipes" / "realm_small.py"), run_name="recipe")
)


def passage(number: int, article: str) -> dict[str, Any]:
    return {"id": f"p{number}", "title": article, "text": "Arden lies on the river Tamm."}


def question(number: int, about: int) -> dict[str, Any]:
    return {"id": f"q{number}", "question": "where?", "answers": ["Arden"], "passage_id": f"p{about}"}


@given(
    st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=20),
    st.lists(st.integers(0, 19), max_size=40),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_no_article_is_both_trained_on_and_measured_with(articles, abouts, one_in, seed) -> None:
    passages = [passage(number, article) for number, article in enumerate(articles)]
    questions = [question(number, about % len(articles)) for number, about in enumerate(abouts)]
    train, dev = RECIPE.split(questions, passages, one_in, seed)
    assert sorted(row["id"] for row in train + dev) == sorted(row["id"] for row in questions)
    about = [{articles[int(row["passage_id"][1:])] for row in part} for part in (train, dev)]
    assert not about[0] & about[1]
    assert len(about[1]) <= len(set(articles)) // one_in


def test_what_it_prepares_is_whole_and_apart(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    for kind, asked in (("squad_train", "questions.jsonl.xz"), ("qed", "train.jsonl")):
        articles = [passage(number, f"Town {number}") for number in range(66)]
        questions = [{**question(number, number % 66), "id": f"{kind}-{number}"} for number in range(60 * 66)]
        write(data / kind / asked.replace("questions", "passages").replace("train", "passages"), articles)
        write(data / kind / asked, questions)
    for name in RECIPE.ARTICLES_READ:
        write(data / name / "articles.jsonl.xz", articles)
    out.mkdir()
    RECIPE.prepare(data, out)
    made = {file.stem: list(RECIPE.rows(file)) for file in out.iterdir()}
    assert {name: len(rows) for name, rows in made.items()} == {
        "train": 60 * 60 + RECIPE.QED_COPIES * 55 * 60,
        "steering": 400,
        "calibration": 80 + 230,
        "squad_dev": 80,
        "qed_dev": 230,
        "paragraphs": 132,
        "articles": 14 + 22,
    }
    asked = [
        row["id"]
        for name in ("train", "steering", "calibration", "squad_dev", "qed_dev")
        for row in made[name]
    ]
    assert len(asked) == len(set(asked))


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(file, "wt") if file.suffix == ".xz" else file.open("w") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("stage", [stage for _, stage in RECIPE.STAGES])
def test_every_stage_is_a_command_with_settings_that_it_knows(stage: str) -> None:
    args = cli._parser().parse_args(shlex.split(stage))
    if args.section:
        assert settings(args, config_classes()[args.section])


def test_every_stage_uses_what_is_prepared_or_what_an_earlier_one_makes() -> None:
    there = {"paragraphs.jsonl", "articles.jsonl", "train.jsonl", "steering.jsonl", "calibration.jsonl"}
    for product, stage in RECIPE.STAGES:
        words = shlex.split(stage)
        used = {
            words[i + 1]
            for i, word in enumerate(words)
            if word in {"--kb", "--model", "--init", "--train", "--dev"}
        }
        assert used <= there, stage
        there.add(product)
