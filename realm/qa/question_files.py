"""Reads questions and answers from files: JSON Lines, NQ-Open, WebQuestions, SQuAD, DPR, CuratedTREC."""

import ast
import hashlib
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from realm.documents.formats.compressed import opened, uncompressed
from realm.errors import InputError, check_encodable, shortened, shown
from realm.progress import counted

MAX_QUESTION_CHARACTERS = 2000


class Question(NamedTuple):
    """A question with its accepted answers, which are regular expressions if `regex` is True."""

    id: str
    question: str
    answers: tuple[str, ...]
    regex: bool = False
    gold_titles: tuple[str, ...] = ()
    """Titles of documents that contain an answer, if the file has such titles; for recall by title."""
    document_id: str = ""
    """Id of a document that contains an answer, if the file has such an id; for `finetune` and for `evaluate --gold`."""
    passage_id: str = ""
    """Id of the passage from which the question was made; "" if the question was not made by `realm questions`."""

    def to_json(self) -> dict[str, Any]:
        """The question as a line of a question file."""
        line: dict[str, Any] = {"id": self.id, "question": self.question, "answers": list(self.answers)}
        if self.regex:
            line["regex"] = True
        if self.gold_titles:
            line["gold_titles"] = list(self.gold_titles)
        if self.document_id:
            line["document_id"] = self.document_id
        if self.passage_id:
            line["passage_id"] = self.passage_id
        return line


def read_questions(
    path: str | Path, *, regex: bool | None = None, need_answers: bool = True
) -> list[Question]:
    """The questions of a file, whose format is recognised by its content. The file may be compressed (.gz, .bz2, .xz, .zst).

    - JSON Lines or one JSON array of objects with `question` (or `qText`), `answers` (or `answer`; a text or a list of
      texts), and optionally `id` (or `qId`), `regex` (or `answers_are_regex`), `gold_titles`, `document_id` and `passage_id`.
      Without a `document_id`, the `passage_id` is the id of the document, as in data sets whose documents are passages. Other
      keys are ignored.
      NQ-Open, DPR, DrQA and WebQuestions have this format.
    - JSON Lines with only `question` and one `answer`, if at least a quarter of the answers are clearly patterns (DrQA's
      CuratedTREC). Then all answers are patterns, and a line on standard error reports this.
    - SQuAD's nested JSON. Questions without an answer (SQuAD 2.0) are left out, and a line on standard error reports their
      number.
    - Tab-separated id, type, question and pattern (CuratedTREC).
    - Tab-separated question and answers. The answers are a list in Python or JSON syntax (DPR), or a single answer as plain
      text.

    Args:
        regex: True: all answers are patterns; False: only the answers that the file marks as patterns; None: as False, but
            DrQA's CuratedTREC is recognised, and another answer that looks like a pattern causes a warning on standard error.
        need_answers: with False, questions without answers are accepted too, and plain text with one question per line.

    The id of a question without an id is its position in the file, counted from 1.

    Raises:
        InputError: the file cannot be used; the message has the file, the line and the problem.
    """
    path = Path(path)
    text = _read_text(path, "question file")
    records = list(_json_records(path, text) if _is_json(path, text) else _table_records(path, text, regex))
    if regex is None and need_answers:
        regex = _are_patterns(path, records)
    questions: list[Question] = []
    seen: dict[str, str] = {}
    for where, record in records:
        question = _question(record, where, str(len(questions) + 1), bool(regex), need_answers)
        if question.id in seen:
            raise InputError(
                f"{where}: the id {question.id!r} is already used at {seen[question.id]}: give each question its own id"
            )
        seen[question.id] = where
        questions.append(question)
    if not questions:
        raise InputError(
            f"{path} holds no questions: write one JSON object per line with question and answers"
        )
    return questions


def digest_of(*sets: Sequence[Question]) -> str:
    """Digest of sets of questions and answers."""
    return hashlib.sha256(repr(sets).encode()).hexdigest()[:16]


def json_lines(path: str | Path, kind: str) -> Iterator[tuple[str, Any]]:
    """The values of a JSON Lines file, or of one JSON array, each with its place for error messages.

    `kind` is the kind of file, such as "question file", for error messages.

    Raises:
        InputError: the file cannot be read, or a line is not JSON.
    """
    return _json_records(Path(path), _read_text(Path(path), kind))


