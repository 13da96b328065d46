"""Several processes train as one: same losses, swaps at the same step, and a run goes on at another number of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from realm import cli, distributed
from realm.errors import InputError, RealmError
from tests.conftest import RIVERS, TOWNS
from tests.ranks import run_on_ranks
from tests.train.stages import children_of, metrics, pretraining, weights

SETTINGS = (
    "steps=12 batch_size=4 log_every=1 checkpoint_seconds=0 device=cpu precision=fp32 refresh.every=4 "
    "refresh.lag=2 refresh.in_background=true health.queries=8 health.read=4 ict=0.5 ict_batch=4"
).split()


def test_one_process_is_left_as_it_is() -> None:
    rows, weight = np.arange(6), torch.tensor(7.0)
    assert distributed.world_size() == 1 and distributed.is_main_process()
    assert distributed.shard(rows) is rows and distributed.loss_weight(weight).item() == 1
    assert distributed.all_reduce_mean([1.0, 2.0]) == [1.0, 2.0]
    assert distributed.broadcast(3) == 3
    distributed.check_batch(5)
    distributed.barrier()
    distributed.shutdown()


def of_rank(rank: int, file: str, results: str) -> None:
    """What each of two ranks sees, as one JSON file."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    one, two, none = (nn.Linear(width, 1, bias=False) for width in (2, 1, 1))
    loss = one(torch.tensor([1.0, 3.0]) * (rank + 1)).sum()
    if rank == 1:
        loss = loss + two(torch.tensor([4.0])).sum()
    averaging = distributed.averaging([one, two, none])
    averaging(loss).backward()
    # A batch of five rows of which this rank has its own; the loss is the same on both.
    turned = nn.Linear(2, 2, bias=False)
    nn.init.eye_(turned.weight)
    rows_BD = distributed.all_gather(turned(distributed.shard(torch.arange(10.0).view(5, 2))), 5)
    loss = (rows_BD @ rows_BD.T).softmax(dim=1).square().sum()
    averaging = distributed.averaging([turned])
    averaging(loss).backward()
    del averaging, loss
    try:
        distributed.check_batch(5)
        refused = ""
    except InputError as error:
        refused = str(error)
    seen = {
        "share": distributed.shard(list(range(5))),
        "weight": distributed.loss_weight(torch.tensor([3.0, 1.0][rank])).item(),
        "mean": distributed.all_reduce_mean([float(rank), 5.0]),
        "grads": [one.weight.grad.tolist(), two.weight.grad.tolist(), none.weight.grad],
        "rows": rows_BD.tolist(),
        "gathered": turned.weight.grad.T.tolist(),
        "first": distributed.broadcast(f"said by {rank}"),
        "refused": refused,
    }
    Path(f"{results}{rank}").write_text(json.dumps(seen))
    distributed.shutdown()


def test_two_ranks_share_rows_and_agree_on_means(tmp_path) -> None:
    run_on_ranks(of_rank, (str(tmp_path / "meet"), str(tmp_path / "seen")), 2)
    first, second = (json.loads((tmp_path / f"seen{rank}").read_text()) for rank in (0, 1))
    assert (first.pop("share"), second.pop("share")) == ([0, 2, 4], [1, 3])
    assert (first.pop("weight"), second.pop("weight")) == (1.5, 0.5)  # 3 and 1 of 4, times 2
    assert first == second
    assert first["mean"] == [0.5, 5.0]
    assert first["grads"] == [[[1.5, 4.5]], [[2.0]], None]
    weight_DE = nn.Parameter(torch.eye(2))
    rows_BD = torch.arange(10.0).view(5, 2) @ weight_DE
    (rows_BD @ rows_BD.T).softmax(dim=1).square().sum().backward()
    assert first["rows"] == rows_BD.tolist()
    np.testing.assert_allclose(first["gathered"], weight_DE.grad, rtol=1e-4, atol=1e-6)
    assert first["first"] == "said by 0"
    assert "multiple of 2" in first["refused"]


def test_processes_that_are_started_again_do_not_use_what_killed_processes_stored() -> None:
    store, found = dist.HashStore(), {}

    def join(attempt: int, rank: int) -> None:
        own = distributed.store_of_attempt(store, rank, 3)
        own.set(f"address/{rank}", f"{attempt}")
        found[attempt, rank] = [own.get(f"address/{other}").decode() for other in range(3)]

    for attempt in range(2):
        # Rank 0 comes last in one attempt and first in the other.
        ranks = [
            threading.Thread(target=join, args=(attempt, rank)) for rank in (2, 1, 0)[:: 1 - 2 * attempt]
        ]
        for rank in ranks:
            rank.start()
            time.sleep(0.1)
        for rank in ranks:
            rank.join(timeout=60)
    assert found == {(attempt, rank): [f"{attempt}"] * 3 for attempt in range(2) for rank in range(3)}


