"""The grid of a table: a cell that spans several rows and columns fills each of its places.

The rows come one after the other, and no row waits for the next. A few bytes of markup can span millions of places, and a cell
with a long text can span all rows. So the expansion of a table is limited by the number of its cells (`Grid.room`).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_MOST_COLUMNS, _MOST_ROWS = 1_000, 65_534
"""Most columns and rows that a cell can span (HTML, "attributes common to td and th elements")."""
_NUMBER = re.compile(r"[ \t\n\f\r]*\+?0*([0-9]*)")
_LONGEST_NUMBER = 9
_FIRST_ROOM, _ROOM_OF_CELL, _COST_OF_PLACE = 2_000, 300, 10
"""The room of a table at its start, what each cell adds, and what each repeated place costs besides the length of its text."""


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    is_heading: bool = False
    columns: int = 1
    """How many columns the cell spans."""
    rows: int = 1
    """How many rows the cell spans; fewer if the table or its group of rows ends before."""


def cell_of(text: str, is_heading: bool, colspan: str | None = None, rowspan: str | None = None) -> Cell:
    """The cell with the values of these attributes, which are read and limited as in HTML.

    >>> cell_of("400", False, rowspan="2")
    Cell(text='400', is_heading=False, columns=1, rows=2)
    >>> cell_of("People", True, colspan="999999999", rowspan="two")
    Cell(text='People', is_heading=True, columns=1000, rows=1)
    """
    return Cell(text, is_heading, _span(colspan, 1, _MOST_COLUMNS), _span(rowspan, _MOST_ROWS, _MOST_ROWS))


def _span(value: str | None, of_zero: int, most: int) -> int:
    """The number at the beginning of an attribute; `of_zero` for 0, which means all rows of a group."""
    if value is None or not (found := _NUMBER.match(value)) or not found[0][-1:].isdecimal():
        return 1
    return min(int(found[1][:_LONGEST_NUMBER] or 0) or of_zero, most)


class _Growing(NamedTuple):
    """A cell that also fills places in rows below its own."""

    cell: Cell
    column: int
    last_row: int


_NOTHING = Cell("")


class Grid:
    """Places the cells of a table, row by row, as HTML does ("forming a table")."""

    def __init__(self) -> None:
        self.room = _FIRST_ROOM
        """How many characters the rows of the table can still repeat. If there is no room left, no row has places any more."""
        self._row = 0
        self._growing: list[_Growing] = []

    def places(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cell at each place of the next row, up to the last place that is filled; [] if there is no room left.

        A cell that has the row for itself is at one place only, because then its span says nothing: a title of the rows below.
        Cells of rows above that it covers do not count.
        """
        self._row += 1
        if not cells or self.room < 0:
            return []
        self.room += _ROOM_OF_CELL * len(cells)
        self._growing = [one for one in self._growing if one.last_row >= self._row]
        if not self._growing and all(cell.columns == cell.rows == 1 for cell in cells):
            return list(cells)
        placed: dict[int, Cell] = {}
        for one in self._growing:
            if not self.take(one.cell.columns * (_COST_OF_PLACE + len(one.cell.text))):
                return []
            placed.update(dict.fromkeys(range(one.column, one.column + one.cell.columns), one.cell))
        is_alone = len(cells) == 1 and 0 not in placed and max(placed, default=0) < cells[0].columns
        column = 0
        for cell in cells:
            while column in placed:
                column += 1
            if cell.rows > 1:
                self._growing.append(_Growing(cell, column, self._row + cell.rows - 1))
            if is_alone:
                return [cell]
            if not self.take((cell.columns - 1) * (_COST_OF_PLACE + len(cell.text))):
                return []
            placed.update(dict.fromkeys(range(column, column + cell.columns), cell))
            column += cell.columns
        width = max(placed) + 1
        if not self.take((width - len(placed)) * _COST_OF_PLACE):  # places that no cell fills
            return []
        return [placed.get(place, _NOTHING) for place in range(width)]

    def end_group(self) -> None:
        """Ends a group of rows, such as the head of a table. No cell spans rows of several groups."""
        self._growing = []

    def take(self, characters: int) -> bool:
        """Takes room for text that is repeated; False if the table has used up its room."""
        if self.room >= 0:
            self.room -= characters
        if self.room < 0:
            self._growing = []
        return self.room >= 0
