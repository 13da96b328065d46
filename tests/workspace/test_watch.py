"""A watched folder against a dictionary of its files, and against everything that may happen to the files and the process."""

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from realm import cli
from realm.documents.reading import read_documents
from realm.errors import InputError
from realm.files import write_json
from realm.folders import only_holder
from realm.model.manifest import read_manifest
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document
from realm.workspace import watch as watch_module
from realm.workspace.sources import WatchedJson, listed_documents, watched_documents
from realm.workspace.watch import Watcher
from tests.schemas import assert_holds

TOWNS = 14
"""Number of documents of the workspace that do not come from the watched folder."""


def text(name: str, number: int) -> str:
    return f"{name} is a town. It has {number} inns."


def watched(workspace: Path) -> dict[str, str]:
    """Title -> text of all documents with a path, which are those of files."""
    return {p.title: p.text for p in KnowledgeBase.open(workspace / "kb") if "path" in p.fields}


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "sub").mkdir(parents=True)
    (folder / "Oakham.txt").write_text(text("Oakham", 2))
    return folder


def looks(watcher: Watcher, start: float = 0.0) -> None:
    """Three looks, between which nothing changes."""
    for second in range(0, 9, 3):
        watcher.look(start + second)


def test_the_workspace_follows_the_files(towns: Path, docs: Path) -> None:
    draw, files = random.Random(0), {"Oakham": text("Oakham", 2)}
    watcher, now = Watcher(towns, [str(docs)]), 0.0
    for number in range(12):
        for _ in range(draw.randint(1, 4)):
            name = draw.choice("Oakham Exton Ryhall Ketton Essendine".split())
            file = docs / ("sub" if name == "Ryhall" else "") / f"{name}.txt"
            if name in files and draw.random() < 0.4 and len(files) > 1:
                file.unlink()
                del files[name]
            else:
                files[name] = text(name, number)
                file.write_text(files[name])
        if draw.random() < 0.3:
            watcher = Watcher(towns, [str(docs)])
        looks(watcher, now)
        now += 100
        assert watched(towns) == files
        assert len(KnowledgeBase.open(towns / "kb").documents()) == TOWNS + len(files)
    kb = KnowledgeBase.open(towns / "kb")
    assert kb.verify() == []
    # Tests of other models leave indexes in the knowledge base that is copied here; a watcher updates only that of its model.
    own = read_manifest(towns / "model")["passage_fingerprint"]
    assert not [line for line in kb.lagging() if own in line]
    assert_holds(WatchedJson, json.loads((towns / "watched.json").read_text()))


def test_a_new_version_of_a_dataset_is_taken_over(towns: Path, docs: Path) -> None:
    rows = {name: text(name, number) for number, name in enumerate(("Exton", "Ryhall", "Ketton"))}
    table = pa.table({"title": list(rows), "text": list(rows.values()), "path": ["p"] * 3})
    lance.write_dataset(table.slice(0, 2), docs / "towns.lance")
    watcher, oakham = Watcher(towns, [str(docs)]), {"Oakham": text("Oakham", 2)}
    looks(watcher)
    assert watched(towns) == {**oakham, "Exton": rows["Exton"], "Ryhall": rows["Ryhall"]}
    lance.write_dataset(table.slice(2), docs / "towns.lance", mode="append")
    lance.dataset(docs / "towns.lance").delete("title = 'Exton'")
    looks(watcher, 100)
    assert watched(towns) == {**oakham, "Ryhall": rows["Ryhall"], "Ketton": rows["Ketton"]}
    shutil.rmtree(docs / "towns.lance")
    looks(watcher, 200)
    assert watched(towns) == oakham


