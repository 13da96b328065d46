"""PDF, Word documents and EPUB: the text as it was written; what cannot be read is left out by reason, in bounded time."""

import os
import random
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from fpdf import FPDF
from fpdf.fonts import FontFace

from realm.documents import child_process
from realm.documents.formats import pdf as pages
from realm.documents.formats.pdf import read as read_pdf
from realm.documents.formats.records import Limits, Record, Unreadable
from realm.documents.reading import ReadingReport, read_documents
from realm.errors import InputError
from realm.text.corpus import Document
from tests.documents import writers
from tests.documents.test_damaged_files import damaged
from tests.documents.writers import BOOK, BOOK_TEXT, WORD_BLOCKS, Manual, empty_word, zipped


def read(*sources: Path) -> tuple[list[Document], ReadingReport]:
    report = ReadingReport()
    return list(read_documents(list(map(str, sources)), report=report)), report


def pdf_text(path: Path) -> str:
    (found,) = (one for one in read_pdf(path, Limits()) if isinstance(one, Record))
    return found.text


# --- PDF ------------------------------------------------------------------------------------------


def test_paragraphs_come_back_without_headers_page_numbers_and_line_breaks(tmp_path: Path) -> None:
    written = ["# Towns", *writers.paragraphs(12), "# Rivers", *writers.paragraphs(24)[12:]]
    text = pdf_text(writers.pdf(tmp_path / "a.pdf", written))
    assert "Manual of towns" not in text
    assert text.split("\n\n") == [block.removeprefix("# ") for block in written]


def rows(path: Path, *texts: str) -> Path:
    """A PDF with a row for each text."""
    pdf = Manual()
    pdf.add_page()
    pdf.set_font("Times", size=11)
    for text in texts:
        pdf.cell(0, 5.5, text, new_x="LMARGIN", new_y="NEXT")
    pdf.output(str(path))
    return path


def test_divided_words_are_whole_again_and_hyphens_of_their_own_stay(tmp_path: Path) -> None:
    long = "the bridge of the old town over the broad river was of course at last recon-"
    text = pdf_text(
        rows(tmp_path / "a.pdf", long, "structed by well-known masons, whose names are not all for-",
             "gotten here: they were said to be the most well-", "known men of the town for hundreds of years.")
    )  # fmt: skip
    for words in ("last reconstructed by well-known", "all forgotten here", "most well-known men"):
        assert words in text


@pytest.mark.parametrize(
    ("end", "start", "joined"),
    [
        ("two-", "and three-storey", "two- and three-storey"),
        ("2-", "and 3-storey", "2- and 3-storey"),
        ("black-", "and-white", "black-and-white"),
        ("Haupt-", "und Nebenrollen", "Haupt- und Nebenrollen"),
        ("COVID-", "19", "COVID-19"),
        ("state-of-the-", "art", "state-of-the-art"),
    ],
)
def test_a_hyphen_that_divides_no_word_stays(end: str, start: str, joined: str, tmp_path: Path) -> None:
    long = f"the bridge of the old town over the broad river was of course at last seen {end}"
    others = (
        "for hundreds of years; and of the art of state, of the COVID and the state-of-the-art of the town"
    )
    assert f"seen {joined} for" in pdf_text(rows(tmp_path / "a.pdf", long, f"{start} {others}."))


def test_rows_of_a_form_and_of_an_address_stay_rows(tmp_path: Path) -> None:
    form = [
        "Customer: Tidewater Logistics AS",
        "Due date: 4 May 2024",
        "City: Oslo",
        "Verksgata 12 b",
        "4013 Stavanger",
    ]
    assert pdf_text(rows(tmp_path / "a.pdf", *form)).split("\n\n")[1] == "\n".join(form)


def test_a_full_row_above_a_capital_letter_continues(tmp_path: Path) -> None:
    full = "The bridge of the old town over the broad river was built of stone by the masons of the city of"
    text = pdf_text(rows(tmp_path / "a.pdf", full, "Ryhall, and is long."))
    assert text.split("\n\n")[1] == f"{full} Ryhall, and is long."


