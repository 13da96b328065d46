"""ZIM archives of wikis and WARC archives of the web: as their programs write them, and damaged."""

import gzip
import io
import struct
from pathlib import Path
from random import Random

import pytest
from libzim.reader import Archive
from libzim.writer import Creator

from realm.documents.formats.records import Limits, Reason, Record
from realm.documents.reading import ReadingReport, read_documents
from realm.documents.wikipedia import zim
from realm.errors import InputError
from realm.text.corpus import Link
from tests.documents.writers import ZimPage, read, with_checksum, write_warc, write_zim

# -- ZIM


def test_a_zim_archive_gives_its_pages(tmp_path: Path) -> None:
    texts, reasons = read(write_zim(tmp_path / "wiki.zim"))
    assert texts == {"Arden": "Arden is old."}
    assert reasons == {"lists, indexes and outlines": 1}


def test_pages_are_read_in_the_order_in_which_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order, a cluster would be decompressed again for almost every page."""
    monkeypatch.setattr(zim, "_AT_A_TIME", 7)
    random, size, in_a_cluster = Random(0), 500, 20
    names = random.sample([f"{number:03}" for number in range(200)], 200)
    with Creator(str(tmp_path / "wiki.zim")).config_clustersize(size * in_a_cluster) as archive:
        for name in names:
            archive.add_item(ZimPage(name, f"Page {name}", f"<p>{random.randbytes(size // 2).hex()}</p>"))
            archive.add_redirection(f"to-{name}", "", name, {})
    records = zim.read(tmp_path / "wiki.zim", Limits(size * 2))
    found = [one.title.removeprefix("Page ") for one in records if isinstance(one, Record)]
    assert sorted(found) == sorted(names)
    places = {name: place for place, name in enumerate(names)}
    assert max(abs(places[name] - place) for place, name in enumerate(found)) < in_a_cluster


def test_a_text_that_begins_with_the_words_of_its_title_keeps_them(tmp_path: Path) -> None:
    with Creator(str(tmp_path / "wiki.zim")) as archive:
        archive.add_item(ZimPage("10", "10", "<p>10 is a year.</p>"))
    assert read(tmp_path / "wiki.zim") == ({"10": "10 is a year."}, {})


def test_links_of_a_zim_archive_are_the_titles_of_its_pages(tmp_path: Path) -> None:
    body = (
        '<nav><a href="Ouse_(river)">menu</a></nav><h1><a href="Town">Arden</a></h1><p>Arden is <b>a'
        '<a href="../A/Town"> <i>town</i></a></b> on the <a href="./Ouse_(river)#Bed">\n Ouse</a>.</p>'
        '<h2>1 <a href="Ouse%20%3F">River</a></h2><p><a href="#top">Up</a>, <a href="https://a.b/c">out</a>, '
        '<a href="s.css">style</a>, <a href="//[">bad</a>, <a href="gone">gone</a>, <a>none</a>, <a href="Ouse ?"></a>the end.'
    )
    with Creator(str(tmp_path / "wiki.zim")) as archive:
        archive.add_item(ZimPage("A/Arden", "Arden", f"<html><body>{body}</p></body></html>"))
        archive.add_item(ZimPage("A/Ouse_(river)", "Ouse (river)", "<p>A river.</p>"))
        archive.add_item(ZimPage("A/Ouse ?", "Ouse?", "<p>A question.</p>"))
        archive.add_item(ZimPage("A/s.css", "", "p {}", "text/css"))
        archive.add_redirection("A/Town", "Town", "A/Settlement", {})
        archive.add_item(ZimPage("A/Settlement", "Settlement", "<p>A place.</p>"))
    documents = {one.title: one for one in read_documents([str(tmp_path / "wiki.zim")])}
    arden = documents["Arden"]
    assert arden.text == (
        "Arden is a town on the Ouse.\n\n1 River\n\nUp, out, style, bad, gone, none, the end."
    )
    assert [(link.title, arden.text[link.start :].split()[0]) for link in arden.links or ()] == [
        ("Settlement", "town"),
        ("Ouse (river)", "Ouse."),
        ("Ouse?", "River"),
    ]
    assert documents["Settlement"].links == ()


REFERENCE = '<sup class="mw-ref reference" id="cite_ref-1"><a href="#cite_note-1">[1]</a></sup>'
FORMULA = (
    '<span class="mwe-math-element"><math><semantics><mi>x</mi><annotation>{\\displaystyle x}</annotation></semantics></math>'
    '<img class="mwe-math-fallback-image-inline" alt="x"></span>'
)


def section(level: int, words: str, text: str) -> str:
    """A section as mwoffliner writes it; `text` may contain further sections."""
    edit = '<span class="mw-editsection">[<a href="edit">edit</a>]</span>'
    return (
        f'<details data-level="{level}" open=""><summary class="section-heading"><h{level} id="{words}">{edit}{words}'
        f"</h{level}></summary>{text}</details>"
    )


def wiki_page(title: str, text: str) -> str:
    """A page of Wikipedia as mwoffliner writes it."""
    footer = 'This article is issued from <a href="https://en.wikipedia.org">Wikipedia</a>.'
    return (
        f"<!DOCTYPE html><html class='client-js'><head><title>{title}</title></head><body class=\"mediawiki skin-minerva\">"
        f'<div id="content" class="mw-body"><h1 id="titleHeading">{title}</h1><div id="mw-content-text">'
        f'<div class="mw-parser-output">{text}</div></div></div>'
        f"<!--htdig_noindex--><div style='clear:both'>{footer}</div><!--/htdig_noindex-->"
        f'<div class="zim-footer">{footer}</div></body></html>'
    )


WIKI_PAGE = wiki_page(
    "Arden",
    '<div class="hatnote">For other uses, see <a class="mw-disambig" href="Arden_(disambiguation)">Arden</a>.</div>'
    '<table class="box-More_citations ambox metadata"><tr><td>This article needs <p>more sources.</p></td></tr></table>'
    '<table class="infobox vcard"><tbody><tr><th colspan="2">Arden</th></tr><tr><th>Country</th><td>France</td></tr></table>'
    '<figure class="mw-default-size"><img src="x.png"><figcaption>The bridge</figcaption></figure>'
    f'<style>p {{}}</style><p><b>Arden</b> is a town{REFERENCE} on the <a href="Ouse">Ouse</a>.</p>'
    + section(
        2,
        "History",
        f"<p>Its mint struck{FORMULA} coins.</p>"
        + section(3, "Mint", "<p>It closed in 1437.</p>")
        + f'<table class="wikitable"><tr><th>Year</th><th>People{REFERENCE}</th></tr>'
        f"<tr><td>1900{REFERENCE}</td><td>400</td></tr></table>"
        '<ul class="gallery"><li class="gallerybox"><div class="gallerytext">The tower</div></li></ul>',
    )
    + section(
        2,
        "See  also",
        '<ul><li><a href="Ouse">Ouse</a></li></ul>' + section(3, "Rivers", '<p><a href="Ouse">Ouse</a></p>'),
    )
    + section(2, "Legacy", "<p>It is remembered.</p>" + section(3, "Notes", "<p>A note.</p>"))
    + section(
        2, "References", f'<div class="reflist"><ol class="references"><li>A Book.{FORMULA}</li></ol></div>'
    )
    + section(2, "Economy", "<p>It sells wool.</p>")
    + section(2, "External links", "<table><tr><td><ul><li>Official site</li></ul></td></tr></table>")
    + '<div role="navigation" class="navbox"><table><tr><th>Towns</th><td><p>Brack</p></td></tr></table></div>',
)
WIKI_TEXT = (
    "Arden is a town on the Ouse.\n\nHistory\n\nIts mint struck coins.\n\nMint\n\nIt closed in 1437.\n\n"
    "Year: 1900; People: 400.\n\nLegacy\n\nIt is remembered.\n\nEconomy\n\nIt sells wool."
)


def test_the_text_of_a_page_of_wikipedia_is_its_article_without_boxes_and_sources(tmp_path: Path) -> None:
    box = '<div id="disambigbox" class="metadata dmbox dmbox-disambig"><p>Topics with the same name</p></div>'
    property_of_parsoid = '<meta property="mw:PageProp/disambiguation" id="mwAQ"/>'
    with Creator(str(tmp_path / "wiki.zim")) as archive:
        archive.add_item(ZimPage("A/Arden", "Arden", WIKI_PAGE))
        archive.add_item(ZimPage("A/Ouse", "Ouse", wiki_page("Ouse", "<p>A river.</p>")))
        archive.add_item(ZimPage("A/Brack", "Brack", wiki_page("Brack", f"<p>Brack may be:</p>{box}")))
        archive.add_item(
            ZimPage("A/Croft", "Croft", wiki_page("Croft", f"{property_of_parsoid}Croft may be:"))
        )
        archive.add_item(
            ZimPage("A/Dunmore", "Dunmore", wiki_page("Dunmore", section(2, "Notes", "<p>x</p>")))
        )
    report = ReadingReport()
    documents = {one.title: one for one in read_documents([str(tmp_path / "wiki.zim")], report=report)}
    assert {title: one.text for title, one in documents.items()} == {"Arden": WIKI_TEXT, "Ouse": "A river."}
    assert documents["Arden"].links == (Link(WIKI_TEXT.index("Ouse"), "Ouse"),)
    assert report.reasons == {Reason.DISAMBIGUATION: 2, Reason.NO_TEXT: 1}


def test_a_damaged_zim_archive_is_left_out(tmp_path: Path) -> None:
    data = write_zim(tmp_path / "wiki.zim").read_bytes()
    (places,) = struct.unpack_from("<Q", data, 32)
    last = places + 8 * (Archive(tmp_path / "wiki.zim").all_entry_count - 1)
    # The last entry begins with the last byte of the file. libzim opens this archive.
    at_the_end = with_checksum(data[:last] + struct.pack("<Q", len(data) - 1) + data[last + 8 :])
    for damaged in (at_the_end, data[:200], data[: len(data) // 2], b"ZIM" + data[3:80] + bytes(200)):
        (tmp_path / "wiki.zim").write_bytes(damaged)
        with pytest.raises(InputError, match=r"wiki\.zim"):
            list(read_documents([str(tmp_path / "wiki.zim")]))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_zim_archive_that_does_not_match_its_checksum_is_left_out(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzim reads "Arden is odd." from this archive."""
    path = write_zim(tmp_path / "wiki.zim", compressed=False)
    data = path.read_bytes()
    assert with_checksum(data) == data and data.count(b"Arden is old.") == 1
    monkeypatch.setattr(zim, "PART_BYTES", len(data) // 3)
    assert len(zim.parts_of(path)) > 1
    path.write_bytes(data.replace(b"Arden is old.", b"Arden is odd."))
    with pytest.raises(InputError, match=r"wiki\.zim is damaged \(it does not match its checksum\)"):
        list(read_documents([str(path)], processes=processes))
    path.write_bytes(with_checksum(path.read_bytes()))
    assert [one.text for one in read_documents([str(path)], processes=processes)] == ["Arden is odd."]


def test_pages_of_a_zim_archive_are_in_utf_8_whatever_they_declare(tmp_path: Path) -> None:
    """Programs that make archives of sites convert the pages, and leave the declaration as it was."""
    with Creator(str(tmp_path / "wiki.zim")) as archive:
        archive.add_item(ZimPage("lodz", "Łódź", "<meta charset=iso-8859-2><p>Łódź.</p>"))
        archive.add_item(ZimPage("bad", "Bad", b"<p>A bad \xff byte.</p>"))
    assert read(tmp_path / "wiki.zim")[0] == {"Łódź": "Łódź.", "Bad": "A bad \ufffd byte."}


# -- WARC


def test_damaged_places_of_a_compressed_archive_of_the_web_cost_only_pages_near_them(tmp_path: Path) -> None:
    path = write_warc(tmp_path / "crawl.warc.gz", 300)
    whole, _ = read(path)
    data = bytearray(path.read_bytes())
    for place in (len(data) // 4, len(data) // 2):
        data[place : place + 20] = bytes(20)
    path.write_bytes(data)
    report = ReadingReport()
    found = {one.title: one.text for one in read_documents([str(path)], report=report)}
    lost = [number for number, title in enumerate(whole) if title not in found]
    assert list(found.items()) == [one for one in whole.items() if one[0] in found]
    assert report.reasons == {"damaged": 2} and "up to byte" in report.left_out[0].problem
    # the decompression reads 8 kB, or 128 kB since Python 3.12, ahead of the damage
    buffer = getattr(gzip, "READ_BUFFER_SIZE", io.DEFAULT_BUFFER_SIZE)
    ahead = 3 + 2 * buffer // (len(data) // 300)
    assert 2 <= len(lost) <= 2 * ahead
    assert lost[0] == pytest.approx(75, abs=3) and lost[-1] < 150 + ahead


def test_after_many_damaged_places_an_archive_of_the_web_is_not_read_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realm.documents.formats.warc.MOST_DAMAGES", 2)
    path = write_warc(tmp_path / "crawl.warc.gz", 300)
    data = bytearray(path.read_bytes())
    for quarter in (1, 2, 3):
        data[len(data) * quarter // 4 : len(data) * quarter // 4 + 20] = bytes(20)
    path.write_bytes(data)
    texts, reasons = read(path)
    assert 130 < len(texts) < 155 and reasons == {"damaged": 2}


@pytest.mark.parametrize("name", ["crawl.warc", "crawl.warc.gz"])
def test_an_archive_of_the_web_gives_its_pages(name: str, tmp_path: Path) -> None:
    documents = list(read_documents([str(write_warc(tmp_path / name))]))
    assert [(one.id, one.title, one.text) for one in documents] == [
        ("http://a.b/1", "Arden", "Arden is old."),
        ("http://a.b/3", "Brack", "Brack\n\nSmall."),
        ("http://a.b/4", "Łódź", "Łódź."),
    ]


def test_a_damaged_archive_of_the_web_keeps_the_pages_before_the_damage(tmp_path: Path, capfd) -> None:
    path = write_warc(tmp_path / "crawl.warc.gz", 40)
    path.write_bytes(path.read_bytes()[:-30])
    texts, reasons = read(path)
    assert list(texts)[:20] == ["Arden", "Brack", "Łódź", *map(str, range(17))] and reasons == {"damaged": 1}
    assert "WARNING" not in capfd.readouterr().err


def test_a_damaged_plain_archive_of_the_web_is_reported(tmp_path: Path, capfd) -> None:
    plain = write_warc(tmp_path / "lengths.warc")
    plain.write_bytes(plain.read_bytes().replace(b"Arden is old.", b"Arden is older than that."))
    assert read(plain)[1] == {"damaged": 1}
    assert "WARNING" not in capfd.readouterr().err
    plain.write_bytes(plain.read_bytes().replace(b"Content-Length: ", b"Content-Size: ", 1))
    with pytest.raises(InputError, match="a record has no Content-Length"):
        read(plain)
    (tmp_path / "other.warc").write_text("This is no archive.\nAt all.\n")
    with pytest.raises(InputError, match=r"other\.warc is damaged"):
        list(read_documents([str(tmp_path / "other.warc")]))
