"""Checks of the training and of the answers of a compared system."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from realm.errors import OtherSettings
from realm.qa.question_files import Question
from realm.store.knowledge_base import KnowledgeBase, build
from realm.systems.system import Ground, load_system, predict
from tests.conftest import RIVERS, tiny_documents
from tests.store.tiny import TinyTagger

WEIGHTS = ("weights.safetensors",)
SHORT: dict[str, Any] = {
    "steps": 6,
    "batch_size": 2,
    "warmup": 2,
    "dev_every": 3,
    "dev_questions": 2,
    "log_every": 1,
    "checkpoint_seconds": 0.0,
}
"""Settings of a training with a checkpoint after each step."""


def check_resumed(
    train: Callable[[Ground, Path], Path],
    ground: Ground,
    folder: Path,
    module: ModuleType,
    function: str,
    call: int,
    files: Sequence[str] = WEIGHTS,
) -> None:
    """Checks that a training which is stopped by Ctrl-C ends with the files of an uninterrupted one; with other questions, it
    must be refused.

    Args:
        train: trains a system from a ground in a folder.
        ground: what the system is trained from.
        folder: parent of the folders of both trainings.
        module: module of the system.
        function: function of the module that training calls in each step.
        call: number of the call in which the training is stopped.
        files: names of the files that are compared.
    """
    whole = train(ground, folder / "whole")
    original, calls = getattr(module, function), itertools.count(1)

    def stopping(*args: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, stopping)
        with pytest.raises(KeyboardInterrupt):
            train(ground, folder / "stopped")
    assert list((folder / "stopped.training").glob("checkpoint-*"))
    with pytest.raises(OtherSettings, match="interrupted run"):
        train(replace(ground, train=ground.train[1:]), folder / "stopped")
    resumed = train(ground, folder / "stopped")
    for name in files:
        assert (whole / name).read_bytes() == (resumed / name).read_bytes(), name


def renamed(kb: KnowledgeBase, folder: Path) -> KnowledgeBase:
    """The towns of `kb`, each with the document id of another town."""
    documents = tiny_documents()
    documents = [one._replace(id=other.id) for one, other in zip(documents, reversed(documents), strict=True)]
    build(folder, documents, kb.config, kb.tokenizer, TinyTagger())
    return KnowledgeBase.open(folder)


def check_answers(folder: Path, kb: KnowledgeBase, questions: Sequence[Question]) -> None:
    """Checks that a trained system answers half of the questions about rivers, each with a passage that has the answer."""
    system = load_system(folder, kb)
    found = list(predict(system, kb, questions))
    text_of = {passage.id: passage.text for passage in kb}
    for one in found:
        assert text_of[one.passage_id][one.start : one.end] == one.answer
        assert one.passage_id in one.passages
    assert sum(one.answer in RIVERS for one in found) >= len(questions) / 2  # few words are rivers
    nothing = system.answer(["zzz?"])
    assert (nothing[0].answer, nothing[0].passage) == ("", -1)
