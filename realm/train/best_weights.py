"""The weights of a training on questions that are best on the dev questions."""

from collections.abc import Sequence

from torch import nn

from realm import distributed
from realm.train.loop import TrainRun
from realm.train.sharding import load_weights


class BestWeights:
    """Keeps the weights with the highest exact match on dev questions. The weights are part of the state of the run, so that
    checkpoints contain them."""

    def __init__(self, run: TrainRun, networks: Sequence[nn.Module]):
        self._run, self._networks = run, networks

    def keep(self, em: float) -> None:
        """Keeps the current weights if their exact match `em`, in percent, is at least that of the weights kept before."""
        state, em = self._run.state, distributed.broadcast(em)  # all ranks keep the same weights
        if em >= state.get("best_em", -1.0):
            state["best_em"], state["best_step"] = em, self._run.step
            state["best"] = [
                {name: value.detach().clone() for name, value in network.state_dict().items()}
                for network in self._networks
            ]

    def restore(self) -> None:
        """Loads the kept weights into the networks."""
        if "best" not in self._run.state:
            return
        for network, weights in zip(self._networks, self._run.state["best"], strict=True):
            load_weights(network, weights)
