"""Jupyter notebooks: the text of their cells, whatever else the JSON contains."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.documents.formats import notebooks
from realm.documents.formats.records import Limits, Unreadable
from realm.documents.reading import read_documents
from realm.errors import InputError

pytestmark = pytest.mark.usefixtures("one_child")


def notebook(path: Path, *cells: Any) -> Path:
    path.write_text(json.dumps({"nbformat": 4, "metadata": {}, "cells": cells}))
    return path


def test_a_notebook_has_its_text_and_code_without_outputs(tmp_path: Path) -> None:
    code = {
        "cell_type": "code",
        "source": "text = (\n```\n# no heading\n```\n)\nprint(text)",
        "outputs": [{"output_type": "stream", "text": ["secret"]}],
    }
    path = notebook(
        tmp_path / "a.ipynb",
        {"cell_type": "markdown", "source": ["# Forecast\n", "\n", "By *Leila*."]},
        code,
        {"cell_type": "raw", "source": "raw"},
        {"cell_type": "markdown", "source": "## Result\n\n|Week|Error|\n|-|-|\n|51|6.8|"},
    )
    (found,) = read_documents([str(path)])
    assert (found.title, found.id) == ("Forecast", str(path))
    assert found.text.split("\n\n") == ["By Leila.", code["source"], "Result", "Week: 51; Error: 6.8."]


def test_a_notebook_without_a_heading_has_the_name_of_its_file(tmp_path: Path) -> None:
    path = notebook(tmp_path / "a.ipynb", {"cell_type": "code", "source": ["1 + 1"]})
    (found,) = read_documents([str(path)])
    assert (found.title, found.text) == ("a", "1 + 1")


@pytest.mark.parametrize(
    "unclosed",
    [
        "<!-- todo",
        "```\ncode",
        "~~~~\n",
        "<script>",
        "<table><tr><td>",
        "<select>",
        "<div hidden>",
        "<textarea>",
        "<pre>",
    ],
)
def test_markup_that_is_not_closed_ends_with_its_cell(unclosed: str, tmp_path: Path) -> None:
    path = notebook(
        tmp_path / "a.ipynb",
        {"cell_type": "markdown", "source": f"# T\n\n{unclosed}"},
        {"cell_type": "code", "source": "f(1 < 2)\n    # <b> &amp;"},
        {"cell_type": "markdown", "source": "## Result\n\nThe *end*."},
    )
    (found,) = read_documents([str(path)], headings=True)
    assert found.title == "T"
    assert found.text.endswith("f(1 < 2)\n    # <b> &amp;\n\nResult\n\nThe end.")
    start, title, *_ = found.sections[-1]
    assert found.text[start:] == "Result\n\nThe end." and title == "T > Result"


@pytest.mark.parametrize("kind", ["markdown", "code"])
def test_half_of_a_character_does_not_leave_out_the_notebook(kind: str, tmp_path: Path) -> None:
    path = notebook(tmp_path / "a.ipynb", {"cell_type": kind, "source": "a\ud800b\0c \U0001f600"})
    (found,) = read_documents([str(path)])
    assert found.text.startswith("a\ufffdb") and found.text.endswith("c \U0001f600")


def test_a_notebook_of_version_3_has_worksheets_inputs_and_cells_of_headings(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "heading", "level": 1, "source": ["Old\n", "book"]},
        {"cell_type": "heading", "level": 2.0, "source": "Part"},
        {"cell_type": "heading", "level": True, "source": ""},
        {"cell_type": "code", "input": ["1 +\n", "1"], "outputs": [{"text": "2"}]},
        {"cell_type": "markdown", "source": "*End*"},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"nbformat": 3, "worksheets": [{"cells": cells}, 1, {}]}))
    (found,) = read_documents([str(tmp_path / "a.ipynb")])
    assert (found.title, found.text) == ("a", "Old book\n\nPart\n\n1 +\n1\n\nEnd")


def test_a_notebook_that_is_too_long_is_left_out_before_it_is_rendered(tmp_path: Path) -> None:
    path = notebook(tmp_path / "a.ipynb", *[{"cell_type": "markdown", "source": "a" * 50}] * 5)
    with pytest.raises(Unreadable, match="250 characters, over twice the limit of 100"):
        list(notebooks.read(path, Limits(document_chars=100)))


def test_front_matter_of_a_notebook_is_no_text(tmp_path: Path) -> None:
    path = notebook(
        tmp_path / "a.ipynb", {"cell_type": "markdown", "source": "---\ntitle: A\nday: 3\n---\n# B\n\nText."}
    )
    (found,) = read_documents([str(path)])
    assert (found.title, found.text, found.fields["day"]) == ("A", "B\n\nText.", 3)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no cells"),
        ('{"cells": 1}', "no cells"),
        ('{"worksheets": [{"cells": 1}, []]}', "no cells"),
        ('{"cells": [1, {}, {"source": 1}, {"source": [1], "cell_type": "code"}]}', "no cells"),
    ],
)
def test_a_file_that_is_no_notebook_is_one_line(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text(content)
    with pytest.raises(InputError, match=rf"a\.ipynb.*{problem}"):
        list(read_documents([str(tmp_path / "a.ipynb")]))


_SOURCES = st.text("a`#\n") | st.lists(st.text("a`~\n") | st.none())


@given(
    st.lists(st.fixed_dictionaries({"cell_type": st.sampled_from(["markdown", "code"]), "source": _SOURCES}))
)
def test_no_letter_of_code_is_lost(tmp_path_factory, cells: list[dict[str, Any]]) -> None:
    path = notebook(tmp_path_factory.mktemp("notebooks") / "a.ipynb", *cells)
    with suppress(Unreadable):
        (found,) = notebooks.read(path, Limits())
        letters = sum(json.dumps(cell["source"]).count("a") for cell in cells if cell["cell_type"] == "code")
        assert (found.title + found.text).count("a") >= letters
