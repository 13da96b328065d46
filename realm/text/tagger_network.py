"""Finds sentences and names with a small convolutional network, which NumPy computes.

The network is trained to repeat the annotations of a spaCy pipeline (`recipes/realm_tagger.py`):

1. A text is cut into words and punctuation marks.
2. The input for a word is a sum of rows of tables. Hashes of the word, of its first and last three characters, and of its shape
   ("Xxx" for "Ada") select the rows. A further row is selected by the gap before the word: nothing, a space, a line break, or
   several line breaks.
3. In each layer, a word receives the states of the words before and after it.
4. The output for a word is a score for each label, and a score for the beginning of a sentence. Label 0 is for words outside of
   names. A name of kind k begins with label 2k + 1 and continues with label 2k + 2.

Axis letters: T words of some texts and an empty row after each text, F features, H width, L labels.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self
from zlib import crc32

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from realm.checksums import check_installed
from realm.errors import InputError, reason
from realm.files import read_json
from realm.text.corpus import Span

PACKAGED = Path(__file__).parent.parent / "assets" / "realm-tagger"
"""The folder of the packaged network."""
WEIGHTS, KINDS = "model.safetensors", "kinds.json"
ROWS = {"word": 1 << 14, "prefix": 1 << 12, "suffix": 1 << 12, "shape": 1 << 11}
"""Rows of each table. Two hashes select two rows of the table `word`, so that few words share both rows."""
COLUMNS = ("word", "word", "prefix", "suffix", "shape")
"""The table from which each feature of a word selects a row."""
GAPS = 4
MOST_WORDS = 1 << 17
"""Largest number of different words whose inputs stay in memory: 50 MB."""
AT_ONCE = 512
"""Words that are computed at a time, so that their states stay in the cache of a core."""
EPSILON = 1e-5
"""Constant of the layer norms."""

_WORD = re.compile(r"[\w\u0300-\u036f]{1,100}|[^\w\s]")
"""A word, with the accents that are characters of their own, or a punctuation mark. Longer words are cut, because words stay in
memory."""
_LONGEST_SHAPE, _LONGEST_RUN = 12, 3


class Words(NamedTuple):
    """The words of a text."""

    start_T: np.ndarray
    """Offset of the first character of each word."""
    end_T: np.ndarray
    gap_T: np.ndarray
    """What is before each word: 0 nothing, 1 a space, 2 a line break, 3 several line breaks or the beginning of the text."""


def cut(text: str) -> Words:
    """Cuts a text into words and punctuation marks."""
    bounds = np.array([match.span() for match in _WORD.finditer(text)], dtype=np.int64).reshape(-1, 2)
    start_T, end_T = bounds.T
    last_T = np.concatenate([[0], end_T[:-1]])[: len(start_T)]
    breaks = np.array([match.start() for match in re.finditer("\n", text)], dtype=np.int64)
    breaks_T = np.searchsorted(breaks, start_T) - np.searchsorted(breaks, last_T)
    gap_T = np.where(start_T > last_T, np.minimum(1 + breaks_T, GAPS - 1), 0)
    gap_T[:1] = GAPS - 1
    return Words(start_T, end_T, gap_T)


def features(word: str) -> list[int]:
    """The row that a word has in each table of `COLUMNS`."""
    lower = word.lower()
    texts = (lower, lower, lower[:3], lower[-3:], shape(word))
    return [
        crc32(text.encode("utf-8", "surrogatepass"), seed) % ROWS[table]
        for seed, (table, text) in enumerate(zip(COLUMNS, texts, strict=True))
    ]


def shape(word: str) -> str:
    """The kinds of the first characters of a word; more than three equal kinds in a row are written as three.

    >>> shape("Ada"), shape("iPhone"), shape("1815"), shape("'")
    ('Xxx', 'xXxxx', 'ddd', "'")
    """
    kinds = "".join(
        "d" if one.isdigit() else "X" if one.isupper() else "x" if one.isalpha() else one
        for one in word[:_LONGEST_SHAPE]
    )
    return re.sub(rf"(.)\1{{{_LONGEST_RUN},}}", lambda run: run[1] * _LONGEST_RUN, kinds)


class Network(NamedTuple):
    """The weights of the network."""

    tables: dict[str, np.ndarray]
    """Name of a table -> its rows [R, H]; `ROWS` has the numbers of rows, and the table `gap` has `GAPS` rows."""
    norms: list[tuple[np.ndarray, np.ndarray]]
    """Gain and offset [H] of the layer norm of the input and of each layer."""
    layers: list[tuple[np.ndarray, np.ndarray]]
    """Weight [H, 3H] and bias [H] of each layer."""
    output: tuple[np.ndarray, np.ndarray]
    """Weight [L + 1, H] and bias [L + 1]; the last score is that of the beginning of a sentence."""

    @classmethod
    def load(cls, file: Path) -> Self:
        """Reads the weights from a safetensors file."""
        weights = {name: value.astype(np.float32) for name, value in load_file(file).items()}

        def pairs(kind: str) -> list[tuple[np.ndarray, np.ndarray]]:
            numbers = range(sum(name.startswith(f"{kind}.") for name in weights) // 2)
            return [(weights[f"{kind}.{n}.weight"], weights[f"{kind}.{n}.bias"]) for n in numbers]

        tables = {name: weights[f"tables.{name}.weight"] for name in (*ROWS, "gap")}
        return cls(
            tables, pairs("norms"), pairs("layers"), (weights["output.weight"], weights["output.bias"])
        )

    def scores(self, input_TH: np.ndarray, word_T1: np.ndarray) -> np.ndarray:
        """Scores [T, L + 1] of words. `word_T1` is 1 for words, and 0 for the empty rows between texts."""
        reach = len(self.layers)  # a score depends on this number of words before and after the word
        parts = []
        for start in range(0, len(input_TH), AT_ONCE):
            first, end = max(0, start - reach), start + AT_ONCE
            near = slice(first, end + reach)
            parts.append(self._scores(input_TH[near], word_T1[near])[start - first : end - first])
        return np.concatenate(parts)

    def _scores(self, input_TH: np.ndarray, word_T1: np.ndarray) -> np.ndarray:
        state_TH = _norm(input_TH, *self.norms[0]) * word_T1
        beside_TF = np.zeros((len(state_TH), 3 * state_TH.shape[1]), dtype=np.float32)
        before_TH, itself_TH, after_TH = np.split(beside_TF, 3, axis=1)
        for (weight, bias), norm in zip(self.layers, self.norms[1:], strict=True):
            before_TH[1:], itself_TH[:], after_TH[:-1] = state_TH[:-1], state_TH, state_TH[1:]
            state_TH += _norm(np.maximum(beside_TF @ weight.T + bias, 0), *norm) * word_T1
        weight, bias = self.output
        scores: np.ndarray = state_TH @ weight.T + bias
        return scores


def _norm(state_TH: np.ndarray, gain: np.ndarray, offset: np.ndarray) -> np.ndarray:
    centred_TH = state_TH - state_TH.mean(axis=1, keepdims=True)
    variance_T1 = np.square(centred_TH).mean(axis=1, keepdims=True)
    return centred_TH / np.sqrt(variance_T1 + EPSILON) * gain + offset


class NetworkTagger:
    """Finds the sentences and names of texts."""

    def __init__(self, network: Network, kinds: Sequence[str]):
        """`kinds` are the kinds of names, such as "PERSON"."""
        self._network, self._kinds = network, kinds
        self._inputs = _Inputs(network)

    @classmethod
    def load(cls, folder: Path = PACKAGED) -> Self:
        """Loads a network from a folder.

        Raises:
            DamagedError: a file of the folder differs from its checksum, or is not JSON.
            InputError: the folder has no such network.
        """
        check_installed(folder)
        try:
            network, kinds = Network.load(folder / WEIGHTS), [str(kind) for kind in read_json(folder / KINDS)]
        except (OSError, KeyError, TypeError, SafetensorError) as error:
            raise InputError(
                f"{folder} has no network that finds names: {reason(error)}; `recipes/realm_tagger.py` makes such a folder"
            ) from error
        if len(network.output[1]) != 2 * len(kinds) + 2:
            raise InputError(
                f"{folder / WEIGHTS} was not made for the {len(kinds)} kinds of names in {KINDS}"
            )
        return cls(network, kinds)

    def annotate(self, texts: Sequence[str]) -> Iterator[tuple[list[tuple[int, int]], list[Span]]]:
        """Sentences and names of each text."""
        cuts = [cut(text) for text in texts]
        score_TL = self._network.scores(*self._inputs.of(texts, cuts))
        begins_T, label_T = score_TL[:, -1] > 0, score_TL[:, :-1].argmax(axis=1)
        first = 0
        for text, words in zip(texts, cuts, strict=True):
            own = slice(first, first + len(words.start_T))
            yield _sentences(text, words, begins_T[own]), self._names(words, label_T[own])
            first = own.stop + 1

    def _names(self, words: Words, label_T: np.ndarray) -> list[Span]:
        kind_T = (label_T + 1) // 2  # 0: no name
        begins_T = (kind_T > 0) & ((label_T % 2 == 1) | (kind_T != np.append(0, kind_T[:-1])[: len(kind_T)]))
        ends_T = (kind_T > 0) & (np.append(begins_T[1:], True) | (np.append(kind_T[1:], 0) == 0))[
            : len(kind_T)
        ]
        starts, ends = words.start_T[begins_T].tolist(), words.end_T[ends_T].tolist()
        kinds = [self._kinds[kind - 1] for kind in kind_T[begins_T].tolist()]
        return [Span(*one) for one in zip(starts, ends, kinds, strict=True)]


def _sentences(text: str, words: Words, begins_T: np.ndarray) -> list[tuple[int, int]]:
    begins_T[:1] = True
    starts = words.start_T[begins_T].tolist()
    return list(zip(starts, [*starts[1:], len(text)], strict=True)) if starts else []


class _Inputs(dict[str, int]):
    """The inputs of words: word -> row of `vectors`. The input of a word is computed when the word is first looked up.

    Row 0 of `vectors` is zero, and belongs to the empty rows between texts.
    """

    def __init__(self, network: Network):
        self._tables = network.tables
        self.vectors = np.zeros((1 << 10, network.tables["gap"].shape[1]), dtype=np.float32)

    def __missing__(self, word: str) -> int:
        row = len(self) + 1
        if row == len(self.vectors):
            self.vectors = np.concatenate([self.vectors, np.zeros_like(self.vectors)])
        columns = zip(COLUMNS, features(word), strict=True)
        self.vectors[row] = sum(self._tables[table][number] for table, number in columns)
        self[word] = row
        return row

    def of(self, texts: Sequence[str], cuts: Sequence[Words]) -> tuple[np.ndarray, np.ndarray]:
        """Inputs [T, H] of the words of some texts, with an empty row after each text; and [T, 1], 1 for words, else 0."""
        if len(self) > MOST_WORDS:
            self.clear()
        rows: list[int] = []
        for text, words in zip(texts, cuts, strict=True):
            bounds = zip(words.start_T.tolist(), words.end_T.tolist(), strict=True)
            rows += [self[text[start:end]] for start, end in bounds]
            rows.append(0)
        row_T = np.array(rows, dtype=np.int64)
        gap_T = np.concatenate([np.append(words.gap_T, 0) for words in cuts])
        return self.vectors[row_T] + self._tables["gap"][gap_T], (row_T > 0).astype(np.float32)[:, None]
