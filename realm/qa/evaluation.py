"""Questions from files, and the numbers of a set of predictions: exact match, F1, recall.

What lives here is text in, numbers out: no model, no index, no torch. Scores follow the published scripts by name:
ORQA's (and so REALM's) and the one that SQuAD, DPR and FiD share; where they differ, `Scoring` chooses.

N questions.
"""

import ast
import json
import re
import string
import sys
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np

from realm.config import InputError
from realm.qa.calibration import Confidence, ConfidenceJson
from realm.qa.significance import percent, wilson_interval

MAX_QUESTION_CHARACTERS = 2000
RECALL_AT = (1, 5, 20, 100)

Normalisation = Literal["orqa", "squad"]
RegexHow = Literal["search", "match", "fullmatch"]
Containment = Literal["tokens", "substring"]


class Question(NamedTuple):
    """A question with its accepted answers, which are regular expressions where `regex` is set."""

    id: str
    question: str
    answers: tuple[str, ...]
    regex: bool = False
    gold_titles: tuple[str, ...] = ()
    """Titles of documents known to hold an answer, where the file says so; no score here reads them."""
    passage_id: str = ""
    """Id of a document that holds an answer, where the file names it: fine-tuning may read it, no score here does."""


@dataclass(frozen=True)
class Scoring:
    """How strings are compared; `ORQA` and `DPR` below give the published combinations."""

    normalise: Normalisation = "orqa"
    """Of predictions and answers before exact match and F1: with Unicode decomposition (ORQA) or without (SQuAD)."""
    regex: RegexHow = "search"
    """Where a pattern must fit the prediction: anywhere (the data's own rule), at its start (ORQA), or all of it."""
    contains: Containment = "tokens"
    """When a passage holds an answer: as a run of whole tokens (DPR), or as a raw substring (ORQA)."""


ORQA = Scoring("orqa", "match", "substring")
DPR = Scoring("squad", "search", "tokens")


# -- Questions from files


def read_questions(
    path: str | Path, *, regex: bool | None = None, need_answers: bool = True
) -> list[Question]:
    """Questions of one file; its format is recognised by content.

    - JSON Lines or one JSON array of objects with `question` (or `qText`), `answers` (or `answer`; a text or a list of
      texts), and if given `id` (or `qId`), `regex` (or `answers_are_regex`), `gold_titles` and `passage_id`. Other keys
      are ignored.
      This covers NQ-Open, DPR, DrQA and WebQuestions.
    - Lines of `question` and one `answer` alone of which a quarter are unmistakable patterns (DrQA's CuratedTREC): all
      are patterns. A line on standard error says so.
    - Tab-separated id, type, question, pattern (CuratedTREC): always patterns.
    - Tab-separated question, answers: a list as Python or JSON writes it (DPR), or a single answer as plain text.

    Args:
        regex: True: all answers are patterns; False: only those that the file itself says are; None: DrQA's CuratedTREC
            is recognised, and an answer elsewhere that looks like a pattern is a warning on standard error.
        need_answers: False also takes questions without answers, and plain text with one question per line.

    A question without an id gets its position in the file, from 1.

    Raises:
        InputError: one line with file, line and what is wrong there.
    """
    path = Path(path)
    text = _read_text(path)
    records = list(_json_records(path, text) if _is_json(path, text) else _table_records(path, text, regex))
    if regex is None and need_answers:
        regex = _are_patterns(path, records)
    questions: list[Question] = []
    seen: dict[str, str] = {}
    for where, record in records:
        question = _question(record, where, str(len(questions) + 1), bool(regex), need_answers)
        if question.id in seen:
            raise InputError(
                f"{where}: id {question.id!r} is already at {seen[question.id]}: give each its own"
            )
        seen[question.id] = where
        questions.append(question)
    if not questions:
        raise InputError(
            f"{path} holds no questions: write one JSON object per line with question and answers"
        )
    return questions


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"no question file {path}") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: name one question file in it") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if b"\0" in data:
        raise InputError(f"{path} is binary or UTF-16: questions are UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}:{line}: not UTF-8 (byte {data[error.start]:#04x}): save it as UTF-8"
        ) from None


