"""Makes masked queries from passages: salient span masking (REALM section 3.4), and random masking as in the paper's ablation.

A query is a sentence of a passage in which some wordpieces are replaced by [MASK]; the replaced wordpieces are the targets. All
positions are positions of wordpieces.

This file also compares passages with masked queries: `SpanIndex` finds the passages in which a span was tagged. `holds` finds
out whether a passage contains a span, and `repeats_text` finds out whether a passage repeats the text of a query.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from realm.store.knowledge_base import PassageTokens
from realm.store.mapped_arrays import Arrays, mapped_arrays
from realm.store.schema import MappedTokens

Masking = Literal["salient", "token", "bert", "span"]

TOKEN_SHARE = 0.15
"""Share of the wordpieces of a sentence that are masked at random (BERT, SpanBERT)."""
REPLACED, KEPT = 0.1, 0.1
"""With masking "bert": share of the predicted wordpieces that become a random wordpiece, and share that is not changed."""


class MaskingRule(NamedTuple):
    """How a passage becomes a masked query."""

    mask_id: int
    """Wordpiece [MASK]."""
    max_tokens: int
    """Longest query in wordpieces; a longer sentence is cut to a window with the first mask (released code: the example is
    skipped)."""
    masking: Masking = "salient"
    """What is masked; `mask_passage` describes each value."""
    repeats: bool = False
    """Whether other occurrences of a salient span in the sentence are masked too (not in the released code)."""
    titled: float = 0.0
    """Share of the queries of `draw_queries` that begin with the title of the passage (`with_title`)."""
    vocab_size: int = 0
    """Number of wordpieces from which "bert" draws random wordpieces."""
    max_masks: int = 10
    """Largest number of wordpieces of a query that are predicted."""


class MaskedQuery(NamedTuple):
    """A masked sentence, as wordpieces."""

    passage: int
    """Number of the passage from which the sentence was cut."""
    ids: np.ndarray
    """The sentence with [MASK]; the title of the passage can stand before the sentence."""
    original: np.ndarray
    """The sentence before masking, without a title."""
    positions: np.ndarray
    """Positions in `ids` that are predicted, ascending."""
    targets: np.ndarray
    """The original wordpieces at `positions`."""


def mask_passage(
    tokens: PassageTokens, passage: int, rng: np.random.Generator, rule: MaskingRule
) -> MaskedQuery | None:
    """A masked query from a passage; None if the passage has nothing to mask.

    "salient": a span is drawn uniformly from all spans of the passage that lie within one sentence. The query is the sentence
    with this span, every wordpiece of the span becomes [MASK], and the first `max_masks` wordpieces are predicted. "token":
    15 % of the wordpieces of a random sentence are masked. "bert": as "token", but 10 % of the masked wordpieces become a
    random wordpiece, and 10 % are not changed (Devlin et al. 2019). "span": random runs of wordpieces are masked, up to 15 %
    of a random sentence; the lengths of the runs have a geometric distribution (p = 0.2) and are at most 10 (SpanBERT).
    """
    body = tokens.body.row(passage)
    if rule.masking == "salient":
        chosen = _salient(tokens, passage, rng)
        if chosen is None:
            return None
        return _hide_span(passage, body, *chosen, rule)
    else:
        starts = tokens.sentences.row(passage)
        bounds = np.append(starts, len(body))
        number = int(rng.integers(len(starts)))
        sentence = body[bounds[number] : bounds[number + 1]]
        if len(sentence) < 4:
            return None
        hidden = (_random_spans if rule.masking == "span" else _random_tokens)(len(sentence), rng)
    query = _hide(passage, sentence, hidden, hidden[:0], rule)
    return _as_bert(query, rng, rule) if rule.masking == "bert" else query


def each_span(tokens: PassageTokens, passage: int, mask_id: int, max_tokens: int) -> Iterator[MaskedQuery]:
    """One masked query for each span of a passage that lies within one sentence.

    Other occurrences of the span in the sentence are masked too.
    """
    body = tokens.body.row(passage)
    for sentence, span in _spans_in_sentences(tokens, passage):
        yield _hide_span(passage, body, sentence, span, MaskingRule(mask_id, max_tokens, repeats=True))


def count_targets(tokens: PassageTokens, max_tokens: int) -> np.ndarray:
    """Number of wordpieces that the queries of `each_span` predict in each passage, without making the queries -> [N]."""
    # Positions are counted over the wordpieces of all passages. S spans, N passages.
    body_N = tokens.body.offsets[:-1]
    shift_S = np.repeat(body_N, tokens.span_starts.lengths)
    start_S, end_S = tokens.span_starts.values + shift_S, tokens.span_ends.values + shift_S
    sentences = tokens.sentences.values + np.repeat(body_N, tokens.sentences.lengths)
    bounds = np.append(sentences, tokens.body.offsets[-1])
    inside_S = end_S <= bounds[np.searchsorted(bounds, start_S, "right")]
    longest = min(MaskingRule(0, max_tokens).max_masks, max_tokens)
    target_S = np.where(inside_S, np.minimum(end_S - start_S, longest), 0)
    passage_S = np.repeat(np.arange(len(body_N)), tokens.span_starts.lengths)
    return np.bincount(passage_S, weights=target_S, minlength=len(body_N)).astype(np.int64)


def _as_bert(query: MaskedQuery, rng: np.random.Generator, rule: MaskingRule) -> MaskedQuery:
    """Replaces some [MASK] of a query by random wordpieces, and some by the original wordpieces (Devlin et al. 2019)."""
    hidden, ids = np.flatnonzero(query.ids == rule.mask_id), query.ids.copy()
    draw = rng.random(len(hidden))
    replaced, kept = hidden[draw < REPLACED], hidden[draw >= 1 - KEPT]
    ids[replaced], ids[kept] = rng.integers(rule.vocab_size, size=len(replaced)), query.original[kept]
    return query._replace(ids=ids)


def _hide_span(
    passage: int, body: np.ndarray, bounds: tuple[int, int], span: tuple[int, int], rule: MaskingRule
) -> MaskedQuery:
    """Masks a span in a sentence -> query. `bounds` has start and end of the sentence, `span` start and end of the span."""
    sentence = body[slice(*bounds)]
    hidden = np.arange(*span) - bounds[0]
    also = np.setdiff1d(_occurrences(sentence, sentence[hidden]), hidden) if rule.repeats else hidden[:0]
    return _hide(passage, sentence, hidden, also, rule)


def _hide(
    passage: int, sentence: np.ndarray, hidden: np.ndarray, also: np.ndarray, rule: MaskingRule
) -> MaskedQuery:
    """Masks the wordpieces at `hidden` and at `also` -> query in which the first `max_masks` of `hidden` are predicted."""
    offset = _window(len(sentence), int(hidden[0]), int(hidden[-1]), rule.max_tokens)
    ids = sentence.copy()
    ids[hidden] = rule.mask_id
    ids[also] = rule.mask_id
    positions = hidden[: rule.max_masks] - offset
    positions = positions[positions < rule.max_tokens]
    window = slice(offset, offset + rule.max_tokens)
    return MaskedQuery(passage, ids[window], sentence[window], positions, sentence[positions + offset])


def draw_queries(
    tokens: PassageTokens, passages: np.ndarray, count: int, rng: np.random.Generator, rule: MaskingRule
) -> list[MaskedQuery]:
    """Up to `count` masked queries from passages that are drawn uniformly from `passages`.

    Passages with nothing to mask are skipped.
    """
    queries: list[MaskedQuery] = []
    for passage in _endless(passages, rng, limit=count * 50):
        query = mask_passage(tokens, passage, rng, rule)
        if query is not None:
            if rule.titled and rng.random() < rule.titled:
                query = with_title(query, tokens.title.row(passage), rule.max_tokens)
            queries.append(query)
            if len(queries) == count:
                break
    return queries


def with_title(query: MaskedQuery, title: np.ndarray, max_tokens: int) -> MaskedQuery:
    """Adds the title of the passage at the beginning of a query, so that the query names its subject, as a question does.

    The query is not changed if a masked wordpiece occurs in the title, or if the longer query would exceed `max_tokens`.
    """
    if len(title) + len(query.ids) > max_tokens or np.isin(title, query.targets).any():
        return query
    return query._replace(ids=np.concatenate([title, query.ids]), positions=query.positions + len(title))


def span_key(ids: np.ndarray) -> int:
    """A 64-bit hash of a sequence of wordpieces."""
    return int(_polynomial(np.asarray(ids)[None, :])[0])


class SpanIndex:
    """Finds the passages in which a salient span was tagged.

    The index is built at the first lookup, and needs 16 bytes of memory for each span of the corpus. If the wordpieces are
    mapped from files, the index is mapped too.
    """

    def __init__(self, tokens: PassageTokens):
        self._tokens = tokens

    @cached_property
    def _pairs(self) -> Arrays:
        """`keys` of spans, ascending, and the passage number for each key, `owners`."""
        if isinstance(self._tokens, MappedTokens):
            return mapped_arrays(self._tokens.folder / "spans", self._made)
        return self._made()

    def _made(self) -> Arrays:
        tokens = self._tokens
        owners = np.repeat(np.arange(len(tokens.body.lengths)), tokens.span_starts.lengths)
        first = tokens.body.offsets[owners] + tokens.span_starts.values
        width = tokens.span_ends.values - tokens.span_starts.values
        keys = np.zeros(len(owners), dtype=np.uint64)
        for one in np.unique(width):
            rows = np.flatnonzero(width == one)
            keys[rows] = _polynomial(tokens.body.values[first[rows, None] + np.arange(one)])
        # Distinct pairs, sorted by key and then by passage: the owners are ascending, and the sort is stable.
        order = np.argsort(keys, kind="stable")
        keys, owners = keys[order], owners[order]
        distinct = np.ones(len(keys), dtype=bool)
        distinct[1:] = (keys[1:] != keys[:-1]) | (owners[1:] != owners[:-1])
        return {"keys": keys[distinct], "owners": owners[distinct]}

    def passages(self, span_ids: np.ndarray) -> np.ndarray:
        """Numbers of the passages in which this span was tagged, ascending."""
        key, keys, owners = np.uint64(span_key(span_ids)), self._pairs["keys"], self._pairs["owners"]
        left, right = np.searchsorted(keys, key, "left"), np.searchsorted(keys, key, "right")
        return owners[left:right]


def holds(body: np.ndarray, span_ids: np.ndarray) -> bool:
    """Whether a passage contains the wordpieces of a span one after another."""
    return len(span_ids) > 0 and _stands_in(_bytes(span_ids), _bytes(body))


def repeats_text(sentence: np.ndarray, body: np.ndarray, run: int = 10) -> bool:
    """Whether a passage contains `run` consecutive wordpieces of a sentence, or the whole sentence if the sentence is shorter.

    The comparison by content finds the passage of a query, duplicates and overlapping passages, even if queries and passages
    come from different corpora.
    """
    length = min(run, len(sentence))
    if length == 0 or len(body) < length:
        return False
    words, text = _bytes(sentence), _bytes(body)
    return any(_stands_in(words[4 * i : 4 * (i + length)], text) for i in range(len(sentence) - length + 1))


def _salient(
    tokens: PassageTokens, passage: int, rng: np.random.Generator
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """A random span that lies within one sentence, as ((sentence start, end), (span start, end))."""
    inside = _spans_in_sentences(tokens, passage)
    return inside[rng.integers(len(inside))] if inside else None


def _spans_in_sentences(tokens: PassageTokens, passage: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Every span of a passage that lies within one sentence, as ((sentence start, end), (span start, end))."""
    starts, ends = tokens.span_starts.row(passage), tokens.span_ends.row(passage)
    bounds = np.append(tokens.sentences.row(passage), len(tokens.body.row(passage)))
    sentence = np.searchsorted(bounds, starts, "right") - 1
    inside = np.flatnonzero(ends <= bounds[np.minimum(sentence + 1, len(bounds) - 1)])
    return [
        ((int(bounds[number]), int(bounds[number + 1])), (int(start), int(end)))
        for number, start, end in zip(sentence[inside], starts[inside], ends[inside], strict=True)
    ]


