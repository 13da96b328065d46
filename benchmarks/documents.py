"""Reads the same articles from JSON Lines, from a multistream dump of MediaWiki, and from a ZIM archive.

    python benchmarks/documents.py articles.jsonl.xz --folder forms                    # Simple English Wikipedia: minutes
    python benchmarks/documents.py articles.jsonl.xz --folder forms --articles 10000   # the first articles only

The files are made from the articles, and kept in --folder, with the number of articles in their names. For other articles, use
another folder. For each file, a new process reads it. Prints a table with a row for JSON Lines, two each for the dump and the
ZIM archive (one process, and --processes), and one JSON object as the last line.

The first columns are the size of the file in MB and three numbers of articles: those that were read, those that were left out
(such as lists), and those whose words differ from the JSON Lines. The other columns are the seconds, the CPU seconds and the
peak MB of the process, and how many words it read in a second.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import shared

sys.path.insert(0, str(shared.HOME))  # a file that is run by its path does not find the package `realm`
FORMS = {"JSON Lines": "articles.jsonl", "dump": "articles-multistream.xml.bz2", "ZIM": "articles.zim"}
"""Name of a form -> end of the name of its file."""


def main() -> None:
    """Makes the files that do not exist, and measures how each is read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", help="file of articles, as for `realm kb build`")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the files of all forms")
    parser.add_argument("--articles", type=int, help="number of articles (default: all)")
    parser.add_argument("--processes", type=int, default=2, help="for dump and ZIM (default: %(default)s)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = args.folder.resolve()  # the processes run in the folder of the repository
    documents = str(Path(args.documents).resolve()) if Path(args.documents).exists() else args.documents
    rows, expected = [], set[str]()
    for form, name in FORMS.items():
        named = f"{args.articles or 'all'}-{name}"
        file, part = folder / named, folder / f"part-{named}"
        if not file.exists():
            part.unlink(missing_ok=True)
            _in_process("make", form, documents, str(part), str(args.articles or ""))
            part.rename(file)
        for processes in sorted({1, args.processes}) if form != "JSON Lines" else (1,):
            spent = _in_process("read", str(file), str(processes))
            *hashes, last = spent.output.splitlines()
            expected = expected or set(hashes)
            words, left_out = json.loads(last)
            rows.append(
                {
                    "form": form + (f", {processes} processes" if processes > 1 else ""),
                    "MB": round(file.stat().st_size / 1e6, 1),
                    "articles": len(hashes),
                    "left out": left_out,
                    "other words": len(set(hashes) - expected),
                    "s": round(spent.seconds, 1),
                    "CPU s": round(spent.cpu_seconds, 1),
                    "peak MB": round(spent.peak_mb),
                    "words/s": round(words / spent.seconds),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    shared.print_table(rows)
    print(json.dumps({"benchmark": "documents", "rows": rows} | shared.machine()))


def _in_process(*words: str) -> shared.Spent:
    """Runs `make` or `read` in a new process. This process must stay small, because it measures the memory of the others."""
    return shared.spent_by([sys.executable, __file__, *words])


def make(form: str, documents: str, path: str, count: str) -> None:
    """Writes the first `count` articles, or all, in one form."""
    from realm.documents.reading import read_documents
    from tests.documents.writers import write_articles_as_dump, write_articles_as_zim

    read = islice(read_documents([documents]), int(count) if count else None)
    articles = ((one.title, one.text) for one in read)
    {"JSON Lines": _write_lines, "dump": write_articles_as_dump, "ZIM": write_articles_as_zim}[form](
        Path(path), articles
    )


def _write_lines(path: Path, articles: Iterator[tuple[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for title, text in articles:
            file.write(json.dumps({"title": title, "text": text}) + "\n")


def read(path: str, processes: str) -> None:
    """Prints a hash of the title and the words of each article, then [number of words, number of articles left out]."""
    from realm.documents.reading import ReadingReport, read_documents

    report, total = ReadingReport(), 0
    for one in read_documents([path], report=report, processes=int(processes)):
        words = re.findall(r"\w+", one.text)
        total += len(words)
        print(hashlib.blake2b("\n".join([one.title, *words]).encode(), digest_size=8).hexdigest())
    print(json.dumps([total, sum(report.reasons.values())]))


if __name__ == "__main__":
    if sys.argv[1:2] in (["make"], ["read"]):
        {"make": make, "read": read}[sys.argv[1]](*sys.argv[2:])
    else:
        main()
