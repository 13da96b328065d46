"""The grid of a table: each cell fills the places that HTML gives it, and absurd spans cost nothing."""

import time
from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from realm.documents.formats.grid import Cell, Grid, cell_of
from realm.documents.formats.pages import read_page
from realm.documents.formats.rows import Table
from realm.documents.wikipedia.wikitext import read_wikitext

spans = st.tuples(st.integers(1, 4), st.integers(1, 4) | st.just(65_534))
groups_of_rows = st.lists(st.lists(st.lists(spans, max_size=4), max_size=5), max_size=3)


def by_the_algorithm_of_html(groups: list[list[list[Cell]]]) -> list[list[Cell | None]]:
    """HTML, "forming a table", for a whole table: a dictionary of places, and no row reaches out of its group."""
    places: dict[tuple[int, int], Cell] = {}
    first = 0
    for group in groups:
        for y, row in enumerate(group, first):
            x = 0
            for cell in row:
                while (y, x) in places:
                    x += 1
                for below in range(y, min(y + cell.rows, first + len(group))):
                    for right in range(x, x + cell.columns):
                        places[below, right] = cell
                x += cell.columns
        first += len(group)
    widths = [max((x for y, x in places if y == row), default=-1) + 1 for row in range(first)]
    return [[places.get((y, x)) for x in range(width)] for y, width in enumerate(widths)]


@given(groups_of_rows)
@example([[[(1, 1), (1, 65_534)], [(2, 1)]]])  # a cell over a cell of the row above
def test_each_cell_is_at_the_places_that_html_gives_it(shape: list[list[list[tuple[int, int]]]]) -> None:
    names = count()
    groups = [
        [[Cell(f"{next(names)}", False, columns, rows) for columns, rows in row] for row in group]
        for group in shape
    ]
    grid = Grid()
    expected = iter(by_the_algorithm_of_html(groups))
    for group in groups:
        for row in group:
            found, places = grid.places(row), next(expected)
            if not row:
                continue
            if len(set(places)) == 1:  # a cell that has the row for itself
                places = places[:1]
            assert [cell.text for cell in found] == ["" if cell is None else cell.text for cell in places]
        grid.end_group()


@given(st.lists(st.lists(st.text("ab", max_size=3), min_size=3, max_size=3), min_size=1, max_size=8))
def test_a_row_without_spans_has_its_own_cells(rows: list[list[str]]) -> None:
    grid, table = Grid(), Table()
    assert table.row([Cell(name, True) for name in "xyz"]).is_headings
    for row in rows:
        cells = [Cell(text) for text in row]
        assert grid.places(cells) == cells
        words = "; ".join(f"{name}: {text}" for name, text in zip("xyz", row, strict=True) if text)
        assert table.row(cells).sentence == (f"{words}." if words else "")


@pytest.mark.parametrize(
    ("colspan", "rowspan", "columns", "rows"),
    [
        (None, None, 1, 1),
        ("2", " +3 rows", 2, 3),
        ("0", "0", 1, 65_534),  # a rowspan of 0 reaches to the end of the group
        ("", "-2", 1, 1),
        ("007", "x2", 7, 1),
        ("1e9", "2.9", 1, 2),
        ("1001", "999999999", 1_000, 65_534),
        ("9" * 10_000, "0" * 10_000 + "2", 1_000, 2),
    ],
)
def test_spans_are_read_and_limited_as_in_html(
    colspan: str | None, rowspan: str | None, columns: int, rows: int
) -> None:
    assert cell_of("a", True, colspan, rowspan) == Cell("a", True, columns, rows)


def page(rows: list[str]) -> str:
    return "<table>" + "".join(f"<tr>{row}" for row in rows) + "</table>"


WIDE = "<td colspan=1000 rowspan=65534>x"
HOSTILE = {
    "columns": page([WIDE * 3_000]),
    "rows": page(["<th>a<th>b", WIDE + "<td>b"] + ["<td>c"] * 10_000),
    "a long text": page(["<th>a<th>b", f"<td rowspan=65534>{'x' * 9_999}<td>b", *["<td>c"] * 10_000]),
    "a long heading": page([f"<th>{'x' * 9_999}<th>b", *["<td>c<td>d"] * 10_000]),
    "growing": page(["<td rowspan=65534>x" * 3] * 10_000),
    "a gap": page(["<td>x" * 9_999 + "<td rowspan=65534>x", *["<td>c"] * 10_000]),
    "tables": page([WIDE + WIDE]) * 3_000,
    "headings": page(["<th>a<th>b"] * 5_000 + ["<td>c<td>d"] * 5_000),
}


@pytest.mark.parametrize("shape", HOSTILE)
def test_absurd_spans_cost_neither_time_nor_memory(shape: str) -> None:
    begin = time.process_time()
    text = read_page(HOSTILE[shape]).text
    assert time.process_time() - begin < 2
    assert len(text) < 50 * len(HOSTILE[shape])


def test_absurd_spans_of_a_dump_cost_neither_time_nor_memory() -> None:
    rows = "".join(f"|-\n|{number}\n" for number in range(300))
    markup = f'{{|\n!a!!b\n|-\n|rowspan=999999999|x||colspan="1e9"|y\n|-\n|colspan=999999999|z||z\n{rows}|}}'
    begin = time.process_time()
    lines = read_wikitext(markup).text.split("\n\n")
    assert time.process_time() - begin < 2
    assert lines[0] == "a: x; b: y." and len(lines) == 302 and "".join(lines).count("z") == 2


def test_rows_are_never_false_sentences_after_the_room_is_used_up() -> None:
    table = Table()
    table.row([Cell("Year", True), Cell("People", True)])
    table.row([Cell("long " * 5_000, rows=9), Cell("400")])
    assert [table.row([Cell("500"), Cell("350")]).sentence for _ in range(3)] == [""] * 3
