"""Sources that a fit drops: their documents leave the workspace."""

from pathlib import Path

import pytest

import realm
from realm import cli
from realm.errors import ConflictError
from realm.folders import only_holder
from realm.qa.question_files import read_questions
from realm.store.knowledge_base import KnowledgeBase
from realm.workspace.fit import run
from realm.workspace.settings import FitConfig
from realm.workspace.sources import WATCH_LOCK
from realm.workspace.watch import Watcher
from tests.workspace.conftest import text_of
from tests.workspace.test_fit import WS, saved


def document_ids() -> set[str]:
    return {document.id for document in KnowledgeBase.open(WS / "kb").documents()}


@pytest.mark.usefixtures("light")
def test_a_dropped_source_takes_its_documents_with_it(
    home: Path, config: FitConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    realm.load(WS).add([{"id": "own", "title": "Own", "text": "Zelda added this sentence."}])
    kept = {"own"} | {id for id in document_ids() if id.startswith("docs/north/")}
    assert len(kept) < len(document_ids())
    words = ["fit", "docs/north", "--out", "towns", "--drop", "docs/", "--start", config.start]
    for setting in ("tagger=tiny", "held_out=0.3", "device=cpu"):
        words += ["--set", setting]
    for told in ("deleted", "up to date"):
        assert cli.main(words) == 0
        assert told in "".join(capsys.readouterr())
        assert document_ids() == kept and saved()["sources"] == ["docs/north"]
    asked = read_questions(WS / "questions.jsonl")
    assert {one.document_id for one in asked} <= kept
    assert saved()["tests"]["made_questions"]["n"] == len(asked) > 0
    assert cli.main([*words, "--drop", "docs/north"]) == 2  # although nothing has changed
    assert "docs/north is a source and is dropped" in capsys.readouterr().err


@pytest.mark.usefixtures("light")
def test_a_watched_source_is_dropped_when_its_watcher_has_ended_and_can_be_watched_again(
    home: Path, config: FitConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def watch_more() -> set[str]:
        watcher = Watcher(WS, ["more"], settle=0, device="cpu")
        watcher.look(0)
        return document_ids() - before

    before = document_ids()
    Path("more").mkdir()
    Path("more/Oakham.txt").write_text(text_of("Oakham", 1848))
    assert watch_more() == {"more/Oakham.txt"}
    run(WS, ["docs"], config)
    assert document_ids() > before  # a fit without the source leaves what was watched
    with only_holder(WS / WATCH_LOCK, ""), pytest.raises(ConflictError, match="while `realm watch` runs"):
        run(WS, ["docs"], config, dropped=["more"])
    run(WS, ["docs"], config, dropped=["more/", "typo"])
    assert document_ids() == before
    assert [line for line in caplog.messages if "nothing of it is deleted" in line] == [
        "typo is no source of towns: nothing of it is deleted"
    ]
    assert watch_more() == {"more/Oakham.txt"}
