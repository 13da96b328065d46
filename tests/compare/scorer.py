"""A second scorer of answers and retrieval, which shares no code with the one of the tables."""

import re
import string
import unicodedata
from collections import Counter
from statistics import mean
from typing import Any


def plain(text: str) -> list[str]:
    """Words of an answer without articles and punctuation."""
    kept = "".join(one for one in unicodedata.normalize("NFD", text).lower() if one not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def f1_of(answer: str, right: str) -> float:
    one, other = Counter(plain(answer)), Counter(plain(right))
    common = sum(min(one[word], other[word]) for word in one)
    return 2 * common / (sum(one.values()) + sum(other.values())) if common else 0.0


def holds(text: str, question: dict[str, Any]) -> bool:
    """Whether a passage holds an answer, as whole words, or a match of a pattern."""
    if question.get("regex"):
        return any(re.search(answer, text, re.IGNORECASE) for answer in question["answers"])
    return any(
        re.search(rf"(?<!\w){re.escape(answer.lower())}(?!\w)", text.lower())
        for answer in question["answers"]
    )


def first_with(question: dict[str, Any], texts: list[str]) -> int:
    """Rank of the first text with an answer; 0 for none."""
    return next((rank for rank, text in enumerate(texts, start=1) if holds(text, question)), 0)


def recall_and_rank(ranks: list[int]) -> dict[str, Any]:
    share = {str(k): 100 * mean(0 < rank <= k for rank in ranks) for k in (1, 5, 20, 100)}
    return {"n": len(ranks), "recall": share, "mrr": 100 * mean(1 / rank if rank else 0 for rank in ranks)}


def scored(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """Exact match and F1 of pairs of a question and its prediction."""
    exact, f1 = [], []
    for question, found in rows:
        if question.get("regex"):
            exact.append(any(re.search(one, found["answer"], re.IGNORECASE) for one in question["answers"]))
            f1.append(float(exact[-1]))
        else:
            exact.append(any(plain(found["answer"]) == plain(one) for one in question["answers"]))
            f1.append(max(f1_of(found["answer"], one) for one in question["answers"]))
    return {"n": len(rows), "em": 100 * mean(exact), "f1": 100 * mean(f1)}
