"""Passages as rows of a table, and as the arrays of wordpieces that training reads.

A row holds a passage twice: in characters (title, text, sentences, salient spans) and in wordpieces (ids, the first wordpiece
of each sentence, the wordpieces of each span). A row also has the titles of the pages to which the passage links, if these are
known. Passages are tokenized when they are added to a knowledge base. Only passages of a converted checkpoint, which are
millions and already have vectors, are tokenized when their wordpieces are needed.

Keys (`realm.keys`) are the 16 hex digits of a passage id as a number, or the key of a document id.

After the columns of `SCHEMA`, a table can have columns with the values of the documents' fields (`realm.store.fields.columns`).
"""

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import lance
import numpy as np
import pyarrow as pa

from realm.keys import hex_id, key_of
from realm.progress import progress
from realm.store.fields.columns import typed_columns
from realm.store.mapped_arrays import Arrays, mapped_arrays
from realm.text.corpus import Document, Passage, Span
from realm.text.fields import Fields, from_json, to_json
from realm.tokens.layouts import Ragged
from realm.tokens.sentences import SentenceTokenizer
from realm.tokens.tokenizer import Tokenizer

LINKS = "links"
FIELDS = "fields"
FIELDS_KEY = "fields_key"
_NUMBERS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        ("id", pa.uint64()),
        ("document_key", pa.uint64()),
        ("document_state", pa.uint64()),  # hash of the document's title, text and sections
        # Number of different passages of the document. Passages that are stored under another document count too, because equal
        # passages of several documents are stored only once, under one of these documents.
        ("document_passages", pa.int32()),
        ("document_id", pa.string()),
        ("title", pa.string()),
        ("text", pa.string()),
        # Positions of characters in `text`; ends are exclusive.
        ("sentence_starts", _NUMBERS),
        ("sentence_ends", _NUMBERS),
        ("span_starts", _NUMBERS),
        ("span_ends", _NUMBERS),
        ("span_labels", pa.list_(pa.string())),
        # Titles of the linked pages; null if the links are unknown.
        (LINKS, pa.list_(pa.string())),
        # Ids and positions of wordpieces.
        ("title_ids", _NUMBERS),
        ("body_ids", _NUMBERS),
        ("sentence_pieces", _NUMBERS),
        ("span_first_pieces", _NUMBERS),
        ("span_end_pieces", _NUMBERS),
        # Fields of the document as JSON, and their key; null if the document has no fields.
        (FIELDS, pa.string()),
        (FIELDS_KEY, pa.uint64()),
    ]
)
PASSAGE_COLUMNS = (
    "id",
    "document_id",
    "title",
    "text",
    "sentence_starts",
    "sentence_ends",
    "span_starts",
    "span_ends",
    "span_labels",
    LINKS,
    FIELDS,
)
TOKEN_COLUMNS = ("title_ids", "body_ids", "sentence_pieces", "span_first_pieces", "span_end_pieces")
"""Columns of wordpieces, in the order of the fields of `PassageTokens`."""


class PassageTokens(NamedTuple):
    """Wordpieces by passage number, int32, without special tokens."""

    title: Ragged
    body: Ragged
    sentences: Ragged
    """First wordpiece of each sentence in the body."""
    span_starts: Ragged
    """First wordpiece that lies completely inside each salient span; spans without a complete wordpiece are left out."""
    span_ends: Ragged
    """Position after the last wordpiece of each salient span."""


class MappedTokens(PassageTokens):
    """`PassageTokens` whose arrays are mapped from files (`realm.store.mapped_arrays`)."""

    folder: Path
    """Folder of the files."""


PASSAGE_SCHEMA = pa.schema([SCHEMA.field(name) for name in ("id", *PASSAGE_COLUMNS[2:-1], *TOKEN_COLUMNS)])
"""The columns that depend only on a passage, and not on the id, the fields and the other passages of its document."""


class Owner(NamedTuple):
    """The columns of a row that describe the document of its passage."""

    document_id: str
    state: int
    passages: int
    """Number of different passages of the document."""
    fields: Fields

    @classmethod
    def of(cls, document: Document, passages: int) -> Self:
        """The owner of the passages of a document with this number of different passages."""
        return cls(document.id, state_of(document), passages, document.fields)


def state_of(document: Document) -> int:
    """Hash of title and text of a document, and of the starts and titles of its sections."""
    sections = json.dumps([one[:2] for one in document.sections]) if document.sections else ""
    return key_of(f"{len(document.title)} {document.title}{document.text}{sections}")


def fields_key_of(fields: Fields) -> int | None:
    """Hash of the fields of a document; None if the document has no fields."""
    text = to_json(fields)
    return None if text is None else key_of(text)


def fingerprint_of(keys_N: np.ndarray, tokenizer: Tokenizer) -> str:
    """Digest of the passages, their order and the tokenizer."""
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    digest.update(keys_N.astype(">u8").tobytes())
    return digest.hexdigest()[:16]


