"""Dumps of a MediaWiki: as its programs write them, damaged, and read again after a kill."""

import bz2
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from gensim.test.utils import datapath

from realm.documents.formats.records import Limits, Record
from realm.documents.reading import ReadingReport, read_documents
from realm.documents.wikipedia import dumps
from realm.errors import InputError
from tests.documents.reading_memory import documents_and_megabytes
from tests.documents.writers import HEAD, page, read, write_dump

TOWNS = {
    "Arden": "'''Arden''' is a town on the [[Ouse (river)|Ouse]].[[Datei:Arden.jpg|thumb|The [[town]]]]",
    "Brack": "'''Brack''' is a village.{{Coord|1|N}} It has {{convert|5|km|mi}} of walls.<ref>{{cite}}</ref>",
    "Croft & Sons": "A firm.\n== History ==\nIt began in 1900.\n== References ==\n* A book",
}


REAL = "enwiki-latest-pages-articles1.xml-p000000010p000030302.bz2"


@pytest.mark.parametrize("name", ["enwiki-table-markup.xml.bz2", REAL])
def test_a_real_dump_gives_each_article_as_text(name: str, tmp_path: Path) -> None:
    """Parts of dumps of English Wikipedia, which gensim's tests use, counted without the reader."""
    path, articles, others = tmp_path / name, [], 0
    shutil.copy(datapath(name.replace(".bz2", "-shortened.bz2") if name == REAL else name), path)
    with bz2.open(path) as file:
        for _, element in ElementTree.iterparse(file):
            if element.tag.endswith("}page"):
                if element.find("{*}redirect") is None and element.findtext("{*}ns") == "0":
                    articles.append(element.findtext("{*}title"))
                else:
                    others += 1
    texts, reasons = read(path)
    assert texts.keys() <= set(articles)
    assert sum(reasons.values()) == others + len(set(articles) - texts.keys())
    for title, text in texts.items():
        assert not re.search(r"\{\{|\}\}|\[\[|\]\]|<ref|\x02|\x03|'''", text), title
    if name == REAL:
        assert len(articles) == 106 and reasons["redirects"] == 99
        assert "is a political philosophy that advocates self-governed societies" in texts["Anarchism"]


@pytest.mark.parametrize("name", ["wiki.xml", "wiki.xml.bz2"])
def test_a_dump_gives_its_articles_and_counts_all_other_pages(name: str, tmp_path: Path) -> None:
    others = [
        page("Town", "#REDIRECT [[Arden]]", redirect="Arden"),
        page("Talk:Arden", "hello", namespace=1),
        page("List of towns", "* [[Arden]]"),
        page("Arden (disambiguation)", "x"),
        page("Ouse", "x {{disambig}}"),
        page("Empty", "{{Infobox}}"),
    ]
    pages = [page(title, markup) for title, markup in TOWNS.items()]
    texts, reasons = read(write_dump(tmp_path / name, [*others[:3], *pages, *others[3:]]))
    assert texts == {
        "Arden": "Arden is a town on the Ouse.",
        "Brack": "Brack is a village. It has 5 km of walls.",
        "Croft & Sons": "A firm.\n\nHistory\n\nIt began in 1900.",
    }
    assert reasons == {
        "redirects": 1,
        "pages that are not articles": 1,
        "lists, indexes and outlines": 1,
        "disambiguation pages": 2,
        "without text": 1,
    }


def test_a_link_to_a_redirect_is_a_link_to_the_page_behind_it(tmp_path: Path) -> None:
    pages = [
        page("Towns", "[[Town]], [[hamlet]], [[Arden]], [[Circle]] and [[Nowhere]]"),
        page("Town", "#REDIRECT [[Settlement]]", redirect="Settlement"),
        page("Circle", "#REDIRECT [[Ring]]", redirect="Ring"),
        page("Ring", "#REDIRECT [[Circle]]", redirect="Circle"),
        page("Settlement", "A place."),
        page("Hamlet", "#REDIRECT [[Town#Small]]", redirect="Town#Small"),
    ]
    for name in ("wiki.xml", "wiki.xml.bz2"):
        first, _ = read_documents([str(write_dump(tmp_path / name, pages))], report=ReadingReport())
        assert first.links is not None
        *titles, circle, nowhere = (link.title for link in first.links)
        assert titles == ["Settlement", "Settlement", "Arden"] and nowhere == "Nowhere"
        assert circle in ("Circle", "Ring")
        assert [first.text[link.start :][:4] for link in first.links] == [
            "Town",
            "haml",
            "Arde",
            "Circ",
            "Nowh",
        ]


