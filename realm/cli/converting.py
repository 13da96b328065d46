"""`realm convert`: converts published checkpoints to model folders, and model folders to published formats."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from realm.cli.arguments import Commands, Parser, add_command, report, say_where
from realm.errors import InputError
from realm.files import read_json

if TYPE_CHECKING:
    from realm.interop.blocks import ConvertedJson, ExportedJson

TARGETS = ("realm", "huggingface-realm", "hub", "sentence-transformers", "compact")
ONLY_FOR = {
    "encoder": "realm",
    "embedder": "realm",
    "retriever": "realm",
    "encoder_of": "realm",
    "model_only": "realm",
    "bits": "realm",
    "tagger": "realm",
    "tokenizer": "realm",
    "kb": "huggingface-realm",
    "licence": "hub",
    "data": "hub",
    "numbers": "hub",
}
"""Flag -> the only target of --to with which the flag can be used."""


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the command."""
    convert = add_command(
        commands,
        _convert,
        "convert a published checkpoint to a model (an open-QA checkpoint to a model and a knowledge base), or a model to a "
        "published format",
        "realm convert google/realm-orqa-nq-openqa ./nq",
        reports=True,
        continues=True,
    )
    convert.add_argument(
        "source",
        metavar="FROM",
        help="published checkpoint: a folder, a hub name, or the prefix of TensorFlow files; if --encoder-of is given, or if "
        "--to is not realm: a model",
    )
    convert.makes(
        convert.add_argument(
            "out",
            metavar="OUT",
            help="new folder; an open-QA checkpoint is converted to the folders OUT/model and OUT/kb",
        )
    )
    convert.add_argument(
        "--to",
        choices=TARGETS,
        default="realm",
        help="format of OUT. realm (default): a model folder; huggingface-realm: one folder for each REALM class of "
        "transformers 4.57.6; hub: a model folder with a model card; sentence-transformers: the towers of the embedder; "
        "compact: a model folder with 16-bit weights, without the tensors that are equal to those of a packaged encoder",
    )
    convert.add_argument("--encoder", metavar="NAME", help="published encoder to use as the masked-LM reader")
    convert.add_argument(
        "--embedder",
        metavar="NAME",
        help="published embedder to use for passages; also used for queries if FROM has no embedder",
    )
    convert.add_argument(
        "--retriever",
        metavar="MODEL",
        help="copy this model to OUT, with FROM as the span reader of the copy; FROM must have BERT's question-answering head",
    )
    convert.add_argument(
        "--encoder-of",
        metavar="MODEL",
        help="copy the model FROM to OUT, with the masked-LM reader of MODEL and without a span reader",
    )
    convert.add_argument(
        "--model-only",
        action="store_true",
        default=None,
        help="leave out the texts and vectors of an open-QA checkpoint: OUT is only the model, to use with another corpus",
    )
    convert.add_argument(
        "--bits",
        metavar="N",
        type=int,
        choices=(16, 32),
        help="store the published vectors with 32 bits per number (default, unchanged) or with 16",
    )
    convert.add_argument(
        "--tagger",
        metavar="NAME",
        help="tagger that marks names and dates in the published texts; only pre-training on these texts needs a tagger "
        "(default: no tagger)",
    )
    convert.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="tokenizer for a checkpoint that has no tokenizer: a folder with tokenizer.json or vocab.txt, or a hub name",
    )
    convert.add_argument(
        "--kb",
        metavar="KB",
        help="with --to huggingface-realm: also write an open-QA checkpoint with the texts and vectors of this knowledge base",
    )
    add_card(convert, "with --to hub: ", required=False)


def add_card(parser: Parser, when: str = "", required: bool = True) -> None:
    """Adds --licence, --data and --numbers, the content of a model card; `when` is the beginning of the help texts."""
    parser.add_argument(
        "--licence",
        metavar="ID",
        type=_licence,
        required=required,
        help=f"{when}licence of the weights, such as apache-2.0",
    )
    parser.add_argument(
        "--data",
        metavar="TEXT",
        required=required,
        help=f"{when}description of the training text, for the model card",
    )
    parser.add_argument(
        "--numbers",
        metavar="FILE",
        nargs="+",
        help=f"{when}files written by `realm evaluate --out` or `realm probe --out`, whose numbers are added to the model card",
    )


def _licence(text: str) -> str:
    """Checks the identifier of a licence, which is written into the YAML of a model card."""
    if text and not re.fullmatch(r"[\w.+-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the identifier of a licence, such as apache-2.0")
    return text


class MadeFolderJson(TypedDict):
    """Report of `realm convert` for the formats of other projects."""

    out: str


class CompactJson(TypedDict):
    """Report of `realm convert --to compact`."""

    out: str
    bytes: int
    """Total size of all files in `out`."""


