"""Annotations that are kept between builds: compared with those of the tagger alone."""

import itertools
import logging
import multiprocessing
import os
import random
import sqlite3
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import spacy

from realm import kept_values
from realm.text import tagger_groups
from realm.text.corpus import Annotations, Span
from realm.text.kept_names import DATABASE, KeepingTagger, cache_folder
from realm.text.salient_spans import load_tagger
from realm.text.tagger_groups import Asked, GroupTagger, grouped, working


class Model(GroupTagger):
    """Each text is a sentence and a name; `asked` has the texts that were tagged."""

    name = "model"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def apply(self, documents: Iterable[Asked], prepare: Callable[[], Any]) -> Generator[Any, None, None]:
        yield from map(working(lambda: self.find, prepare), grouped(documents))

    def find(self, texts: Sequence[str]) -> list[Annotations]:
        self.asked += texts
        return list(map(answer, texts))


def answer(text: str) -> Annotations:
    return Annotations(((0, 2), (2, len(text))), (Span(0, len(text), f"OF {text!r}"),))


TEXTS = [f"text {number}" for number in range(40)]


def test_a_text_is_tagged_once_and_a_changed_text_again(tmp_path: Path) -> None:
    first, second = Model(), Model()
    assert list(KeepingTagger(first, "1", tmp_path).annotate(TEXTS)) == list(map(answer, TEXTS))
    changed = [*TEXTS[:10], "other text", *TEXTS[11:], "new text"]
    assert list(KeepingTagger(second, "1", tmp_path).annotate(changed)) == list(map(answer, changed))
    assert (first.asked, second.asked) == (TEXTS, ["other text", "new text"])


@pytest.mark.parametrize("limits", [{"GROUP": 3}, {"GROUP_CHARS": 30}])
def test_known_and_new_texts_stay_in_their_order(limits: dict[str, int], tmp_path: Path, monkeypatch) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(tagger_groups, name, value)
    monkeypatch.setattr(kept_values, "AT_ONCE", 2)
    draw = random.Random(1)
    for _ in range(10):
        texts = draw.choices([*TEXTS, "", "é — 東京"], k=draw.randint(0, 30))
        assert list(KeepingTagger(Model(), "1", tmp_path).annotate(iter(texts))) == list(map(answer, texts))


@pytest.mark.parametrize("group", [1, 100])
def test_a_text_that_occurs_again_is_new_however_far_the_work_is(
    group: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(tagger_groups, "GROUP", group)
    monkeypatch.setattr(kept_values, "AT_ONCE", 1)
    first, second = Model(), Model()
    a, b, c, d = TEXTS[:4]
    list(KeepingTagger(first, "1", tmp_path).annotate([a, b, a, c, b]))
    list(KeepingTagger(second, "1", tmp_path).annotate([c, d, c, d]))
    assert (first.asked, second.asked) == ([a, b, a, c, b], [d, d])


def test_the_database_contains_no_text(tmp_path: Path) -> None:
    list(load_kept("Confidential", tmp_path).annotate(["Ada met Confidential in Rome."]))
    assert b"onfidential" not in (tmp_path / "cache" / DATABASE).read_bytes()


def load_kept(name: str, folder: Path) -> KeepingTagger:
    """The tagger of a spaCy pipeline, always of the same name, which knows one name."""
    pipeline = spacy.blank("en")
    pipeline.add_pipe("sentencizer")
    pipeline.add_pipe("entity_ruler", name="ner").add_patterns([{"label": "PERSON", "pattern": name}])
    pipeline.to_disk(folder / "pipeline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REALM_CACHE", str(folder / "cache"))
        tagger = load_tagger(f"spacy:{folder / 'pipeline'}")
    assert isinstance(tagger, KeepingTagger)
    return tagger


def test_another_model_under_the_same_name_tags_again(tmp_path: Path) -> None:
    text = "Ada met Bob."
    for name in ("Ada", "Bob", "Ada"):
        (found,) = load_kept(name, tmp_path).annotate([text])
        assert [text[start:end] for start, end, _ in found.spans] == [name]
    with sqlite3.connect(tmp_path / "cache" / DATABASE) as database:
        assert database.execute("SELECT count(*) FROM names").fetchone() == (2,)


def test_texts_before_an_error_are_tagged_and_kept(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        yield from TEXTS[:5]
        raise OSError("the file ends here")

    found: list[Annotations] = []
    with pytest.raises(OSError, match="the file ends here"):
        found.extend(KeepingTagger(Model(), "1", tmp_path).annotate(texts()))
    assert found == list(map(answer, TEXTS[:5]))
    again = Model()
    list(KeepingTagger(again, "1", tmp_path).annotate(TEXTS))
    assert again.asked == TEXTS[5:]


def tag(folder: Path, texts: list[str], at_once: int) -> None:
    kept_values.AT_ONCE = at_once
    assert list(KeepingTagger(Model(), "1", folder).annotate(texts)) == list(map(answer, texts))


def tag_without_end(folder: Path) -> None:
    kept_values.AT_ONCE = 1
    for _ in KeepingTagger(Model(), "1", folder).annotate(f"text {number}" for number in itertools.count()):
        pass


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    parts = [[f"text {number}" for number in range(first, first + 300)] for first in (0, 150, 300)]
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=tag, args=(tmp_path, part, 3)) for part in parts]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert [one.exitcode for one in workers] == [0, 0, 0]
    again = Model()
    list(KeepingTagger(again, "1", tmp_path).annotate([f"text {number}" for number in range(600)]))
    assert again.asked == []