def test_pages_stay_in_order_however_long_they_take(tmp_path: Path) -> None:
    titles = [f"Page {number}" for number in range(120)]
    pages = [
        page(title, f"{title} is [[here]]. " * (300 if n % 7 == 0 else 1)) for n, title in enumerate(titles)
    ]
    assert list(read(write_dump(tmp_path / "wiki.xml", pages))[0]) == titles


def test_what_stands_before_the_damage_is_read(tmp_path: Path) -> None:
    pages = [page(f"Page {n}", f"Number {n}. " * 200 + str(hash(str(n)))) for n in range(300)]
    whole = write_dump(tmp_path / "wiki.xml.bz2", pages)
    data = (
        bz2.compress("".join([HEAD, *pages[:150]]).encode())
        + bz2.compress("".join(pages[150:]).encode())[:-40]
    )
    whole.write_bytes(data)  # two streams, as in a multistream dump
    texts, reasons = read(whole)
    assert list(texts) == [f"Page {n}" for n in range(len(texts))]
    assert len(texts) >= 120
    assert reasons == {"damaged": 1}
    cut = tmp_path / "cut.xml"
    cut.write_text((HEAD + "".join(pages))[:20_000])
    assert read(cut)[1] == {"damaged": 1}


def test_a_page_without_end_is_left_out_and_the_next_one_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(dumps, "MOST_SECONDS", 1)
    pages = [
        page("Tags", "<b " * 20_000),  # hours for the parser
        page("Templates", "{{a|" * 10_000 + "x" + "}}" * 10_000),
        page("Arden", TOWNS["Arden"]),
    ]
    texts, reasons = read(write_dump(tmp_path / "wiki.xml", pages))
    assert list(texts) == ["Arden"]
    assert reasons == {"too long": 1, "without text": 1}


def test_long_pages_wait_one_by_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(dumps, "MOST_WAITING", 1000)
    monkeypatch.setattr(dumps, "default_processes", lambda: 4)
    waiting = most = 0
    submit = dumps._Workers.submit

    def counted(workers: Any, where: str, page: dumps.Page, dropped: list[str]) -> Any:
        nonlocal waiting, most
        length = len(page.markup or "")
        waiting, most = waiting + length, max(most, waiting + length)
        result = submit(workers, where, page, dropped)

        def taken() -> Any:
            nonlocal waiting
            waiting -= length
            return result()

        return taken

    monkeypatch.setattr(dumps._Workers, "submit", counted)
    texts, _ = read(
        write_dump(tmp_path / "wiki.xml", [page(f"Page {n}", "A word. " * 100) for n in range(20)])
    )
    assert (len(texts), waiting, most) == (20, 0, 1600)


@pytest.mark.slow
def test_a_page_of_50_megabytes_is_left_out_and_the_next_one_is_read(tmp_path: Path) -> None:
    markup = "[[Long]] '''words''' and {{templates|with=[[links]]}}. " * 950_000
    path = write_dump(tmp_path / "wiki.xml", [page("Long", markup), page("Arden", TOWNS["Arden"])])
    assert len(markup) > 50_000_000
    assert read(path) == ({"Arden": "Arden is a town on the Ouse."}, {"too long": 1})


