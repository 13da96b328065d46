"""`realm kb`: builds, changes and checks a knowledge base. The commands that show documents are in `documents`."""

import argparse
import dataclasses
import logging
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from realm.cli.arguments import (
    Commands,
    Parser,
    add_command,
    engine_of,
    positive,
    report,
    say_where,
    settings,
)
from realm.cli.documents import add_documents
from realm.errors import DamagedError, InputError
from realm.progress import progress

if TYPE_CHECKING:
    from realm.documents.reading import ReadingReport

_log = logging.getLogger(__name__)


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the group."""
    kb = commands.add_parser(
        "kb",
        help="build, change and check a knowledge base",
        description="Build, change and check a knowledge base.",
    )
    verbs = kb.add_subparsers(title="commands", metavar="COMMAND", dest="verb", required=True)

    build = add_command(
        verbs,
        _build,
        "make a knowledge base: split documents into passages, and mark names and dates",
        "realm kb build docs/ --out kb",
        section="kb",
        reports=True,
        continues=True,
    )
    build.add_sources()
    build.add_out("folder of the new knowledge base")
    build.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="model or encoder whose wordpieces are used: a folder or a name (default: the setting `tokenizer`, which is "
        "package:realm-mini)",
    )
    build.add_argument(
        "--vocab-size",
        metavar="N",
        type=_vocabulary_size,
        help="make a new vocabulary of N wordpieces from the documents, for an encoder that is trained from random weights",
    )
    build.add_tagger()
    build.add_switch("--replace", "replace an existing knowledge base when the new one is complete")

    add_documents(verbs)
    add = add_command(
        verbs,
        _add,
        "add documents, and replace old documents that have the id of a new document",
        "realm kb add news.jsonl --kb kb",
        reports=True,
    )
    add.add_sources()
    add.add_kb()
    add.add_tagger(default="the tagger with which KB was built")

    delete = add_command(
        verbs, _delete, "delete documents", "realm kb delete 'Angela Merkel' --kb kb", reports=True
    )
    delete.add_argument("documents", metavar="DOCUMENT", nargs="+", help="id or title of a document")
    delete.add_kb()

    upload = add_command(
        verbs,
        _upload,
        "copy the passages with their fields and vectors to a table of a PostgreSQL database with pgvector, or bring this "
        "table up to date",
        "realm kb upload --kb kb --model models/qa --to 'postgresql://db.example/library?table=handbook'",
        reports=True,
        continues=True,
    )
    upload.add_kb()
    upload.add_model()
    upload.add_argument(
        "--to",
        metavar="URL",
        required=True,
        help="address of the table: postgresql://USER@HOST:PORT/DATABASE?table=NAME (default NAME: realm_passages); the "
        "password is read from PGPASSWORD or ~/.pgpass",
    )
    upload.add_switch("--replace", "replace a table that has the vectors of another model")

    compact = add_command(
        verbs,
        _compact,
        "rewrite a knowledge base without its deleted passages, and remove its older versions",
        "realm kb compact --kb kb",
        reports=True,
    )
    compact.add_kb()
    info = add_command(
        verbs,
        _info,
        "show the size, settings and indexes of a knowledge base",
        "realm kb info --kb kb",
        reports=True,
    )
    info.add_kb()
    verify = add_command(
        verbs, _verify, "check a knowledge base for damage", "realm kb verify --kb kb", reports=True
    )
    verify.add_kb()


class SourcesJson(TypedDict):
    """Report of `realm kb build` and `realm kb add` on the sources."""

    merged: int
    """Number of documents with the same title and text as another document."""
    left_out: NotRequired[dict[str, int]]
    """Reason -> number of files, lines and rows left out; absent with --strict."""
    assumed_encodings: NotRequired[int]
    """Number of files and lines that are not UTF-8 and do not declare an encoding; absent with --strict."""


class DeletedJson(TypedDict):
    """Report of `realm kb delete`."""

    passages_removed: int


class FactsJson(TypedDict):
    """Report of `realm kb info`, without the settings and the `indexes` of the knowledge base."""

    folder: str
    documents: int
    merged: int
    passages: int
    fields: dict[str, str]
    """Names that filters can use -> what their values are."""
    fingerprint: str
    tokenizer_fingerprint: str


class SoundJson(TypedDict):
    """Report of `realm kb verify`."""

    ok: bool
    problems: list[str]
    lagging: list[str]
    """Indexes without the vectors of passages that were added after the index was built. Such an index is not a problem."""


LEAST_PIECES, MOST_PIECES = 100, 1_000_000
"""Bounds of --vocab-size. A vocabulary needs five special wordpieces and letters, and numbers of wordpieces are in memory."""


def _vocabulary_size(text: str) -> int:
    size = positive(text)
    if not LEAST_PIECES <= size <= MOST_PIECES:
        raise argparse.ArgumentTypeError(f"{text} is not a number from {LEAST_PIECES} to {MOST_PIECES:,}")
    return size


def _build(args: argparse.Namespace) -> None:
    from realm.documents.near_duplicates import without_near_duplicates
    from realm.documents.reading import ReadingReport, read_documents
    from realm.documents.remote import public_address
    from realm.kept_values import PARSED
    from realm.local_processes import default_processes
    from realm.store.ingest import NoText, check_target, unfinished_folder
    from realm.store.knowledge_base import KnowledgeBaseConfig, build
    from realm.text.salient_spans import load_tagger
    from realm.tokens.tokenizer import Tokenizer

    config = settings(args, KnowledgeBaseConfig, "tokenizer", "tagger")
    config = dataclasses.replace(config, sources=tuple(map(public_address, args.sources)))
    if args.vocab_size is not None and args.tokenizer is not None:
        raise InputError("--vocab-size makes a tokenizer: leave out --tokenizer")
    reading, for_vocabulary = (None if args.strict else ReadingReport() for _ in range(2))
    engine = engine_of(args)
    target = Path(args.out)
    check_target(target, args.replace)  # before the documents are read for a vocabulary
    own = target, unfinished_folder(target)
    kept = unfinished_folder(target) / PARSED
    processes = args.processes or default_processes()
    read = partial(
        read_documents,
        args.sources,
        config.max_document_chars,
        but=own,
        engine=engine,
        kept=kept,
        processes=processes,
        names=config.names,
    )
    documents = read(reading, headings=config.reads_headings)
    if config.near_duplicates:
        documents = without_near_duplicates(documents, config.near_duplicates, reading)
    if args.vocab_size is None:
        tokenizer = Tokenizer.load(config.tokenizer)
    else:
        again = progress(
            read(for_vocabulary),
            total=None, description="vocabulary", unit="document",
        )  # fmt: skip
        tokenizer = Tokenizer.train((f"{d.title} {d.text}" for d in again), args.vocab_size)
    tagger = load_tagger(config.tagger, processes, engine)
    try:
        result = build(args.out, documents, config, tokenizer, tagger, replace=args.replace)
    except NoText:
        for line in (reading or ReadingReport()).lines():
            _log.warning("%s", line)
        raise
    report(args, {**result._asdict(), **_report_sources(args.out, reading, result.merged)})
    say_where(args, "the knowledge base is", args.out)


def _add(args: argparse.Namespace) -> None:
    from realm.documents.reading import ReadingReport, read_documents
    from realm.local_processes import default_processes
    from realm.store.ingest import unfinished_folder
    from realm.store.knowledge_base import AddResult, KnowledgeBase, changed
    from realm.text.salient_spans import load_tagger

    config = KnowledgeBase.open(args.kb).config
    engine = engine_of(args)
    processes = args.processes or default_processes()
    tagger = load_tagger(args.tagger or config.later_tagger, processes, engine)

    def add(kb: KnowledgeBase) -> tuple[AddResult, ReadingReport | None]:
        reading = None if args.strict else ReadingReport()
        documents = read_documents(
            args.sources,
            kb.config.max_document_chars,
            reading,
            but=(kb.folder, unfinished_folder(kb.folder)),
            headings=kb.config.reads_headings,
            engine=engine,
            processes=processes,
            names=kb.config.names,
        )
        return kb.add(documents, tagger), reading

    result, reading = changed(Path(args.kb), add)
    report(args, {**result._asdict(), **_report_sources(args.kb, reading, result.merged)})
    say_where(args, "the knowledge base is", args.kb)


def _report_sources(folder: str, reading: "ReadingReport | None", merged: Mapping[str, str]) -> SourcesJson:
    """Logs and counts the merged documents and everything that was left out; writes a list of what was left out."""
    from realm.documents.reading import ReadingReport

    if merged:
        few = ", ".join(f"{one} (as {other})" for one, other in islice(merged.items(), 3))
        more = ", ..." if len(merged) > 3 else ""
        _log.info("merged: %d with the same title and text as another document: %s%s", len(merged), few, more)
    for line in (reading or ReadingReport()).keep(Path(folder)):
        _log.warning("%s", line)
    if reading is None:
        return {"merged": len(merged)}
    return {
        "merged": len(merged),
        "left_out": dict(reading.reasons.most_common()),
        "assumed_encodings": len(reading.assumed),
    }


def _delete(args: argparse.Namespace) -> None:
    from realm.store.knowledge_base import changed

    removed = changed(Path(args.kb), lambda kb: kb.delete(args.documents))
    deleted: DeletedJson = {"passages_removed": removed}
    report(args, deleted)
    say_where(args, "the knowledge base is", args.kb)


def _upload(args: argparse.Namespace) -> None:
    from realm.search.postgres_table import parsed

    address = parsed(args.to)  # checked before the import of torch

    from realm.index.versions import complete_vectors
    from realm.qa.pipeline import open_pair
    from realm.search.postgres_table import upload

    kb, model = open_pair(args.kb, args.model, "auto", reader=False)
    uploaded = upload(kb, complete_vectors(kb, model, args.model, mapped=True), address, args.replace)
    report(args, uploaded)
    say_where(args, "the passages are", address.shown)


def _compact(args: argparse.Namespace) -> None:
    from realm.store.knowledge_base import KnowledgeBase, changed

    report(args, changed(Path(args.kb), KnowledgeBase.compact)._asdict())
    say_where(args, "the knowledge base is", args.kb)


def _info(args: argparse.Namespace) -> None:
    from realm.store import vectors
    from realm.store.knowledge_base import KnowledgeBase

    kb = KnowledgeBase.open(args.kb)
    facts: FactsJson = {
        "folder": args.kb,
        "documents": kb.document_count,
        "merged": len(kb.merged()),
        "passages": len(kb),
        "fields": kb.fields,
        "fingerprint": kb.fingerprint,
        "tokenizer_fingerprint": kb.tokenizer.fingerprint,
    }
    indexes = [vectors.info_of(folder) for folder in vectors.folders(kb.folder)]
    listed = [dataclasses.asdict(index) for index in indexes if index]
    report(args, {**facts, **dataclasses.asdict(kb.config), "indexes": listed})


def _verify(args: argparse.Namespace) -> None:
    from realm.store.knowledge_base import KnowledgeBase

    kb = KnowledgeBase.open(args.kb)
    problems = kb.verify()
    lagging = [] if problems else kb.lagging()
    sound: SoundJson = {"ok": not problems, "problems": problems, "lagging": lagging}
    report(args, sound, problems or [f"{args.kb} is sound", *lagging])
    if problems:
        raise DamagedError(
            f"{args.kb} has {len(problems)} problems: if an index is damaged, remove the folder of the index and run "
            "`realm index`; otherwise run `realm kb build --replace`"
        )
