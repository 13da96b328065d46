"""AdamW with BERT's schedule and one learning rate per part of a model; bias correction can be off, as in BERT's released
optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from realm.train.run_config import LARGEST_NORM, WEIGHT_DECAY, RunConfig
from realm.train.sharding import shard_as, whole_tensor

BETAS, EPSILON = (0.9, 0.999), 1e-6
"""Adam's constants in BERT's released optimizer."""
UNCORRECTED = 1e9
"""A step count at which both bias corrections are 1 in float32. AdamW adds 1 per step, but 1e9 + 1 is 1e9 in float32."""


class Optimizer:
    """AdamW for several parts of a model, each with a learning rate of its own."""

    def __init__(self, rates: Mapping[nn.Module, float], config: RunConfig):
        """`rates` maps each part that trains to its peak learning rate."""
        self._config = config
        self.adamw = torch.optim.AdamW(_groups(rates), betas=BETAS, eps=EPSILON, fused=True)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.adamw.param_groups for parameter in group["params"]]

    def clip(self) -> Tensor:
        """Scales all gradients down so that their global norm is at most `LARGEST_NORM` -> the norm before, a scalar."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = whole_tensor(nn.utils.get_total_norm(gradients))
        nn.utils.clip_grads_with_norm_(self.parameters, LARGEST_NORM, norm)
        return norm

    def step(self, number: int) -> None:
        """Updates the weights with the learning rates of step `number`, and clears the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = group["base_lr"] * group["scale"] * self.rate_factor(number)
        if not self._config.bias_correction:
            self._leave_out_bias_correction()
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def rate_factor(self, number: int) -> float:
        """Factor by which the learning rates are multiplied at step `number`."""
        config = self._config
        warmup = config.warmup if config.warmup is not None else min(10_000, max(100, config.steps // 10))
        factor = 1 - number / config.steps if config.decay else 1.0
        if number < warmup:
            factor = (number + 1) / (warmup + 1)
        return factor

    def scale_rate(self, part: nn.Module, factor: float) -> None:
        """Multiplies the learning rate of one part by `factor`, from now on."""
        own = {id(p) for p in part.parameters()}
        for group in self.adamw.param_groups:
            if id(group["params"][0]) in own:
                group["scale"] *= factor

    def reset_averages(self, part: nn.Module) -> None:
        """Deletes Adam's averages of one part; needed after the weights of this part were set back."""
        for parameter in part.parameters():
            self.adamw.state.pop(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        return self.adamw.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads the state of an optimizer with whole tensors; this optimizer can be for sharded weights."""
        parameters = self.parameters
        averages = {
            number: shard_as(state, dict.fromkeys(state, parameters[number]))
            for number, state in saved["state"].items()
        }
        self.adamw.load_state_dict({**saved, "state": averages})

    def _leave_out_bias_correction(self) -> None:
        """Initializes Adam's averages of parameters that have none, with a step count at which the bias correction is 1.

        AdamW counts the steps of each parameter from the first gradient of this parameter, so one factor for all parameters
        could not undo the bias correction.
        """
        for parameter in self.parameters:
            if parameter.grad is not None and not self.adamw.state[parameter]:
                averages: dict[str, Tensor] = {
                    "step": torch.tensor(UNCORRECTED, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
                self.adamw.state[parameter] = averages


def _groups(rates: Mapping[nn.Module, float]) -> Sequence[dict[str, Any]]:
    """Two parameter groups per part: matrices have weight decay, vectors (biases, norms) have none."""
    groups = []
    for part, rate in rates.items():
        trained = [p for p in part.parameters() if p.requires_grad]
        for matrices in (True, False):
            parameters = [p for p in trained if (p.ndim > 1) == matrices]
            decay = WEIGHT_DECAY if matrices else 0.0
            if parameters:
                groups.append({"params": parameters, "base_lr": rate, "scale": 1.0, "weight_decay": decay})
    return groups
