"""A knowledge base against a dictionary, and against everything that may happen to a process or a disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm.errors import RealmError
from realm.store import ingest as build_module
from realm.store import tables
from realm.store.ingest import Settings
from realm.store.knowledge_base import (
    AddResult,
    BuildResult,
    DocumentEntry,
    KnowledgeBase,
    KnowledgeBaseConfig,
    build,
)
from realm.text.corpus import Annotations, Document, Link, Span, passage_id
from tests.store.tiny import CONFIG, DOCUMENTS, TOKENIZER, TinyTagger, as_format_3, make, tiny_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "kb"
    return make(folder).folder


@pytest.fixture
def kb(made: Path, tmp_path: Path) -> KnowledgeBase:
    shutil.copytree(made, tmp_path / "kb")
    return KnowledgeBase.open(tmp_path / "kb")


def content(kb: KnowledgeBase) -> list[tuple[str, str]]:
    return [(passage.document_id, passage.text) for passage in kb]


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


def test_sentences_and_spans_in_wordpieces_say_what_they_say_in_characters(kb: KnowledgeBase) -> None:
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
    with pytest.raises(RealmError, match="no knowledge base"):
        build(tmp_path / "notes", DOCUMENTS, CONFIG, TOKENIZER, TinyTagger(), replace=True)
    build(kb.folder, DOCUMENTS[:3], CONFIG, TOKENIZER, TinyTagger(), replace=True)
    assert {document for document, _ in content(KnowledgeBase.open(kb.folder))} == {"d0", "d1", "d2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kb", "notes", "other"]


def test_the_config_is_saved_with_the_tagger_that_was_used(kb: KnowledgeBase) -> None:
    assert kb.config.tagger == "tiny"
    assert kb.config.passage_tokens == CONFIG.passage_tokens


# --- interrupted builds -------------------------------------------------------------------------------------


def kill_at(count: int) -> TinyTagger:
    def kill(read: int) -> None:
        if read == count:
            os.kill(os.getpid(), signal.SIGKILL)

    return TinyTagger(kill)


def test_a_killed_build_goes_on_and_ends_as_if_it_never_was(kb: KnowledgeBase, tmp_path: Path) -> None:
    script = (
        "import sys; from tests.store.test_knowledge_base import *;"
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


def test_an_interrupted_build_with_other_settings_starts_over_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(tmp_path / "kb")
    tagger = TinyTagger()
    build(tmp_path / "kb", DOCUMENTS, KnowledgeBaseConfig(passage_tokens=30), TOKENIZER, tagger)
    assert len(tagger.read) == len(DOCUMENTS)
    assert "starting from the beginning" in caplog.text
    assert KnowledgeBase.open(tmp_path / "kb").config.passage_tokens == 30


def test_an_interrupted_build_without_a_column_of_links_starts_over(tmp_path: Path) -> None:
    interrupt(tmp_path / "kb", [*LINKED, *DOCUMENTS])
    as_format_3(tmp_path / "kb.building")
    kb = make(tmp_path / "kb", [*LINKED, *DOCUMENTS])
    assert list(kb) == list(make(tmp_path / "whole", [*LINKED, *DOCUMENTS]))
    assert next(iter(kb)).links == ("Town 3", "Inn")


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


# --- add and delete -----------------------------------------------------------------------------------------


class Model:
    """What add and delete mean: passage -> the document it belongs to and that document's text, in order."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], tuple[str, tuple[str, str]]] = {}
        self._merged: dict[str, tuple[str, str]] = {}

    def add(self, documents: Sequence[Document]) -> None:
        before, elsewhere = dict(self.rows), {}
        for document in documents:
            texts = dict.fromkeys(f"{t.strip()}." for t in document.text.split(".") if t.strip())
            passages = [(document.title, text) for text in texts]
            own = {p for p, (owner, _) in self.rows.items() if owner == document.id}
            free = [p for p in passages if p not in self.rows or p in own]
            if set(free) != own:
                self.rows = {p: row for p, row in self.rows.items() if row[0] != document.id}
                self.rows |= dict.fromkeys(free, (document.id, document[:2]))
                self._merged.pop(document.id, None)
            if not free:
                elsewhere[document.id] = document[:2]
        self._merged |= elsewhere
        self._hand_over({p: state for p, (_, state) in before.items() if p not in self.rows})
        states = {state for _, state in self.rows.values()}
        for document_id, state in elsewhere.items():
            if state not in states:
                self._merged.pop(document_id, None)

    def present(self) -> set[str]:
        states = {state for _, state in self.rows.values()}
        return {owner for owner, _ in self.rows.values()} | {
            d for d, s in self._merged.items() if s in states
        }

    def delete(self, documents: Sequence[str]) -> None:
        for document in documents:
            self._merged.pop(document, None)
        gone = {p: state for p, (owner, state) in self.rows.items() if owner in documents}
        self.rows = {p: row for p, row in self.rows.items() if p not in gone}
        self._hand_over(gone)

    def _hand_over(self, gone: dict[tuple[str, str], tuple[str, str]]) -> None:
        """The first document by name that has the text too gets the passages."""
        for passage, state in gone.items():
            heirs = sorted(document for document, own in self._merged.items() if own == state)
            if heirs:
                self.rows[passage] = heirs[0], state
        for owner in {owner for owner, _ in self.rows.values()}:
            self._merged.pop(owner, None)


