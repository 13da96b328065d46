"""Published question sets are recognised by content, not by file name or format."""

import json
from pathlib import Path

import pytest

from realm.compare import official
from realm.qa.question_files import Question, read_questions


def test_the_same_questions_have_one_digest_in_any_order_and_format(tmp_path: Path) -> None:
    lines = [
        {"question": "who wrote it?", "answers": ["ann", "bo"]},
        {"question": "when?", "answers": ["1900"]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.tsv").write_text("When? \t['1900']\nwho wrote it?\t['bo', 'ann']\n")
    first, second = (read_questions(tmp_path / name) for name in ("a.jsonl", "b.tsv"))
    assert official.content_digest(first) == official.content_digest(second)
    assert official.content_digest(first[:1]) != official.content_digest(first)
    assert official.content_digest(
        [first[0]._replace(answers=("ann",)), first[1]]
    ) != official.content_digest(first)


def test_a_published_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [Question("1", "who?", ("x",))]
    assert official.recognised(questions) is None
    monkeypatch.setitem(official.PUBLISHED, official.content_digest(questions), "a published set")
    assert official.recognised(questions) == "a published set"
