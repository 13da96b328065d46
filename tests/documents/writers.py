"""Writes PDF, Word documents and EPUB with fpdf2, python-docx and zipfile, dumps of a MediaWiki, and ZIM and WARC archives.

`read` gives what realm reads from a file.
"""

import bz2
import gzip
import hashlib
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from io import BytesIO
from itertools import islice
from pathlib import Path
from random import Random
from xml.sax.saxutils import escape

import docx
from docx.document import Document
from docx.enum.style import WD_STYLE_TYPE
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from fpdf import FPDF
from libzim.writer import Compression, Creator, Hint, Item, StringProvider
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from realm.documents.reading import ReadingReport, read_documents

SENTENCES = (
    "The town of Arden lies on the river Ouse between the sea and the hills.",
    "Alaric built a tower for Ermina, who kept forty horses there for 12 years.",
    "It sells wool, salt and amber to the merchants of Dunmore every spring!",
    "Nobody knows who burnt the bridge; the monks wrote that it was lightning.",
    "The mint of Halden was closed in 1437, and opened again by Dagobert.",
)


def paragraphs(count: int) -> list[str]:
    """Paragraphs of two to six sentences, no two alike."""
    return [
        " ".join(
            SENTENCES[(number * 3 + n) % 5].replace("town", f"town {number}") for n in range(2 + number % 5)
        )
        for number in range(count)
    ]


class Manual(FPDF):
    """Pages with a header and a page number."""

    def header(self) -> None:
        self.set_font("Helvetica", size=9)
        self.cell(0, 8, f"Manual of towns - {self.page_no()}", new_x="LMARGIN", new_y="NEXT")

    def footer(self) -> None:
        self.set_y(-15)
        self.set_font("Helvetica", size=9)
        self.cell(0, 8, str(self.page_no()), align="C")


def pdf(path: Path, blocks: Sequence[str], title: str = "", **encryption: str) -> Path:
    """A PDF of justified paragraphs; blocks that begin with "# " are headings."""
    manual = Manual(format=(148, 210))
    if title:
        manual.set_title(title)
    if encryption:
        manual.set_encryption(**encryption)  # type: ignore[arg-type]
    manual.add_page()
    for block in blocks:
        manual.set_font("Times", size=18 if block.startswith("# ") else 11)
        manual.multi_cell(
            0,
            10 if block.startswith("# ") else 5.5,
            block.removeprefix("# "),
            align="J",
            new_x="LMARGIN",
            new_y="NEXT",
        )
        manual.ln(3)
    manual.output(str(path))
    return path


@cache
def _word_template() -> bytes:
    template = docx.Document()
    for style in list(template.styles):
        if style.type == WD_STYLE_TYPE.TABLE:
            style.delete()
    template.save(saved := BytesIO())
    return saved.getvalue()


def empty_word() -> Document:
    """An empty Word document without the hundred styles of tables of python-docx, which take a quarter of a second to read."""
    return docx.Document(BytesIO(_word_template()))


def word(path: Path, title: str = "") -> Path:
    """A Word document with about everything that it may hold."""
    document = empty_word()
    document.core_properties.title = title
    document.sections[0].header.paragraphs[0].text = "A header of every page"
    document.add_heading("Towns of the Ouse", 0)
    document.add_heading("Arden", 1)
    paragraph = document.add_paragraph("The town of ")
    paragraph.add_run("Ar").bold = True
    paragraph.add_run("den lies on the Ouse.")
    paragraph._p.append(
        parse_xml(f'<w:del {nsdecls("w")} w:id="1"><w:r><w:delText>Deleted.</w:delText></w:r></w:del>')
    )
    paragraph._p.append(parse_xml(f'<w:ins {nsdecls("w")} w:id="2"><w:r><w:t> Inserted.</w:t></w:r></w:ins>'))
    document.add_paragraph("Wool", style="List Bullet")
    document.add_paragraph("Salt", style="List Bullet")
    table = document.add_table(rows=2, cols=2)
    for cell, text in zip(
        [*table.rows[0].cells, *table.rows[1].cells], ("Town", "River", "Arden", "Ouse"), strict=True
    ):
        cell.text = text
    document.save(str(path))
    return path


