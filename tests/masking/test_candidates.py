"""The two rules, injected candidates, and the layout of a step, on a corpus small enough to see through."""

import numpy as np
import pytest
import torch

from realm.errors import InputError
from realm.masking import candidates
from realm.masking.candidates import CandidateRule, choose_candidates, read_inputs
from realm.masking.masked_queries import MaskedQuery, MaskingRule, SpanIndex, draw_queries, repeats_text
from realm.search.exact import MipsIndex
from realm.store.schema import PassageTokens, Ragged
from realm.tokens.layouts import NULL_PASSAGE, Lengths
from realm.tokens.tokenizer import Tokenizer

LENGTHS = Lengths(query=16, passage=20)
SENTENCE = np.arange(100, 112)
SPAN = np.array([7, 8])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a b c"], vocab_size=20)


def ragged(rows) -> Ragged:
    offsets = np.cumsum([0] + [len(r) for r in rows])
    return Ragged(np.array([x for r in rows for x in r], dtype=np.int32), offsets)


def corpus(bodies, spans=None) -> PassageTokens:
    """Passages of one sentence each; passage i has the title [50 + i]; spans are (start, end) in the body."""
    spans = spans or [[] for _ in bodies]
    return PassageTokens(
        title=ragged([[50 + i] for i in range(len(bodies))]),
        body=ragged(bodies),
        sentences=ragged([[0] for _ in bodies]),
        span_starts=ragged([[s for s, _ in row] for row in spans]),
        span_ends=ragged([[e for _, e in row] for row in spans]),
    )


def other(number: int, length: int = 12) -> np.ndarray:
    """A text that shares nothing with any other."""
    return 1000 * (number + 1) + np.arange(length)


def query(passage: int = 0, sentence: np.ndarray = SENTENCE, positions=(3, 4)) -> MaskedQuery:
    positions = np.array(positions)
    ids = sentence.copy()
    ids[positions] = 4
    return MaskedQuery(passage, ids, sentence, positions, sentence[positions])


def ranked(count: int) -> tuple[MipsIndex, torch.Tensor]:
    """An index and a query vector for which passage 0 is best, then 1, 2, ..."""
    return MipsIndex(np.linspace(count, 1, count, dtype=np.float16)[:, None]), torch.ones(1, 1)


# -- the two rules


def test_null_passage_is_first_and_the_best_other_passages_follow() -> None:
    knowledge = corpus([SENTENCE, *(other(i) for i in range(1, 12))])
    index, vector = ranked(12)
    chosen = choose_candidates([query()], vector, index, knowledge, CandidateRule(5, same_corpus=True))
    assert chosen.number_BK.tolist() == [[NULL_PASSAGE, 1, 2, 3, 4]]
    assert [e.tolist() for e in chosen.excluded] == [[0]]


def test_own_passage_is_a_candidate_like_others_where_nothing_is_excluded() -> None:
    bodies = [SENTENCE, SENTENCE, *(other(i) for i in range(2, 12))]
    knowledge = corpus(bodies, [[], [(3, 5)], *([] for _ in range(10))])
    index, vector = ranked(12)
    asked = [query()], vector, index, knowledge
    assert choose_candidates(*asked, CandidateRule(4, True)).number_BK.tolist() == [[NULL_PASSAGE, 2, 3, 4]]
    chosen = choose_candidates(*asked, CandidateRule(4, True, exclude_own=False))
    assert chosen.number_BK.tolist() == [[NULL_PASSAGE, 0, 1, 2]]
    assert [e.tolist() for e in chosen.excluded] == [[]]
    injected = choose_candidates(
        *asked, CandidateRule(4, True, injected=2, exclude_own=False), SpanIndex(knowledge)
    )
    assert injected.number_BK.tolist() == [[NULL_PASSAGE, 0, 1, 2]]


def test_duplicates_and_overlapping_windows_are_never_candidates() -> None:
    knowledge = corpus(
        [
            SENTENCE,
            SENTENCE,  # the same text under another title
            np.concatenate([other(2, 5), SENTENCE[:10]]),  # ten wordpieces of it in a row
            np.concatenate([other(3, 5), SENTENCE[:9]]),  # nine are allowed
            *(other(i) for i in range(4, 12)),
        ]
    )
    index, vector = ranked(12)
    chosen = choose_candidates([query()], vector, index, knowledge, CandidateRule(4, same_corpus=True))
    assert chosen.number_BK.tolist() == [[NULL_PASSAGE, 3, 4, 5]]
    assert chosen.excluded[0].tolist() == [0, 1, 2]


