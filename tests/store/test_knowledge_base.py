"""A knowledge base against a dictionary, and against everything that may happen to a process or a disk."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm.errors import RealmError
from realm.store import settings as settings_module
from realm.store.knowledge_base import (
    AddResult,
    KnowledgeBase,
    KnowledgeBaseConfig,
    build,
)
from realm.store.tables import table
from realm.text.corpus import Document, Link, Section
from tests.store.test_build import Stopped, stop
from tests.store.tiny import (
    CONFIG,
    DOCUMENTS,
    LINKED,
    TOKENIZER,
    TinyTagger,
    content,
    make,
    tiny_tokenizer,
)

# --- add and delete -----------------------------------------------------------------------------------------


class Model:
    """What add and delete mean: passage -> the document it belongs to and that document's text, in order."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], tuple[str, tuple[str, str]]] = {}
        self._merged: dict[str, tuple[str, str]] = {}

    def add(self, documents: Sequence[Document]) -> None:
        before, elsewhere = dict(self.rows), {}
        sharers: dict[tuple[str, str], tuple[str, tuple[str, str]]] = {}
        for document in documents:
            texts = dict.fromkeys(f"{t.strip()}." for t in document.text.split(".") if t.strip())
            passages = [(document.title, text) for text in texts]
            own = {p for p, (owner, _) in self.rows.items() if owner == document.id}
            free = [p for p in passages if p not in self.rows or p in own]
            for passage in passages:
                if passage not in free:
                    sharers.setdefault(passage, (document.id, document[:2]))
            # Passages of others can be handed over to the document, whose rows all need the same text then.
            shares = len(free) < len(passages)
            other_text = any(self.rows[p][1] != document[:2] for p in own)
            if set(free) != own or (shares and other_text):
                self.rows = {p: row for p, row in self.rows.items() if row[0] != document.id}
                self.rows |= dict.fromkeys(free, (document.id, document[:2]))
                self._merged.pop(document.id, None)
            if not free:
                elsewhere[document.id] = document[:2]
        self._merged |= elsewhere
        self._hand_over({p: state for p, (_, state) in before.items() if p not in self.rows}, sharers)
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
        self._hand_over(gone, {})

    def _hand_over(
        self,
        gone: dict[tuple[str, str], tuple[str, str]],
        sharers: dict[tuple[str, str], tuple[str, tuple[str, str]]],
    ) -> None:
        """The first document by name that has the text too gets the passages, or else the first of this call that has them."""
        for passage, state in gone.items():
            heirs = sorted(document for document, own in self._merged.items() if own == state)
            if heirs:
                self.rows[passage] = heirs[0], state
        self.rows |= {p: sharers[p] for p in gone if p in sharers and p not in self.rows}
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


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("end", ["replaced", "deleted"])
def test_passages_of_a_replaced_or_deleted_document_stay_with_another_one_of_the_addition(
    tmp_path: Path, end: str, order: int
) -> None:
    shared, more, other = SENTENCES[:3]
    old, longer = Document("A", shared, "z"), Document("A", f"{shared} {more}", "a")
    kb = make(tmp_path / "kb", [old], KnowledgeBaseConfig(passage_tokens=16))
    kb.add([longer], TinyTagger())
    assert content(kb) == [("z", shared), ("a", more)]
    assert kb.incomplete(["a", "z", "unknown"]) == {"a", "unknown"}
    if end == "replaced":
        kb.add([longer, old._replace(text=other)][::order], TinyTagger())
    else:
        assert kb.add([longer], TinyTagger(), gone=["z", "unknown"]).deleted == 1
    rest = [("z", other)] if end == "replaced" else []
    assert sorted(content(kb)) == sorted([("a", shared), ("a", more), *rest])
    assert kb.incomplete(["a"]) == set()
    assert kb.add([longer], TinyTagger()).unchanged == 1
    assert kb.verify() == []


def test_a_document_whose_other_passages_are_handed_over_to_it_is_whole(tmp_path: Path) -> None:
    """Also for a document that is merged with it later."""
    first, second, third = SENTENCES[:3]
    documents = [Document("A", f"{first} {second}", "y"), Document("A", f"{first} {third}", "x")]
    kb = make(tmp_path / "kb", documents, KnowledgeBaseConfig(passage_tokens=16))
    assert content(kb) == [("y", first), ("y", second), ("x", third)]
    changed = Document("A", f"{first} {second} {third}", "x")
    kb.add([changed], TinyTagger(), gone=["y"])
    assert sorted(content(kb)) == sorted([("x", first), ("x", second), ("x", third)])
    assert kb.incomplete(["x"]) == set()
    assert kb.add([changed], TinyTagger()).unchanged == 1
    kb.add([changed._replace(id="z")], TinyTagger())
    assert kb.merged() == {"z": "x"}
    kb.delete(["x"])
    assert sorted(content(kb)) == sorted([("z", first), ("z", second), ("z", third)])


def test_a_merged_document_is_incomplete_if_the_document_with_its_passages_is(tmp_path: Path) -> None:
    first, second = SENTENCES[:2]
    documents = [Document("A", first, "s"), *(Document("A", f"{first} {second}", id) for id in ("x", "e"))]
    kb = make(tmp_path / "kb", documents, KnowledgeBaseConfig(passage_tokens=16))
    assert kb.merged() == {"e": "x"}
    assert kb.incomplete(["s", "x", "e"]) == {"x", "e"}
    kb.add(documents[2:], TinyTagger(), gone=["s", "x"])
    assert sorted(content(kb)) == sorted([("e", first), ("e", second)])
    assert kb.incomplete(["e"]) == set()


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


def test_a_document_that_is_given_by_title_is_deleted_with_all_its_sections(tmp_path: Path) -> None:
    sections = Section(0, "A"), Section(len("One.\n\n"), "A > Inns")
    kb = make(tmp_path / "kb", [Document("A", "One.\n\nInn.", "1", sections=sections), *DOCUMENTS[:1]])
    assert [passage.title for passage in kb] == ["A", "A > Inns", "Town 0"]
    assert kb.delete(["A"]) == 2
    assert [passage.title for passage in kb] == ["Town 0"]


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
        patch.setattr(table, "commit", stop)
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
        with pytest.raises(RealmError, match=r"^.*is not a knowledge base.*$"):
            KnowledgeBase.open(folder)


@pytest.mark.parametrize("number", [4, 6])
def test_another_format_is_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(settings_module, "FORMAT", number)
        make(tmp_path / "kb")
    with pytest.raises(
        RealmError, match=f"^.*has format {number}, but .* reads only format 5: build .* again$"
    ):
        KnowledgeBase.open(tmp_path / "kb")


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
