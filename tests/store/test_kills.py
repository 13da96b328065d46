"""kill -9 of every command that writes a knowledge base, at random moments: its name always opens, and the same command
again gives what an unkilled one gives. Every other kill comes after the command's first write.

More of it: `python -m pytest -m slow tests/store/test_kills.py --trials 100 --trials-seed 7 -s`.
"""

import json
import multiprocessing
import os
import random
import shutil
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from realm import cli
from realm.store import vectors
from realm.store.knowledge_base import KnowledgeBase
from tests.conftest import tiny_documents
from tests.train.test_faults import command

OLD = tiny_documents()
NEW = [
    OLD[0]._replace(text="Arden has moved to the river Velka, between Corvo and the hills of Ivrea."),
    OLD[1]._replace(id="copy"),  # merged with the document that has the same text
    *(one._replace(title=f"New {one.title}", id=f"new {one.id}") for one in OLD[2:]),
]
COMMANDS = ["build", "build --replace", "add", "delete", "compact", "index"]


class Content(NamedTuple):
    """All that a reader finds, whatever the files are called."""

    passages: list[Any]
    documents: list[Any]
    merged: dict[str, str]
    vectors: list[tuple[bytes, bytes]]


def content(folder: Path) -> Content | None:
    """None where nothing has this name."""
    if not folder.exists():
        return None
    kb = KnowledgeBase.open(folder)
    found = [vectors.read(index, kb.keys_N) for index in vectors.folders(folder)]
    pairs = [(one.array.tobytes(), one.missing.tobytes()) for one in found if one is not None]
    return Content(sorted(kb), sorted(kb.documents()), kb.merged(), pairs)


def passages_of(found: Content | None) -> Content | None:
    """All that a reader finds but the names of merged documents, which a change writes after its commit."""
    return found and found._replace(merged={})


class Trial:
    """A command, the knowledge base that it starts from, and processes that run it."""

    def __init__(self, name: str, tokenizer: Path, model: Path, home: Path):
        self.name, self.start, self.folder, self.log = (
            name,
            home / "start",
            home / "work" / "kb",
            home / "log",
        )
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(["realm.cli", "realm.index.versions"])
        for part, documents in (("old", OLD), ("new", NEW)):
            lines = [json.dumps(one._asdict()) + "\n" for one in documents]
            (home / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        settings = ["--tokenizer", str(tokenizer), "--tagger", "rules", "--processes", "1"]
        settings += ["--set", "passage_tokens=48", "--set", "commit_every=4"]
        build = ["kb", "build", str(home / "new.jsonl"), "--out", str(self.folder), *settings]
        index = ["index", "--model", str(model), "--set", "device=cpu", "--set", "precision=fp32", "--kb"]
        assert cli.main(["kb", "build", str(home / "old.jsonl"), "--out", str(self.start), *settings]) == 0
        assert cli.main([*index, str(self.start)]) == 0
        at = ["--kb", str(self.folder)]
        self.argv = {
            "build": build,
            "build --replace": [*build, "--replace"],
            "add": ["kb", "add", str(home / "new.jsonl"), *at],
            "delete": ["kb", "delete", "d3", "d5", *at],
            "compact": ["kb", "compact", *at],
            "index": [*index, str(self.folder)],
        }[name]

    def reset(self) -> None:
        """The state before the command."""
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        self.folder.parent.mkdir()
        if self.name != "build":
            shutil.copytree(self.start, self.folder)
        if self.name == "compact":
            KnowledgeBase.open(self.folder).delete(["d3"])
        if self.name == "index":
            shutil.rmtree(self.folder / "indexes")

    def begin(self) -> BaseProcess:
        process = self._forks.Process(target=command, args=(self.argv, self.log))
        process.start()
        return process

    def until_it_writes(self, process: BaseProcess) -> None:
        """Waits for the first change to a file; most of a command's time is over by then."""
        before = self._files()
        while process.is_alive() and self._files() == before:
            time.sleep(0.001)

    def _files(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder, _, names in os.walk(self.folder.parent):
            for name in names:
                with suppress(FileNotFoundError):
                    facts = os.stat(os.path.join(folder, name))
                    found[os.path.join(folder, name)] = (facts.st_size, facts.st_mtime_ns)
        return found

    def finish(self, done: bool = False) -> tuple[float, float]:
        """Runs the command to its end -> its seconds, and those of them after its first change to a file.

        What was built or deleted already is refused in one line.
        """
        began = time.monotonic()
        process = self.begin()
        self.until_it_writes(process)
        writes = time.monotonic()
        process.join()
        said = self.log.read_text(encoding="utf-8")
        assert "Traceback" not in said, said
        assert process.exitcode == 0 or (done and self.name in ("build", "delete")), said
        return time.monotonic() - began, time.monotonic() - writes


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_any_moment_a_command_leaves_what_was_or_what_is_to_be_and_can_be_repeated(
    name: str, tiny_kb, tiny_model_folder, tmp_path, monkeypatch, trials
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trial = Trial(name, tiny_kb.folder / "tokenizer", tiny_model_folder, tmp_path)
    trial.reset()
    before = content(trial.folder)
    trial.finish()  # the first one waits for torch to be imported
    after = content(trial.folder)
    assert after is not None and (after != before or name == "compact")
    trial.reset()
    whole, writing = trial.finish()
    assert content(trial.folder) == after
    draw = random.Random(trials.seed)
    seen: Counter[str] = Counter()
    for number in range(trials.count(20)):
        trial.reset()
        process = trial.begin()
        if number % 2:
            trial.until_it_writes(process)
        process.join(draw.uniform(0, writing if number % 2 else whole))
        ended = not process.is_alive()
        process.kill()
        process.join()
        found = passages_of(content(trial.folder))
        assert found in (passages_of(before), passages_of(after)), f"kill {number}"
        seen["ended" if ended else "as before" if found == passages_of(before) else "as after"] += 1
        trial.finish(done=found == passages_of(after))
        assert content(trial.folder) == after, f"kill {number}"
        kb = KnowledgeBase.open(trial.folder)
        assert kb.verify() == [], f"kill {number}"
        left = set(os.listdir(trial.folder.parent))
        assert left == {"kb"}, f"kill {number}"
    print(f"\n{name}: {dict(seen)}")