def passage_batch(
    passages: Sequence[Passage], tokenizer: Tokenizer | None, sentences: SentenceTokenizer | None = None
) -> pa.RecordBatch:
    """Passages as an Arrow batch of `PASSAGE_SCHEMA`; without a tokenizer, the columns of wordpieces are null.

    If `sentences` has counted the sentences of the passages, these are not tokenized again.
    """
    columns: dict[str, list[Any]] = {
        "id": [int(passage.id, 16) for passage in passages],
        "title": [passage.title for passage in passages],
        "text": [passage.text for passage in passages],
        "sentence_starts": [[start for start, _ in passage.sentences] for passage in passages],
        "sentence_ends": [[end for _, end in passage.sentences] for passage in passages],
        "span_starts": [[span.start for span in passage.spans] for passage in passages],
        "span_ends": [[span.end for span in passage.spans] for passage in passages],
        "span_labels": [[span.label for span in passage.spans] for passage in passages],
        LINKS: [passage.links for passage in passages],
    }
    if tokenizer is None:
        columns |= dict.fromkeys(TOKEN_COLUMNS, [None] * len(passages))
    else:
        columns |= _pieces(passages, tokenizer, sentences or SentenceTokenizer(tokenizer))
    arrays = [pa.array(columns[field.name], field.type) for field in PASSAGE_SCHEMA]
    return pa.record_batch(arrays, schema=PASSAGE_SCHEMA)


def row_batches(
    passages: Sequence[pa.RecordBatch], owners: Sequence[Owner], size: int = 512, schema: pa.Schema = SCHEMA
) -> list[pa.RecordBatch]:
    """Rows as Arrow batches of `size` rows, from batches of `PASSAGE_SCHEMA` and an owner for each of their passages.

    `schema` is the schema of the table to which the rows are added.
    """
    columns = owner_values(owners) | field_values([owner.fields for owner in owners], schema)
    of_passages = pa.Table.from_batches(passages, PASSAGE_SCHEMA)
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else of_passages.column(field.name)
        for field in schema
    ]
    rows = pa.table(arrays, schema=schema)
    # The rows of a commit are not combined into one batch, because a column of a batch has at most 2 GB of text.
    return [
        batch
        for start in range(0, len(rows), size)
        for batch in rows.slice(start, size).combine_chunks().to_batches()
    ]


def to_passages(table: pa.Table | pa.RecordBatch) -> list[Passage]:
    """Passages from rows of the table that have at least the `PASSAGE_COLUMNS`."""
    return list(map(_passage, *(_python(table.column(name)) for name in PASSAGE_COLUMNS)))


