"""The package as it is imported: at once, with its names when they are used, and typed."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import realm


def test_importing_the_package_takes_no_time_and_imports_nothing_else() -> None:
    code = (
        "import sys, time; began = time.process_time(); before = set(sys.modules); import realm; "
        "print(time.process_time() - began, *sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *imported = done.stdout.split()
    assert float(seconds) < 0.05
    assert imported == ["realm"]


def test_the_names_of_the_package_are_there_when_they_are_used() -> None:
    code = "import realm, sys; before = 'torch' in sys.modules; realm.load; print(before, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert all(getattr(realm, name) is not None for name in realm.__all__)
    assert set(realm.__all__) <= set(dir(realm))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        realm.nonsense  # noqa: B018


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(realm.__file__).parent / "py.typed").is_file()


def test_the_versions_of_every_extra_are_checked_together() -> None:
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    workflow = (root / ".github" / "workflows" / "test.yml").read_text()
    (named,) = re.findall(r"--dry-run -c constraints\.txt\s+'\.\[(.*)\]'", workflow)
    assert set(named.split(",")) == set(extras)
