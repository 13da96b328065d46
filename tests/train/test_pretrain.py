"""REALM pre-training: what the stage trains and leaves, that a run repeats exactly, and what a run refuses."""

import errno
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.errors import RealmError
from realm.index.embedding import IndexConfig, embed_passages
from realm.index.versions import build_index, complete_index, publish
from realm.masking import masked_queries
from realm.masking.candidates import choose_candidates
from realm.masking.held_out import held_out
from realm.masking.masked_queries import draw_queries, holds, repeats_text
from realm.model.folder import load_model, save_model
from realm.search.bm25 import Bm25Index
from realm.settings import read_config
from realm.store import vectors
from realm.store.knowledge_base import KnowledgeBase, KnowledgeBaseConfig, build
from realm.text.corpus import Annotations, Document
from realm.train import health, pretrain
from realm.train.health import HealthWatch
from realm.train.loop import TrainRun
from realm.train.pretrain import (
    PretrainConfig,
)
from realm.train.refresh import refresher as refresh
from tests.conftest import tiny_documents
from tests.store.tiny import TinyTagger
from tests.train.stages import CONTRACT, assert_same_result, changed, metrics, stopped_at, tiny

EMBEDDER = {"embedder.query", "embedder.passage"}
X_CONFIG = KnowledgeBaseConfig(passage_tokens=48, held_out=0.2)
"""Of a corpus X beside the towns."""


def settings(*overrides: str) -> PretrainConfig:
    return tiny(PretrainConfig, "pretrain", "steps=6", "refresh.every=3", *overrides)


@pytest.fixture(scope="module")
def made(tiny_kb, tiny_model_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("pretrain") / "out"
    return pretrain.train(tiny_kb, out, settings(), str(tiny_model_folder))


def test_model_that_is_saved_was_judged(made):
    judged = [line["index_step"] for line in metrics(made) if "index_step" in line]
    assert judged[0] == 0 and judged[-1] == 6


@pytest.fixture
def towers_folder(tiny_model, tmp_path) -> Path:
    """The tiny model with two towers."""
    tiny_model.embedder.untie()
    save_model(tiny_model, tmp_path / "towers")
    return tmp_path / "towers"


# -- the stage


def test_stage_trains_everything_with_the_metrics_of_the_contract(made, tiny_model_folder) -> None:
    assert changed(made, tiny_model_folder) == {"reader"} | EMBEDDER
    rows = metrics(made)
    assert all(row.keys() >= CONTRACT for row in rows)
    (logged,) = [row for row in rows if row["loss"] is not None]
    assert all(np.isfinite(logged[key]) for key in CONTRACT)
    assert logged["step"] == 6 and logged["index_age"] == 1.0  # 0 1 2 0 1 2
    versions = [row for row in rows if "probe_recall_5" in row]
    assert [(row["step"], row["index_step"]) for row in versions] == [(0, 0), (3, 3), (6, 6)]
    assert "churn" not in versions[0] and 0 <= versions[1]["churn"] <= 1
    assert [row["step"] for row in rows if "positive_gap" in row] == [3, 6]


def test_same_seed_gives_the_same_model_and_another_seed_another(
    made, tiny_kb, tiny_model_folder, tmp_path
) -> None:
    again = pretrain.train(tiny_kb, tmp_path / "again", settings(), str(tiny_model_folder))
    assert_same_result(again, made)
    other = pretrain.train(tiny_kb, tmp_path / "other", settings("seed=1"), str(tiny_model_folder))
    assert changed(other, made) == {"reader"} | EMBEDDER


@pytest.mark.parametrize("at", [1, 2, 4])
def test_stopped_run_goes_on_as_if_nothing_had_happened(
    made, tiny_kb, tiny_model_folder, tmp_path, monkeypatch, at
) -> None:
    """Between two refreshes too: it takes the index up again that it had, not a newer one."""

    def train() -> Path:
        return pretrain.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder))

    stopped_at(at, monkeypatch, train)
    assert_same_result(train(), made)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_stopped_run_whose_index_is_gone_builds_another(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    def train() -> Path:
        return pretrain.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder))

    stopped_at(4, monkeypatch, train)
    shutil.rmtree(tmp_path / "out.training" / "index")
    assert load_model(train()).step == 6


