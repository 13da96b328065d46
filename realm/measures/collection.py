"""Reads a test collection in the format of BEIR (Thakur et al. 2021): queries, and the judged documents of each query.

FOLDER/corpus.jsonl        documents, from which `realm kb build` makes the knowledge base
FOLDER/queries.jsonl       a query per line: {"_id", "text"}
FOLDER/qrels/SPLIT.tsv     a judgement per line: query id, document id, grade; the first line has the names of the columns
"""

from pathlib import Path
from typing import NamedTuple

from realm.errors import InputError, shortened, shown
from realm.qa.question_files import json_lines

Judgements = dict[str, dict[str, int]]
"""Query id -> document id -> grade. A document with a grade above 0 is relevant."""
LARGEST_GRADE = 65_535
"""trec_eval needs 8 bytes of memory per possible grade: 17 GB if a grade is the largest whole number of 32 bits."""


class Query(NamedTuple):
    """A query of a test collection."""

    id: str
    text: str


class Collection(NamedTuple):
    """The judged queries of one split of a test collection, in the order of queries.jsonl."""

    folder: Path
    split: str
    queries: list[Query]
    grades: Judgements

    def relevant(self) -> set[str]:
        """Ids of all documents that are relevant to at least one query."""
        return {
            document for judged in self.grades.values() for document, grade in judged.items() if grade > 0
        }


def read_collection(folder: str | Path, split: str = "test") -> Collection:
    """The queries of a split that have a relevant document.

    Raises:
        InputError: a file is missing or cannot be used, or no query has a relevant document.
    """
    folder = Path(folder)
    if Path(split).name != split:
        raise InputError(
            f"{split!r} is not the name of a split: give the name of a file in {folder / 'qrels'} without .tsv"
        )
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the folder of a BEIR collection")
    grades = read_judgements(folder / "qrels" / f"{split}.tsv")
    queries, seen = [], set()
    for query in _queries(folder / "queries.jsonl"):
        if query.id in seen:
            raise InputError(f"{folder / 'queries.jsonl'} has two queries with the id {query.id!r}")
        seen.add(query.id)
        if any(grade > 0 for grade in grades.get(query.id, {}).values()):
            queries.append(query)
    if unknown := sorted(set(grades) - seen):
        raise InputError(
            f"{folder / 'qrels' / split}.tsv has judgements for queries that are not in {folder / 'queries.jsonl'}: "
            f"{shortened(', '.join(unknown))}"
        )
    if not queries:
        raise InputError(f"{folder / 'qrels' / split}.tsv has no relevant document for any query")
    return Collection(folder, split, queries, {query.id: grades[query.id] for query in queries})


def _queries(file: Path) -> list[Query]:
    queries = []
    for where, value in json_lines(file, "file of queries"):
        if not isinstance(value, dict) or not all(isinstance(value.get(key), str) for key in ("_id", "text")):
            raise InputError(f'{where}: the line is {shown(value)}, and must be {{"_id": ..., "text": ...}}')
        queries.append(Query(value["_id"], value["text"]))
    return queries


def read_judgements(file: Path) -> Judgements:
    """Judgements of a file of BEIR (query, document, grade, separated by tabs) or of TREC (query, 0, document, grade).

    Raises:
        InputError: the file is missing, or a line has another form; the message has the number of the line.
    """
    grades: Judgements = {}
    for number, line in enumerate(_lines(file), start=1):
        words = line.split("\t") if "\t" in line else line.split()
        if not words or (number == 1 and not _is_whole(words[-1])):
            continue  # an empty line, or the names of the columns
        grade = _grade(words[-1])
        if len(words) not in (3, 4) or grade is None:
            raise InputError(
                f"{file}:{number}: the line is {shown(line)}, and must be: query, document, grade (a whole number, at most "
                f"{LARGEST_GRADE:,})"
            )
        grades.setdefault(words[0].strip(), {})[words[-2].strip()] = grade
    return grades


def _is_whole(word: str) -> bool:
    return word.strip().removeprefix("-").isdecimal()


def _grade(word: str) -> int | None:
    """The grade that a word is; None if the word is not a whole number, or if the number is too large or too small."""
    if not _is_whole(word) or len(word.strip()) > len(str(-(2**31))):
        return None
    grade = int(word)
    return grade if -(2**31) <= grade <= LARGEST_GRADE else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        there = sorted(path.stem for path in file.parent.glob("*.tsv"))
        splits = f"; splits with a file: {', '.join(there)}" if there else ""
        raise InputError(f"there is no file {file}{splits}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