def _read_text(path: Path, kind: str) -> str:
    try:
        with opened(path) as file:
            data = file.read()
    except FileNotFoundError:
        raise InputError(f"there is no {kind} {path}") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: give the path of a {kind}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if b"\0" in data:
        raise InputError(f"{path} is binary or UTF-16: a {kind} must be UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}:{line} is not UTF-8 (byte {data[error.start]:#04x}): save the file as UTF-8"
        ) from None


def _is_json(path: Path, text: str) -> bool:
    suffix = uncompressed(path).suffix
    return suffix in (".json", ".jsonl") or (suffix != ".tsv" and text.lstrip()[:1] in ("{", "["))


def _json_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    if _SQUAD.match(text):
        yield from _squad_records(path, text)
        return
    if text.lstrip().startswith("["):
        try:
            array = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{error.lineno} is not valid JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not valid JSON: {error}") from None
        yield from ((f"{path} entry {number}", record) for number, record in enumerate(array, start=1))
        return
    for where, line in _lines(path, text):
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise InputError(f"{where} is not valid JSON: {message}, in {shown(line)}") from None


_SQUAD = re.compile(r'\s*\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[')
"""Pattern for the start of SQuAD's nested JSON."""


def _squad_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The questions of SQuAD's nested JSON with their distinct answers."""
    try:
        asked = [
            (article["title"], pair)
            for article in json.loads(text)["data"]
            for paragraph in article["paragraphs"]
            for pair in paragraph["qas"]
        ]
        unanswerable = sum(not pair["answers"] for _, pair in asked)
        records = [
            {
                "id": pair["id"],
                "question": pair["question"],
                "answers": [answer["text"] for answer in pair["answers"]],
                "gold_titles": title.replace("_", " "),
            }
            for title, pair in asked
            if pair["answers"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path} is neither JSON Lines nor SQuAD's nested JSON: {problem}") from None
    if unanswerable:
        left_out = counted(unanswerable, "question")
        print(f"realm: left out of {path}: {left_out} without an answer", file=sys.stderr)
    yield from ((f"{path} question {record['id']!r}", record) for record in records)


def _table_records(path: Path, text: str, regex: bool | None) -> Iterator[tuple[str, Any]]:
    for where, line in _lines(path, text):
        cells = line.split("\t")
        match cells:
            case [question]:
                yield where, {"question": question}
            case [question, answers]:
                question, answers = _unquoted(question), _unquoted(answers)
                yield where, {"question": question, "answers": answers if regex else _listed(answers, where)}
            case [identifier, _, question, pattern]:
                yield where, {"id": identifier, "question": question, "answers": pattern, "regex": True}
            case _:
                raise InputError(
                    f"{where}: the line has {len(cells)} columns: give question and answers, or id, type, question and pattern"
                )


def _lines(path: Path, text: str) -> Iterator[tuple[str, str]]:
    # splitlines() would also split at U+2028 and other Unicode line ends, which JSON strings may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line.removesuffix("\r")


def _unquoted(cell: str) -> str:
    """The cell without the outer quotes that CSV adds to a cell that contains quotes."""
    cell = cell.strip()
    inner = cell[1:-1]
    quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' in inner
    return inner.replace('""', '"') if quoted and '"' not in inner.replace('""', "") else cell


def _listed(cell: str, where: str) -> Any:
    """The answers in a cell: a list literal or one plain answer."""
    # `_unquoted` keeps the outer quotes of a list without double quotes inside.
    if cell.startswith('"[') and cell.endswith(']"'):
        cell = cell[1:-1]
    if not cell.startswith("["):
        return cell
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings about invalid escape sequences
            return ast.literal_eval(cell)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise InputError(
            f"{where}: {shown(cell)} is not a list: write a list as ['first', 'second']"
        ) from None


def _question(record: Any, where: str, position: str, regex: bool, need_answers: bool) -> Question:
    if not isinstance(record, dict):
        raise InputError(f"{where}: {shown(record)} is no JSON object with question and answers")
    if "question" not in record and "qText" not in record:
        given = ", ".join(record)
        raise InputError(f"{where} has no question, only {shortened(given, 63) or 'an empty object'}")
    question = _text(_either(record, "question", "qText", where), "question", where).strip()
    if not question:
        raise InputError(f"{where}: the question is empty: write one, or remove the line")
    if len(question) > MAX_QUESTION_CHARACTERS:
        raise InputError(
            f"{where}: the question has {len(question)} characters: at most {MAX_QUESTION_CHARACTERS} are allowed"
        )
    own_regex = _either(record, "regex", "answers_are_regex", where)
    if not isinstance(own_regex, bool | None):
        raise InputError(f"{where}: regex is {shown(own_regex)}: write true or false")
    regex = regex or bool(own_regex)
    listed = _texts(_either(record, "answers", "answer", where))
    answers = [_text(answer, "answer", where) for answer in listed]
    answers = [answer if regex else answer.strip() for answer in answers if answer.strip()]
    if need_answers and not answers:
        raise InputError(f"{where}: the question {shown(question)} has no answers")
    if regex:
        for pattern in answers:
            if problem := _pattern_problem(pattern):
                raise InputError(f"{where}: {shown(pattern)} is not a regular expression: {problem}")
    passage = _id(record.get("passage_id"), "passage id", where)
    document = _id(record.get("document_id"), "document id", where)
    return Question(
        id=_id(_either(record, "id", "qId", where), "id", where, absent=position),
        question=question,
        answers=tuple(dict.fromkeys(answers)),
        regex=regex,
        gold_titles=tuple(_text(t, "gold title", where) for t in _texts(record.get("gold_titles"))),
        document_id=document or passage,
        passage_id=passage if document else "",
    )


def _id(value: Any, what: str, where: str, absent: str = "") -> str:
    """An id, which is a text or a whole number; `absent` if there is none."""
    if value is None:
        return absent
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value, what, where)