@pytest.mark.parametrize(
    ("overrides", "trained"),
    [
        (["reader_gradient=all"], {"reader"} | EMBEDDER),
        (["reader_gradient=sampled"], {"reader"} | EMBEDDER),
        (["reader_gradient=none"], EMBEDDER),
        (["signal=entity"], EMBEDDER),
        (["signal=shuffled"], {"reader"} | EMBEDDER),
        (["ict=0.5", "ict_batch=3"], {"reader"} | EMBEDDER),
        (["masking=token", "normalise=candidates"], {"reader"} | EMBEDDER),
        (["masking=span", "marginal=token", "mask_repeats=false", "injected=0"], {"reader"} | EMBEDDER),
        (["masking=bert", "normalise=candidates", "exclude_own=false"], {"reader"} | EMBEDDER),
        (["null_passage=false"], {"reader"} | EMBEDDER),
        (["null_passage=false", "normalise=candidates", "reader_gradient=all"], {"reader"} | EMBEDDER),
    ],
)
def test_every_switch_trains_what_it_should(tiny_kb, towers_folder, tmp_path, overrides, trained) -> None:
    config = settings("steps=2", *overrides)
    out = pretrain.train(tiny_kb, tmp_path / "out", config, str(towers_folder))
    assert changed(out, towers_folder) == trained


def test_papers_switches_run(tiny_kb, towers_folder, tmp_path) -> None:
    small = [
        "steps=2",
        "batch_size=2",
        "device=cpu",
        "refresh.every=1",
        "refresh.in_background=false",
    ]
    config = read_config(PretrainConfig, "paper", "pretrain", small)
    out = pretrain.train(tiny_kb, tmp_path / "out", config, str(towers_folder))
    assert changed(out, towers_folder) == {"reader"} | EMBEDDER


def test_spans_are_indexed_only_where_something_asks_for_them(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the corpus' spans were indexed")

    monkeypatch.setattr(masked_queries, "_polynomial", refuse)
    monkeypatch.setattr(health, "held_out_queries", lambda *_: [])  # the probe asks
    pretrain.train(tiny_kb, tmp_path / "out", settings("steps=1", "injected=0"), str(tiny_model_folder))
    with pytest.raises(AssertionError, match="spans were indexed"):
        pretrain.train(tiny_kb, tmp_path / "injected", settings("steps=1"), str(tiny_model_folder))


def test_embedder_does_not_move_before_the_reader_is_ready(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    moved: list[set[str]] = []
    update = TrainRun.update

    def watch(run, *args):
        before = [p.detach().clone() for p in run.model.embedder.parameters()]
        update(run, *args)
        moved.append(
            any(not torch.equal(p, b) for p, b in zip(run.model.embedder.parameters(), before, strict=True))
        )

    monkeypatch.setattr(TrainRun, "update", watch)
    monkeypatch.setattr(health, "GATE_EVERY", 2)
    monkeypatch.setattr(pretrain, "GATE_LIMIT", 4)
    config = settings("health.gate=1e9", "ict=1")
    with pytest.raises(RealmError, match="after 4 steps, but the gate is"):
        pretrain.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder))
    assert moved == [False] * 4


def test_frozen_reader_below_the_gate_ends_the_run_at_once(tiny_kb, tiny_model_folder, tmp_path) -> None:
    config = settings("health.gate=1e9", "reader_gradient=none")
    with pytest.raises(RealmError, match="after 0 steps, but the gate is"):
        pretrain.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder))


@pytest.mark.slow
def test_refresh_in_the_background_is_swapped_in(tiny_kb, tiny_model_folder, tmp_path, monkeypatch) -> None:
    """A build is a real process, so steps wait for it here."""
    poll = pretrain.IndexRefresher.poll

    def patient(refresher, step):
        child = refresher._builder._child
        while child is not None and child.poll():
            time.sleep(0.02)
        return poll(refresher, step)

    monkeypatch.setattr(pretrain.IndexRefresher, "poll", patient)
    config = settings("steps=1", "refresh.every=1", "refresh.in_background=true")
    out = pretrain.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder))
    assert [row["index_step"] for row in metrics(out) if "index_step" in row] == [0, 1]


# -- the index that the model finds


@pytest.fixture
def bare_kb(own_kb) -> KnowledgeBase:
    """The towns, without an index."""
    shutil.rmtree(own_kb.folder / "indexes")
    return own_kb


