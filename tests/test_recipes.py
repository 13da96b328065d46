"""The recipes: the questions of training and of measurements are apart, and the commands exist."""

import json
import lzma
import random
import runpy
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from realm import cli
from realm.checksums import check_folder
from realm.cli.arguments import settings
from realm.hub import encoder_folder
from realm.model.folder import load_model, save_model
from realm.model.manifest import encoder_held_out
from tests.qa.conftest import qa_folder
from tests.test_cli import config_classes

__all__ = ["qa_folder"]


def load(name: str) -> SimpleNamespace:
    file = Path(__file__).parent.parent / "recipes" / f"{name}.py"
    return SimpleNamespace(**runpy.run_path(str(file), run_name="recipe"))


RECIPE, MINI, ROWS = load("realm_small"), load("realm_mini"), load("table_questions")
COMMANDS = [stage for _, stage in [*RECIPE.STAGES, *MINI.STAGES] if isinstance(stage, str)]


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
    asked_elsewhere = [{"id": str(n), "question": f"Who is {n}?", "answers": ["Arden"]} for n in range(9)]
    write(data / "nq_train8k" / "questions.jsonl", [*asked_elsewhere, {**asked_elsewhere[0], "id": "again"}])
    for number, name in enumerate(RECIPE.MEASURED):
        write(data / name / "test.jsonl", [{"question": f"who is {number}"}])
    (data / "curatedtrec").mkdir()
    (data / "curatedtrec" / "curatedtrec-train.tsv").write_text("1\tfactoid\tWho was 1?\tAr(den|t)\n")
    for name in RECIPE.ARTICLES_READ:
        write(data / name / "articles.jsonl.xz", articles)
    out.mkdir()
    RECIPE.prepare(data, out)
    made = {file.stem: list(RECIPE.rows(file)) for file in out.iterdir()}
    assert {name: len(rows) for name, rows in made.items()} == {
        "train": 60 * 60 + RECIPE.QED_COPIES * 55 * 60,
        "again": 60 * 60 + 55 * 60,
        "pairs": 9 - 3 + 1,
        "steering": 400,
        "calibration": 360,
        "squad_dev": 0,
        "qed_dev": 260,
        "paragraphs": 132,
        "articles": 14 + 22,
    }
    asked = [
        row["id"]
        for name in ("train", "steering", "calibration", "squad_dev", "qed_dev", "pairs")
        for row in made[name]
    ]
    assert len(asked) == len(set(asked))
    assert made["pairs"][-1] == {
        "id": "curatedtrec-train-1",
        "question": "Who was 1?",
        "answers": ["Ar(den|t)"],
        "regex": True,
    }


def test_questions_without_passages_are_read_where_a_passage_with_the_answer_was_found(
    tmp_path: Path,
) -> None:
    pairs = [
        {"id": str(n), "question": "where?", "answers": [f"town {n}"], "regex": False} for n in range(40)
    ]
    hits = [
        {"passages": [{"text": "no"}, {"text": f"In Town {n}." if n % 2 else "In it."}]} for n in range(40)
    ]
    for name, made in (("pairs", pairs), ("hits", hits), ("again", [question(1, 1)])):
        write(tmp_path / f"{name}.jsonl", made)
    RECIPE.mix(tmp_path)
    train = [row["id"] for row in RECIPE.rows(tmp_path / "asked.jsonl")]
    assert len(train) == len(set(train)) == 1 + RECIPE.PAIR_COPIES * 20
    assert {int(name.split("-")[0]) for name in train if name != "q1"} == set(range(1, 40, 2))


