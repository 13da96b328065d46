"""Writes models for others: a folder for the hub with a model card, and the embedder as a sentence-transformers model.

write_hub                    writes the complete model folder with README.md (the card) and config.json, for `--model hf:NAME`
write_sentence_transformers  writes the towers as modules of sentence-transformers, which do not need `realm`
"""

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realm.files import write_json
from realm.interop.export import write_tokenizer
from realm.model.bert_files import save_bert
from realm.model.embedder import BagOfWordsTower, Tower, TransformerTower
from realm.model.folder import Model, load_model, save_model
from realm.model.manifest import MANIFEST, read_manifest
from realm.model.tensor_files import WEIGHTS, is_compact, save_tensors

CARD = "README.md"
START = {"mlm": "--init", "ict": "--init", "pretrain": "--model", "adapt": "--model", "finetune": "--model"}
"""The flag of the start model in the command of each stage."""
OF_KB = ("held_out", "passage_tokens")
"""Settings of the knowledge base in the record of a stage."""
NOT_SETTINGS = {"stage", "init", "kb", *OF_KB, "text", "questions", "seconds"}
"""Keys in the record of a stage that are not settings."""
POOLING = {"cls": "cls_token", "mean": "mean_tokens", "words": "mean_tokens"}
"""Names of the kinds of pooling in sentence-transformers."""
NORM_SCALE = 1000.0
"""Factor on the inputs of LayerNorm in sentence-transformers, where epsilon is always 1e-5 instead of 1e-12."""


def write_hub(
    source: Path, out: Path, name: str, licence: str, data: str, numbers: Mapping[str, Any]
) -> None:
    """Writes a model folder for the hub; `numbers` are reports of `realm evaluate` or `realm probe`. `name` as in `card`."""
    manifest = read_manifest(source)
    if is_compact(source):
        save_model(load_model(source), out)
    else:
        shutil.copytree(source, out, dirs_exist_ok=True)
    write_json(out / "config.json", {**manifest["trunk"], "model_type": "realm-lm", "realm": MANIFEST})
    (out / CARD).write_text(card(manifest, name, licence, data, numbers), encoding="utf-8")


