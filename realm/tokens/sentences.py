"""Tokenizes sentences once: the wordpieces of a passage are joined from those of its sentences."""

import re
from collections.abc import Sequence

from realm.tokens.tokenizer import Encoding, Tokenizer

_SPACE = re.compile(r"[ \t\n\r]")
"""What every normalizer of BERT keeps as white space. It removes some characters that are white space for Python."""


class SentenceTokenizer:
    """Counts the wordpieces of sentences, and remembers them for the passages that are made from the sentences.

    The memory grows with the number of different sentences.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[str, Encoding] = {}

    def count(self, texts: Sequence[str]) -> list[int]:
        """Number of wordpieces of each text, without special tokens."""
        if not self._tokenizer.separates_at_spaces:
            return [len(ids) for ids in self._tokenizer.encode(texts)]
        new = list({text: None for text in texts if text not in self._known})
        self._known.update(zip(new, self._tokenizer.encode_with_offsets(new), strict=True))
        return [len(self._known[text].ids) for text in texts]

    def encode(self, texts: Sequence[str], sentences: Sequence[Sequence[tuple[int, int]]]) -> list[Encoding]:
        """The result of `Tokenizer.encode_with_offsets` for texts whose sentences are given as characters [start, end)."""
        joined = [self._joined(text, own) for text, own in zip(texts, sentences, strict=True)]
        others = [text for text, one in zip(texts, joined, strict=True) if one is None]
        encoded = iter(self._tokenizer.encode_with_offsets(others))
        return [next(encoded) if one is None else one for one in joined]

    def _joined(self, text: str, sentences: Sequence[tuple[int, int]]) -> Encoding | None:
        """None if a sentence was not counted, or if there may be a word that belongs to two sentences."""
        whole = Encoding([], [], [])
        before = 0
        for start, end in sentences:
            one = self._known.get(text[start:end])
            if one is None or (before and not _SPACE.search(text, before, start)):
                return None
            whole.ids.extend(one.ids)
            whole.starts.extend([start + place for place in one.starts])
            whole.ends.extend([start + place for place in one.ends])
            before = end
        return whole
