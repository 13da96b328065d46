"""Dumps of a MediaWiki, WikiExtractor's output and DPR's table: as their programs write them, and damaged."""

import bz2
import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from gensim.test.utils import datapath
from hypothesis import given
from hypothesis import strategies as st

from realm.documents.formats.records import Limits, Record, Unreadable
from realm.documents.reading import ReadingReport, read_documents
from realm.documents.wikipedia import dumps, multistream
from realm.documents.wikipedia.multistream import parts_of
from realm.documents.wikipedia.wikitext import read_wikitext
from realm.errors import InputError
from realm.keys import KeyTable, key_of
from realm.text.corpus import Link
from tests.documents.writers import HEAD, page, read, write_dump, write_multistream

TOWNS = {
    "Arden": "'''Arden''' is a town on the [[Ouse (river)|Ouse]].[[Datei:Arden.jpg|thumb|The [[town]]]]",
    "Brack": "'''Brack''' is a village.{{Coord|1|N}} It has {{convert|5|km|mi}} of walls.<ref>{{cite}}</ref>",
    "Croft & Sons": "A firm.\n== History ==\nIt began in 1900.\n== References ==\n* A book",
}


# -- markup


def test_words_links_and_signs_of_a_sentence_are_what_a_reader_sees() -> None:
    markup = (
        "'''Arden''' ({{IPA|x}}; {{lang|fr|Ardenne}}) is an ''old'' [[town]] on the [[ouse (river)#Bed|Ouse]],"
        " {{nowrap|in the [[North]]}} &ndash; see [http://a.b its page].<ref name=x>No</ref> <!-- no -->"
        "<math>x</math> {{formatnum:5000}} people{{formatnum:{{data|Arden}}}} {{as of|2010}}.[[de:Arden]][[Category:Towns]]"
    )
    found = read_wikitext(markup)
    assert found.text == (
        "Arden (Ardenne) is an old town on the Ouse, in the North – see its page. 5000 people As of 2010."
    )
    assert found.links == (Link(26, "Town"), Link(38, "Ouse (river)"), Link(51, "North"))
    assert not found.disambiguation


def test_templates_that_produce_words_are_replaced_by_them() -> None:
    for markup, text in {
        "Nero ({{circa|37}}; {{c.}})": "Nero (c. 37; c.)",
        "{{lang-fr|mot}}, {{langx|fr|mots|lit=words}}": "mot, mots",
        "{{HMS|Victory|1765}} met {{ship|French ship|Orient|1791}}": "HMS Victory met French ship Orient",
        "{{lang|2=mot|1=fr}} {{quote|2=Author|1=Words}} {{langx|fr|text=mot}} a&#3;b": "mot Words mot ab",
        "{{start date|1999|12||df=no}} {{dts|1999|12|31|df=}}": "December 1999 December 31, 1999",
        "{{as of|1999|12|31}}": "As of 31 December 1999",
        "of {{plainlist|\n* [[Arden]]\n* Brack\n}}; {{hlist|a|b}}": "of Arden, Brack; a, b",
        "{{start date|1999|12|31|df=y}}, {{dts|1999|12}}, {{end date|1999|13}}": "31 December 1999, December 1999, 1999 13",
        "''Eagle''{{'s}} {{nowrap|1=''E'' = x}} 5{{nbsp}}km": "Eagle's E = x 5 km",
        "{{val|6.241|e=18}} {{val|3|u=km}} {{chem|C|H|4}} {{sortname|Ada|Byron}}": "6.241×10^18 3 km CH4 Ada Byron",
        "{|\n! Land !! Isles\n|-\n| {{flag|Azores}} || {{ubl|Pico|Flores}}\n|}": "Land: Azores; Isles: Pico, Flores.",
        "x{{hlist}}{{flag}}{{langx}}{{sortname|a}}{{ship}}{{start date}}{{val}}y": "xy",
    }.items():
        assert read_wikitext(markup).text == text


def test_lists_and_tables_become_lines_and_lists_of_sources_vanish() -> None:
    markup = (
        'Rivers:\n* [[Ouse]]\n* Tees\n{| class="wikitable"\n|+ Towns\n! Name !! People\n|-\n| [[Arden]] || 500\n|-\n'
        "| Brack\n| 20\n|-\n| colspan=2 | none\n|}\n== References ==\n* A book\n=== More ===\n* Another\n== Later ==\nEnd."
    )
    text = "Rivers:\nOuse\nTees\n\nTowns\nName: Arden; People: 500.\nName: Brack; People: 20.\nnone\n\nLater\n\nEnd."
    assert read_wikitext(markup).text == text


@pytest.mark.parametrize(
    "template", ["disambiguation", "Disambig", "dab", "Human name disambiguation", "Geodis"]
)
def test_pages_that_list_meanings_are_known_by_their_template(template: str) -> None:
    assert read_wikitext(f"It may be:\n* [[A]]\n{{{{{template}}}}}").disambiguation
    assert read_wikitext(f"It may be:\n* [[A]]\n== See also ==\n* [[B]]\n{{{{{template}|x}}}}").disambiguation