def test_own_passage_is_excluded_even_where_its_text_does_not_show_it() -> None:
    knowledge = corpus([other(i) for i in range(12)])  # the sentence is cut so that content would not tell
    index, vector = ranked(12)
    chosen = choose_candidates(
        [query(passage=2)], vector, index, knowledge, CandidateRule(4, same_corpus=True)
    )
    assert chosen.number_BK.tolist() == [[NULL_PASSAGE, 0, 1, 3]]


def test_with_another_corpus_numbers_mean_nothing_but_content_does() -> None:
    knowledge = corpus([other(0), SENTENCE, *(other(i) for i in range(2, 12))])
    index, vector = ranked(12)
    chosen = choose_candidates(
        [query(passage=0)], vector, index, knowledge, CandidateRule(4, same_corpus=False)
    )
    assert chosen.number_BK.tolist() == [[NULL_PASSAGE, 0, 2, 3]]
    assert chosen.excluded[0].tolist() == [1]


def test_many_duplicates_make_the_search_look_deeper() -> None:
    knowledge = corpus([SENTENCE] * 100 + [other(i) for i in range(4)])
    index, vector = ranked(104)
    chosen = choose_candidates([query()], vector, index, knowledge, CandidateRule(4, same_corpus=True))
    assert chosen.number_BK.tolist() == [[NULL_PASSAGE, 100, 101, 102]]
    assert chosen.excluded[0].tolist() == list(range(100))


def test_corpus_that_is_too_small_is_one_line() -> None:
    knowledge = corpus([SENTENCE, other(1), other(2)])
    index, vector = ranked(3)
    with pytest.raises(InputError, match="3 passages are too few: 4 candidates") as error:
        choose_candidates([query()], vector, index, knowledge, CandidateRule(4, same_corpus=True))
    assert "\n" not in str(error.value)
    assert choose_candidates(
        [query()], vector, index, knowledge, CandidateRule(3, True)
    ).number_BK.tolist() == [[-1, 1, 2]]


@pytest.mark.parametrize("injected", [0, 1])
def test_a_sentence_of_nearly_every_passage_gets_null_passages_in_place_of_those_that_repeat_it(
    injected, monkeypatch
) -> None:
    bodies = [np.concatenate([other(i, 5), SENTENCE]) for i in range(30)] + [other(40), other(41)]
    index, vector = ranked(32)
    asked = (
        [query()],
        vector,
        index,
        corpus(bodies),
        CandidateRule(5, True, injected),
        SpanIndex(corpus(bodies)),
    )
    chosen = choose_candidates(*asked)
    assert chosen.number_BK.tolist() == [[NULL_PASSAGE, 30, 31, NULL_PASSAGE, NULL_PASSAGE]]
    assert chosen.excluded[0].tolist() == list(range(30))
    assert chosen.not_in_rest()[0].tolist() == list(range(32))
    monkeypatch.setattr(candidates, "DEEPEST", 12)  # the first search finds 12 hits
    assert choose_candidates(*asked).number_BK.tolist() == [[NULL_PASSAGE] * 5]


def test_rules_hold_for_every_query_of_a_real_corpus(tiny_kb) -> None:
    tokens, draw = tiny_kb.tokens, np.random.default_rng(0)
    queries = draw_queries(
        tokens, np.arange(len(tiny_kb)), 40, draw, MaskingRule(tiny_kb.tokenizer.mask_id, 30)
    )
    index = MipsIndex(draw.normal(size=(len(tiny_kb), 8)).astype(np.float16))
    vectors = torch.from_numpy(draw.normal(size=(40, 8)).astype(np.float32))
    for injected in (0, 2):
        chosen = choose_candidates(
            queries, vectors, index, tokens, CandidateRule(6, True, injected), SpanIndex(tokens)
        )
        for one, row in zip(queries, chosen.number_BK, strict=True):
            assert row[0] == NULL_PASSAGE and len(set(row.tolist())) == 6
            assert one.passage not in row
            assert not any(repeats_text(one.original, tokens.body.row(n)) for n in row[1:])