def test_a_document_of_two_pages_has_no_page_numbers_and_one_header(tmp_path: Path) -> None:
    class Report(FPDF):
        def header(self) -> None:
            self.set_font("Times", size=11)
            for text in ("Report 7", f"Page {self.page_no()}"):
                self.cell(0, 8, text, new_x="LMARGIN", new_y="NEXT")

    report = Report()
    report.set_font("Times", size=11)
    for word in ("bridge", "river"):
        report.add_page()
        report.multi_cell(0, 5.5, f"The {word} of the town is old. " * 20)
    report.output(str(tmp_path / "a.pdf"))
    text = pdf_text(tmp_path / "a.pdf")
    assert text.startswith("Report 7\n\nThe bridge") and text.count("Report 7") == 1 and "Page" not in text


def test_headings_at_the_top_of_two_pages_stay(tmp_path: Path) -> None:
    report = FPDF()
    for number in (1, 2):
        report.add_page()
        report.set_font("Times", size=18)
        report.cell(0, 10, f"Part {number}", new_x="LMARGIN", new_y="NEXT")
        report.set_font("Times", size=11)
        report.multi_cell(0, 5.5, f"The bridge {number} of the town is old. " * 20)
    report.output(str(tmp_path / "a.pdf"))
    text = pdf_text(tmp_path / "a.pdf")
    assert "Part 1" in text and "Part 2" in text


def test_columns_are_read_one_after_the_other(tmp_path: Path) -> None:
    written = " ".join(writers.paragraphs(40))
    pdf = Manual()
    pdf.add_page()
    pdf.set_font("Times", size=11)
    with pdf.text_columns(ncols=2, gutter=10, text_align="J") as columns:
        columns.write(written)
    pdf.output(str(tmp_path / "a.pdf"))
    text = pdf_text(tmp_path / "a.pdf")
    words = [
        word for word in text.split() if word not in ("Manual", "of", "towns", "-") and not word.isdigit()
    ]
    assert words == [word for word in written.split() if word not in ("of", "towns") and not word.isdigit()]


def pdf_table(path: Path, lines: list[tuple[str, ...]], after: str = "", **options: Any) -> list[str]:
    """The blocks that are read of a PDF with this table, and a paragraph below it."""
    pdf = FPDF()
    pdf.add_page()
    pdf.set_font("Times", size=11)
    with pdf.table(**options) as table:
        for line in lines:
            table.row(line)
    if after:
        pdf.multi_cell(0, 6, after)
    pdf.output(str(path))
    return pdf_text(path).split("\n\n")


SENSORS = [
    ("Sensor", "Range", "Accuracy", "Check"),
    ("pH", "0 to 14", "0.05", "every 30 days"),
    ("Dissolved oxygen of the water", "0 to 25 mg/l", "0.1 mg/l", "every 12 months"),
    ("Depth", "0 to 60 m", "", "every 12 months"),
]
SENTENCES = [
    "Sensor: pH; Range: 0 to 14; Accuracy: 0.05; Check: every 30 days.",
    "Sensor: Dissolved oxygen of the water; Range: 0 to 25 mg/l; Accuracy: 0.1 mg/l; Check: every 12 months.",
    "Sensor: Depth; Range: 0 to 60 m; Check: every 12 months.",
]


@pytest.mark.parametrize("align", ["LEFT", "RIGHT", "CENTER"])
@pytest.mark.parametrize("bold", [True, False])
def test_rows_of_a_pdf_table_get_the_names_of_their_columns(align: str, bold: bool, tmp_path: Path) -> None:
    style = FontFace(emphasis="BOLD" if bold else None)
    after = (
        "The sensor for oxygen measures optically, and needs no oxygen of the water around it, as others do. "
        * 2
    )
    options = {"text_align": align, "headings_style": style, "col_widths": (45, 25, 25, 30)}
    blocks = pdf_table(tmp_path / "a.pdf", SENSORS, after, **options)
    assert blocks[:3] == SENTENCES and blocks[3].startswith(
        "The sensor for oxygen measures optically, and needs no"
    )
    two = [row[:2] for row in SENSORS]
    named = pdf_table(tmp_path / "b.pdf", two, **options | {"col_widths": (45, 25)})
    assert (named[0] == "Sensor: pH; Range: 0 to 14.") == bold
    if not bold:  # a table with two columns can be a form
        assert "pH | 0 to 14" in named[0]