def own_indexes(kb: KnowledgeBase) -> set[str]:
    return {folder.name for folder in vectors.folders(kb.folder)}


def assert_index_is_the_models(kb: KnowledgeBase, out: Path, atol: float = 0) -> None:
    """`realm index` finds nothing to embed, and what is there is what it would have made."""
    model = load_model(out)
    found = complete_index(kb, model, str(out))
    every = np.arange(len(kb))
    wanted = embed_passages(model, kb.tokens, every)
    np.testing.assert_allclose(found.index.rows(every), wanted, atol=atol)
    assert build_index(kb, str(out), IndexConfig(device="cpu", precision="fp32"))["embedded"] == 0


@pytest.mark.parametrize("switch", ["steps=3", "steps=2", "steps=0", 'passage_encoder="frozen"'])
def test_model_finds_its_index_in_the_knowledge_base(bare_kb, tiny_model_folder, tmp_path, switch) -> None:
    """Where the last build is of the last step, where it is not, where nothing trained, and with states."""
    out = pretrain.train(bare_kb, tmp_path / "out", settings("steps=2", switch), str(tiny_model_folder))
    assert_index_is_the_models(bare_kb, out, 0.03 if "frozen" in switch else 0)  # states have 16 bits
    model = load_model(out)
    assert own_indexes(bare_kb) == {model.compute_passage_fingerprint()}
    assert complete_index(bare_kb, model, str(out)).number == 1


def test_refused_version_is_never_the_models_index(bare_kb, tiny_model_folder, tmp_path, monkeypatch) -> None:
    """The embedder goes back to the start, so the start's index is the model's."""
    recalls = iter([100.0, 0.0, 0.0])

    def look(watch: HealthWatch, *_: object) -> tuple[float, np.ndarray]:
        return next(recalls), np.zeros((0, 0))

    monkeypatch.setattr(HealthWatch, "_look", look)
    out = pretrain.train(
        bare_kb, tmp_path / "out", settings("steps=4", "health.margin=2"), str(tiny_model_folder)
    )
    assert next(recalls, None) is None
    assert changed(out, tiny_model_folder) == {"reader"}
    assert_index_is_the_models(bare_kb, out)
    assert own_indexes(bare_kb) == {load_model(out).compute_passage_fingerprint()}


