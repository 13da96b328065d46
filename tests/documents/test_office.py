"""Workbooks and presentations: what xlsxwriter, xlwt, python-pptx and a hand-made archive wrote is read as text."""

import datetime
import random
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import xlsxwriter
from hypothesis import given, settings
from hypothesis import strategies as st
from pptx import Presentation

from realm.documents.formats import odt as odt_reader
from realm.documents.formats import slides, workbooks
from realm.documents.formats.records import Limits, Record
from realm.documents.reading import ReadingReport, read_documents
from realm.text.corpus import Annotations, Cut, split_document
from tests.documents.test_damaged_files import damaged
from tests.documents.writers import zipped

FIXTURES = Path(__file__).parent / "fixtures"
TOWNS = [["Town", "River", "Founded"], ["Arden", "Ouse", 1203], ["Halden", "Velka", 1455]]
TOWNS_TEXT = "Town: Arden; River: Ouse; Founded: 1203.\nTown: Halden; River: Velka; Founded: 1455."


def workbook(
    path: Path, sheets: dict[str, Sequence[Sequence[Any]]], title: str = "", hidden: str = ""
) -> Path:
    with xlsxwriter.Workbook(path) as book:
        book.set_properties({"title": title})
        day = book.add_format({"num_format": "yyyy-mm-dd"})
        for name, rows in sheets.items():
            sheet = book.add_worksheet(name)
            for r, row in enumerate(rows):
                for c, value in enumerate(row):
                    dated = isinstance(value, datetime.date | datetime.time)
                    sheet.write(r, c, value, *([day] if dated else []))
            if name == hidden:
                sheet.hide()
    return path


def one(read: Callable[..., Any], path: Path, **limits: Any) -> Record:
    (record,) = read(path, Limits(**limits))
    assert isinstance(record, Record)
    return record


# -- workbooks


def test_rows_of_a_sheet_are_sentences_with_the_headings_of_the_columns(tmp_path: Path) -> None:
    record = one(workbooks.read, workbook(tmp_path / "towns.xlsx", {"Sheet1": TOWNS}))
    assert (record.title, record.text, record.id) == ("towns", TOWNS_TEXT, f"{tmp_path}/towns.xlsx")
    with_macros = (tmp_path / "towns.xlsx").rename(tmp_path / "towns.xlsm")
    assert [document.text for document in read_documents([str(with_macros)])] == [TOWNS_TEXT]


def test_a_row_of_a_table_is_a_passage_with_the_name_of_its_sheet_or_its_heading(tmp_path: Path) -> None:
    workbook(tmp_path / "rates.xlsx", {"Oslo": TOWNS[:2], "Bergen": [TOWNS[0], TOWNS[2]]})
    table = "| Town | River | Founded |\n| --- | --- | --- |\n| {} | {} | {} |\n"
    (tmp_path / "rates.md").write_text(
        "# Rates\n\n## Oslo\n\n" + table.format(*TOWNS[1]) + "\n## Bergen\n\n" + table.format(*TOWNS[2])
    )
    for name, title in (("rates.xlsx", "rates"), ("rates.md", "Rates")):
        (document,) = read_documents([str(tmp_path / name)], headings=True)
        made = split_document(document, Annotations((), ()), lambda texts: [1] * len(texts), Cut(rows=True))
        assert [(one.title, one.text.split("\n")[-1]) for one in made] == [
            (f"{title} > {town}", row)
            for town, row in zip(("Oslo", "Bergen"), TOWNS_TEXT.split("\n"), strict=True)
        ]


