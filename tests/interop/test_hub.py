"""`realm share`, and what it uploaded, from a hub on loopback: each command is a process that has only the hub's address."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import realm
from realm import cli
from realm.hub import workspace_folder
from realm.model.folder import load_model
from tests.interop.local_hub import TOKEN, Hub, Repository, local_hub
from tests.qa.conftest import qa_folder, towns

__all__ = ["qa_folder", "towns"]
QUESTION = "who built a tower in Arden?"
CARD = ["--licence", "apache-2.0", "--data", "Fourteen towns."]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with local_hub() as started:
        yield started


def python(hub: Hub, home: Path, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": token, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=os.environ | environment
    )


def share(hub: Hub, home: Path, name: str, *words: str, token: str = TOKEN) -> dict[str, object]:
    done = python(hub, home, "-m", "realm", "share", name, *words, *CARD, "--json", token=token)
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


def test_a_model_goes_to_the_hub_with_its_card_and_comes_back(hub: Hub, towns: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_text('{"em": 41.5}')
    words = ["--model", str(towns / "model"), "--numbers", str(tmp_path / "dev.json")]
    report = share(hub, tmp_path, "me/towns", *words)
    repository = hub.repositories["me/towns"]
    assert report["url"] == f"{hub.url}/me/towns" and report["commit"] == repository.head
    assert repository.private and not report["public"]
    card = repository.at("main")["README.md"].decode()
    assert all(said in card for said in ("license: apache-2.0", "Fourteen towns.", "41.5", "hf:me/towns"))
    assert not any(place.startswith("kb/") for place in repository.at("main"))

    words = ["-m", "realm", "answer", QUESTION, "--kb", str(towns / "kb"), "--model", "hf:me/towns", "--json"]
    answered = python(hub, tmp_path, *words)
    assert answered.returncode == 0, answered.stderr
    wanted = realm.load(towns).answer(QUESTION)
    best = json.loads(answered.stdout)["answers"][0]
    assert (best["text"], best["passage"]["id"]) == (wanted.text, wanted.passage.id)

    not_there = python(hub, tmp_path, "-c", "import realm; realm.load('hf:me/towns')")
    assert "hf:me/towns is not a workspace" in not_there.stderr


def test_a_workspace_goes_to_the_hub_only_with_its_documents_and_comes_back(
    hub: Hub, towns: Path, tmp_path: Path
) -> None:
    share(hub, tmp_path, "me/manual", "--in", str(towns))
    assert "realm.json" in hub.repositories["me/manual"].at("main")
    copy = shutil.copytree(towns, tmp_path / "copy")
    (index,) = (copy / "kb" / "indexes").iterdir()
    again = [
        index / "approximate" / "1" / "again",
        index / "mapped-1-again",
        *(copy / "kb" / one / "again" for one in ("words", "mapped")),
    ]
    for file in again:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    share(hub, tmp_path, "me/manual", "--in", str(copy), "--documents", "--public")
    files = hub.repositories["me/manual"].at("main")
    assert not any(place.endswith("again") for place in files)
    assert any("/vectors.lance/" in place for place in files)
    assert {place.partition("/")[0] for place in files} == {"README.md", "kb", "model"}
    assert not any(place.endswith(".lock") for place in files)
    assert "realm answer 'a question' --in hf:me/manual" in files["README.md"].decode()

    wanted = realm.load(towns).answer(QUESTION)
    home = tmp_path / "elsewhere"
    code = (
        "import realm; manual = realm.load('hf:me/manual'); "
        f"answer = manual.answer({QUESTION!r}); print(answer.text); print(answer.passage.id); print(manual.folder)"
    )
    loaded = python(hub, home, "-c", code)
    assert loaded.returncode == 0, loaded.stderr
    text, id, folder = loaded.stdout.splitlines()
    assert (text, id) == (wanted.text, wanted.passage.id)
    assert Path(folder) == home / "realm" / "me--manual" / hub.repositories["me/manual"].head
    assert not any(
        path.is_symlink() for path in Path(folder).rglob("*")
    )  # changes do not reach the hub's cache

    words = ["-m", "realm", "answer", QUESTION, "--in", "hf:me/manual", "--json"]
    answered = python(hub, home, *words)
    assert json.loads(answered.stdout)["answers"][0]["text"] == wanted.text
    down = python(Hub("http://127.0.0.1:1", {}), home, *words)  # the hub cannot be reached
    assert down.returncode == 0 and json.loads(down.stdout)["answers"][0]["text"] == wanted.text
    code = "from realm.model.folder import load_model; print(load_model('hf:me/manual').step)"
    assert python(hub, home, "-c", code).stdout.split() == [str(load_model(towns / "model").step)]


@pytest.mark.parametrize(
    ("private", "files", "says"),
    [
        (False, {}, "me/there exists, and everybody can read it: give --public too"),
        (False, {"realm.json": b"{}"}, "me/there exists, and everybody can read it: give --public too"),
        (True, {"weights.bin": b"1", "README.md": b""}, "`realm share` did not make, such as weights.bin"),
    ],
)
def test_a_repository_of_another_origin_or_audience_is_left_as_it_is(
    hub: Hub, towns: Path, tmp_path: Path, private, files, says
) -> None:
    repository = hub.repositories["me/there"] = Repository(private)
    before = repository.commit(files)
    words = ["-m", "realm", "share", "me/there", "--in", str(towns), "--documents", *CARD]
    refused = python(hub, tmp_path, *words)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and says in refused.stderr
    assert repository.head == before and repository.at("main") == files


def test_a_repository_that_exists_gets_a_model_if_its_audience_is_the_wanted_one(
    hub: Hub, towns: Path, tmp_path: Path
) -> None:
    words = ["--model", str(towns / "model")]
    for name, private, more in (("me/open", False, ["--public"]), ("me/closed", True, [])):
        repository = hub.repositories[name] = Repository(private)
        repository.commit({"README.md": b"", ".gitattributes": b""})  # as the web page of the hub makes it
        for _ in range(2):
            assert share(hub, tmp_path, name, *words, *more)["public"] is not private
        assert {".gitattributes", "realm.json"} <= repository.at("main").keys()


def test_a_workspace_that_two_threads_open_first_is_copied_once(
    towns: Path, tmp_path: Path, monkeypatch
) -> None:
    """The lock is that of processes: each thread opens the file of the lock."""
    copies = []

    def slow(*places: Path) -> None:
        copies.append(places)
        time.sleep(0.2)
        shutil.copytree(*places)

    monkeypatch.setattr("realm.hub.shutil", SimpleNamespace(copytree=slow, Error=shutil.Error))
    monkeypatch.setattr("realm.hub.from_hub", lambda name, files: str(towns))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(workspace_folder, ["hf:me/manual"] * 4))
    assert folders == {tmp_path / "realm" / "me--manual" / "towns"} and len(copies) == 1
    assert {path.name for path in folders.pop().iterdir()} == {"kb", "model"}


def test_what_the_hub_refuses_is_one_line(hub: Hub, towns: Path, tmp_path: Path) -> None:
    words = ["-m", "realm", "share", "me/x", "--model", str(towns / "model"), *CARD]
    refused = python(hub, tmp_path, *words, token="hf_wrong")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "set HF_TOKEN to a token that may write" in refused.stderr
    down = python(Hub("http://127.0.0.1:1", {}), tmp_path, *words)
    assert down.returncode == 2 and down.stderr.count("\n") == 1 and "me/x cannot be uploaded" in down.stderr
    absent = python(hub, tmp_path, "-m", "realm", "answer", "x", "--in", "hf:me/absent")
    assert absent.returncode == 2 and "me/absent is not a folder, and cannot be downloaded" in absent.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["town", "--model", "m", *CARD], "town is not the name of a repository"),
        (["me/town", "--model", "m", "--data", "x"], "required: --licence"),
        (["me/town", "--model", "m", "--documents", *CARD], "add --kb, or --in"),
        (["me/town", "--model", "m", "--kb", "k", *CARD], "--kb can only be used with --documents"),
        (["me/town", "--model", "absent", *CARD], "no model at absent"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(words, says, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["share", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error
