"""Fields of documents in a knowledge base, through builds, additions, deletions and kills."""

import json
import shutil
from datetime import date, datetime
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm import cli
from realm.documents.reading import read_documents
from realm.errors import WriteFailed
from realm.files import write_json_lines
from realm.store import export as export_module
from realm.store import ingest
from realm.store.export import exported
from realm.store.fields.columns import MOST_COLUMNS
from realm.store.fields.filters import example_filter
from realm.store.knowledge_base import KnowledgeBase, KnowledgeBaseConfig, build
from realm.store.tables.table import commit, write_rows
from realm.text.corpus import Document, Section
from realm.text.fields import clean_fields, kind_of
from tests.store.tiny import CONFIG, DOCUMENTS, TOKENIZER, TinyTagger, make
from tests.store.with_fields import kb, made, with_fields

__all__ = ["kb", "made"]


def fields_of(kb: KnowledgeBase) -> dict[str, dict[str, Any]]:
    return {passage.document_id: dict(passage.fields) for passage in kb}


# --- values -------------------------------------------------------------------------------------------------


def test_values_that_json_lacks_become_texts_or_are_left_out() -> None:
    raw = {
        "day": date(2020, 1, 2),
        "at": datetime(2020, 1, 2, 3, 4, 5),
        "none": None,
        "nan": float("nan"),
        "set": {1},
        "long": "x" * 3000,
        "title": "t",
        "two words": 1,
        "two-words": 2,
        "": 3,
        "half": "\ud800",
    }
    assert clean_fields(raw) == {
        "day": "2020-01-02",
        "at": "2020-01-02T03:04:05Z",
        "two_words": 1,
        "half": "\ufffd",
    }


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.dates().map(str)
    | st.datetimes(timezones=st.timezones()).map(datetime.isoformat),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.text(max_size=8), values, max_size=4), min_size=1, max_size=3))
def test_any_fields_come_back_and_their_columns_agree_with_them(tmp_path_factory, raw: list[dict]) -> None:
    folder = tmp_path_factory.mktemp("any")
    fields = [clean_fields(one) for one in raw]
    opened = make(folder / "kb", [DOCUMENTS[n]._replace(fields=one) for n, one in enumerate(fields)])
    assert list(fields_of(opened).values()) == fields
    assert opened.verify() == []
    for name in {name for one in fields for name in one}:
        there = [name in passage.fields for passage in opened]
        assert opened.matching(f"`{name}` is not null").tolist() == there
    for passage in opened:
        if shown := example_filter([passage.fields], opened.kinds):
            assert opened.matching(shown)[opened.numbers_of([passage.document_id])].all(), shown
    shutil.rmtree(folder)


def test_kinds_follow_the_value_alone() -> None:
    kinds = {
        "bool": [True],
        "int": [0, -(2**63)],
        "float": [0.5],
        "date": ["2020-02-29"],
        "time": ["2020-02-29T10:00", "2020-02-29T10:00:00.5Z", "2020-02-29T10:00:00+02:00"],
        "text": ["2021-02-29", "2020-2-9", "", 2**63, ["a"], {"a": 1}, "10:00"],
    }
    for kind, some in kinds.items():
        assert {kind_of(value) for value in some} == {kind}


# --- changes ------------------------------------------------------------------------------------------------


def test_fields_come_back_through_builds_additions_deletions_and_compaction(kb: KnowledgeBase) -> None:
    expected = {one.id: dict(one.fields) for one in with_fields()}
    assert fields_of(kb) == expected
    new = Document("New", "It is in town.", "new", None, {"year": "MMXX", "other": 1})
    kb.add([new, DOCUMENTS[7]._replace(text="Town 7 is two towns.", fields={"year": 7})], TinyTagger())
    kb.delete(["d2"])
    del expected["d2"]
    expected |= {"new": {"year": "MMXX", "other": 1}, "d7": {"year": 7}}
    for _ in range(2):
        opened = KnowledgeBase.open(kb.folder)
        assert fields_of(opened) == expected
        assert [one.fields for one in opened.passages(range(len(opened)))] == [one.fields for one in opened]
        assert opened.matching("other = 1").sum() == 1
        assert opened.matching("year = 'MMXX' or year = '7'").sum() == 2
        assert opened.verify() == []
        opened.compact()


