"""The container file: what it says, and its steps carried out in a folder."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from realm import cli
from tests.deploy.containerfile import carry_out, read
from tests.qa.conftest import qa_folder
from tests.serve.process import serving

__all__ = ["qa_folder"]
ROOT = Path(__file__).parent.parent.parent
STEPS = read(ROOT / "deploy" / "Containerfile")


def arguments(name: str) -> list[str]:
    return [step.argument for step in STEPS if step.name == name]


def test_every_file_that_is_copied_is_there_and_in_the_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [
        word
        for step in STEPS
        if step.name == "COPY" and step.stage == 0
        for word in step.argument.split()[:-1]
    ]
    assert sources and all((ROOT / source).exists() and f"!{source}" in ignored for source in sources)
    assert {line[1:] for line in ignored if line.startswith("!")} == set(sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {project["project"]["readme"], *project["project"]["license-files"]}
    needed |= set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"])
    assert needed <= set(sources)  # without these, the package cannot be built


def test_every_extra_of_the_image_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = (one.partition("=")[2] for one in arguments("ARG") if one.startswith("EXTRAS="))
    assert {*extras.split(","), "ray-cluster"} <= project["optional-dependencies"].keys()


def test_every_module_that_is_compiled_exists() -> None:
    (step,) = (one for one in arguments("RUN") if " -c 'import " in one)
    modules = re.findall(r"realm[.\w]+", step.partition("import ")[2])
    assert len(modules) >= 4 and all(find_spec(module) for module in modules)


def test_the_server_runs_as_a_user_without_rights_and_its_health_is_checked() -> None:
    (user,) = arguments("USER")
    assert user == "10001:10001" and f"--uid {user.partition(':')[0]}" in arguments("RUN")[-1]
    names = [step.name for step in STEPS]
    assert names.index("USER") > max(place for place, name in enumerate(names) if name in ("RUN", "COPY"))
    assert arguments("VOLUME") == ["/data"]
    check = json.loads(arguments("HEALTHCHECK")[0].partition("CMD ")[2])
    assert check[:2] == ["python", "-c"] and "/health" in check[2]


def test_the_command_of_the_image_is_accepted_by_the_parser(tmp_path: Path, monkeypatch) -> None:
    for part in ("kb", "model"):
        (tmp_path / "manual" / part).mkdir(parents=True)
    words = [*json.loads(arguments("ENTRYPOINT")[0]), *json.loads(arguments("CMD")[0])]
    words = [word.replace("/data", str(tmp_path)) for word in words]
    assert words[0] == "realm"
    args = cli._parser().parse_args(words[1:])
    assert args.host == "0.0.0.0" and args.port == int(arguments("EXPOSE")[0])


def test_the_health_check_fails_unless_the_server_is_healthy(tiny_kb, qa_folder: Path) -> None:
    check = json.loads(arguments("HEALTHCHECK")[0].partition("CMD ")[2])
    with serving(tiny_kb.folder, qa_folder, "--set", "device=cpu", OMP_NUM_THREADS="1") as (url, _):
        code = check[2].replace("http://127.0.0.1:8000", url)
        assert code != check[2]
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode != 0


@pytest.mark.slow
def test_the_steps_make_an_installation_that_answers(tiny_kb, qa_folder: Path, tmp_path: Path) -> None:
    """The installation is that of the image: the paths of the image are replaced by paths in a folder."""
    root = tmp_path / "root"
    root.mkdir()
    index = {name: os.environ[name] for name in ("PIP_EXTRA_INDEX_URL",) if name in os.environ}
    environment = {"PATH": f"{Path(sys.base_prefix, 'bin')}:/usr/bin:/bin", "PYTHONPATH": "", **index}
    for step in STEPS:
        if step.stage == 0:
            carry_out(step, ROOT, root, environment)
    realm = root / "opt/realm/bin/realm"
    words = ["answer", "who built a tower?", "--kb", str(tiny_kb.folder), "--model", str(qa_folder), "--json"]
    done = subprocess.run(
        [realm, *words], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answers"]
    for extra in ("serve", "mcp"):
        done = subprocess.run(
            [realm, extra, "--help"], capture_output=True, text=True, env={"PYTHONPATH": ""}
        )
        assert done.returncode == 0, done.stderr