# -- injected candidates


def holder_corpus(positives, count: int = 12) -> PassageTokens:
    """Passages of which some hold the span, tagged; the query is cut from passage 0."""
    bodies = [np.concatenate([SPAN, other(i)]) if i in positives else other(i) for i in range(count)]
    return corpus(bodies, [[(0, 2)] if i in positives else [] for i in range(count)])


HIDDEN = query(sentence=np.concatenate([other(0)[:3], SPAN, other(0)[3:]]), positions=(3, 4))


def injected(positives, candidates: int, count: int) -> list[int]:
    knowledge = holder_corpus({0, *positives})
    index, vector = ranked(12)
    chosen = choose_candidates(
        [HIDDEN], vector, index, knowledge, CandidateRule(candidates, True, count), SpanIndex(knowledge)
    )
    return chosen.number_BK[0].tolist()


def test_guided_candidates_are_the_best_holders_in_the_last_places() -> None:
    assert injected({8, 9, 11}, candidates=5, count=2) == [NULL_PASSAGE, 1, 2, 8, 9]


def test_holders_that_the_hits_brought_are_not_taken_twice() -> None:
    assert injected({1, 9}, candidates=5, count=2) == [NULL_PASSAGE, 1, 2, 9, 3]


def test_a_holder_among_the_hits_that_give_way_stays() -> None:
    assert injected({3, 9}, candidates=5, count=2) == [NULL_PASSAGE, 1, 2, 3, 9]


def test_without_holders_more_hits_stand_in() -> None:
    assert injected(set(), candidates=5, count=2) == [NULL_PASSAGE, 1, 2, 3, 4]


def test_guided_candidates_never_repeat_the_query() -> None:
    knowledge = corpus(
        [
            HIDDEN.original,
            *(other(i) for i in range(1, 40)),
            HIDDEN.original,
            np.concatenate([SPAN, other(41)]),
        ],
        [[(3, 5)], *([] for _ in range(1, 40)), [(3, 5)], [(0, 2)]],
    )
    index, vector = ranked(42)
    chosen = choose_candidates(
        [HIDDEN], vector, index, knowledge, CandidateRule(4, True, 2), SpanIndex(knowledge)
    )
    assert chosen.number_BK.tolist() == [[NULL_PASSAGE, 1, 41, 2]]


# -- hits of BM25


def with_bm25(found: list[int], count: int, positives=frozenset(), guided: int = 0) -> list[int]:
    """The candidates of `HIDDEN`, of which there are five; BM25 found the passages `found`."""
    knowledge = holder_corpus({0, *positives})
    index, vector = ranked(12)
    rule = CandidateRule(5, True, guided, bm25=count)
    chosen = choose_candidates(
        [HIDDEN], vector, index, knowledge, rule, SpanIndex(knowledge), np.array([found])
    )
    return chosen.number_BK[0].tolist()


def test_the_best_hits_of_bm25_are_the_last_candidates() -> None:
    assert with_bm25([9, 7, 8], 2) == [NULL_PASSAGE, 1, 2, 9, 7]


def test_hits_of_both_searches_are_taken_once() -> None:
    assert with_bm25([1, 9, 2], 2) == [NULL_PASSAGE, 1, 2, 9, 3]
    assert with_bm25([8, 9], 1, {8, 11}, 1) == [NULL_PASSAGE, 1, 2, 8, 9]


def test_the_text_of_the_query_is_no_candidate_of_bm25_either() -> None:
    assert with_bm25([0, 9], 2) == [NULL_PASSAGE, 1, 2, 9, 3]
    knowledge = corpus([HIDDEN.original, *(other(i) for i in range(1, 11)), HIDDEN.original])
    index, vector = ranked(12)
    rule = CandidateRule(4, True, bm25=2)
    chosen = choose_candidates([HIDDEN], vector, index, knowledge, rule, None, np.array([[11, 9, 8]]))
    assert chosen.number_BK.tolist() == [[NULL_PASSAGE, 1, 9, 8]]


