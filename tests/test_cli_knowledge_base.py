"""Knowledge bases that are built and kept from the command line."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realm import cli
from realm.documents import parallel_reading
from realm.documents.file_records import records_of
from realm.documents.wikipedia import dumps
from realm.store import ingest
from realm.store.knowledge_base import KnowledgeBase
from tests.documents.writers import page, write_dump
from tests.towns import write_corpus, write_encoder


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with a tokenizer that knows letters and digits."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    made = Tokenizer(WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    folder = tmp_path / "encoder"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


def write_documents(path: Path, **texts: str) -> str:
    path.write_text(
        "".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in texts.items())
    )
    return str(path)


def test_a_terminal_gets_no_control_characters_of_documents(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"id": "a\nb\x1b[2J", "title": "T\x9b1m", "text": "Rome\x1b]0;x\x07 was founded."}
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    kb = str(tmp_path / "kb")
    words = [
        "kb",
        "build",
        str(tmp_path / "d.jsonl"),
        "--out",
        kb,
        "--tokenizer",
        tokenizer,
        "--tagger",
        "rules",
    ]
    assert cli.main(words) == 0
    capsys.readouterr()
    assert cli.main(["kb", "list", "--kb", kb]) == 0
    assert capsys.readouterr().out == "     1  a b[2J  T1m\n"
    assert cli.main(["kb", "show", row["id"], "--kb", kb]) == 0
    shown = capsys.readouterr().out
    assert "Rome]0;x was founded." in shown and not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_an_interrupted_build_from_a_dump_continues_without_parsing_its_pages_again(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [page(f"Town {number}", f"The town {number} is old.") for number in range(20)]
    source = str(write_dump(tmp_path / "wiki.xml", pages))
    build = ["kb", "build", source, "--tokenizer", tokenizer, "--tagger", "rules", "--out"]
    assert cli.main([*build, str(tmp_path / "other")]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(ingest, "write_merged", MagicMock(side_effect=KeyboardInterrupt))
        assert cli.main([*build, str(tmp_path / "kb")]) == 130
    assert (tmp_path / "kb.building" / ingest.PARSED).exists()
    monkeypatch.setattr(dumps, "_start", None)
    assert cli.main([*build, str(tmp_path / "kb")]) == 0
    assert list(KnowledgeBase.open(tmp_path / "kb")) == list(KnowledgeBase.open(tmp_path / "other"))
    assert not (tmp_path / "kb" / ingest.PARSED).exists()


def test_a_build_reads_an_exported_parquet_file(tmp_path: Path, tokenizer: str) -> None:
    source = write_documents(tmp_path / "first.jsonl", Bonn="A town. It was a capital.", Rome="A city.")
    build = ["kb", "build", "--tokenizer", tokenizer, "--tagger", "rules"]
    assert cli.main([*build, source, "--out", str(tmp_path / "kb")]) == 0
    exported = str(tmp_path / "out.parquet")
    assert cli.main(["kb", "export", "--kb", str(tmp_path / "kb"), "--out", exported]) == 0
    assert cli.main([*build, exported, "--out", str(tmp_path / "again")]) == 0
    assert list(KnowledgeBase.open(tmp_path / "again")) == list(KnowledgeBase.open(tmp_path / "kb"))


def test_a_preview_and_a_fit_say_which_names_a_corpus_has(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pa.table({"content": ["Bonn is a town.", "Rome is a city."], "headline": ["Bonn", None]})
    lance.write_dataset(table, tmp_path / "c.lance")
    pq.write_table(table, tmp_path / "c.parquet")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    shown = {}
    for name in ("c.lance", "c.parquet", "c.jsonl"):
        source, number = str(tmp_path / name), ":2" if name.endswith("l") else " row 2"
        problem = (
            r"no column text \(columns: content, headline\): name the column of the text with text_field"
        )
        if name.endswith("l"):
            problem = r"nothing could be read; .* no \"text\" \(fields: .*\): name the key of the text with text_field"
        for command in (["kb", "preview", source], ["fit", source, "--out", str(tmp_path / "workspace")]):
            assert cli.main(command) == 2
            assert re.search(rf"realm: .*{problem}\n$", capsys.readouterr().err)
        named = ["--set", "text_field=content", "--set", "title_field=headline"]
        preview = ["kb", "preview", source, "--tokenizer", tokenizer, "--tagger", "rules", *named]
        assert cli.main(preview) == 0
        shown[name] = capsys.readouterr().out.replace(f"{source}{number}", "PLACE")
    assert len(set(shown.values())) == 1 and "  PLACE\n        Rome is a city.\n" in shown["c.lance"]
    assert not (tmp_path / "workspace").exists()


def test_the_names_of_a_build_are_used_by_an_addition_and_shown_by_a_preview(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, url in (("first", "https://example.org/1"), ("second", "https://example.org/2")):
        files.append(str(tmp_path / f"{name}.jsonl"))
        Path(files[-1]).write_text(json.dumps({"content": f"The {name} town.", "url": url, "text": "No."}))
    kb, tagger = str(tmp_path / "kb"), ["--tagger", "rules"]
    named = ["--set", "text_field=content"]
    built = ["--tokenizer", tokenizer, *tagger]
    assert cli.main(["kb", "preview", files[0], *built, *named]) == 0
    shown = capsys.readouterr().out
    assert "https://example.org/1\n" in shown and "The first town." in shown
    assert cli.main(["kb", "build", files[0], "--out", kb, *built, *named]) == 0
    assert cli.main(["kb", "add", files[1], "--kb", kb]) == 0
    opened = KnowledgeBase.open(kb)
    assert opened.config.text_field == "content"
    assert [(one.document_id, one.title, one.text, dict(one.fields)) for one in opened] == [
        (f"https://example.org/{n}", "", f"The {name} town.", {"url": f"https://example.org/{n}"})
        for n, name in ((1, "first"), (2, "second"))
    ]
    capsys.readouterr()
    assert cli.main(["kb", "list", "--kb", kb]) == 0
    assert capsys.readouterr().out == "     1  https://example.org/1\n     1  https://example.org/2\n"


def test_a_knowledge_base_is_built_and_kept_from_the_command_line(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def realm(*words: str) -> dict[str, Any]:
        assert cli.main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    kb = str(tmp_path / "kb")
    first = write_documents(
        tmp_path / "first.jsonl", Bonn="A town. It was a capital until 3 October 1990.", Rome="A city."
    )
    second = write_documents(tmp_path / "second.jsonl", Rome="A city in Italy.", Oslo="A city in Norway.")
    built = realm("kb", "build", first, "--out", kb, "--tokenizer", tokenizer, "--tagger", "rules")
    assert (built["documents"], built["passages"]) == (2, 2)
    info = realm("kb", "info", "--kb", kb)
    assert (info["passages"], info["tagger"]) == (2, "rules")
    added = realm("kb", "add", second, "--kb", kb)
    assert (added["added"], added["replaced"], added["unchanged"]) == (1, 1, 0)
    assert cli.main(["kb", "list", "--kb", kb, "--json"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(d["id"], d["title"], d["passages"]) for d in listed] == [
        ("Bonn", "Bonn", 1),
        ("Rome", "Rome", 1),
        ("Oslo", "Oslo", 1),
    ]
    assert cli.main(["kb", "list", "Ro", "--kb", kb, "--limit", "1"]) == 0
    assert capsys.readouterr().out == "     1  Rome\n"
    assert realm("kb", "delete", "Bonn", "--kb", kb) == {"passages_removed": 1}
    assert realm("kb", "verify", "--kb", kb) == {"ok": True, "problems": [], "lagging": []}
    after = realm("kb", "info", "--kb", kb)
    assert after["passages"] == 2
    assert after["fingerprint"] != info["fingerprint"]

    assert cli.main(["kb", "delete", "Paris", "--kb", kb]) == 2
    assert cli.main(["kb", "build", first, "--out", kb, "--tokenizer", tokenizer, "--tagger", "rules"]) == 2
    assert cli.main(["kb", "info", "--kb", tokenizer]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert "Paris" in errors[0]


def test_a_configuration_alone_gives_a_knowledge_base_and_an_encoder_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_encoder(Path("start"), write_corpus(Path("towns.jsonl")))
    Path("both.toml").write_text(
        '[kb]\ntokenizer = "start"\ntagger = "rules"\npassage_tokens = 64\n[mlm]\ninit = "start"\nsteps = 0\n'
    )
    on = ["--config", "both.toml"]
    assert cli.main(["kb", "build", "towns.jsonl", "--out", "kb", *on]) == 0
    assert cli.main(["mlm", "--kb", "kb", "--out", "model", *on]) == 0
    assert json.loads(Path("model/realm.json").read_text())["stages"][0]["init"] == "start"
    capsys.readouterr()
    assert cli.main(["kb", "info", "--kb", "kb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokenizer"] == "start"
    # The flags are short for the settings, and go before them.
    build = ["kb", "build", "towns.jsonl", "--out", "other", "--config", "both.toml"]
    assert cli.main([*build, "--tokenizer", "absent"]) == 2
    assert cli.main(["mlm", "--kb", "kb", "--init", "absent", "--out", "no", *on]) == 2
    assert all("absent" in line for line in capsys.readouterr().err.splitlines()[-2:])


def test_what_cannot_be_read_is_left_out_and_listed_unless_strict(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def realm(line: str, *words: str) -> tuple[int, str, list[str]]:
        code = cli.main([*line.split(), *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.splitlines()

    docs, kb = tmp_path / "docs", tmp_path / "kb"
    docs.mkdir()
    (docs / "empty.md").write_bytes(b"")
    build = ["--tokenizer", tokenizer, "--tagger", "rules", "--out", str(kb)]
    code, out, err = realm("kb build", str(docs / "empty.md"), *build)
    assert (code, out, err) == (2, "", [f"realm: {docs}/empty.md is empty"])
    (docs / "a.png").write_bytes(b"")
    code, out, err = realm("kb build", str(docs), *build)
    assert (code, out, len(err)) == (2, "", 1) and not kb.exists()

    write_documents(docs / "b.jsonl", Bonn="A town.")
    code, out, err = realm("kb build", str(docs), *build, "--strict")
    assert code == 2 and err[-1] == f"realm: {docs}/empty.md is empty" and not kb.exists()
    code, out, err = realm("kb build", str(docs), *build, "--json")
    assert code == 0 and json.loads(out)["left_out"] == {"of a type that is not read": 1, "empty": 1}
    assert err == [
        f"left out: 1 of a type that is not read: {docs}/a.png",
        f"left out: 1 empty: {docs}/empty.md",
        f"{kb}/left_out.jsonl lists all that was left out (with --strict, the first problem is an error)",
        f"kb build: the knowledge base is in {kb}",
    ]
    listed = [json.loads(line) for line in (kb / "left_out.jsonl").read_text().splitlines()]
    assert [(one["where"], one["reason"]) for one in listed] == [
        (f"{docs}/a.png", "of a type that is not read"),
        (f"{docs}/empty.md", "empty"),
    ]

    with (docs / "b.jsonl").open("a") as file:
        file.write('{"title": "Rome"\n{"title": "Oslo", "text": "A city."}\n')
    assert realm("kb add --strict --kb", str(kb), str(docs / "b.jsonl"))[0] == 2
    code, out, err = realm("kb add --json --kb", str(kb), str(docs / "b.jsonl"))
    assert code == 0 and json.loads(out)["added"] == 1 and err[0] == f"left out: 1 not JSON: {docs}/b.jsonl:2"
    assert realm("kb verify --kb", str(kb))[0] == 0
    code, out, err = realm("kb add --kb", str(kb), str(docs / "empty.md"))
    assert (code, out, err) == (2, "", [f"realm: {docs}/empty.md is empty"])


def test_merged_files_are_listed_and_deleted_by_their_paths(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("Same\n\nThe same words.")
    files, kb = [str(tmp_path / f"{name}.txt") for name in "abc"], str(tmp_path / "kb")
    build = ["kb", "build", *files, "--out", kb, "--tokenizer", tokenizer, "--tagger", "rules", "--json"]
    assert cli.main(build) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["merged"] == 2
    a, b, c = files
    assert said.err.splitlines() == [
        f"merged: 2 with the same title and text as another document: {b} (as {a}), {c} (as {a})",
        f"kb build: the knowledge base is in {kb}",
    ]
    for file, removed in ((a, 0), (c, 0), (b, 1)):
        assert cli.main(["kb", "delete", file, "--kb", kb, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"passages_removed": removed}
    assert cli.main(["kb", "delete", a, "--kb", kb]) == 2


@pytest.mark.parametrize("command", ["kb build --tagger rules", "fit --minutes 0 --set tagger=rules"])
def test_without_any_text_the_reasons_are_printed(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blank.jsonl").write_text('{"title": "A", "text": " "}\n{"title": "B"\n')
    arguments = [*command.split(), str(tmp_path / "blank.jsonl"), "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"left out: 1 not JSON: {tmp_path}/blank.jsonl:2" in lines
    assert lines[-1].startswith("realm: there is no text in")


def test_a_knowledge_base_inside_its_own_source_is_not_read(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.txt").write_text("One.")
    (docs / "broken.jsonl").write_text("{")
    kb, options = str(docs / "kb"), ["--tagger", "rules", "--json"]
    (docs / "kb.building").mkdir()  # as after a build with other settings that was killed
    (docs / "kb.building" / "merged.jsonl").write_text("{")
    assert cli.main(["kb", "build", str(docs), "--out", kb, "--tokenizer", tokenizer, *options]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == {"not JSON": 1}
    assert (docs / "kb" / "left_out.jsonl").is_file()
    assert cli.main(["kb", "add", str(docs), "--kb", kb, *options]) == 0
    added = json.loads(capsys.readouterr().out)
    assert (added["unchanged"], added["left_out"]) == (1, {"not JSON": 1})


def test_a_build_and_an_addition_read_their_sources_once(tmp_path: Path, monkeypatch) -> None:
    read: list[str] = []

    def noted(found: Iterable[tuple[Any, Path]], *others: Any) -> Iterator[Any]:
        files = list(found)
        read.extend(path.name for _, path in files)
        return records_of(files, *others)

    monkeypatch.setattr(parallel_reading, "records_of", noted)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"The file {name} is read once.")
    kb = str(tmp_path / "kb")
    assert cli.main(["kb", "build", str(tmp_path / "a.txt"), "--out", kb, "--tagger", "rules"]) == 0
    assert cli.main(["kb", "add", str(tmp_path / "b.txt"), "--kb", kb]) == 0
    assert read == ["a.txt", "b.txt"]
