"""The hardware of a plan: from a TOML file of the user, from a file of the package (`h100`), or measured on this machine."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from realm.errors import InputError
from realm.model.bert import BertConfig, MaskedBert
from realm.model.device import autocast, choose_device, chosen, keep_freed_memory
from realm.model.embedder import EmbedderConfig, new_tower
from realm.model.masked_reader import MaskedReader
from realm.model.modes import set_dropout
from realm.plan.costs import SENTENCE_SECONDS, TRAINED, UPDATE_BYTES, Work, reading_work, trained_tower_work
from realm.settings import presets, read_config
from realm.store.schema import PassageTokens
from realm.tokens.layouts import Ragged, Tokens
from realm.train.ict import ClozeRule, cloze_pairs

Clock = Callable[[], float]

MEASURED = 3.0
"""Seconds of each measurement, after one repetition to warm up."""
ROWS, TEXTS = 40, 256
"""Number of rows of the measured training steps: of a reader, and of each of both passes of a bag-of-words tower. Threads share
the rows of the reader evenly, as those of a larger batch, if its encoder has positions for the longest rows."""
DRAWN = 256
"""Number of sentences that are drawn together."""
NUMBERS = 10_000_000
"""Number of weights of the measured update; these weights do not fit into the caches of a processor."""
SLOWEST, FASTEST = 1e-6, 1e15
"""Limits of all numbers of hardware, between which no time of a plan is infinite."""


@dataclass(frozen=True)
class Hardware:
    """The table [hardware] of a file: devices that train, each with one process of `torchrun`."""

    devices: int
    """Number of devices that train."""
    memory_gb: float
    """Memory of one device in GB."""
    tflops: float
    """Speed of training on one device in 10^12 FLOP per second; on a GPU about 20 % of the value in the data sheet (estimated
    in docs/scaling.md)."""
    memory_gb_per_s: float
    """Memory bandwidth of one device in GB per second."""
    words_gb_per_s: float = 0.0
    """GB per second with which a bag-of-words tower reads word embeddings and adds their gradients; caches hold the frequent
    words. 0: the value of `memory_gb_per_s`."""
    network_gb_per_s: float = 0.0
    """GB per second that one device sends to other devices over the slowest link; needed for two devices or more."""
    build_devices: int = 0
    """Number of additional devices of the same kind, which only embed passages for refreshes (`refresh.device`, or a Ray
    cluster). 0: the training devices in `refresh.device` also embed, or one training device if this setting names none."""
    bits: int = 16
    """Bits of an activation: 16 if the device computes in bf16, else 32."""
    python_time: float = 1.0
    """Time that Python needs, divided by the time on the core on which the costs of Python were measured (docs/scaling.md)."""

    def __post_init__(self) -> None:
        for name in ("devices", "memory_gb", "tflops", "memory_gb_per_s", "python_time"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
        for name in ("words_gb_per_s", "network_gb_per_s", "build_devices"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 0 or more")
        for name, value in vars(self).items():
            if value and not SLOWEST <= value <= FASTEST:
                raise ValueError(f"{name} is {value}: it must be from {SLOWEST:g} to {FASTEST:g}")
        if self.devices > 1 and not self.network_gb_per_s:
            raise ValueError(f"{self.devices} devices exchange gradients: network_gb_per_s must be above 0")
        if self.bits not in (16, 32):
            raise ValueError(f"bits is {self.bits}: it must be 16 or 32")


def machines() -> dict[str, Path]:
    """Name -> file of each machine that the package describes."""
    folders = {path.parent / "hardware" for path in presets().values()}
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def read_hardware(name: str) -> Hardware:
    """The hardware of a TOML file, or of a machine that the package describes.

    Raises:
        InputError: there is no such file, or it does not describe hardware.
    """
    known = machines()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise InputError(f"no hardware file {name}: give a TOML file or a machine ({', '.join(known)})")
    return read_config(Hardware, str(path), "hardware")


def measure(
    encoder: BertConfig,
    embedder: EmbedderConfig,
    copy_head: bool,
    length: int,
    masked: int,
    clock: Clock = time.perf_counter,
) -> Hardware:
    """Measures the speed and the memory of this machine.

    The speed is measured with a training step of a masked reader of the size of `encoder`, with an update of many weights, with
    the drawing of sentences, and with a training step of a bag-of-words tower if `embedder` is one. A row of a step has
    `length` wordpieces on average, within the limits of the encoder; the reader predicts `masked` of them.
    """
    device = choose_device("auto")
    if device.type == "cpu":
        keep_freed_memory()  # as a training run does
    length_B = _lengths(length, masked + 1, encoder.max_position_embeddings)
    work = sum((reading_work(encoder, 1, one, masked) for one in length_B), Work()).times(TRAINED)
    memory = (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    update = UPDATE_BYTES * NUMBERS / _update_seconds(device, clock)
    # The measured step includes the softmax over words, whose time is spent on memory traffic.
    speed = work.flop / _without(
        _reading_seconds(encoder, copy_head, length_B, masked, device, clock), work.traffic / update
    )
    words = 0.0
    if embedder.pooling == "words":
        bag = trained_tower_work(encoder, embedder, TEXTS, length, TRAINED).times(2)
        rest = bag.flop / speed + bag.traffic / update
        words = bag.words / _without(_bag_seconds(encoder, embedder, length, device, clock), rest)
    return Hardware(
        devices=1,
        memory_gb=round(memory / 1e9, 1),
        tflops=speed / 1e12,
        memory_gb_per_s=update / 1e9,
        words_gb_per_s=words / 1e9,
        bits=16 if chosen(device, "auto") == "bf16" else 32,
        python_time=_sentence_seconds(clock) / SENTENCE_SECONDS,
    )


def _without(seconds: float, part: float) -> float:
    """The time of a step without that of a part; at least a tenth, because other programs can delay the part."""
    return max(seconds - part, seconds / 10)


def _lengths(mean: int, shortest: int, longest: int) -> list[int]:
    """Lengths of `ROWS` rows, from half the mean to one and a half times the mean, within the limits. Rows of equal length
    would be faster."""
    spread = (round(mean * (0.5 + (place + 0.5) / ROWS)) for place in range(ROWS))
    return [max(shortest, min(one, longest)) for one in spread]


def _reading_seconds(
    encoder: BertConfig,
    copy_head: bool,
    length_B: list[int],
    masked: int,
    device: torch.device,
    clock: Clock,
) -> float:
    """Seconds of the forward and backward pass of a masked reader on rows of these lengths."""
    torch.manual_seed(0)
    reader = MaskedReader(MaskedBert(encoder), copy=copy_head).to(device).train()
    set_dropout(reader, 0.0)
    place_T = torch.arange(max(length_B))
    mask_BT = (place_T < torch.tensor(length_B)[:, None]).long()
    segments_BT = mask_BT * (place_T >= len(place_T) // 6)
    tokens = Tokens(torch.randint(1, encoder.vocab_size, mask_BT.shape), mask_BT, segments_BT)
    row_P = torch.arange(len(length_B)).repeat_interleave(masked)
    position_P = (1 + torch.arange(masked)).repeat(len(length_B))
    inputs = tokens.to(device), row_P.to(device), position_P.to(device), torch.ones_like(row_P).to(device)

    def step() -> None:
        with autocast(device, "auto"):
            loss = -reader.target_logp(*inputs).sum()
        loss.backward()
        loss.item()  # waits for a GPU
        reader.zero_grad()

    return _median_seconds(step, clock)


def _bag_seconds(
    encoder: BertConfig, embedder: EmbedderConfig, length: int, device: torch.device, clock: Clock
) -> float:
    """Seconds of the forward and backward passes of a bag-of-words tower on two times `TEXTS` texts, as in a step of `ict`."""
    torch.manual_seed(0)
    tower = new_tower(encoder, embedder).to(device).train()
    set_dropout(tower, 0.0)
    shape = TEXTS, length
    # Like in natural text, few words are frequent: their frequency is about inverse to their rank.
    ids_BT = (encoder.vocab_size ** torch.rand(shape)).long().clamp_max(encoder.vocab_size - 1)
    tokens = Tokens(ids_BT, torch.ones_like(ids_BT), torch.zeros_like(ids_BT)).to(device)

    def step() -> None:
        loss = tower(tokens).sum() + tower(tokens).sum()
        loss.backward()
        loss.item()  # waits for a GPU
        tower.zero_grad()

    return _median_seconds(step, clock)


def _update_seconds(device: torch.device, clock: Clock) -> float:
    """Seconds that the update of `NUMBERS` weights takes."""
    weights = nn.Parameter(torch.zeros(NUMBERS // 1000, 1000, device=device))
    optimizer = torch.optim.AdamW([weights], fused=True)

    def step() -> None:
        weights.grad = torch.ones_like(weights)
        nn.utils.clip_grad_norm_([weights], 1.0).item()
        optimizer.step()
        weights[0, 0].item()

    return _median_seconds(step, clock)


def _sentence_seconds(clock: Clock) -> float:
    """Seconds in which Python draws a sentence of the inverse cloze task."""
    count, sentences, length = 4 * DRAWN, 5, 20
    starts = np.tile(np.arange(0, sentences * length, length), count)
    bodies = Ragged(
        np.ones(count * sentences * length, dtype=np.int32), np.arange(count + 1) * sentences * length
    )
    titles = Ragged(np.ones(count, dtype=np.int32), np.arange(count + 1))
    no_spans = Ragged(np.zeros(0, dtype=np.int32), np.zeros(count + 1, dtype=np.int64))
    tokens = PassageTokens(
        titles, bodies, Ragged(starts, np.arange(count + 1) * sentences), no_spans, no_spans
    )
    rule, rng = ClozeRule(size=DRAWN), np.random.default_rng(0)
    return _median_seconds(lambda: cloze_pairs(tokens, np.arange(count), rule, rng), clock) / DRAWN


def _median_seconds(step: Callable[[], object], clock: Clock) -> float:
    step()
    took: list[float] = []
    end = time.monotonic() + MEASURED
    while time.monotonic() < end or not took:
        started = clock()
        step()
        took.append(clock() - started)
    return statistics.median(took)