@pytest.mark.parametrize(("rank", "missing"), [(0, "1, 2"), (2, "0")])
def test_a_rank_that_never_starts_is_an_error_after_a_limit(rank: int, missing: str, monkeypatch) -> None:
    monkeypatch.setattr(distributed, "JOIN_TIMEOUT", timedelta(seconds=0.2))
    with pytest.raises(RealmError, match=rf"^rank {rank} waited 0\.2 s for rank {missing}: "):
        distributed.store_of_attempt(dist.HashStore(), rank, 3)


@pytest.mark.parametrize("interface", [None, "eth0"])
@pytest.mark.parametrize("machines", [("a", "b"), ("b", "a"), ("a", "c"), ("a", "a"), ("b", "b")])
def test_machines_that_others_cannot_reach_by_their_names_are_named_by_all_ranks(
    machines: tuple[str, str], interface: str | None, monkeypatch
) -> None:
    store, refused = dist.HashStore(), dict[str, str]()

    def addresses(machine: str, port: None) -> list[tuple]:
        if machine == "c":
            raise socket.gaierror
        found = {"a": ("fd00::2", "127.0.1.1"), "b": ("::1", "127.0.1.1")}[machine]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]

    def check(rank: int) -> None:
        try:
            distributed.check_machine_names(store, rank, 2)
        except InputError as error:
            refused[threading.current_thread().name] = str(error)

    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name.partition(" ")[0])
    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    ranks = [
        threading.Thread(target=check, args=(rank,), name=f"{machine} {rank}")
        for rank, machine in enumerate(machines)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
    alone = set(machines) & {"b", "c"}
    named = alone if len(set(machines)) == 2 and interface is None else set()
    assert len(refused) == (2 if named else 0)
    for message in refused.values():
        assert message.startswith(f"other machines cannot reach {''.join(named)}, because this name has")


@pytest.fixture
def start(tiny_kb, tiny_model_folder, tmp_path):
    """Starts a pre-training run in so many processes; with `machine` 1 or 2, on one of two machines, whose addresses begin with
    `network`. `program` stands for `-m realm`, and `inside` is the command that starts it elsewhere."""
    port = free_port()

    def begin(
        name: str,
        processes: int,
        *,
        settings: Sequence[str] = (),
        restarts: int = 0,
        machine: int = 0,
        program: Sequence[str] = ("-m", "realm"),
        network: str = "127.0.0.",
        inside: Sequence[str] = (),
    ) -> subprocess.Popen:
        arguments = pretraining(tiny_kb, tiny_model_folder, [*SETTINGS, *settings])
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        launch = torchrun if processes > 1 or machine else []
        launch += ["--max-restarts", str(restarts)] if restarts else []
        if machine:
            launch += f"--nnodes {1 if restarts else 2}:2 --rdzv-id {name} --rdzv-backend c10d".split()
            launch += ["--rdzv-endpoint", f"{network}1:{port}", "--local-addr", f"{network}{machine}"]
            launch += ["--rdzv-conf", f"is_host={machine == 1}"]  # otherwise both would be the host
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}  # for torchrun's logs
        with (tmp_path / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*inside, sys.executable, *launch, *program, *arguments, "--out", str(tmp_path / name)],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    return begin


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def assert_same_curve(one: Path, other: Path) -> None:
    mine, theirs = metrics(one), metrics(other)
    assert [row.keys() for row in mine] == [row.keys() for row in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert a["step"] == b["step"] and a["index_age"] == b["index_age"]
        for key in ("loss", "gradient_norm", "retrieval_utility", "marginal_logp", "ict_loss"):
            if a.get(key) is not None or b.get(key) is not None:
                assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-4), (key, a["step"])
        assert a.get("index_step") == b.get("index_step") and a.get("index_number") == b.get("index_number")


def wait_for_checkpoint(folder: Path, name: str, process: subprocess.Popen) -> None:
    """Waits for a checkpoint in the middle of a run."""
    end = time.monotonic() + 900
    while not list(folder.glob(f"{name}.training/checkpoint-0000000[5-9].pt")):
        assert process.poll() is None and time.monotonic() < end, (folder / f"{name}.log").read_text()
        time.sleep(0.01)


@pytest.mark.slow
def test_two_processes_train_as_one_and_a_run_goes_on_with_another_number(start, tmp_path) -> None:
    for name, processes in (("one", 1), ("two", 2)):
        assert start(name, processes).wait() == 0, (tmp_path / f"{name}.log").read_text()
    assert_same_curve(tmp_path / "two", tmp_path / "one")
    for name, before, after in (("fewer", 2, 1), ("more", 1, 2)):
        process = start(name, before)
        wait_for_checkpoint(tmp_path, name, process)
        for killed in (process.pid, *children_of(process.pid)):  # torchrun's workers live without it
            os.kill(killed, signal.SIGKILL)
        process.wait()
        assert start(name, after).wait() == 0, (tmp_path / f"{name}.log").read_text()
        assert_same_curve(tmp_path / name, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "after"), [(0, 1), (1, 3)])