def test_workbook_of_excel_97_and_of_open_document_are_read_as_the_same(tmp_path: Path) -> None:
    """The first was written by xlwt 1.3, which is no longer maintained."""
    cell = '<table:table-cell office:value-type="string"><text:p>{}</text:p></table:table-cell>'
    rows = "".join(
        f"<table:table-row>{''.join(cell.format(value) for value in row)}</table:table-row>" for row in TOWNS
    )
    spaces = "".join(
        f' xmlns:{n}="urn:oasis:names:tc:opendocument:xmlns:{n}:1.0"' for n in ("office", "table", "text")
    )
    content = (
        f'<office:document-content{spaces}><office:body><office:spreadsheet><table:table table:name="Towns">'
        f"{rows}</table:table></office:spreadsheet></office:body></office:document-content>"
    )
    mime = "application/vnd.oasis.opendocument.spreadsheet"
    manifest = (
        '<manifest:manifest xmlns:manifest="urn:oasis:names:tc:opendocument:xmlns:manifest:1.0">'
        f'<manifest:file-entry manifest:full-path="/" manifest:media-type="{mime}"/></manifest:manifest>'
    )
    ods = zipped(
        tmp_path / "towns.ods", {"mimetype": mime, "META-INF/manifest.xml": manifest, "content.xml": content}
    )
    assert one(workbooks.read, ods).text == TOWNS_TEXT
    assert one(workbooks.read, FIXTURES / "towns.xls").text == TOWNS_TEXT


def test_sheets_are_sections_and_hidden_sheets_are_left_out(tmp_path: Path) -> None:
    sheets = {"Towns": TOWNS, "Notes": [["Closed on Mondays."], ["Call Elin."]], "Salaries": [["secret"]]}
    file = workbook(tmp_path / "a.xlsx", sheets, title="Town register", hidden="Salaries")
    record = one(workbooks.read, file, headings=True)
    assert record.title == "Town register"
    assert record.text == f"Towns\n{TOWNS_TEXT}\n\nNotes\nClosed on Mondays.\nCall Elin."
    assert [section.title for section in record.sections] == [
        "Town register > Towns",
        "Town register > Notes",
    ]


def test_captions_gaps_and_kinds_of_cells(tmp_path: Path) -> None:
    rows = [
        ["Price list", None, None, None],
        [],
        ["Product", "Price (EUR)", "In stock", "Since"],
        ["Kestrel\nGateway", 1249.5, True, datetime.date(2019, 3, 4)],
        [None, None, None, None],
        ["Puffin", 80.0, False, None],
    ]
    assert one(workbooks.read, workbook(tmp_path / "a.xlsx", {"S": rows})).text.split("\n") == [
        "Price list",
        "Product: Kestrel Gateway; Price (EUR): 1249.5; In stock: yes; Since: 2019-03-04.",
        "Product: Puffin; Price (EUR): 80; In stock: no.",
    ]


def test_times_of_day_and_durations_are_text(tmp_path: Path) -> None:
    times = [datetime.time(9, 30), datetime.time(9, 30, 5)]
    spans = [datetime.timedelta(hours=30, minutes=5), datetime.timedelta(minutes=5)]
    sheets = {
        name: [[*head, "opens", "takes"], *([*cells, *row] for row in zip(times, spans, strict=True))]
        for name, head, cells in [("A", ["title", "text"], ["T", "Words."]), ("B", ["town"], ["Arden"])]
    }
    with xlsxwriter.Workbook(tmp_path / "a.xlsx") as book:
        formats = {
            datetime.time: book.add_format({"num_format": "hh:mm"}),
            datetime.timedelta: book.add_format({"num_format": "[h]:mm:ss"}),
        }
        for name, rows in sheets.items():
            sheet = book.add_worksheet(name)
            for r, row in enumerate(rows):
                for c, value in enumerate(row):
                    sheet.write(r, c, value, formats.get(type(value)))
    report = ReadingReport()
    *rows_of_a, b = read_documents([str(tmp_path / "a.xlsx")], report=report)
    assert [dict(one.fields) for one in rows_of_a] == [
        {"opens": "09:30", "takes": "30:05:00"},
        {"opens": "09:30:05", "takes": "0:05:00"},
    ]
    assert b.text.split("\n") == [
        "town: Arden; opens: 09:30; takes: 30:05:00.",
        "town: Arden; opens: 09:30:05; takes: 0:05:00.",
    ]
    assert report.lines() == []


