"""The inverse cloze task: its pairs undone by hand, and the stage from the tiny model."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.errors import InputError
from realm.masking.held_out import held_out
from realm.model.folder import load_model, save_model
from realm.store.schema import PassageTokens, Ragged
from realm.text.corpus import HeldOut
from realm.train import ict
from realm.train.ict import ClozeRule, IctConfig, cloze_pairs, cloze_vectors
from tests.train.stages import CONTRACT, assert_same_result, changed, metrics, stopped_at, tiny


def settings(*overrides: str) -> IctConfig:
    return tiny(IctConfig, "ict", *overrides)


@pytest.fixture(scope="module")
def made(tiny_kb, tiny_model_folder, tmp_path_factory) -> Path:
    return ict.train(tiny_kb, tmp_path_factory.mktemp("ict") / "out", settings(), str(tiny_model_folder))


def ragged(rows) -> Ragged:
    offsets = np.cumsum([0] + [len(r) for r in rows])
    return Ragged(np.array([x for r in rows for x in r], dtype=np.int32), offsets)


def corpus(*passages: list[list[int]]) -> PassageTokens:
    """Passages as lists of sentences; passage i has the title [50 + i]."""
    starts = [np.cumsum([0] + [len(s) for s in passage])[:-1] for passage in passages]
    nothing = ragged([[] for _ in passages])
    return PassageTokens(
        ragged([[50 + i] for i in range(len(passages))]),
        ragged([[token for sentence in passage for token in sentence] for passage in passages]),
        ragged(starts),
        nothing,
        nothing,
    )


# -- the pairs


def test_sentence_and_rest_make_the_passage_again(tiny_kb) -> None:
    tokens = tiny_kb.tokens
    for seed in range(20):
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(tiny_kb))
        sentences, titles, bodies = cloze_pairs(tokens, order, ClozeRule(10, 1.0), rng)
        assert len(sentences) == 10
        for number, sentence, title, rest in zip(order, sentences, titles, bodies, strict=False):
            body = tokens.body.row(number).tolist()
            assert title.tolist() == tokens.title.row(number).tolist()
            starts = [*tokens.sentences.row(number).tolist(), len(body)]
            cuts = [(body[a:b], body[:a] + body[b:]) for a, b in pairwise(starts)]
            assert (sentence.tolist(), rest.tolist()) in cuts


@pytest.mark.parametrize("removal", [0.0, 0.9, 1.0])
def test_sentence_is_taken_out_as_often_as_asked(tiny_kb, removal) -> None:
    tokens, rng = tiny_kb.tokens, np.random.default_rng(0)
    removed = []
    for _ in range(20):
        order = rng.permutation(len(tiny_kb))
        _, _, bodies = cloze_pairs(tokens, order, ClozeRule(len(order), removal), rng)
        removed += [len(b) < len(tokens.body.row(n)) for n, b in zip(order, bodies, strict=True)]
    assert abs(np.mean(removed) - removal) < 0.05


@pytest.mark.parametrize("titled", [0.0, 0.5, 1.0])
def test_title_stands_before_the_sentence_as_often_as_asked(titled) -> None:
    tokens, rng = corpus(*([[n, n]] for n in range(1, 41))), np.random.default_rng(0)
    named = []
    for _ in range(10):
        sentences, titles, _ = cloze_pairs(tokens, np.arange(40), ClozeRule(40, 0.0, titled), rng)
        for sentence, title in zip(sentences, titles, strict=True):
            assert sentence.tolist() in ([*title, *sentence[-2:]], sentence[-2:].tolist())
            named.append(len(sentence) > 2)
    assert abs(np.mean(named) - titled) < 0.08


def test_every_sentence_of_a_passage_is_asked_for_at_times() -> None:
    tokens, rng = corpus([[1, 2], [3], [4, 5, 6]]), np.random.default_rng(0)
    seen = {
        tuple(cloze_pairs(tokens, np.array([0]), ClozeRule(1, 1.0), rng)[0][0].tolist()) for _ in range(50)
    }
    assert seen == {(1, 2), (3,), (4, 5, 6)}


def test_passage_of_one_sentence_takes_part_only_with_it() -> None:
    tokens, rng = corpus([[1, 2]], [[3, 4], [5, 6]]), np.random.default_rng(0)
    both = np.array([0, 1])
    assert [t.tolist() for t in cloze_pairs(tokens, both, ClozeRule(2, 1.0), rng)[1]] == [[51]]
    assert [b.tolist() for b in cloze_pairs(tokens, both, ClozeRule(2, 0.0), rng)[2]] == [
        [1, 2],
        [3, 4, 5, 6],
    ]


def test_passages_that_offer_nothing_are_made_up_for() -> None:
    tokens = corpus(*([[1, 2]] for _ in range(6)), [[3, 4], [5, 6]], [[7], [8]], [[9], [10]])
    _, titles, _ = cloze_pairs(tokens, np.arange(9), ClozeRule(2, 1.0), np.random.default_rng(0))
    assert [t.tolist() for t in titles] == [[56], [57]]


def test_sentence_of_no_wordpieces_is_never_a_query() -> None:
    tokens = corpus([[], [1, 2], []], [[], []], [[3], [4]])
    for seed in range(30):
        rng = np.random.default_rng(seed)
        for removal in (0.0, 1.0):
            assert all(len(s) for s in cloze_pairs(tokens, np.arange(3), ClozeRule(3, removal), rng)[0])


def test_corpus_of_single_sentences_is_one_line() -> None:
    with pytest.raises(InputError, match="none of 2 passages has two sentences") as error:
        cloze_pairs(corpus([[1]], [[2]]), np.arange(2), ClozeRule(2, 1.0), np.random.default_rng(0))
    assert "\n" not in str(error.value)


def test_small_batch_is_found_among_many_passages_with_one_sentence(tiny_model) -> None:
    tokens = corpus([[7, 8], [9]], *[[[7]]] * 40)
    for seed in range(20):
        query_BD, passage_BD = cloze_vectors(
            tiny_model, tokens, np.arange(41), ClozeRule(2, 1.0), np.random.default_rng(seed)
        )
        assert len(query_BD) == len(passage_BD) == 1


# -- the stage


def test_stage_trains_the_embedder_and_nothing_else(made, tiny_model_folder) -> None:
    assert changed(made, tiny_model_folder) == {"embedder.query", "embedder.passage"}
    model = load_model(made)
    assert model.embedder.query is model.embedder.passage
    assert [record["stage"] for record in model.stages] == ["ict"] and model.step == 20
    assert model.held_out == HeldOut(0.2, 48)


def test_stage_learns_its_task(made) -> None:
    rows = metrics(made)
    assert all(row.keys() >= CONTRACT for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["accuracy"] > 2 / 16  # twice chance


def test_two_towers_are_both_trained_apart(tiny_kb, tiny_model, tmp_path) -> None:
    tiny_model.embedder.untie()
    save_model(tiny_model, tmp_path / "start")
    out = ict.train(tiny_kb, tmp_path / "out", settings("steps=3"), str(tmp_path / "start"))
    assert changed(out, tmp_path / "start") == {"embedder.query", "embedder.passage"}
    embedder = load_model(out).embedder
    query, passage = embedder.query.state_dict(), embedder.passage.state_dict()
    assert any(not torch.equal(value, passage[name]) for name, value in query.items())


def test_same_seed_gives_the_same_model_also_after_a_stop(
    made, tiny_kb, tiny_model_folder, tmp_path, monkeypatch
):
    def train() -> Path:
        return ict.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder))

    stopped_at(7, monkeypatch, train)
    assert_same_result(train(), made)


def test_sentences_are_cut_to_their_own_longest_query(tiny_kb, tiny_model_folder, tmp_path, monkeypatch):
    widths = []
    inputs = ict.query_inputs
    monkeypatch.setattr(
        ict, "query_inputs", lambda *a: widths.append(inputs(*a).ids_BT.shape[1]) or inputs(*a)
    )
    out = ict.train(tiny_kb, tmp_path / "out", settings("steps=1", "query_tokens=9"), str(tiny_model_folder))
    assert widths == [9] and load_model(out).lengths.query == 32
    with pytest.raises(InputError, match="query_tokens is 2: it must be 3 or more"):
        settings("query_tokens=2")


def test_no_sentence_of_a_held_out_passage_is_a_query(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    seen: set[int] = set()

    def record(tokens, passages, *rest):
        seen.update(passages.tolist())
        return cloze_pairs(tokens, passages, *rest)

    monkeypatch.setattr(ict, "cloze_pairs", record)
    ict.train(tiny_kb, tmp_path / "out", settings("steps=3"), str(tiny_model_folder))
    assert seen == set(np.flatnonzero(~held_out(tiny_kb.ids, 0.2)).tolist())
