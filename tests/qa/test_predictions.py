"""Predictions in files: written by `realm evaluate`, scored again, and refused if they do not belong to the questions."""

import json
from pathlib import Path

import pytest

from realm import cli
from realm.errors import InputError
from realm.qa.predictions import Prediction, in_order, read_predictions, score_predictions, write_predictions
from realm.qa.question_files import Question
from tests.conftest import RIVERS, TOWNS

QUESTIONS = [
    {"id": f"q{n}", "question": f"on which river lies {town}?", "answers": [RIVERS[n % 4]]}
    for n, town in enumerate(TOWNS)
]


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    return file


def test_saved_predictions_give_the_same_report_and_name_their_evidence(
    tiny_kb, qa_folder, asked, tmp_path, capsys
) -> None:
    saved = tmp_path / "made" / "predictions.jsonl"
    words = ["evaluate", "--kb", str(tiny_kb.folder), "--questions", str(asked), "--json"]
    model = ["--model", str(qa_folder), "--set", "device=cpu", "--save-predictions", str(saved)]
    assert cli.main([*words, *model]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert cli.main([*words, "--predictions", str(saved)]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["confidence"] is None
    assert {k: v for k, v in first.items() if k != "confidence"} == {
        k: v for k, v in again.items() if k != "confidence"
    }
    text_of = {passage.id: passage.text for passage in tiny_kb}
    for line in map(json.loads, saved.read_text().splitlines()):
        assert text_of[line["passage_id"]][line["start"] : line["end"]] == line["answer"]
        assert line["passage_id"] in line["passages"][:5]


def test_scoring_rules_of_a_publication_change_what_counts(tiny_kb) -> None:
    passage = next(iter(tiny_kb))
    question = [Question("1", "which?", ("Caf\u00e9",))]
    predictions = [Prediction("1", "which?", "Cafe\u0301", passages=(passage.id,))]
    from realm.qa.scoring.metrics import SCORINGS

    right = {
        name: score_predictions(tiny_kb, predictions, question, rule).correct_N
        for name, rule in SCORINGS.items()
    }
    assert right["orqa"].all() and right["realm"].all()  # both forms are decomposed
    assert not right["squad"].any() and not right["dpr"].any()


def test_predictions_survive_a_file(tmp_path: Path) -> None:
    made = [
        Prediction("1", "who?", "Ada\u2028 L.", 1.5, "00ff", 3, 9, ("00ff", "01aa"), 2.25),
        Prediction("2", "when?", ""),
    ]
    write_predictions(tmp_path / "p.jsonl", made)
    assert read_predictions(tmp_path / "p.jsonl") == made


def test_a_missing_predictions_file_is_not_called_a_question_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no predictions file .*p\.jsonl"):
        read_predictions(tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('{"id": "1"}', "not a prediction"),
        ('{"id": "1", "answer": 3}', "must be texts"),
        ('{"id": "1", "answer": "a", "passages": 7}', "must be texts"),
        ('{"id": "1", "answer": "a"}\n{"id": "1", "answer": "b"}', "second prediction"),
        ("[]", "no predictions"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_predictions_are_refused_in_one_line(lines: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(lines)
    with pytest.raises(InputError, match=problem):
        read_predictions(tmp_path / "p.jsonl")


def test_predictions_of_other_questions_are_refused() -> None:
    questions = [Question("1", "who?", ("x",)), Question("2", "when?", ("y",))]
    with pytest.raises(InputError, match="no prediction for question '2'"):
        in_order([Prediction("1", "who?", "x")], questions, "p.jsonl")
    with pytest.raises(InputError, match="do not belong together"):
        in_order([Prediction("2", "where?", "x"), Prediction("1", "who?", "x")], questions, "p.jsonl")
    found = in_order([Prediction("2", "", "x"), Prediction("1", "who?", "y")], questions, "p.jsonl")
    assert [one.id for one in found] == ["1", "2"]


def test_passages_of_another_knowledge_base_are_refused(tiny_kb) -> None:
    questions = [Question("1", "who?", ("x",))]
    with pytest.raises(InputError, match="has no passage"):
        score_predictions(tiny_kb, [Prediction("1", "who?", "x", passages=("0" * 16,))], questions)
    with pytest.raises(InputError, match="16 hex digits"):
        score_predictions(tiny_kb, [Prediction("1", "who?", "x", passages=("nowhere",))], questions)