def test_run_whose_process_was_killed_goes_on_with_one_process_or_with_three(
    killed, after, start, tmp_path
) -> None:
    settings = ["batch_size=6", "ict_batch=6"]
    assert start("whole", 1, settings=settings).wait() == 0
    process = start("run", 2, settings=settings)
    wait_for_checkpoint(tmp_path, "run", process)
    os.kill(workers_of(process)[killed], signal.SIGKILL)
    assert process.wait(timeout=300) != 0  # torchrun ends the other process
    assert start("run", after, settings=settings).wait() == 0, (tmp_path / "run.log").read_text()
    assert_same_curve(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "settings"), [(0, []), (1, ["shard_weights=true"])])
def test_torchrun_starts_the_processes_again_after_one_was_killed(killed, settings, start, tmp_path) -> None:
    assert start("whole", 1, settings=settings).wait() == 0
    process = start("run", 2, settings=settings, restarts=1)
    wait_for_checkpoint(tmp_path, "run", process)
    before = workers_of(process)
    os.kill(before[killed], signal.SIGKILL)
    assert process.wait(timeout=300) == 0, (tmp_path / "run.log").read_text()
    assert_same_curve(tmp_path / "run", tmp_path / "whole")


def workers_of(torchrun: subprocess.Popen) -> list[int]:
    """The processes that torchrun started, by rank."""

    def rank(process: int) -> int:
        return next(
            int(word.removeprefix("RANK=")) for word in environment(process) if word.startswith("RANK=")
        )

    return sorted(children_of(torchrun.pid), key=rank)


@pytest.mark.slow
def test_two_machines_train_as_one_and_one_goes_on_if_the_other_dies(start, tmp_path) -> None:
    """Each machine is a torchrun command with its own address."""
    assert start("whole", 1).wait() == 0
    both = [start("both", 1, machine=machine) for machine in (1, 2)]
    assert [agent.wait(timeout=600) for agent in both] == [0, 0], (tmp_path / "both.log").read_text()
    assert_same_curve(tmp_path / "both", tmp_path / "whole")
    left, dead = (start("run", 1, machine=machine, restarts=3) for machine in (1, 2))
    wait_for_checkpoint(tmp_path, "run", left)
    (worker,) = children_of(dead.pid)
    assert "WORLD_SIZE=2" in environment(worker)
    for killed in (dead.pid, worker):
        os.kill(killed, signal.SIGKILL)
    dead.wait()
    assert left.wait(timeout=600) == 0, (tmp_path / "run.log").read_text()
    assert_same_curve(tmp_path / "run", tmp_path / "whole")


NETWORK = "10.77.0."
"""The first three numbers of the addresses in the network of `namespaces`."""


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces that are joined by a cable and see no other network, if they are permitted."""
    names = [f"realm{os.getpid()}-{machine}" for machine in (1, 2)]
    first, second = names
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add cable netns {first} type veth peer name cable netns {second}")
    for machine, name in enumerate(names, start=1):
        commands.append(f"-n {name} address add {NETWORK}{machine}/24 dev cable")
        commands += [f"-n {name} link set {device} up" for device in ("lo", "cable")]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
        yield names
    except FileNotFoundError:
        pytest.skip("there is no command `ip`")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted: {error.stderr.strip()}")
    finally:
        for name in names:
            with suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.slow
def test_two_machines_with_only_a_cable_between_them_train_as_one(
    start, namespaces, tmp_path, monkeypatch
) -> None:
    """Unlike with two addresses of one machine, a process does not reach the other machine by its own loopback device."""
    # Without this variable, gloo uses the address of the machine's name, which may be that of the loopback device.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "cable")
    assert start("whole", 1).wait() == 0
    both = [
        start("both", 1, machine=machine, network=NETWORK, inside=["ip", "netns", "exec", name])
        for machine, name in enumerate(namespaces, start=1)
    ]
    assert [agent.wait(timeout=600) for agent in both] == [0, 0], (tmp_path / "both.log").read_text()
    assert_same_curve(tmp_path / "both", tmp_path / "whole")


SOON = """
import sys
from realm import cli, heartbeats
heartbeats.INTERVAL, heartbeats.SILENCE = 0.5, 10.0
if __name__ == "__main__":
    sys.exit(cli.main())
