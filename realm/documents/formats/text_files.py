"""Files that are one document each: plain text, Markdown and HTML."""

from collections.abc import Iterator
from pathlib import Path

from realm.documents.formats.encodings import whole
from realm.documents.formats.front_matter import split_front_matter
from realm.documents.formats.hyphens import with_whole_words
from realm.documents.formats.markdown_dialects import as_commonmark
from realm.documents.formats.pages import page_in
from realm.documents.formats.records import Limits, Reason, Record, Unreadable
from realm.documents.formats.sections import page_record
from realm.documents.formats.titles import file_title
from realm.text.corpus import over_limit


def plain_text(path: Path, limits: Limits) -> Iterator[Record]:
    """One record. The title is the first line if this line is short and a blank line follows, else the file name.

    Words that are divided at line ends are whole again.
    """
    text, assumed = whole(path, limits)
    if len(text) <= limits.document_chars:  # a longer text is left out
        text = with_whole_words(text)
    text = text.strip()
    first, _, rest = text.partition("\n")
    if len(first) <= 100 and rest.strip() and not rest.partition("\n")[0].strip():
        yield Record(str(path), first.strip(), rest.strip(), path.as_posix(), assumed)
    else:
        yield Record(str(path), file_title(path), text, path.as_posix(), assumed)


def markdown(path: Path, limits: Limits) -> Iterator[Record]:
    """One record. The title is that of the front matter, else the main heading, else the file name."""
    from markdown_it import MarkdownIt

    source, assumed = whole(path, limits)
    # The parser needs half a gigabyte of memory for a megabyte of short lines.
    if len(source) > 2 * limits.document_chars:
        problem = over_limit(len(source), limits.document_chars, "twice the limit")
        raise Unreadable(path, Reason.TOO_LONG, f"{path}: {problem}")
    front, source = split_front_matter(source)
    # Markdown is first converted to HTML, because Markdown may contain HTML. It is an article, so its asides are notes.
    article = MarkdownIt("commonmark").enable("table").render(as_commonmark(source))
    page = page_in(path, f"<article>{article}</article>")
    fields = {**page.fields, **front.fields}
    headings = page.headings if limits.headings else ()
    yield page_record(path, front.title or page.main_heading, page.text, assumed, fields, headings)


def html(path: Path, limits: Limits) -> Iterator[Record]:
    """One record. The title is the title element, else the main heading, else the file name."""
    source, assumed = whole(path, limits, html=True)
    page = page_in(path, source)
    headings = page.headings if limits.headings else ()
    title = page.title or page.main_heading
    yield page_record(path, title, page.text, assumed, page.fields, headings)
