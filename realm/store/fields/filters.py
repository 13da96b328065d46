"""Filters: boolean expressions over the fields of documents, in Lance's filter language, such as "year >= 2020 and not draft".

A filter is a part of SQL: comparisons, `and`, `or`, `not`, `in`, `between`, `like` and `is null`. `filter_sql` checks each word
of a filter, and replaces the names of fields by the typed columns of the table. Everything else, above all functions and
internal columns, is refused. Lance parses the result, so it is Lance that checks the grammar and the types.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from realm.errors import InputError, shortened
from realm.store.fields.columns import column_name
from realm.text.fields import Fields, Kind, column_value, kind_of

LONGEST_FILTER = 2_000
"""Longest filter in characters."""
DEEPEST = 16
"""Largest number of parentheses that can be open at one place of a filter. The time of Lance grows exponentially with it."""
BUILT_IN: Mapping[str, str] = {"id": "document_id", "title": "title"}
"""Names that a filter can use besides the fields -> columns: the id of the document, and the title of the passage."""
KIND_NAMES: Mapping[Kind, str] = {
    "bool": "true or false",
    "int": "whole number",
    "float": "number",
    "date": "date",
    "time": "time",
    "text": "text",
}
_LONGEST_EXAMPLE = 40
"""Longest text in an example filter, in characters."""
_WHOLE_NUMBERS = range(-(1 << 63) + 1, 1 << 63)
"""Whole numbers that Lance reads: it reads a number below 0 as a sign and a number."""
_DIGITS = re.compile(r"[+-]?\d+")
_OF_FILES = ("path", "modified")
"""Fields that `realm.documents` adds to each document from a file."""
_WORDS = frozenset("and or not in is null like ilike between true false".split())
_BEFORE_VALUE = frozenset("= != <> < <= > >= ( , in like ilike between and".split())
"""What precedes the value of a comparison; after a field, `and` can only be that of `between`."""
_TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?!\w)|(?P<name>[^\W\d]\w*)"
    r"|(?P<quoted>`[^`]*`|\"[^\"]*\")|(?P<sign><=|>=|<>|!=|=|<|>|\(|\)|,))"
)


class FilterError(InputError):
    """A filter that cannot be used."""


Kinds = Mapping[str, Sequence[Kind]]
"""The fields of a knowledge base -> the kinds of their values."""


class _Column(NamedTuple):
    """What a filter can compare: SQL for its value, and the kind of the value."""

    name: str
    sql: str
    kind: Kind


def filter_sql(where: str, kinds: Kinds) -> str:
    """The filter as an expression over the columns of the table.

    Raises:
        FilterError: the filter is too long or too deep, or has an unknown name, a word that filters do not have, a condition
            without a field, or a value of a wrong kind.
    """
    if len(where) > LONGEST_FILTER:
        raise FilterError(f"the filter has {len(where)} characters, the limit is {LONGEST_FILTER}")
    columns = _columns(kinds)
    found: list[str] = []
    place, depth = 0, 0
    begin, has_column = 0, False  # of this condition
    has_bounds = False  # the next "and" is between two bounds
    compared: _Column | None = None  # the last field of this comparison
    while where[place:].strip():
        token = _TOKEN.match(where, place)
        if token is None:
            rest = where[place:].strip()
            if rest[0] in "'\"":
                raise refused(
                    where, f"the quotation mark is missing at the end of {shortened(rest, 20)}", kinds
                )
            raise refused(where, f"{shortened(rest, 20)!r} cannot be read", kinds)
        place = token.end()
        value = token[token.lastgroup or 0]
        match token.lastgroup:
            case "name" if value.lower() in _WORDS:
                found.append(value.lower())
                if value.lower() == "between":
                    has_bounds = True
                elif value.lower() == "and" and has_bounds:
                    has_bounds = False
                elif value.lower() in ("and", "or"):
                    if not has_column:
                        _refuse_constant(where[begin : token.start()], where, kinds)
                    compared, begin, has_column = None, place, False
            case "name" if value.lower() in ("date", "timestamp") and _TEXT_FOLLOWS.match(where, place):
                # A time with a date becomes a time: Lance would compare both in nanoseconds, which end in the year 2262.
                if compared is None or compared.kind != "time" or not _DATE_FOLLOWS.match(where, place):
                    found.append(value.lower())
                    compared = None  # the following text has a type
            case "name" | "quoted":
                name = value.strip('`"')
                if name not in columns:
                    raise refused(where, _unknown(name, where[place:], compared, found), kinds)
                if compared is not None and not _comparable(compared.kind, columns[name].kind):
                    pair = " with ".join(f"{n} ({names_of_fields(kinds)[n]})" for n in (compared.name, name))
                    raise refused(where, f"it compares {pair}", kinds)
                compared, has_column = columns[name], True
                found.append(compared.sql)
            case "text" | "number" if compared is not None:
                found.append(_literal(value, compared, where, kinds))
            case _:
                depth += (value == "(") - (value == ")")
                if depth < 0:
                    raise refused(where, "it has a ) without a (", kinds)
                if depth > DEEPEST:
                    raise refused(where, f"more than {DEEPEST} parentheses are open at one place", kinds)
                found.append(value)
    if not has_column:
        _refuse_constant(where[begin:], where, kinds)
    return f"({' '.join(found)})"  # without the parentheses, Lance would ignore what follows a complete condition


def _refuse_constant(condition: str, where: str, kinds: Kinds) -> None:
    """Refuses a condition without a field, which is the same for all documents. Lance refuses an empty part of a filter."""
    if condition == where:
        raise refused(where, "it has no field", kinds)
    if part := condition.strip(" ()"):
        why = f"its part {shortened(part)!r} has no field: write a condition such as year >= 2020"
        raise refused(where, why, kinds)


def _unknown(name: str, rest: str, compared: _Column | None, before: Sequence[str]) -> str:
    """Why a name that is no field cannot be used.

    `rest` follows the name, `before` precedes it, and `compared` is the last field of the comparison.
    """
    if rest.lstrip().startswith("("):
        return f"{name} is not a field, and a filter cannot contain functions"
    if compared is not None and compared.kind == "text" and before[-1] in _BEFORE_VALUE:
        return f"{name} is not a field; a text needs single quotation marks, such as {_quoted(name)}"
    return f"{name} is not a field"


def _comparable(one: Kind, other: Kind) -> bool:
    """Whether values of the two kinds can be compared."""
    return one == other or {one, other} in ({"int", "float"}, {"date", "time"})


_TEXT_FOLLOWS = re.compile(r"\s*'")
_DATE_FOLLOWS = re.compile(r"\s*'[\d+-]*'")


def _literal(value: str, column: _Column, where: str, kinds: Kinds) -> str:
    """SQL for a text or a number that is compared with a column."""
    is_text = value.startswith("'")
    given = kind_of(value[1:-1].replace("''", "'")) if is_text else "float"
    way = ""
    match column.kind:
        case "text" if not is_text:
            way = f"write '{value}'"
        case "int" | "float" if is_text:
            way = "write the number without quotation marks"
        case "int" if not _DIGITS.fullmatch(value) or int(value) not in _WHOLE_NUMBERS:
            way = f"write a whole number from {_WHOLE_NUMBERS.start} to {_WHOLE_NUMBERS[-1]}"
        case "bool":
            way = "write true or false without quotation marks"
        case "date" if given != "date":
            way = "write a date like '2020-12-31'"
        case "time" if given not in ("date", "time"):
            way = "write a time like '2020-12-31T23:59:59Z', or a date"
        case "time":
            moment = column_value(value[1:-1])
            if isinstance(moment, datetime):
                moment = moment.replace(tzinfo=None)
            else:
                moment = datetime(moment.year, moment.month, moment.day)
            return f"timestamp '{moment.isoformat(sep=' ')}'"
        case "date":
            return f"date {value}"
    if way:
        compared = f"{column.name} ({names_of_fields(kinds)[column.name]}) with {shortened(value, 60)}"
        raise FilterError(f"the filter {shortened(where)} compares {compared}: {way}")
    return value


def names_of_fields(kinds: Kinds) -> dict[str, str]:
    """The names that a filter can use -> what their values are."""
    found = {name: KIND_NAMES[column.kind] for name, column in _columns(kinds).items()}
    for name, some in kinds.items():
        if len(some) > 1 and found[name] == KIND_NAMES["text"]:
            found[name] += f", because values are {' and '.join(KIND_NAMES[kind] for kind in some)}"
    return found


def _columns(kinds: Kinds) -> dict[str, _Column]:
    columns = {name: _Column(name, column, "text") for name, column in BUILT_IN.items()}
    for name, some in kinds.items():
        columns[name] = _column(name, some)
    return columns


def _column(name: str, kinds: Sequence[Kind]) -> _Column:
    """The column of a field. Values of one kind are compared as this kind, whole numbers and numbers as numbers, and all others
    as texts."""
    if len(kinds) == 1:
        return _Column(name, f"`{column_name(name, kinds[0])}`", kinds[0])
    kind: Kind = "float" if set(kinds) == {"int", "float"} else "text"
    sql = "double" if kind == "float" else "string"
    parts = (f"cast(`{column_name(name, one)}` as {sql})" for one in kinds)
    return _Column(name, f"coalesce({', '.join(parts)})", kind)


def explained(problem: str) -> str:
    """A problem that Lance has with a filter, with the names that the filter has.

    >>> explained("SELECT (`year:int` > `day:date`) FROM t (sql parser error: Expected: ), found: `day:date`)")
    'day was not expected'
    """
    problem = _TYPED.sub(r"\1", problem).replace(BUILT_IN["id"], "id")
    if syntax := _EXPECTED.search(problem):
        expected, there = syntax.groups()
        if expected == "an expression" and there == ")":
            return "it is not a complete condition, such as year >= 2020"
        if expected == ")":
            return ") was expected at the end" if there == "FROM" else f"{there} was not expected"
        return f"{expected} was expected before {there}"
    if "is not supported SQL" in problem:
        return "it is not a condition, such as year >= 2020"
    if sides := _SIDES.search(problem):
        return f"one side of {sides[1].lower()} is not a condition, such as year >= 2020"
    if _TOO_FAR.search(problem):
        return "dates can be compared with times only from the year 1678 to 2261"
    return problem


_TYPED = re.compile(rf"`([^`]*):(?:{'|'.join(KIND_NAMES)})`")
_EXPECTED = re.compile(r"sql parser error: Expected: (.*), found: (.*)\)")
_SIDES = re.compile(r"logical boolean operation \w+ (AND|OR) \w+")
_TOO_FAR = re.compile("Arithmetic overflow|Cannot cast Date32 value")
CANNOT_CAST = re.compile(f"Cast error|Parser error|Invalid string/binary operation|{_TOO_FAR.pattern}")
"""Occurs in the message of Lance if a filter cannot convert or compare a value of a passage."""


def refused(where: str, why: str, kinds: Kinds) -> FilterError:
    """The error for a filter that cannot be used."""
    known = ", ".join(f"{name} ({kind})" for name, kind in names_of_fields(kinds).items())
    return FilterError(
        f"the filter {shortened(where)} cannot be used: {why}; the fields are {shortened(known, 400)}"
    )


def example_filter(documents: Iterable[Fields], kinds: Kinds) -> str | None:
    """A filter that matches the first document with a suitable field; None if there is no such document.

    The filter compares the document's first number, date or time, and its first short text or truth value. Fields that every
    file has come last.

    >>> example_filter([{"year": 2020, "source": "handbook"}], {"year": ["int"], "source": ["text"]})
    "year >= 2020 and source = 'handbook'"
    """
    for fields in documents:
        found: dict[str, str] = {}  # ">=" or "=" -> the first comparison with this sign
        for name, value in sorted(fields.items(), key=lambda field: field[0] in _OF_FILES):
            literal = _example_literal(value)
            if (
                literal is not None
                and name in kinds
                and _comparable(kind_of(value), _column(name, kinds[name]).kind)
            ):
                sign = "=" if kind_of(value) in ("text", "bool") else ">="
                found.setdefault(sign, f"{_written(name)} {sign} {literal}")
        if found:
            return " and ".join(found.values())
    return None


def _example_literal(value: object) -> str | None:
    """A value as a filter has it; None if the value is too long for an example, or has characters that are not printable."""
    match kind_of(value):
        case "bool" | "int" | "float":
            return str(value).lower()
        case "date" | "time":
            return f"'{column_value(value).isoformat()[:10]}'"
        case "text" if isinstance(value, str) and len(value) <= _LONGEST_EXAMPLE and value.isprintable():
            return _quoted(value)
    return None


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _written(name: str) -> str:
    """The name of a field as a filter has it: in backquotes if the name alone would be a number or a word of the language."""
    is_plain = name.isidentifier() and name.lower() not in _WORDS | {"date", "timestamp"}
    return name if is_plain else f"`{name}`"
