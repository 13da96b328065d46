"""Fixtures of the workspace tests: the towns as a workspace, and as the files that a workspace is made from."""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from realm.model.folder import load_model, save_model
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Annotations, Span
from realm.train.adapt import AdaptConfig
from realm.workspace import fit as fit_module
from realm.workspace import judging, living
from realm.workspace import sync as sync_module
from realm.workspace.report import FitJson
from realm.workspace.settings import FitConfig
from tests.conftest import tiny_documents
from tests.qa.conftest import qa_folder
from tests.store.tiny import TinyTagger

__all__ = ["qa_folder"]

PARTS = {".lock", "kb", "model", "documents.json", "questions.jsonl", "report.json"}
"""Names in the folder of a workspace after a complete fit."""
YEARS = (1492, 1600, 1707, 1848)
Fit = Callable[..., FitJson]


class Tagger:
    """Sentences end with a full stop; names are capitalised, and years have four digits."""

    def __init__(self, name: str = "tiny"):
        self.name = f"{name}-1"  # as a package's own name may be another than it is loaded by

    def annotate(self, texts: Iterable[str]) -> Iterator[Annotations]:
        for text in texts:
            (found,) = TinyTagger().annotate([text])
            years = tuple(Span(*match.span(), "DATE") for match in re.finditer(r"\b1\d{3}\b", text))
            yield Annotations(found.sentences, tuple(sorted(found.spans + years)))


@pytest.fixture
def towns(tiny_kb, qa_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a workspace that the test may change."""
    monkeypatch.setattr(living.LivingKnowledge.__init__, "__defaults__", (lambda name: TinyTagger(),))
    shutil.copytree(tiny_kb.folder, tmp_path / "towns" / "kb")
    shutil.copytree(qa_folder, tmp_path / "towns" / "model")
    return tmp_path / "towns"


def text_of(town: str, year: int, more: str = "") -> str:
    """A file about a town."""
    return f"{town}\n\n{town} is a town in Ruritania. {town} was founded in {year}. {more}\n"


def write_docs(folder: Path) -> None:
    """The towns as a folder of text files, with two files that cannot be read."""
    (folder / "north").mkdir(parents=True)
    for number, town in enumerate(tiny_documents()):
        file = folder / ("north" if number % 2 else "") / f"{town.title}.txt"
        file.write_text(text_of(town.title, YEARS[number % 4], town.text))
    (folder / "empty.md").write_text("")
    (folder / "picture.png").write_bytes(b"\x89PNG")


def made_small(patch: pytest.MonkeyPatch) -> None:
    """Makes fits small: a tiny tagger, two steps of adaptation, and one query is enough to judge."""
    patch.setattr(living.LivingKnowledge.__init__, "__defaults__", (lambda name: Tagger(),))
    patch.setattr(sync_module, "load_tagger", lambda name, processes=0: Tagger(name))
    patch.setattr(judging, "LEAST", 1)
    few = {"steps": 2, "rounds": 1, "sentences": 16, "batch_size": 4, "checkpoint_seconds": 0, "log_every": 1}
    patch.setattr(fit_module.adapt, "AdaptConfig", partial(AdaptConfig, **few))


@pytest.fixture(scope="session")
def config(qa_folder: Path) -> FitConfig:
    """Settings for a fit of the towns."""
    return FitConfig(start=str(qa_folder), tagger="tiny", held_out=0.3, device="cpu")


@pytest.fixture(scope="session")
def fitted(config: FitConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with docs/ and the workspace made from it, towns/; read-only for tests."""
    home = tmp_path_factory.mktemp("fitted")
    with pytest.MonkeyPatch.context() as patch:
        made_small(patch)
        patch.chdir(home)
        write_docs(Path("docs"))
        fit_module.run(Path("towns"), ["docs"], config)
    return home


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes fits small, as `made_small` does."""
    made_small(monkeypatch)


@pytest.fixture
def fresh(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with docs/ and nothing else."""
    monkeypatch.chdir(tmp_path)
    write_docs(Path("docs"))
    return tmp_path


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces adaptation by a copy with a new training record, and judging by rank 1 for every query."""

    def train(kb: KnowledgeBase, out: Path, config: AdaptConfig, init: str) -> Path:
        model = load_model(init)
        record = {"stage": "adapt", "minutes": config.minutes, "init": init, "kb": kb.fingerprint}
        model.stages = [*model.stages, record]
        save_model(model, out)
        return out

    def ranks(*given: object) -> judging.Ranks:
        (queries,) = (one for one in given if isinstance(one, judging.Queries))
        kinds = {"masked_facts": queries.facts, "made_questions": queries.questions}
        return {name: np.ones(len(drawn), dtype=np.int64) for name, drawn in kinds.items() if drawn}

    monkeypatch.setattr(fit_module.adapt, "train", train)
    monkeypatch.setattr(judging, "ranks_of", lambda *given: judging.ModelRanks(ranks(*given), ranks(*given)))
    monkeypatch.setattr(judging, "ranks_by_bm25", ranks)


@pytest.fixture
def home(small: None, fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that is a copy of `fitted`."""
    shutil.copytree(fitted, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
