"""Converts an open-QA checkpoint to a model and a knowledge base, and back.

    OUT/model    the networks
    OUT/kb       a passage for each block, and an index with the vectors of the checkpoint

The texts of the checkpoint have no titles, although their vectors were computed with titles. So the title of a block is empty.
If an earlier block has the same text, the title is one such as "block 4711", because knowledge bases store equal passages once.
Each block is a document, whose id is the number of the block (from 0). Without a tagger, a block is a single sentence.

Reading blocks needs about 30 bytes of memory per block, and memory for `BLOCKS_AT_ONCE` blocks.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import torch

from realm.errors import InputError
from realm.folders import is_new, what_it_is
from realm.index.versions import index_folder, publish
from realm.interop.block_records import BlockRecords, write_records
from realm.interop.checkpoint import CLASSES, RECORDS, open_checkpoint
from realm.interop.export import Lazy, check_exportable, kinds_of, write_checkpoint
from realm.interop.weight_names import convert
from realm.model.folder import Model, load_model, new_folder, save_model
from realm.model.manifest import is_model
from realm.model.tensor_files import floats
from realm.progress import progress
from realm.store import vectors
from realm.store.ingest import (
    TABLE,
    ReadSoFar,
    after,
    annotated,
    check_target,
    commit_rows,
    how_far,
    interrupted,
    put_in_place,
    unfinished_folder,
)
from realm.store.knowledge_base import KnowledgeBase
from realm.store.schema import Owner, passage_batch, row_batches, state_of
from realm.store.settings import KnowledgeBaseConfig, Settings
from realm.store.tables.table import newest_version
from realm.text.corpus import Annotations, Document, Passage, passage_id
from realm.text.salient_spans import Tagger
from realm.tokens.tokenizer import Tokenizer

BLOCKS_AT_ONCE = 1 << 18
"""Blocks per commit and per file. After a kill, the conversion reads at most this number of blocks again."""


class ConvertedJson(TypedDict):
    """Report of `realm convert` for a checkpoint. The optional keys are present if a knowledge base was made."""

    kind: str
    model: str
    kb: NotRequired[str]
    passages: NotRequired[int]
    version: NotRequired[int]
    """Version of the index."""
    dead_weights: list[str]
    """Names of tensors that no computation uses, and that were left out."""
    notes: list[str]


class ExportedJson(TypedDict):
    """Report of `realm convert --to huggingface-realm`."""

    out: str
    classes: dict[str, str]
    """Folder -> class of transformers that loads it."""


def convert_checkpoint(
    name: str,
    out: Path,
    encoder: str | None = None,
    embedder: str | None = None,
    *,
    tokenizer: str | None = None,
    bits: int = 32,
    tagger: Tagger | None = None,
    model_only: bool = False,
) -> ConvertedJson:
    """Converts a checkpoint to a model and, if the checkpoint has texts and vectors, to a knowledge base -> a report.

    With `model_only`, texts and vectors are left out, and `out` is the folder of the model.

    A repeated call continues an interrupted call. An open-QA checkpoint in TensorFlow's format becomes only a model, because
    neither its vectors nor its texts are read.

    Raises:
        InputError: as in `open_checkpoint` and `convert`; or the numbers of texts and vectors differ, or `out` contains
            files that are not of this conversion.
    """
    checkpoint = open_checkpoint(name, tokenizer)
    others = (open_checkpoint(other, tokenizer) if other else None for other in (encoder, embedder))
    conversion = convert(checkpoint, *others)
    if model_only or "block_emb" not in checkpoint.tensors:
        if tagger is not None or bits != 32:
            raise InputError(
                f"--bits and --tagger are for texts and vectors, which are not read from {name}: leave them out"
            )
        _save(conversion.model, out)
        return {
            "kind": checkpoint.kind,
            "model": str(out),
            "dead_weights": conversion.dead,
            "notes": conversion.notes,
        }
    if what := what_it_is(out):
        raise InputError(f"{out} is {what}: give another folder, for a model and a knowledge base")
    records, block_emb = BlockRecords(checkpoint.folder / RECORDS), checkpoint.tensors["block_emb"]
    shape = (len(records), checkpoint.config["retriever_proj_size"])
    if tuple(block_emb.shape) != shape:
        raise InputError(
            f"{name} has {len(records)} texts, and block_emb of shape {tuple(block_emb.shape)}: {shape} was expected"
        )
    vector_ND = floats(name, "block_emb", block_emb)
    _save(conversion.model, out / "model")
    kb = import_blocks(out / "kb", records, name, conversion.model.tokenizer, tagger)
    version = _publish(kb, conversion.model, str(out / "model"), vector_ND, bits)
    return {
        "kind": checkpoint.kind,
        "model": str(out / "model"),
        "kb": str(out / "kb"),
        "passages": len(kb),
        "version": version,
        "dead_weights": conversion.dead,
        "notes": conversion.notes,
    }


def import_blocks(
    target: Path, records: BlockRecords, source: str, tokenizer: Tokenizer, tagger: Tagger | None = None
) -> KnowledgeBase:
    """Makes a knowledge base with a passage for each record, in order. The passages are not tokenized yet.

    An interrupted import of the same records continues after its last commit. A finished knowledge base is returned unchanged.

    Raises:
        InputError: the records are damaged or have changed since an earlier import, or `target` contains files that
            are not of this import.
    """
    config = KnowledgeBaseConfig(tokenizer="", sources=(source,), tagger=tagger.name if tagger else "")
    if newest_version(target / TABLE) is not None:
        kb = KnowledgeBase.open(target)
        if kb.config == config and len(kb) == len(records):
            if any(int(one) != other for one, other in zip(kb.keys_N, _keys(records), strict=True)):
                raise InputError(f"{target} has other texts than {records.path}: give another folder")
            return kb
    check_target(target, replace=False)
    settings = Settings(config, tokenizer.fingerprint)
    work = unfinished_folder(target)
    table = interrupted(work, settings)
    read = how_far(table)
    stream = after(read, _documents(records), work)
    with progress(total=len(records), description="blocks", unit="block") as bar:
        bar.update(read.documents)
        while read.documents < len(records):
            counted = _Counted(islice(stream, BLOCKS_AT_ONCE), read)
            table = commit_rows(
                work, table, _batches(counted, tagger, bar), tokenizer, settings, counted.so_far
            )
            read = counted.so_far()
    table = table or commit_rows(work, None, [], tokenizer, settings, lambda: read)
    put_in_place(work, target)
    return KnowledgeBase.open(target)


def export_model(source: str, out: Path, kb: str | None = None) -> ExportedJson:
    """Writes a model as folders that transformers 4.57.6 loads. With a knowledge base, an open-QA checkpoint is written too.

    Raises:
        InputError: the classes of transformers cannot compute the model, the knowledge base has no complete index of the model,
            or `out` is not empty.
    """
    model = load_model(source)
    check_exportable(model)
    if kb is not None and model.span_reader is None:
        raise InputError(
            f"{source} has no span reader, which an open-QA folder needs: train one with `realm finetune`"
        )
    kinds = kinds_of(model)
    opened = KnowledgeBase.open(kb) if kb else None
    found = _vectors_of(opened, model, source) if opened else None
    with new_folder(out) as aside:
        for kind in kinds:
            write_checkpoint(model, kind, aside / kind)
        if opened is not None and found is not None:
            array_ND = found.array
            parts = (array_ND[start : start + 8192] for start in range(0, len(array_ND), 8192))
            write_checkpoint(model, "openqa", aside / "openqa", Lazy(array_ND.shape, parts))
            write_records(aside / "openqa" / RECORDS, (passage.text for passage in opened), len(opened))
            kinds.append("openqa")
    return {"out": str(out), "classes": {kind: CLASSES[kind] for kind in kinds}}


def _vectors_of(kb: KnowledgeBase, model: Model, source: str) -> vectors.Vectors:
    kb.check_tokenizer(model.tokenizer, source)
    found = vectors.mapped(index_folder(kb, model), kb.keys_N)
    if found is None or len(found.missing):
        raise InputError(
            f"{kb.folder} has no complete index of {source}: run `realm index --kb {kb.folder} --model {source}`"
        )
    return found


class _Counted:
    """Iterates over documents and counts them."""

    def __init__(self, documents: Iterable[Document], read: ReadSoFar):
        self._documents, self._read = documents, read

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents:
            self._read = self._read.past(document)
            yield document

    def so_far(self) -> ReadSoFar:
        return self._read


def _documents(records: BlockRecords) -> Iterator[Document]:
    """A document per record. The title is empty, or "block N" if an earlier block has the same text."""
    again = _repeated(records)
    place = 0
    for number, text in enumerate(records):
        repeated = place < len(again) and again[place] == number
        place += repeated
        yield Document(f"block {number}" if repeated else "", text, str(number))


def _repeated(records: BlockRecords) -> np.ndarray:
    """Ascending numbers of the records whose text equals that of an earlier record. All records are read once."""
    keys_N = np.empty(len(records), dtype=np.uint64)
    for number, text in enumerate(progress(records, total=len(records), description="survey", unit="block")):
        keys_N[number] = int(passage_id("", text), 16)
    order_N = np.argsort(keys_N, kind="stable")
    sorted_N = keys_N[order_N]
    return np.sort(order_N[1:][sorted_N[1:] == sorted_N[:-1]])


def _keys(records: BlockRecords) -> Iterator[int]:
    """The keys of the passages of all records."""
    return (int(passage_id(document.title, document.text), 16) for document in _documents(records))


def _batches(documents: Iterable[Document], tagger: Tagger | None, bar: Any) -> Iterator[pa.RecordBatch]:
    """Rows of untokenized passages."""
    passages: list[Passage] = []
    owners: list[Owner] = []

    def rows() -> list[pa.RecordBatch]:
        batches = row_batches([passage_batch(passages, None)], owners, 1024)
        bar.update(len(passages))
        passages.clear()
        owners.clear()
        return batches

    untagged = ((one, Annotations(((0, len(one.text)),) if one.text else (), ())) for one in documents)
    tagging: AbstractContextManager[Iterator[tuple[Document, Annotations]]] = (
        annotated(documents, tagger) if tagger else nullcontext(untagged)
    )
    with tagging as found:
        for document, (sentences, spans) in found:
            title, text, name, *_ = document
            passages.append(Passage(passage_id(title, text), name, title, text, sentences, spans))
            owners.append(Owner(name, state_of(document), 1, document.fields))
            if len(passages) == 1024:
                yield from rows()
    if passages:
        yield from rows()


def _save(model: Model, folder: Path) -> None:
    """Saves the model, unless `folder` already contains this model."""
    if is_model(folder) and _are_equal(model, load_model(folder)):
        return
    if not is_new(folder):
        raise InputError(f"{folder} exists and is not the model of this conversion: give another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, folder)


def _are_equal(one: Model, other: Model) -> bool:
    """Whether two models have the same history, tokenizer and weights."""
    states, others = (
        {
            (name, key): value
            for name, part in model.parts().items()
            for key, value in part.state_dict().items()
        }
        for model in (one, other)
    )
    return (
        (one.stages, one.tokenizer.fingerprint) == (other.stages, other.tokenizer.fingerprint)
        and states.keys() == others.keys()
        and all(torch.equal(value, others[key]) for key, value in states.items())
    )


def _publish(kb: KnowledgeBase, model: Model, path: str, vector_ND: torch.Tensor, bits: int) -> int:
    """Publishes the vectors of the checkpoint as a version of the model's index -> the number of the version.

    If the newest version already has these vectors, no version is published.
    """
    folder = index_folder(kb, model)
    found = vectors.mapped(folder, kb.keys_N)
    if found is not None and found.info.bits == bits:
        parts = (value.split(BLOCKS_AT_ONCE) for value in (torch.from_numpy(found.array), vector_ND))
        if all(torch.equal(there, one.to(there.dtype)) for there, one in zip(*parts, strict=True)):
            return found.version
    folder.mkdir(parents=True, exist_ok=True)
    return publish(kb, model, path, folder, vector_ND.numpy(), bits)
