"""Several results per item from processes of this machine: in order, not far ahead, and whatever is killed."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path

import pytest

from realm.local_processes import RESULTS_AHEAD, map_in_processes
from realm.refusals import OwnWork, Refused


def counting(folder: Path, size: int) -> Callable[[int], Iterator[tuple[int, int, bytes]]]:
    """Prepares the function that gives thirty results for an item, and notes each result by a file."""

    def results(number: int) -> Iterator[tuple[int, int, bytes]]:
        for step in range(30):
            (folder / f"{number}-{step} {os.getpid()}").touch()
            yield number, step, bytes(size)

    return results


def test_results_are_in_order_and_a_killed_process_is_replaced_in_the_middle_of_its_item(
    tmp_path: Path,
) -> None:
    found = map_in_processes(partial(counting, tmp_path, 100_000), iter(range(5)), 2)
    first = [next(found)[:2] for _ in range(3)]
    (busy,) = {int(path.name.split()[1]) for path in tmp_path.glob("0-*")}
    next(one for one in multiprocessing.active_children() if one.pid == busy).kill()
    assert [*first, *(one[:2] for one in found)] == [
        (number, step) for number in range(5) for step in range(30)
    ]
    assert len({path.name.split()[1] for path in tmp_path.glob("0-*")}) == 2
    assert not multiprocessing.active_children()


def test_a_process_waits_until_results_of_its_item_are_used(tmp_path: Path) -> None:
    # larger than what the system stores for a connection
    found = map_in_processes(partial(counting, tmp_path, 1_000_000), iter(range(4)), 2)
    next(found)
    time.sleep(1)
    assert len(list(tmp_path.iterdir())) <= 2 * (RESULTS_AHEAD + 3)
    found.close()


@pytest.mark.parametrize("used", [1, 3, 31])
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_an_early_end_leaves_no_process(used: int, size: int, tmp_path: Path) -> None:
    for _ in range(3):
        found = map_in_processes(partial(counting, tmp_path, size), count(), 2)
        assert len(list(islice(found, used))) == used
        found.close()
        assert not multiprocessing.active_children()


def failing() -> Callable[[int], Iterator[int]]:
    def results(number: int) -> Iterator[int]:
        if number == 2:
            raise OSError("the file ends here")  # not an error of the connection
        yield number

    return results


def test_results_before_an_error_are_given() -> None:
    found = map_in_processes(failing, iter(range(5)), 2)
    assert list(islice(found, 2)) == [0, 1]
    with pytest.raises(OSError, match="the file ends here"):
        next(found)
    assert not multiprocessing.active_children()


def refusing() -> Callable[[int], Iterator[tuple[int, int]]]:
    def results(number: int) -> Iterator[tuple[int, int]]:
        for step in range(5):
            if number % 3 == step:
                raise Refused("no such file")
            yield number, step

    return results


def test_what_processes_refuse_is_done_here_from_the_first_missing_result_on() -> None:
    own = OwnWork(lambda number: ((number, step) for step in range(5)), lambda number: number == 4)
    found = list(map_in_processes(refusing, iter(range(9)), 2, own))
    assert found == [(number, step) for number in range(9) for step in range(5)]
    with pytest.raises(Refused, match="no such file"):
        list(map_in_processes(refusing, iter(range(9)), 2))


def unprepared() -> Callable[[int], Iterator[int]]:
    raise ValueError("no such tokenizer")


def test_an_error_of_the_preparation_is_raised() -> None:
    with pytest.raises(ValueError, match="no such tokenizer"):
        list(map_in_processes(unprepared, iter(range(3)), 2))
    assert not multiprocessing.active_children()


INTERRUPTED = """
import inspect, itertools, multiprocessing, sys
from realm.local_processes import map_in_processes

def prepare():
    return lambda item: [item] * 2

def is_interrupted(moment):
    '''Ctrl-C when the given number of functions have begun or ended after the first result -> whether so many did.'''
    moments = itertools.count()
    def trace(frame, event, _):
        # A tracer that raises at the call of a generator also skips the `finally` of the generator; Ctrl-C does not.
        at_function = event in ("call", "return") and not frame.f_code.co_flags & inspect.CO_GENERATOR
        if at_function and next(moments) == moment:
            raise KeyboardInterrupt
        return trace
    results = map_in_processes(prepare, itertools.count(), 2)
    next(results)
    sys.settrace(trace)
    try:
        for _ in itertools.islice(results, 4):
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        results.close()
        assert not multiprocessing.active_children()
    return False

# In a single try, results may be there sooner, so that fewer functions are called.
print(next(moment for moment in itertools.count() if not any(is_interrupted(moment) for _ in range(5))))
"""


def test_ctrl_c_at_any_moment_leaves_no_thread_that_waits_forever() -> None:
    ran = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 20


def test_a_program_ends_although_it_does_not_use_all_results() -> None:
    program = """
import itertools
from realm.local_processes import map_in_processes
results = map_in_processes(lambda: lambda item: [item] * 30, itertools.count(), 2)
print(next(results))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "0\n", "")


@pytest.mark.parametrize("module", ["realm.documents.child_process", "realm.documents.wikipedia.dumps"])
def test_a_process_that_reads_files_ends_when_its_killed_parent_has_ended(module: str) -> None:
    # The child shares the pipes of its parent, so its standard input stays open.
    parent = f"""
import subprocess, {module} as module
start = subprocess.Popen
subprocess.Popen = lambda *args, **more: start(*args, **{{**more, "stdin": None, "stdout": None}})
child = module._start()
print(child.pid, flush=True)
child.wait()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None and int(process.stdout.readline()) > 0
        time.sleep(1)
        process.kill()
        began = time.monotonic()
        assert process.stdout.read() == b""  # returns when the child has ended too
        assert time.monotonic() - began < 60
