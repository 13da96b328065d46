"""Interrupted evaluations, compared with evaluations that were not interrupted."""

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from realm import cli
from realm.qa import question_sets
from realm.qa.kept_answers import kept_answers
from realm.qa.pipeline import Answerer
from realm.qa.predictions import Prediction
from realm.qa.question_files import Question
from realm.store.knowledge_base import KnowledgeBase
from realm.systems.system import Found, predict
from tests.conftest import RIVERS, TOWNS

Evaluate = Callable[..., tuple[int, dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture
def evaluate(tiny_kb, qa_folder, tmp_path: Path, capsys) -> Evaluate:
    """Runs the command -> exit code, report and predictions; the times are left out."""
    asked, saved = tmp_path / "q.jsonl", tmp_path / "made" / "predictions.jsonl"
    questions = [
        {"id": n, "question": f"on which river lies {TOWNS[n % 8]}{'?' * n}", "answers": [RIVERS[n % 4]]}
        for n in range(70)
    ]
    asked.write_text("".join(json.dumps(one) + "\n" for one in questions))
    words = ["evaluate", "--kb", tiny_kb.folder, "--model", qa_folder, "--questions", asked, "--json"]

    def run(*more: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
        saved.unlink(missing_ok=True)
        code = cli.main([*map(str, words), "--save-predictions", str(saved), "--set", "device=cpu", *more])
        out = capsys.readouterr().out.splitlines()
        lines = map(json.loads, saved.read_text().splitlines()) if saved.exists() else ()
        predictions = [{name: one[name] for name in one if name != "ms"} for one in lines]
        assert (tmp_path / "made" / "predictions.jsonl.unfinished").exists() == (code != 0)
        return code, json.loads(out[-1]) if code == 0 else {}, predictions

    return run


def counted(monkeypatch: pytest.MonkeyPatch, end: int) -> list[str]:
    """The questions that are answered from now on; question number `end` ends the command, as Ctrl-C does."""
    asked: list[str] = []
    answer = Answerer.answer_from

    def answer_from(self: Answerer, questions: Sequence[str], *rest: Any) -> Any:
        asked.extend(questions)
        if len(asked) > end:
            raise KeyboardInterrupt
        return answer(self, questions, *rest)

    monkeypatch.setattr(Answerer, "answer_from", answer_from)
    return asked


@pytest.mark.parametrize("flags", [[], pytest.param(["--unanswerable"], marks=pytest.mark.slow)])
def test_an_interrupted_evaluation_asks_only_the_other_questions_and_reports_the_same(
    flags: list[str], evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(*flags)
    times = 1 + len(flags)
    with monkeypatch.context() as patch:
        counted(patch, 40 * times)
        assert evaluate(*flags) == (130, {}, [])
    with monkeypatch.context() as patch:
        asked = counted(patch, 1000)
        assert evaluate(*flags) == whole
        assert len(asked) == (70 - 32) * times
    asked = counted(monkeypatch, 1000)
    assert evaluate(*flags) == whole
    assert len(asked) == 70 * times  # nothing is kept of a finished evaluation


def test_an_evaluation_that_is_interrupted_during_its_report_asks_nothing_again(
    evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate()
    with monkeypatch.context() as patch:
        patch.setattr(question_sets, "score_predictions", MagicMock(side_effect=KeyboardInterrupt))
        assert evaluate()[0] == 130
    asked = counted(monkeypatch, 1000)
    assert evaluate() == whole and asked == []


@pytest.mark.parametrize(
    ("change", "times"),
    [
        (["--method", "bm25"], 1),
        (["--set", "read=3"], 1),
        (["--unanswerable"], 2),
        (["--set", "threshold=0.9"], 1),
    ],
)
def test_answers_of_an_evaluation_with_other_settings_are_not_used(
    change: list[str], times: int, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        counted(patch, 40)
        evaluate()
    asked = counted(monkeypatch, 1000)
    assert evaluate(*change)[0] == 0
    assert len(asked) == 70 * times


def test_answers_of_other_weights_are_not_used(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        counted(patch, 40)
        evaluate()
    load = Answerer.load

    def changed(*words: Any) -> Answerer:
        answerer = load(*words)
        assert answerer.model.span_reader is not None
        next(iter(answerer.model.span_reader.parameters())).data += 0.01
        return answerer

    monkeypatch.setattr(Answerer, "load", changed)
    asked = counted(monkeypatch, 1000)
    assert evaluate()[0] == 0 and len(asked) == 70


def test_a_killed_evaluation_keeps_the_answers_of_all_finished_batches(tmp_path: Path) -> None:
    script = (
        "import os, sys; from tests.qa.test_kept_answers import *;"
        "context = kept_answers(sys.argv[1], 'a'); kept = context.__enter__();"
        "[next(answers) for answers in [predict(Echo(), NO_KB, QUESTIONS, kept)] for _ in range(33)];"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", script, tmp_path / "p"], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    system = Echo()
    answers(tmp_path, system, QUESTIONS, "a", 40)
    assert system.asked == []  # 40 questions are three batches, and the third batch was finished


def test_other_files_with_the_name_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "p.unfinished").write_text("my notes, which are no database")
    with kept_answers(str(tmp_path / "p"), "a") as kept:
        assert len(list(predict(Echo(), NO_KB, QUESTIONS, kept))) == 40
    assert (tmp_path / "p.unfinished").read_text() == "my notes, which are no database"
    assert len(caplog.messages) == 1 and "cannot be used" in caplog.text


def test_a_refused_evaluation_leaves_no_file(tiny_kb, tiny_model_folder, tmp_path: Path, capsys) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "who?", "answers": ["a"]}')
    words = [
        "evaluate",
        "--kb",
        tiny_kb.folder,
        "--model",
        tiny_model_folder,
        "--questions",
        tmp_path / "q.jsonl",
    ]
    assert cli.main([*map(str, words), "--save-predictions", str(tmp_path / "made" / "p.jsonl")]) == 2
    assert not (tmp_path / "made").exists()


class Echo:
    """A system whose answer is the question."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def answer(self, questions: Sequence[str]) -> list[Found]:
        self.asked += questions
        return [Found(question, 0.5) for question in questions]


NO_KB = cast(KnowledgeBase, None)
"""An answer of `Echo` has no passage, so no knowledge base is needed."""
QUESTIONS = [Question(str(n), f"which? {n}", ("a",)) for n in range(40)]


def answers(
    folder: Path, system: Echo, questions: Sequence[Question], identity: str, most: int
) -> list[Prediction]:
    """Predictions of an evaluation that is interrupted after `most` predictions."""
    found: list[Prediction] = []

    def interrupted() -> None:
        with kept_answers(str(folder / "p"), identity) as kept:
            found.extend(islice(predict(system, NO_KB, questions, kept), most))
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    return found


def test_a_system_answers_each_question_once(tmp_path: Path) -> None:
    first, second = Echo(), Echo()
    some = answers(tmp_path, first, QUESTIONS, "a", 20)
    found = answers(tmp_path, second, QUESTIONS, "a", 40)
    assert found[:20] == some and [one.answer for one in found] == [one.question for one in QUESTIONS]
    assert first.asked + second.asked == [one.question for one in QUESTIONS]
    other, changed = Echo(), Echo()
    answers(tmp_path, other, QUESTIONS, "b", 40)
    answers(tmp_path, changed, [QUESTIONS[0]._replace(answers=("b",)), *QUESTIONS[1:]], "a", 40)
    assert (len(other.asked), len(changed.asked)) == (40, 16)


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[1]", b'{"prediction": {"id": 1}, "certainty": []}', b"\xff"]
)
def test_damaged_answers_are_asked_again(value: bytes, tmp_path: Path) -> None:
    whole = answers(tmp_path, Echo(), QUESTIONS, "a", 40)
    with closing(sqlite3.connect(tmp_path / "p.unfinished")) as database, database:
        database.execute("UPDATE answers SET value = ?", [value])
    again = Echo()
    found = answers(tmp_path, again, QUESTIONS, "a", 40)
    assert [one.answer for one in found] == [one.answer for one in whole] and len(again.asked) == 40