def _is_json(path: Path, text: str) -> bool:
    return path.suffix in (".json", ".jsonl") or (path.suffix != ".tsv" and text.lstrip()[:1] in ("{", "["))


def _json_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        try:
            array = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not valid JSON: {error}") from None
        yield from ((f"{path} entry {number}", record) for number, record in enumerate(array, start=1))
        return
    for where, line in _lines(path, text):
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise InputError(f"{where}: not valid JSON: {message}, in {_short(line)}") from None


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
                    f"{where}: {len(cells)} columns: give question and answers, or id, type, question and pattern"
                )


def _lines(path: Path, text: str) -> Iterator[tuple[str, str]]:
    # Not splitlines(): JSON strings may hold U+2028 and other line ends of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line.removesuffix("\r")


def _unquoted(cell: str) -> str:
    """A cell without the quotes that CSV puts around one that holds quotes."""
    cell = cell.strip()
    inner = cell[1:-1]
    quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' in inner
    return inner.replace('""', '"') if quoted and '"' not in inner.replace('""', "") else cell


def _listed(cell: str, where: str) -> Any:
    """The answers in a cell: a list literal or one plain answer."""
    if cell.startswith('"[') and cell.endswith(']"'):  # quoted although no quotes are inside
        cell = cell[1:-1]
    if not cell.startswith("["):
        return cell
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            return ast.literal_eval(cell)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise InputError(f"{where}: {_short(cell)} is no list: write it as ['first', 'second']") from None


def _question(record: Any, where: str, position: str, regex: bool, need_answers: bool) -> Question:
    if not isinstance(record, dict):
        raise InputError(f"{where}: {_short(record)} is no JSON object with question and answers")
    if "question" not in record and "qText" not in record:
        given = ", ".join(record)
        raise InputError(
            f"{where}: no question, only {given[:60] + '...' * (len(given) > 60) or 'an empty object'}"
        )
    question = _text(_either(record, "question", "qText", where), "question", where).strip()
    if not question:
        raise InputError(f"{where}: the question is empty")
    if len(question) > MAX_QUESTION_CHARACTERS:
        raise InputError(
            f"{where}: a question of {len(question)} characters: the longest accepted has {MAX_QUESTION_CHARACTERS}"
        )
    own_regex = _either(record, "regex", "answers_are_regex", where)
    if not isinstance(own_regex, bool | None):
        raise InputError(f"{where}: regex is {_short(own_regex)}: write true or false")
    regex = regex or bool(own_regex)
    listed = _texts(_either(record, "answers", "answer", where))
    answers = [_text(answer, "answer", where) for answer in listed]
    answers = [answer if regex else answer.strip() for answer in answers if answer.strip()]
    if need_answers and not answers:
        raise InputError(f"{where}: no answers for {_short(question)}")
    if regex:
        for pattern in answers:
            _check_pattern(pattern, where)
    identifier = _either(record, "id", "qId", where)
    if isinstance(identifier, int) and not isinstance(identifier, bool):
        identifier = str(identifier)
    return Question(
        id=position if identifier is None else _text(identifier, "id", where),
        question=question,
        answers=tuple(dict.fromkeys(answers)),
        regex=regex,
        gold_titles=tuple(_text(t, "gold title", where) for t in _texts(record.get("gold_titles"))),
        passage_id=_text(record.get("passage_id", ""), "passage id", where),
    )


def _either(record: dict[str, Any], name: str, alias: str, where: str) -> Any:
    """The value of a key that has two names, None without one."""
    value, other = record.get(name), record.get(alias)
    if value is not None and other is not None and value != other:
        raise InputError(f"{where}: {name} and {alias} are one key and have two values: keep one of them")
    return other if value is None else value


