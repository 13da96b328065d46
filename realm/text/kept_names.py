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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from realm.kept_values import KeptValues
from realm.keys import KeyTable
from realm.text.corpus import Annotations, Span
from realm.text.tagger_groups import Asked, GroupTagger, Result, Work

DATABASE = "names.sqlite"
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


class KeepingTagger(GroupTagger):
    """A tagger that finds the annotations of known texts in a database, and adds those of new texts.

    `identity` differs between two taggers if their annotations can differ.
    """

    def __init__(self, tagger: GroupTagger, identity: str, folder: Path):
        self.name = tagger.name
        self._tagger, self._folder = tagger, folder
        self._identity = hashlib.sha256(identity.encode()).digest()

    def apply(
        self, documents: Iterable[Asked], prepare: Callable[[], Work[Result]]
    ) -> Generator[Result, None, None]:
        number = known = 0
        kept = KeptValues(self._folder / DATABASE, "names", "all texts are tagged")
        keys: deque[bytes | None] = deque()  # of the documents without a result; None for a known text

        def looked_up() -> Iterator[Asked]:
            nonlocal number, known
            for document, found in documents:
                key = self._key(document.text)
                short = int.from_bytes(key[:8])
                # A text that was new in this call stays new: whether its annotations are kept by now depends on the speed of
                # the processes, and other groups would be rounded differently.
                if found is None and new.get(short) is None and (value := kept.find(key)) is not None:
                    found = _decoded(value, len(document.text))
                if found is None:
                    new.put(short)
                keys.append(key if found is None else None)
                number, known = number + 1, known + (found is not None)
                yield Asked(document, found)

        with closing(kept), KeyTable() as new:
            for annotations, result in self._tagger.apply(looked_up(), partial(_with_annotations, prepare)):
                for one in annotations:
                    key = keys.popleft()
                    if key is not None:
                        kept.keep(key, _encoded(one))
                yield result
        if known:
            _log.info(
                "%s: names and dates of %d of %d texts are known", self._folder / DATABASE, known, number
            )

    def _key(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(), digest_size=16, key=self._identity).digest()


def _with_annotations(
    prepare: Callable[[], Work[Result]],
) -> Work[tuple[Sequence[Annotations], Result]]:
    work = prepare()
    return lambda documents, found: (found, work(documents, found))


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