def test_a_cell_of_several_lines_stays_in_its_column(tmp_path: Path) -> None:
    lines = [
        *SENSORS[:2],
        ("Depth", "0 to 60 m", "0.1 m", "every 12 months, or after each fall to the ground"),
    ]
    pdf = FPDF()
    pdf.add_page()
    for number, line in enumerate(lines):
        pdf.set_font("Times", "B" if number == 0 else "", 11)
        rows = zip(
            *(textwrap.wrap(cell, 18) + [""] * (3 - len(textwrap.wrap(cell, 18))) for cell in line),
            strict=True,
        )
        for row in filter(any, rows):
            for place, cell in enumerate(row):
                if cell:
                    pdf.set_x(20 + 45 * place)
                    pdf.cell(40, 6, cell)
            pdf.ln()
    pdf.output(str(tmp_path / "a.pdf"))
    assert pdf_text(tmp_path / "a.pdf").split("\n\n") == [
        SENTENCES[0],
        "Sensor: Depth; Range: 0 to 60 m; Accuracy: 0.1 m; Check: every 12 months, or after each fall to the ground.",
    ]


def test_a_word_that_is_divided_in_a_cell_is_joined_and_ends_no_sentence() -> None:
    def row(base: float, *cells: tuple[float, str], divided: bool = False) -> pages.Row:
        words = tuple(pages.Word(left, left + 5 * len(text), text) for left, text in cells)
        text = " | ".join(text for _, text in cells)
        return pages.Row(
            text, words[0].left, words[-1].right, base, 10, divided, words, "B" if base == 90 else ""
        )

    rows = [
        row(90, (0, "Town"), (100, "Note")),
        row(78, (0, "Arden"), (100, "oxy"), divided=True),
        row(66, (100, "gen")),
        row(54, (0, "Ayr"), (100, "two"), divided=True),
        row(42, (100, "and three-storey")),
        row(30, (0, "Kelso"), (100, "wa"), divided=True),
    ]
    assert pages._joined([pages._with_tables([*rows, row(18, (0, "ter runs there."))])]).split("\n\n") == [
        "Town: Arden; Note: oxygen.",
        "Town: Ayr; Note: two- and three-storey.",
        "Town: Kelso; Note: wa.",
        "ter runs there.",
    ]


def test_cells_of_a_table_without_names_stand_beside_each_other(tmp_path: Path) -> None:
    plain = {"first_row_as_headings": False}
    for lines in ([("Arden", "Ouse"), ("Halden", "Velka"), ("Kelso", "Tweed")], SENSORS[1:]):
        text = "\n".join(pdf_table(tmp_path / "a.pdf", lines, **plain))
        assert " | ".join(filter(None, lines[0])) in text and ": " not in text
    towns = [("Town", "River"), ("Arden", "Ouse"), ("Halden", "Velka")]
    assert pdf_table(tmp_path / "a.pdf", towns) == [
        "Town: Arden; River: Ouse.",
        "Town: Halden; River: Velka.",
    ]


