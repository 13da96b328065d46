"""`realm demo`: the whole story on the demo corpus."""

import argparse
import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from realm.cli.arguments import Commands, Parser, add_command, settings


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the command."""
    demo = add_command(
        commands,
        "demo",
        _demo,
        "build, train, answer and compare on Wikipedia articles that come with a package",
        "realm demo --dir demo",
        section="from_text",
        reports=True,
    )
    demo.add_argument(
        "--from-text",
        action="store_true",
        help="the story from plain text alone, which is the only one as yet, in a folder of its own",
    )
    demo.add_argument(
        "--full",
        action="store_true",
        help="from plain text with three seeds, a second corpus, and the controls: --config demo-full (hours)",
    )
    demo.add_argument(
        "--dir",
        metavar="DIR",
        help="folder to work in (default: demo, with --from-text demo-from-text, with --full demo-full)",
    )
    demo.add_argument(
        "--questions",
        metavar="FILE",
        nargs="+",
        default=[],
        help="question files on which every retriever is measured too; never trained on",
    )


def _demo(args: argparse.Namespace) -> None:
    from realm.cli import run
    from realm.demo import from_text

    args.config = args.config or ("demo-full" if args.full else "demo")
    folder = args.dir or ("demo-full" if args.full else "demo-from-text" if args.from_text else "demo")
    config = settings(args, from_text.FromTextConfig)
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        reports = from_text.run(config, args.config, Path(folder), args.questions, run)
    if args.json:
        print(json.dumps(reports, ensure_ascii=False))