SENTENCES = [f"It has {n} inns in the town." for n in range(4)]  # no two fit a passage
document_st = st.builds(
    lambda number, title, text: Document(title, " ".join(text), f"d{number}"),
    st.integers(0, 5),
    st.sampled_from(["A", "B"]),
    st.sampled_from([SENTENCES[:2], SENTENCES[1:3]]) | st.lists(st.sampled_from(SENTENCES), max_size=3),
)
steps_st = st.lists(
    st.one_of(
        st.lists(document_st, min_size=1, max_size=4, unique_by=lambda document: document.id),
        st.lists(st.integers(0, 5).map(lambda n: f"d{n}"), min_size=1, max_size=2),
    ),
    max_size=6,
)


@settings(max_examples=20)
@given(steps_st)
def test_adding_and_deleting_equals_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[Document] | list[str]]
) -> None:
    folder = tmp_path_factory.mktemp("kb") / "kb"
    config = KnowledgeBaseConfig(passage_tokens=16, commit_every=3)
    first = Document("A", SENTENCES[0], "d0")
    kb, model = make(folder, [first], config), Model()
    model.add([first])
    for step in steps:
        before = kb.fingerprint, kb.ids
        if isinstance(step[0], Document):
            documents = [document for document in step if isinstance(document, Document)]
            model.add(documents)
            result = kb.add(documents, TinyTagger())
            assert result.added + result.replaced + result.unchanged == len(documents)
        else:
            present = [str(name) for name in step if name in model.present()]
            model.delete(present)
            if len(present) == len(step):
                kb.delete([str(name) for name in step])
            else:
                with pytest.raises(RealmError, match="no document with id or title"):
                    kb.delete([str(name) for name in step])
                kb.delete([str(name) for name in present])
        expected = [(owner, *passage) for passage, (owner, _) in model.rows.items()]
        assert [(p.document_id, p.title, p.text) for p in kb] == expected
        assert kb.passages(range(len(kb))) == list(kb)
        assert kb.tokens.body.lengths.tolist() == [
            len(ids) for ids in TOKENIZER.encode([t for _, _, t in expected])
        ]
        again = KnowledgeBase.open(folder)
        assert (again.fingerprint, again.ids, len(again)) == (kb.fingerprint, kb.ids, len(expected))
        assert (kb.fingerprint == before[0]) == (kb.ids == before[1])
    assert kb.verify() == []


def test_a_document_as_it_was_is_not_tagged_again(kb: KnowledgeBase) -> None:
    changed = DOCUMENTS[4]._replace(text="Town 4 is two towns.")
    tagger = TinyTagger()
    result = kb.add([*DOCUMENTS[:4], changed, Document("New", "It is in town.", "new")], tagger)
    assert tagger.read == [changed.text, "It is in town."]
    assert result == AddResult(added=1, replaced=1, unchanged=4, passages_added=2, passages_removed=2)


