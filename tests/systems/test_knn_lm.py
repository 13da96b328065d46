"""kNN-LM against plain loops: entries of the datastore, neighbours, interpolation, and REALM's predictions beside it."""

import json
import math
import shutil
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from realm import cli
from realm.errors import InputError
from realm.files import read_json, write_json
from realm.index.versions import complete_index
from realm.masking.candidates import CandidateRule, choose_candidates, embed_queries
from realm.masking.held_out import held_out_queries
from realm.masking.masked_queries import each_span, repeats_text
from realm.model.folder import load_model, save_model
from realm.store.knowledge_base import KnowledgeBase, build
from realm.systems import knn_lm
from realm.systems.knn_lm import (
    KnnConfig,
    KnnJson,
    Neighbours,
    knn_probability,
    mask_states,
    mix,
    nearest,
    open_datastore,
    spans_predicted,
)
from realm.tokens.layouts import joint_inputs, passage_inputs, query_inputs
from tests.conftest import tiny_documents
from tests.schemas import assert_holds
from tests.store.tiny import TinyTagger, holding_out

CONFIG = KnnConfig(device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def queries(tiny_kb):
    return held_out_queries(holding_out(tiny_kb, 0.6), 30, 100)


@pytest.fixture(scope="module")
def model(tiny_model_folder):
    model = load_model(tiny_model_folder)
    with torch.no_grad():
        for parameter in model.reader.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


@pytest.fixture(scope="module")
def store(tiny_kb, model, tiny_model_folder, tmp_path_factory):
    return open_datastore(
        model, str(tiny_model_folder), tiny_kb, tmp_path_factory.mktemp("knn") / "store", CONFIG
    )


def test_each_span_is_masked_once_with_its_repeats(tiny_kb) -> None:
    tokens, mask_id = tiny_kb.tokens, tiny_kb.tokenizer.mask_id
    for passage in range(len(tiny_kb)):
        body, starts, ends = (
            tokens.body.row(passage),
            tokens.span_starts.row(passage),
            tokens.span_ends.row(passage),
        )
        made = list(each_span(tokens, passage, mask_id, 40))
        assert [query.targets.tolist() for query in made] == [
            body[start:end].tolist() for start, end in zip(starts, ends, strict=True)
        ]
        for query in made:
            assert (query.ids[query.positions] == mask_id).all()
            assert (query.original[query.positions] == query.targets).all()
            if len(query.targets) == 1:
                assert query.targets[0] not in query.ids


def test_an_interrupted_datastore_continues_and_ends_the_same(
    tiny_kb, model, tiny_model_folder, store, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(knn_lm, "PASSAGES", 2)
    calls, states = [], knn_lm.mask_states

    def until(most: int):
        def mask_states(model, queries, precision):
            calls.append(len(queries))
            if len(calls) == most:
                raise KeyboardInterrupt
            return states(model, queries, precision)

        return mask_states

    def opened():
        return open_datastore(model, str(tiny_model_folder), tiny_kb, tmp_path / "store", CONFIG)

    monkeypatch.setattr(knn_lm, "mask_states", until(4))
    with pytest.raises(KeyboardInterrupt):
        opened()
    first, calls[:] = calls[:3], []
    monkeypatch.setattr(knn_lm, "mask_states", until(1000))
    again = opened()
    assert 0 < sum(first) < sum(first) + sum(calls) == len(list(spans_of(tiny_kb, model)))
    for found, wanted in zip(again, store, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_model_without_checksums_has_the_same_datastore(
    tiny_kb, model, tiny_model_folder, store, tmp_path
) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "model")
    manifest = read_json(tmp_path / "model" / "realm.json")
    del manifest["checksums"]
    write_json(tmp_path / "model" / "realm.json", manifest)
    found = open_datastore(model, str(tmp_path / "model"), tiny_kb, tmp_path / "store", CONFIG)
    np.testing.assert_array_equal(found.key_NH, store.key_NH)


def test_entries_are_the_same_in_batches_of_any_size(
    tiny_kb, model, tiny_model_folder, store, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(knn_lm, "ROWS", 3)
    monkeypatch.setattr(knn_lm, "PASSAGES", 5)
    found = open_datastore(model, str(tiny_model_folder), tiny_kb, tmp_path / "store", CONFIG)
    np.testing.assert_array_equal(found.value_N, store.value_N)
    np.testing.assert_array_equal(found.passage_N, store.passage_N)
    np.testing.assert_allclose(
        found.key_NH.astype(np.float32), store.key_NH.astype(np.float32), rtol=2e-3, atol=2e-3
    )


def test_a_smaller_datastore_has_the_entries_of_passages_drawn_at_random(
    tiny_kb, model, tiny_model_folder, store, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(knn_lm, "PASSAGES", 2)
    some = replace(CONFIG, passages=7)
    found = open_datastore(model, str(tiny_model_folder), tiny_kb, tmp_path / "store", some)
    drawn = np.unique(found.passage_N)
    assert 0 < len(drawn) <= 7 and drawn.tolist() != list(range(len(drawn)))
    of_drawn = np.isin(store.passage_N, drawn)
    np.testing.assert_array_equal(found.passage_N, store.passage_N[of_drawn])
    np.testing.assert_array_equal(found.value_N, store.value_N[of_drawn])
    np.testing.assert_allclose(
        found.key_NH.astype(np.float32), store.key_NH[of_drawn].astype(np.float32), rtol=2e-3, atol=2e-3
    )
    whole = open_datastore(model, str(tiny_model_folder), tiny_kb, tmp_path / "store", CONFIG)
    assert len(whole.value_N) == len(store.value_N)  # a datastore of another size is not used again


def spans_of(kb, model):
    for passage in range(len(kb)):
        yield from each_span(kb.tokens, passage, model.tokenizer.mask_id, model.lengths.query - 2)


def test_an_entry_is_the_state_of_a_mask_before_the_output_layer(tiny_kb, model, store) -> None:
    places = iter(range(len(store.value_N)))
    bert = model.reader.bert
    for passage in range(len(tiny_kb)):
        for query in each_span(tiny_kb.tokens, passage, model.tokenizer.mask_id, model.lengths.query - 2):
            tokens = joint_inputs([query.ids], [[]], model.tokenizer, model.lengths)
            with torch.no_grad():
                states_BTH = bert.bert(tokens.ids_BT, tokens.mask_BT, tokens.segments_BT)
                wanted = bert.cls.predictions.transform(states_BTH[0, query.positions + 1]).numpy()
            for state, target in zip(wanted, query.targets, strict=True):
                place = next(places)
                np.testing.assert_allclose(
                    store.key_NH[place].astype(np.float32), state, rtol=2e-3, atol=2e-3
                )
                assert (store.value_N[place], store.passage_N[place]) == (target, passage)
    assert next(places, None) is None


def test_the_spans_of_another_tagger_make_another_datastore(
    tiny_kb, model, tiny_model_folder, tmp_path
) -> None:
    class Fewer(TinyTagger):
        def annotate(self, texts):
            for one in super().annotate(texts):
                yield one._replace(spans=one.spans[::2])

    build(tmp_path / "kb", tiny_documents(), tiny_kb.config, tiny_kb.tokenizer, Fewer())
    other = KnowledgeBase.open(tmp_path / "kb")
    assert other.fingerprint == tiny_kb.fingerprint
    for kb in (tiny_kb, other):
        found = open_datastore(model, str(tiny_model_folder), kb, tmp_path / "store", CONFIG)
        wanted = np.concatenate([query.targets for query in spans_of(kb, model)])
        np.testing.assert_array_equal(found.value_N, wanted)


def test_the_datastore_is_made_once(tiny_kb, model, tiny_model_folder, tmp_path, monkeypatch) -> None:
    first = open_datastore(model, str(tiny_model_folder), tiny_kb, tmp_path / "store", CONFIG)
    made_of = json.loads((tmp_path / "store" / "datastore.json").read_text())
    assert made_of.keys() == {"kb", "spans", "encoder", "precision", "query"}
    assert made_of["kb"] == tiny_kb.fingerprint
    monkeypatch.setattr(knn_lm, "_write_datastore", lambda *_: pytest.fail("made again"))
    again = open_datastore(model, str(tiny_model_folder), tiny_kb, tmp_path / "store", CONFIG)
    np.testing.assert_array_equal(first.key_NH, again.key_NH)


@pytest.mark.parametrize("at_once", [7, 1 << 16])
def test_neighbours_are_the_nearest_entries_of_other_texts(
    at_once, tiny_kb, model, store, queries, monkeypatch
) -> None:
    monkeypatch.setattr(knn_lm, "ENTRIES", at_once)
    monkeypatch.setattr(knn_lm, "SPARE", 40)
    query_P = [query for query in queries for _ in query.targets]
    state_PH = mask_states(model, queries)
    found = nearest(store, state_PH, query_P, tiny_kb.tokens, 5)
    keys, compared = store.key_NH.astype(np.float64), 0
    for row, query in enumerate(query_P):
        distances = ((keys - state_PH[row].double().numpy()) ** 2).sum(axis=1)
        allowed = [
            n
            for n in np.argsort(distances)
            if store.passage_N[n] != query.passage
            and not repeats_text(query.original, tiny_kb.tokens.body.row(store.passage_N[n]))
        ]
        np.testing.assert_allclose(found.distance_PK[row], distances[allowed[:5]], rtol=1e-3, atol=1e-3)
        if (np.diff(distances[allowed[:6]]) > 1e-3).all():  # equal distances may come in any order
            np.testing.assert_array_equal(found.value_PK[row], store.value_N[allowed[:5]])
            compared += 1
    assert compared > len(query_P) / 2


@pytest.mark.parametrize("nearest_first", [True, False])
def test_chunks_without_a_nearer_entry_change_nothing(nearest_first, tiny_kb, queries, monkeypatch) -> None:
    monkeypatch.setattr(knn_lm, "ENTRIES", 4)
    monkeypatch.setattr(knn_lm, "SPARE", 0)
    monkeypatch.setattr(
        knn_lm, "_allowed", lambda passage_PK, *_: torch.ones(passage_PK.shape, dtype=torch.bool)
    )
    length = np.arange(1, 31, dtype=np.float16)[:: 1 if nearest_first else -1]
    store = knn_lm.Datastore(length[:, None].repeat(2, 1), np.arange(30), np.zeros(30, dtype=np.int64))
    found = nearest(store, torch.zeros(1, 2), queries[:1], tiny_kb.tokens, 3)
    assert found.distance_PK.tolist() == [[2.0, 8.0, 18.0]]
    assert found.value_PK.tolist() == [[0, 1, 2] if nearest_first else [29, 28, 27]]


def test_probability_sums_neighbours_of_a_word_and_mixes_with_the_model() -> None:
    distance_PK = torch.tensor([[1.0, 2.0, 4.0], [0.5, torch.inf, torch.inf], [torch.inf] * 3])
    value_PK = torch.tensor([[3, 1, 3], [2, 0, 0], [0, 0, 0]])
    knn_PV = knn_probability(Neighbours(distance_PK, value_PK), 2.0, 5)
    weights = [np.exp(-d / 2.0) for d in (1.0, 2.0, 4.0)]
    wanted = np.zeros(5)
    for value, weight in zip((3, 1, 3), weights, strict=True):
        wanted[value] += weight / sum(weights)
    np.testing.assert_allclose(knn_PV[0], wanted, rtol=1e-6)
    np.testing.assert_allclose(knn_PV[1], [0, 0, 1, 0, 0])
    lm_PV = torch.full((3, 5), 0.2)
    mixed = mix(lm_PV, knn_PV, 0.25)
    np.testing.assert_allclose(mixed[0], 0.25 * wanted + 0.75 * 0.2, rtol=1e-6)
    np.testing.assert_allclose(mixed[2], lm_PV[2])  # without neighbours the model alone
    np.testing.assert_allclose(mixed.sum(dim=1), 1.0, rtol=1e-6)


def test_realm_predicts_the_sum_over_passages(
    tiny_kb, model, tiny_model_folder, queries, monkeypatch
) -> None:
    monkeypatch.setattr(knn_lm, "CANDIDATES", 4)
    index, some = complete_index(tiny_kb, model, str(tiny_model_folder)).index, queries[:4]
    read_PV, index_PV, found_Q = knn_lm.realm_probability(model, tiny_kb.tokens, index, some, CONFIG)
    place = 0
    for query, found in zip(some, found_Q, strict=True):
        chosen = choose_candidates(
            [query], embed_queries(model, [query]), index, tiny_kb.tokens, CandidateRule(4, True)
        )
        words = " ".join(model.tokenizer.tokens(query.targets))
        assert found == any(
            f" {words} " in f" {' '.join(model.tokenizer.tokens(tiny_kb.tokens.body.row(number)))} "
            for number in chosen.number_BK[0]
            if number >= 0
        )
        total = torch.zeros(len(query.targets), model.tokenizer.vocab_size)
        with torch.no_grad():
            query_D = model.embedder.query(query_inputs([query.ids], model.tokenizer, model.lengths))[0]
            scores, likely = [], []
            for number in chosen.number_BK[0]:
                body = tiny_kb.tokens.body.row(number) if number >= 0 else []
                title = tiny_kb.tokens.title.row(number) if number >= 0 else []
                passage = passage_inputs([title], [body], model.tokenizer, model.lengths)
                scores.append(float(query_D @ model.embedder.passage(passage)[0]))
                joint = joint_inputs([query.ids], [body], model.tokenizer, model.lengths)
                rows = torch.zeros(len(query.targets), dtype=torch.int64)
                likely.append(model.reader(joint, rows, torch.from_numpy(query.positions) + 1).exp())
            apart = {query.passage, *chosen.number_BK[0].tolist(), *chosen.excluded[0].tolist()}
            others = [number for number in range(len(tiny_kb)) if number not in apart]
            rest = index.search_among(query_D[None], [np.array(others)], len(others)).score_BK[0]
        for share, one in zip(torch.tensor(scores).softmax(dim=0), likely, strict=True):
            total += share * one
        here = slice(place, place + len(query.targets))
        np.testing.assert_allclose(read_PV[here], total, rtol=2e-3, atol=1e-6)
        share_N = torch.cat([torch.tensor(scores), rest]).softmax(dim=0)
        total = (1 - share_N[: len(likely)].sum()) * likely[
            0
        ]  # the null passage is read in place of all others
        for share, one in zip(share_N, likely, strict=False):
            total += share * one
        np.testing.assert_allclose(index_PV[here], total, rtol=2e-3, atol=1e-6)
        place += len(query.targets)


def test_the_command_reports_all_three_on_the_same_facts(own_kb, tiny_model_folder, tmp_path, capsys) -> None:
    words = [
        "knn",
        "--kb",
        str(own_kb.folder),
        "--model",
        str(tiny_model_folder),
        "--out",
        str(tmp_path / "store"),
    ]
    assert cli.main([*words, "--set", "device=cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert_holds(KnnJson, report)
    assert report["n"] > 0 and report["realm"]["less"] is None
    for name in ("model", "knn_lm"):
        one, share = report[name], report[name]["span_accuracy"]
        assert one["less"]["points"] == pytest.approx(report["realm"]["span_accuracy"] - share, abs=0.011)
        parts = [(report["found"], one["nats_found"]), (100 - report["found"], one["nats_missed"])]
        known = [nats for _, nats in parts if nats is not None]
        assert min(known) <= one["nats"] <= max(known)
        assert [nats is None for _, nats in parts] == [part == 0 for part, _ in parts]
        low, high = one["span_accuracy_ci95"]
        assert 0 <= low <= share <= high <= 100 and low < high
    assert cli.main([*words, "--set", "device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert "kNN-LM" in shown and "REALM minus row" in shown


class Position(NamedTuple):
    """A masked wordpiece: what the model predicts for it alone, and all entries of other texts."""

    target: int
    lm: list[float]
    distances: list[float]
    values: list[int]


def plain_positions(kb, model, store, query) -> list[Position]:
    joint = joint_inputs([query.ids], [[]], model.tokenizer, model.lengths)
    bert, places = model.reader.bert, torch.from_numpy(query.positions) + 1
    with torch.no_grad():
        states_BTH = bert.bert(joint.ids_BT, joint.mask_BT, joint.segments_BT)
        states = bert.cls.predictions.transform(states_BTH[0, places]).double().numpy()
        predicted = model.reader(joint, torch.zeros_like(places), places).double().exp().tolist()
    others = [
        n
        for n, passage in enumerate(store.passage_N)
        if passage != query.passage and not repeats_text(query.original, kb.tokens.body.row(passage))
    ]
    values = [int(store.value_N[n]) for n in others]
    return [
        Position(
            int(target),
            lm,
            [float(((store.key_NH[n].astype(np.float64) - state) ** 2).sum()) for n in others],
            values,
        )
        for target, lm, state in zip(query.targets, predicted, states, strict=True)
    ]


def plain_mixture(position: Position, temperature: float, weight: float) -> list[float]:
    nearest = min(position.distances)
    near = [math.exp((nearest - distance) / temperature) for distance in position.distances]
    total = sum(near)
    mixed = [(1 - weight) * share for share in position.lm]
    for value, share in zip(position.values, near, strict=True):
        mixed[value] += weight * share / total
    return mixed


def test_lambda_and_temperature_are_the_best_of_one_half_and_the_results_are_of_the_other(
    own_kb, tiny_model, tmp_path
) -> None:
    kb = holding_out(own_kb, 0.99)
    # This model predicts frequent words, about as well as the neighbours do, so the best lambda is neither 0 nor the largest.
    words = np.concatenate([query.targets for query in spans_of(kb, tiny_model)])
    with torch.no_grad():
        for parameter in tiny_model.reader.parameters():
            parameter.mul_(2 if parameter.ndim > 1 else 1)
        frequent = np.bincount(words, minlength=tiny_model.tokenizer.vocab_size)
        tiny_model.reader.bert.cls.predictions.decoder.bias.copy_(torch.from_numpy(np.log(frequent + 1e-3)))
    save_model(tiny_model, tmp_path / "model")
    report = knn_lm.measure(kb, str(tmp_path / "model"), tmp_path / "store", CONFIG)

    model = load_model(tmp_path / "model")
    store = open_datastore(model, str(tmp_path / "model"), kb, tmp_path / "store", CONFIG)
    assert len(store.value_N) <= knn_lm.NEIGHBOURS  # all entries of other texts are neighbours
    read = [plain_positions(kb, model, store, query) for query in held_out_queries(kb, 30, 100)]

    def nats(half: list[list[Position]], temperature: float, weight: float) -> float:
        logs = [
            math.log(max(plain_mixture(one, temperature, weight)[one.target], 1e-30))
            for query in half
            for one in query
        ]
        return -sum(logs) / len(logs)

    def best(half: list[list[Position]]) -> tuple[float, float]:
        choices = [(t, w) for t in knn_lm.TEMPERATURES for w in knn_lm.LAMBDAS]
        return min(choices, key=lambda choice: nats(half, *choice))

    first, second = read[::2], read[1::2]
    chosen = best(first)
    assert (report["temperature"], report["knn_weight"]) == chosen != best(second)
    assert 0 < chosen[1] < max(knn_lm.LAMBDAS)
    assert report["n"] == len(second)
    assert report["knn_lm"]["nats"] == pytest.approx(nats(second, *chosen), abs=1e-3)
    right = [
        all(int(np.argmax(plain_mixture(one, *chosen))) == one.target for one in query) for query in second
    ]
    assert 0 < sum(right) < len(right)
    assert report["knn_lm"]["span_accuracy"] == pytest.approx(100 * sum(right) / len(right), abs=1e-3)


def test_a_span_is_predicted_if_all_its_wordpieces_are(queries) -> None:
    spans = [[3, 1], [4, 2, 0], [1]]
    some = [queries[0]._replace(targets=np.array(span)) for span in spans]
    predicted = [3, 1, 4, 2, 1, 1]  # the last wordpiece of the second span is wrong
    probability_PV = torch.eye(5)[predicted]
    assert spans_predicted(probability_PV, some).tolist() == [True, False, True]


def test_a_folder_with_other_files_is_refused_and_stays(own_kb, tiny_model_folder, tmp_path, capsys) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    words = ["knn", "--kb", str(own_kb.folder), "--model", str(tiny_model_folder), "--out", str(mine)]
    assert cli.main(words) == 2
    assert f"{mine} exists already and has other files" in capsys.readouterr().err
    assert [one.read_text() for one in mine.iterdir()] == ["years of work"]


def test_a_corpus_without_masked_facts_is_refused(tiny_kb, tiny_model_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(knn_lm, "held_out_queries", lambda *_: [])
    with pytest.raises(InputError, match="held-out masked facts"):
        knn_lm.measure(tiny_kb, str(tiny_model_folder), tmp_path / "store", KnnConfig(device="cpu"))