def test_years_can_be_the_headings_of_columns(tmp_path: Path) -> None:
    rows = [["Town", 2019, 2020], ["Arden", 7, 8]]
    assert (
        one(workbooks.read, workbook(tmp_path / "a.xlsx", {"S": rows})).text
        == "Town: Arden; 2019: 7; 2020: 8."
    )


def test_first_row_of_numbers_or_a_single_row_has_no_headings(tmp_path: Path) -> None:
    numbers = workbook(tmp_path / "n.xlsx", {"S": [[1203, "Arden"], [1455, "Halden"]]})
    assert one(workbooks.read, numbers).text == "1203; Arden.\n1455; Halden."
    single = workbook(tmp_path / "s.xlsx", {"S": [["Arden", "Ouse"]]})
    assert one(workbooks.read, single).text == "Arden; Ouse."


def test_sheet_with_title_and_text_is_a_record_per_row_with_fields(tmp_path: Path) -> None:
    rows = [
        ["Title", "Text", "year", "by"],
        ["Arden", "On the Ouse.", 1203, None],
        ["Halden", "A mint.", 1455.5, "Dagobert"],
    ]
    workbook(tmp_path / "a.xlsx", {"Docs": rows, "Other": TOWNS})
    documents = list(read_documents([str(tmp_path)]))
    assert [(d.title, d.text) for d in documents] == [
        ("Arden", "On the Ouse."),
        ("Halden", "A mint."),
        ("a", TOWNS_TEXT),
    ]
    assert [dict(d.fields) for d in documents[:2]] == [{"year": 1203.0}, {"year": 1455.5, "by": "Dagobert"}]


def test_a_title_above_the_columns_of_documents_is_no_row_of_headings(tmp_path: Path) -> None:
    rows = [["Report", None], [None, None], ["id", "text"], [7, "On the Ouse."], [None, "A mint."]]
    workbook(tmp_path / "a.xlsx", {"Docs": rows})
    workbook(tmp_path / "b.xlsx", {"Docs": [["text", None], ["A town.", None], ["A hill.", "a note"]]})
    documents = list(read_documents([str(tmp_path)]))
    assert [one.text for one in documents] == ["On the Ouse.", "A mint.", "A town.", "A hill."]
    assert [one.id for one in documents[:2]] == ["7", f"{tmp_path / 'a.xlsx'}:Docs:5"]


# -- presentations


def presentation(path: Path) -> Path:
    made = Presentation()
    first = made.slides.add_slide(made.slide_layouts[1])
    first.shapes.title.text = "Towns of the Ouse"
    first.placeholders[1].text = "Arden lies on the Ouse.\nHalden\x0bhad a mint."
    first.notes_slide.notes_text_frame.text = "Say who closed the mint."
    second = made.slides.add_slide(made.slide_layouts[5])
    second.shapes.title.text = "Rivers"
    plain = second.shapes.add_table(2, 2, 0, 0, 9, 9).table
    plain.first_row = False
    for r, row in enumerate([["salt", "wool"], ["amber", "cider"]]):
        for c, value in enumerate(row):
            plain.cell(r, c).text = value
    table = second.shapes.add_table(3, 3, 0, 0, 9, 9).table
    for r, row in enumerate(TOWNS):
        for c, value in enumerate(row):
            table.cell(r, c).text = str(value)
    group = second.shapes.add_group_shape()
    group.shapes.add_textbox(0, 0, 9, 9).text_frame.text = "In a group."
    hidden = made.slides.add_slide(made.slide_layouts[5])
    hidden.shapes.title.text = "Secret"
    hidden._element.set("show", "0")
    slides_in_order = made.slides._sldIdLst
    slides_in_order.insert(0, slides_in_order[1])  # moved to the front by the author
    made.save(str(path))
    return path


def test_slides_are_read_in_their_order_with_tables_groups_and_notes(tmp_path: Path) -> None:
    record = one(slides.read, presentation(tmp_path / "talk.pptx"), headings=True)
    assert record.title == "Rivers"
    assert record.text == (
        f"salt; wool.\namber; cider.\n{TOWNS_TEXT}\nIn a group.\n\n"
        "Towns of the Ouse\nArden lies on the Ouse.\nHalden had a mint.\nSay who closed the mint."
    )
    assert [section.title for section in record.sections] == ["Rivers", "Rivers > Towns of the Ouse"]


