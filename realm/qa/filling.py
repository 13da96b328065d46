"""`realm fill`, the worked example of the paper: predicts masked words of a sentence, and reports the effect of each passage.

A [MASK] in the sentence stands for one word y. If y has n wordpieces, x is the sentence with n masks in place of the [MASK],
and

    p(y|x) = sum_z p(z|x) prod_t p(y_t|z,x)     (REALM eq. 1 and 2)

where z is the null passage or a retrieved passage. The model reads a separate x for each n. The words that are predicted for a
[MASK] have as many wordpieces as the best of them.

Axis letters: K candidates with the null passage, P masked tokens, V vocabulary, A allowed wordpieces, H unfinished words.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from heapq import nlargest
from typing import Any, NamedTuple, NotRequired

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict  # before Python 3.12, pydantic does not accept typing.TypedDict

from realm.errors import InputError
from realm.index.versions import IndexVersion, complete_index
from realm.masking.candidates import CANDIDATES, read_inputs
from realm.masking.masked_queries import MaskedQuery
from realm.model.calibration import Method
from realm.model.device import autocast
from realm.model.folder import Model
from realm.model.modes import evaluating
from realm.qa.answers import RankedPassage
from realm.qa.pipeline import AnswerConfig, open_pair
from realm.search.retriever import Retriever
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import NULL_PASSAGE, query_inputs

PREDICTIONS = 5
"""Number of words that are predicted for a [MASK]."""
PIECES = 4
"""Largest number of wordpieces of a predicted word; a target may have more."""
BEAM = 32
"""Number of unfinished words that the beam search keeps."""
MASKS = 8
"""Largest number of [MASK] in a sentence; for each [MASK] the model reads the sentence up to `PIECES` times."""


@dataclass(frozen=True)
class Prediction:
    """A word for one mask; `probability` is p(y|x), marginalised over the passages."""

    text: str
    probability: float


@dataclass(frozen=True)
class Target(Prediction):
    """The word given by the caller; `without_retrieval` is p(y|z,x) of this word with the null passage as z."""

    without_retrieval: float


@dataclass(frozen=True)
class NullPassage:
    """The null passage: `probability` is p(z|x), `likelihood` p(y|z,x) of the target or the best words."""

    probability: float
    likelihood: float


@dataclass(frozen=True)
class PassageEffect(RankedPassage):
    """The effect of a passage on the target or the best words: `likelihood` is p(y|z,x), `utility` is log p(y|z,x) -
    log p(y|null,x) in nats."""

    likelihood: float
    utility: float


class FilledJson(TypedDict):
    """The output of `realm fill --json`."""

    sentence: str
    masks: list[list[Prediction]]
    null: NullPassage
    passages: list[PassageEffect]
    target: NotRequired[Target]


@dataclass(frozen=True)
class Filled:
    """Predictions for each [MASK], and the effects of the null passage and of the retrieved passages on y, best passage first.

    y is the target if the caller gave a target, else the best words of all [MASK] together.
    """

    sentence: str
    masks: list[list[Prediction]]
    null: NullPassage
    passages: list[PassageEffect]
    target: Target | None

    def to_json(self) -> dict[str, Any]:
        """An object with the keys of `FilledJson`."""
        return {name: value for name, value in asdict(self).items() if name != "target" or value is not None}

    def lines(self) -> list[str]:
        lines = [
            f"[MASK] {number}: " + ", ".join(f"{p.text} {p.probability:.2f}" for p in predictions)
            for number, predictions in enumerate(self.masks, start=1)
        ]
        if self.target is not None:
            lines.append(
                f"p({self.target.text}|x) {self.target.probability:.3g} with retrieval, "
                f"{self.target.without_retrieval:.3g} without"
            )
        lines.append(f"null passage: p(z|x) {self.null.probability:.2f}, p(y|z,x) {self.null.likelihood:.3g}")
        for effect in self.passages:
            lines.append(
                f"{effect.utility:+6.2f} nats  p(z|x) {effect.probability:.2f}, p(y|z,x) {effect.likelihood:.3g}  "
                f"{effect.name}: {' '.join(effect.text.split())[:90]}"
            )
        return lines


class _Word(NamedTuple):
    """A word for one mask, and its wordpieces."""

    prediction: Prediction
    pieces: tuple[int, ...]


def _probability(word: _Word) -> float:
    return word.prediction.probability


class _Read(NamedTuple):
    """The outputs of the model for one masked sentence with its K candidates; candidate 0 is the null passage."""

    numbers: np.ndarray
    """Numbers of the retrieved passages."""
    prior_K: Tensor
    """log p(z|x)"""
    logp_PKV: Tensor
    """log p(y_t|z,x)"""


class Filler:
    """Predicts the masked words of sentences with a model and a knowledge base."""

    def __init__(self, kb: KnowledgeBase, model: Model, version: IndexVersion, config: AnswerConfig):
        self.kb, self.model, self.version, self.config = kb, model, version, config
        self.retriever = Retriever(kb, version.index)

    @cached_property
    def _first_A(self) -> Tensor:
        """Wordpieces that can begin a word: the tokenizer turns the text of such a wordpiece into this wordpiece alone."""
        own = self.model.tokenizer.encode(self.model.tokenizer.vocabulary())
        return torch.tensor([number for number, pieces in enumerate(own) if pieces == [number]])

    @cached_property
    def _later_A(self) -> Tensor:
        """Wordpieces that continue a word."""
        return torch.tensor(sorted(self.model.tokenizer.continuing_ids), dtype=torch.int64)

    @classmethod
    def load(cls, kb: str, model: str, config: AnswerConfig) -> "Filler":
        opened, loaded = open_pair(kb, model, config.device)
        return cls(
            opened, loaded, complete_index(opened, loaded, model, config.mapped_index, config.search), config
        )

    @torch.no_grad()
    def fill(self, sentence: str, target: str | None = None, method: Method = "dense") -> Filled:
        """The best words for every [MASK], and the effect of each passage on these words, or on the `target`.

        `method` ranks the passages; p(z|x) is always computed by the embedder.

        Raises:
            InputError: the sentence has no [MASK], more than `MASKS` of them, or a [MASK] beyond the query length of the model.
                With a target, also: the sentence has several [MASK], or the target is too long or has characters that are not
                in the vocabulary.
        """
        visible = sentence.replace("[MASK]", " ")
        ids, places, room = self._masked(sentence)
        asked = None if target is None else self._pieces(target, len(places), room)
        narrow = self._read(ids, visible, method)
        best: list[list[_Word]] = []
        for number, place in enumerate(places):
            words = self._words(narrow, number, 1)
            for width in range(2, min(PIECES, 1 + room // len(places)) + 1):
                words += self._words(
                    self._read(self._widened(ids, {place: width}), visible, method), number, width
                )
            # Only words with as many wordpieces as the best word: other words have another input, in which p adds up to 1 too.
            width = len(max(words, key=_probability).pieces)
            best.append(nlargest(PREDICTIONS, (w for w in words if len(w.pieces) == width), key=_probability))
        chosen = [words[0].pieces for words in best] if asked is None else [asked]
        widths = dict(zip(places, map(len, chosen), strict=True))
        read = (
            narrow if max(widths.values()) == 1 else self._read(self._widened(ids, widths), visible, method)
        )
        pieces = torch.tensor([piece for word in chosen for piece in word])
        likelihood_K = read.logp_PKV[torch.arange(len(pieces)), :, pieces].sum(dim=0)
        passages = [
            PassageEffect(
                **vars(RankedPassage.of(passage, rank, float(read.prior_K[rank].exp()))),
                likelihood=float(likelihood_K[rank].exp()),
                utility=float(likelihood_K[rank] - likelihood_K[0]),
            )
            for rank, passage in enumerate(self.kb.passages(read.numbers), start=1)
        ]
        null = NullPassage(float(read.prior_K[0].exp()), float(likelihood_K[0].exp()))
        marginal = float((read.prior_K + likelihood_K).logsumexp(dim=0).exp())
        return Filled(
            sentence,
            [[word.prediction for word in words] for words in best],
            null,
            passages,
            None if target is None else Target(target, marginal, null.likelihood),
        )

    def _masked(self, sentence: str) -> tuple[list[int], list[int], int]:
        """The wordpieces of the sentence, the positions of [MASK], and the number of masks that can be added."""
        tokenizer, most = self.model.tokenizer, self.model.lengths.query - 2
        ids = tokenizer.encode_masked(sentence)
        places = [place for place, piece in enumerate(ids) if piece == tokenizer.mask_id]
        if not places:
            raise InputError(
                'the sentence has no [MASK]: write [MASK] for a word, as in "The [MASK] is the currency of the UK."'
            )
        if len(places) > MASKS:
            raise InputError(
                f"the sentence has {len(places)} masks, but at most {MASKS} are allowed: split the sentence"
            )
        if places[-1] >= most:
            raise InputError(
                f"the last [MASK] is wordpiece {places[-1] + 1}, but the model reads only the first {most}: shorten the "
                "sentence"
            )
        return ids, places, most - 1 - places[-1]

    def _pieces(self, target: str, masks: int, room: int) -> tuple[int, ...]:
        if masks > 1:
            raise InputError(
                f"with a target, the sentence must have one [MASK], but it has {masks}: write words for the other masks"
            )
        (pieces,) = self.model.tokenizer.encode([target])
        if not pieces or self.model.tokenizer.unk_id in pieces:
            raise InputError(
                f"the model's vocabulary has no wordpieces for the target {target!r}: choose another word"
            )
        if len(pieces) > 1 + room:
            raise InputError(
                f"the target has {len(pieces)} wordpieces, but the model can read only {1 + room} in place of the [MASK]: "
                "shorten the sentence"
            )
        return tuple(pieces)

    def _widened(self, ids: Sequence[int], widths: dict[int, int]) -> list[int]:
        """The sentence with `widths[place]` masks in place of the mask at each `place`."""
        return [piece for place, piece in enumerate(ids) for _ in range(widths.get(place, 1))]

    def _read(self, ids: Sequence[int], visible: str, method: Method) -> _Read:
        model, query = self.model, self._query(ids)
        inputs = query_inputs([query.ids], model.tokenizer, model.lengths).to(model.device)
        with evaluating(model.embedder, model.reader), autocast(model.device, self.config.precision):
            query_BD = model.embedder.query(inputs)
            _, number_BK = self.retriever.search([visible], CANDIDATES - 1, method, query_BD)
            numbers = number_BK[0][number_BK[0] != NULL_PASSAGE]
            places = np.arange(NULL_PASSAGE, len(numbers))[None]  # the null passage, then the hits
            batch = read_inputs(
                [query], places, self.kb.tokens_of(numbers), model.tokenizer, model.lengths
            ).to(model.device)
            _, score_BK = model.embedder.score(batch.queries, batch.passages, batch.place_BK)
            logp_PKV = model.reader.vocabulary_logp(batch.joint, batch.position_BM, batch.mask_BM)
        return _Read(numbers, score_BK[0].log_softmax(dim=0).cpu(), logp_PKV.cpu())

    def _query(self, ids: Sequence[int]) -> MaskedQuery:
        read = np.array(ids[: self.model.lengths.query - 2], dtype=np.int64)
        positions = np.flatnonzero(read == self.model.tokenizer.mask_id)
        return MaskedQuery(NULL_PASSAGE, read, read, positions, read[positions])

    def _words(self, read: _Read, first: int, width: int) -> list[_Word]:
        """The best words of `width` wordpieces for the masked tokens from `first` on, by beam search over p(y|x).

        Sequences of wordpieces that the tokenizer never makes from a text are left out, because no training text has them.
        """
        logp_HK, found_HP = read.prior_K[None], torch.empty(1, 0, dtype=torch.int64)
        for place in range(width):
            allowed_A = self._later_A if place else self._first_A
            logp_HKA = logp_HK[:, :, None] + read.logp_PKV[first + place][None, :, allowed_A]
            score_F = logp_HKA.logsumexp(dim=1).flatten()
            best_H = score_F.topk(min(max(BEAM, PREDICTIONS), len(score_F))).indices
            word_H, piece_H = best_H // max(1, len(allowed_A)), best_H % max(1, len(allowed_A))
            logp_HK = logp_HKA[word_H, :, piece_H]
            found_HP = torch.cat([found_HP[word_H], allowed_A[piece_H, None]], dim=1)
        probability_H = logp_HK.logsumexp(dim=1).exp().tolist()
        found, tokenizer = found_HP.tolist(), self.model.tokenizer
        words = ["".join(p.removeprefix("##") for p in tokenizer.tokens(pieces)) for pieces in found]
        own = tokenizer.encode(words)
        return [
            _Word(Prediction(word, probability), tuple(pieces))
            for word, probability, pieces, tokenized in zip(words, probability_H, found, own, strict=True)
            if pieces == tokenized
        ]
