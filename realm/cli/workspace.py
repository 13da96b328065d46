"""`realm fit`: documents in, a workspace that answers questions about them out."""

import argparse
import json
from pathlib import Path

from realm.cli.arguments import Commands, add_command, add_out, add_sources, report, settings


def add_commands(commands: Commands) -> None:
    """Declares the command."""
    fit = add_command(
        commands,
        "fit",
        _fit,
        "make a workspace that answers questions about your documents, or bring one up to date",
        "realm fit docs/ --out manual",
        section="fit",
        reports=True,
    )
    add_sources(fit)
    add_out(fit, "folder of the workspace")
    fit.add_argument(
        "--minutes",
        metavar="N",
        type=float,
        help="how long the adaptation to the documents may take, 0: none (default: the setting, 10)",
    )
    fit.add_argument(
        "--start",
        metavar="MODEL",
        help="the model to start from: a folder, package:NAME or hf:OWNER/NAME (default: the setting, package:realm-small)",
    )


def _fit(args: argparse.Namespace) -> None:
    from realm.workspace.report import lines, up_to_date
    from realm.workspace.settings import FitConfig

    for name, value in (("minutes", args.minutes), ("start", args.start)):
        if value is not None:
            args.set.append(f"{name}={json.dumps(value)}")
    config = settings(args, FitConfig)
    folder = Path(args.out)
    found = up_to_date(folder, args.sources, config)
    if found is not None:
        told = f"{folder} is up to date: {found['documents']:,} documents, {found['passages']:,} passages; nothing to do"
        report(args, found, [told])
        return
    from realm.workspace.fit import run

    found = run(folder, args.sources, config, args.strict)
    report(args, found, lines(found))
