"""Google's own checkpoints: what TensorFlow wrote becomes the model that the reference's files become, and damage is one line.

`fixtures/tensorflow/` is the work of `tensorflow_fixtures.py`, which let the reference's loader judge the names.
"""

import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from realm import cli
from realm.errors import DamagedError, InputError
from realm.interop.checkpoint import ENCODER_SETTINGS, open_checkpoint
from realm.interop.tensorflow import read_bundle
from realm.interop.weight_names import convert
from realm.model.folder import Model, load_model
from tests.interop.reference_environment import FIXTURES

GOOGLES = FIXTURES / "tensorflow"
NQ = GOOGLES / "openqa" / "model.ckpt-300000"
NAMES = {"embedder": GOOGLES / "embedder", "encoder": GOOGLES / "encoder", "openqa": NQ}


def weights(model: Model) -> dict[str, Tensor]:
    return {f"{name}.{k}": v for name, part in model.parts().items() for k, v in part.state_dict().items()}


def everything(prefix: Path) -> dict[str, Tensor]:
    return read_bundle(prefix, lambda name: name != "global_step")  # which is an integer


def refused(prefix: Path) -> str | None:
    """What is wrong with a checkpoint, if anything is."""
    try:
        everything(prefix)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", NAMES)
def test_googles_files_give_the_model_that_the_references_give(kind: str) -> None:
    tokenizer = str(NQ.parent) if kind == "openqa" else None
    files = open_checkpoint(str(NAMES[kind]), tokenizer), open_checkpoint(str(FIXTURES / kind / "new"))
    assert [files[0].config[name] for name in ENCODER_SETTINGS] == [
        files[1].config[name] for name in ENCODER_SETTINGS
    ]
    made, wanted = (convert(file) for file in files)
    parts = wanted.model.stages[0]["parts"]
    assert made.model.stages[0]["parts"] == parts
    mine, theirs = (
        {k: v for k, v in weights(one.model).items() if k.split(".")[0] in parts} for one in (made, wanted)
    )
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
    assert made.model.tokenizer.vocabulary() == wanted.model.tokenizer.vocabulary()
    assert set(made.dead) <= set(
        wanted.dead
    )  # Google's have no decoders and no optimizer's variables are left


