"""`realm kb` builds, changes and checks a knowledge base; `realm questions` makes questions from a knowledge base."""

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from realm.cli.arguments import (
    Commands,
    Parser,
    add_command,
    add_engine,
    add_kb,
    add_out,
    add_sources,
    add_where,
    engine_of,
    positive,
    report,
    say_where,
    settings,
)
from realm.errors import DamagedError, InputError, RealmError, shortened
from realm.files import write_json_lines
from realm.progress import progress

if TYPE_CHECKING:
    import numpy as np

    from realm.documents.reading import ReadingReport
    from realm.store.knowledge_base import KnowledgeBase

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuestionsConfig:
    """Settings of `realm questions`."""

    seed: int = 0
    """Seed for the choice of questions, wordings and dev documents."""
    dev_share: float = 0.1
    """Share of documents whose questions are dev questions."""
    documents: str = ""
    """Questions are made only from documents whose id or title begins with this text; if it is empty, from all documents."""


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
    )
    add_sources(build)
    add_out(build, "folder of the new knowledge base")
    build.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="model or encoder whose wordpieces are used: a folder or a name (default: the setting `tokenizer`, which is "
        "package:realm-mini)",
    )
    build.add_argument(
        "--vocab-size",
        metavar="N",
        type=positive,
        help="make a new vocabulary of N wordpieces from the documents, for an encoder that is trained from random weights",
    )
    _add_tagger(build, default="spacy:en_core_web_sm")
    build.add_argument(
        "--replace",
        action="store_true",
        help="replace an existing knowledge base when the new one is complete",
    )

    preview = add_command(
        verbs,
        _preview,
        "show the passages that a build would make from documents, with their numbers of wordpieces",
        "realm kb preview docs/install.md --set cut=headings",
        section="kb",
    )
    add_sources(preview)
    preview.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="model or encoder whose wordpieces are counted (default: the setting `tokenizer`)",
    )
    _add_tagger(preview, default="spacy:en_core_web_sm")
    preview.add_argument(
        "--limit", metavar="N", type=positive, default=20, help="show only the first N passages (default: 20)"
    )
    preview.add_argument(
        "--json", action="store_true", help="print one JSON object per passage, each on its own line"
    )

    add = add_command(
        verbs,
        _add,
        "add documents, and replace old documents that have the id of a new document",
        "realm kb add news.jsonl --kb kb",
        reports=True,
    )
    add_sources(add)
    add_kb(add)
    _add_tagger(add, default="the tagger with which KB was built")

    delete = add_command(
        verbs, _delete, "delete documents", "realm kb delete 'Angela Merkel' --kb kb", reports=True
    )
    delete.add_argument("documents", metavar="DOCUMENT", nargs="+", help="id or title of a document")
    add_kb(delete)

    compact = add_command(
        verbs,
        _compact,
        "rewrite a knowledge base without its deleted passages, and remove its older versions",
        "realm kb compact --kb kb",
        reports=True,
    )
    add_kb(compact)
    listing = add_command(
        verbs,
        _list,
        "list the documents, with their numbers of passages, ids and titles",
        "realm kb list 'Ang' --kb kb",
    )
    listing.add_argument(
        "prefix",
        metavar="PREFIX",
        nargs="?",
        default="",
        help="list only documents whose id or title begins with PREFIX",
    )
    listing.add_argument(
        "--limit", metavar="N", type=positive, help="list only the first N documents (default: all)"
    )
    add_where(listing, "list only documents", "")
    listing.add_argument(
        "--json", action="store_true", help="print one JSON object per document, each on its own line"
    )
    add_kb(listing)
    show = add_command(
        verbs,
        _show,
        "show a document or a passage with its text and fields",
        "realm kb show docs/install.md --kb kb",
        reports=True,
    )
    show.add_argument("id", metavar="ID", help="id or title of a document, or id of a passage")
    add_kb(show)
    export = add_command(
        verbs,
        _export,
        "write the documents to a JSON Lines file, from which `realm kb build` makes the same passages again",
        "realm kb export --kb kb --out documents.jsonl",
    )
    add_where(export, "write only documents", "")
    add_kb(export)
    add_out(export, "JSON Lines file")
    info = add_command(
        verbs,
        _info,
        "show the size, settings and indexes of a knowledge base",
        "realm kb info --kb kb",
        reports=True,
    )
    add_kb(info)
    verify = add_command(
        verbs, _verify, "check a knowledge base for damage", "realm kb verify --kb kb", reports=True
    )
    add_kb(verify)

    questions = add_command(
        commands,
        _questions,
        "make questions from a knowledge base, for training and evaluation; or review made questions by hand",
        "realm questions --kb kb --out questions",
        section="questions",
        reports=True,
    )
    add_kb(questions)
    questions.add_argument(
        "--review",
        metavar="FILE",
        help="show the questions of this file one after the other with their passages, and ask whether to accept, correct or "
        "reject each; repeat the command to continue",
    )
    add_out(questions, "folder for train.jsonl and dev.jsonl; with --review, file for the accepted questions")


