"""Reads Google's TensorFlow checkpoints: variables with their Hugging Face names, and the settings that follow from shapes.

    embedder    gs://realm-data/cc_news_pretrained/embedder         a module folder with variables/ and assets/vocab.txt
    encoder     gs://realm-data/cc_news_pretrained/bert             a module folder with variables/ and assets/vocab.txt
    openqa      gs://realm-data/orqa_nq_model_from_realm            export/best_default/checkpoint/model.ckpt-300000
                                                                    (the vectors in embedder/encoded/ are not read)

The name of a variable begins with the names of all modules that contain it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from realm.errors import InputError
from realm.files import read_json
from realm.interop.tensorflow import is_bundle, read_bundle

PLACES = {
    r"(module/)+bert/": "embedder.realm.",
    r"(module/)+(?=cls/predictions/)": "embedder.",
    r"(module/)+(?=(dense|LayerNorm)/)": "embedder.cls.",
    r"reader/module/bert/": "reader.realm.",
    r"reader/module/(?=cls/)": "reader.",
    r"reader/dense/": "reader.qa_outputs.dense_intermediate.",
    r"reader/dense_1/": "reader.qa_outputs.dense_output.",
    r"reader/(?=layer_normalization/)": "reader.qa_outputs.",
    r"bert/": "realm.",
}
"""Prefixes of Google's names -> prefixes of Hugging Face names."""
WORDS = "realm.embeddings.word_embeddings.weight"
LEAVES = {"kernel": "weight", "gamma": "weight", "beta": "bias", "output_bias": "bias"}
BERT_CONFIG = "bert_config.json"
"""File beside the vocabulary of a released BERT."""
HEAD_WIDTH = 64
"""Width of an attention head in every released BERT. If a checkpoint has no `BERT_CONFIG`, its number of heads is the hidden
size / `HEAD_WIDTH`."""
_ENDING = re.compile(r"\.(index|data-\d{5}-of-\d{5})$")
_OPTIMIZER = re.compile(r"(^|/)(adam_[mv]|Adam(_1)?|global_step|beta[12]_power)$")


def prefix_of(name: str) -> Path | None:
    """The prefix of the files of a TensorFlow checkpoint. `name` is the prefix, a file or a module folder; None otherwise."""
    for prefix in (Path(_ENDING.sub("", name)), Path(name, "variables", "variables")):
        if prefix.name and is_bundle(prefix):
            return prefix
    return None


def read_variables(prefix: Path) -> dict[str, Tensor]:
    """The variables by their Hugging Face names, without those of the optimizer.

    Raises:
        InputError: as in `read_bundle`, or if the checkpoint contains no BERT.
    """
    found = read_bundle(prefix, lambda name: not _OPTIMIZER.search(name))
    tensors = {
        huggingface_name(name): value.t() if name.endswith("/kernel") and value.dim() == 2 else value
        for name, value in found.items()
    }
    if not any(name.endswith(WORDS) and value.dim() == 2 for name, value in tensors.items()):
        raise InputError(
            f"{prefix} contains no BERT; its variables are {', '.join(sorted(found)[:2]) or 'none'} ..."
        )
    if any(name.startswith("reader.") for name in tensors):
        return tensors
    return {name.removeprefix("embedder."): value for name, value in tensors.items()}


def huggingface_name(name: str) -> str:
    """The Hugging Face name of one of Google's variables.

    >>> huggingface_name("module/module/module/bert/encoder/layer_0/attention/self/query/kernel")
    'embedder.realm.encoder.layer.0.attention.self.query.weight'
    >>> huggingface_name("bert/embeddings/word_embeddings"), huggingface_name("cls/predictions/output_bias")
    ('realm.embeddings.word_embeddings.weight', 'cls.predictions.bias')
    >>> huggingface_name("reader/dense_1/kernel"), huggingface_name("reader/layer_normalization/beta")
    ('reader.qa_outputs.dense_output.weight', 'reader.qa_outputs.layer_normalization.bias')
    """
    for place, published in PLACES.items():
        if found := re.match(place, name):
            name = published + name[found.end() :]
            break
    *path, leaf = re.sub(r"\blayer_(\d+)/", r"layer.\1/", name).replace("/", ".").split(".")
    leaf = f"{leaf}.weight" if leaf.endswith("_embeddings") else LEAVES.get(leaf, leaf)
    return ".".join([*path, leaf])


def settings(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
    """The settings that follow from shapes, and the number of attention heads.

    The number of heads comes from the file `BERT_CONFIG` in `folder`. If there is no such file, the number of heads is the
    hidden size / `HEAD_WIDTH`.

    Raises:
        InputError: `BERT_CONFIG` has no number of heads; or this file does not exist, and the hidden size is not a multiple of
            `HEAD_WIDTH`.
        DamagedError: `BERT_CONFIG` is not JSON.
    """
    root = "embedder." if f"embedder.{WORDS}" in tensors else ""
    sizes = {
        WORDS: ("vocab_size", "hidden_size"),
        "realm.embeddings.position_embeddings.weight": ("max_position_embeddings",),
        "realm.embeddings.token_type_embeddings.weight": ("type_vocab_size",),
        "realm.encoder.layer.0.intermediate.dense.bias": ("intermediate_size",),
        "cls.dense.bias": ("retriever_proj_size",),
    }
    found: dict[str, Any] = {}
    for name, keys in sizes.items():
        if root + name in tensors:
            found |= dict(zip(keys, tensors[root + name].shape, strict=False))
    layers = {
        part.group(1)
        for name in tensors
        if (part := re.match(rf"{root}realm\.encoder\.layer\.(\d+)\.", name))
    }
    found["num_hidden_layers"] = len(layers)
    if (ends := tensors.get("reader.qa_outputs.dense_intermediate.bias")) is not None:
        found["span_hidden_size"] = ends.numel() // 2
    file, hidden = folder / BERT_CONFIG, found.get("hidden_size", 0)
    if file.is_file():
        try:
            found["num_attention_heads"] = read_json(file)["num_attention_heads"]
        except (KeyError, TypeError) as error:
            raise InputError(f"{file} has no number of attention heads: {error!r}") from error
    elif hidden % HEAD_WIDTH:
        raise InputError(
            f"the hidden size {hidden} is not a multiple of {HEAD_WIDTH}: write num_attention_heads into {file}"
        )
    else:
        found["num_attention_heads"] = hidden // HEAD_WIDTH
    return found
