"""Model folders that are damaged or changed are one line, and checksums find every changed bit."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realm import checksums, cli, hub
from realm.checksums import CHECKSUMS, check_installed
from realm.errors import RealmError
from realm.hub import encoder_folder
from realm.interop.as_sentence_transformers import write_sentence_transformers
from realm.model.bert import Bert
from realm.model.bert_files import save_bert
from realm.model.folder import load_model, save_model
from realm.model.manifest import KINDS
from realm.model.masked_reader import MaskedReader, load_reader
from realm.model.span_reader import SpanReader
from realm.tokens.tokenizer import Tokenizer
from tests.model.test_folder import small_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["one two three four"], vocab_size=40)


# -- damage


def cut(name: str):
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    damage.__name__ = f"cut_{name}"
    return damage


def drop(key: str):
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "realm.json").read_text())
        del manifest[key], manifest["checksums"]
        (folder / "realm.json").write_text(json.dumps(manifest))

    damage.__name__ = f"drop_{key}"
    return damage


def stages(value: object):
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "realm.json").read_text())
        del manifest["checksums"]
        (folder / "realm.json").write_text(json.dumps(manifest | {"stages": value}))

    damage.__name__ = f"stages_{value}"
    return damage


def write(name: str, text: str):
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    damage.__name__ = f"write_{name}"
    return damage


def other_trunk(folder: Path) -> None:
    manifest = json.loads((folder / "realm.json").read_text())
    manifest["trunk"]["num_hidden_layers"] = 2
    (folder / "realm.json").write_text(json.dumps(manifest))


def other_tokenizer(folder: Path) -> None:
    Tokenizer.train(["quite other words"], vocab_size=30).save(folder)


KEYS = ["format", *KINDS]


@pytest.mark.parametrize(
    "damage",
    [
        *(
            cut(name)
            for name in ("realm.json", "embedder.safetensors", "tokenizer.json", "encoder/model.safetensors")
        ),
        *(drop(key) for key in KEYS),
        write("embedder.safetensors", "not safetensors"),
        write("realm.json", "[1, 2]"),
        write("realm.json", '{"format": 99}'),
        stages([{"steps": 7}]),
        stages([{"stage": "ict", "held_out": 0.1}]),
        stages({"ict": {"stage": "ict"}}),
        stages(7),
        other_trunk,
        other_tokenizer,
        lambda folder: (folder / "embedder.safetensors").unlink(),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: shutil.rmtree(folder / "encoder"),
        lambda folder: (folder / "realm.json").write_bytes(b"\xff\xfe\x00"),
    ],
    ids=lambda damage: damage.__name__,
)
def test_damaged_model_is_one_line(tokenizer: Tokenizer, tmp_path: Path, damage) -> None:
    save_model(small_model(tokenizer), tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(RealmError) as error:
        load_model(tmp_path / "model")
    assert "\n" not in str(error.value)
    assert "model" in str(error.value)


# -- checksums


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 16
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("embedder.safetensors", -100),
        ("span_reader.safetensors", -100),
        ("encoder/model.safetensors", -100),
        ("encoder/copy_head.safetensors", -50),
        ("tokenizer.json", -4),  # white space, so that it loads
    ],
)
def test_a_changed_bit_in_any_file_is_one_line_that_names_it(
    tokenizer: Tokenizer, tmp_path: Path, name: str, place: int
) -> None:
    model = small_model(tokenizer)
    model.masked_reader = MaskedReader(model.reader.bert, copy=True)
    model.span_reader = SpanReader(Bert(model.reader.config))
    save_model(model, tmp_path / "model")
    if name == "tokenizer.json":
        with (tmp_path / "model" / name).open("a") as file:
            file.write("\n")
    else:
        flip(tmp_path / "model" / name, place)
    with pytest.raises(
        RealmError, match=rf'model is damaged.*{name} differs from its checksum.*remove "checksums"'
    ) as error:
        load_model(tmp_path / "model")
    assert "\n" not in str(error.value)
    if name.startswith("encoder/"):  # it stays on disk, and what is read is whole
        load_model(tmp_path / "model", reader=False)


def test_a_changed_manifest_is_one_line_and_its_checksums_can_be_taken_away(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(small_model(tokenizer), tmp_path / "model")
    file = tmp_path / "model" / "realm.json"
    manifest = json.loads(file.read_text())
    assert manifest["checksums"].keys() == {
        "realm.json", "tokenizer.json", "embedder.safetensors",
        "encoder/config.json", "encoder/model.safetensors", "encoder/tokenizer.json", "encoder/checksums.json",
    }  # fmt: skip
    file.write_text(json.dumps(manifest))  # without its line breaks: the same
    load_model(tmp_path / "model")
    manifest["lengths"]["query"] -= 1
    file.write_text(json.dumps(manifest))
    with pytest.raises(
        RealmError, match=r'realm\.json differs from its checksum.*remove "checksums" from its realm\.json'
    ):
        load_model(tmp_path / "model")
    del manifest["checksums"]
    file.write_text(json.dumps(manifest))
    assert load_model(tmp_path / "model").lengths.query == 7


def test_the_packaged_encoder_has_its_checksums(tmp_path: Path, monkeypatch) -> None:
    packaged = Path(encoder_folder("package:realm-mini"))
    assert json.loads((packaged / CHECKSUMS).read_text()).keys() == {
        path.name for path in packaged.iterdir() if path.name not in (CHECKSUMS, "README.md")
    }
    copy = tmp_path / "assets" / "realm-mini"
    shutil.copytree(packaged, copy)
    flip(copy / "tokenizer.json", 5000)
    monkeypatch.setattr(
        hub.importlib.util, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    with pytest.raises(RealmError, match=r"realm-mini is damaged: tokenizer\.json differs from its checksum"):
        Tokenizer.load("package:realm-mini")


def test_an_encoder_that_is_used_without_its_model_is_compared_with_its_own_checksums(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(small_model(tokenizer), tmp_path / "model")
    encoder = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "model" / "encoder", encoder)
    whole = load_reader(str(encoder)).state_dict()
    files = {path.name for path in encoder.iterdir()} - {CHECKSUMS}
    assert json.loads((encoder / CHECKSUMS).read_text()).keys() == files
    flip(encoder / "model.safetensors", (encoder / "model.safetensors").stat().st_size - 3)
    with pytest.raises(
        RealmError, match=r"elsewhere is damaged: model\.safetensors differs from its checksum"
    ):
        load_reader(str(encoder))
    (encoder / CHECKSUMS).write_text("[]")
    with pytest.raises(RealmError, match=r"checksums\.json is damaged"):
        load_reader(str(encoder))
    (encoder / CHECKSUMS).unlink()  # after a change on purpose
    changed = load_reader(str(encoder)).state_dict()
    assert changed.keys() == whole.keys()
    assert not all(torch.equal(changed[name], whole[name]) for name in whole)


def test_the_packaged_encoder_is_checked_once_in_a_process(monkeypatch) -> None:
    checked: list[Path] = []

    def changed(folder: Path, recorded: Mapping[str, str]) -> str:
        checked.append(folder)
        return ""

    monkeypatch.setattr(checksums, "changed", changed)
    check_installed.cache_clear()
    folders = {encoder_folder("package:realm-mini") for _ in range(3)}
    assert [str(folder) for folder in checked] == list(folders)
    check_installed.cache_clear()


def test_a_model_of_a_package_is_known_by_its_name(
    tiny_model_folder: Path, own_kb, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setitem(hub.PACKAGED, "package:towns", ("realm", str(tiny_model_folder)))
    monkeypatch.setitem(hub.PACKAGED, "package:absent", ("realm", str(tmp_path / "absent")))
    assert (
        load_model("package:towns").compute_passage_fingerprint()
        == load_model(tiny_model_folder).compute_passage_fingerprint()
    )
    kb, filled = str(own_kb.folder), "Arden lies on the [MASK]."
    assert cli.main(["fill", filled, "--kb", kb, "--model", "package:towns", "--set", "device=cpu"]) == 0
    adapt = ["mlm", "--kb", kb, "--init", "package:towns", "--set", "steps=0", "--set", "device=cpu"]
    adapt += ["--set", "embedder_start=given", "--set", "query_tokens=32", "--out", str(tmp_path / "out")]
    assert cli.main(adapt) == 0
    assert (
        load_model(tmp_path / "out").compute_passage_fingerprint()
        == load_model(tiny_model_folder).compute_passage_fingerprint()
    )
    for name, says in (
        ("absent", "is not in this installation"),
        ("nonsense", "is not a packaged model: the packaged models are"),
    ):
        with pytest.raises(RealmError, match=f"package:{name} {says}"):
            load_model(f"package:{name}")


def test_files_of_a_model_have_the_permissions_of_the_umask(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small_model(tokenizer)
    model.masked_reader = MaskedReader(model.reader.bert, copy=True)
    model.span_reader = SpanReader(Bert(model.reader.config))
    (tmp_path / "plain").write_text("")
    save_model(model, tmp_path / "model")
    write_sentence_transformers(model, new := tmp_path / "shared")
    files = [path for folder in (tmp_path / "model", new) for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / "plain").stat().st_mode}


ODD = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        3,
        2**31,
        10**30,
        0.5,
        float("nan"),
        float("inf"),
        "",
        "mean",
        "\ud800",
        [],
        {},
        [[1]],
        {"a": []},
    ]
)


@pytest.fixture(scope="module")
def saved(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = small_model(tokenizer)
    model.span_reader = SpanReader(Bert(model.reader.config))
    folder = tmp_path_factory.mktemp("saved") / "model"
    save_model(model, folder)
    return folder


@given(data=st.data(), value=ODD)
def test_a_manifest_of_odd_values_loads_or_is_one_line(saved: Path, data, value) -> None:
    """Without its checksums, as after a change on purpose."""
    file = saved / data.draw(st.sampled_from(["realm.json", "encoder/config.json"]))
    before = file.read_bytes()
    whole, said = (saved / "realm.json").read_bytes(), ""
    try:
        manifest = json.loads(whole)
        del manifest["checksums"]
        (saved / "realm.json").write_text(json.dumps(manifest))
        values = place = json.loads(file.read_text())
        key = data.draw(st.sampled_from(sorted(values)))
        while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
            place = place[key]
            key = data.draw(st.sampled_from(sorted(place)))
        place[key] = value
        file.write_text(json.dumps(values))
        save_model(load_model(saved), saved.with_name("again"))
    except RealmError as error:
        said = str(error)
    finally:
        file.write_bytes(before)
        (saved / "realm.json").write_bytes(whole)
    assert "\n" not in said
    said.encode()


@pytest.mark.parametrize("name", ["realm.json", "encoder/config.json"])
@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"format": 2, "a": ' + b"1" * 5000 + b"}", b"\xff\xfe{}", b"null", b'"\\ud800"', b""],
)
def test_json_that_is_no_manifest_is_one_line(tokenizer, tmp_path, name, content) -> None:
    save_model(small_model(tokenizer), tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(content)
    with pytest.raises(RealmError) as error:
        load_model(tmp_path / "model")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_folders_of_others_are_distinguished(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(RealmError, match="does not exist"):
        load_model(tmp_path / "absent")
    save_bert(small_model(tokenizer).reader.bert, tmp_path / "hf")
    with pytest.raises(RealmError, match=r"not a realm model.*realm mlm --init"):
        load_model(tmp_path / "hf")


@pytest.mark.parametrize("name", ["/dev/zero", "../outside", "a\0b", "a\nb", "encoder", "fifo"])
def test_checksums_name_no_other_files_and_no_devices(
    tokenizer: Tokenizer, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "model"
    save_model(small_model(tokenizer), folder)
    (tmp_path / "outside").write_text("A secret.")
    os.mkfifo(folder / "fifo")
    manifest = json.loads((folder / "realm.json").read_text())
    (folder / "realm.json").write_text(json.dumps(manifest | {"checksums": {name: "0" * 8}}))
    with pytest.raises(
        RealmError, match=r"is not a file inside the folder|is missing, or is no file"
    ) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
    (folder / "encoder" / CHECKSUMS).write_text(json.dumps({name: "0" * 8}))
    with pytest.raises(RealmError, match=r"is not a file inside the folder|is missing, or is no file"):
        checksums.check_folder(folder / "encoder")


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 900},
        {"hidden_size": 1_200_000, "num_attention_heads": 1},
        {"vocab_size": 2**31 - 1},
    ],
)
def test_sizes_that_the_weights_do_not_have_take_no_memory(
    tokenizer: Tokenizer, tmp_path: Path, sizes
) -> None:
    folder = tmp_path / "model"
    save_model(small_model(tokenizer), folder)
    manifest = json.loads((folder / "realm.json").read_text())
    del manifest["checksums"]
    manifest["trunk"] |= sizes
    (folder / "realm.json").write_text(json.dumps(manifest))
    with pytest.raises(RealmError, match="is missing, or does not have the shape"):
        load_model(folder)
