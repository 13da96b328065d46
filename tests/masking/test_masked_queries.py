"""Salient span masking and its ablations against the text itself and plain loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.masking.held_out import held_out
from realm.masking.masked_queries import (
    MaskedQuery,
    MaskingRule,
    SpanIndex,
    count_targets,
    draw_queries,
    each_span,
    holds,
    mask_passage,
    repeats_text,
    span_key,
    with_title,
)
from realm.store.schema import PassageTokens, Ragged
from realm.text.corpus import passage_id

MASK = 4


def ragged(rows):
    offsets = np.cumsum([0] + [len(r) for r in rows])
    return Ragged(np.array([x for r in rows for x in r], dtype=np.int32), offsets)


@pytest.fixture
def tokens() -> PassageTokens:
    """Two passages; the first has sentences of 6 and 5 pieces and one span across their border."""
    return PassageTokens(
        title=ragged([[90], [91]]),
        body=ragged([[10, 11, 12, 13, 11, 12, 20, 21, 22, 23, 24], [30, 11, 12, 31]]),
        sentences=ragged([[0, 6], [0]]),
        span_starts=ragged([[1, 5, 8], [1]]),
        span_ends=ragged([[3, 7, 10], [3]]),
    )


def draws(tokens, passage, count=60, **options):
    rng = np.random.default_rng(0)
    return [mask_passage(tokens, passage, rng, MaskingRule(MASK, 50, **options)) for _ in range(count)]


def test_one_span_of_one_sentence_is_hidden_whole(tokens):
    seen = set()
    for query in draws(tokens, 0):
        seen.add((tuple(query.original), tuple(query.positions)))
        assert np.array_equal(query.original[query.positions], query.targets)
        assert np.array_equal(np.flatnonzero(query.ids == MASK), query.positions)
        kept = np.delete(np.arange(len(query.ids)), query.positions)
        assert np.array_equal(query.ids[kept], query.original[kept])
    assert seen == {((10, 11, 12, 13, 11, 12), (1, 2)), ((20, 21, 22, 23, 24), (2, 3))}


def test_span_across_sentences_is_never_drawn(tokens):
    assert all(tuple(q.targets) != (12, 20) for q in draws(tokens, 0))


def test_only_the_drawn_occurrence_is_hidden_unless_repeats_are_asked_for(tokens):
    one = next(q for q in draws(tokens, 0) if 11 in q.targets)
    both = next(q for q in draws(tokens, 0, repeats=True) if 11 in q.targets)
    assert one.ids.tolist() == [10, MASK, MASK, 13, 11, 12]
    assert both.ids.tolist() == [10, MASK, MASK, 13, MASK, MASK]
    assert both.positions.tolist() == [1, 2]


def test_masking_reads_but_never_writes_the_corpus(tokens):
    before = tokens.body.values.copy()
    draws(tokens, 0, repeats=True)
    assert np.array_equal(tokens.body.values, before)


def test_passage_without_spans_gives_no_query():
    empty = ragged([[]])
    tokens = PassageTokens(ragged([[1]]), ragged([[10, 11, 12]]), ragged([[0]]), empty, empty)
    assert mask_passage(tokens, 0, np.random.default_rng(0), MaskingRule(MASK, 50)) is None


@given(st.integers(0, 10_000), st.integers(2, 30))
def test_targets_of_all_spans_are_counted_without_making_the_queries(seed, max_tokens):
    rng = np.random.default_rng(seed)
    bodies, sentences, starts, ends = [], [], [], []
    for _ in range(5):
        length = int(rng.integers(0, 60))
        bodies.append(rng.integers(10, 99, size=length))
        sentences.append(np.union1d([0], rng.integers(0, length + 1, size=2)) if length else [])
        own = np.sort(rng.integers(0, max(1, length), size=int(rng.integers(0, 4)) if length else 0))
        starts.append(own)
        ends.append(np.minimum(own + rng.integers(1, 20, size=len(own)), length))
    tokens = PassageTokens(ragged([[1]] * 5), *map(ragged, (bodies, sentences, starts, ends)))
    made = [
        sum(len(query.targets) for query in each_span(tokens, passage, MASK, max_tokens))
        for passage in range(5)
    ]
    assert count_targets(tokens, max_tokens).tolist() == made


@given(st.integers(0, 10_000), st.sampled_from(["salient", "token", "span"]), st.integers(4, 40))
def test_every_query_fits_its_window_and_can_be_undone(seed, masking, max_tokens):
    rng = np.random.default_rng(seed)
    body = rng.integers(10, 99, size=60)
    start = int(rng.integers(0, 57))
    tokens = PassageTokens(
        ragged([[1]]), ragged([body]), ragged([[0]]), ragged([[start]]), ragged([[start + 3]])
    )
    query = mask_passage(tokens, 0, rng, MaskingRule(MASK, max_tokens, masking))
    assert query is not None
    assert len(query.ids) == len(query.original) <= max_tokens
    assert 1 <= len(query.positions) <= 10
    assert (query.ids[query.positions] == MASK).all()
    assert np.array_equal(query.original[query.positions], query.targets)
    windows = np.lib.stride_tricks.sliding_window_view(body, len(query.original))
    assert (windows == query.original).all(axis=1).any()


def test_token_masking_hides_about_fifteen_percent():
    body = np.arange(10, 110)
    one = PassageTokens(ragged([[1]]), ragged([body]), ragged([[0]]), ragged([[]]), ragged([[]]))
    query = mask_passage(one, 0, np.random.default_rng(0), MaskingRule(MASK, 200, "token", max_masks=100))
    assert query is not None and len(query.positions) == 15


def test_bert_masking_hides_eight_of_ten_predicted_wordpieces_and_keeps_one():
    body = np.arange(1000, 1100)
    one = PassageTokens(ragged([[1]]), ragged([body]), ragged([[0]]), ragged([[]]), ragged([[]]))
    kinds = np.zeros(3)
    for seed in range(400):
        rng = np.random.default_rng(seed)
        query = mask_passage(one, 0, rng, MaskingRule(MASK, 200, "bert", max_masks=100, vocab_size=1000))
        assert query is not None and len(query.positions) == 15
        assert np.array_equal(query.targets, body[query.positions])
        shown = query.ids[query.positions]
        others = np.delete(query.ids, query.positions)
        assert np.array_equal(others, np.delete(body, query.positions))
        assert ((shown < 1000) | (shown == query.targets)).all()
        kinds += [(shown == MASK).sum(), (shown == query.targets).sum(), len(shown)]
    masked, kept = kinds[:2] / kinds[2]
    assert abs(masked - 0.8) < 0.02 and abs(kept - 0.1) < 0.015  # and 0.1 are random


def test_draws_follow_the_generator_alone(tokens):
    def draw():
        return draw_queries(tokens, np.array([0, 1]), 8, np.random.default_rng(5), MaskingRule(MASK, 50))

    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(draw(), draw(), strict=True))


def test_title_before_a_sentence_moves_what_is_predicted():
    query = MaskedQuery(0, np.array([7, MASK, MASK]), np.array([7, 8, 9]), np.array([1, 2]), np.array([8, 9]))
    titled = with_title(query, np.array([5, 6]), 5)
    assert titled.ids.tolist() == [5, 6, 7, MASK, MASK] and titled.positions.tolist() == [3, 4]
    assert (titled.ids[titled.positions] == MASK).all() and titled.original is query.original


def test_title_that_is_too_long_or_contains_the_answer_is_left_out():
    query = MaskedQuery(0, np.array([7, MASK, MASK]), np.array([7, 8, 9]), np.array([1, 2]), np.array([8, 9]))
    assert with_title(query, np.array([5, 6]), 4) is query
    assert with_title(query, np.array([9, 6]), 10) is query


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_titles_stand_before_as_many_sentences_as_asked(tokens, share):
    rng = np.random.default_rng(0)
    queries = draw_queries(tokens, np.array([0, 1]), 400, rng, MaskingRule(MASK, 50, titled=share))
    titled = [len(q.ids) > len(q.original) for q in queries]
    allowed = [not np.isin(tokens.title.row(q.passage), q.targets).any() for q in queries]
    assert abs(np.mean(titled) - share * np.mean(allowed)) < 0.06


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_holds_agrees_with_a_plain_loop(body, span):
    plain = any(body[i : i + len(span)] == span for i in range(len(body) - len(span) + 1))
    assert holds(np.array(body, dtype=np.int64), np.array(span)) == plain


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 6))
def test_repeats_text_agrees_with_a_plain_loop(sentence, body, run):
    length = min(run, len(sentence))
    plain = length > 0 and any(
        sentence[i : i + length] == body[j : j + length]
        for i in range(len(sentence) - length + 1)
        for j in range(len(body) - length + 1)
    )
    assert repeats_text(np.array(sentence, dtype=np.int64), np.array(body, dtype=np.int64), run) == plain


@given(st.lists(st.lists(st.integers(0, 40_000), min_size=1, max_size=6), min_size=2, max_size=20))
def test_span_keys_are_equal_only_for_equal_spans(spans):
    keys = [span_key(np.array(s)) for s in spans]
    assert len(set(keys)) == len({tuple(s) for s in spans})


def test_span_index_lists_every_passage_where_the_span_was_tagged(tokens):
    index = SpanIndex(tokens)
    assert index.passages(np.array([11, 12])).tolist() == [0, 1]
    assert index.passages(np.array([22, 23])).tolist() == [0]
    assert index.passages(np.array([99])).tolist() == []


def test_held_out_passages_stay_held_out_when_others_come_and_go():
    ids = [passage_id("title", str(i)) for i in range(5000)]
    chosen = held_out(ids, 0.03)
    assert 0.02 < chosen.mean() < 0.04
    assert np.array_equal(held_out(ids[100:], 0.03), chosen[100:])


def test_wordpieces_are_compared_whole_not_byte_by_byte():
    span = np.array([256])  # its bytes stand across those of 65536 and 0
    assert not holds(np.array([65536, 0]), span)
    assert holds(np.array([65536, 0, 256]), span)
