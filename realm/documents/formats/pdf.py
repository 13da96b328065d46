"""The text of PDF files. Rows and paragraphs are derived from the positions of the characters, which PDFium gives.

1. `_lines`             characters of a page -> lines, in the order of the file
2. `_rows`              lines that are side by side on one baseline -> a row
3. `_without_repeated`  leaves out headers, footers and page numbers, which have the same position on several pages
4. `_with_tables`       rows of a table with column names -> a sentence for each row
5. `_joined`            rows of all pages -> paragraphs with a blank line between them; hyphenated words are joined

The order of the characters in the file is kept, because programs write one column of a page after the other.
"""

import ctypes
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from realm.documents.formats.hyphens import CONJUNCTIONS, halves, hyphen, words_of
from realm.documents.formats.records import Limits, Pages, Reason, Record, Unreadable, need
from realm.documents.formats.rows import names_columns, sentence_of
from realm.documents.formats.titles import file_title, sensible_title
from realm.errors import first_line


class Word(NamedTuple):
    """A word, and its sides in points."""

    left: float
    right: float
    text: str


class Row(NamedTuple):
    """A line or row of text, its position (in points, upwards), and whether a hyphenated word continues on the next line."""

    text: str
    left: float
    right: float
    base: float
    size: float
    """Font size in points."""
    divided: bool = False
    words: tuple[Word, ...] = ()
    font: str = ""
    """Name of the font of the first character."""
    is_sentence: bool = False
    """Whether the row is a sentence that was made of a row of a table."""


def read(path: Path, limits: Limits) -> Iterator[Record | Unreadable | Pages]:
    """One record. The title is a sensible title in the metadata, else the file name."""
    need("pypdfium2", path)
    import pypdfium2 as pdfium

    try:
        document = pdfium.PdfDocument(path)
    except pdfium.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable(
                path, Reason.ENCRYPTED, f"{path} is encrypted: save it without a password"
            ) from None
        raise Unreadable(
            path, Reason.DAMAGED, f"{path} cannot be read as PDF ({first_line(error)})"
        ) from None
    pages: list[list[Row]] = []
    broken: list[int] = []
    characters, total = 0, len(document)
    with closing(document):
        title = sensible_title(document.get_metadata_value("Title")) or file_title(path)
        for number in range(total):
            try:
                with closing(document[number]) as page, closing(page.get_textpage()) as textpage:
                    pages.append(_rows(_lines(textpage)))
            except pdfium.PdfiumError:
                broken.append(number + 1)
                pages.append([])
            characters += sum(len(row.text) for row in pages[-1])
            if characters > limits.document_chars:
                over = f"over {limits.document_chars:,} characters by page {number + 1:,} of {total:,}"
                raise Unreadable(
                    path, Reason.TOO_LONG, f"{path}: {over}: split it, or raise max_document_chars"
                )
            yield Pages(number + 1, total)
    if broken:
        some = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
        yield Unreadable(
            path, Reason.DAMAGED, f"{path}: {len(broken)} of {total} pages cannot be read ({some})"
        )
    if text := _joined([_with_tables(page) for page in _without_repeated(pages)]):
        yield Record(str(path), title, text, path.as_posix())
    elif not broken:
        raise Unreadable(
            path,
            Reason.NO_TEXT,
            f"{path} has no text (pages: {total}): scanned pages need OCR, for example by ocrmypdf",
        )


# --- characters and lines ------------------------------------------------------------------------

_DIVIDED = (0x02, 0xFFFE)
"""Characters that PDFium gives for a hyphen and line break within a word: 0x02 if the file contains the hyphen, else 0xFFFE."""
_WIDE = 1.5
"""A gap of this many font sizes separates columns of a table."""


def _lines(textpage: Any) -> Iterator[Row]:
    """The lines of a page, with " | " in place of wide gaps."""
    import pypdfium2.raw as pdfium

    page = textpage.raw
    codes = [pdfium.FPDFText_GetUnicode(page, index) for index in range(pdfium.FPDFText_CountChars(page))]
    start = 0
    for end, code in enumerate([*codes, 10]):
        if code in (10, 13, *_DIVIDED):
            if line := _line(page, codes, start, end, code in _DIVIDED):
                yield line
            start = end + 1


