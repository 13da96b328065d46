"""Fields of documents: the metadata that a document has besides its title and text, such as a year, an author or an address.

The value of a field is what JSON can hold. The *kind* of a value determines the typed column in which the knowledge base stores
the value, and therefore how filters compare the value. JSON has no dates: a text in the format of ISO 8601 is a date or a time.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Literal, NamedTuple
from uuid import UUID

Kind = Literal["bool", "int", "float", "date", "time", "text"]
Fields = Mapping[str, Any]
NO_FIELDS: Fields = {}
RESERVED = frozenset(("id", "_id", "title", "text", "maintext"))
"""Names that no field can have, because records use these names for the parts of a document."""


class FieldNames(NamedTuple):
    """The keys of a record or the columns of a table that have the parts of a document; "" for the usual names."""

    title: str = ""
    text: str = ""
    id: str = ""


USUAL_NAMES = FieldNames()
LONGEST_NAME = 100
LONGEST_VALUE = 2_000
"""Longest value in characters. Every passage of a document stores the fields, so a longer value would need much space."""
_NOT_A_NAME = re.compile(r"\W+")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})(\.\d+)?", re.ASCII)


def clean_fields(values: Mapping[Any, Any], left_out: Counter[str] | None = None) -> dict[str, Any]:
    """The fields that a document can have, from the metadata of a file or a record.

    In names, other characters than letters, digits and "_" become "_". Dates and times become texts in the format of ISO 8601.
    Values that are not finite, longer than `LONGEST_VALUE` or of a type that JSON does not have are left out, and counted by
    name in `left_out`. Values that are None, and fields whose name is in `RESERVED`, empty or longer than `LONGEST_NAME`, are
    left out too, and not counted. If two names become equal, the first value is kept.

    >>> clean_fields({"year": 2020, "og:url": "https://example.org", "title": "A", "none": None})
    {'year': 2020, 'og_url': 'https://example.org'}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = _NOT_A_NAME.sub("_", str(key)).strip("_")
        if not name or len(name) > LONGEST_NAME or str(key) in RESERVED or name in RESERVED or value is None:
            continue
        try:
            text: str | None = _SURROGATE.sub(
                "\ufffd", json.dumps(value, ensure_ascii=False, allow_nan=False, default=json_value)
            )
        except (TypeError, ValueError, OverflowError, RecursionError):
            text = None
        if text is not None and len(text) <= LONGEST_VALUE:
            found.setdefault(name, json.loads(text))
        elif left_out is not None:
            left_out[name] += 1
    return found


def with_nested(record: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a record, and those of the objects `metadata` and `fields` in it, which replace no other key.

    >>> with_nested({"title": "A", "year": 1, "fields": {"year": 2, "by": "Ann"}})
    {'title': 'A', 'year': 1, 'by': 'Ann'}
    """
    found = dict(record)
    for nested in ("metadata", "fields"):
        if isinstance(inner := found.get(nested), Mapping):
            del found[nested]
            found |= {name: value for name, value in inner.items() if name not in found}
    return found


def json_value(value: object) -> Any:
    """A date or a time in the format of ISO 8601, a time of day such as 09:30, a duration such as 30:05:00, or a number.

    Decimal numbers become floats, and numbers of numpy those of Python. A UUID becomes a text.

    Raises:
        TypeError: JSON has no such value.
        OverflowError: the time is not in the years 1 to 9999 in UTC.
    """
    match value:
        case datetime():
            return time_text(value)
        case date():
            return value.isoformat()
        case time():
            plain = value.second == value.microsecond == 0 and value.tzinfo is None
            return f"{value:%H:%M}" if plain else value.isoformat()
        case timedelta():
            minutes, seconds = divmod(abs(value) // timedelta(seconds=1), 60)
            sign = "-" if value < timedelta(0) else ""
            return f"{sign}{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        case Decimal():
            return float(value)
        case UUID():
            return str(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy is not imported here
        return value.item()
    raise TypeError


def time_text(moment: datetime) -> str:
    """A time in the format of ISO 8601, in UTC; a time without a time zone is taken for UTC."""
    return _in_utc(moment).isoformat().replace("+00:00", "Z")


def _in_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def read_value(text: str) -> Any:
    """The value of a field in a format that has only texts, such as HTML and TSV.

    A text is a number or a truth value only if it is written exactly as JSON would write the value: "007" is a text.

    >>> [read_value(text) for text in ("2020", "1.5", "1.50", "007", "true", "True")]
    [2020, 1.5, '1.50', '007', True, 'True']
    """
    if text in ("true", "false"):
        return text == "true"
    if _NUMBER.fullmatch(text):
        value = float(text) if "." in text else int(text)
        if str(value) == text:
            return value
    return text


def kind_of(value: Any) -> Kind:
    """The kind of a value."""
    match value:
        case bool():
            return "bool"
        case int():
            return "int" if -(2**63) <= value < 2**63 else "text"
        case float():
            return "float" if math.isfinite(value) else "text"
        case str():
            return "text" if _moment(value) is None else "date" if _DATE.fullmatch(value) else "time"
    return "text"


def column_value(value: Any) -> Any:
    """Converts a value to the type of the column of its kind: dates and times to objects, lists and objects to JSON text."""
    match kind_of(value):
        case "date" | "time":
            return _moment(value)
        case "text":
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value


def _moment(text: str) -> date | datetime | None:
    """The date or the time that a text is; None for any other text."""
    try:
        if _DATE.fullmatch(text):
            return date.fromisoformat(text)
        if _TIME.fullmatch(text):
            return _in_utc(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        pass
    return None


def to_json(fields: Fields) -> str | None:
    """The fields as JSON text; None if there are no fields."""
    return json.dumps(fields, ensure_ascii=False) if fields else None


def from_json(text: str | None) -> dict[str, Any]:
    """The fields of a JSON text that `to_json` made."""
    found: dict[str, Any] = json.loads(text) if text else {}
    return found
