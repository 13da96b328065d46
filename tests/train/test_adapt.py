"""Adapting within minutes: the reader's gains, the loss, who moves, and that a run ends in time and repeats."""

import math
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from realm.errors import InputError
from realm.index.versions import complete_index
from realm.masking.held_out import held_out
from realm.masking.masked_queries import MaskingRule, SpanIndex, draw_queries, holds
from realm.model.folder import load_model
from realm.model.losses import index_marginal_loss, marginal_loss, with_unretrieved
from realm.tokens.layouts import joint_inputs, query_inputs
from realm.train import adapt
from realm.train.adapt import (
    UNRETRIEVED_GAP,
    AdaptConfig,
    Judge,
    Judged,
    gain_table,
    read_judged,
    write_judged,
)
from realm.train.loop import TrainRun
from realm.train.pretrain import POSITIVE_GAIN
from tests.train.stages import CONTRACT, assert_same_result, changed, metrics, stopped_at, tiny


def settings(*overrides: str) -> AdaptConfig:
    return tiny(AdaptConfig, "adapt", "steps=6", "log_every=1", *overrides)


@pytest.fixture(scope="module")
def made(tiny_kb, tiny_model_folder, tmp_path_factory):
    return adapt.train(tiny_kb, tmp_path_factory.mktemp("adapt") / "out", settings(), str(tiny_model_folder))


def test_the_projection_of_queries_alone_moves_and_the_index_serves_both_models(
    made, tiny_kb, tiny_model_folder
) -> None:
    assert changed(made, tiny_model_folder) == {"embedder.query"}
    start, model = load_model(tiny_model_folder), load_model(made)
    assert model.compute_passage_fingerprint() == start.compute_passage_fingerprint()
    one, other = (complete_index(tiny_kb, each, "model").index.rows(range(28)) for each in (start, model))
    assert torch.equal(one, other)
    before, after = (each.embedder.query.state_dict() for each in (start, model))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"projection.weight", "projection.bias"}


def test_metrics_have_what_every_stage_logs(made) -> None:
    assert [line["step"] for line in metrics(made)] == [1, 2, 3, 4, 5, 6]
    assert all(set(line) >= CONTRACT and math.isfinite(line["loss"]) for line in metrics(made))


def test_an_interrupted_run_goes_on_and_judges_nothing_twice(
    made, tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    def run() -> None:
        adapt.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder))

    rounds: list[int] = []
    judge = Judge._judge_round
    monkeypatch.setattr(Judge, "_judge_round", lambda self: rounds.append(self.rounds) or judge(self))
    stopped_at(1, monkeypatch, run)
    stopped_at(4, monkeypatch, run)
    run()
    assert rounds == [0, 1]
    assert_same_result(tmp_path / "out", made)


@pytest.mark.parametrize("settings_file", ["of the other run", "lost"])
def test_a_run_that_was_killed_before_its_first_checkpoint_leaves_no_judged_sentences_to_one_with_other_settings(
    made, tiny_kb, tiny_model_folder, tmp_path, monkeypatch, settings_file
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(TrainRun, "update", crash)
        with pytest.raises(RuntimeError):
            adapt.train(tiny_kb, tmp_path / "out", settings("signal=entity"), str(tiny_model_folder))
    left = tmp_path / "out.training"
    assert (left / "judged-0000.parquet").exists() and not list(left.glob("checkpoint-*"))
    if settings_file == "lost":
        (left / "settings.json").unlink()
    adapt.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder))
    assert_same_result(tmp_path / "out", made)


def test_a_signal_that_comes_while_sentences_are_judged_does_not_wait_for_the_round(
    made, tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    batches: list[int] = []
    judge = Judge._judge

    def signalled(self, queries):
        batches.append(self.rounds)
        if len(batches) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return judge(self, queries)

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "_judge", signalled)
        with pytest.raises(KeyboardInterrupt):
            adapt.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder))
    assert batches == [0]
    adapt.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder))
    assert_same_result(tmp_path / "out", made)


@pytest.fixture
def judge(tiny_kb, tiny_model, tmp_path, monkeypatch):
    """A judge of the towns, its knowledge base and its model."""
    vectors_ND = complete_index(tiny_kb, tiny_model, "model").index.rows(np.arange(len(tiny_kb)))
    monkeypatch.setattr(adapt, "READ", 3)
    config = settings()
    with TrainRun("adapt", tmp_path / "out", config, tiny_model, {tiny_model.embedder: 1e-3}) as run:
        yield Judge(tiny_kb, tiny_model, vectors_ND, run, config), tiny_kb, tiny_model


def test_gains_are_those_of_each_passage_read_alone(judge) -> None:
    judge, kb, model = judge
    tokens = kb.tokens
    queries = draw_queries(
        tokens,
        np.arange(len(kb)),
        8,
        np.random.default_rng(1),
        MaskingRule(kb.tokenizer.mask_id, 30, repeats=True),
    )
    spans = SpanIndex(tokens)
    queries = [query for query in queries if len(spans.passages(query.targets)) > 1]
    state_BH = model.embedder.query.pooled(
        query_inputs([q.ids for q in queries], kb.tokenizer, model.lengths)
    )
    judged = judge._judge(queries)
    assert len(judged) == len(queries) > 3
    for query, state_H, one in zip(queries, state_BH, judged, strict=True):
        others = set(spans.passages(query.targets).tolist()) - {query.passage}
        np.testing.assert_allclose(one.state_H, state_H.detach(), rtol=1e-4, atol=1e-5)
        assert set(one.number_K.tolist()) <= others and len(one.number_K) == min(3, len(others))
        assert query.passage in one.excluded
        for number, gain in zip(one.number_K, one.gain_K, strict=True):
            assert holds(tokens.body.row(number), query.targets)
            logp = []
            for body in (tokens.body.row(number), tokens.body.row(number)[:0]):
                joint = joint_inputs([query.ids], [body], model.tokenizer, model.lengths)
                place = torch.from_numpy(query.positions + 1)
                with torch.no_grad():
                    logp_PV = model.reader(joint, torch.zeros_like(place), place)
                logp.append(logp_PV[torch.arange(len(place)), torch.from_numpy(query.targets)].sum().item())
            assert gain == pytest.approx(logp[0] - logp[1], abs=1e-4)


