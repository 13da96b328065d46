"""`realm demo`: makes a workspace from packaged documents; with --from-text, trains all models from plain text alone."""

import argparse
import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from realm.cli.arguments import Commands, Parser, add_command, settings
from realm.errors import InputError
from realm.settings import read_config


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the command."""
    demo = add_command(
        commands,
        _demo,
        "make a workspace from packaged Wikipedia articles, adapt its retriever, compare retrievers, and answer questions",
        "realm demo --dir demo",
        section="demo",
        reports=True,
        continues=True,
    )
    demo.add_switch(
        "--from-text",
        "run another demo, which trains a retriever and a reader from plain text alone; the settings are in the table "
        "[from_text], and the default of --config is demo",
    )
    demo.add_switch(
        "--full",
        "with --from-text: train with three seeds, on two corpora, and with control runs; takes hours; the default of "
        "--config is demo-full",
    )
    demo.makes(
        demo.add_argument(
            "--dir",
            metavar="DIR",
            help="folder for all files of the demo (default: demo; with --from-text: demo-from-text; with --full: demo-full)",
        )
    )
    demo.add_argument(
        "--questions",
        metavar="FILE",
        nargs="+",
        default=[],
        help="with --from-text: further question files on which every retriever is measured; these questions are never used "
        "for training",
    )


def _demo(args: argparse.Namespace) -> None:
    if not args.from_text and (args.full or args.questions):
        raise InputError("--full and --questions belong to the demo from plain text: add --from-text")
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        report = _from_text(args) if args.from_text else _workspace(args)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))


def _workspace(args: argparse.Namespace) -> Any:
    from realm import demo
    from realm.cli import run

    return demo.run(settings(args, demo.DemoConfig), args.config, Path(args.dir or "demo"), run)


def _from_text(args: argparse.Namespace) -> Any:
    from realm.cli import run
    from realm.demo import from_text

    preset = args.config or ("demo-full" if args.full else "demo")
    config = read_config(from_text.FromTextConfig, preset, "from_text", args.set)
    folder = args.dir or ("demo-full" if args.full else "demo-from-text")
    return from_text.run(config, preset, Path(folder), args.questions, run)