def test_embedder_that_moved_on_after_its_last_index_gets_one_of_its_own(
    bare_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    """As where a build in the background was accepted some steps after its snapshot, and the next one refused."""
    last = pretrain.IndexRefresher.build_final

    def nudged(refresher, model, step):
        version = last(refresher, model, step)
        with torch.no_grad():
            model.embedder.query.projection.bias.add_(0.1)
        return version

    monkeypatch.setattr(pretrain.IndexRefresher, "build_final", nudged)
    out = pretrain.train(bare_kb, tmp_path / "out", settings("steps=1"), str(tiny_model_folder))
    assert_index_is_the_models(bare_kb, out)


@pytest.mark.parametrize("there", [True, False], ids=["after", "before"])
def test_run_stopped_around_the_publishing_of_its_index_publishes_it_once(
    bare_kb, tiny_model_folder, tmp_path, monkeypatch, there
) -> None:
    config, finish = settings("steps=3", "checkpoint_seconds=0", "log_every=1"), TrainRun.finish

    def stop(run: TrainRun) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainRun, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        pretrain.train(bare_kb, tmp_path / "out", config, str(tiny_model_folder))
    published = own_indexes(bare_kb)
    if not there:
        shutil.rmtree(bare_kb.folder / "indexes")
    monkeypatch.setattr(TrainRun, "finish", finish)
    out = pretrain.train(bare_kb, tmp_path / "out", config, str(tiny_model_folder))
    assert own_indexes(bare_kb) == published
    found = complete_index(bare_kb, load_model(out), str(out))
    assert (found.number, found.step) == (1, 3)


def test_knowledge_base_that_cannot_be_written_costs_the_index_and_not_the_model(
    bare_kb, tiny_model_folder, tmp_path, monkeypatch, capsys
) -> None:
    def refuse(kb, model, path, folder, array=None):
        if folder.is_relative_to(bare_kb.folder):
            raise OSError(errno.EROFS, "Read-only file system")
        return publish(kb, model, path, folder, array)

    monkeypatch.setattr(refresh, "publish", refuse)
    out = pretrain.train(bare_kb, tmp_path / "out", settings("steps=1"), str(tiny_model_folder))
    assert load_model(out).step == 1
    said = capsys.readouterr().err
    assert f"Read-only file system; run `realm index --kb {bare_kb.folder} --model {out}`" in said


# -- X and Z


def test_masked_sentences_come_from_x_and_candidates_from_z(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    documents = [
        Document(f"X {n}", f"Berthe left for Corvo with {n} carts of salt. Lorca fell.", f"x{n}")
        for n in range(30)
    ]
    build(tmp_path / "x", documents, X_CONFIG, tiny_kb.tokenizer, TinyTagger())
    text = KnowledgeBase.open(tmp_path / "x")
    seen = []

    def record(queries, vectors, index, knowledge, rule, *rest):
        chosen = choose_candidates(queries, vectors, index, knowledge, rule, *rest)
        seen.append((queries, knowledge, rule.same_corpus, chosen.number_BK))
        return chosen

    monkeypatch.setattr(pretrain, "choose_candidates", record)
    pretrain.train(tiny_kb, tmp_path / "out", settings("steps=3"), str(tiny_model_folder), text)
    for queries, knowledge, same_corpus, number_BK in seen:
        assert knowledge is tiny_kb.tokens and not same_corpus
        assert number_BK.max() < len(tiny_kb)
        for query in queries:
            body = text.tokens.body.row(query.passage)
            assert holds(body, query.original)


def test_candidates_of_bm25_are_the_best_of_bm25_for_the_words_that_are_not_masked(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    bm25, seen = Bm25Index(tiny_kb.titles, tiny_kb.texts()), []

    def record(queries, vectors, index, knowledge, rule, *rest):
        chosen = choose_candidates(queries, vectors, index, knowledge, rule, *rest)
        seen.extend(zip(queries, chosen.number_BK.tolist(), strict=True))
        return chosen

    monkeypatch.setattr(pretrain, "choose_candidates", record)
    pretrain.train(
        tiny_kb, tmp_path / "out", settings("steps=2", "bm25=1", "injected=0"), str(tiny_model_folder)
    )
    tokens, mask = tiny_kb.tokens, tiny_kb.tokenizer.mask_id
    found = 0
    for query, chosen in seen:
        words = " ".join(tiny_kb.tokenizer.decode(query.ids[query.ids != mask].tolist()).split())
        ranking = bm25.search([words], len(tiny_kb)).number_BK[0].tolist()
        allowed = [n for n in ranking if n >= 0 and not repeats_text(query.original, tokens.body.row(n))]
        best = next((n for n in allowed if n != query.passage and n not in chosen[1:-1]), None)
        if best is not None and best in ranking[: settings().candidates + 8]:
            assert chosen[-1] == best
            found += 1
    assert found > len(seen) / 2


def test_same_knowledge_base_opened_twice_is_one_corpus(tiny_kb, made, tiny_model_folder, tmp_path) -> None:
    again = KnowledgeBase.open(tiny_kb.folder)
    out = pretrain.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder), again)
    assert_same_result(out, made)


def test_held_out_passages_stay_held_out_when_x_repeats_them(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    more = Document("Oakham", "Oakham lies on the Tarn. Berthe sold the bells of Oakham.", "o")
    build(tmp_path / "x", [more, *tiny_documents()], X_CONFIG, tiny_kb.tokenizer, TinyTagger())
    text = KnowledgeBase.open(tmp_path / "x")
    secret = {i for i, out in zip(tiny_kb.ids, held_out(tiny_kb.ids, 0.2), strict=True) if out}
    drawn: set[str] = set()

    def record(tokens, passages, *rest):
        drawn.update(text.ids[n] for n in passages)
        return draw_queries(tokens, passages, *rest)

    monkeypatch.setattr(pretrain, "draw_queries", record)
    pretrain.train(tiny_kb, tmp_path / "out", settings("steps=1"), str(tiny_model_folder), text)
    assert secret and drawn and not drawn & secret


# -- what it refuses


class SpanlessTagger:
    name = "spanless"

    def annotate(self, texts):
        for text in texts:
            yield Annotations(((0, len(text)),), ())


def test_corpus_without_salient_spans_is_one_line(tiny_kb, tiny_model_folder, tmp_path) -> None:
    build(tmp_path / "x", tiny_documents(), X_CONFIG, tiny_kb.tokenizer, SpanlessTagger())
    text = KnowledgeBase.open(tmp_path / "x")
    with pytest.raises(RealmError, match="no passage with a salient span") as error:
        pretrain.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder), text)
    assert "\n" not in str(error.value)
    out = pretrain.train(
        tiny_kb, tmp_path / "out", settings("steps=1", "masking=token"), str(tiny_model_folder), text
    )
    assert load_model(out).step == 1


