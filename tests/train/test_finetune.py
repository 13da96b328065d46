"""Fine-tuning: what moves, which weights are kept, and that a run repeats exactly."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.errors import RealmError
from realm.index.embedding import embed_passages
from realm.index.versions import complete_index
from realm.model.folder import load_model
from realm.model.span_reader import SpanReader
from realm.qa.question_files import Question
from realm.search.exact import MipsIndex
from realm.train import finetune
from realm.train.examples import Examples
from realm.train.finetune import FinetuneConfig
from realm.train.span_losses import joint_scores
from tests.conftest import RIVERS, TOWNS
from tests.train.stages import CONTRACT, assert_same_result, changed, metrics, stopped_at, tiny

TRAIN = [Question(f"r{n}", f"on which river lies {town}?", (RIVERS[n % 4],)) for n, town in enumerate(TOWNS)]
TRAIN.append(Question("when", "when was the bridge burnt?", (r"1[1-6]\d\d",), regex=True))
DEV = [
    Question(f"d{n}", f"what is the river of {town}?", (RIVERS[n % 4],)) for n, town in enumerate(TOWNS[:5])
]


def settings(*overrides: str) -> FinetuneConfig:
    return tiny(FinetuneConfig, "finetune", "steps=6", "dev_every=3", *overrides)


def train(kb, out: Path, folder: Path, *overrides: str, dev=DEV) -> Path:
    return finetune.train(kb, out, settings(*overrides), str(folder), TRAIN, dev)


def both_of(examples: Examples, reader: SpanReader, batch: np.ndarray, number_BK, score_BN) -> tuple:
    """Scores of all spans of all passages read, and which are answers."""
    rows = examples.rows(reader, batch, number_BK)
    return joint_scores(reader, reader(rows.tokens, rows.body_RT), rows, score_BN)


@pytest.fixture(scope="module")
def made(tiny_kb, tiny_model_folder, tmp_path_factory) -> Path:
    return train(tiny_kb, tmp_path_factory.mktemp("finetune") / "out", tiny_model_folder)


# -- the stage


def test_only_the_query_tower_and_the_span_reader_move(made, tiny_model_folder) -> None:
    assert changed(made, tiny_model_folder) == {"embedder.query", "span_reader"}
    before, after = load_model(tiny_model_folder), load_model(made)
    assert after.compute_passage_fingerprint() == before.compute_passage_fingerprint()
    assert after.embedder.query is not after.embedder.passage


def test_index_of_the_start_serves_the_new_model(made, tiny_kb, tiny_model_folder) -> None:
    model = load_model(made)
    assert complete_index(tiny_kb, model, str(made)).number == 1


def test_metrics_have_the_keys_of_the_contract_and_the_dev_scores(made) -> None:
    rows = metrics(made)
    assert all(row.keys() >= CONTRACT for row in rows)
    assert [row["step"] for row in rows if "dev_em" in row] == [0, 3, 6]
    (logged,) = [row for row in rows if row["loss"] is not None]
    assert logged["loss"] == pytest.approx(logged["retriever_loss"] + logged["reader_loss"], rel=1e-3)
    assert 0 < logged["recall_read"] <= 1 and 0 < logged["readable"] <= 1


def test_questions_without_an_answer_in_any_passage_are_named_at_the_end(
    tiny_kb, tiny_model_folder, tmp_path, capsys, made
) -> None:
    nowhere = [Question("n", "on which river lies Arden?", ("Zzyzx",))]
    finetune.train(tiny_kb, tmp_path / "out", settings(), str(tiny_model_folder), nowhere, DEV)
    assert "so no answer was learned" in capsys.readouterr().err
    train(tiny_kb, tmp_path / "learned", tiny_model_folder)
    assert "no answer was learned" not in capsys.readouterr().err


def test_same_seed_gives_the_same_model(made, tiny_kb, tiny_model_folder, tmp_path) -> None:
    assert_same_result(train(tiny_kb, tmp_path / "again", tiny_model_folder), made)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_stopped_run_goes_on_with_the_same_best(
    made, tiny_kb, tiny_model_folder, tmp_path, monkeypatch, step
) -> None:
    stopped_at(step, monkeypatch, lambda: train(tiny_kb, tmp_path / "out", tiny_model_folder))
    assert_same_result(train(tiny_kb, tmp_path / "out", tiny_model_folder), made)


def test_stopped_run_does_not_go_on_with_other_questions(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    stopped_at(1, monkeypatch, lambda: train(tiny_kb, tmp_path / "out", tiny_model_folder))
    with pytest.raises(RealmError, match=r"these have changed since \(questions\)"):
        train(tiny_kb, tmp_path / "out", tiny_model_folder, dev=DEV[1:])


def test_best_model_by_dev_exact_match_is_kept(tiny_kb, tiny_model_folder, tmp_path, monkeypatch) -> None:
    """Step 3 scores best; what comes after it is not in the result."""
    scores = iter([10.0, 30.0, 20.0])

    class Asked:
        def report(self, *_: object) -> "Asked":
            return self

        def as_dict(self) -> dict[str, object]:
            return {"em": next(scores), "f1": 0.0, "recall": {"5": 0.0}}

    monkeypatch.setattr(finetune, "ask", lambda *_: Asked())
    # three steps of the six by themselves: the schedule is the same without decay
    six = train(tiny_kb, tmp_path / "six", tiny_model_folder, "decay=false")
    three = train(tiny_kb, tmp_path / "three", tiny_model_folder, "decay=false", "steps=3", dev=[])
    assert changed(six, three) == set()


def test_without_dev_questions_the_last_weights_are_kept(tiny_kb, tiny_model_folder, tmp_path) -> None:
    out = train(tiny_kb, tmp_path / "out", tiny_model_folder, dev=[])
    assert "span_reader" in changed(out, tiny_model_folder)


def test_no_training_question_and_no_index_are_one_line(
    own_kb, tiny_model, tiny_model_folder, tmp_path
) -> None:
    with pytest.raises(RealmError, match="no training question"):
        finetune.train(own_kb, tmp_path / "out", settings(), str(tiny_model_folder), [], DEV)
    shutil.rmtree(own_kb.folder / "indexes")
    with pytest.raises(RealmError, match="realm index") as error:
        train(own_kb, tmp_path / "out", tiny_model_folder)
    assert "\n" not in str(error.value)


# -- with passages that move


UPDATE = ["update_passages=true", "refresh.every=2", "refresh.in_background=false", "read=3"]


def test_passages_move_where_asked_and_their_index_is_refreshed(
    own_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    searched = []
    look = finetune.Best.evaluate

    def watch(best) -> None:
        answerer = best._answerer
        searched.append((best._run.step, answerer.version.step))
        found, _ = answerer.retrieve([DEV[0].question], 28, "dense")
        query_BD = answerer.embed(answerer.tokenized([DEV[0].question]))
        newest = answerer.version.index.search(query_BD, 28)
        np.testing.assert_allclose(found, newest.score_BK, rtol=1e-6)
        look(best)

    monkeypatch.setattr(finetune.Best, "evaluate", watch)
    shutil.rmtree(own_kb.folder / "indexes")
    out = train(own_kb, tmp_path / "out", tiny_model_folder, *UPDATE, dev=DEV[:2])
    assert changed(out, tiny_model_folder) == {"embedder.query", "embedder.passage", "span_reader"}
    after = load_model(out)
    assert after.embedder.query is after.embedder.passage
    (logged,) = [row for row in metrics(out) if row["loss"] is not None]
    assert logged["index_age"] == pytest.approx(0.5)  # 0 1 0 1 0 1
    assert searched == [(0, 0), (3, 2), (6, 6)]
    built = [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if "index_step" in line
    ]
    assert [(row["index_step"], row["index_number"]) for row in built] == [(2, 2), (4, 3), (6, 4)]
    assert all(row["build_seconds"] > 0 and row["build_passages_per_second"] > 0 for row in built)
    found = complete_index(
        own_kb, after, str(out)
    )  # of the weights that are kept, whichever step they are of
    every = np.arange(len(own_kb))
    wanted = embed_passages(after, own_kb.tokens, every)
    np.testing.assert_array_equal(found.index.rows(every).numpy(), wanted.astype(np.float32))
    assert found.number == 1


def test_passages_that_are_read_are_scored_by_the_live_model(tiny_kb, tiny_model) -> None:
    examples = Examples(tiny_kb, tiny_model, TRAIN)
    numbers = torch.tensor([[3, 1, 3], [7, 0, 1]])
    passage_UD, place_BK = examples.vectors(numbers)
    found = passage_UD[place_BK]
    assert len(passage_UD) == 4
    every = embed_passages(tiny_model, tiny_kb.tokens, np.arange(len(tiny_kb)))
    np.testing.assert_allclose(found.detach().numpy(), every[numbers.numpy()], atol=4e-3)
    found.sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in tiny_model.embedder.passage.parameters())


@pytest.mark.parametrize("which", ["live", "snapshot"])
def test_question_tower_that_is_asked_for_searches(
    tiny_kb, tiny_model, tiny_model_folder, tmp_path, monkeypatch, which
) -> None:
    searched = []
    search = MipsIndex.search

    def watch(index: MipsIndex, query_BD: torch.Tensor, k: int):
        searched.append(query_BD.detach().clone())
        return search(index, query_BD, k)

    monkeypatch.setattr(MipsIndex, "search", watch)
    asked = "refresh.every=0", f"refresh.search={which}", "retriever_rate=1e-2"
    train(tiny_kb, tmp_path / "out", tiny_model_folder, *UPDATE, *asked, dev=[])
    config = settings(*UPDATE, *asked)
    assert len(searched) == config.steps
    examples = Examples(tiny_kb, tiny_model, TRAIN)
    with torch.no_grad():
        start = [
            tiny_model.embedder.query(examples.inputs(examples.batch(config.seed, step, config.batch_size)))
            for step in range(config.steps)
        ]
    same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(searched, start, strict=True)]
    assert same == [which == "snapshot" or step == 0 for step in range(config.steps)]


def test_stopped_run_with_moving_passages_goes_on_as_if_nothing_had_happened(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    one = train(tiny_kb, tmp_path / "one", tiny_model_folder, *UPDATE)
    stopped_at(3, monkeypatch, lambda: train(tiny_kb, tmp_path / "two", tiny_model_folder, *UPDATE))
    assert_same_result(train(tiny_kb, tmp_path / "two", tiny_model_folder, *UPDATE), one)
