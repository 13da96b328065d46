"""Scores of answers and rankings: exact match, F1, pattern match, recall, reciprocal rank. This file does not need torch.

The scores are equal to those of two published scripts: the script of ORQA, which REALM uses, and the script that SQuAD, DPR and
FiD share. Where the scripts differ, `Scoring` selects the rule.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypedDict

import numpy as np

from realm.qa.question_files import Question, compiled

RECALL_AT = (1, 5, 20, 100)
"""Ranks at which the tables and `realm evaluate` report the recall."""
RANKS = (1, 5, 20)
"""Ranks at which the recall of retrieval alone is reported: by the probe, during training, and in the demo."""
Recall = TypedDict("Recall", {"1": float, "5": float, "20": float})
"""Percentage of queries with a hit in the top 1, 5 and 20 (`RANKS`)."""

Normalisation = Literal["orqa", "squad"]
RegexHow = Literal["search", "match"]
Containment = Literal["tokens", "substring"]


@dataclass(frozen=True)
class Scoring:
    """Rules by which texts are compared; the constants `ORQA` and `DPR` are the rules of the published scripts."""

    normalise: Normalisation = "orqa"
    """Normalisation of predictions and answers for exact match and F1: with Unicode decomposition (ORQA) or without (SQuAD)."""
    regex: RegexHow = "search"
    """A pattern must match anywhere in the prediction ("search", the rule of CuratedTREC), or at the start of the prediction
    ("match", ORQA)."""
    contains: Containment = "tokens"
    """A passage must contain an answer as a sequence of whole tokens ("tokens", DPR), or as a substring ("substring", ORQA)."""


OURS = Scoring()
ORQA = Scoring("orqa", "match", "substring")
DPR = Scoring("squad", "search", "tokens")
SCORINGS = {"realm": OURS, "orqa": ORQA, "dpr": DPR, "squad": DPR}
"""Name of a publication -> rules. DPR and SQuAD have the same rules."""


def normalise_answer(text: str, normalisation: Normalisation = "orqa") -> str:
    """The text in lower case, without ASCII punctuation and articles; with "orqa", characters are decomposed first (NFD).

    Words are separated by single spaces. Accents are decomposed, but not removed, so "Café" and "cafe" stay different (ORQA
    `eval_utils`; SQuAD `evaluate-v1.1`).

    >>> normalise_answer("The  U.S. Dollar!")
    'us dollar'
    """
    if normalisation == "orqa":
        text = unicodedata.normalize("NFD", text)
    text = text.lower().translate(_DELETE_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(prediction: str, answers: Sequence[str], normalisation: Normalisation = "orqa") -> bool:
    """Whether the normalised prediction is equal to one of the normalised answers."""
    predicted = normalise_answer(prediction, normalisation)
    return any(predicted == normalise_answer(answer, normalisation) for answer in answers)


def regex_match(prediction: str, patterns: Sequence[str], how: RegexHow = "search") -> bool:
    """Whether one of the patterns matches; case is ignored, and ^ and $ match at each line.

    `how` is the rule of `Scoring.regex`.
    """
    return any(getattr(compiled(pattern), how)(prediction) is not None for pattern in patterns)


def f1(prediction: str, answers: Sequence[str], normalisation: Normalisation = "orqa") -> float:
    """The largest F1 of the tokens of the prediction and of an answer, between 0 and 1 (SQuAD); 0 for two empty texts.

    >>> round(f1("the river Nile", ["Nile", "Amazon"]), 3)
    0.667
    """
    predicted = Counter(normalise_answer(prediction, normalisation).split())
    return max(
        (_token_f1(predicted, Counter(normalise_answer(a, normalisation).split())) for a in answers),
        default=0,
    )


def _token_f1(predicted: Counter[str], answer: Counter[str]) -> float:
    common = (predicted & answer).total()
    return 2 * common / (predicted.total() + answer.total()) if common else 0.0


def is_correct(prediction: str, question: Question, scoring: Scoring = OURS) -> bool:
    """Whether the prediction is an exact match, or matches a pattern if the question has patterns."""
    if question.regex:
        return regex_match(prediction, question.answers, scoring.regex)
    return exact_match(prediction, question.answers, scoring.normalise)


def has_answer(text: str, question: Question, contains: Containment = "tokens") -> bool:
    """Whether a text contains an answer, so that the text is a hit for recall@k.

    "tokens": the text must contain the answer as a sequence of whole tokens, apart from case and Unicode form (DPR), so that
    "1" is not found in "2018". "substring": the text must contain the answer as an exact substring (block labels of ORQA).
    Patterns are searched in both cases.

    >>> q = Question("1", "who painted guernica?", ("Pablo Picasso",))
    >>> has_answer("Guernica is a painting by PABLO PICASSO.", q), has_answer("Pablo Picassos", q)
    (True, False)
    """
    if question.regex:
        return regex_match(text, question.answers)
    if contains == "substring":
        return any(answer in text for answer in question.answers)
    tokens = _tokens(text)
    return any(found in tokens for found in map(_tokens, question.answers) if found.strip())


def contains_answer(prediction: str, question: Question, scoring: Scoring = OURS) -> bool:
    """Whether the prediction is correct, or contains an answer as `has_answer` defines it. People accept most such answers.

    >>> q = Question("1", "who discovered penicillin?", ("Alexander Fleming",))
    >>> is_correct("Sir Alexander Fleming", q), contains_answer("Sir Alexander Fleming", q)
    (False, True)
    """
    return is_correct(prediction, question, scoring) or has_answer(prediction, question, scoring.contains)


def is_acceptable(prediction: str, question: Question, scoring: Scoring = OURS) -> bool:
    """Whether the prediction counts as right for probabilities: `contains_answer`, or one piece of an answer with at least half
    of its words.

    Answers of SQuAD and Natural Questions are often longer than people need. Some halves are wrong ("South" of "South Korea").

    >>> q = Question("1", "how many people visited the palace?", ("476,000 people",))
    >>> contains_answer("476,000", q), is_acceptable("476,000", q)
    (False, True)
    """
    contained = contains_answer(prediction, question, scoring)
    if contained or question.regex:
        return contained
    predicted = normalise_answer(prediction, scoring.normalise)
    return any(_is_half(predicted, normalise_answer(one, scoring.normalise)) for one in question.answers)


def stands_for(text: str, other: str) -> bool:
    """As `is_acceptable`, for two normalised texts (`normalise_answer`): whether `text` contains the right answer `other` as
    whole words, or is one piece of `other` with at least half of its words. An empty text stands only for itself.

    >>> stands_for("sir alexander fleming", "fleming"), stands_for("fleming", "sir alexander fleming")
    (True, False)
    """
    if not text or not other:
        return text == other
    return _is_piece(other, text) or _is_half(text, other)


def _is_half(part: str, text: str) -> bool:
    """Whether `part` is one piece of `text` with at least half of its words. Both are normalised."""
    return 2 * len(part.split()) >= len(text.split()) > 0 and _is_piece(part, text)


def _is_piece(part: str, text: str) -> bool:
    return f" {part} " in f" {text} "


class _Spaced(dict[int, str]):
    """Table for `str.translate`: spaces around punctuation and symbols, and spaces for separators and control characters."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        kind = unicodedata.category(character)[0]
        self[code] = character if kind in "LNM" else " " if kind in "ZC" else f" {character} "
        return self[code]


