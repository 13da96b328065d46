"""What is no published checkpoint, or a damaged one, is refused with one line, and nothing is written."""

import errno
import json
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from realm import cli
from realm.errors import RealmError
from realm.interop.blocks import convert_checkpoint
from realm.interop.checkpoint import open_checkpoint
from realm.interop.weight_names import convert
from tests.interop.reference_environment import FIXTURES


def broken(tmp_path: Path, name: str, **states: torch.Tensor | None) -> Path:
    """A checkpoint with some tensors replaced, or left out where None."""
    folder = shutil.copytree(FIXTURES / name / "new", tmp_path / name)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    for key, value in states.items():
        tensors.pop(key) if value is None else tensors.update({key: value})
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(RealmError, match=r"lacks cls\.dense\.bias and 0 more tensors of a embedder"):
        convert(open_checkpoint(str(broken(tmp_path / "a", "embedder", **{"cls.dense.bias": None}))))
    with pytest.raises(
        RealmError, match=r"cls\.dense\.bias has the shape \(3,\), but \(8,\) by config\.json"
    ):
        convert(
            open_checkpoint(str(broken(tmp_path / "b", "embedder", **{"cls.dense.bias": torch.zeros(3)})))
        )


@pytest.mark.parametrize(
    "key", ["embedder.cls.dense.weight", "reader.cls.predictions.decoder.weight", "block_emb"]
)
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda value: value.char(), "is int8/strided/cpu"),
        (lambda value: value.to(torch.float8_e4m3fn), "is float8_e4m3fn/strided/cpu"),
        (lambda value: value.to(torch.complex64), "is complex64/strided/cpu"),
        (lambda value: value.to_sparse(), "is float32/sparse_coo/cpu"),
    ],
)
def test_numbers_that_are_no_floats_are_named_before_anything_is_written(
    key: str, wrong, says: str, tmp_path: Path
) -> None:
    tensors = torch.load(FIXTURES / "openqa" / "new" / "pytorch_model.bin", weights_only=True)
    folder = broken(tmp_path, "openqa", **{key: wrong(tensors[key])})
    with pytest.raises(RealmError, match=f"{key} {says}, not float16, bfloat16 or float32"):
        convert_checkpoint(str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(number: float, tmp_path: Path) -> None:
    wrong = torch.full((8,), number)
    with pytest.raises(RealmError, match=r"cls\.dense\.bias has a NaN or an infinity"):
        convert(open_checkpoint(str(broken(tmp_path, "embedder", **{"cls.dense.bias": wrong}))))


def test_another_kind_of_model_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RealmError, match="is a model of realm, not a published checkpoint: give --to"):
        open_checkpoint(str(tiny_model_folder))
    with pytest.raises(RealmError, match="is a 'bert' model, not a published REALM checkpoint"):
        open_checkpoint(str(tiny_model_folder / "encoder"))
    folder = tmp_path / "strange"
    folder.mkdir()
    shutil.copy(FIXTURES / "embedder" / "new" / "config.json", folder)
    with pytest.raises(RealmError, match="has no weights"):
        open_checkpoint(str(folder))
    save_file({"gpt.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(
        RealmError, match=r"is not a published REALM checkpoint .* its tensors are gpt\.weight"
    ):
        open_checkpoint(str(folder))
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(RealmError, match="is damaged"):
        open_checkpoint(str(folder))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02h\x00.")  # torch raises KeyError
    with pytest.raises(RealmError, match=r"pytorch_model\.bin is damaged"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        *((key, value, "a whole number of 1 or more")
          for key in ("retriever_proj_size", "span_hidden_size", "max_span_width", "reader_seq_len")
          for value in (0, -1, 1.5, True, 2**31, "x")),
        *(("reader_layer_norm_eps", value, "a number of 0 or more") for value in (-1, math.nan, math.inf, "x")),
        ("hidden_act", 1, "a text"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_one_line_before_a_network_is_made(
    key: str, value: object, wanted: str, tmp_path: Path, capsys
) -> None:
    folder = shutil.copytree(FIXTURES / "openqa" / "new", tmp_path / "wrong")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    assert cli.main(["convert", str(folder), str(tmp_path / "out")]) == 2
    assert f"{key} is {value!r}: it must be {wanted}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["openqa", "scorer", "encoder"])
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("hidden_size", 10**7, r"has the shape \(.*\), but \(.*10000000.*\) by config.json"),
        ("hidden_size", 2**31 - 16, "no network has the sizes in config.json"),
        ("intermediate_size", 10**9, "1000000000.* by config.json"),
        ("max_position_embeddings", 10**9, "1000000000.* by config.json"),
        ("retriever_proj_size", 10**9, "retriever_proj_size is 1000000000: it must be .* at most 65536"),
        ("num_hidden_layers", 10**6, "num_hidden_layers is 1000000: it must be 1000 or less"),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused_before_a_network_is_made(
    kind: str, key: str, value: int, says: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(FIXTURES / kind / "new", tmp_path / "huge")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(RealmError, match=says):
        convert(open_checkpoint(str(folder)))


def test_checkpoints_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    reader, encoder = FIXTURES / "reader" / "new", FIXTURES / "encoder" / "new"
    with pytest.raises(RealmError, match="is a reader: encoder or openqa was expected"):
        convert_checkpoint(str(encoder), tmp_path / "out", encoder=str(reader))
    small = shutil.copytree(encoder, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    for name, value in {"hidden_size": 8, "num_attention_heads": 4, "hidden_act": "relu"}.items():
        (small / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(RealmError, match=rf"{name} is {value} in .* but {config[name]} in"):
            convert_checkpoint(str(FIXTURES / "embedder" / "new"), tmp_path / "out", encoder=str(small))
    assert not (tmp_path / "out").exists()


class Harmful:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_weights_file_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "embedder" / "new", tmp_path / "bad")
    torch.save({"a": Harmful(tmp_path / "harm")}, folder / "pytorch_model.bin")
    with pytest.raises(RealmError, match="contains more than tensors and is not read"):
        open_checkpoint(str(folder))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Harmful(tmp_path / "harm")}))
    with pytest.raises(RealmError, match=r"pytorch_model\.bin"):
        open_checkpoint(str(folder))
    assert not (tmp_path / "harm").exists()


def test_weights_that_the_user_may_not_read_are_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    """safetensors says that the file does not exist."""
    opened = Path.open

    def refusing(path: Path, *mode: object, **more: object):
        if path.name == "model.safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *mode, **more)

    monkeypatch.setattr(Path, "open", refusing)
    source = str(FIXTURES / "embedder" / "safetensors")
    assert cli.main(["convert", source, str(tmp_path / "out")]) == 2
    assert "model.safetensors cannot be read: Permission denied" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_texts_and_vectors_must_be_as_many_before_anything_is_written(tmp_path: Path) -> None:
    folder = broken(tmp_path, "openqa", block_emb=torch.zeros(39, 8))
    with pytest.raises(RealmError, match=r"has 40 texts, and block_emb of shape \(39, 8\)"):
        convert_checkpoint(str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (folder / "block_records.npy").unlink()
    with pytest.raises(RealmError, match="the checkpoint has no texts"):
        convert_checkpoint(str(folder), tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["absent-folder/x/y", "out"], "is not a model folder"),
        (["FIX/embedder/new", "out", "--kb", "kb"], "--kb can only be used with --to huggingface-realm"),
        (["absent", "out", "--to", "huggingface-realm"], "no model at absent"),
        (
            ["x", "out", "--to", "huggingface-realm", "--encoder", "y"],
            "--encoder can only be used with --to realm",
        ),
        (["x", "out", "--to", "hub", "--bits", "16"], "--bits can only be used with --to realm"),
        (
            ["x", "out", "--to", "sentence-transformers", "--numbers", "y"],
            "--numbers can only be used with --to hub",
        ),
        (["absent", "out", "--to", "hub", "--licence", "y", "--data", "z"], "no model at absent"),
        (["FIX/embedder/new", "out", "--bits", "8"], "invalid choice"),
        (["hf:a b/c", "out"], "a b/c is not a folder, and cannot be downloaded from the hub"),
        (
            ["x", "out", "--to", "hub", "--data", "y", "--licence", "other: see LICENSE"],
            "'other: see LICENSE' is not the identifier of a licence, such as apache-2.0",
        ),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", *(word.replace("FIX", str(FIXTURES)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