def _add_tagger(parser: Parser, default: str) -> None:
    parser.add_argument(
        "--tagger",
        metavar="NAME",
        help=f"tagger of names and dates: spacy:MODEL, hf:MODEL, or rules (dates only) (default: {default})",
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        type=positive,
        help="number of processes of the tagger (default: one per core, at most 8)",
    )
    add_engine(parser, "the tagger runs")


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


class ShownPassageJson(TypedDict):
    """A passage in the report of `realm kb show`."""

    id: str
    title: str
    text: str


class ShownJson(TypedDict):
    """Report of `realm kb show`: a document, and all of its passages or the passage that was named."""

    id: str
    fields: dict[str, Any]
    passages: list[ShownPassageJson]


class SoundJson(TypedDict):
    """Report of `realm kb verify`."""

    ok: bool
    problems: list[str]
    lagging: list[str]
    """Indexes without the vectors of passages that were added after the index was built. Such an index is not a problem."""


class MadeJson(TypedDict):
    """Report of `realm questions`: numbers of questions."""

    train: int
    dev: int


def _build(args: argparse.Namespace) -> None:
    from realm.documents.near_duplicates import without_near_duplicates
    from realm.documents.reading import ReadingReport, read_documents
    from realm.store.knowledge_base import KnowledgeBaseConfig, build
    from realm.text.salient_spans import load_tagger
    from realm.tokens.tokenizer import Tokenizer

    flags = {
        "tokenizer": args.tokenizer,
        "tagger": args.tagger,
        "sources": tuple(args.sources),
    }
    config = settings(args, KnowledgeBaseConfig)
    config = dataclasses.replace(
        config, **{name: value for name, value in flags.items() if value is not None}
    )
    reading, for_vocabulary = (None if args.strict else ReadingReport() for _ in range(2))
    limit = config.max_document_chars
    documents = read_documents(args.sources, limit, reading, headings=config.reads_headings)
    if config.near_duplicates:
        documents = without_near_duplicates(documents, config.near_duplicates, reading)
    total = _count(args.sources, limit)
    if args.vocab_size is None:
        tokenizer = Tokenizer.load(config.tokenizer)
    else:
        again = progress(
            read_documents(args.sources, limit, for_vocabulary),
            total=total, description="vocabulary", unit="document",
        )  # fmt: skip
        tokenizer = Tokenizer.train((f"{d.title} {d.text}" for d in again), args.vocab_size)
    tagger = load_tagger(config.tagger, args.processes, engine_of(args))
    result = build(args.out, documents, config, tokenizer, tagger, replace=args.replace, total=total)
    report(args, {**result._asdict(), **_report_sources(args.out, reading, result.merged)})
    say_where(args, "the knowledge base is", args.out)


class PreviewedJson(TypedDict):
    """A passage in the output of `realm kb preview`."""

    document: str
    title: str
    wordpieces: int
    """Wordpieces of title and text, with three special tokens."""
    text: str
    fields: dict[str, Any]