_SPACED = _Spaced()


@lru_cache(maxsize=1 << 16)
def _tokens(text: str) -> str:
    """The tokens of a text, separated by single spaces.

    A token is a run of letters, numbers and accents, or one other character (DPR). The results are cached, because training
    searches the same passages for many questions.
    """
    return f" {' '.join(unicodedata.normalize('NFD', text).lower().translate(_SPACED).split())} "


def first_hit(texts: Iterable[str], question: Question, contains: Containment = "tokens") -> int:
    """Rank, from 1, of the first text that contains an answer; 0 if no text contains an answer."""
    ranks = (rank for rank, text in enumerate(texts, start=1) if has_answer(text, question, contains))
    return next(ranks, 0)


def recall_at(first_hits: Sequence[int] | np.ndarray, k: int) -> float:
    """Percentage of queries whose first hit is among the top k; NaN if there are no queries.

    `first_hits` are ranks as `first_hit` returns them: from 1, and 0 for no hit.

    >>> recall_at([1, 0, 3, 7], 5)
    50.0
    """
    rank_N = np.asarray(first_hits)
    return float(100 * ((rank_N >= 1) & (rank_N <= k)).mean()) if len(rank_N) else float("nan")


def reciprocal_ranks(first_hits: Sequence[int] | np.ndarray) -> np.ndarray:
    """1 / rank of the first hit of each query, or 0 for a query without a hit -> [N]."""
    rank_N = np.asarray(first_hits)
    return np.divide(1.0, rank_N, out=np.zeros(len(rank_N)), where=rank_N > 0)


def mean_reciprocal_rank(first_hits: Sequence[int] | np.ndarray) -> float:
    """Mean of 1 / rank of the first hit, between 0 and 1; a query without a hit counts as 0."""
    return float(reciprocal_ranks(first_hits).mean())
