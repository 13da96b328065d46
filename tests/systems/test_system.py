"""The interface of the compared systems: a trained system in its folder, and its predictions with evidence."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from realm.errors import ConflictError, DamagedError, InputError
from realm.files import read_json
from realm.model.device import DeviceConfig
from realm.qa.question_files import Question
from realm.store.knowledge_base import KnowledgeBase
from realm.systems import system
from realm.systems.system import Found, Ground, SystemModel, load_system, load_weights, predict, read_system
from realm.train.loop import TrainRun
from realm.train.run_config import RunConfig
from tests.schemas import assert_holds


@dataclass(frozen=True)
class Config(RunConfig):
    """Settings of the toy."""


class FirstWord:
    """Answers with the first word of the passage that the network's weight points to."""

    def __init__(self, kb: KnowledgeBase, number: int):
        self._kb, self._number = kb, number

    def answer(self, questions: Sequence[str]) -> list[Found]:
        (passage,) = self._kb.passages([self._number])
        word = passage.text.split()[0]
        return [Found(word, 0.5, self._number, 0, len(word), [self._number, 0]) for _ in questions]


def train(ground: Ground, out: Path, config: Config) -> Path:
    network = nn.Linear(1, 1, bias=False)
    model = SystemModel("toy", network, {"width": 1}, ground.kb.tokenizer)
    with TrainRun("toy", out, config, model, {network: 0.1}) as run:
        for _ in run.steps():
            run.update((network.weight - 2).square().sum(), {})
        return run.finish()


def load(folder: Path, kb: KnowledgeBase, config: DeviceConfig) -> FirstWord:
    network = nn.Linear(1, 1, bias=False)
    load_weights(network, folder)
    return FirstWord(kb, round(network.weight.item()))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(system.SYSTEMS, "toy", "toy")
    monkeypatch.setattr(
        system, "module_of", lambda name: SimpleNamespace(Config=Config, train=train, load=load)
    )


@pytest.fixture
def folder(toy, tiny_kb, tmp_path: Path) -> Path:
    ground = Ground(tiny_kb, "", [], [])
    return train(ground, tmp_path / "toy", Config(steps=200, decay=False))


def test_a_trained_system_answers_from_its_folder_with_evidence(folder, tiny_kb) -> None:
    questions = [Question(str(n), f"question {n}?", ("x",)) for n in range(20)]
    found = list(predict(load_system(folder, tiny_kb), tiny_kb, questions))
    assert [one.id for one in found] == [question.id for question in questions]
    (passage,) = tiny_kb.passages([2])
    for one in found:
        assert one.passage_id == passage.id
        assert passage.text[one.start : one.end] == one.answer
        assert one.passages == (passage.id, tiny_kb.ids[0])


def test_the_folder_records_what_it_is_and_how_it_was_made(folder) -> None:
    assert_holds(system.SystemJson, read_json(folder / "system.json"))
    saved = read_system(folder)
    assert saved["step"] == 200
    assert saved["stages"][0]["stage"] == "toy"
    assert saved["stages"][0]["steps"] == 200


def test_a_changed_file_is_refused(folder, tiny_kb) -> None:
    weights = folder / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(DamagedError, match="damaged"):
        load_system(folder, tiny_kb)


class Tied(nn.Module):
    """Two layers that share their weights, and `more` layers."""

    def __init__(self, more: int, width: int = 3):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(more))


def test_shared_weights_are_loaded_under_both_names(tmp_path) -> None:
    one, other = Tied(1), Tied(1)
    SystemModel("toy", one, {}).save(tmp_path / "toy")
    load_weights(other, tmp_path / "toy")
    for name, value in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize(("more", "width"), [(0, 3), (2, 3), (1, 4)])
def test_weights_of_another_network_are_refused(more: int, width: int, tmp_path: Path) -> None:
    SystemModel("toy", Tied(1), {}).save(tmp_path / "toy")
    with pytest.raises(InputError, match="another version of realm: remove the folder, and train"):
        load_weights(Tied(more, width), tmp_path / "toy")


@pytest.mark.parametrize("name", system.SYSTEMS)
def test_sizes_of_another_version_are_one_line(name, tiny_kb, tmp_path) -> None:
    SystemModel(name, nn.Linear(1, 1), {"hidden": 3}, tiny_kb.tokenizer).save(tmp_path / name)
    with pytest.raises(
        DamagedError, match=r"system\.json is damaged, or was written by another version of realm"
    ):
        load_system(tmp_path / name, tiny_kb)


def test_a_finished_run_is_not_trained_again(folder, tiny_kb, tmp_path) -> None:
    with pytest.raises(ConflictError, match="exists"):
        train(Ground(tiny_kb, "", [], []), folder, Config(steps=200))


def test_an_unknown_system_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no system 'nobody'"):
        system.module_of("nobody")
    with pytest.raises(InputError, match="is not a system"):
        read_system(tmp_path)


def test_an_answer_without_evidence_names_no_passage(tiny_kb) -> None:
    one = system.prediction(tiny_kb, Question("1", "who?", ("x",)), Found("me", 1.0), ms=3.0)
    assert (one.passage_id, one.passages, one.answer) == ("", (), "me")
    assert one.ms == 3
