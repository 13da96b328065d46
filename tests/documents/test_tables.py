"""Tables: DPR's passages, and CSV as people and Excel write it."""

import csv
import gzip
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import MagicMock

import pytest
import xlsxwriter
from hypothesis import given
from hypothesis import strategies as st

from realm.documents.formats import tables
from realm.documents.formats.records import Limits, Record
from realm.documents.formats.tables import comma_separated
from realm.documents.reading import ReadingReport, read_documents
from realm.errors import InputError
from realm.text.fields import FieldNames
from tests.documents.writers import read

pytestmark = pytest.mark.usefixtures("one_child")


def test_dprs_table_gives_its_passages(tmp_path: Path) -> None:
    rows = [("1", 'Aaron was a "prophet" and\ta priest.', "Aaron"), ("2", "He spoke\nwell.", "Aaron")]
    with gzip.open(tmp_path / "psgs_w100.tsv.gz", "wt", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([("id", "text", "title"), *rows])
    documents = list(read_documents([str(tmp_path / "psgs_w100.tsv.gz")]))
    assert [(one.id, one.text, one.title) for one in documents] == rows


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_is_read_with_the_separator_of_its_heading_line(separator: str, tmp_path: Path) -> None:
    rows = [("A, b", 'One; "two",\tthree.\nFour.', "2020", ""), ("Ö", "Words.", "", "x;y")]
    with (tmp_path / "notes.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([("title", "text", "year", "a;b"), *rows])
    documents = list(read_documents([str(tmp_path / "notes.csv")]))
    assert [(one.title, one.text) for one in documents] == [row[:2] for row in rows]
    assert [dict(one.fields) for one in documents] == [{"year": 2020}, {"a_b": "x;y"}]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_csv_as_excel_writes_it(encoding: str, tmp_path: Path) -> None:
    content = 'sep=;\r\n\r\ntitle;text;"a, b, c, d"\r\n"Café";"Es heißt ""Café""; so.";1\r\n'
    (tmp_path / "notes.csv").write_bytes(content.encode(encoding))
    report = ReadingReport()
    (found,) = read_documents([str(tmp_path / "notes.csv")], report=report)
    assert (found.title, found.text) == ("Café", 'Es heißt "Café"; so.')
    assert list(report.assumed.values()) == (["cp1252"] if encoding == "cp1252" else [])


def test_a_table_with_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Limits, "file_bytes", 1 << 20)
    (tmp_path / "notes.csv").write_text("title,text\nA,One.\nB," + "x" * 3_000_000)
    assert read(tmp_path / "notes.csv") == ({"A": "One."}, {"too long": 1})


@pytest.mark.parametrize("name", ["contracts.csv", "contracts.tsv.gz"])
def test_a_table_without_a_text_is_a_document_with_a_sentence_per_row(name: str, tmp_path: Path) -> None:
    separator = "\t" if "tsv" in name else ";"
    rows = [
        ("Customer", "City, country", "", "until"),
        ("Ott & Co", "Bern", "red", "2027"),
        ("Lee", "", "", ""),
        ("",) * 4,
    ]
    with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wt", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([*rows, ("cut",)])
    report = ReadingReport()
    (found,) = read_documents([str(tmp_path / name)], report=report)
    assert found.text == "Customer: Ott & Co; City, country: Bern; red; until: 2027.\nCustomer: Lee."
    assert (found.title, found.id) == ("contracts", str(tmp_path / name))
    assert found.fields["path"] == str(tmp_path / name)
    assert dict(report.reasons) == {"rows with more or fewer columns than their table": 1}


def test_a_table_without_a_heading_line_has_sentences_without_names(tmp_path: Path) -> None:
    (tmp_path / "numbered.tsv").write_text("1\tAaron spoke.\tAaron\n2\tMoses wrote.\tMoses\n")
    (tmp_path / "long.csv").write_text(f"Aaron,{'He spoke and wrote. ' * 5}\nMoses,He wrote.\n")
    (tmp_path / "years.csv").write_text("Country,2019,2020\nFrance,1,2\n")
    documents = {one.title: one.text for one in read_documents([str(tmp_path)])}
    assert documents == {
        "numbered": "1; Aaron spoke.; Aaron.\n2; Moses wrote.; Moses.",
        "long": f"Aaron; {'He spoke and wrote. ' * 5}".rstrip() + "\nMoses; He wrote.",
        "years": "Country: France; 2019: 1; 2020: 2.",
    }


def test_a_long_table_without_a_text_is_several_documents_with_the_lines_of_their_rows(
    tmp_path: Path,
) -> None:
    table = tmp_path / "x.csv"
    table.write_text("Sites\nname,city\n" + 'Ann,"Bern\nOst"\n' + "Lee,Oslo\n" * 3 + f"Ott,{'x' * 80}\ncut\n")
    report = ReadingReport()
    documents = list(read_documents([str(table)], max_document_chars=60, report=report))
    assert [(one.id, one.title, one.text) for one in documents] == [
        (f"{table}:4-5", "x", "Sites\nname: Ann; city: Bern Ost.\nname: Lee; city: Oslo."),
        (f"{table}:6-7", "x", "name: Lee; city: Oslo.\nname: Lee; city: Oslo."),
    ]
    assert all(dict(one.fields) == {"path": str(table)} for one in documents)
    assert [(one.where, one.reason) for one in report.left_out] == [
        (f"{table}:9", "rows with more or fewer columns than their table"),
        (f"{table}:8-8", "too long"),
    ]


@given(rows=st.lists(st.text("ab ", max_size=12), min_size=1, max_size=30), limit=st.integers(1, 60))
def test_the_parts_of_a_table_have_all_rows_in_order(rows: list[str], limit: int) -> None:
    with TemporaryDirectory() as folder:
        table = Path(folder, "x.csv")
        table.write_text("name,city\n" + "".join(f"{row},c\n" for row in rows))
        whole = next(comma_separated(table, Limits()))
        parts = list(comma_separated(table, Limits(document_chars=limit)))
    assert isinstance(whole, Record)
    assert "\n".join(one.text for one in parts if isinstance(one, Record)) == whole.text
    assert all("\n" not in one.text or len(one.text) <= limit for one in parts if isinstance(one, Record))
    if len(parts) > 1:
        places = [tuple(map(int, str(one.where).rpartition(":")[2].split("-"))) for one in parts]
        assert [one for a, b in places for one in range(a, b + 1)] == list(range(2, len(rows) + 2))


def test_names_of_columns_may_have_capitals(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("ID;Title;TEXT;Year\n7;A;One.;2020\n")
    (found,) = read_documents([str(tmp_path / "x.csv")])
    assert (found.id, found.title, found.text, found.fields["Year"]) == ("7", "A", "One.", 2020)


@pytest.mark.parametrize(
    ("names", "text"),
    [("Title,Author,Year", "Title: Emma; Author: Austen; Year: 1815."), ("Author,Text,Year", "Austen")],
)
def test_a_table_with_only_one_of_title_and_text_is_read_as_the_same_workbook(
    names: str, text: str, tmp_path: Path
) -> None:
    rows = [names.split(","), ["Emma", "Austen", "1815"]]
    (tmp_path / "books.csv").write_text("\n".join(map(",".join, rows)))
    with xlsxwriter.Workbook(tmp_path / "books.xlsx") as book:
        sheet = book.add_worksheet()
        for number, row in enumerate(rows):
            sheet.write_row(number, 0, row)
    texts = [one.text for one in read_documents([str(tmp_path)])]
    assert texts == [text] * 2


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("10.0.0.1,web,Oslo\n10.0.0.23,db,Bergen\n", "10.0.0.1; web; Oslo.\n10.0.0.23; db; Bergen."),
        ("web,4 May 2024\ndb,12. June 2023\n", "web; 4 May 2024.\ndb; 12. June 2023."),
        ("Ann,ann@ost.example\nLee,lee@a.ost.example\n", "Ann; ann@ost.example.\nLee; lee@a.ost.example."),
        ("web,2024-05-01,2024-05-09\ndb,2024-06-01,\n", "web; 2024-05-01; 2024-05-09.\ndb; 2024-06-01."),
        ("web,8080,22,Oslo\ndb,5432,23,\n", "web; 8080; 22; Oslo.\ndb; 5432; 23."),
        ("Room 3,Plan 1\nRoom 4,Plan 2\n", "Room 3; Plan 1.\nRoom 4; Plan 2."),
        ("Name,2023\nOtt,2019\nLee,2021\n", "Name: Ott; 2023: 2019.\nName: Lee; 2023: 2021."),
        ("Country,1\nFrance,2\n", "Country: France; 1: 2."),
        ("Plan 1,Plan 2\nPlan 3,Plan 4\n", "Plan 1: Plan 3; Plan 2: Plan 4."),
        ("Site,Plan 7\nOslo,Plan 5\n", "Site: Oslo; Plan 7: Plan 5."),
        ("Site,Cost,80,7\nOslo,12,5,3\n", "Site: Oslo; Cost: 12; 80: 5; 7: 3."),
        ("Country,2019,2023\nFrance,1,2\n", "Country: France; 2019: 1; 2023: 2."),
        ("Country,2019\nFrance,1\n", "Country: France; 2019: 1."),
        ("Name,Address 1\nOtt,Main Street 5\n", "Name: Ott; Address 1: Main Street 5."),
        ("Host,2024-05-01\nweb,99.5\n", "Host: web; 2024-05-01: 99.5."),
    ],
)
def test_a_first_line_in_the_form_of_the_lines_below_it_is_a_row(
    lines: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_text(lines)
    with xlsxwriter.Workbook(tmp_path / "x.xlsx") as book:
        sheet = book.add_worksheet()
        for number, row in enumerate(csv.reader(lines.splitlines())):
            sheet.write_row(number, 0, row)
    assert [one.text for one in read_documents([str(tmp_path)])] == [text] * 2


HEADLESS = [
    "web01,8080,Oslo\nweb02,8443,Bergen\ndb01,5432,Rome\n",
    "Lamp,9.90\nDesk,120.00\nChair,75.50\n",
    "Fan,Oslo\nLamp,Bergen\nDesk,Oslo\nChair,Oslo\n",
]
WITH_HEADINGS = [
    "host,port,city\nweb,80,Oslo\ndb,22,Rome\n",
    "model,10\nBERT,55.1\nGPT,60.2\n",
    "country,2020\nFrance,1988\nSpain,1990\n",
    ",0,city\na,5,Oslo\nb,7,Rome\n",
    "name,type\nid,whole number\nname,words\n",
    "town,river\nArden,Ouse\ntown,river\nHalden,Velka\ntown,river\nBremen,Weser\n",
]


@pytest.mark.parametrize("rows", HEADLESS)
def test_a_first_row_with_a_number_or_a_word_of_the_rows_below_is_data(rows: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(rows)
    assert read(tmp_path / "x.csv")[0]["x"].split("\n")[0] == rows.split("\n")[0].replace(",", "; ") + "."


@pytest.mark.parametrize("rows", WITH_HEADINGS)
def test_a_first_row_that_can_have_names_of_columns_has_them(rows: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(rows)
    name = rows.split("\n")[0].split(",")[1]
    assert all(f"; {name}: " in line for line in read(tmp_path / "x.csv")[0]["x"].split("\n"))


@pytest.mark.parametrize(
    "above",
    ["Hosts in May\n\n", "Hosts in May;;\n", "Hosts in May; ;\n", "# Hosts in May\n", "# Hosts; in May\n"],
)
def test_lines_of_text_above_the_headings_are_not_the_headings(above: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(above + "Host;Address;Site\nweb;10.0.0.1;Oslo\n\ndb;;Bergen\n")
    text = "Host: web; Address: 10.0.0.1; Site: Oslo.\nHost: db; Site: Bergen."
    assert read(tmp_path / "x.csv") == ({"x": above.strip("\n; ") + "\n" + text}, {})
    (tmp_path / "y.csv").write_text(above + "Title;Text;Site\nweb;A server.;Oslo\n")
    assert read(tmp_path / "y.csv") == ({"web": "A server."}, {})


def test_a_comment_with_the_columns_of_the_rows_is_their_row_of_headings(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("# by Ann\n#Host\tSite\nweb\tOslo\n")
    assert read(tmp_path / "x.tsv") == ({"x": "# by Ann\n#Host: web; Site: Oslo."}, {})


def test_a_table_whose_rows_have_other_columns_than_its_first_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("by Ann, 4 May\nHost,Address,Site\nweb,10.0.0.1,Oslo\n")
    with pytest.raises(InputError, match="3 columns, but the table has 2"):
        read(tmp_path / "x.csv")


@pytest.mark.parametrize("rows", ["", ",\n", "a\n"])
def test_a_table_without_a_row_is_one_line(rows: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("name,value\n" + rows)
    with pytest.raises(InputError, match=r"x\.csv"):
        list(read_documents([str(tmp_path / "x.csv")]))


def test_a_row_with_another_number_of_columns_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("id\ttext\ttitle\n1\tA text.\tA\n2\tcut\n")
    assert read(tmp_path / "x.tsv") == (
        {"A": "A text."},
        {"rows with more or fewer columns than their table": 1},
    )


def test_a_row_with_an_empty_id_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,title,text\n,Arden,On the Ouse.\n,,A mint.\n7,,A town.\n")
    ids = [one.id for one in read_documents([str(tmp_path / "a.csv")])]
    assert ids == ["Arden", f"{tmp_path / 'a.csv'}:3", "7"]


def test_two_columns_of_texts_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Text,text\nold,new\n")
    with pytest.raises(InputError, match=r"a\.csv: 2 columns are named text$"):
        list(read_documents([str(tmp_path)]))
    names = FieldNames(text="Text")
    assert [one.text for one in read_documents([str(tmp_path)], names=names)] == ["old"]


def test_names_of_columns_may_contain_line_breaks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,"Unit\nprice",title,text\n1,5,Alpha,A town.\n2,6,Beta,A river.\n3\n')
    report = ReadingReport()
    documents = list(read_documents([str(tmp_path / "a.csv")], report=report))
    assert [(one.title, dict(one.fields)) for one in documents] == [
        ("Alpha", {"Unit_price": 5}),
        ("Beta", {"Unit_price": 6}),
    ]
    assert report.left_out[0].where.endswith("a.csv:5")
    (tmp_path / "b.csv").write_text('Name;"Unit\nprice"\nAlpha;5\n')
    (tmp_path / "c.csv").write_text('Name,5" pipes\nAlpha,5\nBeta,"a\nb"\n')
    assert read(tmp_path / "b.csv")[0] == {"b": "Name: Alpha; Unit price: 5."}
    assert read(tmp_path / "c.csv")[0] == {"c": 'Name: Alpha; 5" pipes: 5.\nName: Beta; 5" pipes: a b.'}


@pytest.mark.parametrize("rest", ["", 'x"y"'])
@pytest.mark.parametrize("most", [64 << 20, 300])
def test_a_quotation_mark_that_is_not_closed_is_text_and_hides_no_row(
    rest: str, most: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(Limits, "file_bytes", most)
    rows = [
        '"Heroes is a song.',
        "Beta is a river.",
        '"Gamma is a\nlake."',
        f'"{rest}Delta is a town.',
        "Eta is.",
    ]
    lines = [f"{number}\tT{number}\t{text}\n" for number, text in enumerate(rows)]
    (tmp_path / "t.tsv").write_text("id\ttitle\ttext\n" + "".join(lines))
    texts, left_out = read(tmp_path / "t.tsv")
    rows[2] = "Gamma is a\nlake."
    assert (texts, left_out) == ({f"T{number}": text for number, text in enumerate(rows)}, {})


def test_two_misplaced_quotation_marks_of_a_line_hide_no_cell(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('title,text\n5" pipe,"It is long.\nB,b\n')
    assert read(tmp_path / "t.csv") == ({'5" pipe': '"It is long.', "B": "b"}, {})


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_blanks_may_follow_a_closing_quotation_mark(newline: str, tmp_path: Path) -> None:
    lines = ["title,text", 'A,"One.', 'Two." ', '"B" ,"b"', 'C,"c"  ', ""]
    (tmp_path / "t.csv").write_bytes(newline.join(lines).encode())
    texts, left_out = read(tmp_path / "t.csv")
    assert ({title: text.split() for title, text in texts.items()}, left_out) == (
        {"A": ["One.", "Two."], "B": ["b"], "C": ["c"]},
        {},
    )


@pytest.mark.parametrize("line", ['x","\n', '1,"One.\n'])
def test_reading_lone_quotation_marks_takes_linear_time(line: str, tmp_path: Path, monkeypatch) -> None:
    alone = MagicMock(side_effect=tables._row)
    monkeypatch.setattr(tables, "_row", alone)
    (tmp_path / "t.csv").write_text("title,text\n" + line * 20_000 + '"y"z,A.\n')
    assert read(tmp_path / "t.csv")[0]["yz"] == "A."
    assert alone.call_count <= 20_100  # the first lines also show the headings


@pytest.mark.parametrize("content", ["sep=;\n", "\n \nsep=;\n"])
def test_a_table_without_a_heading_line_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text(content)
    with pytest.raises(InputError, match=r"notes\.csv: there is no heading line"):
        list(read_documents([str(tmp_path / "notes.csv")]))
