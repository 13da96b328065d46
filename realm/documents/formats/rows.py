"""Rows of tables as sentences, which keep their meaning in a passage without the heading of the table."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from realm.documents.formats.grid import Cell, Grid


def sentence_of(headings: Sequence[str], cells: Sequence[str]) -> str:
    """The cells of a row, each after the heading of its column. Empty cells are left out.

    >>> sentence_of(["Country", "", "Capital"], ["France", "Europe", "Paris"])
    'Country: France; Europe; Capital: Paris.'
    >>> sentence_of(["Question", "Answer"], ["What is it?", "A town."])
    'Question: What is it?; Answer: A town.'
    """
    pairs = zip(headings, cells, strict=True)
    sentence = "; ".join(f"{name}: {cell}" if name else cell for name, cell in pairs if cell)
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def names_columns(rows: Sequence[Sequence[str]], is_bold: bool = False) -> bool:
    """Whether the first row of a table looks like names of columns: different words without digits.

    Its cells must be bold, or, in a table with three columns or more, stand above a column of numbers. A table of two columns
    can be a form, with a name and a value in each row.

    >>> names_columns([["Country", "Capital", "People"], ["France", "Paris", "68 million"]])
    True
    >>> names_columns([["Name", "Anna Berg"], ["Born", "1987"]])
    False
    """
    first, *others = ([cell.strip() for cell in row] for row in rows)
    if len(first) < 2 or not all(first) or len(set(first)) < len(first) or any(map(_has_digit, first)):
        return False
    columns = zip(*(row for row in others if len(row) == len(first)), strict=True)
    filled = [[cell for cell in column if cell] for column in columns]
    has_numbers = any(column and all(map(_has_digit, column)) for column in filled)
    return bool(filled) and (is_bold or (len(first) > 2 and has_numbers))


def _has_digit(text: str) -> bool:
    return any(map(str.isdigit, text))


class Row(NamedTuple):
    """What becomes of a row of a table. A row that is neither a sentence nor headings stays as it is."""

    sentence: str = ""
    is_headings: bool = False
    """Whether the row is part of the headings, which are left out as soon as a row becomes a sentence."""


class Table:
    """Makes sentences of the rows of a table, one after the other.

    The first row with only headings, and those that follow it directly, are the headings of the columns. The first cell can
    also be an empty cell of data, above headings of rows. A row that repeats headings is no sentence. A row stays as it is if
    it has another number of places than the headings, or a single cell, such as the title of the rows below it.

    >>> table = Table()
    >>> table.row([Cell("Year", True, rows=2), Cell("People", True, columns=2)])
    Row(sentence='', is_headings=True)
    >>> table.row([Cell("Men", True), Cell("Women", True)])
    Row(sentence='', is_headings=True)
    >>> table.row([Cell("1900"), Cell("400"), Cell("300")]).sentence
    'Year: 1900; People, Men: 400; People, Women: 300.'
    """

    def __init__(self) -> None:
        self.headings: list[str] = []
        """The heading of each column, from the first row below the headings on."""
        self._heading_rows: dict[tuple[str, ...], None] = {}
        self._grid = Grid()

    def row(self, cells: Sequence[Cell]) -> Row:
        """What becomes of the next row. A text with a blank line has several blocks, which no sentence can hold."""
        places = self._grid.places(cells)
        if not any(cell.text for cell in cells):
            return Row()
        texts = tuple(cell.text for cell in places)
        stays = len(places) < 2 or any("\n\n" in text for text in texts)
        if not stays and are_headings(cells) and (not self.headings or texts in self._heading_rows):
            self._heading_rows[texts] = None
            return Row(is_headings=True)
        self.end_headings()
        if stays or len(texts) != len(self.headings) or not self._grid.take(sum(map(len, self.headings))):
            return Row()
        return Row(sentence_of(self.headings, texts))

    def end_headings(self) -> None:
        """Ends the headings of the columns, if there are any."""
        if self._heading_rows and not self.headings:
            columns = zip_longest(*self._heading_rows, fillvalue="")
            self.headings = [", ".join(dict.fromkeys(filter(None, column))) for column in columns]

    def end_group(self) -> None:
        """Ends a group of rows, such as the head of a table."""
        self._grid.end_group()


def are_headings(cells: Sequence[Cell]) -> bool:
    """Whether all cells of a row are headings, except for an empty first cell."""
    return all(cell.is_heading or (place == 0 and not cell.text) for place, cell in enumerate(cells))