@given(
    st.lists(
        st.sampled_from(
            ["[[", "]]", "{{", "}}", "{|", "|}", "\n|-", "|", "''", "<ref>", "</ref>", "=", "a", "\n", "*"]
        )
    )
)
def test_no_markup_is_an_error_and_text_without_markup_stays(parts: list[str]) -> None:
    read_wikitext("".join(parts))
    plain = " ".join(part for part in parts if part == "a")
    assert read_wikitext(plain).text == plain


def test_a_link_stands_where_its_words_stand_after_the_markup_is_gone() -> None:
    markup = (
        "''[[a_b|''Ada'']]''  (; {{x}}) is {{nowrap| [[ bo#Life | the Bo ]]}}.[[C|{{flag}}]]\n\n\n\n"
        "{| \n|+ [[Tables|Caption]]\n! Name !! [[people|People]]\n|-\n|  [[:de:Arden|Arden]] || [[D|{{small|Dora}}]]\n|}\n"
        "* ( , [[AT&amp;T]]) [[Datei:x.png|thumb|[[Hidden]]]] <ref>[[Source]]</ref>&#2;0&#2;\n== See also ==\n* [[Seen]]"
    )
    found = read_wikitext(markup, ["Datei"])
    assert [(link.title, found.text[link.start :].split()[0]) for link in found.links] == [
        ("A b", "Ada"),
        ("Bo", "the"),
        ("Tables", "Caption"),
        ("De:Arden", "Arden;"),
        ("People", "People:"),
        ("D", "Dora."),
        ("AT&T", "AT&T)"),
    ]


# -- dumps


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
        "import os, sys; from tests.documents.test_wikipedia import *; from realm import kept_values;"
        "kept_values.AT_ONCE = 4; path, kept = map(Path, sys.argv[1:]); read = dumps.dump(path, Limits(), kept);"
        "[next(read) for _ in range(41)]; os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", script, path, kept], cwd=Path(__file__).parents[2])
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


# -- parts of dumps


def pages_with_redirects(count: int) -> list[str]:
    """Every fifth page is a redirect to a later page, to which the next page has a link."""
    return [
        page(f"Page {n}", f"#REDIRECT [[Page {n + 3}]]", redirect=f"Page {n + 3}")
        if n % 5 == 0
        else page(
            f"Page {n}", f"Number {n} is after [[Page {n // 5 * 5}]]. " + str(Random(n).getrandbits(999))
        )
        for n in range(count)
    ]


def read_parts(path: Path) -> list[Record | Unreadable]:
    """The records of all parts of a dump, with the links of the redirects of all parts."""
    parts = parts_of(path)
    assert len(parts) > 2 and parts[0].start == 0 and parts[-1].end == path.stat().st_size
    with KeyTable() as redirects:
        for part in parts:
            for title, target in dumps.redirects_of_part(part):
                redirects.put(key_of(title), target)
        return [
            dumps.resolved(one, redirects)
            for part in parts
            for one in dumps.articles_of_part(part, path, Limits())
        ]


