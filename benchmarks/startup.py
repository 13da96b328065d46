"""Measures the time of new processes: `realm --help`, and the first answer of `realm answer`.

    python benchmarks/startup.py    # uses demo-from-text/ if it exists, else makes a small knowledge base
    python benchmarks/startup.py --kb demo-from-text/kb --model demo-from-text/models/qa --rounds 10
    python benchmarks/startup.py --from-disk            # and once with files that are not in the system's cache

Each command runs in a process of its own. For comparison, the time of an interpreter that does nothing, and of an interpreter
that only imports the libraries of an answer, are measured too. `imports` lists the packages that `realm answer` imports, with
the time of importing the modules of each package. Prints tables, and one JSON object as the last line.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import shared

LIBRARIES = (
    "import atexit, gc; gc.set_threshold(50_000); atexit.register(gc.freeze); "  # as in the command line
    "import lance, safetensors.torch, tokenizers, torch"
)
MOST = 12
"""Number of packages in the table of imports."""
PACKAGES = ("lance", "numpy", "pyarrow", "pydantic", "tokenizers", "torch")
"""Packages whose files an answer reads."""


def main() -> None:
    """Measures the parts that the flags select, and prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kb", help="knowledge base (default: that of the demo, else a small one that is made)"
    )
    parser.add_argument("--model", help="with --kb: the model that answers the questions")
    parser.add_argument("--rounds", type=int, default=5, help="number of runs of each command (default: 5)")
    parser.add_argument(
        "--from-disk",
        action="store_true",
        help="also measure a run with files that are not in the cache of the system",
    )
    args = parser.parse_args()
    if (args.kb is None) != (args.model is None):
        parser.error("--kb and --model go together")
    with shared.to_ask(args.kb, args.model) as asked:
        answer = shared.realm("answer", asked.questions[0], "--kb", asked.kb, "--model", asked.model)
        commands = {
            "an interpreter": [sys.executable, "-c", "pass"],
            "realm --help": shared.realm("--help"),
            "realm answer --help": shared.realm("answer", "--help"),
            "an answer's libraries": [sys.executable, "-c", LIBRARIES],
            "realm answer": answer,
        }
        rows = [measured(what, command, args.rounds) for what, command in commands.items()]
        if args.from_disk:
            forget([Path(asked.kb), Path(asked.model), *map(package_folder, PACKAGES)])
            rows.append(measured("realm answer, files on disk", answer, 1))
        imports = imported(answer)
    shared.print_table(rows)
    print()
    shared.print_table(imports)
    result = {"benchmark": "startup", "knowledge_base": asked.name, "rows": rows, "imports": imports}
    print(json.dumps(result | shared.machine()))


def measured(what: str, command: Sequence[str], rounds: int) -> shared.Row:
    """Runs a command several times -> a row of the table."""
    took = [shared.spent_by(command) for _ in range(rounds)]
    return {
        "what": what,
        "s, median": round(statistics.median(one.seconds for one in took), 3),
        "s, least": round(min(one.seconds for one in took), 3),
        "CPU s, least": round(min(one.cpu_seconds for one in took), 3),
        "MB": round(max(one.peak_mb for one in took)),
    }


def imported(command: Sequence[str]) -> list[shared.Row]:
    """Import time of each package in milliseconds, without the packages that it imports; the largest time first."""
    timed = [command[0], "-X", "importtime", *command[1:]]
    report = subprocess.run(timed, cwd=shared.HOME, check=True, capture_output=True, text=True).stderr
    took: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for microseconds, module in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", report, re.MULTILINE):
        package = module.partition(".")[0]
        package = "the standard library" if package in sys.stdlib_module_names else package
        took[package] += int(microseconds)
        count[package] += 1
    return [
        {"package": name, "modules": count[name], "ms": round(spent / 1000, 1)}
        for name, spent in took.most_common(MOST)
    ]


def package_folder(name: str) -> Path:
    """Folder of a package."""
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def forget(folders: Sequence[Path]) -> None:
    """Removes the files of these folders from the cache of the system, except files that another process has mapped."""
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
