"""`realm fit`: makes a workspace that answers questions about documents."""

import argparse
from pathlib import Path

from realm.cli.arguments import Commands, add_command, add_out, add_sources, report, settings


def add_commands(commands: Commands) -> None:
    """Declares the command."""
    fit = add_command(
        commands,
        _fit,
        "make or update a workspace that answers questions about your documents",
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
        help="time limit of the adaptation to the documents, in minutes; 0: no adaptation (default: the setting `minutes`, "
        "which is 10)",
    )
    fit.add_argument(
        "--start",
        metavar="MODEL",
        help="model to start from: a folder, package:NAME or hf:OWNER/NAME (default: the setting `start`, which is "
        "package:realm-small)",
    )


def _fit(args: argparse.Namespace) -> None:
    from realm.workspace.report import lines, up_to_date
    from realm.workspace.settings import FitConfig

    config = settings(args, FitConfig, "minutes", "start")
    folder = Path(args.out)
    found = up_to_date(folder, args.sources, config)
    if found is not None:
        line = f"{folder} is up to date: {found['documents']:,} documents, {found['passages']:,} passages; nothing to do"
        report(args, found, [line])
        return
    from realm.workspace.fit import run

    found = run(folder, args.sources, config, args.strict)
    report(args, found, lines(found))
