"""The systems with which REALM is compared: what the module of a system must define, and the folder of a trained system.

The module of a system defines three names (`SystemModule`):

    Config                       settings of training, a `RunConfig`
    train(ground, out, config)   trains the system, or resumes an interrupted training -> the folder `out`
    load(folder, kb, config)     loads a trained system -> an object that answers questions (`System`)

The folder of a trained system contains:

    SYSTEM/system.json           name of the system, sizes of its network, settings of training, a checksum of every file
    SYSTEM/weights.safetensors   weights of the network
    SYSTEM/tokenizer.json        the tokenizer; the system "drqa" has words.json instead
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from realm.checksums import changed, checksums_of
from realm.errors import DamagedError, InputError, RealmError, out_of_memory
from realm.files import read_json, write_json
from realm.folders import copy_into
from realm.keys import hex_id
from realm.model.bert import Bert
from realm.model.bert_files import bert_config
from realm.model.device import DeviceConfig, choose_device
from realm.model.folder import Model, replacing
from realm.model.manifest import problem_of
from realm.model.tensor_files import load_tensors, save_tensors
from realm.progress import progress
from realm.qa.kept_answers import BestAnswer, KeptAnswers, known_or_new
from realm.qa.predictions import DEPTH, Prediction
from realm.qa.question_files import Question, digest_of
from realm.qa.scoring.metrics import is_correct
from realm.qa.scoring.significance import percent
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import NULL_PASSAGE, Lengths
from realm.tokens.tokenizer import Tokenizer
from realm.train.best_weights import BestWeights
from realm.train.loop import TrainRun
from realm.train.run_config import QuestionsRunConfig, RunConfig

SYSTEM, WEIGHTS = "system.json", "weights.safetensors"
SYSTEMS: dict[str, str] = {
    "t5": "closed_book",
    "drqa": "drqa",
    "graph": "graph_retriever",
    "path": "path_retriever",
}
"""Name of a system in `realm baseline` -> name of its module in this folder."""
_AGAIN = "remove the folder, and train the system again"
BATCH = 16
"""Number of questions that are answered at once."""
Network = TypeVar("Network", bound=nn.Module)


class ReadingSet(NamedTuple):
    """Questions whose documents are known."""

    kb: KnowledgeBase
    """Knowledge base that has the documents."""
    questions: Sequence[Question]


@dataclass(frozen=True)
class Ground:
    """What a system is trained from. All systems of a comparison have the same passages, encoder and questions."""

    kb: KnowledgeBase
    encoder: str
    """Model folder. The systems "graph" and "path" start from the encoder of its span reader, or of its masked-LM reader if it
    has no span reader; the other systems do not use it."""
    train: Sequence[Question]
    dev: Sequence[Question]
    """Questions on which the best weights are chosen. They must not contain test questions."""
    reading: ReadingSet | None = None
    """Further training questions, each with a passage that contains an answer; only for the system "drqa"."""

    def given(self) -> dict[str, str]:
        """Fingerprints of the knowledge bases, and digests of their documents and of the questions; a resumed run needs the
        same."""
        given = {"kb": self.kb.fingerprint, "documents": self.kb.documents_digest}
        if self.reading is None:
            return {**given, "questions": digest_of(self.train, self.dev)}
        kb, questions = self.reading
        given |= {"reading_kb": kb.fingerprint, "reading_documents": kb.documents_digest}
        return {**given, "questions": digest_of(self.train, self.dev, questions)}


def start_encoder(model: Model) -> Bert:
    """The encoder with which a system starts (`Ground.encoder`)."""
    return model.reader.bert.bert if model.span_reader is None else model.span_reader.encoder


@dataclass(frozen=True)
class EncoderSystemConfig(QuestionsRunConfig):
    """Settings of a system that starts from the encoder of a model."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 4
    """Number of questions per step."""
    learning_rate: float = 5e-5
    """Peak learning rate of the encoder."""
    dev_every: int = 250
    dev_questions: int = 200


class Found(NamedTuple):
    """The best answer of a system to one question."""

    answer: str
    score: float
    passage: int = NULL_PASSAGE
    """Number of the passage from which the answer was extracted; `NULL_PASSAGE` if it was not extracted from a passage."""
    start: int = 0
    """Position of the first character of the answer in the text of the passage."""
    end: int = 0
    """Position after the last character of the answer."""
    number_K: Sequence[int] | np.ndarray = ()
    """Numbers of the retrieved passages, best first."""
    read: int = 0
    """Number of passages that the system's reader read."""


