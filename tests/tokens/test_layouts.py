"""Layouts against the reference's tables, offsets against the text itself."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from realm.errors import InputError
from realm.tokens.layouts import (
    Lengths,
    Ragged,
    Tokens,
    joint_inputs,
    pack,
    passage_inputs,
    passage_rows,
    query_inputs,
)
from realm.tokens.tokenizer import Tokenizer

TEXTS = ["The pound sterling is the currency of the United Kingdom.", "Paris, in France: a city!"] * 20
LENGTHS = Lengths(query=8, passage=12)
IDS = st.lists(st.integers(5, 99), max_size=15)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, vocab_size=120)


def rows(tokens, tokenizer):
    return [
        (ids[: int(mask.sum())], segments[: int(mask.sum())])
        for ids, mask, segments in zip(
            tokens.ids_BT.tolist(), tokens.mask_BT, tokens.segments_BT.tolist(), strict=True
        )
    ]


def test_layouts_are_those_of_the_reference_table(tokenizer):
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert rows(query_inputs([[7, 8]], tokenizer, LENGTHS), tokenizer) == [([cls, 7, 8, sep], [0] * 4)]
    assert rows(passage_inputs([[7]], [[8, 9]], tokenizer, LENGTHS), tokenizer) == [
        ([cls, 7, sep, 8, 9, sep], [0, 0, 0, 1, 1, 1])
    ]
    assert rows(joint_inputs([[7]], [[8, 9]], tokenizer, LENGTHS), tokenizer) == [
        ([cls, 7, sep, 8, 9, sep], [0, 0, 0, 1, 1, 1])
    ]


def test_null_passage_is_an_empty_title_and_an_empty_body(tokenizer):
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert rows(passage_inputs([[]], [[]], tokenizer, LENGTHS), tokenizer) == [([cls, sep, sep], [0, 0, 1])]
    assert rows(joint_inputs([[7]], [[]], tokenizer, LENGTHS), tokenizer) == [
        ([cls, 7, sep, sep], [0, 0, 0, 1])
    ]


def test_reader_layout_has_the_golden_cut_of_the_reference(tokenizer):
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    packed = pack([[[7, 8], [20, 21, 22, 21, 22]]], tokenizer, max_length=8)
    assert packed.ids_BT.tolist() == [[cls, 7, 8, sep, 20, 21, 22, sep]]


def test_query_never_takes_more_than_its_share_of_a_joint_input(tokenizer):
    ((ids, segments),) = rows(joint_inputs([list(range(10, 40))], [[50, 51]], tokenizer, LENGTHS), tokenizer)
    assert ids == [tokenizer.cls_id, *range(10, 16), tokenizer.sep_id, 50, 51, tokenizer.sep_id]
    assert segments == [0] * 8 + [1] * 3


@given(
    st.lists(
        st.lists(st.lists(st.integers(5, 99), max_size=15), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    st.integers(8, 30),
)
def test_packing_spends_its_budget_left_to_right(sequences, max_length):
    tokenizer = Tokenizer.train(TEXTS, vocab_size=120)
    packed = pack(sequences, tokenizer, max_length)
    for (ids, segments), row in zip(rows(packed, tokenizer), sequences, strict=True):
        room, expected, expected_segments = max_length - 1 - len(row), [tokenizer.cls_id], [0]
        for number, sequence in enumerate(row):
            kept = sequence[:room]
            room -= len(kept)
            expected += [*kept, tokenizer.sep_id]
            expected_segments += [number] * (len(kept) + 1)
        assert (ids, segments) == (expected, expected_segments)
        assert len(ids) <= max_length


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=6), st.integers(3, 30), st.randoms())
def test_passages_packed_together_are_those_packed_one_by_one(passages, longest, random):
    tokenizer, lengths = Tokenizer.train(TEXTS, vocab_size=120), Lengths(query=8, passage=longest)
    titles, bodies = (
        Ragged(np.array([i for row in rows for i in row], dtype=np.int32), np.cumsum([0, *map(len, rows)]))
        for rows in zip(*passages, strict=True)
    )
    numbers = np.array(random.choices(range(len(passages)), k=4))
    together = passage_rows(titles, bodies, numbers, tokenizer, lengths)
    one_by_one = passage_inputs(*zip(*(passages[n] for n in numbers), strict=True), tokenizer, lengths)
    for name in ("ids_BT", "mask_BT", "segments_BT"):
        one, other = getattr(together, name), getattr(one_by_one, name)
        assert torch.equal(one, other) and one.dtype == other.dtype, name


@given(st.text(max_size=60))
def test_offsets_of_wordpieces_are_ascending_and_lie_in_the_text(text):
    tokenizer = Tokenizer.train(TEXTS, vocab_size=120)
    (encoding,) = tokenizer.encode_with_offsets([text])
    assert all(0 <= s <= e <= len(text) for s, e in zip(encoding.starts, encoding.ends, strict=True))
    assert encoding.starts == sorted(encoding.starts)
    assert tokenizer.encode([text])[0] == encoding.ids


def test_offsets_point_at_the_words(tokenizer):
    text = "Paris, in France"
    (encoding,) = tokenizer.encode_with_offsets([text])
    spelled = "".join(text[s:e] for s, e in zip(encoding.starts, encoding.ends, strict=True))
    assert spelled == text.replace(" ", "")


def test_masked_sentence_keeps_its_masks(tokenizer):
    ids = tokenizer.encode_masked("The [MASK] is the currency")
    assert ids.count(tokenizer.mask_id) == 1
    assert ids[1] == tokenizer.mask_id


def test_saved_tokenizer_has_the_same_fingerprint(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
    assert Tokenizer.train(TEXTS, vocab_size=90).fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("content", [None, "not json", "{}"])
def test_folder_without_a_tokenizer_is_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError) as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_rows_are_cut_to_their_longest(tokenizer):
    import torch

    tokens = query_inputs([[7], [7, 8, 9]], tokenizer, LENGTHS)
    assert tokens.rows(torch.tensor([0])).ids_BT.tolist() == [[tokenizer.cls_id, 7, tokenizer.sep_id]]
    assert np.array_equal(tokens.rows(torch.tensor([1])).ids_BT, tokens.ids_BT[1:])


def test_same_texts_train_the_same_vocabulary():
    words = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]  # nothing but ties
    first, again = (Tokenizer.train(words, vocab_size=150) for _ in range(2))
    assert first.fingerprint == again.fingerprint
    assert first.vocab_size == 150
    assert all(first.unk_id not in ids for ids in first.encode(["mab", "tuf skel"]))


def test_trained_pieces_spell_the_texts(tokenizer):
    for text in TEXTS[:2]:
        pieces = tokenizer.tokens(tokenizer.encode([text])[0])
        assert "".join(piece.removeprefix("##") for piece in pieces) == text.lower().replace(" ", "")
    frequent = Tokenizer.train(["tarnished tarnish tarn"] * 9, vocab_size=60)
    assert frequent.tokens(frequent.encode(["Tarn tarnish"])[0]) == ["tarn", "tarnish"]


def test_special_words_in_a_text_are_text(tokenizer):
    special = {tokenizer.sep_id, tokenizer.mask_id, tokenizer.cls_id, tokenizer.pad_id}
    for text in ("a [SEP] b", "[MASK]", "[CLS] [PAD]"):
        assert not special & set(tokenizer.encode([text])[0])
        assert not special & set(tokenizer.encode_with_offsets([text])[0].ids)


# -- fingerprints

PIECES = ["aa", "##aa", "a", "##a", "\u00e9", "\u4e2d", "A", "##\u4e2d", "e", "--aa"]
PROBES = ["aaaa aa a", "AA A", "\u00e9 e", "\u4e2d\u4e2d", "aaaaaa", "a\u0000a", "zz"]


@st.composite
def behaviours(draw) -> FastTokenizer:
    """A tokenizer that differs from another one in vocabulary or flags, or in nothing."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *draw(st.permutations(PIECES[:4])), *PIECES[4:]]
    pieces = pieces[: draw(st.integers(12, 15))]
    fast = FastTokenizer(
        models.WordPiece(
            {piece: i for i, piece in enumerate(pieces)},
            unk_token=draw(st.sampled_from(["[UNK]", "a"])),
            max_input_chars_per_word=draw(st.sampled_from([3, 100])),
            continuing_subword_prefix=draw(st.sampled_from(["##", "--"])),
        )
    )
    fast.normalizer = normalizers.BertNormalizer(
        clean_text=draw(st.booleans()),
        handle_chinese_chars=draw(st.booleans()),
        strip_accents=draw(st.sampled_from([None, True, False])),
        lowercase=draw(st.booleans()),
    )
    fast.pre_tokenizer = draw(
        st.sampled_from([pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Whitespace()])
    )
    return fast


