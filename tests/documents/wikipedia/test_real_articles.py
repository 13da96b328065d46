"""Articles of Wikipedia, put back into a dump and a ZIM archive. They are the packaged vital articles; with --data, they are
from Simple English Wikipedia."""

import json
import lzma
import re
from itertools import islice
from pathlib import Path

import pytest

from realm.documents.reading import read_documents
from tests.conftest import Trials
from tests.documents.writers import read, write_articles_as_dump, write_articles_as_zim

ARTICLES = 1000


@pytest.fixture(scope="module")
def articles(pytestconfig: pytest.Config, trials: Trials) -> dict[str, str]:
    """Title -> text."""
    if not (folder := pytestconfig.getoption("--data")):
        packaged = islice(read_documents(["package:vital-articles"]), trials.count(ARTICLES))
        return {document.title: document.text for document in packaged}
    with lzma.open(folder / "simplewiki" / "articles.jsonl.xz", "rt", encoding="utf-8") as lines:
        read_lines = [json.loads(line) for line in islice(lines, trials.count(ARTICLES))]
    return {article["title"]: article["text"] for article in read_lines}


def check(file: Path, articles: dict[str, str]) -> None:
    """The words of all articles come back in their order. Empty brackets and the like are removed from a dump."""
    texts, reasons = read(file)
    lacking = articles.keys() - texts.keys()
    assert all(re.match(r"(List|Index|Outline)s? of |.*\(disambiguation\)$", title) for title in lacking)
    assert len(lacking) == sum(reasons.values()) < len(articles) / 20
    for title, text in texts.items():
        assert re.findall(r"\w+", text) == re.findall(r"\w+", articles[title]), title


def test_the_articles_come_back_from_a_multistream_dump(articles: dict[str, str], tmp_path: Path) -> None:
    file = write_articles_as_dump(tmp_path / "simplewiki-multistream.xml.bz2", articles.items())
    check(file, articles)


def test_the_articles_come_back_from_a_zim_archive(articles: dict[str, str], tmp_path: Path) -> None:
    check(write_articles_as_zim(tmp_path / "simplewiki.zim", articles.items()), articles)
