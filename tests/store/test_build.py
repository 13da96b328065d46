"""Builds of knowledge bases, whole and interrupted."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NoReturn

import numpy as np
import pytest

from realm.errors import RealmError
from realm.store import ingest as build_module
from realm.store import settings as settings_module
from realm.store.knowledge_base import (
    BuildResult,
    DocumentEntry,
    KnowledgeBase,
    KnowledgeBaseConfig,
    build,
)
from realm.text.corpus import Annotations, Document, Span, passage_id
from realm.tokens.sentences import SentenceTokenizer
from tests.store.tiny import CONFIG, DOCUMENTS, TOKENIZER, TinyTagger, content, make

# --- build --------------------------------------------------------------------------------------------------


def test_passages_come_back_as_they_were_split(kb: KnowledgeBase) -> None:
    texts: dict[str, str] = {}
    for passage in kb:
        document = DOCUMENTS[int(passage.document_id[1:])]
        assert passage.text in document.text
        assert passage.title == document.title
        assert passage.id == passage_id(passage.title, passage.text)
        assert all(passage.text[s.start : s.end][0].isupper() and s.label == "NAME" for s in passage.spans)
        assert all(passage.text[a:b].endswith(".") for a, b in passage.sentences)
        texts[document.id] = f"{texts.get(document.id, '')} {passage.text}".strip()
    assert texts == {document.id: document.text.strip() for document in DOCUMENTS}
    assert kb.ids == [passage.id for passage in kb]
    assert kb.titles == [passage.title for passage in kb]


def test_the_list_of_documents_counts_their_passages_in_their_order(kb: KnowledgeBase) -> None:
    kb.delete(["d0"])
    kb.add(
        [DOCUMENTS[4]._replace(text="Town 4 is two towns."), Document("New", "It is in town.", "z")],
        TinyTagger(),
    )
    counts: dict[tuple[str, str], int] = {}
    for passage in kb:
        key = (passage.document_id, passage.title)
        counts[key] = counts.get(key, 0) + 1
    listed = kb.documents()
    assert listed == [DocumentEntry(*name, count, {}) for name, count in counts.items()]
    assert kb.documents(2, 3) == listed[2:5]
    assert [d.id for d in kb.documents(prefix="d1")] == ["d1", *(f"d{n}" for n in range(10, 20))]
    assert [d.id for d in kb.documents(1, 2, "Ne")] == []
    assert [d.id for d in kb.documents(count=1, prefix="Ne")] == ["z"]


def test_passages_are_read_by_number_in_the_order_asked_for(kb: KnowledgeBase) -> None:
    everything = list(kb)
    numbers = [7, 0, len(kb) - 1, 7]
    assert kb.passages(numbers) == [everything[n] for n in numbers]
    assert kb.passages(np.array([3])) == [everything[3]]
    assert kb.passages([]) == []
    for wrong in ([-1], [len(kb)]):
        with pytest.raises(IndexError):
            kb.passages(wrong)


def test_tokens_are_the_wordpieces_of_title_and_text(kb: KnowledgeBase) -> None:
    tokens = kb.tokens
    for number, passage in enumerate(kb):
        assert tokens.title.row(number).tolist() == TOKENIZER.encode([passage.title])[0]
        assert tokens.body.row(number).tolist() == TOKENIZER.encode([passage.text])[0]
        assert 3 + len(tokens.title.row(number)) + len(tokens.body.row(number)) <= CONFIG.passage_tokens
    assert tokens.body.values.dtype == np.int32
    assert tokens.body.lengths.tolist() == [len(tokens.body.row(n)) for n in range(len(kb))]


def test_sentences_and_spans_in_wordpieces_are_those_in_characters(kb: KnowledgeBase) -> None:
    tokens = kb.tokens
    for number, passage in enumerate(kb):
        body = tokens.body.row(number)
        starts = [*tokens.sentences.row(number), len(body)]
        by_sentence = [body[a:b].tolist() for a, b in pairwise(starts)]
        assert by_sentence == TOKENIZER.encode([passage.text[a:b] for a, b in passage.sentences])
        ranges = zip(tokens.span_starts.row(number), tokens.span_ends.row(number), strict=True)
        assert [body[a:b].tolist() for a, b in ranges] == TOKENIZER.encode(
            [passage.text[span.start : span.end] for span in passage.spans]
        )


def test_only_pieces_wholly_inside_a_span_belong_to_it_and_a_span_of_none_is_dropped(tmp_path: Path) -> None:
    class Spans(TinyTagger):
        def annotate(self, texts: Iterable[str]) -> Iterator[Annotations]:
            for text in texts:  # the town | s in Ruri | apita
                yield Annotations(((0, len(text)),), (Span(0, 8, "A"), Span(10, 17, "B"), Span(27, 32, "C")))

    document = Document("T", "the town is in Ruritania: capitalis", "d")
    build(tmp_path / "kb", [document], CONFIG, TOKENIZER, Spans())
    tokens = KnowledgeBase.open(tmp_path / "kb").tokens
    ranges = zip(tokens.span_starts.row(0), tokens.span_ends.row(0), strict=True)
    assert [TOKENIZER.tokens(tokens.body.row(0)[a:b].tolist()) for a, b in ranges] == [
        ["the", "town"],
        ["in"],
    ]


def test_the_same_text_is_kept_once_and_counted(tmp_path: Path) -> None:
    documents = [
        Document("A", "One. One.", "1"),
        Document("A", "One. One.", "2"),
        Document("B", "One. One.", "3"),
    ]
    documents += [Document("C", "  ", "4")]
    result = build(tmp_path / "kb", documents, CONFIG, TOKENIZER, TinyTagger())
    assert result == BuildResult(documents=4, passages=2, duplicates=1, empty=1, merged={"2": "1"})
    assert content(KnowledgeBase.open(tmp_path / "kb")) == [("1", "One. One."), ("3", "One. One.")]


def test_two_texts_under_one_id_are_refused(tmp_path: Path) -> None:
    documents = [Document("A", "One.", "1"), Document("A", "Two.", "1")]
    with pytest.raises(RealmError, match="two documents have the id '1'"):
        make(tmp_path / "kb", documents)
    assert len(make(tmp_path / "kb", [documents[0], documents[0]])) == 1


@pytest.mark.parametrize("documents", [[], [Document("T", " \n ", "1")]])
def test_a_corpus_without_text_is_refused_and_leaves_nothing(
    documents: list[Document], tmp_path: Path
) -> None:
    with pytest.raises(RealmError, match="no text"):
        make(tmp_path / "kb", documents)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_already_is_not_built_over(kb: KnowledgeBase, tmp_path: Path) -> None:
    with pytest.raises(RealmError, match="already"):
        make(kb.folder)
    other = tmp_path / "other"
    other.mkdir()
    make(other, DOCUMENTS[:1])  # an empty folder is fine
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(RealmError, match="not a knowledge base"):
        build(tmp_path / "notes", DOCUMENTS, CONFIG, TOKENIZER, TinyTagger(), replace=True)
    build(kb.folder, DOCUMENTS[:3], CONFIG, TOKENIZER, TinyTagger(), replace=True)
    assert {document for document, _ in content(KnowledgeBase.open(kb.folder))} == {"d0", "d1", "d2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kb", "notes", "other"]


def test_the_config_is_saved_with_the_tagger_that_was_used(kb: KnowledgeBase) -> None:
    assert kb.config.tagger == "tiny"
    assert kb.config.passage_tokens == CONFIG.passage_tokens


def test_what_is_kept_is_what_sets_in_memory_keep(tmp_path: Path) -> None:
    draw = Random(1)
    texts = [f"It has {n} inns. It is in town {n % 7}." for n in range(12)]
    documents = [
        Document(draw.choice("AB"), " ".join(draw.choices(texts, k=draw.randint(1, 4))), f"d{n}")
        for n in range(60)
    ]
    result = build(tmp_path / "kb", documents, CONFIG, TOKENIZER, TinyTagger())
    kept, known, first = [], set(), {}
    for document, found in zip(documents, TinyTagger().annotate(d.text for d in documents), strict=True):
        first.setdefault((document.title, document.text), document.id)
        for passage in build_module.split(document, found, CONFIG, SentenceTokenizer(TOKENIZER)):
            if (passage.title, passage.text) not in known:
                known.add((passage.title, passage.text))
                kept.append((document.id, passage.text))
    merged = {d.id: first[d.title, d.text] for d in documents if first[d.title, d.text] != d.id}
    assert content(KnowledgeBase.open(tmp_path / "kb")) == kept
    owners = {document for document, _ in kept}
    assert result.merged == {one: other for one, other in merged.items() if other in owners}
    assert result.merged and result.duplicates > len(result.merged)


# --- interrupted builds -------------------------------------------------------------------------------------


def kill_at(count: int) -> TinyTagger:
    def kill(read: int) -> None:
        if read == count:
            os.kill(os.getpid(), signal.SIGKILL)

    return TinyTagger(kill)


def test_a_killed_build_goes_on_and_ends_as_if_it_never_was(kb: KnowledgeBase, tmp_path: Path) -> None:
    script = (
        "import sys; from tests.store.test_build import *;"
        "build(sys.argv[1], DOCUMENTS, CONFIG, TOKENIZER, kill_at(13))"
    )
    target = tmp_path / "again"
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", script, str(target)], cwd=root, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not target.exists()
    tagger = TinyTagger()
    result = build(target, DOCUMENTS, CONFIG, TOKENIZER, tagger)
    assert 0 < len(tagger.read) < len(DOCUMENTS)  # it went on, it did not start over
    again = KnowledgeBase.open(target)
    assert again.fingerprint == kb.fingerprint
    assert list(again) == list(kb)
    assert result == BuildResult(len(DOCUMENTS), len(kb), 0, 0)
    assert again.verify() == []
    assert not (tmp_path / "again.building").exists()


class Stopped(BaseException):
    """Stands for a kill at one line of the code."""


def stop(*_: object, **__: object) -> NoReturn:
    raise Stopped


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("where", ["write_rows", "commit", "put_in_place"])
def test_a_build_stopped_around_any_commit_ends_the_same(
    where: str, call: int, kb: KnowledgeBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(build_module, where)
    calls = iter(range(1, 100))
    with monkeypatch.context() as patch:
        patch.setattr(
            build_module, where, lambda *a, **k: stop() if next(calls) == call else original(*a, **k)
        )
        try:
            make(tmp_path / "again")
        except Stopped:
            assert not (tmp_path / "again").exists()
            make(tmp_path / "again")
        else:
            assert where == "put_in_place" and call > 1
    assert list(KnowledgeBase.open(tmp_path / "again")) == list(kb)


def interrupt(folder: Path, documents: Sequence[Document] = DOCUMENTS, after: int = 13) -> None:
    """Leaves a build that read `after` documents."""
    with pytest.raises(Stopped):
        build(
            folder, documents, CONFIG, TOKENIZER, TinyTagger(lambda read: stop() if read == after else None)
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("passage_tokens", 30),
        ("near_duplicates", 0.9),
        ("max_document_chars", 10_000),
        ("title_field", "headline"),
        ("text_field", "content"),
        ("id_field", "nr"),
    ],
)
def test_an_interrupted_build_with_other_settings_starts_over_with_a_message(
    name: str, value: float | str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(tmp_path / "kb")
    tagger, config = TinyTagger(), replace(CONFIG, **{name: value})
    build(tmp_path / "kb", DOCUMENTS, config, TOKENIZER, tagger)
    assert len(tagger.read) == len(DOCUMENTS)
    assert "starting from the beginning" in caplog.text
    assert getattr(KnowledgeBase.open(tmp_path / "kb").config, name) == value


def test_an_interrupted_build_of_another_format_starts_over(
    kb: KnowledgeBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(settings_module, "FORMAT", 4)
        interrupt(tmp_path / "again")
    assert list(make(tmp_path / "again")) == list(kb)
    assert "has format 4" in caplog.text and "starting from the beginning" in caplog.text


def test_an_interrupted_build_goes_on_only_with_the_documents_it_read(tmp_path: Path) -> None:
    interrupt(tmp_path / "kb")
    with pytest.raises(RealmError, match="documents have changed"):
        make(tmp_path / "kb", [DOCUMENTS[0]._replace(text="Other."), *DOCUMENTS[1:]])
    with pytest.raises(RealmError, match="documents have changed"):
        make(tmp_path / "kb", DOCUMENTS[:2])
    mended = [*DOCUMENTS[:-1], DOCUMENTS[-1]._replace(text="Mended.")]  # the way out after a bad document
    assert content(make(tmp_path / "kb", mended))[-1] == ("d19", "Mended.")


def test_an_interrupted_build_that_is_damaged_starts_over(
    kb: KnowledgeBase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(tmp_path / "again")
    next((tmp_path / "again.building" / "passages.lance" / "data").iterdir()).write_bytes(b"")
    assert list(make(tmp_path / "again")) == list(kb)
    assert "is damaged" in caplog.text and "starting from the beginning" in caplog.text


def test_a_folder_where_the_build_would_work_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "kb.building").mkdir()
    (tmp_path / "kb.building" / "notes.txt").write_text("mine")
    with pytest.raises(RealmError, match=r"notes\.txt"):
        make(tmp_path / "kb")
    assert (tmp_path / "kb.building" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_tagger_that_forks_works_beside_lance(
    resumed: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    from realm.text.salient_spans import load_tagger

    documents = [
        Document(f"T{i}", f"It has {i} inns. It was built in {1700 + i}.", str(i)) for i in range(200)
    ]
    config = KnowledgeBaseConfig(commit_every=16)
    build(tmp_path / "one", documents, config, TOKENIZER, load_tagger("rules"))
    if resumed:
        tagger = load_tagger("rules")
        stream = (stop() if d.id == "150" else d for d in documents)
        with pytest.raises(Stopped):
            build(tmp_path / "two", stream, config, TOKENIZER, tagger)
    build(tmp_path / "two", documents, config, TOKENIZER, load_tagger("rules", processes=2))
    assert list(KnowledgeBase.open(tmp_path / "two")) == list(KnowledgeBase.open(tmp_path / "one"))
    assert not [warning for warning in recwarn if "fork" in str(warning.message)]