def _texts(value: Any) -> list[Any]:
    """One value or a list of them, as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


_PATTERN_MARK = re.compile(
    r"""\\[sdwbSDWB.()$?+*]   # an escape
    | \.[*+]                # any characters
    | \(\?[:i=!]            # a group that is none of prose
    | [\])][?*+]            # a group or a set of characters, repeated
    | \([^()]*\|[^()]*\)    # a choice in brackets
    | [\w?]\|\w             # a choice
    | \w\?\w | [_.,]\?      # a character that may be missing
    | \d\[[\d-]{2,}\]       # one of some digits""",
    re.VERBOSE,
)
"""What two thirds of CuratedTREC's answers have, and one in 100,000 of those of NQ-Open, WebQuestions and SQuAD."""


def _are_patterns(path: Path, records: Sequence[tuple[str, Any]]) -> bool:
    """Whether a file is DrQA's CuratedTREC; says so on standard error, and if not, whether one of its answers looks like it."""
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
            f"realm: {path} is read as CuratedTREC: all answers are regular expressions, as {_short(answer)} is; "
            "if they are plain text, say so with --no-regex",
            file=sys.stderr,
        )
        return True
    print(
        f"realm: {where}: {_short(answer)} is compared as plain text and looks like a regular expression "
        f"(such answers in {path}: {len(marked)}); say which with --regex or --no-regex",
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
        raise InputError(f"{where}: {name} is {_short(value)}: write it as text")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no file or tokenizer takes
        raise InputError(f"{where}: {name} {_short(value)} holds half a character") from None
    return value


def _check_pattern(pattern: str, where: str) -> None:
    problem = _pattern_problem(pattern)
    if problem is not None:
        raise InputError(f"{where}: {_short(pattern)} is no regular expression: {problem}")


def _pattern_problem(pattern: str) -> str | None:
    try:
        _pattern(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -- One prediction


def normalise_answer(text: str, normalisation: Normalisation = "orqa") -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces; `orqa` decomposes characters first (NFD).

    Accents are decomposed, not removed: "Café" and "cafe" stay apart (ORQA `eval_utils`; SQuAD `evaluate-v1.1`).

    >>> normalise_answer("The  U.S. Dollar!")
    'us dollar'
    """
    if normalisation == "orqa":
        text = unicodedata.normalize("NFD", text)
    text = text.lower().translate(_DELETE_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(prediction: str, answers: Sequence[str], normalisation: Normalisation = "orqa") -> bool:
    """Whether the prediction equals one of the answers once both are normalised."""
    predicted = normalise_answer(prediction, normalisation)
    return any(predicted == normalise_answer(answer, normalisation) for answer in answers)


def regex_match(prediction: str, patterns: Sequence[str], how: RegexHow = "search") -> bool:
    """Whether one of the patterns fits; case never counts, ^ and $ are those of each line.

    `search` takes a fit anywhere, as the questions' makers define it; `match` wants it at the start, as ORQA scores.
    """
    return any(getattr(_pattern(pattern), how)(prediction) is not None for pattern in patterns)


@lru_cache(maxsize=1 << 14)
def _pattern(pattern: str) -> re.Pattern[str]:
    with warnings.catch_warnings(action="ignore"):  # of patterns that a later Python may read otherwise
        return re.compile(pattern, re.IGNORECASE | re.UNICODE | re.MULTILINE)


def f1(prediction: str, answers: Sequence[str], normalisation: Normalisation = "orqa") -> float:
    """Best harmonic mean of token precision and recall over the answers (SQuAD); two empty texts give 0.

    >>> round(f1("the river Nile", ["Nile", "Amazon"]), 3)
    0.667
    """
    predicted = Counter(normalise_answer(prediction, normalisation).split())
    return max(
        (_token_f1(predicted, Counter(normalise_answer(a, normalisation).split())) for a in answers),
        default=0,
    )


def _token_f1(predicted: Counter[str], answer: Counter[str]) -> float:
    common = (predicted & answer).total()
    return 2 * common / (predicted.total() + answer.total()) if common else 0.0


def is_correct(prediction: str, question: Question, scoring: Scoring = Scoring()) -> bool:
    """Exact match, or for a question with patterns a match of one of them."""
    if question.regex:
        return regex_match(prediction, question.answers, scoring.regex)
    return exact_match(prediction, question.answers, scoring.normalise)


# -- One question's retrieved texts


def has_answer(text: str, question: Question, contains: Containment = "tokens") -> bool:
    """Whether the text holds an answer, the notion under every recall@k.

    `tokens`: as a run of whole tokens, case and Unicode form aside (DPR), so that "1" is not found in "2018".
    `substring`: as it stands, case and all (ORQA's block labels). Patterns are searched either way.

    >>> q = Question("1", "who painted guernica?", ("Pablo Picasso",))
    >>> has_answer("Guernica is a painting by PABLO PICASSO.", q), has_answer("Pablo Picassos", q)
    (True, False)
    """
    if question.regex:
        return regex_match(text, question.answers)
    if contains == "substring":
        return any(answer in text for answer in question.answers)
    tokens = _tokens(text)
    return any(found in tokens for found in map(_tokens, question.answers) if found.strip())


class _Spaced(dict[int, str]):
    """For `str.translate`: spaces around every mark, a space for separators and controls, letters and numbers as is."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        kind = unicodedata.category(character)[0]
        self[code] = character if kind in "LNM" else " " if kind in "ZC" else f" {character} "
        return self[code]


_SPACED = _Spaced()


@lru_cache(maxsize=1 << 16)
def _tokens(text: str) -> str:
    """The text's tokens between single spaces: runs of letters, numbers and accents, and each mark alone (DPR).

    Remembered, because training asks about the same passages for one question after another.
    """
    return f" {' '.join(unicodedata.normalize('NFD', text).lower().translate(_SPACED).split())} "


def first_hit(texts: Iterable[str], question: Question, contains: Containment = "tokens") -> int:
    """Rank, from 1, of the first text that holds an answer; 0 if none does."""
    ranks = (rank for rank, text in enumerate(texts, start=1) if has_answer(text, question, contains))
    return next(ranks, 0)


def recall_at(first_hits: Sequence[int] | np.ndarray, ks: Sequence[int] = RECALL_AT) -> dict[int, float]:
    """Share of questions with an answer among the first k texts, for each k; `first_hits` as from `first_hit`.

    >>> recall_at([1, 0, 3, 7], ks=(1, 5))
    {1: 0.25, 5: 0.5}
    """
    ranks_N = np.asarray(first_hits)
    return {k: float(((ranks_N >= 1) & (ranks_N <= k)).mean()) for k in ks}


def mean_reciprocal_rank(first_hits: Sequence[int] | np.ndarray) -> float:
    """Mean of 1 / rank of the first hit, 0 where there is none."""
    ranks_N = np.asarray(first_hits)
    return float(np.where(ranks_N >= 1, 1 / np.maximum(ranks_N, 1), 0.0).mean())


# -- A set of predictions


class ReportJson(TypedDict):
    """What `realm evaluate` reports, in percent; recall beyond what was retrieved is null, not guessed.

    Without a span reader no answer is read: `em`, `em_ci95`, `f1` and `confidence` are null.
    """

    n: int
    em: float | None
    em_ci95: list[float] | None
    f1: float | None
    recall: dict[str, float | None]
    mrr: float
    confidence: ConfidenceJson | None


class Outcome(TypedDict):
    """One question's share in a report: `f1` between 0 and 1, `rank` of the first hit from 1, 0 for none.

    Without a span reader `correct`, `f1` and `probability` are null.
    """

    id: str
    correct: bool | None
    f1: float | None
    rank: int
    probability: float | None


class ReportFile(ReportJson):
    """What `realm evaluate --out` writes."""

    outcomes: list[Outcome]


class Report(NamedTuple):
    """Outcome per question, so that two systems can be compared in pairs, and their summary."""

    correct_N: np.ndarray | None
    """bool, exact match or pattern match; None where no answer was read."""
    f1_N: np.ndarray | None
    """float; for questions with patterns, which have no answer to share tokens with, 1 where correct; None as above."""
    first_hit_N: np.ndarray
    """int, rank of the first retrieved text with an answer, 0 for none."""
    depth: int
    """Texts asked for per question."""
    confidence: Confidence | None = None
    """None where the predictions came without probabilities."""

    def as_dict(self) -> ReportJson:
        """The summary, reciprocal rank in percent too."""
        recall = recall_at(self.first_hit_N)
        return {
            "n": len(self.first_hit_N),
            "em": None if self.correct_N is None else percent(self.correct_N.mean()),
            "em_ci95": None if self.correct_N is None else _interval(self.correct_N),
            "f1": None if self.f1_N is None else percent(self.f1_N.mean()),
            "recall": {str(k): percent(recall[k]) if k <= self.depth else None for k in RECALL_AT},
            "mrr": percent(mean_reciprocal_rank(self.first_hit_N)),
            "confidence": (
                None
                if self.correct_N is None or self.confidence is None
                else self.confidence.as_dict(self.correct_N)
            ),
        }

    def lines(self) -> list[str]:
        """The summary for a person."""
        said = self.as_dict()
        recall = ", ".join(f"{share:g}% at {k}" for k, share in said["recall"].items() if share is not None)
        lines = [f"{said['n']:,} questions"]
        if said["em"] is not None and said["em_ci95"] is not None:
            low, high = said["em_ci95"]
            lines.append(
                f"answers: {said['em']:g}% exact (95% interval {low:g} to {high:g}), F1 {said['f1']:g}%"
            )
        lines.append(
            f"passages: an answer is among the first ones for {recall}; reciprocal rank {said['mrr']:g}%"
        )
        if self.confidence is not None and self.correct_N is not None:
            lines += self.confidence.lines(self.correct_N)
        return lines

    def outcomes(self, questions: Sequence[Question]) -> list[Outcome]:
        """Each question's own, in the order of the questions."""
        nothing = [None] * len(questions)
        correct = nothing if self.correct_N is None else self.correct_N.tolist()
        scores = nothing if self.f1_N is None else self.f1_N.tolist()
        sure = nothing if self.confidence is None else self.confidence.probability_N.tolist()
        rows = zip(questions, correct, scores, self.first_hit_N, sure, strict=True)
        return [
            {"id": question.id, "correct": right, "f1": score, "rank": int(rank), "probability": probability}
            for question, right, score, rank, probability in rows
        ]


def evaluate(
    predictions: Iterable[str] | None,
    retrieved: Iterable[Sequence[str]],
    questions: Sequence[Question],
    depth: int | None = None,
    scoring: Scoring = Scoring(),
) -> Report:
    """Scores predictions and retrieved texts, both in the order of the questions.

    Args:
        predictions: None: no answers were read, and only retrieval is scored.
        retrieved: per question the passages' texts, best first. An iterator is read one question at a time.
        depth: how many texts were asked for, when a small knowledge base gave fewer; default the longest list.
    """
    if not questions:
        raise InputError("no questions to evaluate")
    hits, longest = [], 0
    for question, texts in zip(questions, retrieved, strict=True):
        hits.append(first_hit(islice(texts, depth), question, scoring.contains))
        longest = max(longest, len(texts))
    retrieval = np.array(hits), longest if depth is None else depth
    if predictions is None:
        return Report(None, None, *retrieval)
    correct, scores = [], []
    for question, prediction in zip(questions, predictions, strict=True):
        right = is_correct(prediction, question, scoring)
        correct.append(right)
        scores.append(float(right) if question.regex else f1(prediction, question.answers, scoring.normalise))
    return Report(np.array(correct), np.array(scores), *retrieval)


def _interval(correct_N: np.ndarray) -> list[float]:
    return [percent(end) for end in wilson_interval(int(correct_N.sum()), len(correct_N))]
