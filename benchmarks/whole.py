"""Measures a corpus from its files to a server: build, encoder, inverse cloze task, index, pre-training, recall, search.

    python benchmarks/whole.py articles.jsonl.xz --folder whole                  # with the preset wikipedia: an hour or two
    python benchmarks/whole.py towns.jsonl --folder small --config tables-tiny   # a small corpus: two minutes

Each stage is a command of `realm` in a process of its own, with the settings of `--config`. Pre-training builds each new index
in the background, while training goes on. The stages `recall` measure recall@5 of masked names and dates of held-out passages.
The last stage starts a server, and searches `--searches` times, one search after another, for questions made from passages.

FOLDER/log.jsonl gets a line for each stage that is done. After an interruption the same command goes on: stages in the log are
not repeated, and an interrupted stage is continued by its command; the time before the interruption is then not counted. If the
kill came between the end of a stage and its line in the log, the command says that the output of the stage exists: remove it.
Prints the log as a table, and one JSON object as the last line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import shared

sys.path.insert(0, str(shared.HOME))  # a file that is run by its path does not find the package `realm`

from realm.serve.client import Client
from realm.stages.memory import together_mb
from tests.serve.process import serving


def main() -> None:
    """Runs the stages that are not in the log, and prints the log."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", nargs="+", help="files of documents, as for `realm kb build`")
    parser.add_argument("--folder", type=Path, required=True, help="folder for all files")
    parser.add_argument("--config", default="wikipedia", help="preset or TOML file (default: %(default)s)")
    parser.add_argument("--steps", help="steps of pre-training (default: those of --config)")
    parser.add_argument("--searches", type=int, default=100, help="searches at the server (default: 100)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    log = args.folder / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {row["stage"] for row in rows}
    for stage, measure in stages(args).items():
        if stage not in done:
            rows.append({"stage": stage, **measure()})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            with log.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    shared.print_table(rows)
    print(json.dumps({"benchmark": "whole", "rows": rows} | shared.machine()))


def stages(args: argparse.Namespace) -> dict[str, Callable[[], shared.Row]]:
    """Name of a stage -> function that runs the stage and returns its row without the name."""
    kb, encoder, ict, realm = (str(args.folder / name) for name in ("kb", "encoder", "ict", "realm"))
    given, at = ("--config", args.config), ("--kb", kb)
    trained = (
        "--set",
        "refresh.in_background=true",
        *(("--set", f"steps={args.steps}") if args.steps else ()),
    )
    return {
        "kb build": lambda: build(*args.documents, "--out", kb, "--tokenizer", "package:realm-mini", *given),
        "mlm": lambda: command("mlm", *at, "--init", "package:realm-mini", "--out", encoder, *given),
        "ict": lambda: command("ict", *at, "--init", encoder, "--out", ict, *given),
        "index": lambda: command("index", *at, "--model", ict),
        "recall after ict": lambda: recall(*at, "--model", ict, *given),
        "pretrain": lambda: command("pretrain", *at, "--model", ict, "--out", realm, *given, *trained),
        "recall after pretrain": lambda: recall(*at, "--model", realm, *given),
        "serve": lambda: served(kb, realm, args.searches),
    }


def command(*words: str) -> shared.Row:
    """Runs a `realm` command -> its time and peak memory."""
    return row(shared.run(*words))


def row(spent: shared.Spent, result: str | None = None) -> shared.Row:
    """The columns of a stage that is one command."""
    seconds, cpu_seconds = round(spent.seconds, 1), round(spent.cpu_seconds, 1)
    return {"s": seconds, "CPU s": cpu_seconds, "peak MB": round(spent.peak_mb), "result": result}


def build(*words: str) -> shared.Row:
    """Builds the knowledge base; the result is the number of passages."""
    spent = shared.run("kb", "build", *words, "--json")
    return row(spent, f"{json.loads(spent.output)['passages']:,} passages")


def recall(*words: str) -> shared.Row:
    """Measures retrieval of masked names and dates; the result is recall@5."""
    spent = shared.run("probe", *words, "--json")
    found = json.loads(spent.output)
    return row(spent, f"{found['recall']['5']:.1f} % of {found['n']:,}")


def served(kb: str, model: str, searches: int) -> shared.Row:
    """Starts a server and searches -> seconds until the first result, memory after the last, and the median of the others."""
    questions = shared.questions_about(kb, 1 + searches)
    began, took = time.perf_counter(), []
    with serving(kb, model) as (url, process):
        client = Client(url)
        client.search(questions[0])
        ready = time.perf_counter() - began
        for question in questions[1:]:
            since = time.perf_counter()
            client.search(question)
            took.append(time.perf_counter() - since)
        memory = together_mb(process.pid)
    result = f"{1000 * median(took):.1f} ms a search"
    return {"s": round(ready, 1), "CPU s": None, "peak MB": round(memory), "result": result}


if __name__ == "__main__":
    main()
