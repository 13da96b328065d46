import sys
import threading
import weakref

import pytest

from realm.worker_threads import WorkerThreads


def test_results_and_errors_are_those_of_the_functions() -> None:
    threads = WorkerThreads(2, "work")
    results = [threads.submit(lambda number=number: 6 // number) for number in (3, 0, 2)]
    assert results[0].result() == results[0].result() == 2
    results[1].wait()
    with pytest.raises(ZeroDivisionError):
        results[1].result()
    assert results[2].result() == 3
    with pytest.raises(SystemExit):
        threads.submit(lambda: sys.exit(3)).result()
    threads.close()


def test_a_thread_that_waits_keeps_nothing_of_the_function_before() -> None:
    class Data:
        pass

    threads, data = WorkerThreads(1, "work"), Data()
    kept = weakref.ref(data)
    threads.submit(lambda data=data: data).wait()
    threads.submit(int).wait()
    del data
    threads.submit(int).wait()
    assert kept() is None
    threads.close()


def test_closing_waits_for_the_function_that_runs_and_drops_the_others() -> None:
    begun, goes_on, called = threading.Event(), threading.Event(), []
    threads = WorkerThreads(1, "work")
    threads.submit(lambda: (begun.set(), goes_on.wait(), called.append("first")))
    threads.submit(lambda: called.append("second"))
    begun.wait()
    threading.Timer(0.05, goes_on.set).start()
    threads.close()
    assert called == ["first"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("work_")]
