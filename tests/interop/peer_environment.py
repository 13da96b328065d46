"""The peer's environment: transformers 4.57.6 beside the torch that is here.

    python tests/interop/peer_environment.py                  makes it, prints its Python
    python tests/interop/peer_environment.py --fixtures       and writes tests/interop/fixtures anew

Everything but torch is installed there; torch is found in the environment that runs this, or it would be gigabytes twice.
"""

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"
PEER = HERE.parents[1] / ".peer"
REQUIREMENT = "transformers==4.57.6"


def block_texts() -> list[str]:
    """The texts of the open-QA fixture, as NumPy unpickles them."""
    records = np.load(FIXTURES / "openqa" / "new" / "block_records.npy", allow_pickle=True)
    return [record.decode() for record in records]


def peer_says() -> list[dict[str, Any]]:
    """What the peer said to each question about the open-QA fixture."""
    return list(json.loads((FIXTURES / "expected.json").read_text()))


def peer_python() -> Path:
    """The Python of the peer's environment, which is made where it is missing (about 15 s)."""
    python = PEER / "bin" / "python"
    done = PEER / REQUIREMENT
    if not done.exists():
        venv.create(PEER, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", REQUIREMENT], check=True)
        # Only now, so that pip does not take what is there for installed: these come behind its own packages.
        site = next((PEER / "lib").glob("python*/site-packages"))
        (site / "torch_from_outside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        done.touch()
    return python


def run_peer(*words: str | Path) -> str:
    """What `peer.py` prints; its errors go to standard error."""
    command = [peer_python(), HERE / "peer.py", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    print(peer_python())
    if "--fixtures" in sys.argv[1:]:
        import shutil

        shutil.rmtree(FIXTURES, ignore_errors=True)
        run_peer("build", FIXTURES)
