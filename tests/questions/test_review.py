"""`realm questions --review`: a person accepts, corrects and rejects questions."""

import io
import json
import sys
from pathlib import Path

import pytest

from realm import cli
from realm.qa.question_files import Question, read_questions
from realm.questions.review import marked
from tests.towns import TOWNS, write_corpus


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A knowledge base in `kb`, and questions of its passages in `made.jsonl`."""
    home = tmp_path_factory.mktemp("review")
    write_corpus(home / "towns.jsonl")
    assert (
        cli.main(["kb", "build", str(home / "towns.jsonl"), "--out", str(home / "kb"), "--tagger", "rules"])
        == 0
    )
    assert cli.main(["questions", "--kb", str(home / "kb"), "--out", str(home / "made")]) == 0
    (home / "made.jsonl").write_text((home / "made" / "train.jsonl").read_text())
    return home


def test_made_questions_do_not_replace_other_questions(home, tmp_path, capsys) -> None:
    words = ["questions", "--kb", str(home / "kb"), "--out", str(tmp_path)]
    assert cli.main(words) == 0
    made = {name: (tmp_path / name).read_text() for name in ("train.jsonl", "dev.jsonl")}
    assert cli.main(words) == 0  # the same questions
    (tmp_path / "dev.jsonl").write_text(made["dev.jsonl"].replace("?", "??", 1))
    (tmp_path / "train.jsonl").unlink()
    capsys.readouterr()
    assert cli.main(words) == 2
    assert (
        "dev.jsonl exists already, and has other questions: choose another folder" in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["dev.jsonl"]
    assert (tmp_path / "dev.jsonl").read_text() != made["dev.jsonl"]


def review(home: Path, out: Path, typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    words = [
        "questions",
        "--kb",
        str(home / "kb"),
        "--review",
        str(home / "made.jsonl"),
        "--out",
        str(out),
        "--json",
    ]
    assert cli.main(words) == 0


def test_accepted_and_corrected_questions_become_a_question_file(home, tmp_path, monkeypatch, capsys) -> None:
    made, out = read_questions(home / "made.jsonl"), tmp_path / "reviewed.jsonl"
    review(home, out, "a\nc\nwho keeps bees?\nthe people | people of the town\nr\nq\n", monkeypatch)
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"accepted": 2, "rejected": 1, "left": len(made) - 3}
    assert made[0].question in shown.err and f"[[{made[0].answers[0]}]]" in shown.err
    kept = read_questions(out)
    assert kept[0][:3] == made[0][:3]
    assert kept[1].question == "who keeps bees?" and kept[1].answers == ("the people", "people of the town")
    assert [one.id for one in kept] == [one.id for one in made[:2]]
    originals = [json.loads(line)["original"] for line in out.read_text().splitlines()]
    assert originals == [one.question for one in made[:2]]
    assert [one.id for one in read_questions(tmp_path / "reviewed.jsonl.rejected")] == [made[2].id]
    assert cli.main(["evaluate", "--kb", str(home / "kb"), "--questions", str(out), "--method", "bm25"]) == 0


def test_a_stopped_review_continues_with_the_next_question(home, tmp_path, monkeypatch, capsys) -> None:
    made, out = read_questions(home / "made.jsonl"), tmp_path / "reviewed.jsonl"
    for typed in ("a\n", "r\n", "?\n\na\n" + "a\n" * len(made)):  # the end of the input stops a review too
        review(home, out, typed, monkeypatch)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "accepted": len(made) - 1,
        "rejected": 1,
        "left": 0,
    }
    assert [one.id for one in read_questions(out)] == [one.id for one in made if one.id != made[1].id]


def test_a_review_continues_after_a_question_with_a_unicode_line_end(
    home, tmp_path, monkeypatch, capsys
) -> None:
    made, out = read_questions(home / "made.jsonl"), tmp_path / "reviewed.jsonl"
    review(home, out, "c\nwho keeps\u2028bees?\n\nq\n", monkeypatch)
    review(home, out, "a\nq\n", monkeypatch)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["accepted"] == 2
    kept = read_questions(out)
    assert [one.question for one in kept] == ["who keeps\u2028bees?", made[1].question]


def test_the_last_decision_of_a_review_can_be_undone(home, tmp_path, monkeypatch, capsys) -> None:
    made, out = read_questions(home / "made.jsonl"), tmp_path / "reviewed.jsonl"
    review(home, out, "r\nr\nu\na\nu\nu\nu\na\n", monkeypatch)
    shown = capsys.readouterr()
    assert "there is no decision to undo" in shown.err
    assert json.loads(shown.out) == {"accepted": 1, "rejected": 0, "left": len(made) - 1}
    assert [one.id for one in read_questions(out)] == [made[0].id]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON\n", "is not a file of reviewed questions"),
        ('{"question": "who?"}\n', "is not a file of reviewed questions"),
        (
            '{"id": "other", "question": "who?", "answers": ["a"]}\n',
            "which is not among the questions to review",
        ),
    ],
)
def test_another_file_is_not_overwritten(home, tmp_path, capsys, text, message) -> None:
    out = tmp_path / "reviewed.jsonl"
    out.write_text(text)
    words = ["questions", "--kb", str(home / "kb"), "--review", str(home / "made.jsonl"), "--out", str(out)]
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err
    assert out.read_text() == text


def test_decisions_about_the_questions_of_another_file_are_not_used(
    home, tmp_path, monkeypatch, capsys
) -> None:
    """Both files have no ids, so the ids are line numbers."""
    out = tmp_path / "reviewed.jsonl"
    words = ["questions", "--kb", str(home / "kb"), "--out", str(out), "--review"]
    for name, asked in (("one", "who?"), ("two", "where?")):
        (tmp_path / name).write_text(json.dumps({"question": asked, "answers": ["a"]}) + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("c\nwho keeps bees?\n\n"))
    assert cli.main([*words, str(tmp_path / "one")]) == 0
    before = out.read_text()
    assert cli.main([*words, str(tmp_path / "one")]) == 0  # the corrected question still belongs to its file
    capsys.readouterr()
    assert cli.main([*words, str(tmp_path / "two")]) == 2
    err = capsys.readouterr().err
    assert "has a decision about the question 'who?', but the question '1' to review is 'where?'" in err
    assert err.count("\n") == 1 and out.read_text() == before


@pytest.mark.parametrize(("reviewed", "out"), [("q", "q"), ("q", "./link"), ("q.rejected", "q")])
def test_the_questions_to_review_are_not_overwritten_or_taken_for_decisions(
    home, tmp_path, monkeypatch, capsys, reviewed, out
) -> None:
    text = (home / "made.jsonl").read_text()
    (tmp_path / reviewed).write_text(text)
    (tmp_path / "link").symlink_to("q")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["questions", "--kb", str(home / "kb"), "--review", reviewed, "--out", out]) == 2
    assert "is also --review: name another file" in capsys.readouterr().err
    assert (tmp_path / reviewed).read_text() == text


@pytest.mark.parametrize(
    ("id", "answers", "shown"),
    [
        ("p1:38-43", ["India"], "An Indian sitarist from India went to [[India]]."),  # a made question
        ("7", ["India"], "An Indian sitarist from [[India]] went to India."),
        ("p1:38-43", ["Delhi", "India"], "An Indian sitarist from India went to [[India]]."),
        ("p1:38-43", ["Indian sitarist"], "An [[Indian sitarist]] from India went to India."),  # corrected
        ("7", ["Ind"], "An Indian sitarist from India went to India."),
    ],
)
def test_a_review_marks_the_place_from_which_the_question_was_made_or_whole_words(id, answers, shown) -> None:
    text = "An Indian sitarist from India went to India."
    assert marked(text, Question(id, "where did he go?", tuple(answers))) == shown


def test_every_town_has_a_question_to_review(home) -> None:
    asked = " ".join(question.question for question in read_questions(home / "made.jsonl"))
    assert sum(town.lower() in asked for town in TOWNS) >= len(TOWNS) // 2
