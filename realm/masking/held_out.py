"""The held-out passages of a knowledge base, and the masked queries that are cut from them."""

from collections.abc import Sequence

import numpy as np

from realm.masking.masked_queries import MaskedQuery, MaskingRule, SpanIndex, draw_queries
from realm.store.knowledge_base import KnowledgeBase

PROBE_SEED = 20_200_210
"""Fixed, so that every run draws the same queries, and results of different models and dates are comparable."""


def held_out(ids: Sequence[str], share: float) -> np.ndarray:
    """True for passages that no training query is cut from.

    The hash of a passage's content decides, so that adding and deleting passages changes nothing.
    """
    return np.array([int(i[:8], 16) % 10_000 < share * 10_000 for i in ids], dtype=bool)


def held_out_queries(
    kb: KnowledgeBase, max_tokens: int, count: int, spans: SpanIndex | None = None
) -> list[MaskedQuery]:
    """Masked spans of held-out passages that another passage also holds.

    Every repeat of the span in the query is masked. At most one query per passage, and fewer than `count` if the corpus has
    no more.
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
