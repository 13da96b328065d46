"""The rows of masked-LM training: what is masked and shown, and which passage a sentence is read with."""

import math
from collections import Counter

import numpy as np
import pytest

from realm.masking import masked_rows
from realm.masking.masked_rows import RowMaker
from realm.store.schema import PassageTokens, Ragged
from realm.tokens.layouts import Lengths

LENGTHS = Lengths(query=20, passage=32)
"""Shorter than the towns' passages, so that everything is cut somewhere."""


def ragged(rows) -> Ragged:
    offsets = np.cumsum([0] + [len(r) for r in rows])
    return Ragged(np.array([x for r in rows for x in r], dtype=np.int32), offsets)


def batches(kb, reading: float, count: int = 30, lengths: Lengths = LENGTHS):
    maker = RowMaker(kb.tokens, kb.tokenizer, lengths)
    for seed in range(count):
        yield maker.batch(np.arange(len(kb)), 8, reading, np.random.default_rng(seed))


def rows_of(rows):
    """Per row: its tokens, its segments, and {position: target}."""
    targets = [{} for _ in rows.tokens.ids_BT]
    for row, position, target in zip(*(t.tolist() for t in rows[1:]), strict=True):
        targets[row][position] = target
    real = rows.tokens.mask_BT.sum(dim=1).tolist()
    for ids, segments, length, wanted in zip(
        rows.tokens.ids_BT.tolist(), rows.tokens.segments_BT.tolist(), real, targets, strict=True
    ):
        yield ids[:length], segments[:length], wanted


def restored(ids: list[int], targets: dict[int, int]) -> list[int]:
    return [targets.get(place, token) for place, token in enumerate(ids)]


def test_plain_rows_are_passages_whose_targets_undo_the_masks(tiny_kb) -> None:
    tokenizer = tiny_kb.tokenizer
    bodies = [tiny_kb.tokens.body.row(n).tolist() for n in range(len(tiny_kb))]
    titled = visible = masked = 0
    for (rows,) in batches(tiny_kb, reading=0.0):
        for ids, segments, targets in rows_of(rows):
            first = segments.index(1)
            body = restored(ids, targets)[first:-1]
            (owner,) = [n for n, b in enumerate(bodies) if b[: len(body)] == body]
            title = ids[1 : first - 1]
            assert title in ([], tiny_kb.tokens.title.row(owner).tolist())
            assert ids[0] == tokenizer.cls_id and ids[first - 1] == ids[-1] == tokenizer.sep_id
            assert all(first <= place < len(ids) - 1 for place in targets)
            assert tokenizer.mask_id not in restored(ids, targets)
            titled += bool(title)
            masked += sum(ids[place] == tokenizer.mask_id for place in targets)
            visible += sum(ids[place] != tokenizer.mask_id for place in targets)
    assert 0.3 < titled / 240 < 0.7
    assert 0.05 < visible / (visible + masked) < 0.16


def test_reading_rows_are_a_sentence_beside_its_passage_one_close_to_it_another_holder_or_none(
    tiny_kb,
) -> None:
    tokens = tiny_kb.tokens
    kinds = {"own": 0, "none": 0, "other": 0}
    bodies = [tokens.body.row(n).tolist() for n in range(len(tiny_kb))]
    for (rows,) in batches(tiny_kb, reading=1.0, lengths=Lengths(query=20, passage=60)):
        for ids, segments, targets in rows_of(rows):
            first = segments.index(1)
            sentence, beside = restored(ids, targets)[1 : first - 1], ids[first:-1]
            assert len(targets) >= 1 and all(0 < place < first - 1 for place in targets)
            assert all(ids[place] == tiny_kb.tokenizer.mask_id for place in targets)
            owners = [
                n
                for n in range(len(tiny_kb))
                for start, end in zip(
                    tokens.sentences.row(n),
                    np.append(tokens.sentences.row(n)[1:], len(tokens.body.row(n))),
                    strict=True,
                )
                if tokens.body.row(n)[start:end][:18].tolist() == sentence
            ]
            assert len(owners) == 1
            if not beside:
                kinds["none"] += 1
            elif beside == bodies[owners[0]]:
                kinds["own"] += 1
            else:
                kinds["other"] += 1
                away = (bodies.index(beside) - owners[0]) % len(bodies)
                assert away in (1, 2, len(bodies) - 1, len(bodies) - 2) or set(targets.values()) & set(beside)
    total = sum(kinds.values())
    assert abs(kinds["none"] / total - masked_rows.NO_PASSAGE) < 0.08
    assert abs(kinds["own"] / total - masked_rows.OWN_PASSAGE) < 0.12


