"""Settings that all training stages share, and the random numbers of a step."""

from dataclasses import dataclass

import numpy as np

from realm.errors import at_least
from realm.model.device import Precision


@dataclass(frozen=True)
class RunConfig:
    """Settings that all training stages share."""

    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 16
    """Examples per step."""
    warmup: int | None = None
    """Steps of linear warm-up. None: a tenth of `steps`, at least 100 and at most 10,000 (BERT's released rule)."""
    decay: bool = True
    """Linear decay of the learning rate to 0, measured from step 0 (BERT's released rule). False: constant after warm-up."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; biases and norms have none."""
    clip: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down."""
    bias_correction: bool = True
    """Adam's bias correction. The released optimizer has none."""
    dropout: float = 0.1
    """Dropout of every network during training; 0 suits runs of a few hundred steps."""
    cached_rows: int = 0
    """Gradient-cache rows: towers and masked reader keep the activations of this many rows and compute all other activations
    again for the backward pass. A batch of any size fits, at the cost of one more forward pass. 0: all activations are kept."""
    seed: int = 0
    """Seed of all random numbers."""
    device: str = "auto"
    """"auto": a GPU if there is one, else the CPU; or any torch device."""
    precision: Precision = "auto"
    """Precision of matrix products; weights, norms and losses stay float32."""
    log_every: int = 10
    """Steps averaged into one line of metrics.jsonl."""
    checkpoint_seconds: float = 60.0
    """Least time between two checkpoints. Checkpoints are written only after logged steps."""
    tensorboard: bool = False
    """Writes TensorBoard events beside metrics.jsonl (needs the package `tensorboard`)."""

    def __post_init__(self) -> None:
        at_least(self, steps=0, batch_size=1, log_every=1, cached_rows=0, seed=0)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}: it must be 0 or more, and less than 1")
        if self.seed >= 2**31:
            raise ValueError(f"seed is {self.seed}: it must be below {2**31}")


def generator(*key: int) -> np.random.Generator:
    """The random numbers of a key such as (seed, step): the same for the same key, whatever was drawn before."""
    return np.random.default_rng(key)
