"""`realm convert`: published REALM checkpoints in, ours out."""

import argparse
from pathlib import Path

from realm.cli.arguments import Commands, Parser, add_command, report
from realm.config import InputError

TARGETS = ("realm", "huggingface-realm")


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the command."""
    convert = add_command(
        commands,
        "convert",
        _convert,
        "turn a published REALM checkpoint into a model and a knowledge base, or ours into files that others load",
        "realm convert google/realm-orqa-nq-openqa ./nq",
        reports=True,
    )
    convert.add_argument(
        "source",
        metavar="FROM",
        help="published checkpoint, by folder or hub name; or a model of ours, with --to",
    )
    convert.add_argument(
        "out", metavar="OUT", help="folder that is made; an open-QA one gets OUT/model and OUT/kb"
    )
    convert.add_argument(
        "--to",
        choices=TARGETS,
        default="realm",
        help="realm: ours (default); huggingface-realm: what transformers 4.57.6 loads, a folder per class",
    )
    convert.add_argument(
        "--encoder", metavar="NAME", help="published encoder that becomes the masked-LM reader"
    )
    convert.add_argument(
        "--embedder",
        metavar="NAME",
        help="published embedder of the passages, and of queries where FROM has none",
    )
    convert.add_argument(
        "--bits",
        metavar="N",
        type=int,
        choices=(16, 32),
        default=32,
        help="of the numbers in the published vectors: 32, as they are (default), or 16",
    )
    convert.add_argument(
        "--tagger",
        metavar="NAME",
        help="tags names and dates in the published texts, which only pre-training on them needs (default: none)",
    )
    convert.add_argument(
        "--kb", metavar="KB", help="with --to huggingface-realm: the knowledge base of its open-QA folder"
    )


def _convert(args: argparse.Namespace) -> None:
    if args.to == "realm":
        if args.kb:
            raise InputError("--kb is for --to huggingface-realm")

        from realm.retrieval.published import convert_checkpoint
        from realm.text.salient_spans import load_tagger

        tagger = load_tagger(args.tagger) if args.tagger else None
        made = convert_checkpoint(args.source, Path(args.out), args.encoder, args.embedder, args.bits, tagger)
        report(args, made)
        return
    if args.encoder or args.embedder or args.tagger:
        raise InputError(
            f"--encoder, --embedder and --tagger are for published checkpoints, not for --to {args.to}"
        )

    from realm.retrieval.published import export_model

    report(args, export_model(args.source, Path(args.out), args.kb))
