"""The text of Jupyter notebooks (.ipynb): the cells of Markdown and of code. Outputs are not read.

The notebook becomes Markdown, in which code is fenced. It is read in a child process, because small JSON can take much memory.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realm.documents.formats.encodings import whole
from realm.documents.formats.records import Limits, Reason, Record, Unreadable
from realm.documents.formats.text_files import markdown_record
from realm.errors import first_line


def read(path: Path, limits: Limits) -> Iterator[Record]:
    """One record. The title is the main heading, as in Markdown, else the file name.

    Raises:
        Unreadable: the file is too long, is no JSON, or has no cells with text.
    """
    text, assumed = whole(path, limits)
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(path, Reason.NOT_JSON, f"{path}: not JSON ({first_line(error)})") from None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    source = "\n\n".join(_sources(cells if isinstance(cells, list) else []))
    if not source.strip():
        raise Unreadable(path, Reason.NO_TEXT, f"{path} has no cells of Markdown or code")
    yield markdown_record(path, source, assumed, limits)


def _sources(cells: list[Any]) -> Iterator[str]:
    """The Markdown of each cell of Markdown or code that is not empty."""
    for cell in cells:
        if not isinstance(cell, dict):
            continue
        lines = cell.get("source")
        source = "".join(filter(_is_text, lines)) if isinstance(lines, list) else lines
        if not isinstance(source, str) or not source.strip():
            continue
        if cell.get("cell_type") == "markdown":
            yield source
        elif cell.get("cell_type") == "code":
            # The fence must be longer than any in the code.
            fence = "`" * max(3, 1 + max(map(len, _BACKTICKS.findall(source)), default=0))
            yield f"{fence}\n{source}\n{fence}"


_BACKTICKS = re.compile("`+")


def _is_text(value: object) -> bool:
    return isinstance(value, str)