def test_without_hits_of_bm25_more_hits_stand_in() -> None:
    assert with_bm25([NULL_PASSAGE, NULL_PASSAGE], 2) == [NULL_PASSAGE, 1, 2, 3, 4]


# -- the tensors of a step


def test_inputs_have_the_layouts_of_the_reference(tokenizer: Tokenizer) -> None:
    knowledge = corpus([[10, 11, 12], [20, 21], [30, 31, 32, 33]])
    cls, sep, mask, pad = tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.pad_id
    queries = [
        MaskedQuery(0, np.array([10, mask, 12]), np.array([10, 11, 12]), np.array([1]), np.array([11])),
        MaskedQuery(1, np.array([mask, mask]), np.array([20, 21]), np.array([0, 1]), np.array([20, 21])),
    ]
    numbers = np.array([[NULL_PASSAGE, 2, 1], [NULL_PASSAGE, 0, 2]])
    batch = read_inputs(queries, numbers, knowledge, tokenizer, LENGTHS)
    assert batch.queries.ids_BT.tolist() == [[cls, 10, mask, 12, sep], [cls, mask, mask, sep, pad]]
    assert batch.queries.segments_BT.sum() == 0
    # each distinct passage once: null, 0, 1, 2; titles on the retrieval side
    assert batch.passages.ids_BT.tolist() == [
        [cls, sep, sep, pad, pad, pad, pad, pad],
        [cls, 50, sep, 10, 11, 12, sep, pad],
        [cls, 51, sep, 20, 21, sep, pad, pad],
        [cls, 52, sep, 30, 31, 32, 33, sep],
    ]
    assert batch.passages.segments_BT[0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert batch.passages.segments_BT[3].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert batch.place_BK.tolist() == [[0, 3, 2], [0, 1, 3]]
    # the reader: query beside body, no title, candidate fastest
    real = [
        row[: int(m.sum())] for row, m in zip(batch.joint.ids_BT.tolist(), batch.joint.mask_BT, strict=True)
    ]
    assert real == [
        [cls, 10, mask, 12, sep, sep],
        [cls, 10, mask, 12, sep, 30, 31, 32, 33, sep],
        [cls, 10, mask, 12, sep, 20, 21, sep],
        [cls, mask, mask, sep, sep],
        [cls, mask, mask, sep, 10, 11, 12, sep],
        [cls, mask, mask, sep, 30, 31, 32, 33, sep],
    ]
    assert batch.joint.segments_BT[0].tolist()[:6] == [0, 0, 0, 0, 0, 1]
    assert batch.position_BM.tolist() == [[2, 0], [1, 2]]
    assert batch.target_BM.tolist() == [[11, 0], [20, 21]]
    assert batch.mask_BM.tolist() == [[1, 0], [1, 1]]


def test_masks_stand_at_their_positions_in_queries_and_joint_rows(tiny_kb) -> None:
    tokens, draw = tiny_kb.tokens, np.random.default_rng(0)
    lengths = Lengths(query=12, passage=20)  # so short that sentences and bodies are cut
    queries = draw_queries(
        tokens, np.arange(len(tiny_kb)), 20, draw, MaskingRule(tiny_kb.tokenizer.mask_id, 10)
    )
    numbers = np.concatenate(
        [np.full((20, 1), NULL_PASSAGE), draw.integers(len(tiny_kb), size=(20, 3))], axis=1
    )
    batch = read_inputs(queries, numbers, tokens, tiny_kb.tokenizer, lengths)
    for row, (one, count) in enumerate(zip(queries, batch.mask_BM.sum(dim=1).int().tolist(), strict=True)):
        places = batch.position_BM[row, :count]
        assert (batch.queries.ids_BT[row, places] == tiny_kb.tokenizer.mask_id).all()
        for joint_row in range(4 * row, 4 * row + 4):
            joint = batch.joint.ids_BT[joint_row]
            assert (joint[places] == tiny_kb.tokenizer.mask_id).all()
            assert joint[1 : 1 + len(one.ids)].tolist() == one.ids.tolist()
        assert batch.target_BM[row, :count].tolist() == one.original[(places - 1).numpy()].tolist()
    assert batch.joint.mask_BT.sum(dim=1).max() <= lengths.joint
    assert batch.passages.mask_BT.sum(dim=1).max() == lengths.passage
