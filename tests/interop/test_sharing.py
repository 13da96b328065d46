"""Our models elsewhere: sentence-transformers gives the same vectors, and a hub folder comes back as it was."""

import json
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from realm import cli
from realm.cli.arguments import settings
from realm.errors import RealmError
from realm.interop.as_sentence_transformers import write_sentence_transformers
from realm.interop.sharing import commands
from realm.model import manifest as manifest_module
from realm.model.embedder import EmbedderConfig, Norm, Pooling, embedder_from
from realm.model.folder import Model, load_model, save_model
from realm.model.masked_reader import EncoderConfig, new_reader
from realm.tokens.layouts import Lengths, Tokens, passage_inputs, query_inputs
from realm.train.adapt import AdaptConfig
from realm.train.finetune import FinetuneConfig
from realm.train.ict import IctConfig
from realm.train.mlm import MlmConfig
from realm.train.pretrain import PretrainConfig
from tests.store.tiny import tiny_tokenizer

TEXTS = ["the town is in ruritania", "it has two inns?", "", "the capital " * 8]


def model_of(pooling: Pooling, norm: Norm) -> Model:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    reader = new_reader(EncoderConfig(layers=2, hidden=32, heads=2, positions=64), tokenizer)
    embedder = embedder_from(reader, EmbedderConfig(dim=16, pooling=pooling, norm=norm))
    for parameter in embedder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return Model(tokenizer, Lengths(query=32, passage=48), reader, embedder.eval())


PAIRS = [("the town", "it has two inns."), ("ruritania", "the capital is in the town"), ("", "two inns")]
KINDS = [
    ("mean", "unit"),
    ("cls", "layer"),
    ("mean", "layer"),
    ("cls", "unit"),
    ("words", "unit"),
    ("words", "layer"),
]


def passages_of(model: Model) -> Tokens:
    titles, bodies = (model.tokenizer.encode(part) for part in zip(*PAIRS, strict=True))
    return passage_inputs(titles, bodies, model.tokenizer, model.lengths)