def _either(record: dict[str, Any], name: str, alias: str, where: str) -> Any:
    """The value of a key that has two names; None if both are absent."""
    value, other = record.get(name), record.get(alias)
    if value is not None and other is not None and value != other:
        raise InputError(
            f"{where}: {name} and {alias} mean the same and have different values: keep one of them"
        )
    return other if value is None else value


def _texts(value: Any) -> list[Any]:
    """A value or a list of values, as a list; None as an empty list."""
    return value if isinstance(value, list) else [] if value is None else [value]


_PATTERN_MARK = re.compile(
    r"""\\[sdwbSDWB.()$?+*]   # an escape
    | \.[*+]                # any characters
    | \(\?[:i=!]            # a group that prose does not have
    | [\])][?*+]            # a group or a set of characters, repeated
    | \([^()]*\|[^()]*\)    # a choice in brackets
    | [\w?]\|\w             # a choice
    | \w\?\w | [_.,]\?      # a character that may be missing
    | \d\[[\d-]{2,}\]       # one of some digits""",
    re.VERBOSE,
)
"""Matches two thirds of the patterns of CuratedTREC, but few of the plain answers of NQ-Open, WebQuestions and SQuAD."""


def _are_patterns(path: Path, records: Sequence[tuple[str, Any]]) -> bool:
    """Whether the file is DrQA's CuratedTREC.

    A line on standard error reports this, or warns about answers that look like patterns.
    """
    published = all(_is_curated_trec(record) for _, record in records)
    marked = [
        (where, answer)
        for where, record in records
        if isinstance(record, dict) and record.keys().isdisjoint(("regex", "answers_are_regex"))
        for answer in _texts(record.get("answers", record.get("answer")))
        if isinstance(answer, str) and _PATTERN_MARK.search(answer)
    ]
    if not marked:
        return False
    where, answer = marked[0]
    if published and 4 * len(marked) >= len(records):
        print(
            f"realm: {path} is read as CuratedTREC: all answers, such as {shown(answer)}, are regular expressions; "
            "if the answers are plain text, use --no-regex",
            file=sys.stderr,
        )
        return True
    print(
        f"realm: {where}: the answer {shown(answer)} looks like a regular expression, but is compared as plain text "
        f"(number of such answers in {path}: {len(marked)}); use --regex or --no-regex",
        file=sys.stderr,
    )
    return False


def _is_curated_trec(record: Any) -> bool:
    match record:
        case {"question": str(), "answer": [str(pattern)], **others} if not others:
            return _pattern_problem(pattern) is None
    return False


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: {name} is {shown(value)}, and must be a text")
    check_encodable(value, f"{where}: {name} ")
    return value


def _pattern_problem(pattern: str) -> str | None:
    try:
        compiled(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return None


@lru_cache(maxsize=1 << 14)
def compiled(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern for answers: case is ignored, and ^ and $ match at the start and end of each line."""
    with warnings.catch_warnings(action="ignore"):  # warnings about changes in later versions of Python
        return re.compile(pattern, re.IGNORECASE | re.UNICODE | re.MULTILINE)