WORD_BLOCKS = [
    *("Arden", "The town of Arden lies on the Ouse. Inserted.", "Wool", "Salt"),
    *("Town | River", "Arden | Ouse"),
]
"""What the text of `word` is."""

CONTAINER = (
    '<?xml version="1.0"?><container xmlns="urn:oasis:names:tc:opendocument:xmlns:container" version="1.0"><rootfiles>'
    '<rootfile full-path="OPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)
PACKAGE = """<?xml version="1.0"?>
<package xmlns="http://www.idpf.org/2007/opf" version="3.0">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Towns of the Ouse</dc:title></metadata>
<manifest>
<item id="b" href="text/b%20two.xhtml" media-type="application/xhtml+xml"/>
<item id="toc" href="toc.xhtml" properties="nav" media-type="application/xhtml+xml"/>
<item id="a" href="text/a.xhtml" media-type="application/xhtml+xml"/>
<item id="font" href="font.otf" media-type="font/otf"/>
</manifest>
<spine><itemref idref="toc"/><itemref idref="a"/><itemref idref="gone"/><itemref idref="b"/></spine>
</package>"""
PAGE = """<?xml version="1.0" encoding="utf-8"?>
<html xmlns="http://www.w3.org/1999/xhtml"><head><title/><script src="x.js"/><style>p {{ }}</style></head>
<body><h1><a id="start"/>{}</h1><p>{}</p><div class="end"/></body></html>"""
BOOK = {
    "mimetype": "application/epub+zip",
    "META-INF/container.xml": CONTAINER,
    "OPS/book.opf": PACKAGE,
    "OPS/toc.xhtml": PAGE.format("Contents", "Arden"),
    "OPS/text/a.xhtml": PAGE.format("Arden", "On the&nbsp;Ouse &amp; the sea."),
    "OPS/text/b two.xhtml": PAGE.format("Bexley", "Köln &#8212; far away."),
}
BOOK_TEXT = "Arden\n\nOn the Ouse & the sea.\n\nBexley\n\nKöln — far away."


def zipped(path: Path, parts: Mapping[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


class ZimPage(Item):
    """An entry of a ZIM archive; only pages of HTML are articles."""

    def __init__(self, path: str, title: str, content: str | bytes, kind: str = "text/html"):
        super().__init__()
        self.values = path, title, content, kind

    def get_path(self) -> str:
        return self.values[0]

    def get_title(self) -> str:
        return self.values[1]

    def get_mimetype(self) -> str:
        return self.values[3]

    def get_contentprovider(self) -> StringProvider:
        return StringProvider(self.values[2])

    def get_hints(self) -> dict[Hint, bool]:
        return {Hint.FRONT_ARTICLE: self.values[3] == "text/html"}


HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo>
    <sitename>Wiki</sitename>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""


def page(title: str, markup: str, namespace: int = 0, redirect: str = "") -> str:
    to = f'<redirect title="{escape(redirect)}" />' if redirect else ""
    return (
        f"  <page>\n    <title>{escape(title)}</title>\n    <ns>{namespace}</ns>\n    <id>7</id>\n    {to}\n"
        f"    <revision>\n      <id>8</id>\n      <contributor><username>U</username><id>9</id></contributor>\n"
        f'      <text bytes="1" xml:space="preserve">{escape(markup)}</text>\n    </revision>\n  </page>\n'
    )


def write_dump(path: Path, pages: Iterable[str]) -> Path:
    text = HEAD + "".join(pages) + "</mediawiki>\n"
    path.write_bytes(bz2.compress(text.encode()) if path.suffix == ".bz2" else text.encode())
    return path


def write_multistream(path: Path, pages: Iterable[str], per_stream: int = 10) -> Path:
    """A dump whose first lines, last line and every `per_stream` pages are each a stream of bzip2, as Wikimedia writes it."""
    rest = iter(pages)
    with path.open("wb") as file:
        file.write(bz2.compress(HEAD.encode()))
        while block := "".join(islice(rest, per_stream)):
            file.write(bz2.compress(block.encode()))
        file.write(bz2.compress(b"</mediawiki>"))
    return path


def write_articles_as_dump(path: Path, articles: Iterable[tuple[str, str]]) -> Path:
    """A multistream dump of titles and plain texts. Every sign that could be markup is written as a reference."""

    def markup(text: str) -> str:
        return re.sub(r"[^\w\s.,()-]", lambda sign: f"&#{ord(sign[0])};", text)

    pages = (page(title, "\n\n".join(map(markup, _lines_of(text)))) for title, text in articles)
    return write_multistream(path, pages, 100)


def write_articles_as_zim(path: Path, articles: Iterable[tuple[str, str]]) -> Path:
    """A ZIM archive of titles and plain texts: one page of HTML per title, one paragraph per line."""
    with Creator(str(path)) as archive:
        for title, text in articles:
            body = "".join(f"<p>{escape(line)}</p>" for line in _lines_of(text))
            html = f"<title>{escape(title)}</title>{body}"
            archive.add_item(ZimPage(title.replace(" ", "_"), title, html))
    return path


def _lines_of(text: str) -> Iterator[str]:
    return (line.strip() for line in text.split("\n") if line.strip())


def write_zim(path: Path, compressed: bool = True) -> Path:
    compression = Compression.zstd if compressed else Compression.none
    with Creator(str(path)).config_compression(compression) as archive:
        for title in ("Arden", "List of towns"):
            body = f"<body><nav>menu</nav><h1>{title}</h1><p>{title} is old.</p></body>"
            html = f"<html><head><title>{title}</title></head>{body}</html>"
            archive.add_item(ZimPage(title.replace(" ", "_"), title, html))
        archive.add_item(ZimPage("style.css", "", "p {}", "text/css"))
        archive.add_redirection("Town", "Town", "Arden", {})
    return path


def with_checksum(data: bytes | bytearray) -> bytes:
    """A changed ZIM archive with its right checksum at the end."""
    return data[:-16] + hashlib.md5(data[:-16]).digest()


def write_warc(path: Path, more: int = 0) -> Path:
    """An archive as crawlers write it: requests beside responses, one of them compressed by the server, one an error."""
    answers = [
        ("http://a.b/1", "200 OK", {}, b"<title>Arden</title><nav>menu</nav><p>Arden is old.</p>"),
        ("http://a.b/2", "404 Not Found", {}, b"<p>nothing</p>"),
        (
            "http://a.b/3",
            "200 OK",
            {"Content-Encoding": "gzip"},
            gzip.compress(b"<h1>Brack</h1><p>Small.</p>"),
        ),
        (
            "http://a.b/4",
            "200 OK",
            {},
            "<meta charset=iso-8859-2><title>Łódź</title>Łódź.".encode("iso-8859-2"),
        ),
    ]
    random = Random(0)
    for number in range(more):  # that do not compress
        body = f"<h1>{number}</h1><p>{random.randbytes(8000).hex()}</p>"
        answers.append((f"http://a.b/more/{number}", "200 OK", {}, body.encode()))
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=path.suffix == ".gz")
        for address, status, more, body in answers:
            headers = [("Content-Type", "text/html"), *more.items()]
            http = StatusAndHeaders(status, headers, protocol="HTTP/1.1")
            writer.write_record(writer.create_warc_record(address, "request", http_headers=http))
            writer.write_record(
                writer.create_warc_record(address, "response", BytesIO(body), http_headers=http)
            )
        picture = StatusAndHeaders("200 OK", [("Content-Type", "image/png")], protocol="HTTP/1.1")
        writer.write_record(
            writer.create_warc_record("http://a.b/5", "response", BytesIO(b"\x89PNG"), http_headers=picture)
        )
    return path


def read(path: Path) -> tuple[dict[str, str], dict[str, int]]:
    """Title -> text, and what was left out by reason."""
    report = ReadingReport()
    documents = list(read_documents([str(path)], report=report))
    return {one.title: one.text for one in documents}, dict(report.reasons)


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
