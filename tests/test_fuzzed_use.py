"""Fuzzed settings, configuration files and command lines: a value, or one line and exit code 2, never a traceback.

pytest -m slow tests/test_fuzzed_use.py --trials 20000 --trials-seed 1
"""

import argparse
import contextlib
import dataclasses
import random
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from realm import cli
from realm.errors import InputError
from realm.settings import presets, read_config
from tests.conftest import Trials
from tests.test_cli import config_classes

VALUES = (
    "", " ", "0", "-1", "7", "1e309", "-1e-400", "nan", "inf", "true", "[]", "[1,", "[[1], {}]", "{a = 1}", "{}", "'x'", '"',
    "x" * 5000, "日本", "\\ud83d", '"\\u0000"', "1979-05-27", "0x10", "9" * 400, "-0.0", "a.b", "=", "../..", "0.5", "\t\n",
    "[" * 3000, "{a=" * 3000, "1" * 5000, '"""', "#", "auto", "cpu", "null", "\x7f", "\u202e", "3.5e7", "1_000",
)  # fmt: skip
WORDS = (
    "missing", "folder", "file", "x" * 300, "0", "-1", "package:nonsense", "", " ", "é", "a\nb", "--kb", "http://127.0.0.1:9",
)  # fmt: skip
PIECES = (
    "[",
    "]",
    "=",
    "\n",
    '"',
    "'",
    "{",
    "}",
    ".",
    ",",
    "#",
    "\\",
    "\x00",
    "\xff",
    "0",
    "9" * 30,
    "é",
    "[mlm]\n",
)


@pytest.fixture
def draw(trials: Trials) -> random.Random:
    return random.Random(trials.seed)


@pytest.fixture
def count(trials: Trials) -> int:
    return trials.count(2000)


def names(cls: type, before: str = "") -> Iterator[str]:
    """The settings of a dataclass, those of its tables too."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield before + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from names(hints[field.name], f"{before}{field.name}.")


def setting_of(draw: random.Random, cls: type) -> str:
    """What may follow --set."""
    known = [*names(cls), "nonsense", "a.b.c", "", ".", "steps."]
    return draw.choice(known) + draw.choice(["=", "=", "=", "", " = "]) + draw.choice(VALUES)


@pytest.mark.slow
def test_fuzzed_settings_are_accepted_or_refused_in_one_message(draw: random.Random, count: int) -> None:
    classes = config_classes()
    for _ in range(count):
        table = draw.choice([*classes])
        overrides = [setting_of(draw, classes[table]) for _ in range(draw.randint(1, 4))]
        file = draw.choice([None, *presets()])
        with contextlib.suppress(InputError):
            assert isinstance(read_config(classes[table], file, table, overrides), classes[table])


@pytest.mark.slow
def test_fuzzed_configuration_files_are_accepted_or_refused_in_one_message(
    draw: random.Random, count: int, tmp_path: Path
) -> None:
    classes = config_classes()
    texts = [path.read_bytes() for path in presets().values()]
    file = tmp_path / "fuzzed.toml"
    for _ in range(count):
        content = bytearray(draw.choice(texts))
        for _ in range(draw.randint(1, 5)):
            at = draw.randrange(len(content))
            content[at : at + draw.choice([0, 0, 1, 30])] = draw.choice(PIECES).encode("latin-1")
        file.write_bytes(content)
        table = draw.choice([*classes])
        with contextlib.suppress(InputError):
            assert isinstance(read_config(classes[table], str(file), table), classes[table])


def leaves(parser: argparse.ArgumentParser) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog.split()[1:], parser
    for group in groups:
        for inner in group.choices.values():
            yield from leaves(inner)


def load_or_build_bm25(draw: random.Random, command: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """A command line that is nearly one: flags missing, doubled, with odd values. No knowledge base is there."""
    words = list(command)
    for action in parser._actions:
        if action.dest == "supervised":  # ends this process when standard input does
            continue
        for _ in range(draw.choice([0, 1, 1, 1, 2])):
            if action.option_strings and action.dest not in ("help", "version"):
                words.append(draw.choice(action.option_strings))
            if action.dest == "config":
                words.append(draw.choice([*presets(), "file", "folder", "missing"]))
            elif action.dest == "set":
                words.append(setting_of(draw, draw.choice([*config_classes().values()])))
            elif action.nargs != 0:
                words.append(draw.choice(WORDS))
    if command == ["demo"]:
        words.append("--nonsense")  # nothing else keeps it from running
    return words


@pytest.mark.slow
def test_fuzzed_command_lines_are_one_line_and_exit_code_2(
    draw: random.Random,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("folder").mkdir()
    Path("file").write_bytes(b"\x89\n\xff[")
    commands = [*leaves(cli._parser())]
    for _ in range(count // 4):  # each takes longer than a setting
        words = load_or_build_bm25(draw, *draw.choice(commands))
        code = cli.main(words)
        out, err = capfd.readouterr()
        assert code == 2, (words, out, err)
        assert out == "", words
        assert re.fullmatch(r"(?:(?!Traceback).*\n)*realm: [^\n]+\n", err), (words, err)
