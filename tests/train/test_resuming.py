"""A run that is stopped, crashes or finds its files damaged goes on as if nothing had happened, or says why not."""

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from realm.errors import AlreadyDone, RealmError
from realm.model.folder import load_model
from realm.train import loop, run_folder
from realm.train.loop import TrainRun
from tests.damages import damage
from tests.train.toy import DATA, assert_same_result, at, checkpoints, config, crash, lines, stop, train


@pytest.mark.parametrize("step", [1, 3, 5, 12])
def test_run_stopped_by_a_signal_goes_on_as_if_nothing_had_happened(
    tiny_model_folder, tmp_path, plain, step
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, config(), before_update=at(step - 1, stop))
    assert not out.exists() and (tmp_path / "out.training").is_dir()
    train(load_model(tiny_model_folder), out, config())
    assert_same_result(out, plain)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("step", [3, 7])
def test_run_that_crashed_goes_on_from_its_checkpoint(tiny_model_folder, tmp_path, plain, step) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    for moment in ("after_update", "before_update"):
        with pytest.raises(RuntimeError):
            train(load_model(tiny_model_folder), out, settings, **{moment: at(step, crash)})
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


def test_run_stopped_again_before_its_first_line_keeps_its_metrics_clean(
    tiny_model_folder, tmp_path, plain
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):  # lines after the checkpoint of step 6 are written and lost
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    with pytest.raises(KeyboardInterrupt):
        train(load_model(tiny_model_folder), out, settings, before_update=at(6, stop))
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


def test_second_signal_does_not_wait(tiny_model, tmp_path) -> None:
    def twice() -> None:
        stop()
        stop()

    with pytest.raises(KeyboardInterrupt):
        train(tiny_model, tmp_path / "out", config(), before_update=at(0, twice))


def test_a_run_keeps_the_memory_it_frees(tiny_model, tmp_path, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: asked.append(1))
    TrainRun("toy", tmp_path / "out", config(), tiny_model, {tiny_model.reader: 1.0})
    assert asked == [1]