class System(Protocol):
    """A trained system."""

    def answer(self, questions: Sequence[str]) -> list[Found]:
        """The best answer to each question."""


class SystemModule(Protocol):
    """The module of a system."""

    Config: type[RunConfig]

    def train(self, ground: Ground, out: Path, config: Any) -> Path: ...

    def load(self, folder: Path, kb: KnowledgeBase, config: DeviceConfig) -> System: ...


class SystemJson(TypedDict):
    """Content of system.json."""

    system: str
    sizes: dict[str, Any]
    """Values that `load` needs to build the network."""
    step: int
    stages: list[dict[str, Any]]
    checksums: dict[str, str]


class Saved(Protocol):
    """A tokenizer that writes its file into the folder of a system."""

    def save(self, folder: Path) -> None: ...


@dataclass
class SystemModel:
    """The network of a system during training, in the form that the training loop needs (`realm.train.trainable`)."""

    system: str
    network: nn.Module
    sizes: Mapping[str, Any]
    """Values for system.json that `load` needs to build the network."""
    tokenizer: Saved | None = None
    step: int = 0
    stages: list[dict[str, Any]] = field(default_factory=list)

    def to(self, device: torch.device) -> "SystemModel":
        self.network.to(device)
        return self

    def save(self, folder: Path, extra: Sequence[Path] = ()) -> None:
        """Writes the folder of the system, with copies of the `extra` files. The folder appears only when it is complete."""
        with replacing(folder, RuntimeError, SafetensorError) as aside:
            aside.mkdir(parents=True)
            save_tensors(_distinct(self.network.state_dict()), aside / WEIGHTS)
            if self.tokenizer is not None:
                self.tokenizer.save(aside)
            files = sorted(path.name for path in aside.iterdir())
            manifest: SystemJson = {
                "system": self.system,
                "sizes": json.loads(json.dumps(dict(self.sizes))),
                "step": self.step,
                "stages": self.stages,
                "checksums": checksums_of(aside, files),
            }
            write_json(aside / SYSTEM, manifest)
            copy_into(aside, extra)

    @staticmethod
    def saved_stages(folder: Path) -> list[dict[str, Any]]:
        """The training stages that are recorded in a folder; empty if the folder contains no system."""
        return read_system(folder)["stages"] if is_system(folder) else []


