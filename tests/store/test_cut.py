"""Settings of a build that change where passages begin: later additions and previews follow the same settings."""

import json
from pathlib import Path

import pytest

from realm import cli
from realm.errors import RealmError
from realm.settings import read_config
from realm.store.knowledge_base import KnowledgeBase, KnowledgeBaseConfig

MARKDOWN = """# Manual

Read this first. It is short.

## Install

Use apt. Then restart the machine. Then read the log of the machine, which is long. Then log in again.

## Use

Press the button.
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("docs/a.md").write_text(MARKDOWN)
    record = {"title": "Long", "text": "It has a sentence. " * 12, "year": 2020}
    Path("docs/b.jsonl").write_text(json.dumps(record) + "\n")
    Path("docs/c.csv").write_text("town,river\nArden,Tay\nKelso,Tweed\n")
    return Path("docs")


def passages(kb: KnowledgeBase) -> list[tuple[str, str]]:
    return [(one.title, one.text) for one in kb]


@pytest.mark.parametrize(
    "chosen",
    [[], ["cut=rows"], ["cut=headings"], ["cut=documents"], ["passage_overlap=8", "passage_tokens=24"]],
)
def test_a_preview_a_build_and_an_addition_make_the_same_passages(
    source: Path, chosen: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = [word for one in ["passage_tokens=32", *chosen] for word in ("--set", one)] + ["--tagger", "rules"]
    assert cli.main(["kb", "preview", "docs", "--json", "--limit", "100", *more]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert cli.main(["kb", "build", "docs", "--out", "kb", *more]) == 0
    built = KnowledgeBase.open("kb")
    assert (
        dict.fromkeys((one["title"], one["text"]) for one in shown).keys()
        == dict.fromkeys(passages(built)).keys()
    )
    lengths = built.tokens.title.lengths + built.tokens.body.lengths + 3
    counted = {one["text"]: one["wordpieces"] for one in shown}
    assert [counted[text] for _, text in passages(built)] == lengths.tolist()
    assert (lengths.max() <= 32) == ("cut=documents" not in chosen)
    Path("start.jsonl").write_text(json.dumps({"title": "Start", "text": "It has text."}))
    assert cli.main(["kb", "build", "start.jsonl", "--out", "late", *more]) == 0
    assert cli.main(["kb", "add", "docs", "--kb", "late", "--tagger", "rules"]) == 0
    assert passages(KnowledgeBase.open("late"))[1:] == passages(built)
    if chosen == ["cut=headings"]:
        assert {title for title, _ in passages(built)} == {
            "Manual",
            "Manual > Install",
            "Manual > Use",
            "Long",
            "c",
        }
    rows = {"town: Arden; river: Tay.", "town: Kelso; river: Tweed."}
    assert rows.issubset(text for _, text in passages(built)) == (chosen == ["cut=rows"])
    if chosen == ["cut=documents"]:
        assert len(built) == 3


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at most half of passage_tokens"):
        KnowledgeBaseConfig(passage_tokens=20, passage_overlap=11)
    with pytest.raises(RealmError, match="cut"):
        read_config(KnowledgeBaseConfig, None, "kb", ["cut=lines"])
