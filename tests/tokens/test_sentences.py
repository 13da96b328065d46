"""Wordpieces of passages that are joined from those of their sentences, compared with those of the tokenizer."""

import pickle
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from realm.store.settings import KnowledgeBaseConfig
from realm.tokens.sentences import SentenceTokenizer
from realm.tokens.tokenizer import SPECIAL, Tokenizer
from tests.store.tiny import TOKENIZER

PACKAGED = Tokenizer.load(KnowledgeBaseConfig().tokenizer)
# letters whose normal form is longer or depends on their neighbours, marks, characters that BERT removes, white space of Python
ODD = "aB.,'- \t\n\r\x00\x1c\x1f\x85\xa0\xad\u0301\u0323\u200b\u200d\u2028\u3000\ufeff\ufffdÉßİΣςǆﬁ漢字가각한🙂1½²["


def other_tokenizers() -> list[Tokenizer]:
    """Tokenizers with which a word can go on after white space."""
    words = [*SPECIAL, "a", "b", "##a", "##b", " ", "##."]
    vocabulary: Any = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    found = [FastTokenizer(vocabulary) for _ in range(4)]
    found[0].normalizer = normalizers.BertNormalizer()
    found[1].pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found[2].normalizer = normalizers.BertNormalizer()
    found[2].pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found[2].add_tokens([AddedToken("a. a", normalized=False)])
    found[3].normalizer = normalizers.BertNormalizer(clean_text=False)
    found[3].pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return [Tokenizer(one) for one in found]


def sentences_of(text: str, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """The parts of a text between the cuts, without the white space around them."""
    parts = []
    for start, end in pairwise([0, *sorted(cuts), len(text)]):
        part = text[start:end]
        if part.strip():
            parts.append((end - len(part.lstrip()), start + len(part.rstrip())))
    return parts


def check(tokenizer: Tokenizer, text: str, cuts: Sequence[int]) -> None:
    sentences = sentences_of(text, [cut for cut in cuts if cut <= len(text)])
    if not sentences:
        return
    first, end = sentences[0][0], sentences[-1][1]
    passage = text[first:end]
    own = [(a - first, b - first) for a, b in sentences]
    counted = SentenceTokenizer(tokenizer)
    parts = [passage[a:b] for a, b in own]
    assert counted.count(parts) == [len(ids) for ids in tokenizer.encode(parts)]
    assert counted.encode([passage, "never counted"], [own, [(0, 5), (6, 13)]]) == (
        tokenizer.encode_with_offsets([passage, "never counted"])
    )


@given(st.text(ODD, max_size=30) | st.text(max_size=20), st.lists(st.integers(0, 30), max_size=4))
def test_joined_wordpieces_are_those_of_the_whole_text(text: str, cuts: list[int]) -> None:
    for tokenizer in (PACKAGED, TOKENIZER):
        check(tokenizer, text, cuts)


def test_many_random_texts() -> None:
    draw = Random(1)
    for _ in range(3000):
        text = "".join(draw.choices(ODD + "    ", k=draw.randint(1, 40)))
        check(PACKAGED, text, draw.choices(range(41), k=draw.randint(0, 5)))


@pytest.mark.parametrize("number", range(3))
def test_a_tokenizer_that_may_join_words_across_white_space_reads_the_whole_text(number: int) -> None:
    tokenizer = other_tokenizers()[number]
    assert not tokenizer.separates_at_spaces
    for text in ("a. a b. a", "ab a. a.", "a b a b"):
        for cut in range(len(text)):
            check(tokenizer, text, [cut])


def test_a_sentence_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    encode = Tokenizer.encode_with_offsets
    monkeypatch.setattr(
        Tokenizer, "encode_with_offsets", lambda self, texts: read.extend(texts) or encode(self, texts)
    )
    counted = SentenceTokenizer(pickle.loads(pickle.dumps(TOKENIZER)))
    counted.count(["It is.", "It has.", "It is."])
    counted.encode(["It is. It has."], [[(0, 6), (7, 14)]])
    assert read == ["It is.", "It has."]
