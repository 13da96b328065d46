"""kill -9 of `realm fit` at random moments: what is there opens, and the same command goes on to the end.

More of it: `python -m pytest -m slow tests/workspace/test_kills.py --trials 50 --trials-seed 7 -s`.
"""

import json
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from realm.errors import InputError
from realm.model.folder import load_model
from realm.store.knowledge_base import KnowledgeBase
from realm.workspace.folder import Workspace
from realm.workspace.report import FitJson
from tests.conftest import Trials
from tests.schemas import assert_holds
from tests.workspace.conftest import PARTS, YEARS, text_of

COMMAND = "-m realm fit docs --out ws --minutes 0.1 --set tagger=rules --set held_out=0.4 --set device=cpu"
QUESTION = "when was town 7 founded?"


def begin(start: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *shlex.split(COMMAND), "--start", str(start)], stderr=subprocess.DEVNULL
    )


def answers() -> bool:
    """Whether the workspace answers. Also asserts that every part that exists is complete."""
    parts = Path("ws/kb"), Path("ws/model")
    if parts[0].exists():
        assert KnowledgeBase.open(parts[0]).verify() == []
    if parts[1].exists():
        load_model(parts[1])
    try:
        return bool(Workspace("ws").answer(QUESTION).text)
    except InputError:
        return False


@pytest.mark.slow
def test_a_fit_that_is_killed_at_any_moment_goes_on(
    qa_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: Trials
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    for number in range(150):
        Path(f"docs/{number}.txt").write_text(text_of(f"Town {number}", YEARS[number % 4]))
    began = time.monotonic()
    assert begin(qa_folder).wait() == 0
    longest = time.monotonic() - began
    expected = sorted(KnowledgeBase.open(Path("ws/kb")))
    draw = random.Random(trials.seed)
    for trial in range(trials.count(4)):
        Path("ws").rename(f"whole{trial}")
        answered = False
        for _ in range(3):
            process = begin(qa_folder)
            time.sleep(draw.uniform(0.2, 1) * longest)
            process.kill()
            process.wait()
            now = answers()
            assert now or not answered, "what answered once answers ever after"
            answered = now
        assert begin(qa_folder).wait() == 0
        assert answers() and sorted(KnowledgeBase.open(Path("ws/kb"))) == expected
        assert_holds(FitJson, json.loads(Path("ws/report.json").read_text()))
        assert {path.name for path in Path("ws").iterdir()} == PARTS
