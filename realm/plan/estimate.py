"""Costs of the stages of a preset: memory per device, and time per step, per index build and in total.

    time of a step     time of Python + FLOP / tflops + bytes / memory_gb_per_s of one device (/ words_gb_per_s for the words of
                       bag-of-words towers) + time to exchange gradients
    memory             weights, gradients and averages, activations, and the device's share of the index

The plan does not include padding (which lowers the `tflops` that training reaches), the evaluations during a run, and the
overlap of the exchange with the backward pass.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from realm.plan.costs import (
    CANDIDATES_SECONDS,
    EMBEDDED_SECONDS,
    FORWARD_SPEED,
    QUERY_SECONDS,
    RECOMPUTED,
    RETRIEVED_SECONDS,
    ROW_SECONDS,
    SENTENCE_SECONDS,
    STATE_BYTES,
    TRAINED,
    UPDATE_BYTES,
    Parameters,
    Work,
    activation_bytes,
    count_parameters,
    layers_flop,
    reading_work,
    tower_work,
    trained_tower_work,
)
from realm.plan.hardware import Clock, Hardware, measure
from realm.plan.preset import Corpus, Preset
from realm.train.finetune import FinetuneConfig
from realm.train.ict import IctConfig
from realm.train.mlm import MlmConfig
from realm.train.pretrain import PretrainConfig
from realm.train.run_config import RunConfig

MASKED = 3
"""Mean number of masked wordpieces of a query."""
MASKED_SHARE = 0.2
"""Share of the wordpieces of a row of `mlm` that are predicted."""
TEXT_BYTES, VECTOR_KEY_BYTES = 6.5, 8
"""Bytes on disk: of text and wordpieces, per wordpiece; and of the key of a vector (docs/scaling.md)."""
TAGGING_SECONDS = {"realm": 0.49e-3 / 109, "rules": 0.8e-3 / 215}
"""Tagger -> core seconds per wordpiece for finding names (docs/scaling.md)."""
SPACY_SECONDS, CLASSIFIER_SECONDS = 19e-3 / 215, 2 * 85e6 / 1e11
"""Core seconds per wordpiece for finding names: with spaCy's en_core_web_sm, as measured in docs/scaling.md; and with a token
classifier of the size of BERT-base, on a core with 100 GFLOP/s."""
REST_SECONDS, DUMP_SECONDS = 0.13e-3 / 109, 1.9e-3 / 215
"""Core seconds per wordpiece of a build: for all other work, and in addition for parsing a dump of a wiki (docs/scaling.md)."""
BUILD_BYTES, START_BYTES = 7e8, 5e8
"""Bytes of memory of a build, and of a training process without passages (docs/scaling.md)."""
WORDPIECE_BYTES = 5.75
"""Bytes of memory of a training process per wordpiece of the corpus: the wordpiece, sentences and spans (docs/scaling.md)."""


@dataclass(frozen=True)
class Memory:
    """Memory of one device in bytes."""

    weights: float
    optimizer: float
    """Gradients, and the averages of the optimizer."""
    activations: float
    index: float

    @property
    def total(self) -> float:
        return self.weights + self.optimizer + self.activations + self.index


@dataclass(frozen=True)
class StagePlan:
    """Costs of a stage; times are in seconds."""

    stage: str
    devices: int
    """Number of devices that train: the largest number that can share a batch evenly."""
    steps: int
    flop: float
    """FLOP of a step on all devices together."""
    host_seconds: float
    """Time of Python in a step."""
    compute_seconds: float
    """Time of the device in a step."""
    exchange_seconds: float
    memory: Memory
    refreshes: int
    """Number of index builds during the stage."""
    refresh_steps: int
    """Steps between two builds: `refresh.every`, or more if a build in the background takes longer; 0: no build in between."""
    refresh_seconds: float
    """Time of one build, on the devices that only build; if there are none, on the training devices in `refresh.device`."""
    refreshes_apart: bool
    """Whether devices that do not train build the index, so that training waits only for the first and the last build."""

    @property
    def step_seconds(self) -> float:
        return self.host_seconds + self.compute_seconds + self.exchange_seconds

    @property
    def seconds(self) -> float:
        """Time of the whole stage, including the first index and the index of the finished model.

        If a training device builds in the background, the build and the training share the time of this device, and the other
        devices wait for it. So training ends as late as if it waited for each build.
        """
        training = self.steps * self.step_seconds
        if not self.refreshes:
            return training
        if self.refreshes_apart:
            return training + 2 * self.refresh_seconds
        return training + self.refreshes * self.refresh_seconds


class _Share(NamedTuple):
    """The work of one device in a step, and the sizes from which its memory is computed."""

    work: Work
    trained: int
    weights: int
    tokens: float
    """Number of tokens whose activations are kept for the backward pass."""
    index_bytes: float


class Plan:
    """Computes the costs of a preset for a corpus and hardware."""

    def __init__(self, preset: Preset, corpus: Corpus, hardware: Hardware):
        self.preset, self.corpus, self.hardware = preset, corpus, hardware
        self._encoder, self._embedder = preset.encoder, preset.embedder
        self._parameters: Parameters = count_parameters(self._encoder, self._embedder, preset.copy_head)
        self._query = min(preset.query_tokens, corpus.sentence + 2)
        self._passage = min(preset.kb.passage_tokens, corpus.pieces)
        self.joint = self._query + max(1, self._passage - corpus.title - 1)
        """Number of tokens of a query and a passage in one row."""

    def stages(self) -> Iterator[StagePlan]:
        """The plan of each stage, in the order of the stages."""
        for stage, config in self.preset.stages.items():
            yield self._planned(stage, config)

    def fits(self, stage: StagePlan) -> bool:
        """Whether the memory of a device is large enough for a stage."""
        return stage.memory.total <= self.hardware.memory_gb * 1e9

    def fitting_rows(self, stage: str) -> int | None:
        """The largest power of two for `cached_rows` with which a stage fits in the memory of a device; None if none does."""
        for rows in (2**power for power in reversed(range(15))):
            if self.fits(self._planned(stage, replace(self.preset.stages[stage], cached_rows=rows))):
                return rows
        return None

    def index(self) -> float:
        """Seconds of `realm index` with one device."""
        return self._seconds(self._index_work(frozen=False))

    def corpus_costs(self) -> dict[str, Any]:
        """Disk space, memory and core hours that the knowledge base needs, and its tagger."""
        count = self.corpus.passages
        pieces = count * self.corpus.pieces
        tagger = self.preset.kb.tagger
        other = CLASSIFIER_SECONDS if tagger.startswith("hf:") else SPACY_SECONDS
        tagging = TAGGING_SECONDS.get(tagger, other)
        return {
            "passages": count,
            "tagger": tagger,
            "text_gb": pieces * TEXT_BYTES / 1e9,
            "vectors_gb": count * (2 * self._embedder.dim + VECTOR_KEY_BYTES) / 1e9,
            "tagging_core_hours": pieces * tagging / 3600,
            "rest_core_hours": pieces * REST_SECONDS / 3600,
            "dump_core_hours": pieces * DUMP_SECONDS / 3600,
            "build_memory_gb": BUILD_BYTES / 1e9,
            "process_memory_gb": (START_BYTES + pieces * WORDPIECE_BYTES) / 1e9,
        }

    def _planned(self, stage: str, config: RunConfig) -> StagePlan:
        hardware = self.hardware
        most = min(hardware.devices, config.batch_size)
        devices = next(n for n in range(most, 0, -1) if config.batch_size % n == 0)
        own = self._share(config, devices)
        shards = devices if config.shard_weights else 1
        update = Work(0, own.trained * UPDATE_BYTES / shards)
        # In a ring all-reduce, each device sends nearly two numbers of 4 bytes per gradient. Sharded weights are gathered
        # twice, and the gradients are sent once; the plan does not count that the gradient cache repeats this for each chunk.
        sent = (3 if config.shard_weights else 2) * 4 * own.trained * (devices - 1) / devices
        # The gradient cache gathers all weights that are trained in the backward pass.
        gathered = 4 * own.trained if shards > 1 and config.cached_rows else 0
        exchange = sent / (hardware.network_gb_per_s * 1e9) if sent else 0.0
        host = own.work.host_seconds * hardware.python_time
        compute = self._seconds(own.work + update) - host
        refreshes, between, refresh, apart = self._refreshes(config, devices, host + compute + exchange)
        return StagePlan(
            stage=stage,
            devices=devices,
            steps=config.steps,
            flop=own.work.flop * devices,
            host_seconds=host,
            compute_seconds=compute,
            exchange_seconds=exchange,
            memory=Memory(
                weights=4 * own.weights / shards + gathered,
                optimizer=STATE_BYTES * own.trained / shards,
                activations=activation_bytes(self._encoder, own.tokens, hardware.bits),
                index=own.index_bytes,
            ),
            refreshes=refreshes,
            refresh_steps=between,
            refresh_seconds=refresh,
            refreshes_apart=apart,
        )

    def _refreshes(
        self, config: RunConfig, devices: int, step_seconds: float
    ) -> tuple[int, int, float, bool]:
        """The number of index builds of a stage, the steps between two builds, the seconds of a build, and whether devices
        that do not train build the index."""
        frozen = False
        if isinstance(config, PretrainConfig):
            refresh, frozen = config.refresh, config.passage_encoder == "frozen"
        elif isinstance(config, FinetuneConfig) and config.update_passages:
            refresh = config.refresh
        else:
            return 0, 0, 0.0, False
        # Only projecting the kept states of a frozen encoder is one product, which one device computes.
        builders = 0 if frozen else self.hardware.build_devices
        apart = builders > 0 and refresh.in_background
        shares = devices
        if refresh.device or refresh.in_background:
            shares = min(len(refresh.device.split(",")), shares)
        seconds = self._seconds(self._index_work(frozen)) / (builders or (1 if frozen else shares))
        if not refresh.every:
            return 2, 0, seconds, apart
        between = refresh.every
        if refresh.in_background and not frozen:
            between = max(between, math.ceil(seconds / step_seconds))
        # Also one build before the first step, and one build after the last step if the last step has no build.
        return config.steps // between + 1 + bool(config.steps % between), between, seconds, apart

    def _seconds(self, work: Work) -> float:
        hardware = self.hardware
        words_gb_per_s = hardware.words_gb_per_s or hardware.memory_gb_per_s
        memory_seconds = (work.traffic / hardware.memory_gb_per_s + work.words / words_gb_per_s) / 1e9
        return (
            work.host_seconds * hardware.python_time + work.flop / (hardware.tflops * 1e12) + memory_seconds
        )

    def _index_work(self, frozen: bool) -> Work:
        if frozen:
            return Work(2 * self.corpus.passages * self._encoder.hidden_size * self._embedder.dim)
        passages = self.corpus.passages
        forward = tower_work(self._encoder, self._embedder, passages, self._passage)
        return forward.times(1 / FORWARD_SPEED) + Work(host_seconds=passages * EMBEDDED_SECONDS)

    def _share(self, config: RunConfig, devices: int) -> _Share:
        """The work of one device in a step, if `devices` devices share the batch."""
        match config:
            case MlmConfig():
                return self._mlm(config, devices)
            case IctConfig():
                return self._ict(config, devices)
            case PretrainConfig():
                return self._pretrain(config, devices)
            case FinetuneConfig():
                return self._finetune(config, devices)
        raise TypeError(type(config))

    def _mlm(self, config: MlmConfig, devices: int) -> _Share:
        rows = config.batch_size / devices
        reading, plain = rows * config.reading, rows * (1 - config.reading)
        # `mlm` draws long passages with a higher probability than short passages.
        passage = min(self.preset.kb.passage_tokens, 1.2 * self._passage)
        read = reading_work(self._encoder, reading, self.joint, MASKED_SHARE * self._query)
        read += reading_work(self._encoder, plain, passage, MASKED_SHARE * passage)
        return _Share(
            read.times(_cost(config)) + _python(config.batch_size * SENTENCE_SECONDS, rows),
            self._parameters.reader,
            self._parameters.reader + self._parameters.towers,
            _kept(config, reading * self.joint + plain * passage, passage),
            0.0,
        )

    def _ict(self, config: IctConfig, devices: int) -> _Share:
        rows = config.batch_size / devices
        work = self._cloze(config, rows)
        longest = self._passage
        return _Share(
            work + _python(config.batch_size * SENTENCE_SECONDS, 2 * rows),
            self._parameters.towers,
            self._parameters.towers + self._parameters.reader,
            0.0
            if self._embedder.pooling == "words"
            else _kept(config, rows * (self._query + longest), longest),
            0.0,
        )

    def _pretrain(self, config: PretrainConfig, devices: int) -> _Share:
        encoder = self._encoder
        queries, candidates = config.batch_size / devices, config.candidates
        frozen = config.passage_encoder == "frozen"
        passages = 0.0 if frozen else queries * (candidates - 1) + 1
        work = self._towers(queries, self._query) + self._search(config, devices)
        work += self._trained_towers(config, queries, self._query)
        if not frozen:
            work += self._trained_towers(config, passages, self._passage)
        chosen = config.batch_size * QUERY_SECONDS + queries * CANDIDATES_SECONDS
        work += _python(chosen, queries * 2 * candidates)
        beside = reading_work(encoder, queries * (candidates - 1), self.joint, MASKED)
        all_rows = beside + reading_work(encoder, queries, self._query + 1, MASKED)
        drawn = reading_work(encoder, queries, self.joint, MASKED)
        tokens = (
            0.0 if self._embedder.pooling == "words" else queries * self._query + passages * self._passage
        )
        if config.signal != "entity":
            if config.reader_gradient == "all":
                work += all_rows.times(_cost(config))
                tokens += queries * ((candidates - 1) * self.joint + self._query)
            else:
                work += all_rows
            if config.reader_gradient == "sampled":
                work += drawn.times(_cost(config))
                tokens += queries * self.joint
        if config.ict:
            rows = config.ict_batch / devices
            work += self._cloze(config, rows) + _python(config.ict_batch * SENTENCE_SECONDS, 2 * rows)
            tokens += 0.0 if self._embedder.pooling == "words" else rows * (self._query + self._passage)
        towers = self._parameters.towers + (self._parameters.tower if frozen and self._embedder.shared else 0)
        moved = towers - (self._parameters.passage_encoder if frozen else 0)
        return _Share(
            work,
            moved + self._parameters.reader,
            towers + self._parameters.reader,
            _kept(config, tokens, self.joint),
            self._index_bytes(devices),
        )

    def _finetune(self, config: FinetuneConfig, devices: int) -> _Share:
        questions = config.batch_size / devices
        # A question is assumed to be as long as a masked sentence, and to have an answer in a passage that is read: the reader
        # does not read other questions. It reads passages without their titles.
        rows, joint = questions * config.read, self.joint
        read = Work(rows * layers_flop(self._encoder, joint, joint))
        sampled = config.reader_gradient == "sampled"
        # With "sampled", about one row per question is read again.
        reading = read + read.times(_cost(config) / config.read) if sampled else read.times(_cost(config))
        work = reading + self._search(config, devices)
        work += Work(host_seconds=questions * config.retrieved * RETRIEVED_SECONDS)
        tokens = (questions if sampled else rows) * joint
        trained, towers = self._parameters.encoder, self._parameters.towers
        if config.retriever_rate:
            work += self._trained_towers(config, questions, self._query)
            tokens += 0.0 if self._embedder.pooling == "words" else questions * self._query
            trained += self._parameters.tower
        if config.update_passages:
            work += self._trained_towers(config, rows, self._passage)
        elif self._embedder.shared:
            towers += self._parameters.tower  # the passage tower is not trained, so the towers are separate
        shares = devices if config.update_passages else 1  # parts of the index
        return _Share(
            work,
            trained,
            towers + self._parameters.reader + self._parameters.encoder,
            _kept(config, tokens, joint),
            self._index_bytes(shares),
        )

    def _towers(self, rows: float, length: float) -> Work:
        return tower_work(self._encoder, self._embedder, rows, length)

    def _trained_towers(self, config: RunConfig, rows: float, length: float) -> Work:
        return trained_tower_work(self._encoder, self._embedder, rows, length, _cost(config))

    def _cloze(self, config: RunConfig, rows: float) -> Work:
        """Work of the inverse cloze task on `rows` sentences and their passages."""
        sentences, passages = (
            self._trained_towers(config, rows, length) for length in (self._query, self._passage)
        )
        return sentences + passages

    def _search(self, config: PretrainConfig | FinetuneConfig, devices: int) -> Work:
        """One device's share of the search; with `normalise` "index" also of the softmax over the index.

        A device either searches its part of the index for the queries of all devices, or the whole index for its own queries.
        Both need the same number of products.
        """
        products = 2.0 * config.batch_size / devices * self.corpus.passages * self._embedder.dim
        divided = isinstance(config, PretrainConfig) or config.update_passages
        numbers = self.corpus.passages * self._embedder.dim / (devices if divided else 1)
        search = Work(products, 2.0 * numbers)
        if isinstance(config, PretrainConfig) and config.normalise == "index":
            # The scores and the weighted mean of the vectors; the vectors are converted to float32.
            search += Work(2 * products, 6.0 * numbers)
        return search

    def _index_bytes(self, shares: int) -> float:
        """The vectors in float16, and in int8 for the prefilter."""
        return 3.0 * self.corpus.passages * self._embedder.dim / shares


def _cost(config: RunConfig) -> int:
    """Cost of a training step in forward passes."""
    return RECOMPUTED if config.cached_rows else TRAINED


def _python(seconds: float, rows: float) -> Work:
    """Time of Python: `seconds` to draw the batch (every process draws the whole batch), and the time to pack `rows`."""
    return Work(host_seconds=seconds + rows * ROW_SECONDS)


def _kept(config: RunConfig, tokens: float, longest: float) -> float:
    """Number of tokens whose activations are kept at a time."""
    return min(tokens, config.cached_rows * longest) if config.cached_rows else tokens


def measured(preset: Preset, corpus: Corpus, clock: Clock = time.perf_counter) -> Hardware:
    """Measures this machine with the networks of the preset, and with rows whose mean length is that of rows of the corpus."""
    plan = Plan(preset, corpus, Hardware(1, 1, 1, 1))
    return measure(preset.encoder, preset.embedder, preset.copy_head, round(plan.joint), MASKED, clock)


def as_json(plan: Plan) -> dict[str, Any]:
    """The whole plan as JSON, in GB and seconds."""
    stages = []
    for stage in plan.stages():
        values = asdict(stage)
        memory = {name: value / 1e9 for name, value in values.pop("memory").items()}
        memory["all"] = stage.memory.total / 1e9
        values |= {"step_seconds": stage.step_seconds, "seconds": stage.seconds, "memory_gb": memory}
        fits = plan.fits(stage)
        values |= {"fits": fits, "fitting_rows": None if fits else plan.fitting_rows(stage.stage)}
        stages.append(values)
    return {
        "hardware": asdict(plan.hardware),
        "corpus": plan.corpus_costs(),
        "index_seconds": plan.index(),
        "stages": stages,
        "seconds": sum(stage["seconds"] for stage in stages),
    }
