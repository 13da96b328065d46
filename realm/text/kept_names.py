"""Keeps what a tagger found in each text, so that a later build tags only new and changed texts.

The annotations are in the SQLite database `names.sqlite` in the user's cache folder (`realm.kept_values`). A key is a hash of
the tagger, its rules and the text, and a value has only positions and labels, so the database contains no text.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from realm.kept_values import KeptValues
from realm.text.corpus import Annotations, Span

if TYPE_CHECKING:
    from realm.text.salient_spans import Tagger

DATABASE = "names.sqlite"
WINDOW, WINDOW_CHARS = 20_000, 16_000_000
"""Approximate limits of texts and of characters that are looked up together. The tagger starts its processes once for these."""
_log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """The folder `REALM_CACHE`, by default the folder `realm` in the user's cache folder; None if `REALM_CACHE` is empty, or if
    the user has no home folder."""
    named = os.environ.get("REALM_CACHE")
    if named is not None:
        return Path(named) if named else None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "realm"
    except RuntimeError:
        return None


class KeepingTagger:
    """A tagger that finds the annotations of known texts in a database, and adds those of new texts.

    `identity` differs between two taggers if their annotations can differ.
    """

    def __init__(self, tagger: Tagger, identity: str, folder: Path):
        self.name = tagger.name
        self._tagger, self._folder = tagger, folder
        self._identity = hashlib.sha256(identity.encode()).digest()

    def annotate(self, texts: Iterable[str]) -> Iterator[Annotations]:
        texts = iter(texts)
        number = known = 0
        end: Exception | None = None
        kept = KeptValues(self._folder / DATABASE, "names", "all texts are tagged")
        with closing(kept):
            while end is None:
                window, end = _window(texts)
                keys = [self._key(text) for text in window]
                values = map(kept.find, keys)
                found = [
                    None if value is None else _decoded(value, len(text))
                    for value, text in zip(values, window, strict=True)
                ]
                new = self._tagger.annotate(
                    text for text, one in zip(window, found, strict=True) if one is None
                )
                number, known = number + len(window), known + sum(one is not None for one in found)
                for key, one in zip(keys, found, strict=True):
                    if one is None:
                        one = next(new)
                        kept.keep(key, _encoded(one))
                    yield one
        if known:
            _log.info(
                "%s: names and dates of %d of %d texts are known", self._folder / DATABASE, known, number
            )
        if not isinstance(end, StopIteration):
            raise end

    def _key(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(), digest_size=16, key=self._identity).digest()


def _window(texts: Iterator[str]) -> tuple[list[str], Exception | None]:
    """The next texts; and, after the last text, the exception that ended `texts`. Texts before an error are tagged too."""
    window: list[str] = []
    characters = 0
    while len(window) < WINDOW and characters < WINDOW_CHARS:
        try:
            text = next(texts)
        except Exception as end:
            return window, end
        window.append(text)
        characters += len(text)
    return window, None


def _encoded(found: Annotations) -> bytes:
    return zlib.compress(json.dumps(found, separators=(",", ":")).encode())


def _decoded(data: bytes, length: int) -> Annotations | None:
    """Annotations from a value of the database; None if the value is damaged, or has positions outside of the text."""
    try:
        sentences, spans = json.loads(zlib.decompress(data))
        found = Annotations(
            tuple((start, end) for start, end in sentences), tuple(Span(*span) for span in spans)
        )
        bounds = (*found.sentences, *((span.start, span.end) for span in found.spans))
        inside = all(0 <= start < end <= length for start, end in bounds)
        return found if inside else None
    except (zlib.error, ValueError, TypeError, RecursionError):
        return None
