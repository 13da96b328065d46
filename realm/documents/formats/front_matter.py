"""Front matter: metadata at the beginning of a Markdown file, in YAML between lines `---` or in TOML between lines `+++`."""

import re
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from realm.text.fields import NO_FIELDS

_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\n(.*?\n)?\1[ \t]*(?:\n|\Z)", re.DOTALL)
_KEY = re.compile(r"\s*[\w\"'][^\n:=]*[:=]")
_TITLE = re.compile(r"^title[ \t]*[:=][ \t]*(.+)$", re.MULTILINE)
_LONGEST, _LONGEST_TOML = 100_000, 10_000
"""Longest front matter in characters whose fields are read. The time for YAML grows with the length, the memory for TOML with
its square."""


class FrontMatter(NamedTuple):
    """The title, and all metadata with the title; the title is "" if the front matter has none."""

    title: str = ""
    fields: Mapping[Any, Any] = NO_FIELDS


def split_front_matter(source: str) -> tuple[FrontMatter, str]:
    """The front matter of a Markdown text, and the rest of the text.

    A line `---` can also be a rule: a block that is not empty and no mapping is text. If a block that begins with a key is not
    valid YAML or TOML, it has no fields, and the title is that of its first line `title: ...`.
    """
    found = _FRONT_MATTER.match(source)
    if found is None:
        return FrontMatter(), source
    content, rest = found[2] or "", source[found.end() :]
    fields = _parsed(content, toml=found[1] == "+++")
    if fields is None:
        return FrontMatter(), source
    title = fields.get("title")
    if isinstance(title, str | int | float) and not isinstance(title, bool):
        return FrontMatter(" ".join(str(title).split()), fields), rest
    named = _TITLE.search(content)
    return FrontMatter(named[1].strip().strip("\"'") if named else "", fields), rest


def _parsed(content: str, toml: bool) -> Mapping[Any, Any] | None:
    """The metadata of a block; None if the block is text."""
    if not content:
        return NO_FIELDS
    if not (toml or content.partition("\n")[0].strip()):  # as in Pandoc, a blank line follows a rule
        return None
    unread = NO_FIELDS if _KEY.match(content) else None
    if len(content) > (_LONGEST_TOML if toml else _LONGEST):
        return unread
    try:
        found = tomllib.loads(content) if toml else yaml.load(content, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError):
        return unread
    return found if isinstance(found, Mapping) else None


class _Loader(yaml.SafeLoader):
    """Reads YAML without aliases, because a few lines of nested aliases stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)
