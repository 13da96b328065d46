"""Reads the settings of commands from TOML files, presets and `--set`.

The settings of a command are a frozen dataclass in the file that uses the settings. This module fills in the dataclass.
"""

import copy
import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from realm.errors import InputError, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

TABLES = (
    "fit",
    "kb",
    "questions",
    "mlm",
    "ict",
    "pretrain",
    "adapt",
    "index",
    "finetune",
    "answer",
    "probe",
    "serve",
    "demo",
    "from_text",
    "knn",
    "baseline",
    "data",
    "compare",
    "ablate",
)
"""Names of the tables in a configuration file, one for each kind of command."""
BASE = "base"
"""Key above all tables of a configuration file: the preset or file whose settings this file changes."""


def presets() -> dict[str, Path]:
    """Name of a preset -> path of its configuration file; `configs/demo.toml` has the name `demo`."""
    package = Path(__file__).parent
    folders = (package / "configs", package.parent / "configs")  # of an installed package, of a clone
    folder = next((f for f in folders if f.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder else {}


def read_config(cls: type[T], file: str | None, section: str, overrides: Sequence[str] = ()) -> T:
    """Fills the dataclass `cls` from the table `section` of a TOML file or preset, then from overrides such as `a.b=c`.

    The section "a.b" is the table b in the table a. Without a file, or if the file has no such table, all settings keep their
    defaults. A file can name a base, and then has only what differs (`_read_tables`). The right side of an override is a TOML
    value if it can be parsed as one, and plain text otherwise.

    Raises:
        InputError: one line with all problems.
    """
    values: dict[str, Any] = {}
    where = changing = f"--set [{section}]"
    if file is not None:
        tables, whose = _read_tables(_config_path(file))
        where = f"{whose} [{section}]"
        outer, _, inner = section.partition(".")
        if unknown := sorted(tables.keys() - {*TABLES, outer}):
            if not isinstance(tables[unknown[0]], dict):
                raise InputError(f"{whose}: {unknown[0]} is in no table: write [{section}] above it")
            known = dict.fromkeys((*TABLES, outer))
            raise InputError(f"{whose}: unknown table {', '.join(unknown)} (known: {', '.join(known)})")
        table = tables.get(outer, {})
        if inner and isinstance(table, dict):
            table = table.get(inner, {})
        if not isinstance(table, dict):
            raise InputError(
                f"{whose}: {section} = {table!r} must be a table: write [{section}] above its keys"
            )
        values = table
    changed = copy.deepcopy(values)
    for override in overrides:
        _set(changed, override)
    try:
        return config_from(cls, changed, where)
    except InputError:
        if overrides and file is not None:
            config_from(cls, values, where)  # an error of the file
            return config_from(cls, changed, changing)
        raise


def tables_of(file: str) -> set[str]:
    """Names of the tables in a TOML file or preset; raises as `read_config` does."""
    return set(_read_tables(_config_path(file))[0])


def config_from(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Fills the nested dataclass `cls` from nested mappings, as read from TOML or JSON. Error messages begin with `where`.

    Settings without a key keep their defaults.

    Raises:
        InputError: one line with all unknown keys, wrong types and values that a `__post_init__` refuses; or with the first
            number that is NaN or infinite.
    """
    for name, value in _numbers(values):
        if not math.isfinite(value):
            raise InputError(f"{where}: {name} is {value}: it must be a finite number")
    # Imported here, because the import is slow, and `realm --help` does not need pydantic.
    from pydantic import ValidationError

    adapter: TypeAdapter[T] = _adapter(cls)  # type: ignore[arg-type]  # every class is hashable
    try:
        # The values are passed as JSON, because only then does strict mode accept lists for tuples and strings for paths.
        return adapter.validate_json(json.dumps(values, default=str), strict=True, extra="forbid")
    except ValidationError as error:
        problems = dict.fromkeys(_problem(cls, dict(p)) for p in error.errors(include_url=False))
        raise InputError(f"{where}: " + "; ".join(problems)) from None


@cache
def _adapter(cls: Any) -> "TypeAdapter[Any]":
    """The validator of a dataclass, which takes milliseconds to make."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def checked(cls: type[T], settings: object) -> T:
    """Settings that were made in Python, whose types Python does not check.

    Raises:
        InputError: they are no instance of the dataclass `cls`, or a value cannot be used.
    """
    if not isinstance(settings, cls):
        raise InputError(f"the settings are {shown(settings)}: they must be of the class {cls.__name__}")
    return config_from(cls, dataclasses.asdict(settings, dict_factory=_plain), cls.__name__)  # type: ignore[call-overload]


def _plain(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dictionary in which each number of numpy is a number of Python, because JSON cannot have numbers of numpy."""
    return {key: value.item() if hasattr(value, "item") else value for key, value in pairs}


def _config_path(file: str, folder: Path = Path()) -> Path:
    """The path of a preset, or of a file whose path may be relative to `folder`."""
    known = presets()
    path = known.get(file, folder / file)
    if not path.is_file():
        raise InputError(f"no configuration file {file}: give a TOML file or a preset ({', '.join(known)})")
    return path


def _read_tables(path: Path, above: Sequence[Path] = ()) -> tuple[dict[str, Any], str]:
    """The tables of a file, and its name for error messages, which also names the bases.

    The tables of the base are the defaults: a key of the file replaces the same key of the base, as a whole even if its value
    is a table. `above` are the files whose base is this file.
    """
    tables = _read_toml(path)
    base = tables.pop(BASE, None)
    if base is None:
        return tables, str(path)
    if not isinstance(base, str):
        raise InputError(f"{path}: {BASE} is {shown(base)}: it must be a TOML file or a preset")
    if path.resolve() in above:
        raise InputError(f"{path} is its own {BASE}")
    try:
        below, whose = _read_tables(_config_path(base, path.parent), (*above, path.resolve()))
    except InputError as error:
        raise InputError(f"{path}: {BASE}: {error}") from None
    for name, table in tables.items():
        if isinstance(table, dict) and name in below:
            if not isinstance(below[name], dict):
                raise InputError(f"{whose}: {name} = {below[name]!r} must be a table, as in {path}")
            tables[name] = {**below[name], **table}
    return below | tables, f"{path} (with the {BASE} {whose})"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (
        ValueError,
        RecursionError,
    ) as error:  # not TOML, not UTF-8, too many digits, or nested too deeply
        raise InputError(f"{path} is not TOML: {error}") from None


def _set(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *tables, key = (part.strip() for part in name.split("."))
    if not equals or not all((*tables, key)):
        raise InputError(f"--set {override}: write it as name=value or table.name=value")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise InputError(f"--set {override}: {table} is {values!r} and not a table")
    try:
        values[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        values[key] = text.strip()
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        raise InputError(f"--set {shown(override)}: {error}") from None


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Names and values of the settings in `value` that are floating-point numbers."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else str(key))


def _problem(cls: type, problem: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "unexpected_keyword_argument":
        known = _keys(cls, problem["loc"][:-1])
        return f"unknown key {name} (known: {', '.join(known)})"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":  # from a `__post_init__`, whose message contains the values
        return f"{name}: {message}" if name else message
    return f"{name}: {message[:1].lower()}{message[1:]}, got {shown(problem['input'])}"


def _keys(cls: Any, path: Sequence[str | int]) -> list[str]:
    """Field names of the dataclass at the end of `path`. Parts of `path` that are members of a union are skipped."""
    for part in path:
        hints = typing.get_type_hints(cls)
        if part in hints:
            kinds = (hints[part], *typing.get_args(hints[part]))
            cls = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), cls)
    return [field.name for field in dataclasses.fields(cls)]
