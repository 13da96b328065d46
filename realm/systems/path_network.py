"""The networks of PathRetriever and their losses: a recurrent retriever with beam search, and a reader of paths.

Axis letters: K passages of a question, R paths, T tokens, H hidden.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realm.model.bert import Bert
from realm.model.states import hidden_states, states_at
from realm.qa.reading import Reading
from realm.systems.answer_ends import AnswerEnds
from realm.tokens.tokenizer import Tokenizer

END = -1
"""Stands for the end of a path, instead of a passage."""
CARRIED = 2
"""Number of best candidates of a step that are also candidates of the next step (published: 2)."""


class PathNetwork(nn.Module):
    """The recurrent retriever and the reader."""

    def __init__(self, encoder: Bert, tokenizer: Tokenizer):
        super().__init__()
        hidden = encoder.config.hidden_size
        self.encoder, self.reader = encoder, copy.deepcopy(encoder)
        self.begin = nn.Parameter(torch.randn(hidden) / math.sqrt(hidden))
        self.end = nn.Parameter(torch.randn(hidden) / math.sqrt(hidden))
        self.length = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))
        self.step = nn.Linear(2 * hidden, hidden)
        self.holds = nn.Linear(hidden, 1)
        self.ends = AnswerEnds(encoder.config, tokenizer)

    def first(self) -> Tensor:
        """The state before the first passage of a path -> [H]."""
        return self.length * F.normalize(self.begin, dim=0)

    def next(self, state_H: Tensor, picked_H: Tensor) -> Tensor:
        """The state after a passage was picked -> [H]."""
        return self.length * F.normalize(self.step(torch.cat([state_H, picked_H])), dim=0)

    def logits(self, state_H: Tensor, passage_KH: Tensor) -> Tensor:
        """w . h + b of candidates -> [K]."""
        return passage_KH @ state_H + self.bias

    def encoded(self, reading: Reading) -> Tensor:
        """w of pairs of a question and a passage -> [K, H]."""
        tokens = reading.tokens.to(self.bias.device)
        if self.training:
            return hidden_states(self.encoder, tokens)[:, 0].float()
        row_K = torch.arange(len(tokens.ids_BT), device=tokens.ids_BT.device)
        return states_at(self.encoder, tokens, row_K, torch.zeros_like(row_K)).float()

    def read(self, reading: Reading) -> tuple[Tensor, Tensor]:
        """Logits that paths contain an answer [R]; log p of the first and the last token of an answer [2, R, T]."""
        state_RTH = hidden_states(self.reader, reading.tokens.to(self.bias.device)).float()
        return self.holds(state_RTH[:, 0]).squeeze(1), self.ends(state_RTH, reading)


def path_loss(network: PathNetwork, passage_KH: Tensor, path: Sequence[int], allowed_K: Tensor) -> Tensor:
    """Mean binary cross-entropy over the steps of a path and the candidates of each step.

    The candidates of a step are all passages and the end. `path` contains positions in `passage_KH`, and ends with `END`. Only
    passages in `allowed_K` are negatives, because other passages may contain an answer.
    """
    every_KH = torch.cat([passage_KH, network.end[None]])
    state_H, losses = network.first(), []
    for pick in path:
        place = len(passage_KH) if pick == END else pick
        logit_K = network.logits(state_H, every_KH)
        counts_K = torch.cat([allowed_K, allowed_K.new_ones(1)])
        counts_K[place] = True
        right_K = torch.zeros_like(logit_K)
        right_K[place] = 1.0
        losses.append(F.binary_cross_entropy_with_logits(logit_K, right_K, reduction="none")[counts_K])
        state_H = network.next(state_H, every_KH[place])
    return torch.cat(losses).mean()


def reading_loss(holds_R: Tensor, end_2RT: Tensor, places: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Binary cross-entropy of whether paths contain an answer, plus the loss of the answer in paths that contain it.

    The loss of the answer is the mean over these paths of -log sum p(first) p(last), where the sum is over `places`.
    """
    right_R = torch.tensor([float(bool(own)) for own in places], device=holds_R.device)
    losses = [F.binary_cross_entropy_with_logits(holds_R, right_R)]
    for row, own in enumerate(places):
        if own:
            first, last = (torch.tensor(part, device=holds_R.device) for part in zip(*own, strict=True))
            losses.append(-(end_2RT[0, row, first] + end_2RT[1, row, last]).logsumexp(dim=0) / right_R.sum())
    return torch.stack(losses).sum()


class Beam(NamedTuple):
    """A path, the state of the network after the path, and the log-probability of the path."""

    path: tuple[int, ...]
    state_H: Tensor
    logp: float


def beam_search(
    network: PathNetwork,
    seeds: Sequence[int],
    links: Callable[[int], Sequence[int]],
    encode: Callable[[Sequence[int]], Tensor],
    passages: int,
    beam: int,
) -> list[Beam]:
    """The best complete paths, best first.

    `encode` computes w of passages, and is called once for each passage. `links` returns the passages to which a passage links.
    `passages` is the largest number of passages of a path, and `beam` the number of paths that are kept after each step.
    """
    ended: list[Beam] = []
    open_paths = [(Beam((), network.first(), 0.0), list(seeds))]
    encoded: dict[int, Tensor] = {}  # a passage is a candidate of several paths, and of several steps
    for _ in range(passages):
        wanted = dict.fromkeys(pick for _, candidates in open_paths for pick in candidates)
        new = [pick for pick in wanted if pick not in encoded]
        if new:
            encoded.update(zip(new, encode(new), strict=True))
        grown: list[tuple[float, Beam, int, list[int]]] = []
        for one, candidates in open_paths:
            if not candidates:
                continue
            passage_KH = torch.stack([encoded[pick] for pick in candidates])
            logp_K = F.logsigmoid(network.logits(one.state_H, passage_KH))
            carried = [candidates[place] for place in logp_K.argsort(descending=True)[: CARRIED + 1].tolist()]
            grown += [
                (one.logp + logp, one, pick, carried)
                for pick, logp in zip(candidates, logp_K.tolist(), strict=True)
            ]
        grown.sort(key=lambda one: -one[0])
        open_paths = []
        for logp, before, pick, carried in grown[:beam]:
            after = Beam((*before.path, pick), network.next(before.state_H, encoded[pick]), logp)
            following = [*links(pick), *[other for other in carried if other != pick][:CARRIED]]
            open_paths.append((after, [one for one in dict.fromkeys(following) if one not in after.path]))
            end = float(F.logsigmoid(network.logits(after.state_H, network.end[None])))
            ended.append(after._replace(logp=after.logp + end))
    return sorted(ended, key=lambda one: -one.logp)[:beam]
