"""What all commands share: their declaration, common flags, and the printing of results."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from realm.errors import InputError
from realm.ray_actors import EngineConfig
from realm.settings import read_config

T = TypeVar("T")
Commands = argparse._SubParsersAction


class Part(NamedTuple):
    """A folder that a command uses and that a workspace contains."""

    name: str
    """Name of the folder in the workspace."""
    required: bool
    """Whether the command needs the folder."""


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors, and with --in WORKSPACE in place of the flags of a workspace's folders."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._parts: dict[str, Part] = {}
        self._in: argparse.Action | None = None

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see `{self.prog} --help`)")

    def add_part(self, flag: str, part: Part, metavar: str, help: str) -> None:
        """Declares the flag of a folder, and --in, which also supplies that folder."""
        if self._in is None:
            self._in = self.add_argument("--in", metavar="WORKSPACE", dest="workspace")
        needed = " (required without --in)" if part.required else ""
        self.add_argument(f"--{flag}", metavar=metavar, help=help + needed)
        self._parts[flag] = part
        self._in.help = f"workspace made by `realm fit`; replaces {_flags(self._parts)}"

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses the arguments; with --in, sets the flags of the workspace's folders."""
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
            self.error(f"--in {found.workspace} replaces {_flags(self._parts)}: leave out {_flags(given)}")
        from realm.folders import restore  # imported here because it needs modules that Windows lacks

        for flag, part in self._parts.items():
            folder = Path(found.workspace, part.name)
            restore(folder)
            if not folder.is_dir():
                raise InputError(
                    f"{found.workspace} is not a workspace, it has no folder {part.name}: "
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
    """Declares a command. `section` is the command's table in configuration files; `reports` adds --json."""
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
            help=f"read settings from the table [{section}] of a TOML file or of a preset, given by name",
        )
        parser.add_argument(
            "--set",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help="change one setting (repeatable); overrides --config",
        )
    if reports:
        parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run, section=section, called=parser.prog.removeprefix("realm "))
    return parser


def add_engine(parser: Parser, what: str) -> None:
    """Adds --engine and --ray-address; `what` completes "where ..."."""
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        help=f"where {what}: on this machine (default), or on all machines of a Ray cluster",
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="address of the Ray cluster (default: RAY_ADDRESS, else a cluster on this machine, else a new one)",
    )


def engine_of(args: argparse.Namespace) -> EngineConfig:
    """The engine that --engine and --ray-address name."""
    try:
        return EngineConfig(args.engine or "local", args.ray_address or "")
    except ValueError as error:
        raise InputError(str(error)) from None


def add_kb(parser: Parser, required: bool = True) -> None:
    """Adds --kb, the knowledge base that a command uses."""
    parser.add_part("kb", Part("kb", required), "KB", "folder of the knowledge base")


def add_model(parser: Parser, required: bool = True) -> None:
    """Adds --model, the model that a command uses."""
    parser.add_part(
        "model", Part("model", required), "MODEL", "the model: a folder, package:NAME or hf:OWNER/NAME"
    )


def add_reader(parser: Parser, does: str) -> None:
    """Adds --reader, which sets the setting `reader`: a span reader other than the model's."""
    parser.add_argument(
        "--reader",
        metavar="NAME",
        help=f"{does}: a model, or a checkpoint with BERT's question-answering head (folder or hub name)",
    )


def add_init(parser: Parser, required: bool, metavar: str, help: str) -> None:
    """Adds --init, the model or encoder that a stage starts from."""
    parser.add_part("init", Part("model", required), metavar, help)


def add_out(parser: Parser, what: str) -> None:
    """Adds --out, the file or folder that a command writes."""
    parser.add_argument("--out", metavar="OUT", required=True, help=what)


def add_sources(parser: Parser) -> None:
    """Adds SOURCE..., the documents that a command reads, and --strict."""
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="file or folder (.jsonl .txt .md .html .tsv .xml .warc, also compressed as .gz .bz2 .xz .zst; .parquet "
        ".arrow .pdf .docx .epub .zim), "
        "or package:vital-articles or package:factbook",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="stop at the first file, line or row that cannot be read (default: leave it out and list it with the reason)",
    )


def add_regex(parser: Parser) -> None:
    """Adds --regex and --no-regex: whether the answers of a question file are regular expressions."""
    parser.add_argument(
        "--regex",
        action=argparse.BooleanOptionalAction,
        help="treat all answers as regular expressions; --no-regex: only answers that the file marks with "
        '"regex": true (default: like --no-regex, and also the lines of DrQA\'s CuratedTREC files)',
    )


def settings(args: argparse.Namespace, cls: type[T], *flags: str) -> T:
    """Settings of the command, from --config, then --set, then --reader and the `flags` that have a setting's name."""
    given = [(name, getattr(args, name, None)) for name in ("reader", *flags)]
    last = [f"{k}={json.dumps(v) if isinstance(v, str) else v}" for k, v in given if v is not None]
    return read_config(cls, args.config, args.section, [*args.set, *last])


def positive(text: str) -> int:
    """Converts a flag's value to a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def report(args: argparse.Namespace, result: Mapping[str, Any], lines: Sequence[str] | None = None) -> None:
    """Prints a command's result: with --json as one JSON object, otherwise `lines`, or one value per line if None."""
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    width = max(map(len, result), default=0)
    print(
        "\n".join(lines if lines is not None else [f"{k:<{width}}  {_plain(v)}" for k, v in result.items()])
    )


def say_where(args: argparse.Namespace, what: str, place: str | Path) -> None:
    """Prints the last line of a command on standard error: what the command wrote ("the index is") and the place."""
    sys.stdout.flush()  # so that the result comes first
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