def test_the_control_credits_every_holder_alike_and_reads_nothing(judge, monkeypatch) -> None:
    judge, _, model = judge
    judge._config = replace(judge._config, signal="entity")
    monkeypatch.setattr(model.reader, "token_logp", None)
    assert {float(gain) for one in judge.next_round() for gain in one.gain_K} == {
        float(np.float32(POSITIVE_GAIN))
    }


def test_held_out_passages_are_never_judged(judge) -> None:
    judge, kb, _ = judge
    own = np.concatenate([one.excluded for one in judge.next_round()])
    out = set(np.flatnonzero(held_out(kb.ids, kb.config.held_out)).tolist())
    assert out and len(own) >= 20
    assert not out & set(judge._passages.tolist())


def test_loss_over_the_index_is_that_of_pre_training_less_the_null_passages() -> None:
    torch.manual_seed(0)
    score_N, read, gains = (
        torch.randn(9),
        [2, 5],
        [3.0, -0.5],
    )  # passages 0 to 7 and the null one; 1 is excluded
    null_logp, gap = -4.0, UNRETRIEVED_GAP
    one = Judged(np.zeros(1), np.array(read), np.array(gains, dtype=np.float32), np.array([1]), True)
    loss = index_marginal_loss(score_N[None], gain_table([one], 8))
    rest = score_N[[0, 3, 4, 6, 7]].logsumexp(dim=0)
    logp_BKM = torch.tensor([[[null_logp], [null_logp + gains[0]], [null_logp + gains[1]]]])
    mask_BM = torch.ones(1, 1)
    entries = with_unretrieved(score_N[[8, *read]][None], logp_BKM, mask_BM, rest[None], gap)
    assert loss.item() == pytest.approx(marginal_loss(*entries, mask_BM).item() + null_logp, rel=1e-5)


def test_what_was_judged_comes_back_from_disk(tmp_path) -> None:
    judged = [
        Judged(
            np.array([7, 4], dtype=np.float32),
            np.array([3]),
            np.array([0.5], dtype=np.float32),
            np.array([1, 2]),
            True,
        ),
        Judged(
            np.array([9], dtype=np.float32),
            np.array([5, 6]),
            np.array([-1.25, 2], dtype=np.float32),
            np.array([0]),
            False,
        ),
    ]
    write_judged(judged, tmp_path / "judged.parquet")
    for one, other in zip(judged, read_judged(tmp_path / "judged.parquet"), strict=True):
        assert one.by_reader == other.by_reader
        for before, after in zip(one[:-1], other[:-1], strict=True):
            assert before.dtype == after.dtype and before.tolist() == after.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["judged.parquet"]


@pytest.mark.parametrize(("begins", "steps"), [(0.0, 0), (30.0, 3)])
def test_a_run_whose_minutes_are_over_keeps_what_it_learnt(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch, capsys, begins, steps
) -> None:
    """The clock is set to a second past the minutes in the first round, or after three steps."""
    monkeypatch.setattr(TrainRun, "seconds", lambda run: 61.0 if run.step >= steps else begins)
    out = adapt.train(tiny_kb, tmp_path / "out", settings("minutes=1"), str(tiny_model_folder))
    assert load_model(out).step == steps
    assert f"{steps} of 6 steps, limit 1 min" in capsys.readouterr().err


def test_a_slow_reader_reads_its_share_of_the_minutes_and_every_step_is_made(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch, capsys
) -> None:
    """A batch takes the reader 10 seconds: 3 of them begin in the 22.5 that it has in the first round, 2 more within 45."""
    clock = [0.0]
    gains = Judge._gains

    def slow(self, *batch):
        clock[0] += 10
        return gains(self, *batch)

    monkeypatch.setattr(Judge, "_gains", slow)
    monkeypatch.setattr(TrainRun, "seconds", lambda run: clock[0])
    rounds = settings("minutes=1", "rounds=2", "sentences=200")
    out = adapt.train(tiny_kb, tmp_path / "out", rounds, str(tiny_model_folder))
    assert load_model(out).step == 6
    assert clock == [50]
    said = capsys.readouterr().err
    assert "6 of 6 steps, limit 1 min; sentences that the reader judged: " in said
    read = int(said.split("the reader judged: ")[1].split(" of ")[0])
    assert 5 < read <= 5 * adapt.JUDGED_AT_ONCE


def test_text_without_a_name_in_two_passages_is_refused(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(SpanIndex, "passages", lambda spans, ids: np.zeros(0, dtype=np.int64))
    monkeypatch.setattr(adapt, "holds", lambda body, ids: False)
    with pytest.raises(InputError, match="no salient span that two passages contain"):
        adapt.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder))


@pytest.mark.parametrize("setting", ["rounds=0", "sentences=0", "minutes=0", "minutes=nan"])
def test_settings_that_cannot_be_are_refused(setting) -> None:
    with pytest.raises(InputError, match=rf"{setting.split('=')[0]} is .*: it must be"):
        settings(setting)