def test_the_command_takes_a_modules_folder_and_a_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(NAMES["embedder"]), str(tmp_path / "model"), "--json"]
    assert cli.main([*words, "--encoder", str(NAMES["encoder"])]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []
    assert load_model(tmp_path / "model").embedder.config.dim == 8
    words = ["convert", str(NQ), str(tmp_path / "nq"), "--json"]
    assert cli.main(words) == 2
    assert "no vocabulary" in capsys.readouterr().err
    assert cli.main([*words, "--tokenizer", str(NQ.parent)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "openqa" and "kb" not in told and "no vectors" in " ".join(told["notes"])
    assert load_model(tmp_path / "nq").span_reader is not None


@pytest.mark.parametrize("ending", ["index", "data-00000-of-00001"])
def test_the_name_of_a_file_stands_for_its_checkpoint(ending: str) -> None:
    named = open_checkpoint(f"{NQ}.{ending}", str(NQ.parent))
    assert (
        named.kind == "openqa"
        and named.tensors.keys() == open_checkpoint(str(NQ), str(NQ.parent)).tensors.keys()
    )


@pytest.mark.parametrize("flags", [["--bits", "16"], ["--tagger", "rules"]])
def test_flags_for_texts_and_vectors_are_refused_where_there_are_none(
    flags: list[str], tmp_path, capsys
) -> None:
    assert cli.main(["convert", str(NAMES["embedder"]), str(tmp_path / "model"), *flags]) == 2
    assert "--bits and --tagger are for texts and vectors" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_heads_are_64_wide_unless_a_bert_config_has_another_number(tmp_path: Path) -> None:
    folder = shutil.copytree(NAMES["embedder"], tmp_path / "embedder")
    assert open_checkpoint(str(folder)).config["num_attention_heads"] == 2
    (folder / "assets" / "bert_config.json").write_text('{"heads": 2}')
    with pytest.raises(InputError, match="has no number of attention heads"):
        open_checkpoint(str(folder))
    (folder / "assets" / "bert_config.json").write_text("[" * 100_000)
    with pytest.raises(DamagedError, match=r"bert_config\.json is damaged"):
        open_checkpoint(str(folder))
    (folder / "assets" / "bert_config.json").unlink()
    with pytest.raises(InputError, match="the hidden size 16 is not a multiple of 64"):
        open_checkpoint(str(folder))


# -- damage


def damaged(folder: Path, part: str, data: bytes) -> Path:
    """A copy of the encoder's files in which the index or the data is another."""
    prefix = folder / "variables"
    for file in (GOOGLES / "encoder" / "variables").iterdir():
        (folder / file.name).write_bytes(
            data if file.name.split(".")[1].startswith(part) else file.read_bytes()
        )
    return prefix


WHOLE = {
    part: next((GOOGLES / "encoder" / "variables").glob(f"*.{part}*")).read_bytes()
    for part in ("index", "data")
}
TENSORS = everything(GOOGLES / "encoder" / "variables" / "variables")


@given(st.sampled_from(["index", "data"]), st.integers(0, 1 << 20), st.integers(1, 255))
def test_no_flipped_byte_is_read(
    tmp_path_factory: pytest.TempPathFactory, part: str, where: int, flip: int
) -> None:
    data = bytearray(WHOLE[part])
    data[where % len(data)] ^= flip
    prefix = damaged(tmp_path_factory.mktemp("flip"), part, bytes(data))
    if (says := refused(prefix)) is not None:
        assert "\n" not in says
        return
    found = everything(prefix)  # the byte is of no tensor: padding of the footer, an unused block, the step
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(value, found[name]) for name, value in TENSORS.items())


@given(st.sampled_from(["index", "data"]), st.integers(0, 1 << 20))
def test_no_cut_file_is_read(tmp_path_factory: pytest.TempPathFactory, part: str, where: int) -> None:
    prefix = damaged(tmp_path_factory.mktemp("cut"), part, WHOLE[part][: where % len(WHOLE[part])])
    says = refused(prefix)
    assert says is not None and "\n" not in says


@given(st.binary(max_size=200))
def test_noise_with_right_sums_is_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    prefix = tmp_path_factory.mktemp("noise") / "a"
    Path(f"{prefix}.index").write_bytes(table({}, block=noise))
    Path(f"{prefix}.data-00000-of-00001").write_bytes(b"1234")
    says = refused(prefix)
    assert (says is None and everything(prefix) == {}) or (says is not None and "\n" not in says)


def summed(block: bytes, compression: int = 0) -> bytes:
    crc = google_crc32c.value(block + bytes([compression]))
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return block + bytes([compression]) + struct.pack("<I", masked)


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value % 128 + 128]) + varint(value // 128)


def entries(pairs: Mapping[bytes, bytes]) -> bytes:
    body = b"".join(varint(0) + varint(len(k)) + varint(len(v)) + k + v for k, v in pairs.items())
    return body + struct.pack("<II", 0, 1)


def table(pairs: Mapping[bytes, bytes], block: bytes | None = None, compression: int = 0) -> bytes:
    """A table of one block, as LevelDB lays it out."""
    block = entries(pairs) if block is None else block
    data = summed(block, compression)
    handle = varint(0) + varint(len(block))
    index = entries({b"\xff": handle})
    footer = varint(0) + varint(len(block)) + varint(len(data)) + varint(len(index))
    return data + summed(index) + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def entry(
    shape: tuple[int, ...] = (2,), size: int | None = None, offset: int = 0, dtype: int = 1, zeros: int = 8
) -> bytes:
    """A tensor's entry, with the sum of some zeros."""
    dims = b"".join(b"\x12" + bytes([len(varint(n)) + 1]) + b"\x08" + varint(n) for n in shape)
    crc = google_crc32c.value(bytes(zeros))
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    length = varint(4 * math.prod(shape) if size is None else size)
    return (
        b"\x08" + bytes([dtype]) + b"\x12" + varint(len(dims)) + dims
        + b"\x20" + varint(offset) + b"\x28" + length + b"\x35" + struct.pack("<I", masked)
    )  # fmt: skip


ONE_SHARD = b"\x08\x01"


@pytest.mark.parametrize(
    ("header", "told", "says"),
    [
        (ONE_SHARD, entry(), None),
        (ONE_SHARD, entry(shape=(3,)), "the tensor ends at byte 12, the file at 8"),
        (ONE_SHARD, entry(offset=1), "the tensor ends at"),
        (ONE_SHARD, entry(offset=2**64 - 1), "the tensor ends at"),
        (ONE_SHARD, entry(size=4), r"4 bytes do not fit the shape \[2\]"),
        (ONE_SHARD, entry(shape=(2**62, 2)), "the tensor ends at"),
        (ONE_SHARD, entry(dtype=7), "the type is 7"),
        (ONE_SHARD, entry(shape=(1,)), "checksum"),
        (ONE_SHARD, entry(shape=(0, 2**69), zeros=0), r"the shape \[0, 5902"),
        (ONE_SHARD, entry(shape=(0,) * 99, zeros=0), r"the shape \[0, 0"),
        (ONE_SHARD, entry() + b"\x3a\x00", "stored in slices"),
        (ONE_SHARD, entry() + b"\x18\x05", "data-00005-of-00001: No such file or directory"),
        (ONE_SHARD + b"\x10\x01", entry(), "big-endian"),
        (b"\x08\x02", entry(), "data-00000-of-00002: No such file or directory"),
        (ONE_SHARD, b"\x0b", "a field of kind 3"),
        (ONE_SHARD, b"\x08" + b"\xff" * 10, "more than 64 bits"),
    ],
)
def test_an_entry_that_cannot_be_is_named(
    tmp_path: Path, header: bytes, told: bytes, says: str | None
) -> None:
    (tmp_path / "a.index").write_bytes(table({b"": header, b"one": told}))
    (tmp_path / "a.data-00000-of-00001").write_bytes(bytes(8))
    if says is None:
        found = everything(tmp_path / "a")
        assert found.keys() == {"one"} and np.array_equal(found["one"], [0, 0])
        return
    with pytest.raises(InputError, match=says):
        everything(tmp_path / "a")


def test_a_checkpoint_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.index").write_bytes(table({b"": ONE_SHARD, b"one": entry()}))
    (tmp_path / "a.data-00000-of-00001").write_bytes(bytes(8))
    with pytest.raises(InputError, match=r"contains no BERT; its variables are one \.\.\."):
        open_checkpoint(str(tmp_path / "a"), str(NQ.parent))


def test_a_compressed_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.index").write_bytes(table({b"": ONE_SHARD}, compression=1))
    with pytest.raises(InputError, match="a block is compressed"):
        everything(tmp_path / "a")
