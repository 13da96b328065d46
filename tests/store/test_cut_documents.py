"""Documents are cut where they are tagged: the knowledge base is that of one process, whatever is killed."""

import json
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import lance
import pyarrow as pa
import pytest
import spacy

from realm.cli import main
from realm.store import ingest
from realm.store.ingest import annotated, cut_documents, split
from realm.store.knowledge_base import BuildResult, KnowledgeBase, KnowledgeBaseConfig, build
from realm.store.schema import to_passages
from realm.text import tagger_groups
from realm.text.corpus import Annotations, Document, Link, Passage, Section
from realm.text.fields import NO_FIELDS
from realm.text.salient_spans import Tagger, load_tagger
from realm.tokens.sentences import SentenceTokenizer
from realm.tokens.tokenizer import Tokenizer
from tests.store.tiny import TOKENIZER, TinyTagger

CONFIG = KnowledgeBaseConfig(passage_tokens=30, passage_overlap=8, commit_every=4000)


def documents(count: int) -> list[Document]:
    """Documents of all kinds; some have no text, and some are equal or have passages that are equal."""
    draw = Random(1)
    found = []
    for number in range(count):
        sentence = f"In {1900 + number % 90} the town had {number % 7} inns, [SEP] it is in Ruritania. "
        text = sentence * draw.choice([0, 1, 1, 2, 5, 40 * (number % 50 == 0)]) + "The end.\n\nThe end."
        links = (Link(3, "Year"), Link(12, "Town")) if number % 3 else None
        sections = (Section(0, "First"), Section(len(text) // 2, "Second")) if number % 5 == 4 else ()
        fields = {"year": 1900 + number} if number % 4 else NO_FIELDS
        title = "Same" if number % 11 == 0 else f"Town {number}"
        found.append(Document(title, text if number % 13 else " ", f"d{number}", links, fields, sections))
    return found


DOCUMENTS = documents(400)


def rules(processes: int) -> Tagger:
    return load_tagger("rules", processes)


def table(folder: Path) -> pa.Table:
    return lance.dataset(folder / "passages.lance").to_table()


def built(folder: Path, tagger: Tagger, read: Iterable[Document] = DOCUMENTS) -> BuildResult:
    return build(folder, read, CONFIG, TOKENIZER, tagger)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tagger_groups, "GROUP", 16)
    monkeypatch.setattr(tagger_groups, "PIECE_CHARS", 1000)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[pa.Table, BuildResult]:
    """The knowledge base and the result of one process."""
    folder = tmp_path_factory.mktemp("alone") / "kb"
    result = built(folder, rules(1))
    return table(folder), result


def test_passages_are_those_of_a_document_that_is_cut_alone() -> None:
    with annotated(DOCUMENTS, rules(1)) as found:
        expected = [
            (document, split(document, own, CONFIG, SentenceTokenizer(TOKENIZER))) for document, own in found
        ]
    for tagger in (rules(1), rules(3), TinyLike()):
        with cut_documents(iter(DOCUMENTS), tagger, CONFIG, TOKENIZER) as cut:
            assert [(document, with_document(document, rows)) for document, rows in cut] == expected
    assert not multiprocessing.active_children()


class TinyLike:
    """A tagger that has only the method that every tagger must have."""

    name = "rules"

    def annotate(self, texts: Iterable[str]) -> Iterator[Annotations]:
        return rules(1).annotate(texts)


def with_document(document: Document, rows: pa.RecordBatch) -> list[Passage]:
    owned = rows.append_column("document_id", pa.array([document.id] * len(rows), pa.string()))
    owned = owned.append_column("fields", pa.array([json.dumps(document.fields)] * len(rows)))
    return to_passages(owned)


def test_wordpieces_are_those_of_each_passage_alone(alone: tuple[pa.Table, BuildResult]) -> None:
    rows = alone[0].to_pylist()
    assert len(rows) > 500 and any("[SEP]" in row["text"] for row in rows)
    for row in rows:
        (body,) = TOKENIZER.encode_with_offsets([row["text"]])
        assert (row["title_ids"], row["body_ids"]) == (TOKENIZER.encode([row["title"]])[0], body.ids)
        sentences = [row["text"][start:] for start in row["sentence_starts"]]
        assert [body.ids[piece:] for piece in row["sentence_pieces"]] == TOKENIZER.encode(sentences)


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_build_the_knowledge_base_of_one(
    processes: int, alone: tuple[pa.Table, BuildResult], tmp_path: Path
) -> None:
    result = built(tmp_path / "kb", rules(processes))
    assert result == alone[1] and result.duplicates > 10 and result.merged and result.empty
    assert table(tmp_path / "kb").equals(alone[0])


def test_the_process_of_the_command_cuts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(*args: object) -> list[Passage]:
        (tmp_path / str(os.getpid())).touch()
        return split(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ingest, "split", noted)
    built(tmp_path / "kb", rules(2))
    found = {path.name for path in tmp_path.iterdir()} - {"kb"}
    assert found and str(os.getpid()) not in found


def test_the_work_of_a_killed_process_is_done_by_another(
    alone: tuple[pa.Table, BuildResult], tmp_path: Path
) -> None:
    def killing() -> Iterator[Document]:
        for number, document in enumerate(DOCUMENTS):
            if number == 200:
                multiprocessing.active_children()[0].kill()
            yield document

    assert built(tmp_path / "kb", rules(2), killing()) == alone[1]
    assert table(tmp_path / "kb").equals(alone[0])


def test_added_documents_are_cut_by_several_processes_as_by_one(tmp_path: Path) -> None:
    tables = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        built(folder, rules(1), DOCUMENTS[:100])
        kb = KnowledgeBase.open(folder)
        changed = DOCUMENTS[3]._replace(text="In 1900 the town had two inns.")
        kb.add([changed, *DOCUMENTS[90:300]], rules(processes))
        tables.append(table(folder))
    assert tables[0].equals(tables[1]) and len(tables[0]) > 300


def test_known_names_are_not_found_again_and_documents_are_cut_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = spacy.blank("en")
    pipeline.add_pipe("sentencizer")
    pipeline.add_pipe("entity_ruler", name="ner").add_patterns([{"label": "GPE", "pattern": "Ruritania"}])
    pipeline.to_disk(tmp_path / "pipeline")
    monkeypatch.setenv("REALM_CACHE", str(tmp_path / "cache"))
    name = f"spacy:{tmp_path / 'pipeline'}"
    built(tmp_path / "first", load_tagger(name, 2), DOCUMENTS[:300])
    with caplog.at_level(logging.INFO, "realm.text.kept_names"):
        result = built(tmp_path / "second", load_tagger(name, 2))
    # texts of the last hundred documents can be known too
    known = len(DOCUMENTS[:300]) + sum(
        one.text in {other.text for other in DOCUMENTS[:300]} for one in DOCUMENTS[300:]
    )
    assert f"names and dates of {known} of 400 texts are known" in caplog.text
    monkeypatch.setenv("REALM_CACHE", "")
    assert built(tmp_path / "alone", load_tagger(name, 1)) == result
    assert table(tmp_path / "second").equals(table(tmp_path / "alone"))


HELD = """
import sys, time
from realm.cli import main
from realm.store import ingest

commit, tables = ingest._commit, []

def held(work, table, *values):
    tables.append(table)
    while len(tables) == 4:
        print("held", flush=True)
        time.sleep(60)
    return commit(work, table, *values)

ingest._commit = held
main(sys.argv[1:])
"""
"""The command line, with a build that waits for ever before its fourth commit."""


@pytest.mark.slow
def test_a_killed_build_of_several_processes_continues(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [
        json.dumps({"id": str(number), "title": f"T{number % 9}", "text": one.text})
        for number, one in enumerate(documents(1500))
    ]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    TOKENIZER.save(tmp_path / "tokenizer")
    command = ["kb", "build", str(tmp_path / "docs.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]
    command += ["--tagger", "rules", "--set", "commit_every=640", "--set", "passage_tokens=30", "--json"]
    assert main([*command, "--processes", "1", "--out", str(tmp_path / "whole")]) == 0
    expected = capfd.readouterr().out
    command += ["--processes", "2", "--out", str(tmp_path / "kb")]
    words = [sys.executable, "-c", HELD, *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == b"held\n"
        killed.kill()
    assert killed.wait() == -signal.SIGKILL and not (tmp_path / "kb").exists()
    assert main(command) == 0
    found = capfd.readouterr()
    assert found.out == expected and "the build continues after" in found.err
    assert table(tmp_path / "kb").equals(table(tmp_path / "whole"))


def test_a_tokenizer_that_was_sent_to_another_process_is_the_same() -> None:
    tokenizer = Tokenizer.train([one.text for one in DOCUMENTS], 200)
    for one in (tokenizer, TOKENIZER):
        sent = pickle.loads(pickle.dumps(one))
        texts = ["a [SEP] b", "Ruritania", DOCUMENTS[5].text]
        assert sent.encode_with_offsets(texts) == one.encode_with_offsets(texts)
        assert (sent.fingerprint, sent.name) == (one.fingerprint, one.name)
    with cut_documents(DOCUMENTS[:50], TinyTagger(), replace(CONFIG), TOKENIZER) as cut:
        expected = [rows for _, rows in cut]
    work = pickle.loads(pickle.dumps(partial(ingest._cutting, CONFIG, TOKENIZER)))()
    found = list(TinyTagger().annotate(one.text for one in DOCUMENTS[:50]))
    rows, counts = pickle.loads(pickle.dumps(work(DOCUMENTS[:50], found)))
    assert counts == [len(one) for one in expected]
    assert pa.Table.from_batches([rows]).equals(pa.Table.from_batches(expected))
