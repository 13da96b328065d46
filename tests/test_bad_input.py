"""Bad input through the command line: one line on standard error, exit code 2, and every file on disk as it was.

Each case runs in a folder with a knowledge base, its index and models that work. Afterwards no file may have come, gone
or been written, and at the very end the model still gives its first answer from the same bytes.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from stat import S_ISREG
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realm import cli
from realm.store.knowledge_base import KnowledgeBase
from realm.text import salient_spans
from tests.conftest import tiny_documents

TINY = "--out new --config tiny --set steps=0 --set device=cpu --set precision=fp32"
LINE = '{"title": "Oakham", "text": "Oakham lies on the Tarn. It was burnt in 1432."}\n'
QUESTION = '{"question": "on which river lies Arden?", "answers": ["Ouse"]}\n'
BINARY = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256))
CONTENTS = {"empty": b"", "blank": b"\n \n", "binary": BINARY, "latin1": "Köln\n".encode("latin-1")}
CONTENTS["cyrillic"] = "Кёльн\n".encode("cp1251")  # mostly letters beyond ASCII: not taken for Windows-1252
SUFFIXES = "txt md html parquet arrow".split()


@pytest.fixture(scope="module", autouse=True)
def _one_sentence_splitter() -> Iterator[None]:
    """The commands of this file use one pipeline of spaCy, which takes longer to load than most of them take to fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(salient_spans, "_sentence_splitter", cache(salient_spans._sentence_splitter))
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What works and what is broken, side by side; every test leaves it as it is."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        Path("towns.jsonl").write_text("".join(json.dumps(d._asdict()) + "\n" for d in tiny_documents()))
        Path("q.jsonl").write_text(QUESTION)
        tiny = "--tagger rules --set passage_tokens=48 --set commit_every=4"
        done(f"kb build towns.jsonl --out kb --vocab-size 300 {tiny}")
        done(f"kb build towns.jsonl --out kb2 --vocab-size 200 {tiny}")
        done(f"mlm --kb kb {TINY} --out encoder")
        done(f"mlm --kb kb2 {TINY} --out encoder2")
        done("index --kb kb --model encoder")
        done(f"finetune --kb kb --model encoder --train q.jsonl --dev q.jsonl {TINY} --out qa")
        Path("before.json").write_text(json.dumps(answer_and_digests()))
        break_documents_and_questions()
        break_models_and_knowledge_bases()
    return home


def done(line: str) -> None:
    assert cli.main(shlex.split(line)) == 0, line