def test_passages_that_a_deleted_document_took_along_come_back_with_another_that_holds_them(
    tmp_path: Path,
) -> None:
    shared, more = SENTENCES[:2]
    documents = [Document("A", shared, "1"), Document("A", f"{shared} {more}", "2")]
    kb = make(tmp_path / "kb", documents, KnowledgeBaseConfig(passage_tokens=16))
    kb.delete(["1"])
    assert content(kb) == [("2", more)]
    assert kb.add(documents[1:], TinyTagger()).replaced == 1
    assert content(kb) == [("2", shared), ("2", more)]


def test_documents_are_deleted_by_id_or_by_title(tmp_path: Path) -> None:
    kb = make(
        tmp_path / "kb",
        [
            Document(*d)
            for d in [("A", "One.", "1"), ("A", "Two.", "2"), ("3", "Inn.", "4"), ("B", "Is.", "3")]
        ],
    )
    assert kb.numbers_of(["3"]).tolist() == [3]  # an id goes before a title
    assert kb.numbers_of(["A", "4"]).tolist() == [0, 1, 2]
    assert kb.delete(["A", "2"]) == 2
    assert content(kb) == [("4", "Inn."), ("3", "Is.")]
    with pytest.raises(RealmError, match="no document with id or title 'A', 'x'"):
        kb.delete(["x", "3", "A"])
    assert len(kb) == 2


def test_a_knowledge_base_that_lost_all_its_passages_still_works(kb: KnowledgeBase) -> None:
    kb.delete(kb.titles)
    assert len(kb) == len(kb.tokens.body.lengths) == len(kb.passages([])) == 0
    assert kb.verify() == []
    kb.add([Document("New", "It is in town.", "new")], TinyTagger())
    assert content(kb) == [("new", "It is in town.")]


