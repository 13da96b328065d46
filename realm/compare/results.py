"""Results of a table: scores of every row on every test, paired tests, and costs.

All numbers come from files that the commands of the stages wrote. Shares are in percent of the questions.

Axis letters: S seeds, N questions.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict, cast

import numpy as np

from realm.compare.plan import READING, TablePlan
from realm.compare.rows import BM25, beside
from realm.errors import DamagedError, InputError
from realm.files import read_json
from realm.model.manifest import read_manifest
from realm.model.tensor_files import load_tensors
from realm.progress import counted
from realm.qa.predictions import Prediction, read_predictions
from realm.qa.question_files import Question, read_questions
from realm.qa.scoring.metrics import RECALL_AT, is_correct, mean_reciprocal_rank, normalise_answer, recall_at
from realm.qa.scoring.significance import (
    PairedDifference,
    bootstrap_interval,
    paired_difference,
    percent,
    wilson_interval,
)
from realm.systems.knn_lm import PREDICTED_BY, KnnJson, Predicted
from realm.systems.system import WEIGHTS, is_system, read_system
from realm.train.metrics import METRICS


class Answered(TypedDict):
    """Scores of the answers of a row to some questions: exact match and token F1, and the 95 % interval of each score."""

    n: int
    em: float
    em_ci95: list[float]
    f1: float
    f1_ci95: list[float]
    em_by_seed: list[float]


class Retrieved(TypedDict):
    """Scores of the passages of a system for some questions: recall at k passages, and mean reciprocal rank."""

    n: int
    recall: dict[str, float]
    mrr: float
    recall_5_by_seed: list[float]


class Found(TypedDict):
    """Scores of the passages of a system on one test."""

    all: Retrieved
    answerable: Retrieved
    """Only questions for which at least one ranking of the table has an answer in the first 100 passages."""


class Tested(TypedDict):
    """Results of a row on one test."""

    all: Answered
    answerable: Answered
    """Only the questions of `Found.answerable`."""
    seen: Answered
    """Only questions with an answer that is also an answer of a training question, or of a question of `data.reading`."""
    unseen: Answered
    """All questions that are not in `seen`."""
    retrieved: Found | None
    """None for a system that retrieves no passages."""
    less: PairedDifference | None
    """Exact match of the row `StartJson.beside` (realm for most rows) minus exact match of this row; None for the row realm,
    and in a table without that row."""
    less_answerable: PairedDifference | None
    """`less` for the questions in `answerable`; None if there are none. A report in docs/tables can lack this key."""
    ms: float
    """Milliseconds per question."""


class RowJson(TypedDict):
    """A row of the table."""

    label: str
    parameters: int
    """Number of parameters of the networks that answer a question."""
    seconds: float | None
    """Training time of the system and of all models from which the system was made; None for a published model."""
    read: float
    """Mean number of passages that are read for a question."""
    tests: dict[str, Tested]


class FactsJson(TypedDict):
    """Retrieval for masked facts of held-out passages. A passage is right if it contains the masked span."""

    retrieved: Retrieved
    less: PairedDifference | None
    """Recall@5 of the start `StartJson.beside` minus recall@5 of this start; None for the start realm, and in a table without
    the start `beside`."""


class StartJson(TypedDict):
    """BM25 or a start, without training on questions."""

    tests: dict[str, Found]
    less: dict[str, PairedDifference]
    """Test -> recall@5 of the start `beside` minus recall@5 of this start. With one seed, the p value is the same for the
    answerable questions, because no start finds an answer to a question that is not answerable."""
    beside: str
    """Name of the start with which this start is compared: "no-injected" for random masks, "realm" for all others. A report in
    docs/tables can lack this key, which means "realm"."""
    facts: FactsJson | None
    """None for a published model, and in a table with only a published model."""


class QuestionsJson(TypedDict):
    """A set of questions that the table uses."""

    n: int
    digest: str
    """Digest of the questions with their answers."""
    name: str | None
    """Name of the published set with exactly these questions; None if there is no such set."""


class MadeBy(TypedDict):
    """Version, settings and data on which the numbers depend."""

    realm: str
    """Version of realm."""
    commit: str | None
    """Commit of the checkout of realm, with "-dirty" if files differ from the commit; None for an installed package."""
    stages_by: list[str]
    """The different versions, with their commits, that finished the stages in the folder, also in earlier calls. A report in
    docs/tables can lack this key."""
    preset: str | None
    jobs: int
    """Number of commands that could run at the same time, on which the times depend."""
    seeds: list[int]
    answer_seeds: int
    settings: dict[str, Any]
    """The settings of [compare] or [ablate]. The key "data" has those of [data]. Keys such as "pretrain" have the settings of a
    stage that were changed with --set."""
    stages: dict[str, dict[str, Any]]
    """Table of the preset, such as "pretrain" -> all settings of its stage. A report in docs/tables can lack this key."""
    passages: int
    corpus: str
    """Fingerprint of the knowledge base."""
    other_corpora: dict[str, str]
    """"text-kb" (X of the row realm-x) and "reading-kb" (`data.reading`), if the rows need them -> fingerprint. A report in
    docs/tables can lack this key."""
    questions: dict[str, QuestionsJson]
    """Name of a test, "train", "dev" or "reading" (the training part of `data.reading`) -> set of questions."""
    dropped: int
    """Number of questions that were left out of "train", "dev" and `data.reading` because they are also in a test; from
    `data.reading`, dev questions are left out too."""


class TableJson(TypedDict):
    """Content of table1.json or table2.json."""

    made_by: MadeBy
    rows: dict[str, RowJson]
    starts: dict[str, StartJson]
    curves: dict[str, list[list[tuple[int, float]]]]
    """Start that `realm pretrain` trained -> for each seed, training steps, and the recall@5 of the index after these steps.
    The masked facts are those that the training measures. A report in docs/tables can lack the curves."""
    masked_facts: KnnJson | None
    """Results of kNN-LM and REALM on masked facts; None in a table without the start realm."""


def read(plan: TablePlan, made_by: MadeBy) -> TableJson:
    """The results of a table whose stages are done.

    Raises:
        InputError: a report is about other questions or masked facts than the other reports.
        DamagedError: a report is damaged.
    """
    tests = {name: _Test.read(plan, name, file) for name, file in plan.tests().items()}
    return {
        "made_by": made_by,
        "rows": _rows(plan, tests),
        "starts": _starts(plan, tests),
        "curves": _curves(plan),
        "masked_facts": _read_knn(plan.datastore / "report.json") if plan.predicts_spans else None,
    }


class _Test(NamedTuple):
    """Results of all systems on the questions of a test. Arrays are [S, N]; for BM25, S is 1."""

    questions: list[Question]
    correct: dict[str, np.ndarray]
    """Row -> bool."""
    f1: dict[str, np.ndarray]
    rank: dict[str, np.ndarray]
    """Row -> rank of the first passage with an answer; 0 if no passage has an answer."""
    start_rank: dict[str, np.ndarray]
    """BM25 or start -> rank of the first passage with an answer."""
    answerable_N: np.ndarray
    """bool: whether at least one ranking with the first seed has an answer in the first 100 passages."""

    @classmethod
    def read(cls, plan: TablePlan, test: str, file: Path) -> Self:
        seeds, questions = plan.config.seeds, read_questions(file)
        asked = seeds[: plan.config.answer_seeds]
        rows = list(plan.rows()) if asked else []

        def of_rows(key: str) -> dict[str, np.ndarray]:
            reports = {name: [plan.report(name, seed, test) for seed in asked] for name in rows}
            return {name: outcomes(files, key, questions) for name, files in reports.items()}

        rank = of_rows("rank")
        start_rank = {BM25: outcomes([plan.retrieval(BM25, seeds[0], test)], "rank", questions)}
        for start in plan.before_questions():
            files = [plan.retrieval(start, seed, test) for seed in seeds]
            start_rank[start] = outcomes(files, "rank", questions)
        first = [rank_SN[0] for rank_SN in (*rank.values(), *start_rank.values())]
        return cls(questions, of_rows("correct"), of_rows("f1"), rank, start_rank, np.any(first, axis=0))


def outcomes(files: Sequence[Path], key: str, questions: Sequence[Question]) -> np.ndarray:
    """Values of `key` in the outcomes of all questions, in a report for each seed -> [S, N].

    Raises:
        InputError: a report is about other questions, or about the same questions in another order.
        DamagedError: a report is damaged.
    """
    ids, value_SN = [question.id for question in questions], []
    for file in files:
        found = outcomes_of(file, "id", key)
        if [one for one, _ in found] != ids:
            raise InputError(
                f"{file} does not have the outcomes of the {counted(len(ids), 'question')} of the test, in their order: remove "
                "it, and make the table again"
            )
        value_SN.append([value for _, value in found])
    return np.array(value_SN)


KINDS = {"id": str, "passage": str, "correct": bool, "f1": float, "rank": int}
"""Key of an outcome -> type of its value."""


def outcomes_of(file: Path, *keys: str) -> list[tuple[Any, ...]]:
    """The values of some keys in each outcome of a report.

    Raises:
        DamagedError: the file is not a report with such outcomes.
    """
    try:
        found = [tuple(one[key] for key in keys) for one in read_json(file)["outcomes"]]
    except (KeyError, TypeError):
        found = []
    if not found or any(
        type(value) is not KINDS[key] for one in found for key, value in zip(keys, one, strict=True)
    ):
        raise DamagedError(
            f"{file} has no outcomes with {' and '.join(keys)}: remove it, and make the table again"
        )
    return found


def _rows(plan: TablePlan, tests: dict[str, _Test]) -> dict[str, RowJson]:
    seeds = plan.config.seeds[: plan.config.answer_seeds]
    if not seeds:
        return {}
    files = [plan.questions("train"), *([plan.questions(f"{READING}-train")] if plan.reads_first else [])]
    trained = {answer for file in files for one in read_questions(file) for answer in one.answers}
    known = set(map(normalise_answer, trained))
    seen = {
        name: np.array([_is_seen(question, trained, known) for question in test.questions])
        for name, test in tests.items()
    }
    rows: dict[str, RowJson] = {}
    for name, row in plan.rows().items():
        predicted = {test: read_predictions(plan.predictions(name, seeds[0], test)) for test in tests}
        every = [one for predictions in predicted.values() for one in predictions]
        words = row.method == "bm25" or "method=bm25" in row.settings
        rows[name] = {
            "label": row.label,
            "parameters": _parameters(plan.row_model(name, seeds[0]), words),
            "seconds": _seconds(plan, name, seeds[0]),
            "read": round(float(np.mean([one.read for one in every])), 1),
            "tests": {
                test: _tested(name, beside(row.start), tests[test], seen[test], predictions)
                for test, predictions in predicted.items()
            },
        }
    return rows


def _tested(
    name: str, other: str, test: _Test, seen_N: np.ndarray, predictions: Sequence[Prediction]
) -> Tested:
    correct_SN, f1_SN = test.correct[name], test.f1[name]
    has_passages = any(one.passages for one in predictions)
    every_N = np.ones_like(seen_N)

    def less(chosen_N: np.ndarray) -> PairedDifference | None:
        if name == "realm" or other not in test.correct or not chosen_N.any():
            return None
        return paired_difference(test.correct[other][:, chosen_N], correct_SN[:, chosen_N], 1)

    return {
        "all": _answered(correct_SN, f1_SN, every_N),
        "answerable": _answered(correct_SN, f1_SN, test.answerable_N),
        "seen": _answered(correct_SN, f1_SN, seen_N),
        "unseen": _answered(correct_SN, f1_SN, ~seen_N),
        "retrieved": _found(test.rank[name], test) if has_passages else None,
        "less": less(every_N),
        "less_answerable": less(test.answerable_N),
        "ms": round(float(np.mean([one.ms for one in predictions])), 1),
    }


def _is_seen(question: Question, trained: set[str], known: set[str]) -> bool:
    """Whether an answer is also the answer of a training question. `known` has the normalised answers `trained`."""
    if question.regex:
        return not trained.isdisjoint(question.answers) or any(is_correct(one, question) for one in trained)
    return any(normalise_answer(answer) in known for answer in question.answers)


def _answered(correct_SN: np.ndarray, f1_SN: np.ndarray, chosen_N: np.ndarray) -> Answered:
    """Means over the seeds and the chosen questions.

    The intervals show the variation between questions; the seeds are averaged first.
    """
    n = int(chosen_N.sum())
    if not n:
        return {
            "n": 0,
            "em": 0.0,
            "em_ci95": [0.0, 100.0],
            "f1": 0.0,
            "f1_ci95": [0.0, 100.0],
            "em_by_seed": [0.0] * len(correct_SN),
        }
    share = float(correct_SN[:, chosen_N].mean())
    f1_N = f1_SN[:, chosen_N].mean(axis=0)
    return {
        "n": n,
        "em": percent(share),
        "em_ci95": [percent(end) for end in wilson_interval(round(share * n), n)],
        "f1": percent(float(f1_N.mean())),
        "f1_ci95": [percent(end) for end in bootstrap_interval(f1_N)],
        "em_by_seed": [percent(share) for share in correct_SN[:, chosen_N].mean(axis=1)],
    }


def _found(rank_SN: np.ndarray, test: _Test) -> Found:
    return {"all": _retrieved(rank_SN), "answerable": _retrieved(rank_SN[:, test.answerable_N])}


def _retrieved(rank_SN: np.ndarray) -> Retrieved:
    n = rank_SN.shape[1]
    if not n:
        nothing = {str(k): 0.0 for k in RECALL_AT}
        return {"n": 0, "recall": nothing, "mrr": 0.0, "recall_5_by_seed": [0.0] * len(rank_SN)}
    return {
        "n": n,
        "recall": {
            str(k): round(float(np.mean([recall_at(rank_N, k) for rank_N in rank_SN])), 3) for k in RECALL_AT
        },
        "mrr": percent(float(np.mean([mean_reciprocal_rank(rank_N) for rank_N in rank_SN]))),
        "recall_5_by_seed": [round(recall_at(rank_N, 5), 3) for rank_N in rank_SN],
    }


def _seconds(plan: TablePlan, name: str, seed: int) -> float | None:
    """Training time of the system of a row, and of all models from which the system was made."""
    folder, start = plan.row_model(name, seed), plan.table[plan.table[name].of or name].start
    reader = plan.reader(name, seed)
    if is_system(folder):
        init, records = reader or plan.start_model(start, seed), read_system(folder)["stages"]
        made_from = [Path(record.get("init") or "").parts[-2:] for record in records]
        if init.parts[-2:] in made_from:  # the folder of the table can have another path now
            records = [*read_manifest(init)["stages"], *records]
    else:
        parts = [] if reader is None else [reader]
        if encoder := plan.start(start).encoder_of:
            parts.append(plan.start_model(encoder, seed))
        records = []
        for part in (folder, *parts):
            records += [record for record in read_manifest(part)["stages"] if record not in records]
    if any(record["stage"] == "published" for record in records):
        return None
    return round(sum(record.get("seconds", 0.0) for record in records), 1)


def _parameters(folder: Path, words: bool) -> int:
    """Number of parameters of the networks that answer. With `words`, passages are found by BM25, without the embedder.

    Buffers such as `SpanReader.continues_V`, which are not floating-point numbers, are not counted.
    """
    if is_system(folder):
        files = [folder / WEIGHTS]
    else:
        files = [folder / "span_reader.safetensors", *([] if words else [folder / "embedder.safetensors"])]
    stored = (value for file in files for value in load_tensors(file).values())
    return sum(value.numel() for value in stored if value.is_floating_point())


def _starts(plan: TablePlan, tests: dict[str, _Test]) -> dict[str, StartJson]:
    names = list(next(iter(tests.values())).start_rank)
    facts = facts_of(plan)
    return {
        name: {
            "tests": {key: _found(test.start_rank[name], test) for key, test in tests.items()},
            "less": {
                key: paired_difference(test.start_rank[beside(name)], test.start_rank[name])
                for key, test in tests.items()
                if beside(name) in names and name != "realm"
            },
            "beside": beside(name),
            "facts": facts.get(name),
        }
        for name in names
    }


def facts_of(plan: TablePlan) -> dict[str, FactsJson]:
    """BM25 or start -> retrieval for masked facts.

    Raises:
        InputError: the reports are about different masked facts.
        DamagedError: a report is damaged.
    """
    probed = plan.probed()
    found = {
        name: [outcomes_of(plan.probe(name, seed), "passage", "rank") for seed in plan.config.seeds]
        for name in ((BM25, *probed) if probed else ())
    }
    if len({tuple(passage for passage, _ in seed) for seeds in found.values() for seed in seeds}) > 1:
        raise InputError(
            f"the files {plan.folder / 'reports' / 'probe-*.json'} are about different masked facts: remove these files, and "
            "repeat the command"
        )
    rank = {name: np.array([[one for _, one in seed] for seed in seeds]) for name, seeds in found.items()}
    return {
        name: {
            "retrieved": _retrieved(rank_SN),
            "less": paired_difference(rank[beside(name)], rank_SN)
            if beside(name) in rank and name != "realm"
            else None,
        }
        for name, rank_SN in rank.items()
    }


def _read_knn(file: Path) -> KnnJson:
    """The report of kNN-LM.

    Raises:
        DamagedError: the file is not such a report.
    """
    found = read_json(file)
    try:
        whole = all(Predicted.__required_keys__ <= found[name].keys() for name in PREDICTED_BY)
    except (AttributeError, KeyError, TypeError):
        whole = False
    if not whole or not KnnJson.__required_keys__ <= found.keys():
        raise DamagedError(f"{file} is not a report of `realm knn`: remove it, and make the table again")
    return cast(KnnJson, found)


def _curves(plan: TablePlan) -> dict[str, list[list[tuple[int, float]]]]:
    curves = {}
    for start in plan.before_questions():
        seeds = [_curve(plan.start_model(start, seed) / METRICS) for seed in plan.config.seeds]
        if all(seeds):
            curves[start] = seeds
    return curves


def _curve(metrics: Path) -> list[tuple[int, float]]:
    """The steps of the measured index versions, each with its recall@5; empty if there are none."""
    if not metrics.exists():
        return []
    try:
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        return [(row["index_step"], row["probe_recall_5"]) for row in rows if "probe_recall_5" in row]
    except (KeyError, TypeError, ValueError):
        raise DamagedError(
            f"{metrics} is damaged: remove it (the table then has no curve of this model), and make the table again"
        ) from None


def measured_facts(report: TableJson) -> dict[str, FactsJson]:
    """BM25 or start -> retrieval for masked facts, without the starts that were not measured.

    A report in docs/tables can lack them.
    """
    facts = {name: start.get("facts") for name, start in report["starts"].items()}
    return {name: one for name, one in facts.items() if one is not None}
