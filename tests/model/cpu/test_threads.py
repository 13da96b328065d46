"""Pieces shared out among threads: all of them, once each, whoever computes them."""

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from realm.model.cpu import threads as workers
from realm.model.cpu.dropout import FastDropout
from realm.model.cpu.threads import thread_map


def squares(numbers: range) -> list[int]:
    return thread_map(lambda number: number**2, numbers)


def test_every_piece_is_computed_by_threads_whose_torch_is_single_threaded(two_threads) -> None:
    seen: set[tuple[str, int, bool, bool]] = set()
    all_here = threading.Barrier(2)

    def look(number: int) -> None:
        if number < 2:
            all_here.wait(20)
        name, alone = threading.current_thread().name, torch.get_num_threads()
        seen.add((name, alone, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        thread_map(look, range(50))
    assert len(seen) == 2 and {one[1:] for one in seen} == {(1, False, False)}
    assert torch.get_num_threads() == 2
    assert squares(range(1000)) == [number**2 for number in range(1000)]


@pytest.mark.parametrize("pieces", [0, 1, 9])
def test_one_thread_does_it_itself(pieces) -> None:
    seen: set[str] = set()
    thread_map(lambda _: seen.add(threading.current_thread().name), range(pieces))
    assert seen == ({threading.current_thread().name} if pieces else set())


def test_what_a_piece_raises_is_raised(two_threads) -> None:
    def fail(number: int) -> None:
        if number == 7:
            raise ZeroDivisionError(number)

    with pytest.raises(ZeroDivisionError):
        thread_map(fail, range(20))
    assert squares(range(20)) == [number**2 for number in range(20)]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests run in the background of a shell, which ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_pieces_that_nobody_has_begun_are_left_when_the_user_interrupts(two_threads, interruptible) -> None:
    done: list[int] = []
    first = threading.Lock()

    def work(number: int) -> None:
        if first.acquire(blocking=False):
            time.sleep(0.1)  # until this test waits: a signal on the way there is seen late
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.01)
        done.append(number)

    with pytest.raises(KeyboardInterrupt):
        thread_map(work, range(1000))
    assert squares(range(20)) == [number**2 for number in range(20)]  # after what was begun then
    assert len(done) < 500


def test_nobody_waits_for_the_pieces_of_others(two_threads) -> None:
    """As a question while a server embeds what was added, or what a piece shares out itself."""
    begun, go_on = threading.Event(), threading.Event()

    def long(number: int) -> list[int]:
        begun.set()
        assert go_on.wait(20)
        return squares(range(number))

    other = threading.Thread(target=thread_map, args=(long, range(4)))
    other.start()
    assert begun.wait(20)
    assert squares(range(50)) == [number**2 for number in range(50)]
    assert other.is_alive()
    go_on.set()
    other.join(20)
    assert not other.is_alive()
    assert thread_map(lambda number: squares(range(number)), range(9))[8] == squares(range(8))


def test_an_error_comes_when_no_piece_is_being_computed_any_more(two_threads) -> None:
    both, ended = threading.Barrier(2), threading.Event()

    def work(number: int) -> None:
        both.wait(20)
        if number == 0:
            raise ZeroDivisionError
        time.sleep(0.1)
        ended.set()

    with pytest.raises(ZeroDivisionError):
        thread_map(work, range(2))
    assert ended.is_set()


def test_a_thread_that_cannot_be_had_is_an_error_and_nobody_waits(two_threads, monkeypatch) -> None:
    workers._pool.cache_clear()
    start, started = threading.Thread.start, []

    def start_one(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_one)
        with pytest.raises(RuntimeError, match="can't start"):
            squares(range(5))
    assert torch.get_num_threads() == 2
    assert squares(range(5)) == [0, 1, 4, 9, 16]


def test_tensors_of_inference_mode_may_be_written(two_threads) -> None:
    with torch.inference_mode():
        values = torch.zeros(8)
        thread_map(lambda n: values[n].fill_(n), range(8))
    assert values.tolist() == list(range(8))


def work_after_fork(told) -> None:
    told.send(squares(range(30)))


def test_a_forked_process_has_threads_of_its_own(two_threads) -> None:
    squares(range(30))
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=work_after_fork, args=(theirs,))
    child.start()
    try:
        assert ours.poll(30) and ours.recv() == [number**2 for number in range(30)]
    finally:
        child.kill()
        child.join()


ENDS_WHILE_THREADS_COMPUTE = """
import threading, time, torch
from realm.model.cpu.threads import thread_map
torch.set_num_threads(2)
values, begun = torch.rand(400, 400), threading.Event()

def work(number):
    begun.set()
    for _ in range(100):
        values @ values

threading.Thread(target=thread_map, args=(work, range(20)), daemon=True).start()
begun.wait()
"""


@pytest.mark.slow
def test_a_program_may_end_while_its_threads_compute() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_WHILE_THREADS_COMPUTE], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_dropout_draws_the_same_with_one_thread_and_two(two_threads) -> None:
    values, drawn = torch.ones(3, 1 << 18, requires_grad=True), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(4)
        dropped = FastDropout(0.25).train()(values)
        (gradient,) = torch.autograd.grad(dropped.sum(), values)
        assert torch.equal(gradient, dropped)
        drawn.append(dropped)
    assert torch.equal(*drawn)
    assert abs((drawn[0] == 0).float().mean().item() - 0.25) < 0.003