def test_ligatures_become_letters_and_leading_dots_few(tmp_path: Path) -> None:
    import matplotlib

    pdf = Manual()
    pdf.add_font("DejaVu", fname=Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"))
    pdf.add_page()
    pdf.set_font("DejaVu", size=11)
    pdf.cell(0, 6, "The ﬁnal oﬃce ﬂoor", new_x="LMARGIN", new_y="NEXT")
    pdf.cell(0, 6, "1 Introduction . . . . . . . . . . . . . . 12", new_x="LMARGIN", new_y="NEXT")
    pdf.output(str(tmp_path / "a.pdf"))
    text = pdf_text(tmp_path / "a.pdf")
    assert "The final office floor" in text and "1 Introduction ... 12" in text


def test_a_title_in_the_metadata_counts_where_it_is_one(tmp_path: Path) -> None:
    for title, expected in (
        ("Towns of the Ouse", "Towns of the Ouse"),
        ("Microsoft Word - x.doc", "a"),
        ("", "a"),
    ):
        (found,) = (
            one
            for one in read_pdf(writers.pdf(tmp_path / "a.pdf", ["Text."], title), Limits())
            if isinstance(one, Record)
        )
        assert (found.title, found.id) == (expected, f"{tmp_path}/a.pdf")


def test_a_long_pdf_reports_its_pages_and_ends_at_the_limit(tmp_path: Path) -> None:
    file = writers.pdf(tmp_path / "a.pdf", writers.paragraphs(60))
    *pages, _ = read_pdf(file, Limits())
    assert [page.done for page in pages] == list(range(1, pages[-1].total + 1)) and len(pages) > 5
    with pytest.raises(
        Unreadable, match=r"a\.pdf: over 5,000 characters by page \d of \d+: split it, or raise"
    ):
        list(read_pdf(file, Limits(5_000)))


# --- Word, EPUB, and all of them in a folder ------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound files, and every kind of one that cannot be read."""
    folder = tmp_path_factory.mktemp("papers")
    writers.word(folder / "titled.docx", "A title")
    writers.word(folder / "untitled.DOCX", "Document1")
    zipped(folder / "book.epub", BOOK)
    encryption = (
        '<encryption xmlns:e="http://www.w3.org/2001/04/xmlenc#"><e:CipherReference URI="{}"/></encryption>'
    )
    zipped(folder / "fonts.epub", {**BOOK, "META-INF/encryption.xml": encryption.format("OPS/font.otf")})
    zipped(
        folder / "locked.epub",
        {**BOOK, "META-INF/encryption.xml": encryption.format("OPS/text/b%20two.xhtml")},
    )
    zipped(folder / "no_book.epub", {"a.txt": "a"})
    zipped(folder / "no_word.docx", {"a.txt": "a"})
    laughs = '<!DOCTYPE a [<!ENTITY a "ha">' + "".join(
        f'<!ENTITY {b} "{f"&{a};" * 20}">' for a, b in zip("abcdefghi", "bcdefghij", strict=True)
    )
    zipped(folder / "laughs.epub", {**BOOK, "OPS/book.opf": f"{laughs}]><package>&j;</package>"})
    (folder / "cut.docx").write_bytes((folder / "titled.docx").read_bytes()[:-2_000])
    with zipfile.ZipFile(folder / "titled.docx") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    zipped(folder / "laughs.docx", {**parts, "word/document.xml": f"{laughs}]><a>&j;</a>"})
    zipped(folder / "bomb.docx", {**parts, "word/document.xml": b" " * (65 << 20)})
    (folder / "old.docx").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600))
    (folder / "locked.docx").write_bytes(
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600) + "EncryptedPackage".encode("utf-16-le")
    )
    writers.pdf(folder / "sound.pdf", ["# Arden", "On the Ouse."])
    writers.pdf(folder / "owned.pdf", ["On the Ouse."], owner_password="x")
    writers.pdf(folder / "locked.pdf", ["Secret."], owner_password="x", user_password="y")
    (folder / "noise.pdf").write_bytes(random.Random(0).randbytes(1_000))
    (folder / "empty.pdf").write_bytes(b"")
    scan = FPDF()
    scan.add_page()
    scan.rect(10, 10, 50, 50)
    scan.output(str(folder / "scan.pdf"))
    return folder


