"""Functions of several benchmarks: measurements of commands, artificial knowledge bases and models, tables.

This file does not import torch, because a process that measures the memory of other processes must be small itself.
"""

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).parent.parent
Row = dict[str, Any]
os.environ["REALM_CACHE"] = ""  # every build tags its documents
WARM_UP = "--set steps=200 --set batch_size=64 --set learning_rate=1e-3".split()


class Spent(NamedTuple):
    """Time and memory of a process, and its standard output."""

    seconds: float
    cpu_seconds: float
    """CPU seconds of all threads and children of the process."""
    peak_mb: float
    """Peak memory of the process or of one of its children, including pages of mapped files that were read."""
    output: str


def spent_by(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Spent:
    """Runs a command in the repository until it ends, and measures it.

    Raises:
        SystemExit: the command has failed.
    """
    with tempfile.TemporaryFile("w+") as out:
        began = time.perf_counter()
        process = subprocess.Popen(
            list(command), stdout=out, cwd=HOME, env={**os.environ, **(environment or {})}
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(
            status
        )  # the process is reaped, so Popen must not wait for it
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
        out.seek(0)
        kilobyte = 1 if platform.system() == "Darwin" else 1024
        return Spent(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * kilobyte / 2**20, out.read())


def realm(*words: str) -> list[str]:
    """The command line of a `realm` command."""
    return [sys.executable, "-m", "realm", *words]


def run(*words: str) -> Spent:
    """Runs a `realm` command until it ends, and measures it."""
    return spent_by(realm(*words))


def machine() -> Row:
    """Description of this machine for the JSON output."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def print_table(rows: Sequence[Row]) -> None:
    """Prints rows with the same keys as a Markdown table; values that are lists are only in the JSON output."""

    def cell(value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    shown = [name for name in rows[0] if not isinstance(rows[0][name], list)]
    print("| " + " | ".join(shown) + " |")
    print("| " + " | ".join("---" for _ in shown) + " |")
    for row in rows:
        print("| " + " | ".join(cell(row[name]) for name in shown) + " |", flush=True)


class Asked(NamedTuple):
    """A knowledge base, a model that answers from this knowledge base, and questions."""

    kb: str
    model: str
    questions: list[str]
    name: str
    """Description of the knowledge base for the JSON output."""


@contextmanager
def to_ask(kb: str | None, model: str | None) -> Iterator[Asked]:
    """The given knowledge base and model; else those of `realm demo --from-text`, if they exist; else small temporary ones."""
    demo = HOME / "demo-from-text"
    if kb is not None and model is not None:
        yield Asked(kb, model, questions_about(kb, 500), kb)
    elif (demo / "models" / "qa" / "realm.json").is_file():
        found = str(demo / "kb"), str(demo / "models" / "qa")
        lines = (demo / "questions" / "dev.jsonl").read_text(encoding="utf-8").splitlines()
        yield Asked(*found, [json.loads(line)["question"] for line in lines], "the demo's")
    else:
        with tempfile.TemporaryDirectory() as folder:
            kb, model = like_the_demo(Path(folder))
            yield Asked(kb, model, questions_about(kb, 500), "made here")


def questions_about(kb: str, count: int) -> list[str]:
    """One artificial question about each of `count` passages, made in a process of its own."""
    made: list[str] = json.loads(spent_by([sys.executable, __file__, kb, str(count)]).output)
    return made


def _questions_about(kb: str, count: str) -> list[str]:
    sys.path.insert(0, str(HOME))
    from realm.store.knowledge_base import KnowledgeBase

    opened = KnowledgeBase.open(kb)
    numbers = random.Random(0).sample(range(len(opened)), min(int(count), len(opened)))
    return [f"What is known of {p.title}, {' '.join(p.text.split()[3:8])}?" for p in opened.passages(numbers)]


def like_the_demo(folder: Path) -> tuple[str, str]:
    """Makes a knowledge base of invented towns, and a model of the size of the demo's model that answers (badly) from it."""
    kb, start, model = (str(folder / part) for part in ("kb", "start", "qa"))
    towns, asked = made_up_towns(folder, 3000), folder / "questions.jsonl"
    question = {"question": f"which river does {towns[0]} lie on?", "answers": [towns[0]]}
    asked.write_text(json.dumps(question) + "\n", encoding="utf-8")
    given = "--train", str(asked), "--dev", str(asked)
    few = "--set steps=1 --set batch_size=1 --set dev_every=1".split()
    for command in (
        ["kb", "build", str(folder / "towns.jsonl"), "--out", kb, "--config", "demo", "--tagger", "rules"],
        ["mlm", "--kb", kb, "--init", "package:realm-mini", "--out", start, "--config", "demo"],
        ["index", "--kb", kb, "--model", start],
        ["finetune", "--kb", kb, "--model", start, "--out", model, "--config", "demo", *given, *few],
    ):
        run(*command)
    return kb, model


def made_up(folder: Path, towns: int) -> tuple[str, str, str]:
    """Makes a knowledge base of invented towns and two small models with `realm` commands -> their folders.

    The first model has random weights and an embedder with layers. The second model has a bag-of-words embedder that can
    retrieve."""
    made_up_towns(folder, towns)
    kb, layers, start, trained = (str(folder / part) for part in ("kb", "layers", "start", "words"))
    mlm = ["mlm", "--kb", kb, "--config", "tiny", "--set", "steps=0"]
    for command in (
        ["kb", "build", str(folder / "towns.jsonl"), "--out", kb, "--config", "tiny", "--vocab-size", "3000"],
        [*mlm, "--out", layers, "--set", "encoder.hidden=128", "--set", "encoder.layers=4"],
        [*mlm, "--out", start, "--set", "embedder.pooling=words"],
        ["ict", "--kb", kb, "--init", start, "--out", trained, "--config", "tiny", *WARM_UP],
    ):
        run(*command)
    return kb, layers, trained


def made_up_towns(folder: Path, count: int) -> list[str]:
    """Writes towns.jsonl with a document for each invented town -> names of the towns.

    Each ruler, painter and river occurs in several documents, with the same year and the same words. So a masked year can be
    found by these words. Only years are masked.
    """
    draw = random.Random(0)

    def name() -> str:
        letters = (draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(draw.randint(3, 4)))
        return "".join(letters).capitalize()

    words = [name().lower() for _ in range(count // 4)]
    names = [name() for _ in range(count)]
    years = draw.sample(range(1100, 2000), min(900, count // 4))
    people = [(name(), *draw.sample(words, 3), year) for year in years]
    rivers = [(name(), *draw.sample(words, 2), year) for year in draw.sample(years, len(years) // 2)]
    with (folder / "towns.jsonl").open("w", encoding="utf-8") as file:
        for town in names:
            (river, fish, bank, flood), (ruler, ware, deed, home, then) = (
                draw.choice(rivers),
                draw.choice(people),
            )
            painter, colour, work, school, year = draw.choice(people)
            text = (
                f"{town} lies on the river {river}, whose flood of {flood} took the {fish} from its {bank}. "
                f"In {then} {ruler}, who had come from a {home} and dealt in {ware}, did the {deed} here. "
                f"Every spring there is some {draw.choice(words)} to be had from {draw.choice(names)}. "
                f"In its school hangs a picture by {painter} of {school}, made in {year} with much {colour}. "
                f"It shows the {work} on the hill behind {draw.choice(names)} and a herd of sheep."
            )
            file.write(json.dumps({"title": town, "text": text}) + "\n")
    return names


if __name__ == "__main__":
    print(json.dumps(_questions_about(*sys.argv[1:])))
