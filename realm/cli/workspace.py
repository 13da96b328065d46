"""`realm fit` makes a workspace that answers questions about documents; `realm watch` updates it when files change."""

import argparse
import signal
import threading
from pathlib import Path

from realm.cli.arguments import Commands, add_command, report, settings
from realm.progress import wrapped
from realm.workspace.settings import EVERY, SETTLE

_LEAST_PAUSE = 0.05
"""Smallest value of `watch --every`, in seconds; without a pause, a watcher would use a whole core."""


def add_commands(commands: Commands) -> None:
    """Declares the commands `fit` and `watch`."""
    fit = add_command(
        commands,
        _fit,
        "make or update a workspace that answers questions about your documents",
        "realm fit docs/ --out manual",
        section="fit",
        reports=True,
        continues=True,
    )
    fit.add_sources(addresses=False)
    fit.add_out("folder of the workspace")
    fit.add_argument(
        "--drop",
        metavar="SOURCE",
        action="append",
        default=[],
        help="earlier source that is no longer one: delete its documents, except those that a given SOURCE contains; can be "
        "given several times",
    )
    fit.add_argument(
        "--minutes",
        metavar="N",
        type=_minutes,
        help="time limit of the adaptation to the documents, in minutes; 0: no adaptation (default: the setting `minutes`, "
        "which is 10)",
    )
    fit.add_argument(
        "--start",
        metavar="MODEL",
        help="model to start from: a folder, package:NAME or hf:OWNER/NAME (default: the setting `start`, which is "
        "package:realm-small)",
    )
    watching = add_command(
        commands,
        _watch,
        "update a workspace whenever files change, until Ctrl-C: add, replace and delete the documents of these files",
        "realm watch docs/ --in manual",
    )
    watching.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="*",
        help="file or folder to watch (default: the files and folders of the last `realm fit`)",
    )
    watching.add_argument(
        "--in", metavar="WORKSPACE", dest="workspace", required=True, help="workspace made by `realm fit`"
    )
    watching.add_argument(
        "--every",
        metavar="SECONDS",
        type=_pause,
        default=EVERY,
        help=f"time from one check of the files to the next (default: {EVERY:g})",
    )
    watching.add_argument(
        "--settle",
        metavar="SECONDS",
        type=_seconds,
        default=SETTLE,
        help=f"time for which a file must stay the same before it is read (default: {SETTLE:g})",
    )
    watching.add_argument(
        "--device", metavar="NAME", default="auto", help="device that embeds passages (default: auto)"
    )


def _seconds(text: str) -> float:
    return _number(text, "seconds")


def _pause(text: str) -> float:
    if (seconds := _seconds(text)) < _LEAST_PAUSE:
        raise argparse.ArgumentTypeError(f"{text!r} is below {_LEAST_PAUSE} seconds")
    return seconds


def _minutes(text: str) -> float:
    return _number(text, "minutes")


def _number(text: str, of: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {of}")
    return number


def _watch(args: argparse.Namespace) -> None:
    from realm.workspace.watch import watch

    stop = threading.Event()

    def end(number: int, frame: object) -> None:
        if stop.is_set():  # the second signal interrupts a change that still runs
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        watch(Path(args.workspace), args.sources, stop, args.every, args.settle, args.device)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fit(args: argparse.Namespace) -> None:
    from realm.progress import counted
    from realm.workspace.report import lines, up_to_date
    from realm.workspace.settings import FitConfig

    config = settings(args, FitConfig, "minutes", "start")
    folder = Path(args.out)
    found = up_to_date(folder, args.sources, config, args.drop)
    if found is not None:
        parts = counted(found["documents"], "document"), counted(found["passages"], "passage")
        report(args, found, [f"{folder} is up to date: {', '.join(parts)}; nothing to do"])
        return
    from realm.workspace.fit import run

    found = run(folder, args.sources, config, args.strict, args.drop)
    report(args, found, list(map(wrapped, lines(found))))
