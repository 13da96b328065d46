"""Runs the stages of a table, and writes its report."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from realm import __version__
from realm.compare import plots, results
from realm.compare.plan import DataConfig, Plan, TableConfig, read_all, split_questions
from realm.compare.rows import Row
from realm.files import write_json, write_json_lines
from realm.qa.official import digest_of, recognised
from realm.qa.question_files import Question, read_questions
from realm.stages.memory import PeakMemory
from realm.stages.runner import Record, run_stages
from realm.store.knowledge_base import KnowledgeBase


def run(
    title: str,
    table: Mapping[str, Row],
    config: TableConfig,
    data: DataConfig,
    preset: str | None,
    folder: Path,
    run_command: Callable[[Sequence[str]], None],
) -> results.TableJson:
    """Makes a table -> its report, which is also written; stages that are done are skipped.

    Raises:
        InputError: a question file or a row cannot be used, or a stage refuses its input.
    """
    plan = Plan(config, data, preset, folder, table)
    plan.check()
    rows = plan.rows()
    print(f"{title}: {len(rows)} rows ({', '.join(rows)}), in {folder}")
    print("Each line that begins with $ is a command that you can also run yourself.")
    print("You can stop at any time: the same command continues.")
    folder.mkdir(parents=True, exist_ok=True)
    with PeakMemory() as memory:
        record = Record(folder / "stages.json", memory)
        run_stages(plan.preparing(), record, run_command)
        _write_questions(plan)
        run_stages(plan.starting(), record, run_command)
        run_stages(plan.training(), record, run_command)
        run_stages(plan.measuring(), record, run_command)
    report = results.read(plan, _made_by(plan))
    write_json(folder / "report.json", report)
    (folder / "table.md").write_text(results.markdown(report), encoding="utf-8")
    plots.draw(report, folder / "table.png")
    print("", *results.lines(report), sep="\n")
    print(f"All numbers are in {folder / 'report.json'}, the tables in table.md and table.png beside it.")
    return report


def _write_questions(plan: Plan) -> None:
    """Writes the training, dev and, if there are no test files, test questions, unless they exist."""
    if plan.questions("dev").exists():
        return
    data, made = plan.data, plan.folder / "questions" / "made"
    if data.train:
        tests = [question for file in plan.tests().values() for question in read_questions(file)]
        train, dev = split_questions(read_all(data.train), read_all(data.dev), tests)
        parts = {"train": train, "dev": dev}
    else:
        other = read_questions(made / "dev.jsonl")  # about other documents than the training questions
        parts = {"train": read_questions(made / "train.jsonl"), "test": other[::2], "dev": other[1::2]}
    for name in sorted(parts, key=("train", "test", "dev").index):  # dev last: it marks that all are written
        write_json_lines(plan.questions(name), map(_question_json, parts[name]))


def _question_json(question: Question) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": question.id,
        "question": question.question,
        "answers": list(question.answers),
    }
    if question.regex:
        record["regex"] = True
    if question.passage_id:
        record["passage_id"] = question.passage_id
    return record


def _made_by(plan: Plan) -> dict[str, Any]:
    """What the numbers depend on: version, preset, settings, and digests of corpus and questions, with published names."""
    files = {**plan.tests(), "train": plan.questions("train"), "dev": plan.questions("dev")}
    asked = {name: read_questions(file) for name, file in files.items()}
    digests = {name: recognised(questions) or digest_of(questions) for name, questions in asked.items()}
    return {
        "realm": __version__,
        "commit": _commit(),
        "preset": plan.preset,
        "settings": asdict(plan.config) | {"data": asdict(plan.data)},
        "passages": len(KnowledgeBase.open(plan.kb)),
        "corpus": KnowledgeBase.open(plan.kb).fingerprint,
        "questions": digests,
    }


def _commit() -> str | None:
    """The commit of a checkout; None for an installed package."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip()[:12] or None