def test_signal_handlers_are_given_back(tiny_model, tmp_path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    train(tiny_model, tmp_path / "out", config())
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


class PowerCut(BaseException):
    """Nobody catches it."""


def test_checkpoint_that_dies_while_written_leaves_the_old_one(
    tiny_model_folder, tmp_path, plain, monkeypatch
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    save = torch.save

    def die(states, file) -> None:
        save(states, file)
        if states["step"] == 6:
            file.truncate(1000)
            raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", die)
        with pytest.raises(PowerCut):
            train(load_model(tiny_model_folder), out, settings)
    assert checkpoints(out) == ["checkpoint-00000003.pt"]
    killed, left = tmp_path / "out.training" / ".checkpoint-00000006.pt.1.tmp", []
    killed.write_bytes(b"half")
    look = at(6, lambda: left.append(killed.exists()))
    train(load_model(tiny_model_folder), out, settings, after_update=look)
    assert left == [False]
    assert_same_result(out, plain)


def test_last_checkpoints_are_kept_and_remember_their_state(tiny_model, tmp_path) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    part = tiny_model.embedder.query.projection
    seen = []
    with TrainRun("toy", out, settings, tiny_model, {part: 0.1}) as run:
        run.after_checkpoint = lambda: seen.append((run.step, run.checkpointed("mark")))
        for step in run.steps():
            run.state["mark"] = step + 1
            run.update(part(DATA).square().mean(), {})
    assert seen == [(3, [3]), (6, [3, 6]), (9, [6, 9]), (12, [9, 12])]
    assert checkpoints(out) == ["checkpoint-00000009.pt", "checkpoint-00000012.pt"]


def test_damaged_checkpoint_is_passed_over_for_the_one_before_it(
    tiny_model_folder, tmp_path, plain, capsys
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    newest = tmp_path / "out.training" / "checkpoint-00000006.pt"
    os.truncate(newest, newest.stat().st_size // 2)
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)
    said = capsys.readouterr().err
    assert f"{newest} cannot be read" in said and "continuing from checkpoint-00000003.pt" in said


def flip_in_the_middle(file: Path) -> None:
    """One bit among the numbers of a tensor, which torch does not notice."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    torch.load(file, weights_only=True)


def test_checkpoint_with_a_flipped_bit_is_passed_over(tiny_model_folder, tmp_path, plain, capsys) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    flip_in_the_middle(tmp_path / "out.training" / "checkpoint-00000006.pt")
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)
    assert "differs from its checksum; continuing from checkpoint-00000003.pt" in capsys.readouterr().err


def test_checkpoint_under_the_name_of_another_is_passed_over(
    tiny_model_folder, tmp_path, plain, capsys
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    folder = tmp_path / "out.training"
    shutil.copy(folder / "checkpoint-00000003.pt", folder / "checkpoint-00000006.pt")
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)
    assert "is of step 3; continuing from checkpoint-00000003.pt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [None, b"", b"[1]", b"{", b"\xff\xfe", b'{"seed": "\\ud800"}', b"[" * 100_000]
)
def test_run_whose_settings_are_damaged_is_refused_and_keeps_its_checkpoints(
    tiny_model_folder, tmp_path, plain, content
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    file = tmp_path / "out.training" / "settings.json"
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RealmError, match=r"settings\.json cannot be read .*put the file back") as error:
        train(load_model(tiny_model_folder), out, settings)
    assert "\n" not in str(error.value)
    file.write_bytes(before)
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


def damaged_runs_go_on_as_before_or_not_at_all(model: Path, tmp_path: Path, count: int, seed: int) -> None:
    """Damages of an interrupted run's folder; its metrics are its own account, and nothing is computed from them."""
    settings = config(checkpoint_seconds=0.0)
    before, plain = tmp_path / "before", tmp_path / "plain"
    with pytest.raises(RuntimeError):
        train(load_model(model), before, settings, after_update=at(8, crash))
    train(load_model(model), plain, settings)
    draw, out, went_on = random.Random(seed), tmp_path / "out", 0
    for number in range(count):
        folder = shutil.copytree(tmp_path / "before.training", tmp_path / "out.training")
        what = damage(draw, sorted(path for path in folder.iterdir() if path.name != "lock"))
        try:
            train(load_model(model), out, settings)
        except RealmError as error:
            said = str(error)
            shutil.rmtree(folder)
        else:
            said, mine = "", load_model(out)
            for name, part in load_model(plain).parts().items():
                for key, value in part.state_dict().items():
                    same = torch.equal(mine.parts()[name].state_dict()[key], value)
                    assert same, f"seed {seed}, damage {number}: {what}"
            shutil.rmtree(out)
            went_on += 1
        assert "\n" not in said
    assert count // 4 < went_on < count


def test_a_damaged_run_goes_on_as_before_or_not_at_all(tiny_model_folder, tmp_path) -> None:
    damaged_runs_go_on_as_before_or_not_at_all(tiny_model_folder, tmp_path, 6, 3)


@pytest.mark.slow
def test_many_damaged_runs_go_on_as_before_or_not_at_all(tiny_model_folder, tmp_path, trials) -> None:
    damaged_runs_go_on_as_before_or_not_at_all(tiny_model_folder, tmp_path, trials.count(200), trials.seed)


def test_metrics_that_lost_their_end_are_a_warning_and_are_not_filled_up(
    tiny_model_folder, tmp_path, capsys
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    os.truncate(tmp_path / "out.training" / "metrics.jsonl", 0)
    train(load_model(tiny_model_folder), out, settings)
    assert [line["step"] for line in lines(out)] == [8, 9, 12, 12]
    assert "is shorter than at the last checkpoint" in capsys.readouterr().err


def test_run_whose_checkpoints_are_all_damaged_is_refused(tiny_model_folder, tmp_path) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    for name in checkpoints(out):
        (tmp_path / "out.training" / name).write_bytes(b"torn")
    with pytest.raises(RealmError, match=r"cannot be read.*remove .*out\.training to start again") as error:
        train(load_model(tiny_model_folder), out, settings)
    assert "\n" not in str(error.value)


def test_run_that_finds_no_memory_for_its_checkpoint_does_not_call_it_damaged(
    tiny_model_folder, tmp_path, plain, monkeypatch
) -> None:
    out, settings = tmp_path / "out", config(checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError):
        train(load_model(tiny_model_folder), out, settings, after_update=at(8, crash))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *args, **options: torch.empty(2**58))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            train(load_model(tiny_model_folder), out, settings)
    train(load_model(tiny_model_folder), out, settings)
    assert_same_result(out, plain)


def test_run_killed_while_it_tidied_up_is_complete(tiny_model_folder, tmp_path, monkeypatch, plain) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(
            run_folder.shutil, "rmtree", lambda folder, **_: folder.suffix != ".training" or crash()
        )
        with pytest.raises(RuntimeError):
            train(load_model(tiny_model_folder), out, config())
    assert out.exists() and (tmp_path / "out.training").exists()
    with pytest.raises(RealmError, match="exists: name another --out"):  # another run's command
        train(load_model(tiny_model_folder), out, config(seed=1))
    with pytest.raises(AlreadyDone, match="is complete"):
        train(load_model(tiny_model_folder), out, config())
    assert_same_result(out, plain)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
