"""What the commands have in common: how one is declared, the flags that several share, and how it reports."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from realm.errors import InputError
from realm.settings import read_config

T = TypeVar("T")
Commands = argparse._SubParsersAction


class Part(NamedTuple):
    """A folder that a command works on, and that a workspace holds."""

    name: str
    """In the workspace."""
    required: bool


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and where --in WORKSPACE stands for the folders in a workspace."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._parts: dict[str, Part] = {}
        self._in: argparse.Action | None = None

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see `{self.prog} --help`)")

    def add_part(self, flag: str, part: Part, metavar: str, help: str) -> None:
        """Declares the flag of a folder, and --in, which names that folder too."""
        if self._in is None:
            self._in = self.add_argument("--in", metavar="WORKSPACE", dest="workspace")
        needed = " (required without --in)" if part.required else ""
        self.add_argument(f"--{flag}", metavar=metavar, help=help + needed)
        self._parts[flag] = part
        self._in.help = f"workspace that `realm fit` made, in place of {_flags(self._parts)}"

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses, and gives the flags of folders the values that --in stands for."""
        found, rest = super().parse_known_args(args, namespace)
        if self._in is not None:
            self._take_workspace(found)
        return found, rest

    def _take_workspace(self, found: argparse.Namespace) -> None:
        given = [flag for flag in self._parts if getattr(found, flag) is not None]
        if found.workspace is None:
            if missing := [flag for flag, part in self._parts.items() if part.required and flag not in given]:
                self.error(f"the following arguments are required: {_flags(missing)}, or --in WORKSPACE")
            return
        if given:
            self.error(f"--in {found.workspace} stands for {_flags(self._parts)}: leave out {_flags(given)}")
        from realm.folders import restore  # here, because Windows has not what it imports

        for flag, part in self._parts.items():
            folder = Path(found.workspace, part.name)
            restore(folder)
            if not folder.is_dir():
                raise InputError(
                    f"{found.workspace} is no workspace, it has no folder {part.name}: "
                    f"`realm fit SOURCE... --out {found.workspace}` makes one"
                )
            setattr(found, flag, str(folder))


def _flags(names: Iterable[str]) -> str:
    return " and ".join(f"--{name}" for name in names)


def add_command(
    commands: "Commands[Parser]",
    name: str,
    run: Callable[[argparse.Namespace], None],
    does: str,
    example: str,
    section: str | None = None,
    reports: bool = False,
) -> Parser:
    """Declares a command; `section` is its table in configuration files, `reports` gives it --json."""
    parser = commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if section is not None:
        parser.add_argument(
            "--config",
            metavar="FILE",
            help=f"settings: table [{section}] of a TOML file or of a preset by name",
        )
        parser.add_argument(
            "--set",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help="one setting (repeatable); beats --config",
        )
    if reports:
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, section=section, called=parser.prog.removeprefix("realm "))
    return parser


def add_kb(parser: Parser, required: bool = True) -> None:
    """--kb, the knowledge base a command works on."""
    parser.add_part("kb", Part("kb", required), "KB", "folder of the knowledge base")


def add_model(parser: Parser, required: bool = True) -> None:
    """--model, the model a command uses."""
    parser.add_part(
        "model", Part("model", required), "MODEL", "the model: a folder, package:NAME or hf:OWNER/NAME"
    )


def add_reader(parser: Parser, does: str) -> None:
    """--reader, the setting of that name: another span reader than the model's."""
    parser.add_argument(
        "--reader",
        metavar="NAME",
        help=f"{does}: a checkpoint with BERT's question-answering head, folder or hub name, or a model",
    )


def add_init(parser: Parser, required: bool, metavar: str, help: str) -> None:
    """--init, the model or encoder that a stage starts from."""
    parser.add_part("init", Part("model", required), metavar, help)


def add_out(parser: Parser, what: str) -> None:
    """--out, where a command writes."""
    parser.add_argument("--out", metavar="OUT", required=True, help=what)


def add_sources(parser: Parser) -> None:
    """SOURCE..., the documents that a command reads, and --strict."""
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="files and folders (.jsonl .txt .md .html, also with .gz .xz .zst; .parquet .arrow .pdf .docx .epub), "
        "package:vital-articles, package:factbook",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="end at the first file, line or row that cannot be read (default: leave it out, and list it by reason)",
    )


def add_regex(parser: Parser) -> None:
    """--regex and --no-regex, what the answers of a question file are."""
    parser.add_argument(
        "--regex",
        action=argparse.BooleanOptionalAction,
        help="all answers are regular expressions; --no-regex: only those that the file marks with "
        '"regex": true (default: DrQA\'s CuratedTREC lines are recognised)',
    )


def settings(args: argparse.Namespace, cls: type[T]) -> T:
    """The command's settings from --config, --set, and --reader where it has that flag."""
    reader = getattr(args, "reader", None)
    last = [] if reader is None else [f"reader={json.dumps(reader)}"]
    return read_config(cls, args.config, args.section, [*args.set, *last])


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def report(args: argparse.Namespace, result: Mapping[str, Any], lines: Sequence[str] | None = None) -> None:
    """Prints a command's result: with --json as one object, else `lines`, or its values one to a line."""
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    width = max(map(len, result), default=0)
    print(
        "\n".join(lines if lines is not None else [f"{k:<{width}}  {_plain(v)}" for k, v in result.items()])
    )


def say_where(args: argparse.Namespace, what: str, place: str | Path) -> None:
    """The last line of a command that writes, on standard error: what it wrote ("the index is"), and where that is."""
    sys.stdout.flush()  # the result comes first
    print(f"{args.called}: {what} in {place}", file=sys.stderr)


def _plain(value: Any) -> str:
    match value:
        case bool() | str() | None:
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case dict():
            return ", ".join(f"{name} {_plain(one)}" for name, one in value.items()) or "none"
        case _:
            return "; ".join(map(_plain, value)) or "none"
