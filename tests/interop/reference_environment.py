"""The reference's environment: transformers 4.57.6 beside the torch that is here.

    python tests/interop/reference_environment.py                  makes it, prints its Python
    python tests/interop/reference_environment.py --fixtures       and writes tests/interop/fixtures anew

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
REFERENCE = HERE.parents[1] / ".reference"
REQUIREMENT = "transformers==4.57.6"


def block_texts() -> list[str]:
    """The texts of the open-QA fixture, as NumPy unpickles them."""
    records = np.load(FIXTURES / "openqa" / "new" / "block_records.npy", allow_pickle=True)
    return [record.decode() for record in records]


def reference_values() -> list[dict[str, Any]]:
    """What the reference said to each question about the open-QA fixture."""
    return list(json.loads((FIXTURES / "expected.json").read_text()))


def reference_python() -> Path:
    """The Python of the reference's environment, which is made where it is missing (about 15 s)."""
    python = REFERENCE / "bin" / "python"
    done = REFERENCE / REQUIREMENT
    if not done.exists():
        venv.create(REFERENCE, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", REQUIREMENT], check=True)
        # Only now, so that pip does not take what is there for installed: these come behind its own packages.
        site = next((REFERENCE / "lib").glob("python*/site-packages"))
        (site / "torch_from_outside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        done.touch()
    return python


def run_reference(*words: str | Path) -> str:
    """What `reference_transformers.py` prints; its errors go to standard error."""
    command = [reference_python(), HERE / "reference_transformers.py", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    print(reference_python())
    if "--fixtures" in sys.argv[1:]:
        import shutil

        shutil.rmtree(FIXTURES, ignore_errors=True)
        run_reference("build", FIXTURES)
