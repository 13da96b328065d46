"""`realm serve` as a process of its own, for tests and benchmarks."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(
    kb: str | Path, model: str | Path, *words: str, files: int | None = None, **environment: str
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Its address, on a free port, and the process, which ends with the block and may open so many files."""
    command = [sys.executable, "-m", "realm", "serve", "--kb", str(kb), "--model", str(model), "--port", "0"]
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    with subprocess.Popen(
        [*command, *words], stderr=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            found = re.fullmatch(r"serving .* on (http://\S+)/\n", said)
            if found is None:
                raise RuntimeError(f"the server did not start: {said}{process.stderr.read()}")
            yield found[1], process
            process.terminate()
            process.wait(60)
        finally:
            process.kill()
