"""Reads a container file, and carries it out step by step in a folder, without a container builder.

In a step, the paths of the image are replaced by paths in the folder, so a step may use only the absolute paths in `ROOTS`.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOTS = ("/src", "/opt/realm", "/data")


class Step(NamedTuple):
    """An instruction, its argument, and the number of the stage, from 0 on."""

    name: str
    argument: str
    stage: int


def read(path: Path) -> list[Step]:
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    steps, stage = [], -1
    for line in filter(str.strip, joined.splitlines()):
        name, _, argument = line.strip().partition(" ")
        stage += name == "FROM"
        steps.append(Step(name, argument.strip(), stage))
    return steps


def carry_out(step: Step, repository: Path, root: Path, environment: dict[str, str]) -> None:
    """Carries out an ARG, a COPY from the repository or a RUN of the first stage in `root`. ARG adds to `environment`."""

    def inside(text: str) -> str:
        return re.sub(
            rf"(?<![\w.])({'|'.join(map(re.escape, ROOTS))})\b", lambda found: f"{root}{found[1]}", text
        )

    if step.name == "ARG":
        name, _, value = step.argument.partition("=")
        environment.setdefault(name, value.strip('"'))
    elif step.name == "COPY":
        *sources, target = step.argument.split()
        for source in sources:
            place = root / target.lstrip("/")
            if (repository / source).is_dir():
                shutil.copytree(repository / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(repository / source, place)
    elif step.name == "RUN":
        done = subprocess.run(
            ["sh", "-ec", inside(step.argument)],
            capture_output=True,
            text=True,
            cwd=root,
            env=os.environ | environment,
        )
        assert done.returncode == 0, f"{step.argument}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