def answer_and_digests() -> list[Any]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        done("answer 'on which river lies Arden?' --kb kb --model qa --json")
    files = (file for part in ("kb", "encoder", "qa") for file in Path(part).rglob("*") if file.is_file())
    digests = {file.as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return [json.loads(out.getvalue())["answers"], digests]


def break_documents_and_questions() -> None:
    for name, content in CONTENTS.items():
        for suffix in ("jsonl", "tsv", "csv", *SUFFIXES):
            Path(f"{name}.{suffix}").write_bytes(content)
    Path("cut.jsonl").write_text(LINE + LINE[:40])
    Path("late.jsonl").write_text("".join(LINE.replace("Oak", f"Oak{n}") for n in range(300)) + LINE[:40])
    Path("long.jsonl").write_text(json.dumps({"title": "Long", "text": "a town. " * 1_250_000}) + "\n")
    pq.write_table(pa.table({"title": ["Oakham"], "text": ["a town"]}), "cut.parquet")
    Path("cut.parquet").write_bytes(Path("cut.parquet").read_bytes()[:-100])
    Path("names").mkdir()
    Path("names", "\udcff.txt").write_text("A town.")  # a byte that is not UTF-8
    Path("qcut.jsonl").write_text(QUESTION + QUESTION[:30])
    Path("qlong.jsonl").write_text(QUESTION + json.dumps({"question": "y" * 100_000, "answers": ["x"]}))
    Path("qhuge.jsonl").write_text(json.dumps({"question": "y" * 10_000_000, "answers": ["x"]}))


def break_models_and_knowledge_bases() -> None:
    def broken(name: str, file: str, content: bytes, like: str = "qa") -> None:
        shutil.copytree(like, name)
        Path(name, file).write_bytes(content)

    other_tokenizer = Path("kb2/tokenizer/tokenizer.json").read_bytes()
    broken("m_cut", "embedder.safetensors", Path("qa/embedder.safetensors").read_bytes()[:5000])
    broken("m_empty_encoder", "encoder/model.safetensors", b"")
    broken("m_binary", "realm.json", BINARY)
    broken("m_database", "realm.json", b'{"name": "Realm", "schemaVersion": 7}')  # the phones' database
    broken("m_tokenizer", "tokenizer.json", other_tokenizer)
    broken("m_gpt2", "config.json", b'{"model_type": "gpt2", "n_layer": 2}', like="qa/encoder")
    Path("m_gpt2/checksums.json").unlink()  # as others publish it
    shutil.copytree("qa/encoder", "m_bert")  # a sound BERT, as others publish it
    broken("k_tokenizer", "tokenizer/tokenizer.json", other_tokenizer, like="kb")
    data = next(Path("kb/passages.lance/data").iterdir())
    broken("k_cut", str(data.relative_to("kb")), data.read_bytes()[:-100], like="kb")
    lance.write_dataset(pa.table({"vector": [1.0, 2.0]}), "k_other/passages.lance")
    Path("nothing").mkdir()
    os.mkfifo("pipe")


def files_of(folder: Path) -> dict[str, Any]:
    """Every file with what changes when somebody writes it, every folder with nothing."""
    found: dict[str, Any] = {}
    for parent, folders, files in os.walk(folder):
        inside = parent.removeprefix(str(folder)).lstrip("/")
        found |= {os.path.join(inside, one): () for one in folders}
        for one in files:
            s = os.lstat(os.path.join(parent, one))
            written = (s.st_ino, s.st_size, s.st_mtime_ns) if S_ISREG(s.st_mode) else ()
            found[os.path.join(inside, one)] = written
    return found


@pytest.fixture
def refused(home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command line that must be refused in words that match, and must leave every file alone."""
    monkeypatch.chdir(home)

    def refuse(line: str, says: str) -> None:
        before = files_of(home)
        capfd.readouterr()
        assert cli.main(shlex.split(line)) == 2, line
        captured = capfd.readouterr()
        assert captured.out == ""
        assert re.fullmatch(r"realm: [^\n]{10,500}\n", captured.err), captured.err
        assert re.search(says, captured.err), captured.err
        assert files_of(home) == before

    return refuse


BUILD, ADD = (
    "kb build towns.jsonl FILE --strict --out new --tagger rules",
    "kb add towns.jsonl FILE --strict --kb kb",
)
REPLACE = "kb build towns.jsonl FILE --strict --out kb --replace --tagger rules"
DOCUMENTS = {
    "missing.jsonl": "missing.jsonl: no such file or folder",
    "s4://bucket/a.jsonl": "s4:// is no kind of address that is read: use https://",
    "empty.jsonl": "empty.jsonl is empty",
    "blank.jsonl": "blank.jsonl contains only white space",
    "binary.jsonl": "binary.jsonl: binary data",
    "latin1.jsonl": "latin1.jsonl:1: not JSON",
    "cyrillic.jsonl": "cyrillic.jsonl:1: byte 0xeb is not UTF-8",
    "cut.jsonl": "cut.jsonl:2: not JSON .*cut off",
    "long.jsonl": "long.jsonl:1: 10,000,000 characters, over the limit of 1,000,000: split it",
    "q.jsonl": 'q.jsonl:1: no "text"',
    "names": "udcff.txt.* is not UTF-8: rename the file",
}
ODD = {f"{name}.{suffix}": f"{name}.{suffix}" for name in CONTENTS for suffix in SUFFIXES}
ODD = {file: says for file, says in ODD.items() if file not in ("latin1.txt", "latin1.md", "latin1.html")}
ODD |= {"cut.parquet": "is not Parquet", "empty.csv": "empty.csv is empty", "nothing": "folder is empty"}


DOCUMENT_CASES = [(c, f) for c in (BUILD, REPLACE, f"{BUILD} --vocab-size 100", ADD) for f in DOCUMENTS]
DOCUMENT_CASES += [(ADD, file) for file in ODD]


@pytest.mark.parametrize(("command", "file"), DOCUMENT_CASES)
def test_bad_documents_are_one_line_and_leave_every_file_alone(refused, command: str, file: str) -> None:
    refused(command.replace("FILE", file), (DOCUMENTS | ODD)[file])


def test_line_of_a_million_characters_is_within_the_limit_and_built_whole(home, tmp_path, capfd) -> None:
    inns = "has an inn and " * 12
    text = "".join(f"Town {n} {inns}a well. " for n in range(6_000))[:1_000_000].strip()
    (tmp_path / "d.jsonl").write_text(json.dumps({"title": "Long", "text": text}))
    done(f"kb build {tmp_path}/d.jsonl --out {tmp_path}/kb --tagger rules --tokenizer '{home}/kb/tokenizer'")
    assert " ".join(KnowledgeBase.open(tmp_path / "kb").texts()).split() == text.split()


def test_addition_that_breaks_late_leaves_no_data_behind_and_works_once_mended(
    refused, home, tmp_path
) -> None:
    kb, broken = shutil.copytree("kb", tmp_path / "kb"), Path("late.jsonl").read_text()
    before = files_of(kb)
    refused(f"kb add late.jsonl --strict --kb {kb}", "late.jsonl:301: not JSON")
    after = files_of(kb)
    assert {name for name in after if after[name] != before.get(name)} <= {"SHA256SUMS"}
    (tmp_path / "late.jsonl").write_text(broken[:-40])
    done(f"kb add {tmp_path}/late.jsonl --kb {kb}")
    done(f"index --kb {kb} --model encoder")
    done(f"kb verify --kb {kb}")
    assert len(KnowledgeBase.open(kb)) == len(KnowledgeBase.open("kb")) + 300


def test_build_that_breaks_late_goes_on_where_it_was_once_mended(home, tmp_path, monkeypatch, capfd) -> None:
    broken = (home / "late.jsonl").read_text()
    monkeypatch.chdir(tmp_path)
    build = (
        f"kb build late.jsonl --tagger rules --tokenizer '{home}/kb/tokenizer' --set commit_every=64 --out"
    )
    Path("late.jsonl").write_text(broken)
    assert cli.main(shlex.split(f"{build} kb --strict")) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"late.jsonl", "kb.building"}
    Path("late.jsonl").write_text(broken[:-40])
    done(f"{build} kb")
    assert "the build continues after" in capfd.readouterr().err
    done(f"{build} at_once")
    assert KnowledgeBase.open("kb").fingerprint == KnowledgeBase.open("at_once").fingerprint
    assert {path.name for path in tmp_path.iterdir()} == {"late.jsonl", "kb", "at_once"}


QUESTION_COMMANDS = [
    "retrieve --kb kb --method bm25 --questions FILE --out hits.jsonl",
    "evaluate --kb kb --model qa --questions FILE --out report.json",
    f"pretrain --kb kb --model encoder --questions FILE {TINY}",
    f"finetune --kb kb --model encoder --train FILE --dev q.jsonl {TINY}",
    f"finetune --kb kb --model encoder --train q.jsonl --dev FILE {TINY}",
]
QUESTIONS = {
    "missing.jsonl": "no question file missing.jsonl",
    "empty.jsonl": "empty.jsonl holds no questions",
    "blank.tsv": "blank.tsv holds no questions",
    "binary.jsonl": "binary.jsonl is binary",
    "latin1.jsonl": "latin1.jsonl:1 is not UTF-8",
    "qcut.jsonl": "qcut.jsonl:2 is not valid JSON",
    "qlong.jsonl": "qlong.jsonl:2: the question has 100000 characters: at most 2000 are allowed",
    "qhuge.jsonl": "qhuge.jsonl:1: the question has 10000000 characters",
    "kb": "kb is a folder",
    "towns.jsonl": "towns.jsonl:1 has no question, only title, text, id",
}


@pytest.mark.parametrize("file", QUESTIONS)
@pytest.mark.parametrize("command", QUESTION_COMMANDS)
def test_bad_questions_are_one_line_and_leave_every_file_alone(refused, command: str, file: str) -> None:
    refused(command.replace("FILE", file), QUESTIONS[file])


def test_question_of_100_000_characters_or_none_or_not_utf8_is_one_line(refused) -> None:
    for command in ("answer '{}' --kb kb --model qa", "fill '{} [MASK]' --kb kb --model qa"):
        refused(command.format("y" * 100_000), "has 10000[07] characters, the limit is 2000")
        refused(command.format("K\udcf6ln?"), "is not UTF-8")
    refused("answer '' --kb kb --model qa", "is empty")


USES = [
    "answer 'who?' --kb KB --model MODEL",
    "fill 'a [MASK].' --kb KB --model MODEL",
    "evaluate --kb KB --model MODEL --questions q.jsonl",
    "retrieve --kb KB --model MODEL --questions q.jsonl --out hits.jsonl",
    "probe --kb KB --model MODEL",
    "index --kb KB --model MODEL",
    f"mlm --kb KB --init MODEL {TINY}",
    f"ict --kb KB --init MODEL {TINY}",
    f"pretrain --kb KB --model MODEL {TINY}",
    f"pretrain --kb kb --text KB --model MODEL {TINY}",
    f"finetune --kb KB --model MODEL --train q.jsonl --dev q.jsonl {TINY}",
]
MODELS = {
    "./missing": "./missing",
    "nothing": "nothing (is not a realm model|has no)",
    "kb": "kb (is a knowledge base, not a model|has no)",
    "m_gpt2": "m_gpt2 is (not a realm model|a 'gpt2' model)",
    "m_bert": "m_bert is not a realm model .*: to make a model from an encoder, run `realm mlm --init m_bert --out ...`",
    "m_database": "m_database/realm.json is damaged",
    "m_binary": "m_binary/realm.json is damaged",
    "m_cut": "m_cut is damaged",
    "m_empty_encoder": "m_empty_encoder/encoder does not load as a BERT",
    "m_tokenizer": "m_tokenizer: tokenizer.json is not the tokenizer",
    "encoder2": "encoder2 has tokenizer [0-9a-f]{16}, but knowledge base kb has tokenizer [0-9a-f]{16}: build",
}
KEEPS = [
    "kb info --kb KB",
    "kb verify --kb KB",
    "kb add towns.jsonl --kb KB",
    "kb delete Arden --kb KB",
    "questions --kb KB --out new",
    "retrieve --kb KB --method bm25 --questions q.jsonl --out hits.jsonl",
]
KNOWLEDGE_BASES = {
    "missing": "missing is not a knowledge base: make one with `realm kb build",
    "nothing": "nothing is not a knowledge base",
    "qa": "qa is a model, not a knowledge base",
    "k_other": "k_other(/passages.lance)? (is not a knowledge base|is damaged|cannot be read)",
    "k_tokenizer": "k_tokenizer/tokenizer has fingerprint .*: restore tokenizer",
    "k_cut": "k_cut is damaged: passages.lance/data/.* bytes instead of",
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("command", USES)
def test_model_of_another_project_or_damaged_is_one_line(refused, command: str, model: str) -> None:
    if model == "m_bert" and command.startswith("mlm"):
        done(command.replace("KB", "kb").replace("MODEL", model))  # the one command that takes a BERT
        shutil.rmtree("new")
    else:
        refused(command.replace("KB", "kb").replace("MODEL", model), MODELS[model])


@pytest.mark.parametrize("kb", KNOWLEDGE_BASES)
@pytest.mark.parametrize("command", USES + KEEPS)
def test_knowledge_base_that_is_none_or_damaged_is_one_line(refused, command: str, kb: str) -> None:
    refused(command.replace("KB", kb).replace("MODEL", "encoder"), KNOWLEDGE_BASES[kb])


WRITES = {
    "evaluate --kb kb --model qa --questions q.jsonl --out kb": "--out kb is a folder: give the path of a file",
    "evaluate --kb kb --model qa --questions q.jsonl --out .": "is a folder: give the path of a file",
    "evaluate --kb kb --model qa --questions q.jsonl --out q.jsonl": "--out q.jsonl is also --questions: name another",
    "evaluate --kb kb --model qa --questions q.jsonl --save-predictions ./q.jsonl": "is also --questions: name another",
    "evaluate --kb kb --model qa --questions q.jsonl --out q.jsonl/x": "q.jsonl/x cannot be written: .*: Not a directory",
    "evaluate --kb kb --model qa --questions q.jsonl --out a --save-predictions ./a": "is also --out: name another",
    "evaluate --kb kb --model qa --questions q.jsonl --out pipe": "is a device or a pipe",
    "evaluate --kb kb --model qa --questions q.jsonl --out newdir/": "--out newdir is a folder",
    "retrieve --kb kb --model qa --questions q.jsonl --out q.jsonl": "is also --questions: name another file",
    "retrieve --kb kb --model qa --questions q.jsonl --out s3://a/b": "must be on this machine",
    "probe --kb kb --model qa --out qa": "--out qa is a folder",
    "kb export --kb kb --out kb": "--out kb is a folder",
    "kb export --kb kb --out qa/tokenizer.json": "--out qa/tokenizer.json is a part of the model .*qa: name another file",
    "evaluate --kb kb --model qa --questions q.jsonl --out qa/realm.json": "is a part of the model .*qa: name another file",
    "retrieve --kb kb --model qa --questions q.jsonl --out encoder/encoder/config.json": "is a part of the model .*encoder: ",
    "probe --kb kb --model qa --out kb/tokenizer/tokenizer.json": "is a part of the knowledge base .*kb: name another file",
}


@pytest.mark.parametrize("command", WRITES)
def test_file_that_cannot_be_written_is_refused_before_the_work(refused, command: str, monkeypatch) -> None:
    monkeypatch.setattr("realm.qa.pipeline.Answerer.load", lambda *_: pytest.fail("the work has begun"))
    refused(command, WRITES[command])


MAKES = {
    "kb build towns.jsonl": "--out",
    "fit towns.jsonl": "--out",
    "questions --kb kb": "--out",
    "mlm --kb kb": "--out",
    "ict --kb kb --init encoder": "--out",
    "pretrain --kb kb --model encoder": "--out",
    "adapt --kb kb --model encoder": "--out",
    "finetune --kb kb --model encoder --train q.jsonl --dev q.jsonl": "--out",
    "baseline drqa --kb kb --model encoder --train q.jsonl --dev q.jsonl": "--out",
    "knn --kb kb --model encoder": "--out",
    "convert encoder": "OUT",
    "pull s3://bucket/kb": "FOLDER",
    "compare tables": "--dir",
    "demo": "--dir",
}
"""Command -> its argument that is a folder which the command makes."""


@pytest.mark.parametrize("command", MAKES)
def test_folder_that_cannot_be_made_is_refused_before_the_work(refused, command: str) -> None:
    name = MAKES[command]
    flag = name if name.startswith("-") else ""
    says = f"{name} q.jsonl/new/x cannot be written: no file can be made in .*/q.jsonl: Not a directory"
    refused(f"{command} {flag} q.jsonl/new/x", says)


@pytest.mark.parametrize("command", MAKES)
def test_link_to_a_folder_that_cannot_be_made_is_refused_before_the_work(refused, home, command: str) -> None:
    flag = MAKES[command] if MAKES[command].startswith("-") else ""
    (home / "nowhere").symlink_to("q.jsonl/new/x")
    refused(
        f"{command} {flag} nowhere", "nowhere cannot be written: no file can be made in .*: Not a directory"
    )
    (home / "nowhere").unlink()


@pytest.mark.parametrize("command", ["compare tables", "ablate tables", "demo"])
def test_folder_of_all_files_of_a_command_that_is_a_file_is_refused(refused, command: str) -> None:
    refused(f"{command} --dir q.jsonl", "--dir q.jsonl is a file: give the path of a folder")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_folder_on_a_file_system_without_new_files_is_refused_before_the_work(refused) -> None:
    refused(
        "kb build towns.jsonl --out /proc/new/kb",
        "--out /proc/new/kb cannot be written: no file can be made in /proc: ",
    )


def test_a_report_that_was_written_into_the_folder_of_a_model_can_be_replaced(
    home, monkeypatch, capfd
) -> None:
    monkeypatch.chdir(home)
    for _ in range(2):
        done("evaluate --kb kb --model qa --questions q.jsonl --retrieval-only --out qa/report.json")
    Path("qa/report.json").unlink()


PLACES = {
    "kb info --kb ''": "argument --kb: is empty",
    "kb info --kb /": "argument --kb: / is the whole file system",
    f"mlm --kb kb {TINY} --init ''": "argument --init: is empty",
    "mlm --kb kb --config tiny --out .": "exists: name another --out",
    "mlm --kb kb --config tiny --out /": "argument --out: / is the whole file system",
    "kb build '' --out new": "argument SOURCE: is empty",
    "kb build towns.jsonl --out new --vocab-size 1": "--vocab-size: 1 is not a number from 100 to 1,000,000",
    "kb build towns.jsonl --out new --vocab-size 99999999999": "is not a number from 100 to 1,000,000",
    f"mlm --kb kb {TINY} --set encoder.heads=3": "encoder: heads is 3: it must divide hidden, which is ",
    f"mlm --kb kb {TINY} --set encoder.layers=0": "encoder: layers is 0: it must be 1 or more",
    f"mlm --kb kb {TINY} --set stpes=3": "realm: --set .mlm.: unknown key stpes",
    f"pretrain --kb kb --model encoder {TINY} --set candidates=0": "candidates is 0: it must be 1 or more",
    "compare tables --check missing.json --dir new": "missing.json does not exist",
}


@pytest.mark.parametrize("command", PLACES)
def test_empty_and_impossible_arguments_are_one_line(refused, command: str) -> None:
    refused(command, PLACES[command])


def test_knowledge_base_is_found_from_inside_its_folder(home, monkeypatch, capfd) -> None:
    monkeypatch.chdir(home / "kb")
    done("kb info --kb .")
    assert "documents" in capfd.readouterr().out


@pytest.mark.parametrize("command", USES)
def test_knowledge_base_built_with_another_tokenizer_is_one_line(refused, command: str) -> None:
    says = "encoder has tokenizer [0-9a-f]{16}, but knowledge base kb2 has tokenizer [0-9a-f]{16}: build"
    refused(command.replace("KB", "kb2").replace("MODEL", "encoder"), says)


def test_after_all_that_the_same_bytes_give_the_same_answer(home, monkeypatch, capfd) -> None:
    monkeypatch.chdir(home)
    done("kb verify --kb kb")
    assert answer_and_digests() == json.loads(Path("before.json").read_text())
