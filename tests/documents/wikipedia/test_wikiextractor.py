"""WikiExtractor's output."""

import bz2
import json
import time
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from realm.documents.reading import read_documents
from tests.documents.writers import read


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
