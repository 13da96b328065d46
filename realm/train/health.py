"""Health checks of a pre-training run.

There are two checks. The first check: only the reader is trained until the positive gap reaches `gate`. The *positive gap* is
the mean gain in log-likelihood of the masked span from passages that contain the span, minus the mean gain from other
passages. A retriever that is trained by the likelihoods of an untrained reader gets worse.

The second check: before a new index version is used, its recall@5 is measured on the *probe*, a set of masked queries from
held-out passages. If the recall is more than `margin` points below that of the first version, the new version is refused. Then
the embedder is set back to the weights of the last accepted version, and the learning rate of the embedder is halved.

The mean retrieval utility and the training loss are logged, but they are not checked, because both can improve while the recall
collapses.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from realm import distributed
from realm.errors import DivergedError, at_least
from realm.index.versions import IndexVersion
from realm.masking.candidates import embed_queries
from realm.masking.held_out import held_out_queries
from realm.masking.masked_queries import SpanIndex
from realm.model.folder import Model
from realm.qa.probe import first_positives, read_queries
from realm.qa.question_files import Question
from realm.qa.question_sets import question_ranks
from realm.qa.scoring.metrics import RANKS, recall_at
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.train.loop import TrainRun
from realm.train.sharding import load_weights

GATE_EVERY = 25
"""Steps between two measurements of the positive gap, as long as the gap is below the gate."""
GATE_LIMIT = 500
"""Steps after which the run ends if the positive gap is still below the gate."""
PATIENCE = 3
"""Number of refused versions after which the retriever is no longer trained."""


@dataclass(frozen=True)
class HealthConfig:
    """When the retriever is trained, and when an index version is refused."""

    gate: float = 2.0
    """The retriever is trained as soon as the positive gap, in nats, is at least this large. 0: from the first step."""
    margin: float = 2.0
    """An index version is refused if its recall@5 on the probe is more than this number of points below that of the first
    version. Negative: no version is refused."""
    queries: int = 1000
    """Largest number of queries in the probe, on which the recall of a version is measured."""
    read: int = 96
    """Number of queries of the probe on which the positive gap is measured."""

    def __post_init__(self) -> None:
        at_least(self, gate=0, queries=1, read=1)


class HealthWatch:
    """Checks index versions and the reader. The state, with the weights of the last accepted embedder, is part of the state of
    the run, so that a resumed run has the same state."""

    def __init__(
        self,
        config: HealthConfig,
        kb: KnowledgeBase,
        spans: SpanIndex,
        model: Model,
        run: TrainRun,
        questions: list[Question] | None,
        gate_limit: int = GATE_LIMIT,
    ):
        self.config, self.kb, self.spans, self.model, self.run = config, kb, spans, model, run
        self.gate_limit = gate_limit
        self.questions = questions or []
        self.queries = held_out_queries(kb, model.lengths.query - 2, config.queries, spans)
        self.state = run.state.setdefault("health", {})

    @property
    def reader_ready(self) -> bool:
        """Whether the reader has passed the gate, so that the retriever is trained. True does not change to False later."""
        return bool(self.state["reader_ready"])

    def start(self, version: IndexVersion, needs_reader: bool) -> None:
        """Measures the recall of the first version of the run, with which later versions are compared."""
        if self.state:  # resumed
            return
        recall, top = self._look(version)
        ready = not needs_reader or not self.queries or self.config.gate <= 0
        self.state |= {"reader_ready": ready, "start_recall": recall, "refused": 0}
        self._keep(top)
        if not ready:
            self._read(version)

    def after_step(self, built: IndexVersion | None, current: IndexVersion) -> IndexVersion:
        """The version to search from now on: the new version `built` if `built` is accepted, else the version `current`."""
        if not self.reader_ready and self.run.step % GATE_EVERY == 0:
            self._read(current)
        if built is None:
            return current
        recall, top = self._look(built, current)
        bar = self.state["start_recall"] - self.config.margin
        if self.config.margin < 0 or not self.queries or recall >= bar:
            self._keep(top)
            self._read(built)
            return built
        self.state["refused"] += 1
        # If the two towers are one network, its weights are saved only once, and the names of the second tower are missing.
        load_weights(self.model.embedder, self.state["healthy"], strict=False)
        self.run.optimizer.reset_averages(self.model.embedder)
        frozen = self.state["refused"] >= PATIENCE
        self.run.optimizer.scale_rate(self.model.embedder, 0.0 if frozen else 0.5)
        self.run.report(
            f"index of step {built.step} refused: its recall@5 on the probe is {recall:.1f}, below {bar:.1f}; the embedder is "
            f"set back to step {current.step}, and its learning rate is {'0 from now on' if frozen else 'halved'}"
        )
        return current

    def _look(self, version: IndexVersion, old: IndexVersion | None = None) -> tuple[float, np.ndarray]:
        """Logs the recall of `version` on the probe and on the questions -> recall@5 on the probe in percent, top 20 per query.

        If `old` is given, two more metrics are logged. `churn` is the share of the top 20 that changed since the last accepted
        version was measured. `candidate_freshness` is the share of the current top 20 of `old` that `version` also finds."""
        if not self.queries:
            return 0.0, np.zeros((0, 0))
        query_BD = self._embed(self.model)
        ranks = first_positives(self.queries, query_BD, version.index, self.kb.tokens)
        top = self._found(version, query_BD)
        line = {f"probe_recall_{k}": round(recall_at(ranks, k), 2) for k in RANKS}
        if self.questions:
            question = question_ranks(
                self.model, self.kb, Retriever(self.kb, version.index), self.questions, max(RANKS)
            )
            line |= {f"question_recall_{k}": round(recall_at(question, k), 2) for k in RANKS}
        if old is not None:
            line["churn"] = round(1 - overlap(self.state["top"].cpu().numpy(), top), 4)
            line["candidate_freshness"] = round(overlap(self._found(old, query_BD), top), 4)
        self.run.log({"index_step": version.step, "index_number": version.number, **line, **version.cost})
        return distributed.broadcast(recall_at(ranks, 5)), top

    def _read(self, version: IndexVersion) -> None:
        """Logs the positive gap and the accuracy of the reader; `reader_ready` becomes True if the gap reaches the gate.

        Raises:
            DivergedError: the positive gap is below the gate after `gate_limit` steps.
        """
        if not self.queries:
            return
        queries = self.queries[: self.config.read]
        with self.run.autocast():
            reading = read_queries(
                self.model,
                queries,
                self._embed(self.model)[: len(queries)],
                version.index,
                self.kb.tokens,
                self.spans,
            )
        gap = reading["positive_gap"]
        self.run.log({"positive_gap": round(gap, 4), "span_accuracy": round(reading["span_accuracy"], 2)})
        if self.reader_ready:
            return
        self.state["reader_ready"] = distributed.broadcast(gap >= self.config.gate)
        if not self.reader_ready and self.run.step >= self.gate_limit:
            raise DivergedError(
                f"the positive gap of the reader is {gap:.2f} nats after {self.run.step} steps, but the gate "
                f"is {self.config.gate}: train the reader longer with `realm mlm`, or lower health.gate"
            )

    def say_untrained(self) -> None:
        """Prints a line if the retriever was never trained, because the reader stayed below the gate."""
        if not self.reader_ready:
            self.run.report(
                f"the retriever was not trained: the positive gap of the reader did not reach the gate ({self.config.gate:g} "
                "nats); train the reader longer with `realm mlm`, take more steps, or lower health.gate"
            )

    def _embed(self, model: Model) -> Tensor:
        with self.run.autocast():
            return embed_queries(model, self.queries)

    def _found(self, version: IndexVersion, query_BD: Tensor) -> np.ndarray:
        """Top 20 of each query of the probe in this version -> [B, 20].

        `query_BD` has the query vectors of the embedder that is being trained. If `version.embedder` is not None, the queries
        are embedded with `version.embedder` instead."""
        if version.embedder is not None:
            query_BD = self._embed(replace(self.model, embedder=version.embedder))
        return version.index.search(query_BD, max(RANKS)).number_BK.cpu().numpy()

    def _keep(self, top: np.ndarray) -> None:
        parameters = self.model.embedder.named_parameters()
        self.state["healthy"] = {name: value.detach().clone() for name, value in parameters}
        self.state["top"] = torch.from_numpy(top)


def overlap(one_BK: np.ndarray, other_BK: np.ndarray) -> float:
    """Share of the numbers in a row of `one_BK` that are also in the same row of `other_BK`, mean over the rows."""
    return float(np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in zip(one_BK, other_BK, strict=True)]))
