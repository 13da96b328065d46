"""What a training run refuses, and what it leaves."""

import json
import re
import shutil

import pytest
import torch

from realm.errors import InputError, RealmError
from realm.model import device
from realm.model.folder import Model, load_model
from realm.settings import config_from
from realm.train import run_folder
from realm.train.loop import TrainRun
from realm.train.run_config import RunConfig, generator
from realm.train.run_folder import RunFolder
from tests.train.toy import DATA, at, config, lines, stop, train


def test_a_line_can_be_reported_before_the_first_step(tiny_model, tmp_path, capsys) -> None:
    with TrainRun("toy", tmp_path / "out", config(), tiny_model, {tiny_model.embedder.query: 0.1}) as run:
        run.report("training waits for the index")
    assert capsys.readouterr().err == "toy, step 0: training waits for the index\n"


# -- what a run refuses


def test_folder_of_a_run_that_lives_is_refused(tiny_model, tiny_model_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE", 0.2)
    parts = {tiny_model.embedder.query: 0.1}
    with (
        TrainRun("toy", tmp_path / "out", config(), tiny_model, parts),
        pytest.raises(RealmError, match="is in use by another run"),
    ):
        TrainRun("toy", tmp_path / "out", config(), tiny_model, parts)
    TrainRun("toy", tmp_path / "out", config(), tiny_model, parts).__exit__()


def test_run_that_saves_what_it_made_is_not_gone_on_with(tiny_model_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE", 0.2)
    save, refused = Model.save, []

    def while_saving(*args, **named) -> None:
        with pytest.raises(RealmError, match="is in use by another run"):
            train(load_model(tiny_model_folder), tmp_path / "out", config())
        refused.append(True)
        save(*args, **named)

    monkeypatch.setattr(Model, "save", while_saving)
    train(load_model(tiny_model_folder), tmp_path / "out", config())
    assert refused == [True]


@pytest.mark.parametrize(("complete", "message"), [(True, "exists: name another"), (False, "was removed")])
def test_run_that_waited_for_one_that_took_its_folder_away_does_not_start_in_nothing(
    complete, message, tiny_model, tmp_path, monkeypatch
) -> None:
    take_lock = RunFolder._take_lock

    def after_the_other_has_ended(folder: RunFolder) -> None:
        shutil.rmtree(folder.path)
        if complete:
            folder.out.mkdir()
        take_lock(folder)

    monkeypatch.setattr(RunFolder, "_take_lock", after_the_other_has_ended)
    with pytest.raises(RealmError, match=message):
        TrainRun("toy", tmp_path / "out", config(), tiny_model, {tiny_model.embedder.query: 0.1})
    assert not (tmp_path / "out.training").exists()


def test_run_does_not_go_on_in_another_precision(tiny_model_folder, tmp_path, monkeypatch) -> None:
    """As on a machine where "auto" means another one."""
    out, given = tmp_path / "out", config(precision="auto")
    monkeypatch.setattr(device, "multiplies_bf16", lambda kind: False)
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, given, before_update=at(4, stop))
    monkeypatch.setattr(device, "multiplies_bf16", lambda kind: True)
    with pytest.raises(RealmError, match=r"other settings \(precision\)"):
        train(load_model(tiny_model_folder), out, given)
    train(load_model(tiny_model_folder), out, config(precision="fp32"))
    assert json.loads((out / "realm.json").read_text())["stages"][-1]["precision"] == "fp32"


def test_run_with_other_settings_does_not_go_on(tiny_model_folder, tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, config(), before_update=at(4, stop))
    with pytest.raises(RealmError, match=r"other settings \(dropout, seed\)") as error:
        train(load_model(tiny_model_folder), out, config(seed=1, dropout=0.0))
    assert "\n" not in str(error.value)
    train(load_model(tiny_model_folder), out, config())


def test_run_goes_on_when_its_model_is_named_by_another_path(
    tiny_model_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tiny_model_folder.parent)
    out = tmp_path / "out"
    for init, stops in ((tiny_model_folder.name, True), (str(tiny_model_folder), False)):
        model = load_model(tiny_model_folder)
        part = {model.embedder.query: 0.1}
        with TrainRun("toy", out, config(), model, part, {"init": init}) as run:
            assert run.step == (0 if stops else 2)
            if stops:
                run.step = 2
                run._save_checkpoint()


def test_run_whose_start_model_was_replaced_by_another_does_not_go_on(tiny_model_folder, tmp_path) -> None:
    """The query tower is trained; all other weights are those of the start model, and are in no checkpoint."""
    start, out = tmp_path / "start", tmp_path / "out"

    def resumed(source: Model) -> int:
        shutil.rmtree(start, ignore_errors=True)
        source.save(start)
        model = load_model(start)
        part = {model.embedder.query: 0.1}
        with TrainRun("toy", out, config(), model, part, {"init": str(start)}) as run:
            step, run.step = run.step, 2
            run._save_checkpoint()
        return step

    other = load_model(tiny_model_folder)
    with torch.no_grad():
        other.reader.bert.cls.predictions.bias += 1
    assert resumed(load_model(tiny_model_folder)) == 0
    with pytest.raises(RealmError, match=r"another model .* have changed since \(init_weights\)"):
        resumed(other)
    assert resumed(load_model(tiny_model_folder)) == 2


def test_run_without_a_checkpoint_is_not_in_the_way_of_other_settings(tiny_model_folder, tmp_path) -> None:
    out = tmp_path / "out"
    out.with_name("out.training").mkdir()
    (tmp_path / "out.training" / "settings.json").write_text('{"stage": "toy", "seed": 7}')
    train(load_model(tiny_model_folder), out, config())
    assert out.is_dir() and not out.with_name("out.training").exists()


def test_run_that_is_refused_before_its_first_step_leaves_no_folder(tiny_model, tmp_path) -> None:
    with (
        pytest.raises(InputError, match="too few passages"),
        TrainRun("toy", tmp_path / "out", config(), tiny_model, {tiny_model.embedder.query: 0.1}),
    ):
        raise InputError("too few passages")
    assert list(tmp_path.iterdir()) == []


def test_refused_run_leaves_what_others_have_put_into_its_folder(tiny_model, tmp_path) -> None:
    (tmp_path / "out.training").mkdir()
    (tmp_path / "out.training" / "notes.txt").write_text("precious")
    with (
        pytest.raises(InputError, match="too few passages"),
        TrainRun("toy", tmp_path / "out", config(), tiny_model, {tiny_model.embedder.query: 0.1}),
    ):
        raise InputError("too few passages")
    assert [path.name for path in (tmp_path / "out.training").iterdir()] == ["notes.txt"]


def test_run_of_another_stage_or_with_other_data_is_named(tiny_model_folder, tmp_path) -> None:
    out, file = tmp_path / "out", tmp_path / "out.training" / "settings.json"
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, config(), before_update=at(4, stop))
    saved = json.loads(file.read_text())
    for change, message in (
        ({"stage": "pretrain", "candidates": 8}, "an interrupted run of `realm pretrain`: repeat"),
        ({"kb": "1", "held_out": 0.5}, r"or these have changed since \(held_out, kb\): repeat"),
    ):
        file.write_text(json.dumps(saved | change))
        with pytest.raises(RealmError, match=message):
            train(load_model(tiny_model_folder), out, config())


