"""Parts of a multistream dump, which are read in parallel."""

import bz2
from pathlib import Path

from realm.documents.formats.records import Limits, Record, Unreadable
from realm.documents.wikipedia import dumps, multistream
from realm.documents.wikipedia.multistream import parts_of
from realm.keys import KeyTable, key_of
from tests.documents.writers import HEAD, pages_with_redirects, read, write_dump, write_multistream


def read_parts(path: Path) -> list[Record | Unreadable]:
    """The records of all parts of a dump, with the links of the redirects of all parts."""
    parts = parts_of(path)
    assert len(parts) > 2 and parts[0].start == 0 and parts[-1].end == path.stat().st_size
    with KeyTable() as redirects:
        for part in parts:
            for title, target in dumps.redirects_of_part(part):
                redirects.put(key_of(title), target)
        return [
            dumps.resolved(one, redirects)
            for part in parts
            for one in dumps.articles_of_part(part, path, Limits())
        ]


def test_parts_of_a_dump_have_the_articles_of_the_dump(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(multistream, "PART_BYTES", 4000)
    path = write_multistream(tmp_path / "wiki.xml.bz2", pages_with_redirects(100))
    found, expected = read_parts(path), list(dumps.dump(path, Limits()))
    assert [one for one in found if isinstance(one, Record)] == [
        one for one in expected if isinstance(one, Record)
    ]
    assert list(map(str, found)) == list(map(str, expected))
    assert sum(isinstance(one, Record) for one in found) == 80


def test_the_search_for_parts_and_the_first_reading_of_a_dump_show_their_progress(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("realm.progress.EVERY", 0.0)
    monkeypatch.setattr(multistream, "PART_BYTES", 4000)
    path = write_multistream(tmp_path / "wiki.xml.bz2", pages_with_redirects(100))
    parts_of(path)
    places = len(range(4000, path.stat().st_size - 4000, 4000))
    assert f"find parts: part {places} of {places} (100%)" in capsys.readouterr().err
    next(dumps.dump(path, Limits()))
    assert "read redirects: redirect 20," in capsys.readouterr().err


def test_a_dump_whose_streams_do_not_begin_with_pages_is_not_split(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(multistream, "PART_BYTES", 2000)
    pages = pages_with_redirects(100)
    text = "".join([HEAD, *pages, "</mediawiki>"]).encode()
    streams = [text[at : at + 5000] for at in range(0, len(text), 5000)]  # as by pbzip2
    anywhere = tmp_path / "anywhere.xml.bz2"
    anywhere.write_bytes(b"".join(map(bz2.compress, streams)))
    pages_in_head = tmp_path / "pages.xml.bz2"
    pages_in_head.write_bytes(bz2.compress((HEAD + "".join(pages[:50])).encode()))
    with pages_in_head.open("ab") as file:
        file.write(bz2.compress(("".join(pages[50:]) + "</mediawiki>").encode()))
    for path in (anywhere, pages_in_head, write_dump(tmp_path / "one.xml.bz2", pages)):
        assert path.stat().st_size > 4000 and parts_of(path) == []
        assert len(read(path)[0]) == 80
