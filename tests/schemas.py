"""Whether a JSON value is exactly what a type of the project says."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict


def assert_holds(kind: Any, value: Any, *more: Any) -> None:
    """The value has the keys of a TypedDict, NamedTuple or dataclass, all of them and no other, with values of their types.

    `more` kinds add their keys: for objects that are made of several.
    """
    hints = _fields(kind)
    for one in more:
        hints |= _fields(one)
    _check_object(hints, value, getattr(kind, "__name__", str(kind)))


def _fields(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return (
        {f.name: hints[f.name] for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else hints
    )


def _is_object(kind: Any) -> bool:
    return is_typeddict(kind) or dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")


def _check_object(hints: dict[str, Any], value: Any, where: str) -> None:
    assert isinstance(value, dict), f"{where} is {value!r}, no object"
    needed = {name for name, kind in hints.items() if get_origin(kind) is not NotRequired}
    assert needed <= value.keys() <= hints.keys(), f"{where}: {needed ^ value.keys()} missing or too much"
    for name, one in value.items():
        kind = hints[name]
        _check(get_args(kind)[0] if get_origin(kind) is NotRequired else kind, one, f"{where}.{name}")


def _check(kind: Any, value: Any, where: str) -> None:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return
    if _is_object(kind):
        _check_object(_fields(kind), value, where)
    elif origin in (Union, types.UnionType):
        assert any(_fits(one, value) for one in inner), f"{where} is {value!r}, no {kind}"
    elif origin is Literal:
        assert value in inner, f"{where} is {value!r}, none of {inner}"
    elif origin in (list, tuple):
        assert isinstance(value, list), f"{where} is {value!r}, no list"
        assert origin is list or inner[1:] == (...,) or len(inner) == len(value), (
            f"{where}: {len(value)} values"
        )
        for number, one in enumerate(value):
            of = inner[0] if origin is list or inner[1:] == (...,) else inner[number]
            _check(of, one, f"{where}[{number}]")
    elif origin in (dict, Mapping):
        assert isinstance(value, dict), f"{where} is {value!r}, no object"
        for name, one in value.items():
            _check(inner[1], one, f"{where}.{name}")
    else:
        assert kind in (str, int, float, bool, type(None)), f"{where}: JSON has no {kind}"
        taken = (int, float) if kind is float else kind
        assert isinstance(value, taken) and (kind is bool or not isinstance(value, bool)), (
            f"{where} is {value!r}, no {kind}"
        )


def _fits(kind: Any, value: Any) -> bool:
    try:
        _check(kind, value, "")
    except AssertionError:
        return False
    return True
