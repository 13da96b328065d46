"""Trains the embedder on the inverse cloze task, before pre-training (Lee et al. 2019, section 4; REALM section 3.4).

A sentence of a passage is the query. The task is to find the passage among all passages of the batch. The sentence is removed
from the passage in 9 of 10 cases, and stays in 1 of 10 cases, so that the retriever also learns to match exact words.

Axis letters: B passages per batch, D embedding.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realm import distributed
from realm.errors import InputError, check_shares
from realm.masking.held_out import held_out
from realm.model.folder import Model, load_model
from realm.model.losses import in_batch_loss
from realm.model.scores import scores
from realm.store.knowledge_base import KnowledgeBase, PassageTokens
from realm.tokens.layouts import passage_inputs, query_inputs
from realm.train.loop import StartedFrom, TrainRun
from realm.train.run_config import RunConfig, generator

LEAST_DRAWN = 256
"""Smallest number of passages that are drawn for a batch, because many passages may have only one sentence."""
REMOVAL = 0.9
"""Share of sentences that are removed from their passage."""


@dataclass(frozen=True)
class IctConfig(RunConfig):
    """Settings of `realm ict` (paper: batch 4096, 100k steps, rate 1e-4)."""

    batch_size: int = 64
    """Passages per step. Each passage is a negative for the sentences of all other passages of the batch."""
    learning_rate: float = 1e-4
    """Peak learning rate of the embedder."""
    titled: float = 0.0
    """Share of sentences that begin with the title of their passage (paper: 0); with the title, a sentence names its subject,
    as a question does."""
    query_tokens: int = 0
    """Longest sentence in wordpieces, including special tokens (ORQA's code: 64). 0: the query length of the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares(self, "titled")
        if self.query_tokens and self.query_tokens < 3:
            raise ValueError(
                f"query_tokens is {self.query_tokens}: it must be 3 or more, or 0 for the query length of the model"
            )


def train(kb: KnowledgeBase, out: Path, config: IctConfig, init: str) -> Path:
    """Trains the embedder of the model folder `init` on a knowledge base -> `out`; the reader stays unchanged."""
    model = load_model(init)
    kb.check_tokenizer(model.tokenizer, init)
    kb.agree_on_held_out(model.held_out, init)
    tokens = kb.tokens
    passages = np.flatnonzero(~held_out(kb.ids, kb.config.held_out))
    rule = ClozeRule(config.batch_size, titled=config.titled, query_tokens=config.query_tokens)
    names: StartedFrom = {"init": init, **kb.training_record}
    with TrainRun(
        "ict", out, config, model, {model.embedder: config.learning_rate}, names, shares=True
    ) as run:
        for step in run.steps():
            rng = generator(config.seed, step)
            with run.autocast():
                query_BD, passage_BD = cloze_vectors(model, tokens, passages, rule, rng)
            loss = in_batch_loss(query_BD, passage_BD)
            right = scores(query_BD, passage_BD).argmax(dim=1) == torch.arange(
                len(query_BD), device=run.device
            )
            run.update(loss, {"accuracy": right.float().mean()})
        return run.finish()


class ClozeRule(NamedTuple):
    """How a batch of the inverse cloze task is made from passages."""

    size: int
    """Sentences of a batch; fewer if there are too few passages."""
    removal: float = REMOVAL
    """Probability that a sentence is removed from the body of its passage."""
    titled: float = 0.0
    """Probability that the title of the passage is put before the sentence."""
    query_tokens: int = 0
    """Length in wordpieces to which sentences are cut; 0: the query length of the model."""


def cloze_vectors(
    model: Model, tokens: PassageTokens, passages: np.ndarray, rule: ClozeRule, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Vectors of sentences, and of the passages of these sentences -> two tensors [B, D], the same on every rank.

    Each rank embeds its share of the sentences and passages, and receives the vectors of the other ranks.
    """
    lengths = replace(model.lengths, query=rule.query_tokens or model.lengths.query)
    drawn = rng.choice(passages, min(max(4 * rule.size, LEAST_DRAWN), len(passages)), replace=False)
    sentences, titles, bodies = cloze_pairs(tokens, drawn, rule, rng)
    queries = query_inputs(distributed.shard(sentences), model.tokenizer, lengths).to(model.device)
    inputs = passage_inputs(
        distributed.shard(titles), distributed.shard(bodies), model.tokenizer, model.lengths
    ).to(model.device)
    total = len(sentences)
    return (
        distributed.all_gather(model.embedder.query(queries), total),
        distributed.all_gather(model.embedder.passage(inputs), total),
    )


def cloze_pairs(
    tokens: PassageTokens, passages: np.ndarray, rule: ClozeRule, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """One sentence of each of the first `rule.size` usable passages, and the titles and bodies of these passages.

    A passage with only one sentence is usable only if the sentence is not removed.

    Raises:
        InputError: no passage is usable.
    """
    sentences: list[np.ndarray] = []
    titles, bodies = [], []
    for passage in passages:
        body = tokens.body.row(passage)
        bounds = [*tokens.sentences.row(passage).tolist(), len(body)]
        # a sentence of control characters has no wordpieces
        usable = [(first, last) for first, last in pairwise(bounds) if last > first]
        remove = rng.random() < rule.removal
        if len(usable) <= remove:
            continue
        first, last = usable[rng.integers(len(usable))]
        title = tokens.title.row(passage)
        named = rule.titled and rng.random() < rule.titled
        sentences.append(np.concatenate([title, body[first:last]]) if named else body[first:last])
        titles.append(title)
        bodies.append(np.concatenate([body[:first], body[last:]]) if remove else body)
        if len(sentences) == rule.size:
            break
    if not sentences:
        raise InputError(
            f"none of {len(passages)} passages has two sentences: the inverse cloze task removes one sentence of a passage"
        )
    return sentences, titles, bodies
