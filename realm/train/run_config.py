"""Settings that all training stages share, and the random numbers of a step."""

from dataclasses import dataclass, fields

import numpy as np

from realm.errors import at_least
from realm.model.device import DeviceConfig

WEIGHT_DECAY = 0.01
"""Decoupled weight decay of matrices; biases and norms have no weight decay."""
LARGEST_NORM = 1.0
"""Largest global gradient norm; larger gradients are scaled down."""


@dataclass(frozen=True)
class RunConfig(DeviceConfig):
    """Settings that all training stages share."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 16
    """Examples per step."""
    warmup: int | None = None
    """Steps of linear warm-up. None: a tenth of `steps`, at least 100 and at most 10,000 (BERT's released rule). In a
    run with fewer steps than the warm-up, the learning rate rises until the end and stays below its peak."""
    decay: bool = True
    """Linear decay of the learning rate to 0, measured from step 0 (BERT's rule). False: constant rate after warm-up."""
    bias_correction: bool = True
    """Adam's bias correction. False: no bias correction, as in BERT's released optimizer."""
    dropout: float = 0.1
    """Dropout of every network during training; 0 suits runs of a few hundred steps."""
    cached_rows: int = 0
    """Rows of the gradient cache: towers and masked reader keep the activations of at most this number of rows, and compute all
    other activations again in the backward pass. So a batch of any size fits in memory, at the cost of one more forward pass.
    0: all activations are kept."""
    shard_weights: bool = False
    """Shards weights, gradients and Adam's averages among the processes of `torchrun` (FSDP2), for an encoder that is too large
    for one device. False: every process has all weights (DistributedDataParallel). No effect with one process."""
    seed: int = 0
    """Seed of all random numbers."""
    log_every: int = 10
    """Steps per line of metrics.jsonl; a line has the means over these steps."""
    checkpoint_seconds: float = 60.0
    """Least time in seconds between two checkpoints. Checkpoints are written only after steps that write a line of
    metrics.jsonl."""
    tensorboard: bool = False
    """Writes TensorBoard events beside metrics.jsonl (needs the package `tensorboard`)."""

    def __post_init__(self) -> None:
        at_least(
            self,
            steps=0,
            batch_size=1,
            warmup=0,
            log_every=1,
            checkpoint_seconds=0,
            cached_rows=0,
            seed=0,
            **{one.name: 0 for one in fields(self) if one.name.endswith("_rate")},
        )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}: it must be 0 or more, and less than 1")
        if self.seed >= 2**31:
            raise ValueError(f"seed is {self.seed}: it must be below {2**31}")


@dataclass(frozen=True)
class QuestionsRunConfig(RunConfig):
    """Settings of all trainings on questions, in which the weights that are best on dev questions are kept."""

    dev_every: int = 500
    """Steps between two evaluations on dev questions."""
    dev_questions: int = 500
    """Number of dev questions in each evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, dev_every=1, dev_questions=1)


def generator(*key: int) -> np.random.Generator:
    """A generator of random numbers that depend only on the key, such as (seed, step), and not on earlier draws."""
    return np.random.default_rng(key)