def test_a_field_whose_odd_values_are_gone_has_one_kind_again(kb: KnowledgeBase) -> None:
    assert kb.fields["mixed"] == "text, because values are whole number and text"
    odd = [one for one in with_fields() if isinstance(one.fields.get("mixed"), str)]
    kb.add([one._replace(fields={**one.fields, "mixed": 3}) for one in odd], TinyTagger())
    assert kb.fields["mixed"] == "whole number"
    assert kb.matching("mixed = 3").sum() == sum(one.fields.get("mixed") == 3 for one in kb) > 0


def test_new_fields_of_an_unchanged_document_are_stored_without_tagging(kb: KnowledgeBase) -> None:
    tagger, before = TinyTagger(), {passage.id for passage in kb}
    changed = [one._replace(fields={"year": 1, "fresh": "yes"}) for one in with_fields()[3:5]]
    result = kb.add([*changed, *with_fields()[5:]], tagger)
    assert (result.replaced, result.unchanged) == (2, len(DOCUMENTS) - 5)
    assert (result.passages_added, result.passages_removed, tagger.read) == (0, 0, [])
    assert {passage.id for passage in kb} == before
    found = fields_of(KnowledgeBase.open(kb.folder))
    assert found["d3"] == found["d4"] == {"year": 1, "fresh": "yes"}
    assert {kb.passages([n])[0].document_id for n in np.flatnonzero(kb.matching("fresh = 'yes'"))} == {
        "d3",
        "d4",
    }
    assert kb.add(changed, tagger).unchanged == 2
    kb.add([one._replace(fields={}) for one in changed], tagger)
    assert fields_of(kb)["d3"] == {}
    assert kb.matching("fresh = 'yes'").sum() == 0


def test_a_text_that_is_handed_over_has_the_fields_of_its_new_document(tmp_path: Path) -> None:
    copy = DOCUMENTS[1]._replace(id="copy", fields={"year": 5, "only": "mine"})
    opened = make(tmp_path / "kb", [*with_fields(), copy])
    assert opened.merged() == {"copy": "d1"}
    late = DOCUMENTS[2]._replace(id="late", fields={"late": True})
    opened.add([late], TinyTagger())
    opened.compact()
    opened.delete(["d1"])
    opened.add([DOCUMENTS[2]._replace(text="Town 2 is no town.")], TinyTagger())
    found = fields_of(KnowledgeBase.open(opened.folder))
    assert (found["copy"], found["late"]) == ({"year": 5, "only": "mine"}, {"late": True})
    assert opened.matching("only = 'mine' or late").sum() == sum(
        one.document_id in ("copy", "late") for one in opened
    )


@pytest.mark.parametrize("in_build", [True, False])
def test_columns_appear_with_the_first_document_that_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_build: bool
) -> None:
    config = KnowledgeBaseConfig(passage_tokens=CONFIG.passage_tokens, commit_every=2)
    documents = [one._replace(fields={f"f{n}": n, "n": n}) for n, one in enumerate(DOCUMENTS)]
    first = documents if in_build else DOCUMENTS[:1]
    build(tmp_path / "kb", first, config, TOKENIZER, TinyTagger())
    opened = KnowledgeBase.open(tmp_path / "kb")
    if not in_build:
        opened.add(documents, TinyTagger())
    for n, one in enumerate(DOCUMENTS):
        (match_n,) = {
            opened.passages([k])[0].document_id for k in np.flatnonzero(opened.matching(f"f{n} = {n}"))
        }
        assert match_n == one.id
    assert opened.verify() == []


def test_fields_beyond_the_limit_are_stored_without_a_column(tmp_path: Path) -> None:
    many = {f"f{n}": n for n in range(MOST_COLUMNS + 5)}
    opened = make(tmp_path / "kb", [DOCUMENTS[0]._replace(fields=many)])
    assert fields_of(opened)["d0"] == many
    assert len(opened.fields) == MOST_COLUMNS + 2  # and id and title