def test_parts_of_a_dump_have_the_articles_of_the_dump(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(multistream, "PART_BYTES", 4000)
    path = write_multistream(tmp_path / "wiki.xml.bz2", pages_with_redirects(100))
    found, expected = read_parts(path), list(dumps.dump(path, Limits()))
    assert [one for one in found if isinstance(one, Record)] == [
        one for one in expected if isinstance(one, Record)
    ]
    assert list(map(str, found)) == list(map(str, expected))
    assert sum(isinstance(one, Record) for one in found) == 80


def test_the_search_for_parts_and_the_first_reading_of_a_dump_show_their_progress(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("realm.progress.EVERY", 0.0)
    monkeypatch.setattr(multistream, "PART_BYTES", 4000)
    path = write_multistream(tmp_path / "wiki.xml.bz2", pages_with_redirects(100))
    parts_of(path)
    places = len(range(4000, path.stat().st_size - 4000, 4000))
    assert f"find parts: part {places} of {places} (100%)" in capsys.readouterr().err
    next(dumps.dump(path, Limits()))
    assert "read redirects: redirect 20," in capsys.readouterr().err


def test_a_dump_whose_streams_do_not_begin_with_pages_is_not_split(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(multistream, "PART_BYTES", 2000)
    pages = pages_with_redirects(100)
    text = "".join([HEAD, *pages, "</mediawiki>"]).encode()
    streams = [text[at : at + 5000] for at in range(0, len(text), 5000)]  # as by pbzip2
    anywhere = tmp_path / "anywhere.xml.bz2"
    anywhere.write_bytes(b"".join(map(bz2.compress, streams)))
    pages_in_head = tmp_path / "pages.xml.bz2"
    pages_in_head.write_bytes(bz2.compress((HEAD + "".join(pages[:50])).encode()))
    with pages_in_head.open("ab") as file:
        file.write(bz2.compress(("".join(pages[50:]) + "</mediawiki>").encode()))
    for path in (anywhere, pages_in_head, write_dump(tmp_path / "one.xml.bz2", pages)):
        assert path.stat().st_size > 4000 and parts_of(path) == []
        assert len(read(path)[0]) == 80


# -- WikiExtractor


def test_wikiextractors_files_give_articles_in_both_forms(tmp_path: Path) -> None:
    folder = tmp_path / "AA"
    folder.mkdir()
    texts = {"Arden": "Arden is a town.\n\nIt is old.", "R&D": "R&D is work."}
    (folder / "wiki_00").write_text(
        "".join(
            f'<doc id="{n}" url="https://x/?curid={n}" title="{escape(title)}">\n{escape(title)}\n\n{escape(text)}\n</doc>\n'
            for n, (title, text) in enumerate([*texts.items(), ("List of towns", "Arden"), ("Nothing", "")])
        )
    )
    rows = [
        {"id": "5", "url": "u", "title": "Brack", "text": "Brack\n\nBrack is &lt; Arden."},
        {"id": "6", "url": "u", "title": "Mercury (disambiguation)", "text": "x"},
    ]
    (folder / "wiki_01.bz2").write_bytes(bz2.compress("\n".join(map(json.dumps, rows)).encode()))
    found, reasons = read(tmp_path)
    assert found == texts | {"Brack": "Brack is < Arden."}
    assert reasons == {"lists, indexes and outlines": 1, "disambiguation pages": 1, "without text": 1}


WITH_LINKS = """<doc id="101" url="https://de.wikipedia.org/wiki?curid=101" title="Arden">
Arden

Arden is a &lt;a href="town"&gt;town&lt;/a&gt; on the &lt;a href="ouse%20%28river%29%23Bed"&gt;Ouse&lt;/a&gt; &amp; the \
&lt;a href="R%26amp%3BD"&gt;R&amp;D "x"&lt;/a&gt;. See &lt;a href="http%3A//a.b/c%3Fd%3D1"&gt;its page&lt;/a&gt; and \
&lt;a href="%C5%81%C3%B3d%C5%BA"&gt;Łódź&lt;/a&gt;.
History.
In &lt;a href="1900%20in%20art"&gt;1900&lt;/a&gt; it grew; 1 &lt; 2.

</doc>
<doc id="102" url="https://de.wikipedia.org/wiki?curid=102" title="Brack">
Brack

Brack has no links.

</doc>
"""
"""Written by WikiExtractor 3.1.0 with `--links`, from a dump with two pages."""


@pytest.mark.parametrize("unit", ['<a href="x">', '<a href="', '<a href="x">a</a>'])
def test_many_links_that_do_not_end_take_no_more_time_than_complete_links(tmp_path: Path, unit: str) -> None:
    (tmp_path / "wiki_00").write_text(f'<doc id="1" url="" title="A">\nA\n\n{unit * 50_000}\n</doc>\n')
    began = time.process_time()
    assert len(list(read_documents([str(tmp_path / "wiki_00")]))) == 1
    assert time.process_time() - began < 10


def test_links_of_wikiextractors_files_are_titles_and_not_text(tmp_path: Path) -> None:
    (tmp_path / "wiki_00").write_text(WITH_LINKS)
    body = WITH_LINKS.split("\n", 3)[3].split("\n\n</doc>")[0]
    row = {
        "id": "101",
        "revid": "8",
        "url": "u",
        "title": "Arden",
        "text": body,
    }  # the other form of the output
    (tmp_path / "wiki_01").write_text(json.dumps(row))
    arden, brack, again = read_documents([str(tmp_path)])
    assert arden.text == (
        'Arden is a town on the Ouse & the R&D "x". See its page and Łódź.\nHistory.\nIn 1900 it grew; 1 < 2.'
    )
    assert [(link.title, arden.text[link.start :].split()[0]) for link in arden.links or ()] == [
        ("Town", "town"),
        ("Ouse (river)", "Ouse"),
        ("R&D", "R&D"),
        ("Łódź", "Łódź."),
        ("1900 in art", "1900"),
    ]
    assert brack.links is None
    assert (again.text, again.links) == (arden.text, arden.links)


def test_wikiextractors_file_that_was_cut_off_keeps_its_articles(tmp_path: Path) -> None:
    path = tmp_path / "wiki_00"
    path.write_text(
        '<doc id="1" url="u" title="A">\nA\n\nWords.\n</doc>\n<doc id="2" url="u" title="B">\nB\n'
    )
    assert read(path) == ({"A": "Words."}, {"damaged": 1})