"""
"""`realm`, which takes a rank for silent after ten seconds."""


@pytest.mark.slow
def test_one_machine_goes_on_if_the_other_falls_silent(start, tmp_path) -> None:
    """The processes of a silent machine are stopped, not killed: their connections stay open."""
    assert start("whole", 1).wait() == 0
    program = tmp_path / "soon.py"
    program.write_text(SOON)
    left, silent = (
        start("run", 1, machine=machine, restarts=3, program=[str(program)]) for machine in (1, 2)
    )
    wait_for_checkpoint(tmp_path, "run", left)
    stopped = [silent.pid, *children_of(silent.pid)]
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    try:
        assert left.wait(timeout=300) == 0, (tmp_path / "run.log").read_text()
    finally:
        for process in stopped:
            os.kill(process, signal.SIGKILL)
        silent.wait()
    assert "realm: rank 0 has heard nothing from rank 1 for 10 s: " in (tmp_path / "run.log").read_text()
    assert_same_curve(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_machine_that_joins_later_trains_too(start, tmp_path, monkeypatch) -> None:
    # Otherwise torch 2.13 does not tell the joining machine the address of the first rank, and the run fails after a minute.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    settings = ["steps=150", "refresh.every=50"]
    assert start("whole", 1, settings=settings).wait() == 0
    first = start("run", 1, machine=1, restarts=1, settings=settings)
    wait_for_checkpoint(tmp_path, "run", first)
    joined = start("run", 1, machine=2, restarts=1, settings=settings)
    end = time.monotonic() + 120
    while "WORLD_SIZE=2" not in [word for one in children_of(first.pid) for word in environment(one)]:
        assert first.poll() is None and time.monotonic() < end, (tmp_path / "run.log").read_text()
        time.sleep(0.1)
    assert [agent.wait(timeout=600) for agent in (first, joined)] == [0, 0], (
        tmp_path / "run.log"
    ).read_text()
    assert_same_curve(tmp_path / "run", tmp_path / "whole")


def environment(process: int) -> list[str]:
    """The variables of a process; none if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/environ").read_text().split("\0")
    return []


OTHER_STAGES = (
    "ict --init {model} --set cached_rows=2",
    "ict --init {model}",
    "ict --init {model} --set shard_weights=true --set bias_correction=false",
    "mlm --set reading=0.5 --set encoder.layers=1 --set principal=false",
    # One row of a part, which only one of the ranks has; and another number of chunks on each rank.
    "mlm --set reading=0.125 --set copy_head=true --set principal=false --set cached_rows=3 --set shard_weights=true",
    "finetune --model {model} --train q.jsonl --dev q.jsonl --set dev_every=3 --set reader_gradient=all",
    "finetune --model {model} --train q.jsonl --dev q.jsonl --set reader_gradient=all"
    " --set update_passages=true --set refresh.every=2 --set refresh.lag=1",
    "finetune --model {model} --train q.jsonl --dev q.jsonl --set dev_every=3 --set reader_gradient=all"
    " --set update_passages=true --set refresh.every=2 --set refresh.lag=1 --set cached_rows=2 --set shard_weights=true",
)
"""Commands; the test of the first is not slow, so that `make test` starts `torchrun` once."""


@pytest.mark.parametrize(
    "command", [OTHER_STAGES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in OTHER_STAGES[1:])]
)
def test_other_stages_train_on_two_processes_as_on_one(
    command, tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [{"question": f"on which river lies {town}?", "answers": RIVERS} for town in TOWNS]
    Path("q.jsonl").write_text("\n".join(map(json.dumps, asked)))
    words = f"{command.format(model=tiny_model_folder)} --kb {tiny_kb.folder} --config tiny".split()
    for setting in "steps=6 batch_size=8 log_every=1 device=cpu precision=fp32 dropout=0".split():
        words += ["--set", setting]
    assert cli.main([*words, "--out", str(tmp_path / "1")]) == 0
    launch = [sys.executable, *"-m torch.distributed.run --nproc-per-node 2 -m realm".split()]
    subprocess.run(
        [*launch, *words, "--out", str(tmp_path / "2")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    one, two = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert value is None or value == pytest.approx(b[key], rel=1e-3, abs=1e-4), key
    assert_same_weights(tmp_path / "1", tmp_path / "2")


def assert_same_weights(one: Path, other: Path) -> None:
    """Six steps of Adam move a weight by up to 6e-3; float32 noise is a thousandth of that."""
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_signal_to_several_processes_saves_one_checkpoint(start, tmp_path) -> None:
    process = start("stopped", 2)
    end = time.monotonic() + 900
    while not list(tmp_path.glob("stopped.training/checkpoint-*.pt")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)  # torchrun hands it on
    assert process.wait() != 0 and not (tmp_path / "stopped").exists()
    assert start("stopped", 1).wait() == 0, (tmp_path / "stopped.log").read_text()
    assert start("one", 1).wait() == 0
    assert_same_curve(tmp_path / "stopped", tmp_path / "one")