def kept(folder: Path) -> int:
    """Number of the texts whose annotations are kept."""
    with closing(sqlite3.connect(folder / DATABASE)) as database, suppress(sqlite3.OperationalError):
        return int(database.execute("SELECT count(*) FROM names").fetchone()[0])
    return 0  # there is no table yet, or another process is writing


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_complete_annotations(tmp_path: Path) -> None:
    fork, draw = multiprocessing.get_context("fork"), random.Random(1)
    for _ in range(3):
        worker = fork.Process(target=tag_without_end, args=(tmp_path,))
        worker.start()
        before = count = kept(tmp_path)
        while worker.is_alive() and count < before + 3:
            time.sleep(0.001)
            count = kept(tmp_path)
        time.sleep(draw.uniform(0, 0.02))
        worker.kill()
        worker.join()
    with sqlite3.connect(tmp_path / DATABASE) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    texts = [f"text {number}" for number in range(kept(tmp_path) + 3)]
    again = Model()
    assert list(KeepingTagger(again, "1", tmp_path).annotate(texts)) == list(map(answer, texts))
    assert 0 < len(again.asked) < len(texts)


def garbage(file: Path) -> None:
    file.write_bytes(b"no database" * 1000)


def damaged_values(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("UPDATE names SET value = substr(value, 1, 9)")


def values_of_longer_texts(file: Path) -> None:
    with sqlite3.connect(file) as database:
        data = zlib.compress(b'[[[0,3]],[[2,900,"PERSON"]]]')
        database.execute("UPDATE names SET value = ?", [data])


def nested_values(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("UPDATE names SET value = ?", [zlib.compress(b"[" * 100_000)])


def cut_short(file: Path) -> None:
    os.truncate(file, 6000)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "damage", [garbage, damaged_values, values_of_longer_texts, nested_values, cut_short, a_folder]
)
def test_a_damaged_database_costs_only_time(damage, tmp_path: Path, caplog) -> None:
    tag(tmp_path, TEXTS * 5, 7)
    damage(tmp_path / DATABASE)
    again = Model()
    with caplog.at_level(logging.WARNING):
        assert list(KeepingTagger(again, "1", tmp_path).annotate(TEXTS)) == list(map(answer, TEXTS))
    assert again.asked == TEXTS
    assert len(caplog.messages) <= 1


def test_the_folder_is_that_of_the_user_unless_a_variable_names_another(monkeypatch) -> None:
    monkeypatch.delenv("REALM_CACHE")
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/ada/.cache/realm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/realm")
    monkeypatch.setenv("REALM_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
    monkeypatch.setenv("REALM_CACHE", "")
    assert cache_folder() is None and not isinstance(load_tagger("spacy:en_core_web_sm"), KeepingTagger)