def test_live_run_with_other_settings_is_in_use_and_not_interrupted(
    tiny_model, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE", 0.2)
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), tmp_path / "out", config(), before_update=at(4, stop))
    parts = {tiny_model.embedder.query: 0.1}
    with (
        TrainRun("toy", tmp_path / "out", config(), tiny_model, parts, {"data": "rows"}),
        pytest.raises(RealmError, match="is in use by another run"),
    ):
        TrainRun("toy", tmp_path / "out", config(seed=1), tiny_model, parts, {"data": "rows"})


def test_existing_out_is_refused_and_left_alone(tiny_model, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(RealmError, match="exists: name another --out"):
        train(tiny_model, tmp_path / "out", config())
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_loss_that_is_no_number_is_one_line_and_changes_nothing(tiny_model, tmp_path) -> None:
    part = tiny_model.embedder.query.projection
    before = part.weight.detach().clone()
    with TrainRun("toy", tmp_path / "out", config(), tiny_model, {part: 0.1}) as run:
        next(run.steps())
        with pytest.raises(RealmError, match="loss is nan at step 0") as error:
            run.update(part(DATA).mean() * torch.nan, {})
    assert "\n" not in str(error.value)
    assert torch.equal(part.weight, before)


def test_gradient_that_is_no_number_is_one_line_and_changes_nothing(tiny_model, tmp_path) -> None:
    """A loss can be finite and its gradient not: sqrt(x) at 0."""
    part = tiny_model.embedder.query.projection
    before = part.weight.detach().clone()
    with TrainRun("toy", tmp_path / "out", config(), tiny_model, {part: 0.1}) as run:
        next(run.steps())
        with pytest.raises(RealmError, match=r"gradient is (nan|inf) at step 0"):
            run.update((part(DATA) * 0).square().sum().sqrt(), {})
    assert torch.equal(part.weight, before)


@pytest.mark.parametrize(
    "values",
    [
        {"steps": -1},
        {"batch_size": 0},
        {"log_every": 0},
        {"checkpoints": 0},
        {"seed": -1},
        {"seed": 2**40},
        {"cached_rows": -1},
        {"dropout": 1.0},
        {"dropout": -0.1},
    ],
)
def test_impossible_settings_are_one_line(values) -> None:
    with pytest.raises(RealmError, match=next(iter(values))) as error:
        config_from(RunConfig, values, "here")
    assert "\n" not in str(error.value)


# -- what a run leaves


def test_metrics_are_means_over_logged_steps_with_the_keys_of_the_contract(plain) -> None:
    rows = lines(plain)
    assert [row["step"] for row in rows] == [3, 4, 6, 8, 9, 12, 12]
    assert [row["retrieval_utility"] for row in rows if row["loss"] is not None] == [1.0, 4.0, 7.0, 10.0]
    assert all(
        {"step", "loss", "retrieval_utility", "null_probability", "index_age"} <= row.keys() for row in rows
    )
    seconds = [json.loads(line)["seconds"] for line in (plain / "metrics.jsonl").read_text().splitlines()]
    assert seconds == sorted(seconds)


def test_the_last_line_of_a_stage_names_the_folder_of_the_model(tiny_model, tmp_path, capfd) -> None:
    train(tiny_model, tmp_path / "out", config())
    line = rf"toy: 12 steps in \d+:\d\d; the model is in {re.escape(str(tmp_path / 'out'))}\n"
    assert re.fullmatch(line, capfd.readouterr().err)


def test_progress_line_shows_what_a_build_cost_until_the_next_one(tiny_model, tmp_path) -> None:
    shown = []
    with TrainRun(
        "ict", tmp_path / "out", config(steps=4, log_every=2), tiny_model, {tiny_model.embedder: 1e-3}
    ) as run:
        for step in run.steps():
            if step == 1:
                run.log({"build_seconds": 12.345, "build_passages_per_second": 678.9, "index_step": 1})
            loss = sum(p.sum() for p in tiny_model.embedder.parameters())
            run.update(loss, {"index_age": float(step)})
            shown.append(getattr(run._bar, "postfix", None))
    assert shown[0] is None
    for line, age in ((shown[1], "0.5"), (shown[3], "2.5")):
        assert f"index_age={age}, build_seconds=12.3, build_passages_per_second=679" in line


def test_tensorboard_has_the_numbers_of_metrics_jsonl(tiny_model_folder, tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, settings = tmp_path / "out", config(tensorboard=True)
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, settings, before_update=at(5, stop))
    train(load_model(tiny_model_folder), out, settings)
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    seen = [(event.step, pytest.approx(event.value, rel=1e-4)) for event in events.Scalars("loss")]
    assert [(row["step"], row["loss"]) for row in lines(out) if row["loss"] is not None] == seen
    assert [event.step for event in events.Scalars("total")] == [4, 8, 12]


def test_finished_model_records_where_it_comes_from(tiny_model, tmp_path) -> None:
    tiny_model.stages = [{"stage": "mlm", "steps": 5}]
    train(tiny_model, tmp_path / "out", config())
    loaded = load_model(tmp_path / "out")
    assert loaded.step == 12
    assert [record["stage"] for record in loaded.stages] == ["mlm", "toy"]
    assert loaded.stages[1]["warmup"] == 3 and loaded.stages[1]["data"] == "rows"


def test_a_stage_that_is_repeated_keeps_both_records(tiny_model, tmp_path) -> None:
    train(tiny_model, tmp_path / "one", config(steps=2))
    train(load_model(tmp_path / "one"), tmp_path / "two", config(steps=3))
    stages = load_model(tmp_path / "two").stages
    assert [(record["stage"], record["steps"]) for record in stages] == [("toy", 2), ("toy", 3)]


def test_run_of_no_steps_saves_what_came_in(tiny_model, tiny_model_folder, tmp_path) -> None:
    train(tiny_model, tmp_path / "out", config(steps=0))
    before = load_model(tiny_model_folder).embedder.state_dict()
    assert all(
        torch.equal(v, before[k]) for k, v in load_model(tmp_path / "out").embedder.state_dict().items()
    )
    assert lines(tmp_path / "out") == []


def test_random_numbers_belong_to_their_key() -> None:
    assert generator(1, 2).random() == generator(1, 2).random()
    assert len({generator(*key).random() for key in [(1, 2), (2, 1), (1, 3), (1, 7, 2)]}) == 4
