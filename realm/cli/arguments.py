"""What the commands have in common: how one is declared, the flags that several share, and how it reports."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from realm.config import InputError, read_config

T = TypeVar("T")
Commands = argparse._SubParsersAction


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all bad input."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see `{self.prog} --help`)")


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
    parser.set_defaults(run=run, section=section)
    return parser


def add_kb(parser: Parser, required: bool = True) -> None:
    """--kb, the knowledge base a command works on."""
    parser.add_argument("--kb", metavar="KB", required=required, help="folder of the knowledge base")


def add_model(parser: Parser, required: bool = True) -> None:
    """--model, the model a command uses."""
    parser.add_argument("--model", metavar="MODEL", required=required, help="folder of the model")


def add_out(parser: Parser, what: str) -> None:
    """--out, where a command writes."""
    parser.add_argument("--out", metavar="OUT", required=True, help=what)


def add_regex(parser: Parser) -> None:
    """--regex and --no-regex, what the answers of a question file are."""
    parser.add_argument(
        "--regex",
        action=argparse.BooleanOptionalAction,
        help="all answers are regular expressions; --no-regex: only those that the file marks with "
        '"regex": true (default: DrQA\'s CuratedTREC lines are recognised)',
    )


def settings(args: argparse.Namespace, cls: type[T]) -> T:
    """The command's settings from --config and --set."""
    return read_config(cls, args.config, args.section, args.set)


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