def _convert(args: argparse.Namespace) -> None:
    for flag, target in ONLY_FOR.items():
        if getattr(args, flag) is not None and target != args.to:
            raise InputError(f"{_flag(flag)} can only be used with --to {target}, not with --to {args.to}")
    out = Path(args.out)
    made: ConvertedJson | ExportedJson | MadeFolderJson | CompactJson
    match args.to:
        case "realm" if args.retriever is not None:
            made = _with_reader(args, out)
        case "realm" if args.encoder_of is not None:
            made = _with_encoder(args, out)
        case "realm":
            from realm.interop.blocks import convert_checkpoint
            from realm.text.salient_spans import load_tagger

            tagger = load_tagger(args.tagger) if args.tagger else None
            made = convert_checkpoint(
                args.source,
                out,
                args.encoder,
                args.embedder,
                tokenizer=args.tokenizer,
                bits=args.bits or 32,
                tagger=tagger,
                model_only=bool(args.model_only),
            )
        case "huggingface-realm":
            from realm.interop.blocks import export_model

            made = export_model(args.source, out, args.kb)
        case "hub":
            made = _to_hub(args, out)
        case "compact":
            made = _to_compact(args, out)
        case _:
            from realm.interop.as_sentence_transformers import write_sentence_transformers
            from realm.model.folder import load_model, new_folder

            model = load_model(args.source)
            with new_folder(out) as aside:
                write_sentence_transformers(model, aside)
            made = {"out": args.out}
    report(args, made)
    say_where(args, "the model and the knowledge base are" if "kb" in made else "the model is", args.out)


def _refuse_others(args: argparse.Namespace, alone: str) -> None:
    """Raises InputError if a flag for published REALM checkpoints is given together with the flag `alone`."""
    for flag, target in ONLY_FOR.items():
        if flag != alone and target == args.to and getattr(args, flag) is not None:
            raise InputError(
                f"{_flag(flag)} can only be used with a published REALM checkpoint, not with {_flag(alone)}"
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_reader(args: argparse.Namespace, out: Path) -> "ConvertedJson":
    from realm.interop.span_readers import take_reader
    from realm.model.folder import load_model, new_folder, save_model

    _refuse_others(args, "retriever")
    model = load_model(args.retriever)
    dead = take_reader(model, args.source)
    model.stages = [*model.stages, {"stage": "reader", "name": args.source}]
    with new_folder(out) as aside:
        save_model(model, aside)
    note = (
        "the model's probabilities are not calibrated: run `realm calibrate` on questions with known answers"
    )
    return {"kind": "reader", "model": args.out, "dead_weights": dead, "notes": [note]}


def _with_encoder(args: argparse.Namespace, out: Path) -> MadeFolderJson:
    from realm.model.calibration import Calibration
    from realm.model.folder import load_model, new_folder, save_model

    _refuse_others(args, "encoder_of")
    model, other = load_model(args.source), load_model(args.encoder_of)
    if model.tokenizer.fingerprint != other.tokenizer.fingerprint or model.lengths != other.lengths:
        raise InputError(
            f"{args.encoder_of} and {args.source} differ in tokenizer or lengths: parts of these models cannot be combined"
        )
    model.masked_reader, model.span_reader, model.calibration = other.masked_reader, None, Calibration()
    model.stages = [*model.stages, {"stage": "encoder", "name": args.encoder_of}]
    with new_folder(out) as aside:
        save_model(model, aside)
    return {"out": args.out}


def _to_compact(args: argparse.Namespace, out: Path) -> CompactJson:
    from realm.model.folder import load_model, new_folder, save_model

    model = load_model(args.source)
    with new_folder(out) as aside:
        save_model(model, aside, compact=True)
    return {"out": args.out, "bytes": sum(file.stat().st_size for file in out.rglob("*") if file.is_file())}


def _to_hub(args: argparse.Namespace, out: Path) -> MadeFolderJson:
    from realm.interop.sharing import write_hub
    from realm.model.folder import new_folder
    from realm.model.manifest import model_path

    if not (args.licence and args.data):
        raise InputError(
            "a model card needs the licence of the weights and the training text: give --licence and --data"
        )
    numbers, source = numbers_of(args.numbers or []), model_path(args.source)
    if source.resolve() in out.resolve().parents:
        raise InputError(
            f"{out} is inside {source}, so it would be a part of its own copy: give another folder"
        )
    with new_folder(out) as aside:
        write_hub(source, aside, out.name, args.licence, args.data, numbers)
    return {"out": args.out}


def numbers_of(files: Sequence[str]) -> dict[str, Any]:
    """Name of a report, without ".json" -> the values of the report that are not lists, and the confidence intervals."""
    numbers: dict[str, Any] = {}
    for file in files:
        found = read_json(file)
        if not isinstance(found, dict):
            raise InputError(f"{file} is not a report of `realm evaluate --out`: it is not a JSON object")
        if Path(file).stem in numbers:
            raise InputError(f"--numbers has two files with the name {Path(file).name}: rename one")
        numbers[Path(file).stem] = {
            name: value
            for name, value in found.items()
            if not isinstance(value, list)
            or name.endswith("_ci95")  # all other lists have one entry per question
        }
    return numbers
