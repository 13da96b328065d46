"""The watch over a pre-training run: the gate, the bar, and the way back; what it sees is given, what it does is real."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from realm.errors import RealmError
from realm.index.embedding import embed_passages
from realm.index.versions import IndexVersion
from realm.masking.candidates import embed_queries
from realm.masking.masked_queries import SpanIndex
from realm.model.folder import load_model
from realm.qa.probe import ReadingJson
from realm.qa.question_files import Question
from realm.search.exact import MipsIndex
from realm.train import health
from realm.train.health import HealthConfig, HealthWatch
from realm.train.loop import TrainRun
from realm.train.run_config import RunConfig
from tests.store.tiny import holding_out

QUESTIONS = [
    Question("1", "who built a tower in Arden?", ("Cunimund",)),
    Question("2", "nothing?", ("absent",)),
]


@pytest.fixture
def see(monkeypatch) -> dict[str, float]:
    """What the watch is made to see: probe recall@5 in percent, and the positive gap."""
    seen = {"recall": 48.0, "gap": 5.0}  # of 25 queries: steps of 4

    def first_positives(queries, *_: object) -> np.ndarray:
        hits = round(len(queries) * seen["recall"] / 100)
        return np.array([3] * hits + [0] * (len(queries) - hits))

    def read_queries(model, queries, *_: object) -> ReadingJson:
        return {
            "span_accuracy": 10.0, "span_accuracy_without": 5.0, "retrieval_utility": 0.1, "null_probability": 0.2,
            "positive_gap": seen["gap"],
        }  # fmt: skip

    monkeypatch.setattr(health, "first_positives", first_positives)
    monkeypatch.setattr(health, "read_queries", read_queries)
    return seen


@pytest.fixture
def start(
    tiny_kb, tiny_model, tmp_path, monkeypatch
) -> Callable[..., tuple[HealthWatch, TrainRun, IndexVersion]]:
    """A run of the tiny model and its watch, after its first look."""

    monkeypatch.setattr(health, "GATE_EVERY", 2)
    monkeypatch.setattr(health, "PATIENCE", 2)

    def make(share: float = 0.8, model=tiny_model, needs_reader=True, questions=None, **config):
        kb = holding_out(tiny_kb, share)
        settings = RunConfig(steps=100, warmup=0, decay=False, device="cpu", precision="fp32", dropout=0.0)
        run = TrainRun(
            "pretrain", tmp_path / "out", settings, model, {model.embedder: 1e-2, model.reader: 1e-2}
        )
        config = HealthConfig(**{"gate": 2.0, "margin": 4.0, **config})
        watch = HealthWatch(config, kb, SpanIndex(kb.tokens), model, run, questions, gate_limit=6)
        version = built(tiny_kb, model, 0)
        watch.start(version, needs_reader)
        steps = run.steps()
        next(steps)
        run.advance = lambda: (run.update(sum(p.sum() for p in model.embedder.parameters()), {}), next(steps))  # type: ignore[attr-defined]
        return watch, run, version

    return make


def built(kb, model, step: int) -> IndexVersion:
    vectors = embed_passages(model, kb.tokens, np.arange(len(kb)))
    return IndexVersion(MipsIndex(vectors), step + 1, step)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.embedder.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def log(run: TrainRun) -> list[dict]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


# -- the bar


def test_healthy_version_is_taken_and_is_the_way_back_from_then_on(
    start, see, tiny_kb, tiny_model, capsys
) -> None:
    watch, run, first = start()
    run.advance()
    healthy = weights(tiny_model)
    second = built(tiny_kb, tiny_model, 1)
    see["recall"] = 44.0  # the bar: 48 - 4
    assert watch.after_step(second, first) is second
    run.advance()
    see["recall"] = 40.0
    assert watch.after_step(built(tiny_kb, tiny_model, 2), second) is second
    assert same(weights(tiny_model), healthy)
    said = capsys.readouterr().err
    assert "index of step 2 refused: its recall@5 on the probe is 40.0, below 44.0" in said
    assert "set back to step 1, and its learning rate is halved" in said


def test_refused_embedder_moves_at_half_the_rate_and_without_momentum(
    start, see, tiny_kb, tiny_model, monkeypatch
) -> None:
    watch, run, first = start()
    monkeypatch.setattr(health, "PATIENCE", 5)
    bias = tiny_model.embedder.query.projection.bias

    def moved() -> float:
        before = bias.detach().clone()
        run.advance()
        return (bias - before).abs().mean().item()

    full = moved()
    see["recall"] = 0.0
    for expected in (0.5, 0.25):
        watch.after_step(built(tiny_kb, tiny_model, run.step), first)
        assert not run.optimizer.adamw.state[bias]
        assert moved() == pytest.approx(full * expected, rel=1e-2)


def test_patience_at_its_end_freezes_the_embedder_but_not_the_reader(
    start, see, tiny_kb, tiny_model, capsys
) -> None:
    watch, run, first = start()
    see["recall"] = 0.0
    for _ in range(2):
        run.advance()
        assert watch.after_step(built(tiny_kb, tiny_model, run.step), first) is first
    assert "learning rate is 0 from now on" in capsys.readouterr().err
    before = weights(tiny_model)
    for _ in range(3):
        run.advance()
    assert same(weights(tiny_model), before)
    assert [group["scale"] for group in run.optimizer.adamw.param_groups] == [0.0, 0.0, 1.0, 1.0]


def test_two_towers_are_both_set_back(start, see, tiny_kb, tiny_model) -> None:
    tiny_model.embedder.untie()
    watch, run, first = start()
    before = weights(tiny_model)
    run.advance()
    assert not same(weights(tiny_model), before)
    see["recall"] = 0.0
    watch.after_step(built(tiny_kb, tiny_model, 1), first)
    assert same(weights(tiny_model), before)
    assert tiny_model.embedder.query is not tiny_model.embedder.passage


def test_negative_margin_never_refuses(start, see, tiny_kb, tiny_model) -> None:
    watch, run, first = start(margin=-1.0)
    run.advance()
    see["recall"] = 0.0
    version = built(tiny_kb, tiny_model, 1)
    assert watch.after_step(version, first) is version


def test_corpus_without_probe_queries_is_never_judged(start, see, tiny_kb, tiny_model) -> None:
    watch, run, first = start(share=0.0)
    assert watch.reader_ready
    run.advance()
    version = built(tiny_kb, tiny_model, 1)
    assert watch.after_step(version, first) is version
    assert watch.after_step(None, version) is version


# -- the gate


def test_gate_opens_once_the_reader_reads_and_stays_open(start, see, tiny_kb, tiny_model) -> None:
    see["gap"] = 1.9
    watch, run, first = start()
    assert not watch.reader_ready
    for step, gap in ((1, 9.0), (2, 1.9), (3, 9.0), (4, 2.0)):  # it looks at every second step
        see["gap"] = gap
        run.advance()
        watch.after_step(None, first)
        assert watch.reader_ready == (step == 4)
    see["gap"] = 0.0
    watch.after_step(built(tiny_kb, tiny_model, 4), first)
    assert watch.reader_ready


def test_gate_that_never_opens_ends_the_run_in_one_line(start, see) -> None:
    see["gap"] = 0.5
    watch, run, first = start()
    for _ in range(5):
        run.advance()
        watch.after_step(None, first)
    run.advance()
    with pytest.raises(RealmError, match=r"is 0.50 nats after 6 steps, but the gate is 2.0") as error:
        watch.after_step(None, first)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("gap", "says"), [(0.5, True), (2.5, False)])
def test_run_that_ends_below_the_gate_says_that_the_retriever_was_not_trained(
    start, see, gap, says, capsys
) -> None:
    see["gap"] = gap
    watch, run, first = start()
    run.advance()
    watch.after_step(None, first)
    watch.say_untrained()
    assert ("the retriever was not trained" in capsys.readouterr().err) == says


@pytest.mark.parametrize("config", [{"needs_reader": False}, {"gate": 0.0}])
def test_gate_is_open_where_none_is_asked_for(start, see, config) -> None:
    see["gap"] = 0.0
    watch, _, _ = start(**config)
    assert watch.reader_ready


# -- what it logs and remembers


def test_versions_are_logged_with_recall_and_churn(start, see, tiny_kb, tiny_model) -> None:
    watch, run, first = start(questions=QUESTIONS)
    run.advance()
    second = built(tiny_kb, tiny_model, 1)
    vectors = embed_queries(tiny_model, watch.queries)
    before = watch.state["top"].tolist()
    after = second.index.search(vectors, 20).number_BK.tolist()
    churn = 1 - np.mean([len(set(a) & set(b)) / 20 for a, b in zip(before, after, strict=True)])
    watch.after_step(second, first)
    lines = [line for line in log(run) if "index_step" in line]
    assert [(line["step"], line["index_step"], line["index_number"]) for line in lines] == [
        (0, 0, 1),
        (1, 1, 2),
    ]
    assert lines[1]["churn"] == pytest.approx(churn, abs=1e-4) and "churn" not in lines[0]
    assert lines[1]["probe_recall_5"] == 48.0
    assert lines[1]["probe_recall_1"] == 0 and lines[1]["question_recall_20"] in (0.0, 50.0)


def test_interrupted_run_keeps_its_bar_its_gate_and_its_way_back(
    start, see, tiny_kb, tiny_model, tiny_model_folder
) -> None:
    watch, run, first = start()
    healthy = weights(tiny_model)
    run.advance()
    see["recall"] = 0.0
    watch.after_step(built(tiny_kb, tiny_model, 1), first)
    run._save_checkpoint()
    run.__exit__()
    see["gap"] = 0.0  # a new look would close the gate, or set another bar
    model = load_model(tiny_model_folder)
    with torch.no_grad():
        model.embedder.query.projection.bias.add_(1)
    again, run, _ = start(model=model)
    assert again.reader_ready and again.state["start_recall"] == watch.state["start_recall"]
    run.advance()
    watch_version = built(tiny_kb, model, 2)
    assert again.after_step(watch_version, first) is first
    assert again.state["refused"] == 2 and same(weights(model), healthy)