@pytest.mark.parametrize("change", ["add", "delete"])
def test_a_change_stopped_before_its_commit_changes_nothing(
    change: str, kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(kb)
    documents = [DOCUMENTS[4]._replace(text="Town 4 is two towns."), Document("New", "It is in town.", "new")]

    def run(kb: KnowledgeBase) -> None:
        if change == "add":
            kb.add(documents, TinyTagger())
        else:
            kb.delete(["d4"])

    with monkeypatch.context() as patch:
        patch.setattr(tables, "commit", stop)
        with pytest.raises(Stopped):
            run(kb)
    assert list(KnowledgeBase.open(kb.folder)) == before
    assert KnowledgeBase.open(kb.folder).verify() == []
    run(kb)
    assert list(kb) != before
    assert kb.verify() == []


def test_two_processes_that_change_it_at_once_do_not_undo_each_other(kb: KnowledgeBase) -> None:
    other = KnowledgeBase.open(kb.folder)
    other.delete(["d1"])
    assert "d1" in dict(content(kb))  # still at the version it was opened at
    with pytest.raises(RealmError, match="another process"):
        kb.delete(["d2"])
    with pytest.raises(RealmError, match="another process"):
        kb.add([Document("New", "It is in town.", "new")], TinyTagger())
    assert set(dict(content(KnowledgeBase.open(kb.folder)))) == {d.id for d in DOCUMENTS} - {"d1"}


# --- open ---------------------------------------------------------------------------------------------------


def test_what_is_no_knowledge_base_is_refused_in_one_line(kb: KnowledgeBase, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nothing", kb.folder / "passages.lance"):
        with pytest.raises(RealmError, match=r"^.*is no knowledge base.*$"):
            KnowledgeBase.open(folder)


def test_an_unknown_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "FORMAT", 6)
        make(tmp_path / "kb")
    with pytest.raises(RealmError, match="has format 6, but this version of realm reads formats 1 to 5"):
        KnowledgeBase.open(tmp_path / "kb")


def test_a_knowledge_base_of_an_earlier_version_has_a_tokenizer_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Settings.to_json

    def to_json(settings: Settings) -> str:
        saved = json.loads(before(settings))
        del saved["config"]["tokenizer"]
        return json.dumps(saved | {"format": 2})

    with monkeypatch.context() as patch:
        patch.setattr(Settings, "to_json", to_json)
        make(tmp_path / "kb")
    assert KnowledgeBase.open(tmp_path / "kb").config.tokenizer == ""


LINKED = [
    Document(
        "Linked", "It has inns in Town 3.", "l", (Link(15, "Town 3"), Link(15, "Inn"), Link(15, "Town 3"))
    ),
    Document("Alone", "It has two inns.", "a", ()),
    DOCUMENTS[5],
]


def test_links_come_back_through_builds_additions_and_compaction(tmp_path: Path) -> None:
    kb = make(tmp_path / "kb", [*LINKED, *DOCUMENTS[:4]])
    more = Document("More", "It is in Town 9.", "m", (Link(9, "Town 9"),))
    again = [one._replace(id=f"{one.id} again") for one in LINKED[:2]]
    kb.add([more, *again], TinyTagger())
    kb.delete(["l", "d2"])  # the text of l stays as the text of its copy
    for _ in range(2):
        opened = KnowledgeBase.open(kb.folder)
        links = {passage.document_id: passage.links for passage in opened}
        assert links == {
            "l again": ("Town 3", "Inn"),
            "a": (),
            "m": ("Town 9",),
            **dict.fromkeys(("d0", "d1", "d3", "d5")),
        }
        assert [one.links for one in opened.passages(range(len(opened)))] == [one.links for one in opened]
        assert opened.verify() == []
        opened.compact()


def test_the_digest_of_links_follows_the_links_alone(tmp_path: Path) -> None:
    changed = [LINKED[0]._replace(links=(Link(15, "Town 4"),)), *LINKED[1:]]
    bare = [one._replace(links=None) for one in LINKED]
    kbs = [make(tmp_path / str(n), docs) for n, docs in enumerate((LINKED, changed, bare, LINKED))]
    assert len({kb.fingerprint for kb in kbs}) == 1
    first, second, none, again = (kb.links_digest for kb in kbs)
    assert first == again
    assert none == ""
    assert len({first, second, none}) == 3


def test_a_knowledge_base_without_a_column_of_links_can_be_used_changed_and_compacted(
    kb: KnowledgeBase, tmp_path: Path
) -> None:
    shutil.copytree(kb.folder, tmp_path / "old")
    as_format_3(tmp_path / "old")
    old = KnowledgeBase.open(tmp_path / "old")
    assert (old.fingerprint, old.links_digest) == (kb.fingerprint, "")
    changes = [
        *LINKED,
        DOCUMENTS[7]._replace(text="Town 7 is two towns."),
        DOCUMENTS[8]._replace(id="d8 again"),
    ]
    for one in (old, kb):
        one.add(changes, TinyTagger())
        one.delete(["d3", "d8"])
    for _ in range(2):
        assert list(old) == [passage._replace(links=None) for passage in kb]
        assert old.verify() == []
        for mine, others in zip(old.tokens, kb.tokens, strict=True):
            np.testing.assert_array_equal(mine.values, others.values)
        assert "links" not in old.table.schema.names
        old.compact()
        old = KnowledgeBase.open(old.folder)


def test_another_tokenizer_than_the_passages_were_made_with_is_refused(kb: KnowledgeBase) -> None:
    other = tiny_tokenizer("more")
    with pytest.raises(RealmError, match="has tokenizer"):
        kb.check_tokenizer(other, "model")
    other.save(kb.folder / "tokenizer")
    with pytest.raises(RealmError, match=f"fingerprint {other.fingerprint}, but the passages were made with"):
        KnowledgeBase.open(kb.folder)


def test_the_fingerprint_follows_the_passages_their_order_and_the_tokenizer(tmp_path: Path) -> None:
    build(tmp_path / "other", DOCUMENTS, CONFIG, tiny_tokenizer("more"), TinyTagger())
    kbs = [
        make(tmp_path / "same"),
        make(tmp_path / "again"),
        make(tmp_path / "order", DOCUMENTS[::-1]),
        make(tmp_path / "fewer", DOCUMENTS[1:]),
        KnowledgeBase.open(tmp_path / "other"),
    ]
    prints = [kb.fingerprint for kb in kbs]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4
    assert kbs[0].ids == kbs[4].ids


def test_wordpieces_of_some_passages_are_those_rows_of_all(tiny_kb) -> None:
    numbers = np.array([5, 0, 27, 5])
    some, everything = tiny_kb.tokens_of(numbers), tiny_kb.tokens
    for mine, all_of_them in zip(some, everything, strict=True):
        assert [mine.row(n).tolist() for n in range(4)] == [all_of_them.row(n).tolist() for n in numbers]
    assert all(len(column.lengths) == 0 for column in tiny_kb.tokens_of(np.array([], dtype=np.int64)))
