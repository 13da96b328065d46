"""Leaves out documents that are nearly equal to an earlier document, with MinHash and locality-sensitive hashing (Broder 1997).

The similarity of two documents is the Jaccard similarity of their sequences of five words: the number of sequences that occur
in both documents, divided by the number of sequences that occur in at least one of them. It is estimated from 128 hash values
per document, so the standard error is at most 4.4 points. Each document needs about 7 kB of memory.
"""

import zlib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec

import numpy as np

from realm.documents.formats.records import Reason, Unreadable
from realm.documents.reading import ReadingReport
from realm.errors import InputError
from realm.text.corpus import Document

WORDS = 5
"""Number of words of a sequence. A document with fewer words has one sequence, which has all its words."""
HASHES = 128


def without_near_duplicates(
    documents: Iterable[Document], similarity: float, report: ReadingReport | None
) -> Iterator[Document]:
    """The documents, without those whose similarity to an earlier document that was kept is at least `similarity` (0 to 1).

    The text is compared without case, punctuation and titles. Documents that are left out are counted and listed in `report`.

    Raises:
        InputError: datasketch is not installed.
    """
    if find_spec("datasketch") is None:
        raise InputError("near_duplicates needs datasketch: pip install 'realm-lm[documents]'")
    from datasketch import MinHash, MinHashLSH

    # Most weight is on false negatives, because a pair that is found is compared once more by all hash values.
    near = MinHashLSH(threshold=similarity, num_perm=HASHES, weights=(0.1, 0.9))
    hashes: dict[str, np.ndarray] = {}
    for document in documents:
        found = MinHash(num_perm=HASHES, hashfunc=zlib.crc32)
        found.update_batch(_sequences(document.text))
        own = found.hashvalues.astype(np.uint32)
        best = max(
            ((float(np.mean(hashes[other] == own)), other) for other in near.query(found)), default=(0.0, "")
        )
        if best[0] >= similarity:
            if report is not None:
                report.documents -= 1
                report.leave_out(
                    Unreadable(
                        document.id,
                        Reason.NEAR_DUPLICATE,
                        f"{document.id}: similarity of about {best[0]:.2f} to {best[1]}",
                    )
                )
            continue
        near.insert(document.id, found, check_duplication=False)
        hashes[document.id] = own
        yield document


def _sequences(text: str) -> list[bytes]:
    words = "".join(one if one.isalnum() else " " for one in text.lower()).split()
    last = max(1, len(words) - WORDS + 1)
    return [" ".join(words[start : start + WORDS]).encode(errors="replace") for start in range(last)]