@given(behaviours(), behaviours())
def test_tokenizers_that_cut_texts_differently_have_different_fingerprints(one, other):
    mine, others = Tokenizer(one), Tokenizer(other)
    if mine.encode_with_offsets(PROBES) != others.encode_with_offsets(PROBES):
        assert mine.fingerprint != others.fingerprint


@given(behaviours(), st.randoms(use_true_random=False))
def test_another_spelling_of_the_same_tokenizer_has_the_same_fingerprint(fast, random):
    mine = Tokenizer(fast)
    spelled = json.loads(mine.as_huggingface().to_str())  # with its special tokens and its post-processor
    vocabulary = list(spelled["model"]["vocab"].items())
    random.shuffle(vocabulary)
    spelled["model"]["vocab"] = dict(vocabulary)
    spelled["padding"] = None
    if spelled["normalizer"]["strip_accents"] is None:
        spelled["normalizer"]["strip_accents"] = spelled["normalizer"]["lowercase"]
    other = FastTokenizer.from_str(json.dumps(dict(reversed(spelled.items())), indent=3))
    other.enable_truncation(4)
    other.decoder = decoders.WordPiece()
    other = Tokenizer(other)
    assert other.encode_with_offsets(PROBES) == mine.encode_with_offsets(PROBES)
    assert other.fingerprint == mine.fingerprint


def test_words_that_a_tokenizer_takes_whole_are_part_of_its_fingerprint(tokenizer):
    other = tokenizer.as_huggingface()
    other.add_tokens(["currency of"])
    assert Tokenizer(other).fingerprint != tokenizer.fingerprint


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_lengths_of_chosen_rows_are_those_of_their_tokens(lengths, data):
    mask_BT = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    tokens = Tokens(torch.arange(mask_BT.numel()).view(mask_BT.shape), mask_BT, mask_BT)
    assert tokens.length_B.tolist() == lengths
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    part = tokens.rows(torch.tensor(chosen))
    assert part.length_B.tolist() == part.mask_BT.sum(dim=1).tolist() == [lengths[row] for row in chosen]
    assert torch.equal(part.ids_BT, tokens.ids_BT[chosen, : max(lengths[row] for row in chosen)])
    assert part.to(torch.device("meta")).length_B.device.type == "cpu"