def _preview(args: argparse.Namespace) -> None:
    from realm.documents.reading import ReadingReport, read_documents
    from realm.store.ingest import KnowledgeBaseConfig, annotated, split
    from realm.text.salient_spans import load_tagger
    from realm.tokens.tokenizer import Tokenizer

    config = settings(args, KnowledgeBaseConfig)
    tokenizer = Tokenizer.load(args.tokenizer or config.tokenizer)
    reading = None if args.strict else ReadingReport()
    documents = read_documents(
        args.sources, config.max_document_chars, reading, headings=config.reads_headings
    )
    tagger = load_tagger(args.tagger or config.tagger, args.processes or 1, engine_of(args))
    with annotated(islice(documents, args.limit), tagger) as found:
        passages = (one for document, spans in found for one in split(document, spans, config, tokenizer))
        for passage in islice(passages, args.limit):
            title, text = tokenizer.encode([passage.title, passage.text])
            shown: PreviewedJson = {
                "document": passage.document_id,
                "title": passage.title,
                "wordpieces": 3 + len(title) + len(text),
                "text": passage.text,
                "fields": dict(passage.fields),
            }
            if args.json:
                print(json.dumps(shown, ensure_ascii=False))
            else:
                cut = shortened(" ".join(passage.text.split()), 100)
                print(f"{shown['wordpieces']:>6}  {passage.title}\n        {cut}")
    for line in reading.lines() if reading is not None else []:
        _log.warning("%s", line)


def _count(sources: Sequence[str], max_document_chars: int) -> int | None:
    """Number of documents in the sources, to estimate the remaining time. Reading takes a small part of the total time.

    None if there are no documents. Errors are ignored, because the caller reads the sources again and reports the error.
    """
    from realm.documents.reading import ReadingReport, read_documents

    counted = ReadingReport()
    with contextlib.suppress(RealmError):
        documents = read_documents(sources, max_document_chars, counted)
        for _ in progress(documents, total=None, description="read", unit="document"):
            pass
    return counted.documents or None


def _add(args: argparse.Namespace) -> None:
    from realm.documents.reading import ReadingReport, read_documents
    from realm.store.knowledge_base import AddResult, KnowledgeBase, changed
    from realm.text.salient_spans import load_tagger

    config = KnowledgeBase.open(args.kb).config
    tagger = load_tagger(args.tagger or config.later_tagger, args.processes or 0, engine_of(args))
    total = _count(args.sources, config.max_document_chars)

    def add(kb: KnowledgeBase) -> tuple[AddResult, ReadingReport | None]:
        reading = None if args.strict else ReadingReport()
        documents = read_documents(
            args.sources, kb.config.max_document_chars, reading, headings=kb.config.reads_headings
        )
        return kb.add(documents, tagger, total), reading

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


def _compact(args: argparse.Namespace) -> None:
    from realm.store.knowledge_base import KnowledgeBase, changed

    report(args, changed(Path(args.kb), KnowledgeBase.compact)._asdict())
    say_where(args, "the knowledge base is", args.kb)


def _list(args: argparse.Namespace) -> None:
    from realm.store.knowledge_base import KnowledgeBase

    kb = KnowledgeBase.open(args.kb)
    for document in kb.documents(count=args.limit, prefix=args.prefix, where=args.where):
        if args.json:
            print(json.dumps(document._asdict(), ensure_ascii=False))
        else:
            print(
                f"{document.passages:>6}  {document.id}"
                + (f"  {document.title}" if document.title != document.id else "")
            )


def _show(args: argparse.Namespace) -> None:
    from realm.store.knowledge_base import KnowledgeBase

    kb = KnowledgeBase.open(args.kb)
    passages = kb.passages(_numbers_of(kb, args.id))
    first = passages[0]
    shown: ShownJson = {
        "id": first.document_id,
        "fields": dict(first.fields),
        "passages": [{"id": one.id, "title": one.title, "text": one.text} for one in passages],
    }
    lines = [f"document  {first.document_id}"]
    width = max(map(len, ["document", *first.fields]))
    lines += [f"{name:<{width}}  {_plain_field(value)}" for name, value in first.fields.items()]
    for one in passages:
        lines += ["", f"passage {one.id}: {one.title}", one.text]
    report(args, shown, lines)


