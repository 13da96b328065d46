"""The command line: `main` runs one command, and turns what went wrong into one line and an exit code.

The commands are in the files beside this one, by group. Each imports the rooms it needs when it runs, so that
`realm --help` is instant.
"""

import atexit
import errno
import gc
import logging
import os
import sys
from collections.abc import Sequence

from realm import __version__
from realm.cli import answering, converting, demo, knowledge_base, serving, training, workspace
from realm.cli.arguments import Parser
from realm.environment import set_torch_environment
from realm.errors import AlreadyDone, InputError, RealmError, way_out

_OURS = {None, errno.ENOENT, errno.EBADF, errno.EFAULT, errno.ECHILD}
"""Errors that only a defect of this program gives: files that the user names are looked for before they are opened.
All others come from the system and are about the user's folders, disk and limits."""


def program() -> int:
    """`main` as a process of its own."""
    # Importing torch makes hundreds of thousands of objects that all stay. Looked through for cycles every 700 of them, and
    # once more at the end, that was a third of the time of a short command. Networks leave no cycles: memory does not grow.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command -> exit code: 0 success, 2 bad use or bad input (one line on standard error)."""
    if sys.platform == "win32":  # file locks, forked processes and resource limits are missing there
        return _say("realm runs on Linux and macOS; on Windows, use the Windows Subsystem for Linux (WSL)", 2)
    set_torch_environment()
    _log_to_stderr()
    try:
        run(argv)
        sys.stdout.flush()  # a closed pipe shows here, not when the interpreter ends
    except RealmError as error:
        return _say(str(error), 2)
    except AlreadyDone as done:
        return _say(str(done), 0)
    except BrokenPipeError:  # the reader of our output, `head` perhaps, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except OSError as error:
        if error.errno in _OURS:
            raise
        refused = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        return _say(refused + way_out(error.filename, error), 2)
    return 0


def run(argv: Sequence[str] | None) -> None:
    """Runs one command; what goes wrong comes out as it is."""
    for word in sys.argv[1:] if argv is None else argv:
        if word != word.encode(errors="ignore").decode():  # bytes that the system could not decode
            raise InputError(f"the argument {word!r} is not UTF-8: write it so, or rename the file it names")
    try:
        args = _parser().parse_args(argv)
    except SystemExit:  # --help and --version end so; errors raise InputError
        return
    args.run(args)


def _parser() -> Parser:
    parser = Parser(
        prog="realm",
        description="Learn retrieval and question answering from text alone; answer with evidence.",
        epilog="`realm COMMAND --help` shows a command's flags and an example. Begin with `realm demo`.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for group in (demo, workspace, knowledge_base, training, answering, converting, serving):
        group.add_commands(commands)
    return parser


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("realm")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def _say(message: str, code: int) -> int:
    print("realm:", " ".join(message.split()), file=sys.stderr)
    return code