@pytest.mark.parametrize("own", [5, 0])
def test_passage_beside_a_sentence_is_of_each_kind_as_often_as_meant(tiny_kb, own) -> None:
    """Twelve passages, of which three hold the span; the first one has neighbours on one side only."""
    span, count, draws = [7, 8], 12, 4000
    positives = [own, (own + 4) % count, (own + 7) % count]
    tokens = PassageTokens(
        title=ragged([[9]] * count),
        body=ragged([[100 + n, *(span if n in positives else [20, 21])] for n in range(count)]),
        sentences=ragged([[0]] * count),
        span_starts=ragged([[1] if n in positives else [] for n in range(count)]),
        span_ends=ragged([[3] if n in positives else [] for n in range(count)]),
    )
    maker, rng = RowMaker(tokens, tiny_kb.tokenizer, LENGTHS), np.random.default_rng(0)
    drawn = [maker.beside(own, np.array(span), rng) for _ in range(draws)]
    found = Counter(int(body[0]) - 100 if len(body) else None for body in drawn)
    other = 1 - masked_rows.OWN_PASSAGE - masked_rows.NEAR_PASSAGE - masked_rows.NO_PASSAGE
    near = [n for n in range(count) if 0 < abs(n - own) <= 2]
    expected = {
        own: masked_rows.OWN_PASSAGE,
        None: masked_rows.NO_PASSAGE,
        **{n: masked_rows.NEAR_PASSAGE / len(near) for n in near},
        **dict.fromkeys(positives[1:], other / 2),
    }
    assert found.keys() <= expected.keys()
    for kind, share in expected.items():
        assert abs(found[kind] / draws - share) < 4 * math.sqrt(share * (1 - share) / draws) + 1e-9


def test_sentence_whose_span_stands_nowhere_else_gets_its_own_passage_instead_of_anothers(
    tiny_kb, monkeypatch
) -> None:
    tokens = PassageTokens(
        title=ragged([[9]] * 3),
        body=ragged([[7, 8], [20], [21]]),
        sentences=ragged([[0]] * 3),
        span_starts=ragged([[0], [], []]),
        span_ends=ragged([[2], [], []]),
    )
    for name in ("OWN_PASSAGE", "NEAR_PASSAGE", "NO_PASSAGE"):
        monkeypatch.setattr(masked_rows, name, 0.0)
    maker, rng = RowMaker(tokens, tiny_kb.tokenizer, LENGTHS), np.random.default_rng(0)
    for _ in range(20):
        assert maker.beside(0, np.array([7, 8]), rng).tolist() == [7, 8]


def test_only_passage_of_a_corpus_stands_beside_its_own_sentences(tiny_kb, monkeypatch) -> None:
    tokens = PassageTokens(*(ragged([row]) for row in ([9], [7, 8], [0], [0], [2])))
    monkeypatch.setattr(masked_rows, "NEAR_PASSAGE", 1.0)
    monkeypatch.setattr(masked_rows, "NO_PASSAGE", 0.0)
    maker, rng = RowMaker(tokens, tiny_kb.tokenizer, LENGTHS), np.random.default_rng(0)
    assert maker.beside(0, np.array([7, 8]), rng).tolist() == [7, 8]


def test_batch_mixes_both_kinds_in_their_share(tiny_kb) -> None:
    for reading, plain in batches(tiny_kb, reading=0.25, count=5):
        assert (len(reading.tokens.ids_BT), len(plain.tokens.ids_BT)) == (2, 6)


def test_sentence_of_no_wordpieces_does_no_harm(tiny_kb) -> None:
    """Such as one of control characters, which the tokenizer drops."""
    draw = np.random.default_rng(0)
    tokens = PassageTokens(
        title=ragged([[9], [9]]),
        body=ragged([draw.integers(10, 99, 12), draw.integers(10, 99, 9)]),
        sentences=ragged([[0, 5, 5, 12], [0, 0]]),
        span_starts=ragged([[1], []]),
        span_ends=ragged([[3], []]),
    )
    maker = RowMaker(tokens, tiny_kb.tokenizer, LENGTHS)
    for seed in range(50):
        rows = maker.batch(np.arange(2), 8, 1.0, np.random.default_rng(seed))
        assert all(len(part.row_P) for part in rows)