def _line(page: Any, codes: Sequence[int], start: int, end: int, divided: bool) -> Row | None:
    words: list[tuple[int, int]] = []  # first and last character of each word
    for index in range(start, end):
        if codes[index] > 32 and codes[index] != 0xA0:
            if words and words[-1][1] == index - 1:
                words[-1] = words[-1][0], index
            else:
                words.append((index, index))
    if not words:
        return None
    boxes = [(_sides(page, first)[0], _sides(page, last)[1]) for first, last in words]
    first, last = words[0][0], words[-1][1]
    size = statistics.median(_size(page, index) for index in (first, words[len(words) // 2][0], last))
    text = ""
    found: list[Word] = []
    for number, (a, b) in enumerate(words):
        if number:
            text += " | " if boxes[number][0] - boxes[number - 1][1] > _WIDE * size else " "
        found.append(Word(*boxes[number], _text(codes[a : b + 1])))
        text += found[-1].text
    return Row(
        _LEADERS.sub(" ... ", text), boxes[0][0], boxes[-1][1], _base(page, first), size, divided,
        tuple(found), _font(page, first),
    )  # fmt: skip


_LEADERS = re.compile(r"(?:\s*[.·_…](?:\s\|)?){5,}\s*(?:\|\s)?")
"""Dots between a heading and its page number, or a dotted line to write on."""


def _sides(page: Any, index: int) -> tuple[float, float]:
    import pypdfium2.raw as pdfium

    left, right, bottom, top = (ctypes.c_double() for _ in range(4))
    pdfium.FPDFText_GetCharBox(page, index, left, right, bottom, top)
    return left.value, right.value


def _font(page: Any, index: int) -> str:
    import pypdfium2.raw as pdfium

    name = ctypes.create_string_buffer(100)
    pdfium.FPDFText_GetFontInfo(page, index, name, len(name), None)
    return name.value.decode("utf-8", "replace")


def _base(page: Any, index: int) -> float:
    import pypdfium2.raw as pdfium

    x, y = ctypes.c_double(), ctypes.c_double()
    pdfium.FPDFText_GetCharOrigin(page, index, x, y)
    return y.value


def _size(page: Any, index: int) -> float:
    import pypdfium2.raw as pdfium

    matrix = pdfium.FS_MATRIX()
    pdfium.FPDFText_GetMatrix(page, index, matrix)
    scale = math.sqrt(abs(matrix.a * matrix.d - matrix.b * matrix.c)) or 1.0
    return abs(pdfium.FPDFText_GetFontSize(page, index)) * scale or 1.0


_SPECIAL = {
    **dict(zip("ﬀﬁﬂﬃﬄﬅﬆ", ("ff", "fi", "fl", "ffi", "ffl", "st", "st"), strict=True)),
    "\u00ad": "",  # soft hyphen
    "\uf0b7": "•",  # the bullet of Microsoft's font Symbol
}
_LETTERS = {ord(character): letters for character, letters in _SPECIAL.items()}
_NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ue000-\uf8ff\ufffe\uffff]")
"""Control characters, lone surrogates, and private-use characters, whose meaning depends on the font."""


def _text(codes: Sequence[int]) -> str:
    units = "".join(chr(code) for code in codes if code <= 0x10FFFF).encode("utf-16-le", "surrogatepass")
    return _NO_TEXT.sub("", units.decode("utf-16-le", "replace").translate(_LETTERS))


# --- rows ----------------------------------------------------------------------------------------


def _rows(lines: Iterator[Row]) -> list[Row]:
    rows: list[Row] = []
    for line in lines:
        if not line.text.strip():
            continue
        before = rows[-1] if rows else None
        size = max(line.size, before.size) if before else 0.0
        if before and abs(line.base - before.base) < 0.5 * size and line.left > before.right - size:
            between = " | " if line.left - before.right > _WIDE * size else " "
            text, words = before.text + between + line.text, before.words + line.words
            rows[-1] = Row(text, before.left, line.right, before.base, size, line.divided, words, before.font)
        else:
            rows.append(line)
    return rows


_NEAR = 4
"""Number of pages before and after a page that are searched for the same row."""
_NUMBER = re.compile(r"\d+")
_ROMAN = re.compile(r"[ivxlc]+", re.IGNORECASE)


def _without_repeated(pages: Sequence[list[Row]]) -> list[list[Row]]:
    """The pages without headers, footers and page numbers. The first occurrence of a header or footer stays, unless its number
    differs between pages.

    A row is a header, a footer or a page number under two conditions: it is among the two highest or the two lowest rows of its
    page, and it occurs at the same height on at least two pages nearby; in a document of two pages, on the other page. There, a
    row that is larger than most and differs in a number is not left out, because headings such as "Part 1" look like this.
    """
    edges = [_edges(number, rows) for number, rows in enumerate(pages)]
    usual = statistics.median([row.size for rows in pages for row in rows] or [0.0])
    seen: set[str] = set()
    kept: list[list[Row]] = []
    for number, rows in enumerate(pages):
        near = [
            edges[other]
            for other in range(max(0, number - _NEAR), number + _NEAR + 1)
            if other != number and other < len(edges)
        ]
        left_out: set[Row] = set()
        for row, pattern in edges[number].items():
            same = [
                [
                    there.text
                    for there, other in page.items()
                    if pattern == other and abs(row.base - there.base) < 3
                ]
                for page in near
            ]
            if sum(map(bool, same)) < (1 if len(pages) == 2 else 2):
                continue
            differs = any(text != row.text for texts in same for text in texts)
            if pattern in seen or (differs and (len(pages) > 2 or row.size < 1.1 * usual)):
                left_out.add(row)
            elif not differs:
                seen.add(pattern)
        kept.append([row for row in rows if row not in left_out])
    return kept


def _edges(page: int, rows: Sequence[Row]) -> dict[Row, str]:
    """The two highest and the two lowest rows, each with its text, in which "#" replaces numbers that differ between pages."""
    by_height = sorted(rows, key=lambda row: row.base)
    patterns = {}
    for row in [*by_height[:2], *by_height[-2:]]:
        pattern = "#" if _ROMAN.fullmatch(row.text) else _NUMBER.sub("#", row.text)
        if not any(map(str.isalpha, pattern)):
            # A row of numbers only may belong to a table; a page number increases from page to page.
            numbers = _NUMBER.findall(row.text)
            if len(numbers) > 2:
                continue
            if numbers and len(numbers[0]) < 7:
                pattern = f"{pattern} {int(numbers[0]) - page}"
        patterns[row] = pattern
    return patterns


# --- tables --------------------------------------------------------------------------------------

_GAP = 0.4
"""Smallest width of the gap between two columns in font sizes; a space between words has about 0.25."""
_FAR = 4.0
"""Largest distance between two rows of a table in font sizes."""

_MOST_ROWS, _MOST_WORDS = 200, 100
"""Most rows of a table on a page, and most words of a row."""


class _Gap(NamedTuple):
    """A place without words, its left and right side, and whether it is wide in one of the rows that have it."""

    left: float
    right: float
    is_wide: bool


def _with_tables(rows: Sequence[Row]) -> list[Row]:
    """The rows of a page, in which tables with names of columns have become sentences."""
    found: list[Row] = []
    number = 0
    while number < len(rows):
        end, sentences = _table(rows, number)
        found += sentences or [rows[number]]
        number = end
    return found


def _table(rows: Sequence[Row], start: int) -> tuple[int, list[Row]]:
    """The end of the table whose names of columns are in `rows[start]`, and a sentence for each row below the names.

    (start + 1, []) if no such table begins there. All rows have gaps at the same places between the columns. One row at least
    has a wide gap there, otherwise the columns could be the words of a text. A row without a first cell continues the cells
    above.
    """
    first, end = rows[start], start + 1
    gaps = _gaps(first)[1:-1] if len(first.words) <= _MOST_WORDS else []
    while gaps and end < min(len(rows), start + _MOST_ROWS):
        row, before = rows[end], rows[end - 1]
        if (
            len(row.words) > _MOST_WORDS
            or not 0.5 < (before.base - row.base) / first.size < _FAR
            or not 0.9 < row.size / first.size < 1.1
        ):
            break
        of_row = _gaps(row)
        common = _common(gaps, of_row, _GAP * first.size)
        lost = [
            gap
            for gap in gaps
            if gap.is_wide and not any(gap.left <= one.left and one.right <= gap.right for one in common)
        ]
        if not common or lost or row.right < common[0].right or _are_spaces(common, of_row[1:-1]):
            break  # text below the table
        gaps, end = common, end + 1
    columns = [gap for gap in gaps if gap.is_wide]
    lines: list[list[str]] = []
    divided: int | None = None
    for row in rows[start:end] if columns else ():
        cells = _cells(row, columns)
        if lines and not cells[0]:
            lines[-1] = [
                a + (hyphen(*halves(a, b), Counter()) if divided == place else " ") + b if a and b else a + b
                for place, (a, b) in enumerate(zip(lines[-1], cells, strict=True))
            ]
        else:
            lines.append(cells)
        # The column whose last word continues in the next row.
        divided = max(place for place, cell in enumerate(cells) if cell) if row.divided else None
    has_own_font = all(row.font != first.font for row in rows[start + 1 : end])
    if len(lines) < 3 or not names_columns(lines, has_own_font):
        return start + 1, []
    return end, [
        rows[end - 1]._replace(text=sentence_of(lines[0], cells), is_sentence=True, divided=False)
        for cells in lines[1:]
    ]


def _gaps(row: Row) -> list[_Gap]:
    """The places between the words of a row, and those before the first and after the last word."""
    sides = [(-math.inf, row.words[0].left), *((a.right, b.left) for a, b in pairwise(row.words))]
    inside = [_Gap(left, right, right - left > _WIDE * row.size) for left, right in sides[1:]]
    return [_Gap(*sides[0], False), *inside, _Gap(row.words[-1].right, math.inf, False)]


def _common(gaps: Sequence[_Gap], others: Sequence[_Gap], least: float) -> list[_Gap]:
    """The places that are in a gap of both lists, if they are wider than `least`."""
    pairs = ((a, b, max(a.left, b.left), min(a.right, b.right)) for a in gaps for b in others)
    return [_Gap(left, right, a.is_wide or b.is_wide) for a, b, left, right in pairs if right - left > least]


def _are_spaces(common: Sequence[_Gap], of_row: Sequence[_Gap]) -> bool:
    """Whether the common gaps of a row can be spaces of justified text: no gap is wide, and those elsewhere are as wide."""
    widths: dict[bool, list[float]] = {True: [], False: []}
    for gap in of_row:
        widths[bool(_common(common, [gap], 0))].append(gap.right - gap.left)
    is_wide = any(gap.is_wide for gap in of_row)
    return not is_wide and min(widths[True], default=math.inf) < 1.3 * max(widths[False], default=0)


def _cells(row: Row, columns: Sequence[_Gap]) -> list[str]:
    """The words of a row in each column."""
    cells: list[list[str]] = [[] for _ in range(len(columns) + 1)]
    for word in row.words:
        cells[sum(word.left >= gap.left for gap in columns)].append(word.text)
    return [" ".join(words) for words in cells]


# --- paragraphs ----------------------------------------------------------------------------------

_BULLET = re.compile(r"[•◦▪‣●○■□➢✓∗]")
_LED = re.compile(r" \.\.\. \w+\Z")
"""The end of a row in a table of contents."""
_NARROW, _SPACE = 22.0, 0.25
"""Width of a narrow column of text and of a space, in font sizes."""
_ENDS = tuple('.!?:;…”"»)')


def _joined(pages: Sequence[Sequence[Row]]) -> str:
    rows = [row for page in pages for row in page]
    words = words_of(" ".join(row.text for row in rows))
    pitch = statistics.median(_pitches(pages) or [1.2])
    parts: list[str] = []
    before: Row | None = None
    for page in pages:
        margins = _margins(page)
        lists = _lists(page, pitch, margins)
        for number, row in enumerate(page):
            text = row.text
            if before is not None and before.divided:
                parts.append(hyphen(*halves(before.text, text), words))
            elif before is not None:
                between = _between(before, row, number == 0, pitch, margins)
                parts.append("\n" if between == " " and number in lists else between)
            parts.append(text)
            before = row
    return re.sub(r"[^\S\n]+", " ", "".join(parts)).strip()


def _between(before: Row, row: Row, new_page: bool, pitch: float, margins: dict[int, float]) -> str:
    """The text between two rows: a space in a paragraph, a line break after a short row, a blank line between paragraphs."""
    if before.is_sentence or row.is_sentence:
        return "\n\n"
    size = max(before.size, row.size)
    drop = before.base - row.base
    goes_on = row.text[0].islower()
    ended = before.text.endswith(_ENDS)
    if before.text.endswith("-") and goes_on:
        return " " if halves(before.text, row.text)[1] in CONJUNCTIONS else ""
    if (
        abs(row.size - before.size) > 0.12 * size
        or _BULLET.match(row.text)
        or before.is_sentence
        or row.is_sentence
    ):
        return "\n\n"
    if new_page or drop < -0.5 * size:  # the row is on the next page or in the next column
        return " " if goes_on else "\n\n" if ended else "\n"
    if _LED.search(before.text):
        return "\n"
    if drop > 1.3 * pitch * size and not goes_on:
        return "\n\n"
    if ended and row.left - before.left > 0.8 * size:  # the row is indented, so it begins a paragraph
        return "\n\n"
    if before.right < before.left + 0.8 * (_margin(before, margins) - before.left):
        return "\n\n" if ended and not goes_on else "\n"
    return " "


def _lists(page: Sequence[Row], pitch: float, margins: dict[int, float]) -> set[int]:
    """The numbers of rows that begin a line of their own, as in a form, an address or program code.

    They belong to a run of rows of which none after the first begins with a small letter, and their first word would have fit
    on the row before, so that the row before does not end because it is full.
    """
    found: set[int] = set()
    start = 0
    for end in range(1, len(page) + 1):
        if end < len(page) and _continues(page[end - 1], page[end], pitch):
            continue
        if not any(row.text[0].islower() for row in page[start + 1 : end]):
            found.update(
                number
                for number in range(start + 1, end)
                if _has_room(page[number - 1], page[number].words[0], margins)
            )
        start = end
    return found


def _has_room(row: Row, word: Word, margins: dict[int, float]) -> bool:
    """Whether a word would have fit at the end of a row."""
    margin = max(_margin(row, margins), row.left + _NARROW * row.size)
    return row.right + _SPACE * row.size + word.right - word.left < margin


def _continues(before: Row, row: Row, pitch: float) -> bool:
    """Whether a row is directly below another of the same size."""
    size = max(before.size, row.size)
    return 0 < before.base - row.base <= 1.3 * pitch * size and abs(row.size - before.size) <= 0.12 * size


def _place(row: Row) -> int:
    return int(row.left // 24)


def _margins(page: Sequence[Row]) -> dict[int, float]:
    """Left margin of rows, as computed by `_place` -> right margin of these rows."""
    margins: dict[int, float] = defaultdict(float)
    for row in page:
        margins[_place(row)] = max(margins[_place(row)], row.right)
    return margins


def _margin(row: Row, margins: dict[int, float]) -> float:
    """The right margin of the rows that begin about where this row begins."""
    return max(margins.get(_place(row) + side, 0.0) for side in (-1, 0, 1))


def _pitches(pages: Sequence[Sequence[Row]]) -> list[float]:
    """Distances between consecutive rows, in font sizes."""
    return [
        pitch
        for page in pages
        for before, row in pairwise(page)
        if 0.8 < (pitch := (before.base - row.base) / row.size) < 3 and before.size == row.size
    ]