def _random_tokens(length: int, rng: np.random.Generator) -> np.ndarray:
    count = max(1, round(TOKEN_SHARE * length))
    return np.sort(rng.choice(length, count, replace=False))


def _random_spans(length: int, rng: np.random.Generator) -> np.ndarray:
    budget = max(1, round(TOKEN_SHARE * length))
    hidden: set[int] = set()
    while len(hidden) < budget:
        width = min(int(rng.geometric(0.2)), 10, budget - len(hidden))
        start = int(rng.integers(length - width + 1))
        hidden.update(range(start, start + width))
    return np.array(sorted(hidden))


def _window(length: int, first: int, last: int, max_tokens: int) -> int:
    """Start of a window with the mask, of `max_tokens` wordpieces: 0 if the first such window contains the mask."""
    if length <= max_tokens or last < max_tokens:
        return 0
    return min(max(0, (first + last + 1 - max_tokens) // 2), first, length - max_tokens)


def _occurrences(body: np.ndarray, span_ids: np.ndarray) -> np.ndarray:
    """Positions of every wordpiece that belongs to an occurrence of the span."""
    width = len(span_ids)
    if width == 0 or len(body) < width:
        return np.zeros(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(body, width)
    starts = np.flatnonzero((windows == span_ids).all(axis=1))
    return np.unique((starts[:, None] + np.arange(width)).ravel())


def _bytes(ids: np.ndarray) -> bytes:
    """Wordpieces as four bytes each, because searching bytes is faster than comparing windows of an array."""
    return np.asarray(ids, dtype=np.int32).tobytes()


def _stands_in(part: bytes, whole: bytes) -> bool:
    place = whole.find(part)
    while place % 4 and place >= 0:  # the match does not begin at a wordpiece
        place = whole.find(part, place + 1)
    return place >= 0


def _polynomial(rows: np.ndarray) -> np.ndarray:
    """A polynomial hash of each row modulo 2**64; each id is increased by 1, so that zeros change the hash too."""
    key = np.zeros(len(rows), dtype=np.uint64)
    for column in rows.T.astype(np.uint64):
        key = key * np.uint64(0x9E3779B97F4A7C15) + (column + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    return key


def _endless(passages: np.ndarray, rng: np.random.Generator, limit: int) -> Iterable[int]:
    if len(passages) == 0:
        return
    for _ in range(limit):
        yield int(passages[rng.integers(len(passages))])