def test_a_folder_is_read_but_for_what_is_left_out_by_reason(folder: Path) -> None:
    documents, report = read(folder)
    found = {Path(d.id).name: d for d in documents}
    assert found["titled.docx"].title == "A title"
    assert found["titled.docx"].text.split("\n\n") == ["Towns of the Ouse", *WORD_BLOCKS]
    assert found["untitled.DOCX"].title == "Towns of the Ouse"
    assert found["untitled.DOCX"].text.split("\n\n") == WORD_BLOCKS
    assert found["book.epub"][:2] == found["fonts.epub"][:2] == ("Towns of the Ouse", BOOK_TEXT)
    assert "On the Ouse." in found["owned.pdf"].text and "Arden\n\nOn the Ouse." in found["sound.pdf"].text
    assert len(found) == 6
    assert {(Path(one.where).name, one.reason) for one in report.left_out} == {
        ("locked.epub", "encrypted"),
        ("no_book.epub", "damaged"),
        ("laughs.epub", "damaged"),
        ("no_word.docx", "damaged"),
        ("cut.docx", "damaged"),
        ("laughs.docx", "damaged"),
        ("bomb.docx", "too long"),
        ("old.docx", "damaged"),
        ("locked.docx", "encrypted"),
        ("locked.pdf", "encrypted"),
        ("noise.pdf", "damaged"),
        ("empty.pdf", "empty"),
        ("scan.pdf", "without text"),
    }
    assert all(Path(one.where).name in one.problem for one in report.left_out)


def test_without_a_report_the_first_file_that_cannot_be_read_is_an_error(folder: Path) -> None:
    with pytest.raises(InputError, match=r"locked\.docx is encrypted: save it without a password$"):
        list(read_documents([str(folder / "locked.docx")]))


@pytest.mark.parametrize(("library", "name"), [("pypdfium2", "sound.pdf"), ("mammoth", "titled.docx")])
def test_a_missing_library_is_one_line_with_the_command_that_installs_it(
    folder: Path, library: str, name: str, monkeypatch
) -> None:
    from realm.documents.formats import pdf, word

    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(Unreadable, match=r"needs \w+: pip install 'realm-lm\[documents\]'$") as caught:
        list((pdf if name.endswith("pdf") else word).read(folder / name, Limits()))
    report = ReadingReport()
    report.leave_out(caught.value)
    assert (
        "left out: 1 because a library is not installed (pip install 'realm-lm[documents]'): "
        in report.lines()[0]
    )


# --- the child ------------------------------------------------------------------------------------

CHILD = """
import tests.documents.misbehaving
from realm.documents import child_process
child_process.MODULES[".pdf"], child_process.MOST_SECONDS = "tests.documents.misbehaving", 0.3
child_process.main()
"""


def test_a_reader_that_crashes_loops_or_takes_all_memory_loses_its_own_file_alone(
    tmp_path: Path, monkeypatch
) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(os.getpid())],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    monkeypatch.setattr(child_process, "_start", start)
    for name in ("a", "crash", "exit", "loop", "m", "memory", "z"):
        (tmp_path / f"{name}.pdf").write_text(name)
    documents, report = read(tmp_path)
    assert [d.text for d in documents] == ["a", "m", "z"]
    assert [(Path(one.where).stem, one.reason) for one in report.left_out] == [
        ("crash", "damaged"),
        ("exit", "damaged"),
        ("loop", "too long"),
        ("memory", "too long"),
    ]
    assert "the process that read it ended with SIGSEGV" in report.left_out[0].problem
    assert "the process that read it ended with exit code 3" in report.left_out[1].problem


def test_a_child_ends_with_what_is_read_even_where_reading_ends_early(tmp_path: Path, monkeypatch) -> None:
    children = []
    start = child_process._start
    monkeypatch.setattr(child_process, "_start", lambda: children.append(start()) or children[-1])
    for name in "abc":
        zipped(tmp_path / f"{name}.epub", BOOK)
    documents = read_documents([str(tmp_path)])
    next(documents)
    documents.close()  # type: ignore[attr-defined]
    assert len(list(read_documents([str(tmp_path)]))) == 3
    assert len(children) == 2 and all(child.poll() is not None for child in children)


# --- damage ---------------------------------------------------------------------------------------


