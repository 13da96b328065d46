"""Verifies a whole knowledge base: compares every file with its digest, then checks the consistency of the rows.

The passages are read once. Verification needs about 20 bytes of memory per passage, and memory for the newest vectors of one
model at a time.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa

from realm.errors import RealmError
from realm.keys import hex_id, key_of
from realm.progress import progress
from realm.store import vectors as vectors_table
from realm.store.ingest import TABLE
from realm.store.merged import MERGED
from realm.store.schema import FIELDS, field_values, fingerprint_of
from realm.store.tables.digests import changed_lines
from realm.store.tables.table import damaged_files, open_table
from realm.text.corpus import passage_id
from realm.text.fields import from_json
from realm.tokens.tokenizer import Tokenizer


def problems(folder: Path, table: lance.LanceDataset, tokenizer: Tokenizer) -> list[str]:
    """A line for each problem of a knowledge base. The rows of a table are not checked if files of the table are damaged."""
    keys_N = np.zeros(0, dtype=np.uint64)
    found = damaged_files(table, folder / TABLE)
    if not found:
        keys_N = table.to_table(columns=["id"]).column("id").to_numpy()
        found = list(_passages(table, keys_N, tokenizer.vocab_size))
    found += changed_lines(folder / MERGED)
    fingerprint = fingerprint_of(keys_N, tokenizer)
    for index in vectors_table.folders(folder):
        found += (f"{index.relative_to(folder)}: {what}" for what in _vectors(index, keys_N, fingerprint))
    return found


def lagging(folder: Path, keys_N: np.ndarray, fingerprint: str) -> list[str]:
    """A line for each index that lacks the vectors of passages that were added later; the next search embeds these passages."""
    found = []
    for index in vectors_table.folders(folder):
        try:
            info = vectors_table.info_of(index)
            vectors = vectors_table.read(index, keys_N) if info and info.corpus != fingerprint else None
        except RealmError:  # the index is damaged, and `problems` reports the damage
            continue
        if vectors is not None and len(vectors.missing):
            found.append(
                f"{index.relative_to(folder)} is incomplete: {len(vectors.missing)} of {len(keys_N)} passages have no "
                f"vector in version {vectors.version}; `realm index` embeds these passages"
            )
    return found


def _passages(table: lance.LanceDataset, keys_N: np.ndarray, vocab_size: int) -> Iterator[str]:
    _, first, count = np.unique(keys_N, return_index=True, return_counts=True)
    yield from _report("have the same id as another passage", first[count > 1], keys_N)
    checks: dict[str, Callable[[pa.RecordBatch], np.ndarray]] = {
        "have an id that is not the hash of their title and text": _wrong_id,
        "have a document key that is not the hash of their document id": _wrong_document_key,
        "have sentences or spans outside their text": _outside_text,
        "have wordpieces that are not in the vocabulary": lambda batch: _unknown_pieces(batch, vocab_size),
        "have sentences or spans outside their wordpieces": _outside_pieces,
        "have fields that differ from the columns of fields": _wrong_fields,
    }
    failed: dict[str, list[int]] = {what: [] for what in checks}
    row = 0
    with progress(total=len(keys_N), description="verify passages", unit="passage") as bar:
        for batch in table.to_batches(batch_size=4096):
            for what, check in checks.items():
                failed[what] += (np.flatnonzero(check(batch)) + row).tolist()
            row += len(batch)
            bar.update(len(batch))
    for what, numbers in failed.items():
        yield from _report(what, np.array(numbers, dtype=np.int64), keys_N)


def _vectors(folder: Path, keys_N: np.ndarray, fingerprint: str) -> Iterator[str]:
    path = folder / vectors_table.TABLE
    try:
        table = open_table(path)
        damage = damaged_files(table, path)
        vectors = None if damage else vectors_table.read(folder, keys_N)
    except RealmError as error:
        yield str(error)
        return
    yield from damage
    if vectors is None or len(keys_N) == 0:  # vectors or passages cannot be read
        return
    info, version = vectors.info, f"vectors version {vectors.version}"
    if not info.model:
        yield f"{version} has no fingerprint of the model that computed the vectors: run `realm index`"
    if info.corpus == fingerprint:  # an index of earlier passages is reported by `lagging`
        yield from _report(
            f"have no vector in version {vectors.version}: run `realm index`", vectors.missing, keys_N
        )
    bad = vectors_table.not_finite(vectors.array)
    yield from _report(f"have a vector with a NaN or an infinity in version {vectors.version}", bad, keys_N)


def _report(what: str, numbers: np.ndarray, keys_N: np.ndarray) -> Iterator[str]:
    if len(numbers):
        examples = ", ".join(f"{hex_id(keys_N[number])} (number {number})" for number in numbers[:3])
        yield f"{len(numbers)} passages {what}: {examples}{', ...' if len(numbers) > 3 else ''}"


# The result of each of the following checks is True for the passages of a batch that fail the check -> [B] bool.


def _wrong_id(batch: pa.RecordBatch) -> np.ndarray:
    titles, texts = (batch.column(name).to_pylist() for name in ("title", "text"))
    right = [int(passage_id(title, text), 16) for title, text in zip(titles, texts, strict=True)]
    return np.array(right, dtype=np.uint64) != batch.column("id").to_numpy()


def _wrong_document_key(batch: pa.RecordBatch) -> np.ndarray:
    right = [key_of(name) for name in batch.column("document_id").to_pylist()]
    return np.array(right, dtype=np.uint64) != batch.column("document_key").to_numpy()


def _wrong_fields(batch: pa.RecordBatch) -> np.ndarray:
    columns = field_values(list(map(from_json, batch.column(FIELDS).to_pylist())), batch.schema)
    right_B = np.ones(len(batch), dtype=bool)
    for name, values in columns.items():
        pairs = zip(values, batch.column(name).to_pylist(), strict=True)
        right_B &= [mine == stored for mine, stored in pairs]
    return ~right_B


def _outside_text(batch: pa.RecordBatch) -> np.ndarray:
    length_B = np.array([len(text) for text in batch.column("text").to_pylist()])
    sentences_B = _outside(batch, "sentence_starts", "sentence_ends", length_B)
    return sentences_B | _outside(batch, "span_starts", "span_ends", length_B)


def _outside_pieces(batch: pa.RecordBatch) -> np.ndarray:
    length_B = _lengths(batch.column("body_ids"))
    sentences_B = _outside(batch, "sentence_pieces", "sentence_pieces", length_B)
    return sentences_B | _outside(batch, "span_first_pieces", "span_end_pieces", length_B)


def _unknown_pieces(batch: pa.RecordBatch, vocab_size: int) -> np.ndarray:
    last_B = np.full(len(batch), vocab_size - 1)
    return _outside(batch, "title_ids", "title_ids", last_B) | _outside(batch, "body_ids", "body_ids", last_B)


def _outside(batch: pa.RecordBatch, starts: str, ends: str, length_B: np.ndarray) -> np.ndarray:
    """True for the rows in which a range violates 0 <= start <= end <= length, or a start has no end -> [B] bool."""
    first, last = batch.column(starts), batch.column(ends)
    counts_B = _lengths(first)
    failed_B = counts_B != _lengths(last)
    if failed_B.any():
        return failed_B
    row = np.repeat(np.arange(len(batch)), counts_B)
    start, end = first.flatten().to_numpy(), last.flatten().to_numpy()
    failed_B[row[(start < 0) | (end < start) | (end > length_B[row])]] = True
    return failed_B


def _lengths(column: pa.ListArray) -> np.ndarray:
    """Lengths of the lists in a column; 0 for passages that are not tokenized yet."""
    return column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
