"""Writes the embedder as a sentence-transformers model: the towers as modules that do not need `realm`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realm.files import write_json
from realm.interop.export import write_tokenizer
from realm.model.bert_files import save_bert
from realm.model.embedder import BagOfWordsTower, Tower, TransformerTower
from realm.model.folder import Model
from realm.model.tensor_files import WEIGHTS, save_tensors

POOLING = {"cls": "cls_token", "mean": "mean_tokens", "words": "mean_tokens"}
"""Names of the kinds of pooling in sentence-transformers."""
NORM_SCALE = 1000.0
"""Factor on the inputs of LayerNorm in sentence-transformers, where epsilon is always 1e-5 instead of 1e-12."""


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