def test_an_interrupted_build_continues_with_its_fields(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(number: int) -> None:
        if number == 13:
            raise Killed

    config = KnowledgeBaseConfig(passage_tokens=CONFIG.passage_tokens, commit_every=2)
    with pytest.raises(Killed):
        build(tmp_path / "kb", with_fields(), config, TOKENIZER, TinyTagger(kill))
    tagger = TinyTagger()
    build(tmp_path / "kb", with_fields(), config, TOKENIZER, tagger)
    assert 0 < len(tagger.read) < len(DOCUMENTS)
    assert fields_of(KnowledgeBase.open(tmp_path / "kb")) == {
        one.id: dict(one.fields) for one in with_fields()
    }
    with pytest.raises(Killed):
        build(tmp_path / "other", with_fields(), config, TOKENIZER, TinyTagger(kill))
    with pytest.raises(ingest.DocumentsChanged):
        build(tmp_path / "other", DOCUMENTS, config, TOKENIZER, TinyTagger())


def test_fields_that_differ_from_their_columns_are_found(kb: KnowledgeBase) -> None:
    table = kb.table
    rows = table.to_table().to_pydict()
    rows["year:int"][0] = 1
    path = kb.folder / "passages.lance"
    fragments = write_rows(path, pa.table(rows, schema=table.schema).to_batches(), table.schema, new=True)
    commit(path, lance.LanceOperation.Overwrite(table.schema, fragments), table)
    (problem,) = KnowledgeBase.open(kb.folder).verify()
    assert f"have fields that differ from the columns of fields: {kb.ids[0]} (number 0)" in problem


# --- lists and exports --------------------------------------------------------------------------------------


def test_the_list_of_documents_has_the_fields_and_follows_the_filter(kb: KnowledgeBase) -> None:
    assert {one.id: one.fields for one in kb.documents()} == fields_of(kb)
    listed = kb.documents(where="source = 'handbook'", start=1, count=2)
    expected = [one.id for one in with_fields() if one.fields.get("source") == "handbook"][1:3]
    assert [one.id for one in listed] == expected


@pytest.mark.parametrize("changed", [False, True])
def test_a_build_from_an_export_is_the_same_knowledge_base(
    kb: KnowledgeBase, tmp_path: Path, changed: bool
) -> None:
    sections = (Section(0, "Long > A"), Section(20, "Long > B"))
    long = Document("Long", "It has 2 inns. It i. " + "It is in town. " * 9, "long", None, {"a": 1}, sections)
    if changed:
        kb.add([long, DOCUMENTS[4]._replace(id="copy", fields={"b": 2})], TinyTagger())
        kb.delete(["d3"])
    write_json_lines(tmp_path / "out.jsonl", exported(kb))
    again = make(tmp_path / "again", read_documents([str(tmp_path / "out.jsonl")]))
    assert [one._replace(spans=()) for one in again] == [one._replace(spans=(), links=None) for one in kb]
    assert (again.fingerprint, again.merged()) == (kb.fingerprint, kb.merged())
    whole = {one["id"]: one for one in exported(kb)}
    for where in ("year = 2000", "title like 'Long%'", "title = 'Long > A'", "title = 'Long > B'"):
        found = list(exported(kb, where))
        assert [one["id"] for one in found] == [one.id for one in kb.documents(where=where)]
        assert found == [whole[one["id"]] for one in found]
    assert len(list(exported(kb, "title = 'Long > A'"))) == changed


@pytest.mark.parametrize("file_name", ["out.parquet", "out.lance"])
def test_a_build_from_an_exported_table_has_the_same_passages_and_the_values_of_fields(
    kb: KnowledgeBase, file_name: str, tmp_path: Path
) -> None:
    sections = (Section(0, "Long > A"), Section(20, "Long > B"))
    mixed: list[Any] = ["old", 7, 2.5, True, "2020-12-31", "2020-12-31T23:59:59Z", ["a", 1], None]
    documents = [
        Document(
            f"D{n}",
            f"It has {n} inns.",
            f"m{n}",
            None,
            {"mixed": value, "number": [1, 2.5][n % 2], "metadata": "m"},
        )
        for n, value in enumerate(mixed)
    ]
    long = Document("Long", "It has 2 inns. It i. " + "It is in town. " * 9, "long", None, {"a": 1}, sections)
    kb.add([long, *documents, DOCUMENTS[4]._replace(id="copy", fields={"b": 2})], TinyTagger())
    assert cli.main(["kb", "export", "--kb", str(kb.folder), "--out", str(tmp_path / file_name)]) == 0
    again = make(tmp_path / "again", read_documents([str(tmp_path / file_name)]))
    assert [one.id for one in again] == [one.id for one in kb]
    assert (again.fingerprint, again.merged()) == (kb.fingerprint, kb.merged())
    there = fields_of(again)
    for name, fields in fields_of(kb).items():
        for field, value in fields.items():
            if field == "mixed" or isinstance(value, list | dict):
                value = value if isinstance(value, str) else json.dumps(value)
            assert there[name][field] == value, (name, field)
        assert there[name].keys() == fields.keys()
    is_lance = file_name.endswith(".lance")
    table = (
        lance.dataset(tmp_path / file_name).to_table() if is_lance else pq.read_table(tmp_path / file_name)
    )
    whole = {one["id"]: one for one in exported(kb)}
    assert [row["id"] for row in table.to_pylist()] == list(whole)
    for row in table.to_pylist():
        assert all(row[key] == whole[row["id"]].get(key) for key in ("title", "text", "passages"))
    assert (
        str(table.schema.field("year").type) == "int64" and str(table.schema.field("number").type) == "double"
    )


@pytest.mark.parametrize("name", ["out.parquet", "out.lance"])
def test_a_table_with_a_field_named_passages_is_refused(
    kb: KnowledgeBase, name: str, tmp_path: Path, capsys
) -> None:
    kb.add([Document("New", "It has 5 inns.", "n", None, {"passages": 5})], TinyTagger())
    assert cli.main(["kb", "export", "--kb", str(kb.folder), "--out", str(tmp_path / name)]) == 2
    assert "a field is named passages" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("name", ["out.json", "out.txt", "out", "out.jsonl.gz", "out.lance.zip"])
def test_an_export_to_an_unknown_format_is_one_line_and_writes_nothing(
    kb: KnowledgeBase, name: str, tmp_path: Path, capsys
) -> None:
    assert cli.main(["kb", "export", "--kb", str(kb.folder), "--out", str(tmp_path / "new" / name)]) == 2
    assert capsys.readouterr().err == (
        f"realm: {name}: documents are not written in this format: give a name that ends in .jsonl, .parquet or .lance\n"
    )
    assert not (tmp_path / "new").exists()


def test_an_export_of_a_dataset_replaces_no_folder_and_a_failed_one_leaves_nothing(
    kb: KnowledgeBase, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = ["kb", "export", "--kb", str(kb.folder), "--out"]
    assert cli.main([*export, str(kb.folder / "passages.lance")]) == 2
    assert "passages.lance is a folder" in capsys.readouterr().err
    monkeypatch.setattr(export_module, "commit", MagicMock(side_effect=WriteFailed("the disk is full")))
    assert cli.main([*export, str(tmp_path / "out.lance")]) != 0
    assert "the disk is full" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*")) and KnowledgeBase.open(kb.folder).verify() == []


def test_an_export_of_no_document_is_an_empty_table(kb: KnowledgeBase, tmp_path: Path) -> None:
    where = ["kb", "export", "--kb", str(kb.folder), "--where", "title = 'Nothing'", "--out"]
    assert cli.main([*where, str(tmp_path / "out.parquet")]) == 0
    assert cli.main([*where, str(tmp_path / "out.lance")]) == 0
    columns = pq.read_table(tmp_path / "out.parquet").schema
    assert lance.dataset(tmp_path / "out.lance").to_table().schema.equals(columns)


def test_a_title_shows_the_one_document_that_has_it_whole(kb: KnowledgeBase, capsys) -> None:
    sections = (Section(0, "Long > A"), Section(20, "Long > B"))
    text = "It has 2 inns. It i. " + "It is in town. " * 9
    twins = [Document("Twin", f"It has {n} inns.", f"twin{n}") for n in (7, 8)]
    kb.add([Document("Long", text, "long", sections=sections), *twins], TinyTagger())

    def shown(name: str) -> str:
        assert cli.main(["kb", "show", name, "--kb", str(kb.folder)]) == 0
        return capsys.readouterr().out

    assert shown("Long > B") == shown("long")
    assert shown("twin7") != shown("twin8")
    assert cli.main(["kb", "show", "Twin", "--kb", str(kb.folder)]) == 2
    message = "realm: 2 documents have the title 'Twin': give one of the ids twin7, twin8\n"
    assert capsys.readouterr().err == message