def _distinct(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a network, each under only one of its names.

    A safetensors file cannot contain a tensor under several names, but a network has such tensors if layers share weights.
    """
    named: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, value in states.items():
        named.setdefault((value.data_ptr(), tuple(value.shape)), name)
    return {name: states[name] for name in named.values()}


def is_system(folder: str | Path) -> bool:
    """Whether the folder contains a system trained by `realm baseline`."""
    return (Path(folder) / SYSTEM).is_file()


def read_system(folder: str | Path) -> SystemJson:
    """The content of system.json.

    Raises:
        InputError: the folder contains no system, or a system with an unknown name.
        DamagedError: a file is damaged.
    """
    path = Path(folder)
    if not is_system(path):
        raise InputError(f"{folder} is not a system trained by `realm baseline`: it has no {SYSTEM}")
    try:
        saved = cast(SystemJson, read_json(path / SYSTEM))
        if saved["system"] not in SYSTEMS:
            raise InputError(
                f"{folder} contains the unknown system {saved['system']!r}: systems are {', '.join(SYSTEMS)}"
            )
        if problem := changed(path, saved["checksums"], ()):
            raise DamagedError(f"{folder} is damaged: {problem}")
        return saved
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path / SYSTEM} is damaged: {problem_of(error)}") from error


def load_weights(network: nn.Module, folder: Path) -> None:
    """Sets the weights of a network to those in the folder of a system.

    Raises:
        InputError: the weights are those of another network.
        DamagedError: the file cannot be read.
    """
    try:
        found = load_tensors(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{folder} is damaged: {problem_of(error)}") from error
    needed = _distinct(network.state_dict())
    # The checksum of the weights is right (`read_system`).
    if {name: one.shape for name, one in found.items()} != {name: one.shape for name, one in needed.items()}:
        raise InputError(f"{folder} was trained by another version of realm: {_AGAIN}")
    network.load_state_dict(found, strict=False)  # the further names of shared weights are missing


def load_network(
    folder: Path, kb: KnowledgeBase, config: DeviceConfig, network_of: Callable[[Bert, Tokenizer], Network]
) -> tuple[Network, Tokenizer, Lengths, dict[str, Any]]:
    """Loads a system that starts from an encoder -> its network, tokenizer, lengths, and all sizes in system.json.

    `network_of` makes the network from an encoder and its tokenizer.

    Raises:
        InputError: as in `KnowledgeBase.check_tokenizer` and `load_weights`.
        DamagedError: as in `read_system` and `load_weights`.
    """
    sizes, tokenizer = read_system(folder)["sizes"], Tokenizer.load(folder)
    kb.check_tokenizer(tokenizer, str(folder))
    network = network_of(Bert(bert_config(sizes["encoder"], str(folder))), tokenizer)
    load_weights(network, folder)
    network.to(choose_device(config.device)).eval()
    return network, tokenizer, Lengths(**sizes["lengths"]), sizes


def module_of(name: str) -> SystemModule:
    """The module of a system.

    Raises:
        InputError: there is no system with this name, or a package that the system needs is not installed.
    """
    if name not in SYSTEMS:
        raise InputError(f"there is no system {name!r}: systems are {', '.join(SYSTEMS)}")
    try:
        return cast(SystemModule, import_module(f"realm.systems.{SYSTEMS[name]}"))
    except ImportError as error:
        raise InputError(f"{name} needs the package {error.name}: pip install 'realm-lm[compare]'") from error


ANSWERING = DeviceConfig(precision="fp32")
"""The default device and precision of answers, as in `realm.qa.pipeline.AnswerConfig`."""


def load_system(folder: str | Path, kb: KnowledgeBase, config: DeviceConfig = ANSWERING) -> System:
    """Loads the trained system in a folder, to answer questions from a knowledge base on the device of `config`.

    Raises:
        InputError: as in `read_system`, `module_of`, `load_network` and `load_weights`.
        DamagedError: as in `read_system` and `load_weights`; or system.json does not fit this version of realm.
    """
    saved = read_system(folder)
    try:
        return module_of(saved["system"]).load(Path(folder), kb, config)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, RealmError) or out_of_memory(error):
            raise
        # The checksums of the other files are right, so only system.json can be wrong.
        raise DamagedError(
            f"{Path(folder) / SYSTEM} is damaged, or was written by another version of realm: {problem_of(error)}; {_AGAIN}"
        ) from error


class Best(BestWeights):
    """Keeps the weights of a system's network that answer the most dev questions correctly."""

    def __init__(self, run: TrainRun, network: nn.Module, dev: Sequence[Question], system: System):
        super().__init__(run, [network])
        self._dev, self._system = dev, system

    def evaluate(self) -> None:
        """Answers the dev questions and logs exact match. If it is at least the best so far, the weights are kept."""
        if not self._dev:
            return
        right = 0
        for first in range(0, len(self._dev), BATCH):
            part = self._dev[first : first + BATCH]
            found = self._system.answer([one.question for one in part])
            right += sum(is_correct(one.answer, question) for one, question in zip(found, part, strict=True))
        em = percent(right / len(self._dev))
        self._run.log({"dev_em": em})
        self.keep(em)


def predict(
    system: System, kb: KnowledgeBase, questions: Sequence[Question], kept: KeptAnswers | None = None
) -> Iterator[Prediction]:
    """Answers questions with a system -> a prediction per question, in the same order. Shows a progress bar.

    Questions whose answers are kept are not asked again.
    """

    def answer(part: Sequence[Question]) -> list[BestAnswer]:
        started = time.perf_counter()
        found = system.answer([one.question for one in part])
        ms = (time.perf_counter() - started) * 1000 / len(part)
        return [
            BestAnswer(prediction(kb, question, one, ms)) for question, one in zip(part, found, strict=True)
        ]

    with progress(total=len(questions), description="answer", unit="question") as bar:
        for first in range(0, len(questions), BATCH):
            part = questions[first : first + BATCH]
            yield from (one.prediction for one in known_or_new(kept, part, answer))
            bar.update(len(part))


def prediction(kb: KnowledgeBase, question: Question, found: Found, ms: float) -> Prediction:
    """The answer `found` as a row of a prediction file, which names passages by id; `ms` is the time per question."""
    read = found.passage != NULL_PASSAGE
    return Prediction(
        id=question.id,
        question=question.question,
        answer=found.answer,
        score=round(float(found.score), 6),
        passage_id=hex_id(kb.keys_N[found.passage]) if read else "",
        start=found.start,
        end=found.end,
        passages=tuple(
            hex_id(kb.keys_N[number]) for number in found.number_K[:DEPTH] if number != NULL_PASSAGE
        ),
        read=found.read,
        ms=round(ms, 2),
    )
