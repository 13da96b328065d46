"""Documents that are nearly equal to an earlier document are left out (`near_duplicates`)."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from realm import cli
from realm.documents.near_duplicates import without_near_duplicates
from realm.documents.reading import ReadingReport
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document

DRAW = random.Random(0)
VOCABULARY = ["".join(DRAW.choice("abcdefghijklmnop") for _ in range(6)) for _ in range(2000)]


def text(words: int = 300) -> list[str]:
    return [DRAW.choice(VOCABULARY) for _ in range(words)]


def changed(words: list[str], places: int) -> list[str]:
    """A copy in which this number of words, far from each other, is replaced."""
    found = list(words)
    for place in range(10, 10 + 12 * places, 12):
        found[place] = "replaced"
    return found


def similarity(one: list[str], other: list[str]) -> float:
    """The exact Jaccard similarity of the sequences of five words."""
    a, b = ({tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (one, other))
    return len(a & b) / len(a | b)


def kept(texts: list[str], threshold: float) -> tuple[list[int], ReadingReport]:
    report = ReadingReport()
    documents = [Document(f"title {place}", one, str(place)) for place, one in enumerate(texts)]
    report.documents = len(documents)
    return [int(one.id) for one in without_near_duplicates(documents, threshold, report)], report


@pytest.mark.parametrize(("places", "low", "high"), [(1, 0.95, 1.0), (5, 0.8, 0.9), (20, 0.4, 0.55)])
def test_a_pair_is_found_if_its_exact_similarity_is_well_above_the_threshold(places, low, high) -> None:
    found = 0
    for _ in range(40):
        one = text()
        other = changed(one, places)
        assert low <= similarity(one, other) <= high
        found += kept([" ".join(one), " ".join(other)], 0.7)[0] == [0]
    assert found == (0 if high < 0.7 else 40)


def test_unrelated_documents_are_kept_and_copies_are_left_out_wherever_they_stand() -> None:
    originals = [" ".join(text(80)) for _ in range(200)]
    copies = [f"{one.upper()}!" for one in originals[::10]]  # case and punctuation do not count
    found, report = kept(originals + copies, 0.8)
    assert found == list(range(200))
    assert report.documents == 200
    assert dict(report.reasons) == {"nearly equal to an earlier document": 20}
    assert report.left_out[0].problem == "200: similarity of about 1.00 to 0"


def test_with_a_similarity_of_1_only_texts_with_equal_words_are_left_out() -> None:
    one = text()
    assert kept([" ".join(one), " ".join(changed(one, 1)), ", ".join(one)], 1.0)[0] == [0, 1]


def test_short_and_empty_texts_are_compared_as_a_whole() -> None:
    assert kept(["one two", "one two three", "One, two.", "", "."], 0.9)[0] == [0, 1, 3]


GROWTH = """
from realm.documents.near_duplicates import without_near_duplicates
from realm.keys import TemporaryDatabase
from realm.text.corpus import Document
from tests.peak_memory import peak_kilobytes
TemporaryDatabase.CACHE_KB = 1024
documents = (Document("", " ".join(str(number * word) for word in range(1, 9)), str(number)) for number in range(1, 5001))
for count, _ in enumerate(without_near_duplicates(documents, 0.8, None), 1):
    if count in (1000, 5000):
        print(peak_kilobytes())
"""
"""Prints the largest memory after 1,000 and after 5,000 documents. Their hash values alone have 2 MB."""


def test_memory_does_not_grow_with_the_documents() -> None:
    ended = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    few, many = map(int, ended.stdout.split())
    assert many - few < 3_000  # kilobytes; 28,000 with the hash values in memory


def test_kb_build_leaves_out_near_duplicates_and_lists_them(tmp_path: Path, capsys) -> None:
    one, other = text(), text()
    texts = {"a": one, "b": changed(one, 1), "c": other}
    lines = [{"id": name, "title": name, "text": " ".join(words) + "."} for name, words in texts.items()]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    build = ["kb", "build", str(tmp_path / "docs.jsonl"), "--tagger", "rules", "--strict"]
    assert cli.main([*build, "--out", str(tmp_path / "all")]) == 0
    words = ["--out", str(tmp_path / "kb"), "--set", "near_duplicates=0.8"]
    capsys.readouterr()
    assert cli.main([*build[:-1], *words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["documents"] == 2 and shown["left_out"] == {"nearly equal to an earlier document": 1}
    left = [json.loads(line) for line in (tmp_path / "kb" / "left_out.jsonl").read_text().splitlines()]
    assert [one["where"] for one in left] == ["b"]
    assert [
        {one.id for one in KnowledgeBase.open(tmp_path / name).documents()} for name in ("all", "kb")
    ] == [
        {"a", "b", "c"},
        {"a", "c"},
    ]
    assert cli.main([*build, "--out", str(tmp_path / "no"), "--set", "near_duplicates=80"]) == 2
