"""The command line: `main` runs one command and turns errors into one line and an exit code.

The commands are in the files beside this one, by group. Each command imports the rooms it needs when it runs, so that
`realm --help` is fast.
"""

import atexit
import errno
import gc
import logging
import os
import sys
from collections.abc import Sequence

from realm import __version__
from realm.cli import (
    answering,
    comparing,
    converting,
    demo,
    knowledge_base,
    planning,
    serving,
    training,
    workspace,
)
from realm.cli.arguments import Parser
from realm.environment import set_torch_environment
from realm.errors import AlreadyDone, InputError, RealmError, way_out

_DEFECTS = {None, errno.ENOENT, errno.EBADF, errno.EFAULT, errno.ECHILD}
"""Error numbers that point to a defect of this program and keep their traceback: commands check that the user's files exist
before they open them. All other error numbers concern the user's folders, disk and limits, and become one line."""


def program() -> int:
    """Runs `main` in a process that has no other work: tunes the garbage collector for it -> exit code."""
    # Importing torch creates hundreds of thousands of objects that live until the end. With the default thresholds, and a last
    # collection at exit, scanning them takes a large part of a short command's time. Networks leave no cycles: memory does
    # not grow.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command -> exit code: 0 success, 2 wrong usage or input (one line on standard error), 130 interrupted."""
    if sys.platform == "win32":  # file locks, forked processes and resource limits are missing there
        return _print_error(
            "realm runs on Linux and macOS; on Windows, use the Windows Subsystem for Linux (WSL)", 2
        )
    set_torch_environment()
    _log_to_stderr()
    try:
        run(argv)
        sys.stdout.flush()  # raises BrokenPipeError here rather than at the interpreter's exit
    except RealmError as error:
        return _print_error(str(error), 2)
    except AlreadyDone as done:
        return _print_error(str(done), 0)
    except BrokenPipeError:  # the program that reads the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        return _print_error("interrupted", 130)
    except OSError as error:
        if error.errno in _DEFECTS:
            raise
        refused = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        return _print_error(refused + way_out(error.filename, error), 2)
    return 0


def run(argv: Sequence[str] | None) -> None:
    """Runs one command; errors pass through unchanged."""
    for word in sys.argv[1:] if argv is None else argv:
        if word != word.encode(errors="ignore").decode():  # the system could not decode all bytes
            raise InputError(
                f"the argument {word!r} is not UTF-8: encode it as UTF-8, or rename the file that it names"
            )
    try:
        args = _parser().parse_args(argv)
    except SystemExit:  # from --help and --version; errors raise InputError
        return
    args.run(args)


def _parser() -> Parser:
    parser = Parser(
        prog="realm",
        description="Train retrieval and question answering from text alone; answer questions with evidence.",
        epilog="`realm COMMAND --help` shows the flags of a command and an example. Start with `realm demo`.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for group in (
        demo,
        workspace,
        knowledge_base,
        training,
        planning,
        answering,
        comparing,
        converting,
        serving,
    ):
        group.add_commands(commands)
    return parser


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("realm")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def _print_error(message: str, code: int) -> int:
    print("realm:", " ".join(message.split()), file=sys.stderr)
    return code
