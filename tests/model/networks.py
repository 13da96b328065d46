"""Small networks' sizes and inputs for the tests of them."""

import numpy as np
import torch

from realm.model.bert import Bert, BertConfig
from realm.tokens.layouts import Lengths, Tokens, joint_inputs, passage_inputs
from realm.tokens.tokenizer import Tokenizer
from tests.transformers_twin import twin

VOCAB = 40
CONFIG = BertConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
    initializer_range=0.5,  # states that differ visibly
)
LENGTHS = Lengths(query=8, passage=20)


def some_ids(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(5, VOCAB, size=length) for length in lengths]


def passages(tokenizer: Tokenizer, seed: int = 0) -> Tokens:
    return passage_inputs(some_ids(1, 2, 0), some_ids(9, 3, 0, seed=seed), tokenizer, LENGTHS)


def plain_states(bert: Bert, tokens: Tokens, row: int) -> torch.Tensor:
    """One row through transformers' layers by itself, without padding."""
    real = int(tokens.mask_BT[row].sum())
    with torch.no_grad():
        return twin(bert)(
            tokens.ids_BT[row : row + 1, :real], token_type_ids=tokens.segments_BT[row : row + 1, :real]
        )


def masked_batch(tokenizer: Tokenizer, queries: int, candidates: int):
    """Joint rows of very different lengths, one to three masks per query."""
    draw = np.random.default_rng(3)
    sentences = some_ids(*draw.integers(3, 9, size=queries), seed=1)
    bodies = some_ids(*draw.integers(0, 15, size=queries * candidates), seed=2)
    counts = draw.integers(1, 4, size=queries)
    position = np.zeros((queries, 3), dtype=np.int64)
    target, mask = np.zeros_like(position), np.zeros((queries, 3), dtype=np.float32)
    for row, count in enumerate(counts):
        position[row, :count] = 1 + np.sort(draw.choice(min(len(sentences[row]), 6), count, replace=False))
        target[row, :count] = draw.integers(5, VOCAB, size=count)
        mask[row, :count] = 1
    joint = joint_inputs([s for s in sentences for _ in range(candidates)], bodies, tokenizer, LENGTHS)
    return joint, *map(torch.from_numpy, (position, target, mask))