def test_the_mean_of_two_readers_has_the_weighted_mean_of_their_weights_and_the_stages_of_both(
    qa_folder, tmp_path: Path
) -> None:
    models = {name: load_model(qa_folder) for name in ("contrast", "asked")}
    for number, (name, model) in enumerate(models.items()):
        with torch.no_grad():
            model.span_reader.ends.weight += number
        model.stages = [{"stage": "mlm"}, {"stage": "finetune", "steps": number}]
        save_model(model, tmp_path / name)
    RECIPE.average(tmp_path, "contrast", "asked", 0.25, "both")
    both = load_model(tmp_path / "both")
    torch.testing.assert_close(
        both.span_reader.ends.weight, models["contrast"].span_reader.ends.weight + 0.25
    )
    assert torch.equal(both.span_reader.ends.bias, models["asked"].span_reader.ends.bias)
    assert [stage.get("steps") for stage in both.stages] == [None, 0, 1]


NAMES = {
    label: [f"{label.capitalize()} {letter}" for letter in "ABCDEFGHIJKLMNOPQRST"]
    for label in ("PERSON", "GPE", "ORG", "WORK_OF_ART", "EVENT", "PRODUCT", "FAC", "LOC")
}


@given(st.integers(0, 10**6))
def test_a_question_about_a_made_up_table_names_the_one_row_that_has_its_answer(seed: int) -> None:
    generator = random.Random(seed)
    table = ROWS.table("7", NAMES, generator)
    asked = ROWS.question("7-0", table, generator)
    for passage, row in zip(table.passages, table.cells, strict=True):
        cells = dict(cell.split(": ", 1) for cell in passage["text"].removesuffix(".").split("; "))
        assert sorted(cells) == sorted(table.headings) and sorted(cells.values()) == sorted(row)
    if asked is None:
        return
    number = [passage["id"] for passage in table.passages].index(asked["passage_id"])
    (answer,) = asked["answers"]
    row, text = table.cells[number], asked["question"].casefold()
    assert answer in row
    if answer == row[0]:  # the question asks for the name of the row
        named_by = [place for place, cell in enumerate(row) if place and cell.casefold() in text]
    else:
        named_by = [0] if row[0].casefold() in text else []
    assert any([other[place] for other in table.cells].count(row[place]) == 1 for place in named_by)


def test_names_in_made_up_tables_are_those_that_were_tagged(tiny_kb) -> None:
    names = ROWS.names_of(tiny_kb, random.Random(0))
    assert {(label, name) for label, all_of_it in names.items() for name in all_of_it} <= {
        (label, passage.text[start:end]) for passage in tiny_kb for start, end, label in passage.spans
    }
    assert names


def test_the_reader_of_rows_also_reads_prose_and_is_judged_by_other_rows(tmp_path: Path) -> None:
    write(tmp_path / "row_questions.jsonl", [{**question(n, n), "id": f"row-{n}"} for n in range(250)])
    write(tmp_path / "asked.jsonl", [{**question(n, n), "id": f"asked-{n}"} for n in range(30)])
    write(tmp_path / "steering.jsonl", [{**question(n, n), "id": f"dev-{n}"} for n in range(20)])
    RECIPE.mix_rows(tmp_path)
    train, dev = (
        {row["id"] for row in RECIPE.rows(tmp_path / f"{name}.jsonl")} for name in ("tabled", "tabled_dev")
    )
    assert len(train) == 80 and len(dev) == 220 and not train & dev


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(file, "wt") if file.suffix == ".xz" else file.open("w") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("stage", COMMANDS)
def test_every_stage_is_a_command_with_settings_of_that_command(stage: str) -> None:
    args = cli._parser().parse_args(shlex.split(stage))
    if args.section:
        assert settings(args, config_classes()[args.section])


def test_every_stage_uses_what_is_prepared_or_what_an_earlier_one_makes() -> None:
    there = {
        f"{name}.jsonl" for name in ("paragraphs", "articles", "train", "steering", "calibration", "pairs")
    }
    for product, stage in RECIPE.STAGES:
        words = shlex.split(stage) if isinstance(stage, str) else []
        used = {
            words[i + 1]
            for i, word in enumerate(words)
            if word in {"--kb", "--model", "--init", "--train", "--dev", "--questions"}
        }
        assert used <= there, stage
        there |= {product, "tabled_dev.jsonl"} if product == "tabled.jsonl" else {product}


