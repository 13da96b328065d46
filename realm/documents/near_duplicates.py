"""Leaves out documents that are nearly equal to an earlier document, with MinHash and locality-sensitive hashing (Broder 1997).

The similarity of two documents is the Jaccard similarity of their sequences of five words: the number of sequences that occur
in both documents, divided by the number of sequences that occur in at least one of them. It is estimated from 128 hash values
per document, so the standard error is at most 4.4 points. The hash values are in a temporary file (`realm.keys`), so the memory
does not grow with the number of documents.
"""

import re
import zlib
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from importlib.util import find_spec

import numpy as np

from realm.documents.formats.records import Reason, Unreadable
from realm.documents.reading import ReadingReport
from realm.errors import InputError
from realm.keys import TemporaryDatabase
from realm.text.corpus import Document

WORDS = 5
"""Number of words of a sequence. A document with fewer words has one sequence, which has all its words."""
HASHES = 128
_WORD = re.compile(r"[^\W_]+")
_TABLES = (
    "CREATE TABLE documents (number INTEGER PRIMARY KEY, id TEXT, hashes BLOB)",
    "CREATE TABLE bands (band INTEGER, number INTEGER, PRIMARY KEY (band, number)) WITHOUT ROWID",
)
_WITH_A_BAND = "SELECT DISTINCT id, hashes FROM bands JOIN documents USING (number) WHERE band IN"


def without_near_duplicates(
    documents: Iterable[Document], similarity: float, report: ReadingReport | None
) -> Iterator[Document]:
    """The documents, without those whose similarity to an earlier document that was kept is at least `similarity` (0 to 1).

    The text is compared without case, punctuation and titles. Documents that are left out are counted and listed in `report`.

    Raises:
        InputError: datasketch is not installed.
        WriteFailed: the temporary file cannot be written.
    """
    if find_spec("datasketch") is None:
        raise InputError("near_duplicates needs datasketch: pip install 'realm-lm[documents]'")
    from datasketch import MinHash, MinHashLSH

    count, size = 1, HASHES
    if similarity < 1:
        # A band is a group of hash values. Two documents with an equal band are compared by all hash values. This comparison
        # finds false positives, so the bands are chosen to give few false negatives.
        near = MinHashLSH(threshold=similarity, num_perm=HASHES, weights=(0.1, 0.9))
        count, size = near.b, near.r
    empty = MinHash(num_perm=HASHES, hashfunc=zlib.crc32)
    with TemporaryDatabase(*_TABLES) as kept:
        for number, document in enumerate(documents):
            found = empty.copy()  # a new one would draw the same 128 hash functions again
            found.update_batch(_sequences(document.text))
            own = found.hashvalues.astype(np.uint32)
            bands = [_key(place, own[place : place + size]) for place in range(0, count * size, size)]
            marks = ", ".join("?" * len(bands))
            others = kept.rows(f"{_WITH_A_BAND} ({marks})", *bands)
            score, other = max(
                ((float(np.mean(np.frombuffer(hashes, np.uint32) == own)), name) for name, hashes in others),
                default=(0.0, ""),
            )
            if score >= similarity:
                if report is not None:
                    report.documents -= 1
                    problem = f"{document.id}: similarity of about {score:.2f} to {other}"
                    report.leave_out(Unreadable(document.id, Reason.NEAR_DUPLICATE, problem))
                continue
            kept.execute("INSERT INTO documents VALUES (?, ?, ?)", number, document.id, own.tobytes())
            for band in bands:
                kept.execute("INSERT INTO bands VALUES (?, ?)", band, number)
            yield document


def _key(place: int, band: np.ndarray) -> int:
    """A key of the hash values from `place` on, as a signed number of 64 bits."""
    key = blake2b(band.tobytes(), digest_size=8, salt=place.to_bytes(2)).digest()
    return int.from_bytes(key, signed=True)


def _sequences(text: str) -> list[bytes]:
    words = _WORD.findall(text.lower())
    last = max(1, len(words) - WORDS + 1)
    return [" ".join(words[start : start + WORDS]).encode(errors="replace") for start in range(last)]
