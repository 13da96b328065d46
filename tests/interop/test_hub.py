"""`realm share`, and what it uploaded, from a hub on loopback.

The commands of the first test are processes that have only the hub's address; the others run in this process, where
huggingface_hub reads its environment again.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from huggingface_hub import constants

import realm
from realm import cli
from realm.errors import InputError
from realm.hub import workspace_folder
from realm.index.versions import complete_index
from realm.model.folder import load_model
from realm.store.knowledge_base import KnowledgeBase
from realm.text.corpus import Document
from realm.text.salient_spans import load_tagger
from tests.interop.local_hub import TOKEN, Hub, Repository, local_hub
from tests.qa.conftest import qa_folder, towns

__all__ = ["qa_folder", "towns"]
QUESTION = "who built a tower in Arden?"
CARD = ["--licence", "apache-2.0", "--data", "Fourteen towns."]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with local_hub() as started:
        yield started


def environment(hub: Hub, home: Path, token: str = TOKEN) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": token}


@contextmanager
def at(hub: Hub, home: Path, token: str = TOKEN) -> Iterator[None]:
    """Lets huggingface_hub use the hub and the folder, as in a process that starts with these variables."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(hub, home, token).items():
                patch.setenv(name, value)
            importlib.reload(constants)
            yield
    finally:
        importlib.reload(constants)


class Done(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    error: str


def in_process(hub: Hub, home: Path, *words: str, token: str = TOKEN) -> Done:
    """Runs a command in this process."""
    out, error = StringIO(), StringIO()
    with at(hub, home, token), redirect_stdout(out), redirect_stderr(error):
        code = cli.main(words)
    return Done(code, out.getvalue(), error.getvalue())


def apart(hub: Hub, home: Path, *words: str) -> Done:
    """Runs a command in a separate process."""
    command = [sys.executable, "-m", "realm", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment(hub, home))
    return Done(done.returncode, done.stdout, done.stderr)


def share(
    hub: Hub, home: Path, name: str, *words: str, run: Callable[..., Done] = in_process
) -> dict[str, object]:
    done = run(hub, home, "share", name, *words, *CARD, "--json")
    assert done.code == 0, done.error
    report: dict[str, object] = json.loads(done.out)
    return report


def test_a_model_goes_to_the_hub_with_its_card_and_comes_back(hub: Hub, towns: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_text('{"em": 41.5}')
    words = ["--model", str(towns / "model"), "--numbers", str(tmp_path / "dev.json")]
    report = share(hub, tmp_path, "me/towns", *words, run=apart)
    repository = hub.repositories["me/towns"]
    assert report["url"] == f"{hub.url}/me/towns" and report["commit"] == repository.head
    assert repository.private and not report["public"]
    card = repository.at("main")["README.md"].decode()
    assert all(said in card for said in ("license: apache-2.0", "Fourteen towns.", "41.5", "hf:me/towns"))
    assert not any(place.startswith("kb/") for place in repository.at("main"))

    words = ["answer", QUESTION, "--kb", str(towns / "kb"), "--model", "hf:me/towns", "--json"]
    answered = apart(hub, tmp_path, *words)
    assert answered.code == 0, answered.error
    wanted = realm.load(towns).answer(QUESTION)
    best = json.loads(answered.out)["answers"][0]
    assert (best["text"], best["passage"]["id"]) == (wanted.text, wanted.passage.id)

    with at(hub, tmp_path), pytest.raises(InputError, match="hf:me/towns is not a workspace"):
        realm.load("hf:me/towns")


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
    with at(hub, home):
        manual = realm.load("hf:me/manual")
        answer = manual.answer(QUESTION)
    assert (answer.text, answer.passage.id) == (wanted.text, wanted.passage.id)
    assert manual.folder == home / "realm" / "me--manual" / hub.repositories["me/manual"].head
    # Changes do not reach the hub's cache.
    assert not any(path.is_symlink() for path in manual.folder.rglob("*"))

    words = ["answer", QUESTION, "--in", "hf:me/manual", "--json"]
    answered = in_process(hub, home, *words)
    assert json.loads(answered.out)["answers"][0]["text"] == wanted.text
    down = Hub("http://127.0.0.1:1", {})  # the hub cannot be reached
    answered = in_process(down, home, *words)
    assert answered.code == 0 and json.loads(answered.out)["answers"][0]["text"] == wanted.text
    with at(down, home):
        assert load_model("hf:me/manual").step == load_model(towns / "model").step


def test_a_damaged_model_is_not_shared_with_its_documents(hub: Hub, towns: Path, tmp_path: Path) -> None:
    workspace = shutil.copytree(towns, tmp_path / "towns")
    (workspace / "model" / "tokenizer.json").write_text("{}")
    done = in_process(hub, tmp_path, "share", "me/damaged", "--in", str(workspace), "--documents", *CARD)
    assert done.code == 2 and "tokenizer.json differs from its checksum" in done.error
    assert "me/damaged" not in hub.repositories


def test_a_full_disk_for_temporary_files_is_one_line(
    hub: Hub, towns: Path, tmp_path: Path, monkeypatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")])

    monkeypatch.setattr("realm.interop.sharing.shutil.copytree", refuse)
    done = in_process(hub, tmp_path, "share", "me/full", "--model", str(towns / "model"), *CARD)
    assert done.code == 2 and "cannot be written: No space left on device" in done.error
    assert done.error.count("\n") == 1 and "me/full" not in hub.repositories


def test_a_deleted_text_is_not_shared(hub: Hub, towns: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(towns, tmp_path / "copy")
    kb = KnowledgeBase.open(copy / "kb")
    secret = Document("Secret", "The password of the vault is Xyzzyplugh.", "secret")
    kb.add([secret], load_tagger("rules"))
    complete_index(kb, load_model(copy / "model"), str(copy / "model"))
    words = ["--in", str(copy), "--documents"]
    share(hub, tmp_path, "me/manual", *words)
    assert any(b"Xyzzyplugh" in file for file in hub.repositories["me/manual"].at("main").values())
    kb.delete(["secret"])
    refused = in_process(hub, tmp_path, "share", "me/manual", *words, *CARD)
    assert refused.code == 2 and "can still have the texts of passages that were deleted" in refused.error
    assert cli.main(["kb", "compact", "--kb", str(copy / "kb")]) == 0
    share(hub, tmp_path, "me/manual", *words)
    assert not any(b"Xyzzyplugh" in file for file in hub.repositories["me/manual"].at("main").values())


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
    refused = in_process(hub, tmp_path, "share", "me/there", "--in", str(towns), "--documents", *CARD)
    assert refused.code == 2 and refused.error.count("\n") == 1 and says in refused.error
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
    words = ["share", "me/x", "--model", str(towns / "model"), *CARD]
    refused = in_process(hub, tmp_path, *words, token="hf_wrong")
    assert refused.code == 2 and refused.error.count("\n") == 1
    assert "set HF_TOKEN to a token that may write" in refused.error
    down = in_process(Hub("http://127.0.0.1:1", {}), tmp_path, *words)
    assert down.code == 2 and down.error.count("\n") == 1 and "me/x cannot be uploaded" in down.error
    absent = in_process(hub, tmp_path, "answer", "x", "--in", "hf:me/absent")
    assert absent.code == 2 and "me/absent is not a folder, and cannot be downloaded" in absent.error


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
