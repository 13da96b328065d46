"""Every command under a pseudo-terminal, where bars are shown; narrow and wide."""

import argparse
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import httpx
import pytest

from realm import cli
from realm.model.calibration import Calibration
from realm.progress import progress, values_that_fit
from realm.qa import calibrating
from tests.demo.test_from_text import SETTINGS, write_corpus, write_encoder

RUN = "--config tiny --set device=cpu --set precision=fp32"
TRAIN = f"{RUN} --set steps=4"
TABLES = " ".join(
    f"--set {one}"
    for one in (
        """'data.corpus=["towns.jsonl"]'""",
        """'data.text=["towns.jsonl"]'""",
        "data.encoder=start",
        "data.documents=0",
    )
)
LINES = {
    "kb build": "towns.jsonl --out kb --config tiny --set held_out=0.3 --vocab-size 300 --processes 1",
    "kb add": "more.jsonl --kb kb",
    "kb delete": "Rome --kb kb",
    "kb compact": "--kb kb",
    "kb info": "--kb kb",
    "kb list": "--kb kb",
    "kb show": "Aldora --kb kb",
    "kb export": "--kb kb --out exported.jsonl",
    "kb preview": "more.jsonl --tagger rules",
    "kb verify": "--kb kb",
    "questions": "--kb kb --out questions --set dev_share=0.5",
    "mlm": f"--kb kb --out encoder {TRAIN}",
    "ict": f"--kb kb --init encoder --out ict {TRAIN}",
    "pretrain": f"--kb kb --model ict --out model {TRAIN} --set refresh.every=2",
    "index": f"--kb kb --model encoder {RUN}",
    "adapt": f"--kb kb --model encoder --out adapted {TRAIN}",
    "probe": f"--kb kb --model model --out probe.json {RUN}",
    "fill": f"'Aldora was founded in [MASK].' --kb kb --model model {RUN}",
    "finetune": f"--kb kb --model model --train q.jsonl --dev q.jsonl --out qa {TRAIN}",
    "retrieve": f"--kb kb --model qa --questions q.jsonl --top-k 3 --out hits.jsonl {RUN}",
    "answer": f"'when was Aldora founded?' --kb kb --model qa {RUN}",
    "evaluate": f"--kb kb --model qa --questions q.jsonl --out report.json {RUN}",
    "compare-models": f"qa qa --kb kb --questions q.jsonl {RUN}",
    "calibrate": f"--kb kb --model qa --questions q.jsonl {RUN}",
    "fit": "towns.jsonl more.jsonl --out towns --start qa --set tagger=rules --set device=cpu",
    "convert": "qa published --to hub --licence mit --data towns",
    "knn": f"--kb kb --model model --out datastore {RUN}",
    "baseline": f"drqa --kb kb --model encoder --train q.jsonl --dev q.jsonl --out drqa {TRAIN} --set hidden=8",
    "plan": "tiny --hardware h100 --passages 1000",
    "compare": f"tables-tiny --dir tables --rows bm25-reader {TABLES}",
    "ablate": f"tables-tiny --dir tables --rows orqa --set seeds=[0] {TABLES}",
}
"""A line for each command, in an order in which each finds what it needs."""
HAVE_A_BAR = set(LINES) - {
    "plan",
    "kb delete",
    "kb compact",
    "kb info",
    "kb list",
    "kb show",
    "kb preview",
    "questions",
    "fill",
    "answer",
    "convert",
}
WRITE = {
    **dict.fromkeys(("kb build", "kb add", "kb delete", "kb compact"), "kb"),
    "questions": "questions/train.jsonl and questions/dev.jsonl",
    "kb export": "exported.jsonl",
    "mlm": "encoder",
    "ict": "ict",
    "pretrain": "model",
    "index": r"kb/indexes/\w+",
    "adapt": "adapted",
    "probe": "probe.json",
    "finetune": "qa",
    "retrieve": "hits.jsonl",
    "evaluate": "report.json",
    "calibrate": "qa",
    "convert": "published",
    "baseline": "drqa",
}
"""What each command that writes says at its end."""
BY = {"baseline": "drqa"}
"""Who says it, where not the command."""
ON_THEIR_OWN = {"demo", "kb upload", "mcp", "pull", "push", "serve", "share", "watch"}
ON_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
os.execv(sys.executable, [sys.executable, "-m", "realm", *sys.argv[1:]])
"""
BAR = re.compile(r"\[\d\d:\d\d[<,]")


class Screen:
    """What a terminal was sent."""

    def __init__(self) -> None:
        self.text = ""

    def bars(self) -> list[str]:
        lines = re.split(r"[\r\n]+|\x1b\[A", self.text)  # the last moves up a line
        return [line for line in lines if BAR.search(line)]


@contextmanager
def terminal(columns: int, rows: int = 24) -> Iterator[Screen]:
    """Makes a new pseudo-terminal of such a size the standard output and standard error of this process."""
    controller, line = pty.openpty()
    resize(line, columns, rows)
    screen, received = Screen(), bytearray()

    def receive() -> None:
        while part := read(controller):
            received.extend(part)

    reader = threading.Thread(target=receive)
    reader.start()
    before = os.dup(1), os.dup(2)
    try:
        with open(line, "w", encoding="utf-8", buffering=1) as stream:
            os.dup2(line, 1)
            os.dup2(line, 2)
            with redirect_stdout(stream), redirect_stderr(stream):
                yield screen
    finally:
        for descriptor, copy in enumerate(before, start=1):
            os.dup2(copy, descriptor)
            os.close(copy)
        reader.join()
        os.close(controller)
        screen.text = received.decode()


def resize(line: int, columns: int, rows: int = 24) -> None:
    fcntl.ioctl(line, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read(controller: int) -> bytes:
    """What came last; nothing once the other end is closed."""
    try:
        return os.read(controller, 65536)
    except OSError:  # how Linux says that
        return b""


def commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The commands that a parser knows, those within groups too."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog.removeprefix("realm ")
    for group in groups:
        for inner in group.choices.values():
            yield from commands(inner)


def test_every_command_is_run_here() -> None:
    assert set(commands(cli._parser())) == LINES.keys() | ON_THEIR_OWN


@pytest.mark.parametrize("columns", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_every_command_runs_on_a_terminal_and_shows_how_far_it_is(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("realm.progress.BAR_AFTER", 0)
    monkeypatch.setattr(calibrating, "fit", lambda *_: Calibration(0.5, 0.0, 0.2))  # one question is too few
    texts = write_corpus(Path("towns.jsonl"))
    write_encoder(Path("start"), texts)
    Path("more.jsonl").write_text('{"title": "Rome", "text": "Rome was founded in 753 BC."}\n')
    Path("q.jsonl").write_text('{"question": "when was Aldora founded?", "answers": ["1492"]}\n')
    for command, words in LINES.items():
        with terminal(columns) as screen:
            code = cli.main(shlex.split(f"{command} {words}"))
        assert (command, code) == (command, 0), screen.text
        assert "Traceback" not in screen.text
        last = screen.text.splitlines()[-1]
        where = WRITE.get(command)
        assert bool(re.fullmatch(rf"{BY.get(command, command)}: .+ (is|are) in {where}", last)) == (
            where is not None
        ), last
        bars = screen.bars()
        assert bool(bars) == (command in HAVE_A_BAR), screen.text
        assert max(map(len, bars), default=0) <= columns
        # The rate behind the time left is whole, or left out.
        assert all(bar.endswith("]") or ", " not in bar for bar in bars if "%|" in bar), bars
        if command == "kb build":
            assert re.search(r"build: 12 document \[\d\d:\d\d", screen.text)
        if command == "kb add":
            assert re.search(r"add: 1 document \[\d\d:\d\d", screen.text)
    assert Path("qa", "realm.json").exists()


@pytest.mark.parametrize(
    ("columns", "end"), [(40, "<00:00]"), (80, "<00:00, loss=7]"), (140, "loss=7, age=3]")]
)
def test_a_bar_has_as_many_values_as_the_terminal_has_room_for(columns: int, end: str, monkeypatch) -> None:
    monkeypatch.setattr("realm.progress.BAR_AFTER", 0)
    with terminal(columns) as screen:
        bar = progress(total=2, description="pretrain", unit="step")
        bar.set_postfix(values_that_fit({"loss": 7, "age": 3}), refresh=False)
        bar.update(2)
        bar.close()
    last = screen.bars()[-1]
    assert last.endswith(end) and last.count("\u2588") > columns // 10


@pytest.mark.parametrize(("columns", "rows"), [(0, 0), (100, 0), (0, 24)])
def test_a_terminal_of_unknown_size_shows_bars_too(columns: int, rows: int, monkeypatch) -> None:
    monkeypatch.setattr("realm.progress.BAR_AFTER", 0)
    with terminal(columns, rows) as screen:
        for _ in progress(range(3), total=3, description="read", unit="document"):
            pass
    assert "3/3 [" in screen.bars()[-1]
    assert len(screen.bars()[-1]) <= 80


def test_a_server_on_a_terminal_ends_well_with_control_c(tiny_kb, tiny_model_folder) -> None:
    words = f"serve --kb {tiny_kb.folder} --model {tiny_model_folder} --port 0 --set device=cpu"
    command = [sys.executable, "-c", ON_A_TERMINAL, *shlex.split(words)]
    controller, line = pty.openpty()
    with subprocess.Popen(command, stdin=line, stdout=line, stderr=line, start_new_session=True) as process:
        os.close(line)
        try:
            said = b""
            while (found := re.search(rb"on (http://\S+)/\r\n", said)) is None:
                part = read(controller)
                assert part, said.decode()
                said += part
            assert httpx.get(found[1].decode() + "/health").status_code == 200
            os.write(controller, b"\x03")
            while part := read(controller):
                said += part
            assert process.wait(30) == 0, said.decode()
        finally:
            process.kill()
            os.close(controller)
    assert b"Traceback" not in said


@pytest.mark.slow
def test_the_demo_runs_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = write_corpus(Path("towns.jsonl"))
    write_encoder(Path("start"), texts)
    Path("small.toml").write_text(SETTINGS + '\n[from_text]\ncorpora = ["towns.jsonl"]\nencoder = "start"\n')
    with terminal(80) as screen:
        code = cli.main(["demo", "--from-text", "--config", "small.toml", "--dir", "demo"])
    assert code == 0, screen.text
    assert "Traceback" not in screen.text
    assert "7. Answers with evidence" in screen.text
    assert Path("demo", "report.json").exists()
