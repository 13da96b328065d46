"""Weights that are sharded among ranks: shares of memory, the same training as with whole weights, and checkpoints for every
number of ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from realm import distributed
from realm.errors import InputError
from realm.model.embedder import EmbedderConfig, embedder_from
from realm.model.folder import Model, load_model
from realm.tokens.layouts import joint_inputs
from realm.train.loop import TrainRun
from realm.train.optimizer import Optimizer
from realm.train.run_config import LARGEST_NORM, RunConfig
from realm.train.sharding import gathered, is_sharded, load_weights, shard_weights, whole, whole_model
from tests.conftest import RIVERS, TOWNS
from tests.ranks import run_on_ranks
from tests.train.stages import children_of, metrics, weights

CONFIG = RunConfig(bias_correction=False)


def loss_of(model: Model) -> torch.Tensor:
    """A loss that trains reader and embedder."""
    inputs = joint_inputs([[7, 8, 9], [10, 11]], [[12, 13], [14]], model.tokenizer, model.lengths)
    row_P, position_P = torch.tensor([0, 1]), torch.tensor([2, 1])
    logp_P = model.reader.target_logp(inputs, row_P, position_P, torch.tensor([20, 21]))
    return model.embedder.query(inputs)[:, 0].sum() - logp_P.sum()


def step(model: Model) -> tuple[Optimizer, float]:
    """An optimizer after one step, and the norm of the gradient before clipping."""
    optimizer = Optimizer({model.reader: 1e-2, model.embedder: 1e-2}, CONFIG)
    loss_of(model).backward()
    norm = optimizer.clip().item()
    optimizer.step(0)
    return optimizer, norm


def held(tensors: list[torch.Tensor]) -> int:
    """Number of elements that this rank holds of some tensors."""
    return sum(getattr(tensor, "_local_tensor", tensor).numel() for tensor in tensors)


def of_rank(rank: int, folder: str, results: str) -> None:
    """One step with sharded weights in each of two ranks; rank 0 saves what it has seen."""
    dist.init_process_group("gloo", init_method=f"file://{results}/meet", rank=rank, world_size=2)
    model = load_model(folder)
    count = sum(p.numel() for part in model.parts().values() for p in part.parameters())
    shard_weights(model, torch.device("cpu"))
    parameters = [p for part in model.parts().values() for p in part.parameters()]
    optimizer, norm = step(model)
    averages = [value for state in optimizer.adamw.state.values() for value in state.values() if value.ndim]
    saved = gathered({"reader": model.reader.state_dict(), "optimizer": optimizer.state_dict()})
    trained = whole_model(model)
    # Weights of one step are set back to other weights, whole or sharded.
    sharded = {name: value.detach().clone() for name, value in model.embedder.named_parameters()}
    none = {name: torch.zeros(value.shape) for name, value in sharded.items()}
    load_weights(model.embedder, none, strict=False)  # one tower: the names of the second tower are missing
    zeros = [bool((value == 0).all()) for value in whole(model.embedder).state_dict().values()]
    load_weights(model.embedder, sharded, strict=False)
    seen = {
        "norm": norm,
        "share": held(parameters) / count,
        "averages": held(averages) / count,
        "zeros": all(zeros),
        "back": all(map(torch.equal, whole(model.embedder).parameters(), trained.embedder.parameters())),
        "most": distributed.maximum(3 + rank),
        "tied": trained.reader.bert.cls.predictions.decoder.weight
        is trained.reader.bert.bert.embeddings.word_embeddings.weight,
    }
    Path(f"{results}/seen{rank}").write_text(json.dumps(seen))
    if rank == 0:
        torch.save(saved, f"{results}/checkpoint.pt")
        trained.save(Path(results) / "model")
    del optimizer, model, parameters, averages
    # The clocks of the ranks differ: a checkpoint is due on rank 0 after each step, and on rank 1 never.
    model, saves = load_model(folder), []
    config = RunConfig(
        steps=3, batch_size=2, log_every=1, checkpoint_seconds=1e9 * rank, device="cpu", precision="fp32", dropout=0,
        shard_weights=True,
    )  # fmt: skip
    parts = {model.reader: 1e-3, model.embedder: 1e-3}
    with TrainRun("toy", Path(results) / "run", config, model, parts, shares=True) as run:
        run.after_checkpoint = lambda: saves.append(run.step)
        for _ in run.steps():
            run.update(loss_of(model), {})
        run.finish()
    assert saves == ([] if rank else [1, 2, 3])


def test_two_ranks_hold_half_of_the_weights_each_and_train_as_one_process(
    tiny_model_folder, tmp_path
) -> None:
    run_on_ranks(of_rank, (str(tiny_model_folder), str(tmp_path)), 2)
    model = load_model(tiny_model_folder)
    optimizer, norm = step(model)
    seen = [json.loads((tmp_path / f"seen{rank}").read_text()) for rank in (0, 1)]
    assert norm > LARGEST_NORM
    for one in seen:
        assert one["norm"] == pytest.approx(norm, rel=1e-5)
        # A weight with an odd number of rows has one row more on rank 0.
        assert one["share"] == pytest.approx(0.5, abs=0.02) and one["averages"] == pytest.approx(
            1.0, abs=0.04
        )
        assert one["zeros"] and one["back"] and one["tied"] and one["most"] == 4
    assert load_model(tmp_path / "run").step == 3
    for name, value in weights(tmp_path / "model").items():
        part, key = name.split(".", 1)
        torch.testing.assert_close(
            value, model.parts()[part].state_dict()[key], rtol=1e-4, atol=1e-5, msg=name
        )
    # The checkpoint of the two ranks is for a process with whole weights.
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    model.reader.load_state_dict(saved["reader"])
    own = optimizer.state_dict()["state"]
    optimizer.load_state_dict(saved["optimizer"])
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(value, own[number][name], rtol=1e-3, atol=1e-6)


def test_whole_weights_are_left_as_they_are(tiny_model) -> None:
    assert not is_sharded(tiny_model.embedder) and whole(tiny_model.embedder) is tiny_model.embedder
    assert whole_model(tiny_model).parts() == tiny_model.parts()
    values = {"weights": [torch.ones(2)], "name": "a"}
    assert gathered(values) == values


def test_towers_without_layers_are_not_sharded(tiny_model) -> None:
    tiny_model.embedder = embedder_from(tiny_model.reader, EmbedderConfig(dim=8, pooling="words"))
    with pytest.raises(InputError, match="embed words alone"):
        shard_weights(tiny_model, torch.device("cpu"))


COMMANDS = {
    "mlm": "--config tiny --set principal=false --set cached_rows=2",
    "finetune": "--config tiny --model {model} --train q.jsonl --dev q.jsonl --set dev_every=4 --set reader_gradient=all",
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", COMMANDS)
def test_checkpoint_of_two_sharded_ranks_is_resumed_by_one_process_and_by_three(
    stage, tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [{"question": f"on which river lies {town}?", "answers": RIVERS} for town in TOWNS]
    Path("q.jsonl").write_text("\n".join(map(json.dumps, asked)))
    words = [stage, *COMMANDS[stage].format(model=tiny_model_folder).split(), "--kb", str(tiny_kb.folder)]
    for setting in (
        "steps=40 batch_size=6 log_every=1 checkpoint_seconds=0 device=cpu precision=fp32 dropout=0 shard_weights=true"
    ).split():
        words += ["--set", setting]

    def start(out: str, processes: int) -> subprocess.Popen:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
        with Path(f"{out}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *launch, "-m", "realm", *words, "--out", out],
                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
            )  # fmt: skip

    assert start("whole", 1).wait() == 0, Path("whole.log").read_text()
    process, end = start("killed", 2), time.monotonic() + 300
    while not list(tmp_path.glob("killed.training/checkpoint-0000000[5-9].pt")):
        assert process.poll() is None and time.monotonic() < end, Path("killed.log").read_text()
        time.sleep(0.01)
    for one in (process.pid, *children_of(process.pid)):
        os.kill(one, signal.SIGKILL)
    process.wait()
    for name, processes in (("one", 1), ("three", 3)):
        shutil.copytree("killed.training", f"{name}.training")
        assert start(name, processes).wait() == 0, Path(f"{name}.log").read_text()
        for mine, theirs in zip(metrics(Path(name)), metrics(Path("whole")), strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                assert value is None or mine[key] == pytest.approx(value, rel=1e-3, abs=1e-3), key
        expected = weights(Path("whole"))
        for key, value in weights(Path(name)).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4, msg=key)
