"""Health checks of a pre-training run.

There are two rules. First, the reader trains alone until passages that hold the masked span help it clearly more than other
passages (the positive gap): a retriever that follows an untrained reader gets worse. Second, each new index version is judged
on held-out masked facts before it is used. If its recall is more than `margin` points below that of the start, the version is
refused, the embedder is set back to the last accepted version, and its learning rate is halved.

Mean retrieval utility and training loss are logged but not used: both can look good while recall collapses.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from realm import distributed
from realm.errors import DivergedError
from realm.index.embedding import embed_passages
from realm.index.versions import IndexVersion
from realm.masking.candidates import embed_queries
from realm.masking.held_out import held_out_queries
from realm.masking.masked_queries import SpanIndex
from realm.model.folder import Model
from realm.qa.metrics import recall_at
from realm.qa.probe import RANKS, first_positives, read_queries
from realm.qa.question_files import Question
from realm.qa.question_sets import question_ranks
from realm.search.exact import MipsIndex
from realm.store.knowledge_base import KnowledgeBase
from realm.train.loop import TrainRun

GATE_EVERY = 25
"""Steps between two measurements of the positive gap while it is below the gate."""
PATIENCE = 3
"""Refused versions after which the retriever stops training."""


@dataclass(frozen=True)
class HealthConfig:
    """When the retriever may train, and when an index version is refused."""

    gate: float = 2.0
    """Positive gap in nats from which on the retriever trains; 0: from the first step."""
    gate_limit: int = 500
    """Steps after which the run ends if the gap is still below the gate."""
    margin: float = 2.0
    """Points of probe recall@5 below the start from which on an index version is refused; negative: no version is refused."""
    queries: int = 1000
    """Probe queries for the recall of a version."""
    read: int = 96
    """Probe queries for the positive gap."""
    freshness_every: int = 0
    """Steps between two measurements of `candidate_freshness` against a new index of the live model; 0: only at new
    versions."""


class HealthWatch:
    """Judges index versions; owns the probe and the last accepted embedder.

    Its state is part of the run's state, so that an interrupted run resumes with it.
    """

    def __init__(
        self,
        config: HealthConfig,
        kb: KnowledgeBase,
        spans: SpanIndex,
        model: Model,
        run: TrainRun,
        questions: list[Question] | None,
    ):
        self.config, self.kb, self.spans, self.model, self.run = config, kb, spans, model, run
        self.questions = questions or []
        self.queries = held_out_queries(kb, model.lengths.query - 2, config.queries, spans)
        self.state = run.state.setdefault("health", {})

    @property
    def reader_ready(self) -> bool:
        """Whether the retriever trains; once True, it stays True."""
        return bool(self.state["reader_ready"])

    def start(self, version: IndexVersion, needs_reader: bool) -> None:
        """Measures the first version of the run, which later versions are compared with."""
        if self.state:  # resumed
            return
        recall, top = self._look(version)
        ready = not needs_reader or not self.queries or self.config.gate <= 0
        self.state |= {"reader_ready": ready, "start_recall": recall, "refused": 0}
        self._keep(top)
        if not ready:
            self._read(version)

    def after_step(self, built: IndexVersion | None, current: IndexVersion) -> IndexVersion:
        """The version to search from now on: the new version if it is accepted, else the current one."""
        if not self.reader_ready and self.run.step % GATE_EVERY == 0:
            self._read(current)
        if self.config.freshness_every and self.run.step % self.config.freshness_every == 0 and self.queries:
            self.run.log({"candidate_freshness": round(self._freshness(current), 4)})
        if built is None:
            return current
        recall, top = self._look(built, current)
        bar = self.state["start_recall"] - self.config.margin
        if self.config.margin < 0 or not self.queries or recall >= bar:
            self._keep(top)
            self._read(built)
            return built
        self.state["refused"] += 1
        # A shared tower is saved once, so names may be missing.
        self.model.embedder.load_state_dict(self.state["healthy"], strict=False)
        self.run.optimizer.reset_averages(self.model.embedder)
        frozen = self.state["refused"] >= PATIENCE
        self.run.optimizer.scale_rate(self.model.embedder, 0.0 if frozen else 0.5)
        self.run.report(
            f"index of step {built.step} refused: probe recall@5 {recall:.1f} is below {bar:.1f}; embedder back to step "
            f"{current.step}, its learning rate {'0 from here on' if frozen else 'halved'}"
        )
        return current

    def _look(self, version: IndexVersion, old: IndexVersion | None = None) -> tuple[float, np.ndarray]:
        """Logs the recall of a version on the probe and the questions -> recall@5 in percent, the top 20 of the probe.

        Two more metrics compare it with the `old` version: `churn`, the share of the top 20 that changed since the last
        accepted version, and `candidate_freshness`, the share of the old version's current hits that the new version finds
        too."""
        if not self.queries:
            return 0.0, np.zeros((0, 0))
        query_BD = self._embed(self.model)
        ranks = first_positives(self.queries, query_BD, version.index, self.kb.tokens)
        top = self._found(version, query_BD)
        line = {f"probe_recall_{k}": round(recall_at(ranks, k), 2) for k in RANKS}
        if self.questions:
            question = question_ranks(self.model, self.kb, version.index, self.questions, max(RANKS))
            line |= {f"question_recall_{k}": round(recall_at(question, k), 2) for k in RANKS}
        if old is not None:
            line["churn"] = round(1 - overlap(self.state["top"].cpu().numpy(), top), 4)
            line["candidate_freshness"] = round(overlap(self._found(old, query_BD), top), 4)
        self.run.log({"index_step": version.step, "index_number": version.number, **line, **version.cost})
        return distributed.broadcast(recall_at(ranks, 5)), top

    def _read(self, version: IndexVersion) -> None:
        """Logs the positive gap and the accuracy of the reader, and opens the gate if the gap is large enough."""
        if not self.queries:
            return
        queries = self.queries[: self.config.read]
        with self.run.autocast():
            report = read_queries(
                self.model,
                queries,
                self._embed(self.model)[: len(queries)],
                version.index,
                self.kb.tokens,
                self.spans,
            )
        self.run.log(
            {"positive_gap": round(report.positive_gap, 4), "span_accuracy": round(report.span_accuracy, 2)}
        )
        if self.reader_ready:
            return
        self.state["reader_ready"] = distributed.broadcast(report.positive_gap >= self.config.gate)
        if not self.reader_ready and self.run.step >= self.config.gate_limit:
            raise DivergedError(
                f"the reader gains only {report.positive_gap:.2f} nats from passages that hold the masked span after "
                f"{self.run.step} steps, the gate is {self.config.gate}: train it longer with `realm mlm`, or lower health.gate"
            )

    def _embed(self, model: Model) -> Tensor:
        with self.run.autocast():
            return embed_queries(model, self.queries)

    def _found(self, version: IndexVersion, query_BD: Tensor) -> np.ndarray:
        """Top 20 of the probe under this version -> [B, 20]; `query_BD` are the vectors of the live query tower."""
        if version.embedder is not None:
            query_BD = self._embed(replace(self.model, embedder=version.embedder))
        return version.index.search(query_BD, max(RANKS)).number_BK.cpu().numpy()

    def _freshness(self, version: IndexVersion) -> float:
        """Share of this version's hits that a new index of the live model, built here, finds too."""
        model = self.model
        with self.run.autocast():
            vectors = embed_passages(model, self.kb.tokens, np.arange(len(self.kb)))
        query_BD = self._embed(model)
        fresh = IndexVersion(MipsIndex(vectors, model.device), number=0, step=self.run.step)
        return overlap(self._found(version, query_BD), self._found(fresh, query_BD))

    def _keep(self, top: np.ndarray) -> None:
        parameters = self.model.embedder.named_parameters()
        self.state["healthy"] = {name: value.detach().clone() for name, value in parameters}
        self.state["top"] = torch.from_numpy(top)


def overlap(one_BK: np.ndarray, other_BK: np.ndarray) -> float:
    """Share of the entries of `one_BK` that are also in `other_BK`, mean over rows."""
    return float(np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in zip(one_BK, other_BK, strict=True)]))
