"""Front matter: metadata at the beginning of a Markdown file, in YAML between lines `---` or in TOML between lines `+++`."""

import re
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from realm.text.fields import NO_FIELDS

_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\n(.*?\n)?\1[ \t]*(?:\n|\Z)", re.DOTALL)
_TITLE = re.compile(r"^title[ \t]*[:=][ \t]*(.+)$", re.MULTILINE)
_LONGEST = 100_000
"""Longest front matter in characters whose fields are read; the time for YAML grows with the length."""


class FrontMatter(NamedTuple):
    """The title, and all metadata with the title; the title is "" if the front matter has none."""

    title: str = ""
    fields: Mapping[Any, Any] = NO_FIELDS


def split_front_matter(source: str) -> tuple[FrontMatter, str]:
    """The front matter of a Markdown text, and the rest of the text.

    If the front matter is not valid YAML or TOML, or not a mapping, it has no fields, and the title is that of its first line
    `title: ...`.
    """
    found = _FRONT_MATTER.match(source)
    if found is None:
        return FrontMatter(), source
    content, rest = found[2] or "", source[found.end() :]
    fields = _parsed(content, toml=found[1] == "+++")
    title = fields.get("title")
    if isinstance(title, str | int | float) and not isinstance(title, bool):
        return FrontMatter(" ".join(str(title).split()), fields), rest
    named = _TITLE.search(content)
    return FrontMatter(named[1].strip().strip("\"'") if named else "", fields), rest


def _parsed(content: str, toml: bool) -> Mapping[Any, Any]:
    if len(content) > _LONGEST:
        return NO_FIELDS
    try:
        found = tomllib.loads(content) if toml else yaml.load(content, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError):
        return NO_FIELDS
    return found if isinstance(found, Mapping) else NO_FIELDS


class _Loader(yaml.SafeLoader):
    """Reads YAML without aliases, because a few lines of nested aliases stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)