# -- OpenDocument texts


def odt(path: Path, body: str, title: str = "") -> Path:
    names = ("office", "table", "text")
    spaces = "".join(f' xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"' for name in names)
    content = (
        f"<office:document-content{spaces}><office:body><office:text>{body}</office:text></office:body>"
        "</office:document-content>"
    )
    meta = (
        f'<office:document-meta{spaces} xmlns:dc="http://purl.org/dc/elements/1.1/"><office:meta>'
        f"<dc:title>{title}</dc:title></office:meta></office:document-meta>"
    )
    mime = "application/vnd.oasis.opendocument.text"
    return zipped(path, {"mimetype": mime, "content.xml": content, "meta.xml": meta})


BODY = (
    "<text:tracked-changes><text:deletion><text:p>Deleted.</text:p></text:deletion></text:tracked-changes>"
    '<text:p text:style-name="Title">Towns of the Ouse</text:p>'
    "<text:p>Arden lies on<text:s/>the <text:span>Ouse</text:span><text:note><text:note-citation>1</text:note-citation>"
    "<text:note-body><text:p>A river &lt;b&gt;.</text:p></text:note-body></text:note>.<office:annotation><text:p>Really?"
    "</text:p></office:annotation></text:p>"
    '<text:h text:outline-level="1">Goods</text:h>'
    "<text:list><text:list-item><text:p>salt</text:p></text:list-item><text:list-item><text:p>wool<text:line-break/>"
    "and amber</text:p></text:list-item></text:list>"
    "<table:table><table:table-header-rows><table:table-row><table:table-cell><text:p>Town</text:p></table:table-cell>"
    "<table:table-cell><text:p>River</text:p></table:table-cell></table:table-row></table:table-header-rows>"
    "<table:table-row><table:table-cell><text:p>Halden</text:p></table:table-cell><table:table-cell><text:p>Velka"
    "</text:p></table:table-cell></table:table-row></table:table>"
)


def test_text_of_open_document_is_read_with_lists_tables_and_notes(tmp_path: Path) -> None:
    record = one(odt_reader.read, odt(tmp_path / "a.odt", BODY), headings=True)
    assert record.title == "Towns of the Ouse"
    assert record.text == (
        "Arden lies on the Ouse.\n\nA river <b>.\n\nGoods\n\nsalt\n\nwool\nand amber\n\nTown: Halden; River: Velka."
    )
    assert [section.title for section in record.sections] == [
        "Towns of the Ouse",
        "Towns of the Ouse > Goods",
    ]
    assert one(odt_reader.read, odt(tmp_path / "b.odt", BODY, "Register")).title == "Register"


# -- what cannot be read


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("office")
    workbook(folder / "towns.xlsx", {"S": TOWNS})
    presentation(folder / "talk.pptx")
    odt(folder / "towns.odt", BODY)
    (folder / "towns.xls").write_bytes((FIXTURES / "towns.xls").read_bytes())
    return folder


def test_files_that_cannot_be_read_are_left_out_by_reason(sound: Path, tmp_path: Path) -> None:
    workbook(tmp_path / "none.xlsx", {"S": []})
    Presentation().save(str(tmp_path / "none.pptx"))
    odt(tmp_path / "none.odt", "<text:p/>")
    zipped(tmp_path / "noise.odt", {"a.txt": "a"})
    (tmp_path / "noise.xls").write_bytes(random.Random(0).randbytes(1_000))
    (tmp_path / "noise.xlsx").write_bytes(b"PK" + random.Random(0).randbytes(1_000))
    for name, size in (("towns.xlsx", 257), ("talk.pptx", 65)):
        with zipfile.ZipFile(sound / name) as archive:
            parts: dict[str, Any] = {part: archive.read(part) for part in archive.namelist()}
        large = next(part for part in parts if part.endswith(("sheet1.xml", "slide1.xml")))
        zipped(tmp_path / f"bomb_{name}", {**parts, large: b" " * (size << 20)})
        zipped(tmp_path / f"cut_{name}", {**parts, large: parts[large][:-30]})
    (tmp_path / "sound.txt").write_text("On the Ouse.")
    report = ReadingReport()
    assert [document.text for document in read_documents([str(tmp_path)], report=report)] == ["On the Ouse."]
    assert {Path(left.where).name: left.reason for left in report.left_out} == {
        "none.xlsx": "without text",
        "none.pptx": "without text",
        "none.odt": "without text",
        "noise.odt": "damaged",
        "noise.xls": "damaged",
        "noise.xlsx": "damaged",
        "bomb_towns.xlsx": "too long",
        "bomb_talk.pptx": "too long",
        "cut_towns.xlsx": "damaged",
        "cut_talk.pptx": "damaged",
    }


