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
        section="demo",
        reports=True,
    )
    demo.add_argument(
        "--full",
        action="store_true",
        help="three seeds, a second corpus, and the controls: --config demo-full (hours)",
    )
    demo.add_argument("--dir", metavar="DIR", help="folder to work in (default: demo, with --full demo-full)")
    demo.add_argument(
        "--questions",
        metavar="FILE",
        nargs="+",
        default=[],
        help="question files on which every retriever is measured too; never trained on",
    )


def _demo(args: argparse.Namespace) -> None:
    from realm import demo
    from realm.cli import run

    name = "demo-full" if args.full else "demo"
    args.config = args.config or name
    config = settings(args, demo.DemoConfig)
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        reports = demo.run(config, args.config, Path(args.dir or name), args.questions, run)
    if args.json:
        print(json.dumps(reports, ensure_ascii=False))
