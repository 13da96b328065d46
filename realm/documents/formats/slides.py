"""The text of presentations (.pptx): titles, paragraphs, tables and speaker notes of the visible slides, in their order.

ppt/presentation.xml lists the slides, and files of relationships have the paths of the parts (ECMA-376).
"""

import posixpath
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realm.documents.formats.archives import archive, office_title, xml_part
from realm.documents.formats.records import Limits, Record
from realm.documents.formats.rows import sentence_of
from realm.documents.formats.sections import Heading, page_record

_SHAPES = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_TEXT = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_LINK = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
_PRESENTATION = "ppt/presentation.xml"
_TITLES = ("title", "ctrTitle")
_NOT_TEXT = ("sldNum", "ftr", "dt", "hdr", "sldImg")
"""Placeholders that repeat on every slide: number, footer, date and header, and the picture of the slide beside its notes."""


def read(path: Path, limits: Limits) -> Iterator[Record]:
    """One record. The title is a sensible title in the metadata, else that of the first slide, else the file name."""
    text, headings = "", []
    with archive(path, limits, ".pptx") as parts:
        title = office_title(parts)
        for slide in _slides(path, parts):
            heading, lines = _words(xml_part(path, parts, slide))
            for notes in _related(path, parts, slide, "/notesSlide").values():
                lines += _words(xml_part(path, parts, notes))[1]
            text += "\n\n" if text and (heading or lines) else ""
            if heading:
                headings.append(Heading(len(text), 1, heading))
            text += "\n".join(filter(None, (heading, *lines)))
    first = headings[0].words if headings else ""
    yield page_record(path, title or first, text, headings=headings if limits.headings else ())


def _slides(path: Path, parts: zipfile.ZipFile) -> list[str]:
    """Names of the parts of the slides that are shown."""
    names = _related(path, parts, _PRESENTATION, "/slide")
    order = xml_part(path, parts, _PRESENTATION).iterfind(f".//{_SHAPES}sldIdLst/{_SHAPES}sldId")
    found = [names[one.get(_LINK)] for one in order if one.get(_LINK) in names]
    return [name for name in found if xml_part(path, parts, name).get("show") not in ("0", "false")]


def _related(path: Path, parts: zipfile.ZipFile, name: str, kind: str) -> dict[str, str]:
    """Id of a relationship of a part -> the related part, for relationships whose type ends with `kind`."""
    folder, file = posixpath.split(name)
    relations = f"{folder}/_rels/{file}.rels"
    if relations not in parts.NameToInfo:
        return {}
    found = {
        one.get("Id"): posixpath.normpath(posixpath.join(folder, one.get("Target", "")))
        for one in xml_part(path, parts, relations).iterfind("{*}Relationship")
        if one.get("Type", "").endswith(kind)
    }
    return {key: part.lstrip("/") for key, part in found.items() if part.lstrip("/") in parts.NameToInfo}


def _words(slide: Any) -> tuple[str, list[str]]:
    """The title of a slide, and its paragraphs and rows of tables."""
    title, lines = "", []
    for shape in slide.iter(f"{_SHAPES}sp", f"{_TEXT}tbl"):
        if shape.tag == f"{_TEXT}tbl":
            lines += _rows(shape)
            continue
        place = shape.find(f"{_SHAPES}nvSpPr/{_SHAPES}nvPr/{_SHAPES}ph")
        kind = "" if place is None else place.get("type", "")
        paragraphs = [
            words for one in shape.iterfind(f"{_SHAPES}txBody/{_TEXT}p") if (words := _paragraph(one))
        ]
        if kind in _TITLES:
            title = title or " ".join(paragraphs)
        elif kind not in _NOT_TEXT:
            lines += paragraphs
    return title, lines


def _rows(table: Any) -> list[str]:
    """The rows of a table as sentences; the first row can have the headings of the columns."""
    rows = [
        [
            " ".join(filter(None, map(_paragraph, cell.iter(f"{_TEXT}p"))))
            for cell in row.iterfind(f"{_TEXT}tc")
        ]
        for row in table.iterfind(f"{_TEXT}tr")
    ]
    rows = [row for row in rows if any(row)]
    look = table.find(f"{_TEXT}tblPr")
    has_headings = look is not None and look.get("firstRow") in ("1", "true")
    if not has_headings or len(rows) < 2 or any(len(row) != len(rows[0]) for row in rows):
        return [sentence_of([""] * len(row), row) for row in rows]
    return [sentence_of(rows[0], row) for row in rows[1:]]


def _paragraph(paragraph: Any) -> str:
    runs = paragraph.iter(f"{_TEXT}t", f"{_TEXT}br", f"{_TEXT}tab")
    return " ".join("".join(one.text or "" if one.tag == f"{_TEXT}t" else " " for one in runs).split())