@pytest.mark.parametrize(("deaths", "left_out"), [(1, {}), (2, {"too long": 1})])
def test_a_page_is_parsed_again_if_something_kills_the_process_that_parses_it(
    deaths: int, left_out: dict[str, int], tmp_path: Path, monkeypatch
) -> None:
    starts = []
    start = dumps._start

    def dying() -> "subprocess.Popen[bytes]":
        starts.append(None)
        if len(starts) > deaths:
            return start()
        return subprocess.Popen(
            ["sh", "-c", "read line; kill -9 $$"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    monkeypatch.setattr(dumps, "_start", dying)
    monkeypatch.setattr(dumps, "default_processes", lambda: 1)
    pages = [page(town, text) for town, text in TOWNS.items()]
    texts, reasons = read(write_dump(tmp_path / "wiki.xml", pages))
    assert reasons == left_out
    assert len(texts) == len(pages) - len(left_out)
    assert len(starts) == deaths + 1


@pytest.mark.slow
def test_a_page_that_takes_too_long_is_not_parsed_again(tmp_path: Path, monkeypatch) -> None:
    starts, start = [], dumps._start
    monkeypatch.setattr(dumps, "_start", lambda: starts.append(None) or start())
    monkeypatch.setattr(dumps, "default_processes", lambda: 1)
    monkeypatch.setattr(dumps, "MOST_SECONDS", 1)
    pages = [page("Tags", "<b " * 20_000), page("Arden", TOWNS["Arden"])]
    texts, reasons = read(write_dump(tmp_path / "wiki.xml", pages))
    assert (list(texts), reasons, len(starts)) == (["Arden"], {"too long": 1}, 2)


def articles(path: Path, kept: Path) -> list[Record]:
    return [one for one in dumps.dump(path, Limits(), kept) if isinstance(one, Record)]


def test_pages_that_were_parsed_before_a_kill_are_not_parsed_again(tmp_path: Path, monkeypatch) -> None:
    pages = [page(f"Page {n}", f"Number {n} is [[here]]. " * n) for n in range(1, 80)]
    path, kept = write_dump(tmp_path / "wiki.xml", pages), tmp_path / "build" / "parsed.sqlite"
    script = (
        "import os, sys; from tests.documents.wikipedia.test_dumps import *; from realm import kept_values;"
        "kept_values.AT_ONCE = 4; path, kept = map(Path, sys.argv[1:]); read = dumps.dump(path, Limits(), kept);"
        "[next(read) for _ in range(41)]; os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", script, path, kept], cwd=Path(__file__).parents[3])
    assert killed.returncode == -signal.SIGKILL
    parse, parsed = dumps._Workers._parsed, []

    def counted(workers: Any, page: dumps.Page, dropped: list[str]) -> bytes:
        parsed.append(page.title)
        return parse(workers, page, dropped)

    monkeypatch.setattr(dumps._Workers, "_parsed", counted)
    found = articles(path, kept)
    assert parsed == [one.title for one in found[40:]]  # of 41 pages, a multiple of 4 was written
    assert found == list(dumps.dump(path, Limits()))
    parsed.clear()
    pages[5] = page("Page 6", "Another text.")
    assert articles(write_dump(path, pages), kept)[5].text == "Another text."
    assert parsed == ["Page 6"]


@pytest.mark.slow
def test_what_cannot_be_parsed_is_kept_too_and_damaged_values_are_parsed_again(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(dumps, "MOST_SECONDS", 1)
    path = write_dump(tmp_path / "wiki.xml", [page("Tags", "<b " * 20_000), page("Arden", TOWNS["Arden"])])
    kept = tmp_path / "parsed.sqlite"
    found = list(map(str, dumps.dump(path, Limits(), kept)))
    with monkeypatch.context() as patch:
        patch.setattr(dumps, "_start", None)
        assert list(map(str, dumps.dump(path, Limits(), kept))) == found
    with closing(sqlite3.connect(tmp_path / "parsed.sqlite")) as database, database:
        database.execute("UPDATE pages SET value = substr(value, 1, 9)")
    assert list(map(str, dumps.dump(path, Limits(), kept))) == found


def test_a_page_of_100_megabytes_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "wiki.xml"
    with path.open("w") as file:
        file.write(HEAD + "<page><title>Long</title><ns>0</ns><revision><text>")
        for _ in range(100):
            file.write("long words " * 95_326)
        file.write("</text></revision></page>" + page("Arden", TOWNS["Arden"]) + "</mediawiki>")
    assert read(path) == ({"Arden": "Arden is a town on the Ouse."}, {"too long": 1})
    said, megabytes = documents_and_megabytes(path)
    assert said == "1 1" and megabytes < 80  # of a page, up to 64 MiB wait for its end


def test_an_entity_that_grows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.xml"
    levels = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    path.write_text(
        f'<!DOCTYPE mediawiki [<!ENTITY e0 "bomb">{levels}]>\n<mediawiki>{page("A", "x").replace(">x<", ">&e9;<")}</mediawiki>'
    )
    with pytest.raises(InputError, match="document type"):
        list(read_documents([str(path)]))


def test_other_xml_is_no_error_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "pom.xml").write_text("<project><title>x</title></project>")
    write_dump(tmp_path / "wiki.xml", [page("Arden", TOWNS["Arden"])])
    assert read(tmp_path)[1] == {"of a type that is not read": 1}
    assert [one.title for one in read_documents([str(tmp_path)])] == ["Arden"]
