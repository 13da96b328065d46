"""Writes a model for the hub: the complete model folder with a model card and config.json, for `--model hf:NAME`."""

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realm.files import write_json
from realm.model.folder import load_model, save_model
from realm.model.manifest import MANIFEST, checked_manifest
from realm.model.tensor_files import is_compact

CARD = "README.md"
START = {"mlm": "--init", "ict": "--init", "pretrain": "--model", "adapt": "--model", "finetune": "--model"}
"""The flag of the start model in the command of each stage."""
OF_KB = ("held_out", "passage_tokens")
"""Settings of the knowledge base in the record of a stage."""
NOT_SETTINGS = {"stage", "init", "kb", *OF_KB, "text", "questions", "seconds"}
"""Keys in the record of a stage that are not settings."""


def write_hub(
    source: Path, out: Path, name: str, licence: str, data: str, numbers: Mapping[str, Any]
) -> None:
    """Writes a model folder for the hub; `numbers` are reports of `realm evaluate` or `realm probe`. `name` as in `card`."""
    manifest = checked_manifest(source)
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
        _stage_command(settings) if (made := _convert_command(settings)) is None else shlex.join(made)
        for settings in stages
    ]


def _convert_command(settings: Mapping[str, Any]) -> list[str] | None:
    """The words of the `realm convert` that led to a model; None for a stage of training. START is the model before."""
    match settings["stage"]:
        case "published":
            parts = [key for key in ("encoder", "embedder") if settings[key]]
            others = [word for key in parts for word in (f"--{key}", settings[key])]
            return ["realm", "convert", settings["name"], "MODEL", *others]
        case "reader":
            return ["realm", "convert", settings["name"], "MODEL", "--retriever", "START"]
        case "encoder":
            return ["realm", "convert", "START", "MODEL", "--encoder-of", settings["name"]]
    return None


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


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