@pytest.mark.parametrize(("pooling", "norm"), KINDS)
def test_sentence_transformers_gives_our_vectors(pooling: Pooling, norm: Norm, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = model_of(pooling, norm)
    write_sentence_transformers(model, tmp_path)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    queries = query_inputs(model.tokenizer.encode(TEXTS), model.tokenizer, model.lengths)
    with torch.no_grad():
        ours = model.embedder.query(queries), model.embedder.query(passages_of(model))
    np.testing.assert_allclose(theirs.encode(TEXTS), ours[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(theirs.encode(PAIRS), ours[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("pooling", "norm"), [("mean", "unit"), ("cls", "layer"), ("words", "unit")])
def test_two_towers_are_the_routes_of_queries_and_documents(
    pooling: Pooling, norm: Norm, tmp_path: Path
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = model_of(pooling, norm)
    model.embedder.untie()
    for parameter in model.embedder.passage.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.embedder.eval()
    save_model(model, tmp_path / "model")
    out = str(tmp_path / "out")
    cli.run(["convert", str(tmp_path / "model"), out, "--to", "sentence-transformers"])
    theirs = sentence_transformers.SentenceTransformer(out, device="cpu")
    long = [*TEXTS, "the town is in ruritania " * 9]  # longer than a query may be
    queries = query_inputs(model.tokenizer.encode(long), model.tokenizer, model.lengths)
    with torch.no_grad():
        ours = model.embedder.query(queries), model.embedder.passage(passages_of(model))
    np.testing.assert_allclose(theirs.encode_query(long), ours[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(theirs.encode(long), ours[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(theirs.encode_document(PAIRS), ours[1], rtol=1e-4, atol=1e-4)


def test_a_cards_commands_are_what_the_command_line_takes() -> None:
    stages: dict[str, tuple[Any, dict[str, str]]] = {
        "mlm": (MlmConfig(steps=7), {}),
        "ict": (IctConfig(learning_rate=3e-5), {"init": "my models/a"}),
        "pretrain": (PretrainConfig(steps=9), {"init": "b", "text": "89ab"}),
        "adapt": (AdaptConfig(minutes=5.0), {"init": "b"}),
        "finetune": (FinetuneConfig(whole_words=False), {"init": "c", "questions": "cdef"}),
    }
    remembered = [
        {"stage": stage, **asdict(config), "kb": "0123", **names, "seconds": 1.5}
        for stage, (config, names) in stages.items()
    ]
    remembered += [
        {"stage": "published", "name": "google/x", "encoder": "google/y z", "embedder": None},
        {"stage": "reader", "name": "some/reader"},
        {"stage": "encoder", "name": "my models/d"},
    ]
    told = [shlex.split(line, comments=True) for line in commands(remembered)]
    parsed = [cli._parser().parse_args(words[1:]) for words in told]
    assert [args.command for args in parsed] == [*stages, *["convert"] * 3]
    for args, (config, names) in zip(parsed, stages.values(), strict=False):
        assert settings(args, type(config)) == config
        assert (getattr(args, "init", None) or getattr(args, "model", None)) == names.get("init")
    assert (parsed[2].text, parsed[4].train, parsed[4].dev) == ("TEXT", "TRAIN", "DEV")
    assert (parsed[5].source, parsed[5].encoder, parsed[5].embedder) == ("google/x", "google/y z", None)
    assert (parsed[6].source, parsed[6].retriever) == ("some/reader", "START")
    assert (parsed[7].source, parsed[7].encoder_of) == ("START", "my models/d")


def test_a_card_has_the_share_that_the_knowledge_base_of_a_stage_held_out() -> None:
    record = {"stage": "ict", "kb": "0123", "held_out": 0.1, "passage_tokens": 112, "text": "89ab"}
    (line,) = commands([record])
    assert line.endswith("  # KB: 0123, held_out=0.1, passage_tokens=112, TEXT: 89ab") and "--set" not in line


def test_a_hub_folder_inside_its_model_is_refused(tmp_path: Path, capsys) -> None:
    save_model(model_of("mean", "unit"), tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    words = ["convert", str(tmp_path / "model"), str(tmp_path / "model" / "hub"), "--to", "hub"]
    assert cli.main([*words, "--licence", "mit", "--data", "x"]) == 2
    assert "hub is inside " in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_model_does_not_become_a_hub_folder(tmp_path: Path, capsys) -> None:
    save_model(model_of("cls", "layer"), tmp_path / "model")
    weights = bytearray((tmp_path / "model" / "embedder.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model" / "embedder.safetensors").write_bytes(weights)
    words = ["convert", str(tmp_path / "model"), str(tmp_path / "mine"), "--to", "hub"]
    assert cli.main([*words, "--licence", "mit", "--data", "x"]) == 2
    assert "embedder.safetensors differs from its checksum" in capsys.readouterr().err
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("place", "error", "to"),
    [
        ("realm.interop.sharing.shutil.copytree", shutil.Error([("a", "b", "[Errno 28] No space")]), "hub"),
        (
            "realm.interop.as_sentence_transformers.save_bert",
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "sentence-transformers",
        ),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    place, error, to, tmp_path: Path, monkeypatch, capsys
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    save_model(model_of("cls", "layer"), tmp_path / "model")
    monkeypatch.setattr(place, refuse)
    card = ["--licence", "mit", "--data", "x"] if to == "hub" else []
    assert cli.main(["convert", str(tmp_path / "model"), str(tmp_path / "mine"), "--to", to, *card]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'mine'} cannot be written: " in said and "No space left on device" in said
    assert "remove files" in said and said.count("\n") == 1
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]


def test_a_hub_folder_has_a_card_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("cls", "layer")
    model.stages = [{"stage": "ict", "steps": 3, "init": "a", "kb": "0123", "seed": 5}]
    save_model(model, tmp_path / "model")
    (tmp_path / "dev.json").write_text(
        json.dumps({"em": 41.5, "em_ci95": [38.5, 44.5], "recall": {"5": 70.0}, "ids": ["a"]})
    )
    words = [
        "convert",
        str(tmp_path / "model"),
        str(tmp_path / "mine"),
        "--to",
        "hub",
        "--licence",
        "apache-2.0",
    ]
    with pytest.raises(RealmError, match="the training text: give --licence and --data"):
        cli.run(words)
    bad = tmp_path / "bad.json"
    for content in ("[1]", '{"em": ', '{"em": "\\ud800"}', "[" * 100_000):
        bad.write_text(content)
        with pytest.raises(RealmError, match=r"bad\.json is (damaged|not a report)") as error:
            cli.run([*words, "--data", "x", "--numbers", str(bad)])
        assert "\n" not in str(error.value) and not (tmp_path / "mine").exists()
    with pytest.raises(RealmError, match=r"gone\.json cannot be read: No such file or directory"):
        cli.run([*words, "--data", "x", "--numbers", str(tmp_path / "gone.json")])
    numbers = ["--numbers", str(tmp_path / "dev.json")]
    with pytest.raises(RealmError, match=r"--numbers has two files with the name dev\.json: rename one"):
        cli.run([*words, "--data", "x", *numbers, str(tmp_path / "dev.json")])
    cli.run([*words, "--data", "Fourteen towns.", *numbers])
    card = (tmp_path / "mine" / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    for said in (
        "Fourteen towns.",
        '"em": 41.5',
        '"em_ci95": [38.5, 44.5]',
        "realm ict --kb KB --init a",
        "--set seed=5",
        "hf:OWNER/mine",
    ):
        assert said in card
    assert '"ids"' not in card
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["model_type"] == "realm-lm"
    asked = []

    def hub(name: str, files: tuple[str, ...]) -> str:  # what the hub's cache would hand back
        asked.append((name, files))
        return str(tmp_path / "mine")

    monkeypatch.setattr(manifest_module, "from_hub", hub)
    loaded = load_model("hf:someone/mine")
    assert asked and all(name == "someone/mine" for name, _ in asked)
    for key, value in loaded.embedder.state_dict().items():
        assert torch.equal(value, model.embedder.state_dict()[key])
