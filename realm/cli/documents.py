"""The commands of `realm kb` that show documents: `preview`, `list`, `show`, `export`."""

import argparse
import contextlib
import json
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from realm.cli.arguments import (
    Commands,
    Parser,
    add_command,
    engine_of,
    for_terminal,
    positive,
    report,
    say_where,
    settings,
)
from realm.errors import InputError, shortened
from realm.progress import progress

if TYPE_CHECKING:
    import numpy as np

    from realm.store.knowledge_base import KnowledgeBase

_log = logging.getLogger(__name__)


def add_documents(verbs: "Commands[Parser]") -> None:
    """Declares the commands."""
    preview = add_command(
        verbs,
        _preview,
        "show the passages that a build would make from documents, with their numbers of wordpieces",
        "realm kb preview docs/install.md --set cut=headings",
        section="kb",
    )
    preview.add_sources()
    preview.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="model or encoder whose wordpieces are counted (default: the setting `tokenizer`)",
    )
    preview.add_tagger(on_engine="the tagger runs", parallel=False)
    preview.add_argument(
        "--limit", metavar="N", type=positive, default=20, help="show only the first N passages (default: 20)"
    )
    preview.add_switch("--json", "print one JSON object per passage, each on its own line")

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
    listing.add_where("list only documents", "")
    listing.add_switch("--json", "print one JSON object per document, each on its own line")
    listing.add_kb()
    show = add_command(
        verbs,
        _show,
        "show a document or a passage with its text and fields",
        "realm kb show docs/install.md --kb kb",
        reports=True,
    )
    show.add_argument("id", metavar="ID", help="id or title of a document, or id of a passage")
    show.add_kb()
    export = add_command(
        verbs,
        _export,
        "write the documents as JSON Lines, Parquet or Lance, from which `realm kb build` makes the same passages again",
        "realm kb export --kb kb --out documents.jsonl",
    )
    export.add_where("write only documents", "")
    export.add_kb()
    export.add_written(
        "--out",
        "file that ends in .jsonl, .parquet or .lance; an address on object storage (s3:// gs://) ends in .jsonl or .parquet",
        required=True,
        addresses=True,
    )


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
    from realm.store.ingest import annotated, split
    from realm.store.settings import KnowledgeBaseConfig
    from realm.text.salient_spans import load_tagger
    from realm.tokens.sentences import SentenceTokenizer
    from realm.tokens.tokenizer import Tokenizer

    config = settings(args, KnowledgeBaseConfig)
    tokenizer = Tokenizer.load(args.tokenizer or config.tokenizer)
    reading = None if args.strict else ReadingReport()
    documents = read_documents(
        args.sources,
        config.max_document_chars,
        reading,
        headings=config.reads_headings,
        names=config.names,
    )
    tagger = load_tagger(args.tagger or config.tagger, engine=engine_of(args))
    with annotated(islice(documents, args.limit), tagger) as found:
        passages = (
            one
            for document, spans in found
            for one in split(document, spans, config, SentenceTokenizer(tokenizer))
        )
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
                name = passage.title or passage.document_id
                print(for_terminal(f"{shown['wordpieces']:>6}  {name}\n        {cut}"))
    for line in reading.lines() if reading is not None else []:
        _log.warning("%s", line)


def _list(args: argparse.Namespace) -> None:
    from realm.store.knowledge_base import KnowledgeBase

    kb = KnowledgeBase.open(args.kb)
    for document in kb.documents(count=args.limit, prefix=args.prefix, where=args.where):
        if args.json:
            print(json.dumps(document._asdict(), ensure_ascii=False))
        else:
            names = dict.fromkeys(filter(None, (document.id, document.title)))
            one_line = "  ".join(" ".join(name.split()) for name in names)
            print(for_terminal(f"{document.passages:>6}  {one_line}"))


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
        lines += ["", ": ".join(filter(None, (f"passage {one.id}", one.title))), one.text]
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
    return found


def _export(args: argparse.Namespace) -> None:
    from realm.store.export import exported, write_documents
    from realm.store.knowledge_base import KnowledgeBase

    kb = KnowledgeBase.open(args.kb)
    found = exported(kb, args.where)
    records = progress(found, total=None, description="export", unit="document")
    with _written(args.out) as out:
        write_documents(out, kb, records)
    say_where(args, "the documents are", args.out)


@contextlib.contextmanager
def _written(out: str) -> Iterator[Path]:
    """A context with the path of a file to be written, which is copied to object storage if `out` is an address."""
    from realm.documents.lance_datasets import EXTENSION, uploaded_dataset
    from realm.documents.remote import uploaded
    from realm.store.export import check_format

    if "://" in out:
        with (uploaded_dataset if out.lower().endswith(EXTENSION) else uploaded)(out) as path:
            check_format(path)
            yield path
    else:
        check_format(Path(out))
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        yield Path(out)