def with_fields(rows: pa.Table, fields: Sequence[Fields], schema: pa.Schema) -> pa.Table:
    """Rows with the columns of `schema` and with other fields: one item of `fields` per row."""
    values = field_values(fields, schema)
    columns = [
        pa.array(values[field.name], field.type) if field.name in values else rows.column(field.name)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def with_owners(rows: pa.Table, owners: Sequence[Owner]) -> pa.Table:
    """Rows as rows of other documents: one item of `owners` per row. The rows still have the earlier fields."""
    for name, values in owner_values(owners).items():
        field = rows.schema.field(name)
        rows = rows.set_column(rows.schema.get_field_index(name), field, pa.array(values, field.type))
    return rows


def owner_values(owners: Sequence[Owner]) -> dict[str, list[Any]]:
    """Values of the columns that identify the documents of rows: one owner per row."""
    return {
        "document_key": [key_of(owner.document_id) for owner in owners],
        "document_state": [owner.state for owner in owners],
        "document_passages": [owner.passages for owner in owners],
        "document_id": [owner.document_id for owner in owners],
    }


def field_values(fields: Sequence[Fields], schema: pa.Schema) -> dict[str, list[Any]]:
    """Values of the columns `FIELDS` and `FIELDS_KEY`, and of the typed columns of `schema`: one value per document."""
    return {
        FIELDS: [to_json(one) for one in fields],
        FIELDS_KEY: [fields_key_of(one) for one in fields],
        **typed_columns(fields, schema),
    }


def links_digest(batches: Iterable[pa.RecordBatch]) -> str:
    """Digest of the column of links; "" if no passage has links."""
    digest, known = hashlib.sha256(), False
    for batch in batches:
        for links in _python(batch.column(LINKS)):
            known = known or links is not None
            digest.update(json.dumps(links).encode())
    return digest.hexdigest()[:16] if known else ""


def load_tokens(table: lance.LanceDataset, tokenizer: Tokenizer) -> PassageTokens:
    """Loads the wordpieces of all passages into memory."""
    if table.count_rows(filter=_UNTOKENIZED):
        rows = progress(
            table.to_batches(batch_size=1024),
            total=math.ceil(table.count_rows() / 1024),
            description="tokenize",
            unit="batch",
        )
        return to_tokens(rows, tokenizer)
    return PassageTokens(*(_load_ragged(table, column) for column in TOKEN_COLUMNS))


def mapped_tokens(folder: Path, table: lance.LanceDataset, tokenizer: Tokenizer) -> MappedTokens:
    """The result of `load_tokens`, mapped from files in `folder`."""

    def make() -> Arrays:
        columns = zip(TOKEN_COLUMNS, load_tokens(table, tokenizer), strict=True)
        return {
            f"{name}_{part}": array for name, ragged in columns for part, array in ragged._asdict().items()
        }

    arrays = mapped_arrays(folder / "wordpieces", make)
    ragged = (Ragged(*(arrays[f"{name}_{part}"] for part in Ragged._fields)) for name in TOKEN_COLUMNS)
    tokens = MappedTokens(*ragged)
    tokens.folder = folder
    return tokens


def to_tokens(batches: Iterable[pa.RecordBatch], tokenizer: Tokenizer) -> PassageTokens:
    """The wordpieces of rows that have all columns of the table."""
    parts = [_tokenized(batch, tokenizer) for batch in batches]
    return PassageTokens(*(_ragged([part.column(name) for part in parts]) for name in TOKEN_COLUMNS))


_UNTOKENIZED = "body_ids IS NULL"


def _tokenized(batch: pa.RecordBatch, tokenizer: Tokenizer) -> pa.RecordBatch:
    """The `TOKEN_COLUMNS` of a batch; if these columns are null, the passages are tokenized now."""
    if batch.column("body_ids").null_count:
        batch = passage_batch(to_passages(batch), tokenizer)
    return batch.select(list(TOKEN_COLUMNS))


def _ragged(parts: Sequence[pa.Array]) -> Ragged:
    array = pa.chunked_array(parts, _NUMBERS).combine_chunks()
    lengths = array.value_lengths().to_numpy()
    return Ragged(array.flatten().to_numpy(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def _load_ragged(table: lance.LanceDataset, column: str) -> Ragged:
    # The column is read twice, the first time for the lengths only: this halves the peak memory.
    offsets = np.zeros(table.count_rows() + 1, dtype=np.int64)
    row = 0
    for batch in table.to_batches(columns=[column]):
        offsets[row + 1 : row + 1 + len(batch)] = batch.column(0).value_lengths().to_numpy()
        row += len(batch)
    np.cumsum(offsets, out=offsets)
    values = np.empty(offsets[-1], dtype=np.int32)
    start = 0
    for batch in table.to_batches(columns=[column]):
        part = batch.column(0).flatten().to_numpy()
        values[start : start + len(part)] = part
        start += len(part)
    return Ragged(values, offsets)


def _python(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """A column as Python values. Lists are cut from one list of all values, which is faster than `to_pylist` on lists.

    A list that is null becomes None.
    """
    if not pa.types.is_list(column.type):
        return column.to_pylist()
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    values = array.flatten().to_pylist()
    ends = np.cumsum(array.value_lengths().fill_null(0)).tolist()
    lists: list[Any] = [values[start:end] for start, end in pairwise([0, *ends])]
    if array.null_count:
        there = array.is_valid().to_pylist()
        lists = [one if valid else None for one, valid in zip(lists, there, strict=True)]
    return lists


def _passage(
    key: int,
    document_id: str,
    title: str,
    text: str,
    sentence_starts: Sequence[int],
    sentence_ends: Sequence[int],
    span_starts: Sequence[int],
    span_ends: Sequence[int],
    span_labels: Sequence[str],
    links: Sequence[str] | None,
    fields: str | None,
) -> Passage:
    sentences = tuple(zip(sentence_starts, sentence_ends, strict=True))
    spans = tuple(map(Span, span_starts, span_ends, span_labels))
    titles = None if links is None else tuple(links)
    return Passage(hex_id(key), document_id, title, text, sentences, spans, titles, from_json(fields))


def _pieces(
    passages: Sequence[Passage], tokenizer: Tokenizer, sentences: SentenceTokenizer
) -> dict[str, list[Any]]:
    """The columns of wordpieces of some passages."""
    bodies = sentences.encode(
        [passage.text for passage in passages], [passage.sentences for passage in passages]
    )
    spans = [
        _span_pieces(body.starts, body.ends, passage.spans)
        for body, passage in zip(bodies, passages, strict=True)
    ]
    return {
        "title_ids": tokenizer.encode([passage.title for passage in passages]),
        "body_ids": [body.ids for body in bodies],
        "sentence_pieces": [
            [bisect_left(body.starts, start) for start, _ in passage.sentences]
            for body, passage in zip(bodies, passages, strict=True)
        ],
        "span_first_pieces": [[first for first, _ in pieces] for pieces in spans],
        "span_end_pieces": [[end for _, end in pieces] for pieces in spans],
    }


def _span_pieces(starts: Sequence[int], ends: Sequence[int], spans: Sequence[Span]) -> list[tuple[int, int]]:
    pieces = [(bisect_left(starts, span.start), bisect_right(ends, span.end)) for span in spans]
    return [(first, end) for first, end in pieces if first < end]