def check_damaged(folder: Path, sound: Path, count: int, seed: int) -> None:
    """Reads a folder of damaged files: each gives documents or is left out."""
    draw = random.Random(seed)
    files = [sound / name for name in ("sound.pdf", "titled.docx", "book.epub")]
    folder.mkdir()
    for number in range(count):
        file, other = draw.choice(files), draw.choice(files)
        target = folder / f"{number}{file.suffix}"
        if file.suffix != ".pdf" and draw.random() < 0.5:  # a sound archive of damaged parts
            with zipfile.ZipFile(file) as archive:
                parts = {name: archive.read(name) for name in archive.namelist()}
            name = draw.choice(list(parts))
            zipped(target, {**parts, name: damaged(parts[name] or b" ", other.read_bytes(), draw)})
        else:
            target.write_bytes(damaged(file.read_bytes(), other.read_bytes(), draw))
    documents, report = read(folder)
    for document in documents:
        "".join(document[:3]).encode()
    left_out = [
        one.where.partition(" ")[0] for one in report.left_out
    ]  # a part of an archive stands behind its name
    assert len({Path(d.id) for d in documents} | set(map(Path, left_out))) == count
    assert all(one.problem.isprintable() and "Error" not in one.reason for one in report.left_out)


def test_damaged_pdf_word_and_epub_files_are_documents_or_left_out(tmp_path: Path, folder: Path) -> None:
    check_damaged(tmp_path / "damaged", folder, 20, 0)


@pytest.mark.slow
def test_many_damaged_pdf_word_and_epub_files_are_documents_or_left_out(
    tmp_path: Path, folder: Path, trials
) -> None:
    check_damaged(tmp_path / "damaged", folder, trials.count(2000), trials.seed)


def word_table(path: Path, rows: list[list[str]], bold: bool = False, marked: int | None = None) -> list[str]:
    """What is read of a Word document with this table, of which a row is marked as headings."""
    document = empty_word()
    table = document.add_table(rows=len(rows), cols=len(rows[0]))
    for number, (row, texts) in enumerate(zip(table.rows, rows, strict=True)):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.paragraphs[0].add_run(text).bold = bold and number == 0
        if number == marked:
            row._tr.get_or_add_trPr().append(parse_xml(f"<w:tblHeader {nsdecls('w')}/>"))
    document.save(str(path))
    (one,) = read(path)[0]
    return one.text.split("\n\n")


ALLOWANCES = [["Country", "Daily", "Hotel"], ["Norway", "977 NOK", "1,800"], ["Japan", "", "24,000"]]


@pytest.mark.parametrize("marked", [None, 0])
def test_rows_of_a_word_table_get_the_names_of_their_columns(marked: int | None, tmp_path: Path) -> None:
    assert word_table(tmp_path / "a.docx", ALLOWANCES, marked=marked) == [
        "Country: Norway; Daily: 977 NOK; Hotel: 1,800.",
        "Country: Japan; Hotel: 24,000.",
    ]
    terms = [["Term", "Meaning"], ["CTD", "a probe"], ["PSU", "a unit"]]
    assert word_table(tmp_path / "b.docx", terms, bold=True)[0] == "Term: CTD; Meaning: a probe."


@pytest.mark.parametrize(
    "rows",
    [
        [["Name", "Anna Berg"], ["Born", "1987"], ["Phone", "555"]],  # a form
        [["Norway", "977 NOK", "1,800"], ["Japan", "14,500", "24,000"]],  # no headings
        [["Anna", "clerk", "Oslo"], ["Carl", "smith", "Bergen"]],
        [["Place", "Place", "Staff"], ["Oslo", "Norway", "12"]],
        [["Place", "", "Staff"], ["Oslo", "Norway", "12"]],
        [["Place", "Country", "Staff"]],
    ],
)
def test_the_first_row_of_a_word_table_is_not_taken_for_names_without_evidence(rows, tmp_path: Path) -> None:
    assert word_table(tmp_path / "a.docx", rows)[0] == " | ".join(filter(None, rows[0])) or not all(rows[0])
    assert not any(": " in line for line in word_table(tmp_path / "a.docx", rows))


def test_a_word_table_in_a_cell_of_another_has_its_own_headings(tmp_path: Path) -> None:
    document = empty_word()
    outer = document.add_table(rows=1, cols=1)
    inner = outer.cell(0, 0).add_table(3, 3)
    for row, texts in zip(inner.rows, ALLOWANCES, strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    document.save(str(tmp_path / "a.docx"))
    assert "Country: Norway; Daily: 977 NOK; Hotel: 1,800." in read(tmp_path / "a.docx")[0][0].text
