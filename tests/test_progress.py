"""What a log shows of long work: plain lines, seldom, with rate and time left."""

from types import SimpleNamespace

import pytest

from realm import progress as lines
from realm.progress import progress


class Clock:
    """Seconds that pass when a test says so, and what was printed meanwhile."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.now, self._capsys = 0.0, capsys

    def printed(self) -> list[str]:
        return self._capsys.readouterr().err.splitlines()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Clock:
    clock = Clock(capsys)
    monkeypatch.setattr(lines, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_log_gets_a_line_every_half_minute_with_rate_time_left_and_loss(clock: Clock) -> None:
    with progress(total=400, description="ict", unit="step", done=100) as bar:
        for _ in range(120):
            clock.now += 0.5
            bar.update()
            bar.set_postfix({"loss": "2.5"})
        assert clock.printed() == [
            "ict: step 160 of 400 (40%), 0:30 so far, 2.0 a second, 2:00 left, loss=2.5",
            "ict: step 220 of 400 (55%), 1:00 so far, 2.0 a second, 1:30 left, loss=2.5",
        ]
        clock.now += 20
        bar.update(180)
    assert clock.printed() == ["ict: step 400 of 400 (100%), 1:20 so far, 9.0 a second, loss=2.5"]


def test_slow_work_of_unknown_length_is_counted_in_seconds_each(clock: Clock) -> None:
    for _ in progress(iter("abc"), total=None, description="read", unit="document"):
        clock.now += 45
    assert clock.printed() == [
        f"read: document {n}, {time} so far, 45.0 s each"
        for n, time in ((1, "0:45"), (2, "1:30"), (3, "2:15"))
    ]


def test_work_of_less_than_half_a_minute_and_work_that_another_reports_print_nothing(clock: Clock) -> None:
    for _ in progress(range(3), total=3, description="read", unit="document"):
        clock.now += 9
    for _ in progress(range(3), total=3, description="read", unit="document", shown=False):
        clock.now += 90
    assert clock.printed() == []