def test_encoder_of_the_mini_recipe_has_half_the_bits_and_names_its_text(tmp_path: Path) -> None:
    packaged = Path(encoder_folder("package:realm-mini"))
    shutil.copytree(packaged, tmp_path / "whole")
    weights = {name: value.float() for name, value in load_file(packaged / "model.safetensors").items()}
    save_file(weights, tmp_path / "whole/model.safetensors", metadata={"format": "pt"})
    MINI.describe("whole", "described", ["mine.txt"], tmp_path)
    MINI.halve("described", "small", tmp_path)
    check_folder(tmp_path / "small")
    assert encoder_held_out(str(tmp_path / "small"), ["mine.txt"])
    assert not encoder_held_out(str(tmp_path / "small"), ["package:factbook"])
    for name, value in load_file(tmp_path / "small/model.safetensors").items():
        assert value.dtype == torch.float16 and torch.equal(value.float(), weights[name])
    assert not list(tmp_path.glob("*.part"))


def test_questions_with_passages_come_from_the_files_of_squad_and_qed(tmp_path: Path) -> None:
    recipe = load("reading_questions")
    answers = [{"text": "Arden", "answer_start": 0}, {"text": "Arden", "answer_start": 0}]
    pairs = [
        {"id": "a", "question": "Which town?", "answers": answers},
        {"id": "b", "question": "Which river?", "answers": [{"text": "Tamm"}]},
        {"id": "c", "question": "Which sea?", "answers": []},
    ]
    paragraph = {"context": "Arden lies on the Tamm.", "qas": pairs}
    nested = {"version": "1.1", "data": [{"title": "Arden_(town)", "paragraphs": [paragraph]}]}
    squad = tmp_path / "train-v1.1.json"
    squad.write_text(json.dumps(nested))
    recipe.main(squad, tmp_path / "new" / "passages.jsonl.xz", tmp_path / "questions.jsonl")
    with lzma.open(tmp_path / "new" / "passages.jsonl.xz", "rt") as file:
        (found,) = map(json.loads, file)
    assert found == {"id": "train-v1-0", "title": "Arden (town)", "text": "Arden lies on the Tamm."}
    assert [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()] == [
        {"id": "a", "question": "Which town?", "answers": ["Arden"], "passage_id": "train-v1-0"},
        {"id": "b", "question": "Which river?", "answers": ["Tamm"], "passage_id": "train-v1-0"},
    ]

    def qed(number: int, kind: str, *answers: list[str]) -> str:
        row = {
            "example_id": number,
            "title_text": "Tamm",
            "question_text": "how long is the tamm\u2028",
            "paragraph_text": "The Tamm 's length ( in 1900 ) was 40 km , `` at most '' .",
            "original_nq_answers": [[{"string": one} for one in spans] for spans in answers],
            "annotation": {"explanation_type": kind},
        }
        return json.dumps(row)

    lines = [
        qed(
            1,
            "single_sentence",
            ["40 km"],
            ["length ( in 1900 )", "40 km"],
            ["40 km , `` at most ''"],
            ["40 km"],
        ),
        qed(2, "none", ["1900"]),
        qed(3, "multi_sentence", ["the Arden"]),
    ]
    (tmp_path / "qed-train.jsonlines").write_text("\n".join(lines).replace("\\u2028", "\u2028"))
    recipe.main(tmp_path / "qed-train.jsonlines", tmp_path / "p.jsonl", tmp_path / "q.jsonl")
    (found,) = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    text = 'The Tamm\'s length (in 1900) was 40 km, "at most".'
    assert found == {"id": "qed-train-0", "title": "Tamm", "text": text}
    (asked,) = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().strip().split("\n")]
    assert asked == {
        "id": "qed1",
        "question": "how long is the tamm\u2028",
        "answers": ["40 km", '40 km, "at most"'],
        "passage_id": "qed-train-0",
    }