def test_a_workbook_over_the_limit_is_several_documents(tmp_path: Path) -> None:
    towns = [[f"Town {name}", "x" * 20] for name in "abc"]
    file = workbook(
        tmp_path / "towns.xlsx", {"North": [["Name", "Note"], *towns, []], "South": [["Ouse", "y" * 80]]}
    )
    report = ReadingReport()
    documents = list(read_documents([str(file)], max_document_chars=80, report=report))
    assert [(one.id, one.title, one.text) for one in documents] == [
        (f"{file}:North:2-2", "towns", f"North\nName: Town a; Note: {'x' * 20}."),
        (f"{file}:North:3-3", "towns", f"North\nName: Town b; Note: {'x' * 20}."),
        (f"{file}:North:4-4", "towns", f"North\nName: Town c; Note: {'x' * 20}."),
    ]
    assert [(one.where, one.reason) for one in report.left_out] == [(f"{file}:South:1-1", "too long")]
    (first, *_) = workbooks.read(file, Limits(80, headings=True))
    assert isinstance(first, Record) and [one.title for one in first.sections] == ["towns > North"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.text("ab", max_size=12), max_size=9), min_size=1, max_size=3), st.integers(1, 60))
def test_the_documents_of_a_workbook_have_all_rows_in_order(sheets: list[list[str]], limit: int) -> None:
    rows = {f"S{n}": [["name", "city"], *([one, "c"] for one in names)] for n, names in enumerate(sheets)}
    with TemporaryDirectory() as folder:
        file = workbook(Path(folder, "x.xlsx"), rows)
        (whole,) = workbooks.read(file, Limits())
        parts = list(workbooks.read(file, Limits(limit)))
    assert isinstance(whole, Record)
    found = [line for one in parts if isinstance(one, Record) for line in one.text.split("\n")]
    expected = [line for line in whole.text.split("\n") if line]
    names = set(rows) if len(rows) > 1 else set()
    assert [one for one in found if one and one not in names] == [one for one in expected if one not in names]
    for one in parts:
        assert isinstance(one, Record)
        assert (
            len(one.text) <= limit or len([line for line in one.text.split("\n") if line not in names]) == 1
        )


def test_damaged_office_files_are_documents_or_left_out(tmp_path: Path, sound: Path) -> None:
    draw, files = random.Random(0), sorted(sound.iterdir())
    for number in range(30):
        file = draw.choice(files)
        target = tmp_path / f"{number}{file.suffix}"
        if file.suffix != ".xls" and draw.random() < 0.5:  # a sound archive of damaged parts
            with zipfile.ZipFile(file) as archive:
                parts: dict[str, Any] = {part: archive.read(part) for part in archive.namelist()}
            name = draw.choice(list(parts))
            zipped(target, {**parts, name: damaged(parts[name] or b" ", file.read_bytes(), draw)})
        else:
            target.write_bytes(damaged(file.read_bytes(), draw.choice(files).read_bytes(), draw))
    report = ReadingReport()
    documents = list(read_documents([str(tmp_path)], report=report))
    left_out = {one.where.partition(":")[0] for one in report.left_out}
    assert len({d.id for d in documents} | left_out) == 30
    assert all(one.problem.isprintable() and "Error" not in one.reason for one in report.left_out)
