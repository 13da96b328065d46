"""How long a command takes from nothing: `realm --help`, and the first answer of a process that has loaded nothing.

    python benchmarks/startup.py    # from demo-from-text/ where it is, else from a small knowledge base made here
    python benchmarks/startup.py --kb demo-from-text/kb --model demo-from-text/models/qa --rounds 10
    python benchmarks/startup.py --from-disk            # and once more with its files out of the system's memory

Each command is a process of its own, timed from outside. Beside ours stand the floors: an interpreter that does nothing, and
one that only imports the libraries that an answer needs. `imports` says which packages an answer's imports come from, by the
time that their own modules take. Prints tables, and one JSON object as the last line.
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
    "import atexit, gc; gc.set_threshold(50_000); atexit.register(gc.freeze); "  # as the command line does
    "import lance, safetensors.torch, tokenizers, torch"
)
MOST = 12
"""Packages in the table of imports."""
PACKAGES = ("lance", "numpy", "pyarrow", "pydantic", "tokenizers", "torch")
"""Whose files an answer reads."""


def main() -> None:
    """Measures what the flags ask for and prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kb", help="knowledge base (default: the demo's, or one made here)")
    parser.add_argument("--model", help="with --kb: the model that answers")
    parser.add_argument("--rounds", type=int, default=5, help="times that each command runs (default: 5)")
    parser.add_argument("--from-disk", action="store_true", help="also with files that are not in memory")
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
    """Runs a command several times."""
    took = [shared.spent_by(command) for _ in range(rounds)]
    return {
        "what": what,
        "s, median": round(statistics.median(one.seconds for one in took), 3),
        "s, least": round(min(one.seconds for one in took), 3),
        "CPU s, least": round(min(one.cpu_seconds for one in took), 3),
        "MB": round(max(one.peak_mb for one in took)),
    }


def imported(command: Sequence[str]) -> list[shared.Row]:
    """Milliseconds that the modules of each package take to import, their own imports not counted, most first."""
    timed = [command[0], "-X", "importtime", *command[1:]]
    said = subprocess.run(timed, cwd=shared.HOME, check=True, capture_output=True, text=True).stderr
    took: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for microseconds, module in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", said, re.MULTILINE):
        package = module.partition(".")[0]
        package = "the standard library" if package in sys.stdlib_module_names else package
        took[package] += int(microseconds)
        count[package] += 1
    return [
        {"package": name, "modules": count[name], "ms": round(spent / 1000, 1)}
        for name, spent in took.most_common(MOST)
    ]


def package_folder(name: str) -> Path:
    """Where a package's files are."""
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def forget(folders: Sequence[Path]) -> None:
    """Asks the system to drop these folders' files from its memory; what another process has mapped stays."""
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