def card(
    manifest: Mapping[str, Any],
    name: str,
    licence: str,
    data: str,
    numbers: Mapping[str, Any],
    workspace: bool = False,
) -> str:
    """The model card: description, data, licence, numbers, and the training commands. `name` is NAME or OWNER/NAME.

    `workspace`: whether the repository has a knowledge base beside the model.
    """
    full = name if "/" in name else f"OWNER/{name}"
    use = (
        [f"realm answer 'a question' --in hf:{full}"]
        if workspace
        else [
            f"realm index --kb kb --model hf:{full}",
            f"realm answer 'a question' --kb kb --model hf:{full}",
        ]
    )
    embedder, sizes = manifest["embedder"], manifest["trunk"]
    parts = ["a retriever", "a masked-LM reader", *(["a span reader"] if manifest["span_reader"] else [])]
    shape = f"{sizes.get('num_hidden_layers', 12)} layers, {sizes.get('hidden_size', 768)} wide"
    said = [f"- {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in numbers.items()]
    return "\n".join(
        [
            f"---\nlicense: {licence}\nlibrary_name: realm\ntags: [realm, retrieval, question-answering]\n---",
            f"# {name.rpartition('/')[2]}\n",
            f"A REALM model (Guu et al. 2020): {', '.join(parts)}. {shape}; vectors of {embedder['dim']}, "
            f"{embedder['pooling']} pooling, {embedder['norm']} norm.\n",
            "## Use\n",
            "```sh\n" + "\n".join(use) + "\n```\n",
            "The folder `encoder` loads in `transformers` as `BertForMaskedLM` (`subfolder='encoder'`).\n",
            f"## Data\n\n{data}\n",
            f"## Licence\n\n{licence}\n",
            "## Numbers\n",
            "\n".join(said) or "No results were given.",
            "\n## Training commands\n",
            "```sh\n" + "\n".join(commands(manifest["stages"])) + "\n```\n",
        ]
    )


def commands(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The command of each stage that led to a model, oldest first, with every setting.

    Local folders are replaced by placeholders in capitals. A comment after the command has the fingerprints of these folders,
    and the held-out share of a knowledge base.

    >>> commands([{"stage": "ict", "steps": 3, "init": "models/a", "kb": "0123", "refresh": {"every": 5}}])
    ['realm ict --kb KB --init models/a --out MODEL --set steps=3 --set refresh.every=5  # KB: 0123']
    """
    return [
        _convert_command(settings) if settings["stage"] == "published" else _stage_command(settings)
        for settings in stages
    ]


def _convert_command(settings: Mapping[str, Any]) -> str:
    others = (
        word for key in ("encoder", "embedder") if settings[key] for word in (f"--{key}", settings[key])
    )
    return shlex.join(["realm", "convert", settings["name"], "MODEL", *others])


def _stage_command(settings: Mapping[str, Any]) -> str:
    stage = settings["stage"]
    built = [f"{name}={settings[name]:g}" for name in OF_KB if name in settings]
    words, known = ["realm", stage, "--kb", "KB"], {"KB": ", ".join([str(settings.get("kb")), *built])}
    if settings.get("text", settings.get("kb")) != settings.get("kb"):
        words += ["--text", "TEXT"]
        known["TEXT"] = settings["text"]
    if settings.get("init"):
        words += [START[stage], settings["init"]]
    if "questions" in settings:
        words += ["--train", "TRAIN", "--dev", "DEV"]
        known["TRAIN and DEV"] = settings["questions"]
    words += ["--out", "MODEL"]
    for key, value in _flat({k: v for k, v in settings.items() if k not in NOT_SETTINGS}).items():
        if value is not None:  # TOML has no None, so None can only be the default
            words += ["--set", f"{key}={_plain(value)}"]
    return f"{shlex.join(words)}  # {', '.join(f'{name}: {value}' for name, value in known.items())}"


def write_sentence_transformers(model: Model, out: Path) -> None:
    """Writes the towers as a sentence-transformers model, which computes the same vectors for the same text.

    Passages are pairs (title, text), for which sentence-transformers sets the segments as `realm` does. Two towers become the
    routes "query" and "document" of a Router. In the modules of a bag-of-words tower, the sum of the weights of the words of a
    text has no lower limit. Therefore, the vector of a text whose weights sum to less than 1 differs.
    """
    if model.embedder.passage is model.embedder.query:
        modules = _write_tower(model, model.embedder.query, model.lengths.passage, out)
    else:
        modules = [("models.Router", "")]
        routes = {
            "query": (model.embedder.query, model.lengths.query),
            "document": (model.embedder.passage, model.lengths.passage),
        }
        types: dict[str, str] = {}
        structure: dict[str, list[str]] = {}
        for route, (tower, longest) in routes.items():
            written = _write_tower(model, tower, longest, out / route)
            structure[route] = [f"{route}/{path}".removesuffix("/") for _, path in written]
            types |= {
                name: f"sentence_transformers.{kind}"
                for name, (kind, _) in zip(structure[route], written, strict=True)
            }
        settings = {"default_route": "query", "allow_empty_key": True}
        write_json(
            out / "router_config.json", {"types": types, "structure": structure, "parameters": settings}
        )
    write_json(
        out / "modules.json",
        [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.{kind}"}
            for n, (kind, path) in enumerate(modules)
        ],
    )
    write_json(out / "config_sentence_transformers.json", {"similarity_fn_name": "dot"})


def _write_tower(model: Model, tower: Tower, longest: int, out: Path) -> list[tuple[str, str]]:
    """Writes the modules of a tower whose inputs have at most `longest` wordpieces -> kind and folder of each module."""
    config = model.embedder.config
    if isinstance(tower, BagOfWordsTower):
        _write_words(tower, longest, model.tokenizer.pad_id, out)
    else:
        assert isinstance(tower, TransformerTower)
        save_bert(tower.encoder, out)
    write_tokenizer(model.tokenizer, out, longest, kind="BertTokenizer")
    write_json(out / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})
    modules = [("models.Transformer", "")]

    def add(kind: str, settings: dict[str, Any] | None, weights: dict[str, Tensor] | None = None) -> None:
        folder = out / f"{len(modules)}_{kind}"
        folder.mkdir()
        modules.append((f"models.{kind}", folder.name))
        if settings is not None:
            write_json(folder / "config.json", settings)
        if weights is not None:
            save_tensors(weights, folder / "model.safetensors")

    def dense(weight: Tensor, bias: Tensor | None, activation: str) -> None:
        settings = {
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "bias": bias is not None,
            "activation_function": f"torch.nn.modules.{activation}",
        }
        add("Dense", settings, {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias}))

    width = _words_width(config.dim) if isinstance(tower, BagOfWordsTower) else tower.projection.in_features
    add(
        "Pooling",
        {"word_embedding_dimension": width, f"pooling_mode_{POOLING[config.pooling]}": True}
        | ({"pooling_mode_mean_tokens": False} if config.pooling == "cls" else {}),
    )
    scale = NORM_SCALE if config.norm == "layer" else 1.0
    if isinstance(tower, BagOfWordsTower):
        dense(torch.eye(config.dim, width) * scale, None, "linear.Identity")
    else:
        if tower.encoder.pooler is not None:
            dense(tower.encoder.pooler.dense.weight, tower.encoder.pooler.dense.bias, "activation.Tanh")
        dense(tower.projection.weight * scale, tower.projection.bias * scale, "linear.Identity")
    if config.norm == "layer":
        add(
            "LayerNorm",
            {"dimension": config.dim},
            {f"norm.{k}": v for k, v in tower.norm.state_dict().items()},
        )
    else:
        add("Normalize", None)
        dense(torch.eye(config.dim) * config.scale**0.5, None, "linear.Identity")
    return modules


def _words_width(dim: int) -> int:
    """Width of the states of the BERT that replaces a bag-of-words tower."""
    return 2 * dim + 2


def _write_words(tower: BagOfWordsTower, longest: int, pad: int, out: Path) -> None:
    """Writes a bag-of-words tower up to its norm as a BERT without layers, whose states are pooled by the mean.

    The norm of the tower removes the length of a vector. Let w be the weight and e the embedding of a word, P the projection
    and b its bias. Up to its length, the vector of a text before the norm is the sum of w (P e + b) over the words. The state
    of a word is w (P e + b), its negative, and two numbers s and -s. The mean of the numbers of this state is 0, and s makes
    all states equally long. Therefore, the LayerNorm of the BERT multiplies the states of all words by the same number.
    """
    with torch.no_grad():
        weight_V = tower.importance(torch.arange(tower.words.num_embeddings))
        row_VD = weight_V[:, None] * tower.projection(tower.words.weight)
        square_V = row_VD.double().square().sum(dim=1)
        rest_V1 = (square_V.max() - square_V).sqrt().float()[:, None]
    width = _words_width(row_VD.shape[1])
    out.mkdir(parents=True, exist_ok=True)
    states = {
        "embeddings.word_embeddings.weight": torch.cat([row_VD, -row_VD, rest_V1, -rest_V1], dim=1),
        "embeddings.position_embeddings.weight": torch.zeros(longest, width),
        "embeddings.token_type_embeddings.weight": torch.zeros(2, width),
        "embeddings.LayerNorm.weight": torch.ones(width),
        "embeddings.LayerNorm.bias": torch.zeros(width),
    }
    save_tensors(states, out / WEIGHTS, metadata={"format": "pt"})
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "dtype": "float32",
        "vocab_size": len(row_VD),
        "hidden_size": width,
        "num_hidden_layers": 0,
        "num_attention_heads": 1,
        "intermediate_size": 1,
        "max_position_embeddings": longest,
        "layer_norm_eps": 1e-12,
        "pad_token_id": pad,
    }
    write_json(out / "config.json", config)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
