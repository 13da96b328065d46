"""The command line: `main` runs one command, and turns an error into one line and an exit code.

`arguments` contains what the commands share; each other file of this folder contains one group of commands. A command imports
the modules that it needs only when it runs, so that `realm --help` is fast.
"""

import atexit
import errno
import gc
import logging
import os
import re
import sys
from collections.abc import Sequence
from functools import cache

from realm import __version__
from realm.cli import (
    answering,
    comparing,
    converting,
    demo,
    knowledge_base,
    measuring,
    planning,
    questions,
    serving,
    sharing,
    training,
    workspace,
)
from realm.cli.arguments import Parser
from realm.environment import processes_of_torchrun, set_torch_environment
from realm.errors import AlreadyDone, InputError, RealmError, first_line, no_rank, out_of_memory, way_out

_DEFECTS = {None, errno.ENOENT, errno.EBADF, errno.EFAULT, errno.ECHILD}
"""Numbers of system errors that are printed with a traceback. Such errors are defects of this program, because commands
check that files exist before they open files. All other system errors concern the user's folders, disk and limits:
one line is printed."""


def program() -> int:
    """Tunes the garbage collector for a process that runs only `main`, and runs `main` -> exit code."""
    # Importing torch creates hundreds of thousands of objects that live until the process ends. With the default thresholds and
    # the collection at exit, scanning these objects takes a large part of the time of a short command. Networks create no
    # reference cycles, so memory does not grow with fewer collections.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command -> exit code.

    0: success. 2: an error that one line on standard error explains. 130: interrupted. 141: the program that reads the output
    has ended.
    """
    # Windows lacks the file locks, forked processes and resource limits that realm uses.
    if sys.platform == "win32":
        return _print_error(
            "realm runs on Linux and macOS; on Windows, use the Windows Subsystem for Linux (WSL)", 2
        )
    set_torch_environment()
    _log_to_stderr()
    try:
        run(argv)
        sys.stdout.flush()  # raises BrokenPipeError here, not when the interpreter exits
    except RealmError as error:
        return _print_error(str(error), 2)
    except AlreadyDone as done:
        return _print_error(str(done), 0)
    except BrokenPipeError:  # the program that reads the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt as interrupt:
        return _print_error(str(interrupt) or "interrupted", 130)
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            asked = re.search(r"(?:tried|unable) to allocate [\d.]+ \w+", str(error), re.IGNORECASE)
            what = asked[0] if asked else first_line(error)
            way = "to train in less memory, use a smaller `batch_size` or, with --set, `cached_rows=64`"
            return _print_error(f"there is not enough memory ({what}); {way}", 2)
        if not _lost_connection(error):
            raise
        return _print_error(
            "the connection to another process of torchrun broke, probably because that process has ended: repeat the command",
            2,
        )
    except OSError as error:
        if error.errno in _DEFECTS:
            raise
        refused = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        return _print_error(refused + way_out(error.filename, error), 2)
    return 0


def _lost_connection(error: Exception) -> bool:
    """Whether it is the error of a rank, when another rank has ended. Gloo raises a RuntimeError, NCCL a DistBackendError."""
    of_torch = {one.__name__ for one in type(error).__mro__}
    return processes_of_torchrun() > 1 and ("DistError" in of_torch or "gloo" in str(error))


def run(argv: Sequence[str] | None) -> None:
    """Runs one command. Errors are raised, not printed."""
    for word in sys.argv[1:] if argv is None else argv:
        if word != word.encode(errors="ignore").decode():  # some bytes of the argument are not UTF-8
            raise InputError(
                f"the argument {word!r} is not UTF-8: use UTF-8; if the argument is the name of a file, rename the file"
            )
    try:
        args = _parser().parse_args(argv)
    except SystemExit:  # raised by --help and --version; wrong arguments raise InputError
        return
    if processes_of_torchrun() > 1 and not args.shares:
        raise no_rank(args.called)
    try:
        args.run(args)
    except KeyboardInterrupt as interrupt:
        if args.continues:
            raise KeyboardInterrupt("interrupted: repeat the command to continue") from interrupt
        raise


@cache  # a demo or a table runs a hundred commands in one process
def _parser() -> Parser:
    parser = Parser(
        prog="realm",
        description="Train retrieval and question answering from text alone; answer questions with evidence.",
        epilog="`realm COMMAND --help` shows the flags of a command and an example. Start with "
        "`realm fit FOLDER --out WORKSPACE`.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for group in (
        workspace,
        answering,
        serving,
        knowledge_base,
        questions,
        measuring,
        training,
        planning,
        converting,
        sharing,
        comparing,
        demo,
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