def _plain_field(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _numbers_of(kb: "KnowledgeBase", name: str) -> "np.ndarray":
    """Numbers of the passages of a document, given by id or title, or the number of a passage, given by id.

    Raises:
        InputError: there is no such document or passage, or several documents have this title.
    """
    import numpy as np

    try:
        found = kb.numbers_of([kb.merged().get(name, name)])
    except InputError:
        with contextlib.suppress(InputError):
            return kb.passage_numbers([name])
        raise InputError(
            f"{kb.folder} has no document with id or title {name!r}, and no passage with this id: see `realm kb list`"
        ) from None
    keys, firsts = np.unique(kb.document_keys_N[found], return_index=True)
    if len(keys) > 1:
        ids = ", ".join(one.document_id for one in kb.passages(found[np.sort(firsts)]))
        raise InputError(
            f"{len(keys)} documents have the title {name!r}: give one of the ids {shortened(ids, 400)}"
        )
    return np.flatnonzero(kb.document_keys_N == keys[0])


def _export(args: argparse.Namespace) -> None:
    from realm.store.export import exported
    from realm.store.knowledge_base import KnowledgeBase

    out = Path(args.out)
    if out.is_dir():
        raise InputError(f"--out {out} is a folder: give the path of a file")
    records = exported(KnowledgeBase.open(args.kb), args.where)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json_lines(out, progress(records, total=None, description="export", unit="document"))
    say_where(args, "the documents are", out)


def _info(args: argparse.Namespace) -> None:
    from realm.store import vectors
    from realm.store.knowledge_base import KnowledgeBase

    kb = KnowledgeBase.open(args.kb)
    facts: FactsJson = {
        "folder": args.kb,
        "documents": len(set(kb.document_keys_N.tolist())),
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


def _questions(args: argparse.Namespace) -> None:
    from realm.questions import make_questions, split
    from realm.store.knowledge_base import KnowledgeBase

    if args.review is not None:
        return _review(args)
    config = settings(args, QuestionsConfig)
    made = make_questions(KnowledgeBase.open(args.kb), config.seed)
    made = [
        q for q in made if q.document_id.startswith(config.documents) or q.title.startswith(config.documents)
    ]
    if not made:
        about = (
            f' in a document whose id or title begins with "{config.documents}"' if config.documents else ""
        )
        raise InputError(
            f"{args.kb} has no sentence{about} from which a question can be made: see `realm kb list` and `realm kb info`"
        )
    train, dev = split(made, config.dev_share, config.seed)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "train.jsonl", out / "dev.jsonl"]
    for file, part in zip(files, (train, dev), strict=True):
        write_json_lines(file, (question._asdict() for question in part))
    counts: MadeJson = {"train": len(train), "dev": len(dev)}
    report(args, counts)
    say_where(args, "the questions are", " and ".join(map(str, files)))


def _review(args: argparse.Namespace) -> None:
    from realm.qa.question_files import Question, read_questions
    from realm.questions.review import Review, review
    from realm.store.knowledge_base import KnowledgeBase

    if args.set or args.config:
        raise InputError("--review makes no questions: leave out --set and --config")
    questions, kb = read_questions(args.review), KnowledgeBase.open(args.kb)
    numbers = {passage: number for number, passage in enumerate(kb.ids)}

    def evidence_of(question: Question) -> str:
        number = numbers.get(question.passage_id)
        return "" if number is None else kb.passages([number])[0].text

    out = Path(args.out)
    if out.is_dir():
        raise InputError(f"--out {out} is a folder: with --review, give the path of a file")
    decisions = Review(questions, out)
    review(decisions, _prompted, lambda line: print(line, file=sys.stderr), evidence_of)
    report(args, decisions.as_dict())
    say_where(args, "the accepted questions are", out)


def _prompted(prompt: str) -> str:
    """A line of standard input. The prompt goes to standard error, because standard output has the report.

    Raises:
        EOFError: standard input has ended.
    """
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
