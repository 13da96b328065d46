"""Whatever happens to one file of a knowledge base, commands answer as before or end with one line, and `kb verify` finds
all that changes an answer.

More of it: `python -m pytest -m slow tests/store/test_damages.py --trials 1000 --trials-seed 7`.
"""

import random
import shutil
from pathlib import Path

import pytest

from realm import cli
from realm.index.embedding import IndexConfig
from realm.index.versions import build_index
from realm.model.manifest import read_manifest
from realm.store.knowledge_base import KnowledgeBase
from realm.store.vectors import folder_of
from realm.text.corpus import Document
from tests.conftest import tiny_documents
from tests.damages import damage
from tests.store.tiny import TinyTagger

QUESTION = "on which river lies Arden?"


@pytest.fixture
def kb(own_kb: KnowledgeBase, tiny_model_folder: Path) -> Path:
    """The towns after a life: documents came, went and were merged, and the index has a second version."""
    own = folder_of(own_kb.folder, read_manifest(tiny_model_folder)["passage_fingerprint"])
    for index in own.parent.iterdir():
        if index != own:  # of another test's model, where the towns are shared
            shutil.rmtree(index)
    copy = tiny_documents()[1]._replace(id="copy")
    own_kb.add([Document("New Town", "New Town lies on the Wear.", "new"), copy], TinyTagger())
    own_kb.delete(["d3"])
    build_index(own_kb, str(tiny_model_folder), IndexConfig(device="cpu", precision="fp32"))
    return own_kb.folder


def asked(argv: list[str], out: Path | None, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints or writes, or the one line that it ends with."""
    code = cli.main([*argv, *(["--out", str(out)] if out else ["--json"])])
    said = capsys.readouterr()
    if code == 0:
        return out.read_text() if out else said.out
    assert code == 2 and said.err.startswith("realm: ") and said.err.count("\n") == 1, said.err
    return said.err + said.out


def files_of(folder: Path) -> list[Path]:
    """All files; those of one folder by age, because most of their names are random."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(found, key=lambda path: (path.parent, path.stat().st_mtime_ns, path.name))


def trial(kb: Path, model: Path, count: int, seed: int, capsys: pytest.CaptureFixture[str]) -> int:
    questions, hits = kb.with_name("questions.jsonl"), kb.with_name("hits.jsonl")
    questions.write_text('{"id": "q", "question": "on which river lies Arden?"}\n')
    at = ["--kb", str(kb)]
    retrieve = ["retrieve", *at, "--model", str(model), "--questions", str(questions), "--set", "device=cpu"]
    commands = [(["kb", "info", *at], None), (retrieve, hits), ([*retrieve, "--method", "bm25"], hits)]
    verify = ["kb", "verify", *at]
    wanted, sound = [asked(*command, capsys) for command in commands], asked(verify, None, capsys)
    assert not any(answer.startswith("realm: ") for answer in [*wanted, sound])
    whole = shutil.copytree(kb, kb.with_name("whole"))
    draw = random.Random(seed)
    found = 0
    for number in range(count):
        what = damage(draw, files_of(kb))
        got, said = [asked(*command, capsys) for command in commands], asked(verify, None, capsys)
        assert got == wanted or said != sound, f"seed {seed}, damage {number}: {what}"
        found += said != sound
        shutil.rmtree(kb)
        shutil.copytree(whole, kb)
    return found


@pytest.mark.slow
def test_many_damaged_knowledge_bases_answer_as_before_or_verify_finds_the_damage(
    kb, tiny_model_folder, capsys, trials
) -> None:
    count = trials.count(200)
    assert trial(kb, tiny_model_folder, count, trials.seed, capsys) > count // 4


def test_a_damaged_knowledge_base_answers_as_before_or_verify_finds_the_damage(
    kb, tiny_model_folder, capsys
) -> None:
    assert trial(kb, tiny_model_folder, 4, 0, capsys) > 0


def test_damage_to_the_description_of_columns_is_one_line(kb, capsys) -> None:
    info = ["kb", "info", "--kb", str(kb)]  # looks up the originals of merged documents in the table
    sound, said = asked(info, None, capsys), []
    for data in (kb / "passages.lance" / "data").iterdir():
        content = data.read_bytes()
        for place in range(50, 100, 2):  # data files describe their columns behind the data
            start = len(content) * place // 100
            data.write_bytes(content[:start] + b"\xff" * 24 + content[start + 24 :])
            said.append(asked(info, None, capsys))
        data.write_bytes(content)
    assert asked(info, None, capsys) == sound
    assert any("cannot be read" in one for one in said)


@pytest.mark.parametrize("damage_of", ["flip", "cut", "lost"])
def test_a_damaged_index_is_sound_after_what_verify_advises(
    damage_of: str, kb, tiny_model_folder, capsys
) -> None:
    (index,) = (kb / "indexes").iterdir()
    data = max((index / "vectors.lance" / "data").iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    match damage_of:
        case "flip":
            content[100] ^= 1
            data.write_bytes(content)
        case "cut":
            data.write_bytes(content[:-9])
        case "lost":
            min((index / "vectors.lance" / "_versions").glob("*.manifest")).unlink()
    verify = ["kb", "verify", "--kb", str(kb)]
    assert cli.main(verify) == 2
    advice = "if an index is damaged, remove the folder of the index and run `realm index`"
    assert advice in capsys.readouterr().err
    shutil.rmtree(index)
    arguments = ["--kb", str(kb), "--model", str(tiny_model_folder), "--set", "device=cpu"]
    assert cli.main(["index", *arguments]) == 0
    assert cli.main(verify) == 0
