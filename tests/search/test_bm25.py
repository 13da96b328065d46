import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from realm.search.bm25 import STOP_WORDS, Bm25Index
from realm.tokens.layouts import NULL_PASSAGE

TITLES = ["Nile", "Amazon", "Paris", "Nile", ""]
TEXTS = [
    "The Nile is a river in Africa. The river Nile flows north.",
    "The Amazon is the largest river, in South America.",
    "Paris is the capital of France; the Seine is its river.",
    "Khartoum stands where the Blue Nile meets the White Nile.",
    "Brontë sisters: Charlotte, Emily and Anne",
]


def plain_bm25(question: str, k1: float = 1.2, b: float = 0.3) -> list[float]:
    """Lucene's BM25 scores, from the formula."""
    words = [
        [w for w in re.findall(r"\w+", f"{title} {text}".lower().replace("ë", "e")) if w not in STOP_WORDS]
        for title, text in zip(TITLES, TEXTS, strict=True)
    ]
    mean_length = sum(map(len, words)) / len(words)
    scores = []
    for passage in words:
        score = 0.0
        for word in re.findall(r"\w+", question.lower()):
            frequency = passage.count(word)
            positives = sum(word in other for other in words)
            idf = math.log(1 + (len(words) - positives + 0.5) / (positives + 0.5))
            score += idf * frequency / (frequency + k1 * (1 - b + b * len(passage) / mean_length))
        scores.append(score)
    return scores


@pytest.mark.parametrize(
    "question", ["where does the nile meet?", "river river nile", "largest capital", "bronte"]
)
def test_scores_equal_the_formula(question: str) -> None:
    ranking = Bm25Index(TITLES, TEXTS).search([question], k=5)
    expected = plain_bm25(question)
    order = sorted((n for n in range(5) if expected[n] > 0), key=lambda n: (-expected[n], n))
    assert ranking.number_BK[0, : len(order)].tolist() == order
    assert ranking.score_BK[0, : len(order)] == pytest.approx([expected[n] for n in order], rel=1e-5)


def test_other_constants_give_the_scores_of_the_formula() -> None:
    ranking = Bm25Index(TITLES, TEXTS, k1=1.5, b=0.75).search(["nile river"], k=1)
    assert ranking.score_BK[0, 0] == pytest.approx(max(plain_bm25("nile river", 1.5, 0.75)), rel=1e-5)


def test_passages_without_a_shared_word_are_not_ranked() -> None:
    index = Bm25Index(TITLES, TEXTS)
    ranking = index.search(["", "who was the?", "zeppelin", "Brontë"], k=3)
    assert ranking.number_BK.tolist() == [[NULL_PASSAGE] * 3] * 3 + [[4, NULL_PASSAGE, NULL_PASSAGE]]
    assert (ranking.score_BK[:3] == 0).all() and ranking.score_BK[3, 0] > 0


def test_k_is_cut_to_the_size_of_the_index() -> None:
    index = Bm25Index(TITLES, TEXTS)
    assert len(index) == 5
    assert index.search(["nile", "paris"], k=100).number_BK.shape == (2, 5)
    assert index.search([], k=2).number_BK.shape == (0, 2)


def test_equal_scores_come_in_the_order_of_their_numbers() -> None:
    ranking = Bm25Index([""] * 40, ["same text"] * 40).search(["same"], k=7)
    assert ranking.number_BK[0].tolist() == list(range(7))


@pytest.mark.parametrize("texts", [[], [""], ["the of", ""]])
def test_corpora_without_words_rank_nothing(texts: list[str]) -> None:
    ranking = Bm25Index([""] * len(texts), texts).search(["nile"], k=2)
    assert (ranking.number_BK == NULL_PASSAGE).all()


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    Bm25Index(TITLES, TEXTS).search(["nile"], k=1)
    assert capfd.readouterr() == ("", "")


def test_bm25_does_not_start_jax(tmp_path: Path) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise SystemExit('jax was imported')\n")
    code = "import realm.search.bm25; print('BM25 was imported'); import jax"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "BM25 was imported\n"
    assert done.stderr == "jax was imported\n"  # by the last statement: other code can still import JAX
