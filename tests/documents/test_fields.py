"""Fields of documents from JSON Lines, tables, front matter, HTML and the file system; sections of headings and records."""

import json
import os
import string
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from realm.documents.formats.front_matter import split_front_matter
from realm.documents.formats.pages import read_page
from realm.documents.reading import ReadingReport, documents_of, read_documents
from realm.errors import InputError
from realm.text.corpus import Document, Section
from realm.text.fields import clean_fields
from tests.documents import writers


def read(path: Path, content: str, **options: Any) -> Document:
    path.write_text(content, encoding="utf-8")
    (document,) = read_documents([str(path)], **options)
    return document


def own(document: Document) -> dict[str, Any]:
    """The fields without those of the file system."""
    return {name: value for name, value in document.fields.items() if name not in ("path", "modified")}


# --- fields -------------------------------------------------------------------------------------------------


def test_a_file_that_is_one_document_has_its_path_and_time(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("One.")
    os.utime(file, (0, 86400 + 0.7))
    (document,) = read_documents([str(file)])
    assert document.fields == {"path": file.as_posix(), "modified": "1970-01-02T00:00:00Z"}


def test_a_file_with_a_time_that_no_calendar_has_is_read(tmp_path: Path, monkeypatch) -> None:
    stat = Path.stat

    def far(path: Path, **given: Any) -> Any:  # some file systems, such as tmpfs, have such times
        found = stat(path, **given)
        return os.stat_result((*found[:8], 1_000_000_000_000, found[9])) if path.name == "a.txt" else found

    (tmp_path / "a.txt").write_text("One.")
    monkeypatch.setattr(Path, "stat", far)
    (document,) = read_documents([str(tmp_path / "a.txt")])
    assert (document.text, document.fields) == ("One.", {"path": (tmp_path / "a.txt").as_posix()})


def test_the_other_keys_of_a_record_are_its_fields(tmp_path: Path) -> None:
    record = {
        "id": 1,
        "title": "A",
        "text": "One.",
        "year": 2020,
        "og:url": "https://example.org",
        "none": None,
        "metadata": {"year": 1, "tags": ["a"], "title": "B"},
    }
    expected = {"year": 2020, "og_url": "https://example.org", "tags": ["a"]}
    assert read(tmp_path / "a.jsonl", json.dumps(record)).fields == expected
    (document,) = documents_of([record])
    assert document.fields == expected
    report = ReadingReport()
    too_long = json.dumps({**record, "html": "x" * 3000})
    assert read(tmp_path / "a.jsonl", too_long, report=report).fields == expected
    (line,) = report.lines()
    assert line == "fields left out, because they are longer than 2,000 characters or not JSON: html (1)"
    plain = {"title": "A", "text": "One.", "metadata": "{}"}
    assert read(tmp_path / "b.jsonl", json.dumps(plain)).fields == {"metadata": "{}"}


def test_a_record_from_python_needs_an_id_a_title_or_an_address() -> None:
    given = {"text": "One."}, {"id": 7}, {"title": "A"}, {"url": "https://example.org"}
    nameless, *named = ({"text": "One.", **one} for one in given)
    assert [one.id for one in documents_of(named)] == ["7", "A", "https://example.org"]
    with pytest.raises(InputError, match="record 2 has neither an id nor a title"):
        list(documents_of([named[0], nameless]))


def test_columns_of_tables_are_fields_and_numbers_are_recognised_where_all_is_text(tmp_path: Path) -> None:
    table = pa.table(
        {
            "title": ["A"],
            "text": ["One."],
            "year": pa.array([2020], pa.int16()),
            "day": pa.array([18262], pa.date32()),
            "at": pa.array([1_577_836_800_000_000], pa.timestamp("us")),
            "list": [[1]],
            "kind": pa.array(["k"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    (document,) = read_documents([str(tmp_path / "a.parquet")])
    assert document.fields == {"year": 2020, "day": "2020-01-01", "at": "2020-01-01T00:00:00Z", "kind": "k"}
    content = "title\ttext\tyear\tzip\tshare\tempty\nA\tOne.\t2020\t007\t0.5\t\n"
    assert read(tmp_path / "a.tsv", content).fields == {"year": 2020, "zip": "007", "share": 0.5}


def test_meta_elements_are_fields_but_not_those_for_browsers(tmp_path: Path) -> None:
    page = """<html><head><title>A</title><meta charset="utf-8"><meta name="viewport" content="x">
        <meta name="twitter:card" content="x"><meta name="author" content=" Ada "><meta name="year" content="1843">
        <meta name="citation_author" content="B"><meta name="citation_author" content="C"><meta name="empty" content="">
        </head><body><p>One.</p></body></html>"""
    document = read(tmp_path / "a.html", page)
    assert own(document) == {"author": "Ada", "year": 1843, "citation_author": ["B", "C"]}
    assert document.text == "One."


YAML = """---
title: "A: page"
year: 2020
date: 2020-02-29
at: 2020-02-29 10:00:00+02:00
draft: false
tags: [a, b]
author: {name: Ada}
id: own
---
Text.
"""
TOML = """+++
title = "A: page"
year = 2020
date = 2020-02-29
at = 2020-02-29T10:00:00+02:00
draft = false
tags = ["a", "b"]
author = {name = "Ada"}
id = "own"
+++
Text.
"""


@pytest.mark.parametrize("source", [YAML, TOML])
def test_front_matter_gives_the_title_and_typed_fields(tmp_path: Path, source: str) -> None:
    document = read(tmp_path / "a.md", source)
    assert (document.title, document.text) == ("A: page", "Text.")
    assert own(document) == {
        "year": 2020,
        "date": "2020-02-29",
        "at": "2020-02-29T08:00:00Z",
        "draft": False,
        "tags": ["a", "b"],
        "author": {"name": "Ada"},
    }


@pytest.mark.parametrize(
    "front",
    [
        "title: A [b\nyear: : 2020",
        "title: A [b\n- list",
        "title: A [b\na: &a [x, x]\nb: [*a, *a]",
        "title: A [b\nday: 2020-99-99",
    ],
)
def test_front_matter_that_is_no_yaml_or_has_aliases_gives_the_title_alone(
    tmp_path: Path, front: str
) -> None:
    document = read(tmp_path / "a.md", f"---\n{front}\n---\n# Head\n\nText.\n")
    assert document.title == "A [b"
    assert own(document) == {}
    assert document.text.endswith("Text.")


def test_a_time_outside_the_calendar_is_left_out_and_counted(tmp_path: Path) -> None:
    report = ReadingReport()
    source = "---\ndate: 0001-01-01T00:00:00+05:00\nyear: 1\n---\nText.\n"
    assert own(read(tmp_path / "a.md", source, report=report)) == {"year": 1}
    assert report.fields_left_out == {"date": 1}


@pytest.mark.parametrize(
    "begin", ["\n# Intro\n\nIt burned.\n\n", "\nsold: yes\n", "It burned.\n", "# Intro\n", "- It: [burned\n"]
)
def test_text_between_two_rules_is_no_front_matter(begin: str) -> None:
    source = f"---\n{begin}---\n\n# Next\n\nIt froze.\n"
    assert split_front_matter(source) == (("", {}), source)
    assert split_front_matter("---\n---\nIt froze.\n") == (("", {}), "It froze.\n")


scalars = st.booleans() | st.integers(-(10**6), 10**6) | st.dates() | st.text(string.printable, max_size=20)
metadata = st.dictionaries(
    st.text(string.ascii_letters, min_size=1, max_size=8).filter(
        lambda name: name not in ("id", "text", "maintext")
    ),
    scalars | st.lists(scalars, max_size=3),
    max_size=4,
)


@given(metadata, st.text(string.ascii_letters + " \n#-", max_size=40))
def test_front_matter_that_is_written_comes_back(fields: dict[str, Any], rest: str) -> None:
    front = yaml.safe_dump(fields, allow_unicode=True) if fields else ""
    found, text = split_front_matter(f"---\n{front}---\n{rest}")
    assert text == rest
    assert clean_fields(found.fields) == clean_fields({k: v for k, v in fields.items() if k != "title"})


@given(st.text("-+\n: #&*[]{}'\"!|>%abt0123\t\r\x00é", max_size=60))
@example("---\n" + "[" * 5000 + "\n---\n")
@example("---\na: !!python/object/apply:os.system [x]\n---\n")
def test_any_text_has_front_matter_or_none(source: str) -> None:
    front, rest = split_front_matter(source)
    assert source.endswith(rest)
    assert isinstance(front.title, str)
    clean_fields(front.fields)


# --- sections -----------------------------------------------------------------------------------------------


MARKDOWN = """---
title: Manual
---
# Manual

Read this.

## Install

### Linux

Use apt.

### Windows

Use the installer.

## Use

Press *the* button.
"""
TITLES = ["Manual", "Manual > Install > Linux", "Manual > Install > Windows", "Manual > Use"]


def parts(document: Document) -> list[str]:
    starts = [one.start for one in document.sections]
    return [
        document.text[start:end].strip()
        for start, end in zip(starts, [*starts[1:], len(document.text)], strict=True)
    ]


def test_headings_make_sections_whose_titles_are_the_path_of_the_headings(tmp_path: Path) -> None:
    document = read(tmp_path / "a.md", MARKDOWN, headings=True)
    assert [one.title for one in document.sections] == TITLES
    assert parts(document) == [
        "Read this.",
        "Install\n\nLinux\n\nUse apt.",
        "Windows\n\nUse the installer.",
        "Use\n\nPress the button.",
    ]
    (without,) = read_documents([str(tmp_path / "a.md")])
    assert without == document._replace(sections=())


def test_titles_of_sections_do_not_repeat_the_beginning_of_a_name(tmp_path: Path) -> None:
    source = (
        "<title>git-add(1)</title><h1>git-add(1) Manual Page</h1><h2>NAME</h2>git-add - Add.<h3>NAMES</h3>x"
        '<h2>Use<a class="headerlink" href="#use">¶</a></h2><h3>Use - in short</h3>Type it.'
    )
    document = read(tmp_path / "a.html", source, headings=True)
    assert [one.title for one in document.sections] == [
        "git-add(1) Manual Page > NAME",
        "git-add(1) Manual Page > NAME > NAMES",
        "git-add(1) Manual Page > Use - in short",
    ]
    assert "¶" not in document.text


def test_word_documents_and_books_have_the_sections_of_their_headings(tmp_path: Path) -> None:
    writers.zipped(tmp_path / "a.epub", writers.BOOK)
    writers.word(tmp_path / "b.docx", "Towns")
    book, word = read_documents([str(tmp_path)], headings=True)
    assert [one.title for one in book.sections] == [
        f"Towns of the Ouse > {town}" for town in ("Arden", "Bexley")
    ]
    assert parts(book) == ["Arden\n\nOn the Ouse & the sea.", "Bexley\n\nKöln — far away."]
    assert [one.title for one in word.sections] == ["Towns of the Ouse > Arden"]


tags = st.sampled_from("h1 h2 h3 h6 p div td nav title pre".split())
pieces = st.lists(st.tuples(tags, st.text("ab \n\x02", max_size=6), st.booleans()), max_size=12)


@given(pieces)
def test_headings_stand_where_the_page_has_them_and_change_no_text(
    drawn: list[tuple[str, str, bool]],
) -> None:
    source = "".join(f"<{tag}>{text}{f'</{tag}>' if closed else ''}" for tag, text, closed in drawn)
    page = read_page(source)
    assert "\x02" not in page.text
    starts = [heading.start for heading in page.headings]
    assert starts == sorted(set(starts))
    for start, _, words in page.headings:
        assert words
        assert " ".join(page.text[start:].split()).startswith(words)
        assert start == 0 or page.text[start - 1] == "\n"


def test_the_passages_of_a_record_are_its_text_and_its_sections(tmp_path: Path) -> None:
    record = {"title": "A", "text": "old", "passages": [{"title": "A > 1", "text": "One."}, {"text": "Two."}]}
    document = read(tmp_path / "a.jsonl", json.dumps(record))
    assert document.text == "One.\n\nTwo."
    assert document.sections == (Section(0, "A > 1"), Section(6, "A"))
    assert parts(document) == ["One.", "Two."]
    for other in ([], ["One."], [{"text": 1}], [{"text": " "}], "x"):
        found = read(tmp_path / "a.jsonl", json.dumps({"title": "A", "text": "old", "passages": other}))
        assert (found.text, found.sections) == ("old", ())
        assert found.fields == {"passages": other}
