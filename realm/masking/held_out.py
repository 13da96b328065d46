"""The held-out passages of a knowledge base, and the masked queries that are cut from them."""

from collections.abc import Sequence

import numpy as np

from realm.masking.masked_queries import MaskedQuery, MaskingRule, SpanIndex, draw_queries
from realm.store.knowledge_base import KnowledgeBase

PROBE_SEED = 20_200_210
"""This seed is fixed, so that every run draws the same queries, and results of different models can be compared."""


def held_out(ids: Sequence[str], share: float) -> np.ndarray:
    """True for the held-out passages, from which no training query is cut -> [N] bool.

    Whether a passage is held out depends only on its id, a hash of its content, and not on other passages.
    """
    return np.array([int(i[:8], 16) % 10_000 < share * 10_000 for i in ids], dtype=bool)


def held_out_queries(
    kb: KnowledgeBase, max_tokens: int, count: int, spans: SpanIndex | None = None
) -> list[MaskedQuery]:
    """Sentences of held-out passages with a masked span that another passage contains too.

    All occurrences of the span in the query are masked. There is at most one query per passage, and at most `count` queries.
    """
    spans = spans or SpanIndex(kb.tokens)
    rng, rule = np.random.default_rng(PROBE_SEED), MaskingRule(kb.tokenizer.mask_id, max_tokens, repeats=True)
    queries = []
    for passage in rng.permutation(np.flatnonzero(held_out(kb.ids, kb.config.held_out))):
        drawn = draw_queries(kb.tokens, np.array([passage]), 1, rng, rule)
        if drawn and len(spans.passages(drawn[0].targets)) > 1:
            queries += drawn
            if len(queries) == count:
                break
    return queries