@pytest.mark.parametrize("masking", ["token", "bert", "span"])
def test_corpus_of_sentences_that_are_too_short_to_mask_is_one_line(
    tiny_kb, tiny_model_folder, tmp_path, masking
) -> None:
    documents = [Document(f"Short {n}", "Go", f"x{n}") for n in range(8)]
    build(tmp_path / "x", documents, X_CONFIG, tiny_kb.tokenizer, SpanlessTagger())
    text = KnowledgeBase.open(tmp_path / "x")
    assert not held_out(text.ids, X_CONFIG.held_out).all()
    with pytest.raises(RealmError, match="x has no sentence of four wordpieces to mask") as error:
        pretrain.train(
            tiny_kb, tmp_path / "out", settings(f"masking={masking}"), str(tiny_model_folder), text
        )
    assert "\n" not in str(error.value)


def test_states_of_an_encoder_that_is_trained_cannot_be_kept() -> None:
    with pytest.raises(RealmError, match='states needs passage_encoder = "frozen"'):
        settings("states=kept")


def test_runs_with_the_same_frozen_encoder_share_its_states(
    frozen, tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    kept = f"states={tmp_path / 'states'}"
    for name in ("one", "two"):
        config = settings('passage_encoder="frozen"', kept)
        out = pretrain.train(tiny_kb, tmp_path / name, config, str(tiny_model_folder))
        assert metrics(out) == metrics(frozen)
        monkeypatch.setattr(
            "realm.train.refresh.cached_states._compute", None
        )  # the second run computes nothing


def test_more_guided_candidates_than_there_is_room_for_are_one_line() -> None:
    with pytest.raises(RealmError, match="at most 3 can be injected or found by BM25") as error:
        settings("candidates=4", "injected=4")
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def frozen(tiny_kb, tiny_model_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("frozen") / "out"
    return pretrain.train(tiny_kb, out, settings('passage_encoder="frozen"'), str(tiny_model_folder))


def test_frozen_passage_encoder_stays_while_all_else_trains(frozen, tiny_model) -> None:
    trained = load_model(frozen).embedder
    assert trained.passage is not trained.query
    before = dict(tiny_model.embedder.passage.named_parameters())
    moved = {n for n, p in trained.passage.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"projection.weight", "projection.bias"}
    assert not torch.equal(
        trained.query.encoder.encoder.layer[0].output.dense.weight,
        before["encoder.encoder.layer.0.output.dense.weight"],
    )


def test_frozen_input_embeddings_stay_while_all_else_of_the_tower_trains(
    tiny_kb, tiny_model, tiny_model_folder, tmp_path
) -> None:
    config = settings('input_embeddings="frozen"')
    trained = load_model(pretrain.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder))).embedder
    before = dict(tiny_model.embedder.query.named_parameters())
    stood = {n for n, p in trained.query.named_parameters() if torch.equal(p, before[n])}
    assert stood == {name for name in before if name.startswith("encoder.embeddings.")}


def test_index_versions_of_frozen_passages_are_as_many_and_need_no_other_process(
    frozen, made, monkeypatch
) -> None:
    versions = [
        [line["index_step"] for line in metrics(out) if "index_step" in line] for out in (frozen, made)
    ]
    assert versions[0] == versions[1] == [0, 3, 6]


def test_stopped_run_with_frozen_passages_goes_on_as_if_nothing_had_happened(
    frozen, tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    def train() -> Path:
        config = settings('passage_encoder="frozen"')
        return pretrain.train(tiny_kb, tmp_path / "out", config, str(tiny_model_folder))

    stopped_at(4, monkeypatch, train)
    assert_same_result(train(), frozen)