def test_a_file_is_read_when_it_has_been_the_same_for_some_seconds(towns: Path, docs: Path) -> None:
    watcher = Watcher(towns, [str(docs)], settle=2)
    watcher.look(0)
    watcher.look(1.5)
    assert watched(towns) == {}
    (docs / "Oakham.txt").write_text(text("Oakham", 3))
    watcher.look(2.5)  # the file has changed again
    watcher.look(4)
    assert watched(towns) == {}
    watcher.look(4.5)
    assert watched(towns) == {"Oakham": text("Oakham", 3)}
    (docs / "Oakham.txt").unlink()  # as an editor does, which then writes a new file
    watcher.look(5)
    (docs / "Oakham.txt").write_text(text("Oakham", 4))
    watcher.look(7)
    assert watched(towns) == {"Oakham": text("Oakham", 3)}
    watcher.look(9)
    assert watched(towns) == {"Oakham": text("Oakham", 4)}


def test_a_file_that_changes_while_it_is_read_is_read_again(
    towns: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Watcher._read

    def read(self: Watcher, *more: object) -> Iterator[object]:
        found = list(real(self, *more))
        monkeypatch.setattr(Watcher, "_read", real)
        (docs / "Oakham.txt").write_text(text("Oakham", 99))
        return iter(found)

    monkeypatch.setattr(Watcher, "_read", read)
    watcher = Watcher(towns, [str(docs)])
    watcher.look(0)
    watcher.look(3)
    assert watched(towns) == {}
    looks(watcher, 10)
    assert watched(towns) == {"Oakham": text("Oakham", 99)}


@pytest.mark.parametrize("step", ["add", "_write"])
def test_after_a_kill_the_next_watcher_completes_the_change(
    towns: Path, docs: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(Watcher(towns, [str(docs)]))
    (docs / "Oakham.txt").unlink()
    (docs / "Exton.txt").write_text(text("Exton", 5))
    watcher = Watcher(towns, [str(docs)])

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    if step == "_write":  # the second time, after all changes
        writes = iter([watcher._write, kill])
        monkeypatch.setattr(watcher, "_write", lambda: next(writes)())
    else:
        monkeypatch.setattr(watcher._knowledge, step, kill)
    with pytest.raises(KeyboardInterrupt):
        looks(watcher)
    (docs / "Exton.txt").rename(docs / "Ryhall.txt")  # while no watcher runs
    looks(Watcher(towns, [str(docs)]))
    assert watched(towns) == {"Ryhall": text("Exton", 5)}


@pytest.mark.parametrize("moment", ["before the look", "during the look"])
def test_a_document_that_another_process_deleted_does_not_block_other_changes(
    towns: Path, docs: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = Watcher(towns, [str(docs)])
    looks(watcher)
    (id,) = watched_documents(towns, [str(docs)])

    def delete() -> None:
        KnowledgeBase.open(towns / "kb").delete([id])

    if moment == "before the look":
        delete()
    else:
        real = watcher._knowledge.add
        monkeypatch.setattr(watcher._knowledge, "add", lambda *given: delete() or real(*given))
    (docs / "Oakham.txt").unlink()
    (docs / "Exton.txt").write_text(text("Exton", 5))
    looks(watcher, 100)
    assert watched(towns) == {"Exton": text("Exton", 5)}


def test_shared_passages_stay_with_a_file_whose_document_has_another_id_now(towns: Path, docs: Path) -> None:
    """The id of a document without one is its title and a number, if other files have documents with this title."""
    shared = " ".join(f"Inn {number} is in the market town and in the capital." for number in range(12))

    def write(name: str, text: str) -> None:
        (docs / f"{name}.jsonl").write_text(json.dumps({"title": "Shared title", "text": text}) + "\n")

    write("a", "Exton is a town.")
    write("b", shared)
    watcher = Watcher(towns, [str(docs)])
    looks(watcher)
    write("c", f"{shared} Exton is another town.")
    looks(watcher, 100)
    (docs / "a.jsonl").unlink()
    looks(watcher, 200)
    (docs / "b.jsonl").unlink()
    looks(watcher, 300)
    looks(watcher, 400)
    found = " ".join(p.text for p in KnowledgeBase.open(towns / "kb") if p.title == "Shared title")
    assert "market town and in the capital. Inn 11 is" in found and "Exton is another town." in found


@pytest.mark.parametrize("moment", ["is there", "is away"])
def test_passages_that_files_share_stay_until_the_last_of_these_files_is_gone(
    towns: Path, docs: Path, moment: str, tmp_path: Path
) -> None:
    more, away = tmp_path / "more", tmp_path / "away"
    more.mkdir()
    sentences = [f"Inn {number} is in the market town and in the capital." for number in range(12)]

    def write(file: Path, *rest: str) -> None:
        file.write_text("\n\n".join(["Shared title", " ".join(sentences), *rest]))

    def found() -> str:
        return " ".join(p.text for p in KnowledgeBase.open(towns / "kb") if p.title == "Shared title")

    write(docs / "b.txt")
    looks(Watcher(towns, [str(docs)]))
    write(more / "a.txt", "Exton is another town.")
    watcher = Watcher(towns, [str(docs), str(more)])
    looks(watcher)
    assert len(KnowledgeBase.open(towns / "kb").incomplete([(more / "a.txt").as_posix()])) == 1
    if moment == "is away":
        more.rename(away)
    (docs / "b.txt").write_text("Shared title\n\nThe market is closed.")  # only b.txt changes
    looks(watcher, 100)
    if moment == "is away":
        away.rename(more)
        looks(watcher, 200)
    assert all(sentence in found() for sentence in [*sentences, "Exton is another town."])
    (more / "a.txt").unlink()
    write(more / "c.txt", "Exton is a hamlet.")  # a renamed file
    looks(watcher, 300)
    assert all(sentence in found() for sentence in [*sentences, "Exton is a hamlet."])
    write(docs / "d.txt")
    looks(watcher, 400)
    (more / "c.txt").unlink()
    (more / "e.txt").write_text("One.")
    (docs / "d.txt").unlink()
    looks(watcher, 500)
    assert found() == "The market is closed."


def test_the_documents_of_a_missing_folder_stay(towns: Path, docs: Path, tmp_path: Path, caplog) -> None:
    more = tmp_path / "more"
    more.mkdir()
    (more / "Exton.txt").write_text(text("Exton", 1))
    watcher = Watcher(towns, [str(docs), str(more)])
    looks(watcher)
    docs.rename(tmp_path / "away")
    (more / "Exton.txt").write_text(text("Exton", 2))
    looks(watcher, 100)
    assert watched(towns) == {"Oakham": text("Oakham", 2), "Exton": text("Exton", 2)}
    assert len([line for line in caplog.messages if "its documents stay" in line]) == 1
    with pytest.raises(InputError, match="no such file or folder"):
        Watcher(towns, [str(docs)])
    looks(Watcher(towns, [str(more)]), 200)  # the documents of a folder that is not watched now stay too
    assert "Oakham" in watched(towns)
    shutil.move(tmp_path / "away", docs)
    (docs / "Oakham.txt").unlink()
    (docs / "Ketton.txt").write_text(text("Ketton", 1))
    looks(watcher, 300)
    assert watched(towns).keys() == {"Ketton", "Exton"}


def test_records_come_and_go_with_their_lines_and_keep_ids_apart(towns: Path, tmp_path: Path) -> None:
    docs = tmp_path / "records"
    docs.mkdir()

    def write(name: str, *records: dict[str, str]) -> None:
        (docs / name).write_text("".join(json.dumps(one) + "\n" for one in records))

    write(
        "a.jsonl",
        {"title": "Oakham", "text": text("Oakham", 1)},
        {"id": "x", "title": "X", "text": "X is in it."},
    )
    write(
        "b.jsonl",
        {"title": "Oakham", "text": text("Oakham", 2)},
        {"id": "x", "title": "Y", "text": "Y is in it."},
    )
    watcher = Watcher(towns, [str(docs)])
    looks(watcher)
    kb = KnowledgeBase.open(towns / "kb")
    assert [one.id for one in kb.documents()][TOWNS:] == ["Oakham", "x", "Oakham (2)"]
    write("a.jsonl", {"id": "x", "title": "X", "text": "X is in it."})
    (docs / "broken.jsonl").write_text("{")
    looks(watcher, 100)
    assert {one.id for one in KnowledgeBase.open(towns / "kb").documents()[TOWNS:]} == {"x", "Oakham (2)"}


def test_the_parts_of_a_long_table_go_with_their_file(
    towns: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_short_documents(sources: list[str], _: int, *more: Any, **named: Any) -> Iterator[Document]:
        return read_documents(sources, 60, *more, **named)

    monkeypatch.setattr(watch_module, "read_documents", with_short_documents)
    table = docs / "inns.csv"
    watcher = Watcher(towns, [str(docs)])
    for start, number in ((0, 5), (100, 3), (200, 2), (300, 0)):
        rows = "".join(f"Inn {row},Oakham\n" for row in range(number))
        table.write_text(f"name,town\n{rows}") if rows else table.unlink()
        looks(watcher, start)
        ids = {
            one.id for one in KnowledgeBase.open(towns / "kb").documents() if one.id.startswith(str(table))
        }
        places = {5: {":2-3", ":4-5", ":6-6"}, 3: {":2-3", ":4-4"}, 2: {""}, 0: set[str]()}
        assert ids == {f"{table}{place}" for place in places[number]}


def test_documents_of_the_last_fit_whose_files_are_gone_are_deleted_at_the_first_start(
    towns: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "Exton.txt").write_text(text("Exton", 1))
    looks(Watcher(towns, [str(docs)]))
    ids = sorted(watched_documents(towns, [str(docs)]))
    assert ids == [(docs / f"{name}.txt").as_posix() for name in ("Exton", "Oakham")]
    assert watched_documents(towns, ["elsewhere"]) == set()
    write_json(towns / "documents.json", {"documents": ids})  # as after a fit
    (towns / "watched.json").unlink()
    (docs / "Exton.txt").unlink()
    monkeypatch.setattr(watch_module, "read_report", lambda folder: {"sources": [str(docs)]})
    looks(Watcher(towns, []))
    assert watched(towns) == {"Oakham": text("Oakham", 2)}
    assert listed_documents(towns) == set(ids)


def test_a_watcher_that_never_pauses_is_refused(docs: Path, capsys) -> None:
    assert cli.main(["watch", str(docs), "--in", "towns", "--every", "0"]) == 2
    assert "'0' is below 0.05 seconds" in capsys.readouterr().err


def test_without_sources_or_with_a_package_nothing_is_watched(towns: Path) -> None:
    with pytest.raises(InputError, match="name the files and folders"):
        Watcher(towns, [])
    with pytest.raises(InputError, match="does not change"):
        Watcher(towns, ["package:factbook"])


@pytest.mark.parametrize("name", ["hf:OWNER/NAME", "elsewhere"])
def test_only_a_workspace_on_this_computer_is_watched(name: str, docs: Path, capsys) -> None:
    assert cli.main(["watch", str(docs), "--in", name]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith(f"realm: {name} is ") and "realm fit" in message


def test_a_second_watcher_is_refused_until_the_first_ends(towns: Path, docs: Path, capsys) -> None:
    ended = threading.Event()
    ended.set()
    with only_holder(towns / watch_module.WATCH_LOCK, ""):
        assert cli.main(["watch", str(docs), "--in", str(towns), "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "already runs" in message
    watch_module.watch(towns, [str(docs)], ended, device="cpu")


def test_the_command_takes_changes_over_until_it_is_interrupted(towns: Path, docs: Path, caplog) -> None:
    def interrupt() -> None:
        while not watched(towns):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    words = ["watch", str(docs), "--in", str(towns), "--every", "0.05", "--settle", "0.1", "--device", "cpu"]
    assert cli.main(words) == 0
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert watched(towns) == {"Oakham": text("Oakham", 2)}
