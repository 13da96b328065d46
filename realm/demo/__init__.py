"""`realm demo`: documents become a workspace that answers questions, in the commands that anyone could type.

    stages      the stages in their order, each a `realm ...` command and what it is for; the questions of the end
    results     what the outcomes say: what is found, what is answered, paired tests; the tables
    runner      runs the stages that were not done, says why, keeps what each cost
    pairs       two systems on the same queries
    tables      tables as plain text
    memory      how much of it all this took
    from_text/  another demo: a retriever and a reader from plain text alone

The folder is a contract: workspace (as `realm fit` makes it), questions/dev.jsonl, report.json.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from realm.demo import results
from realm.demo.memory import PeakMemory
from realm.demo.runner import Record, Section, run_stages
from realm.demo.stages import QUESTIONS, Asked, DemoConfig, DemoRun
from realm.demo.tables import paragraph
from realm.errors import ConflictError
from realm.files import read_json, write_json
from realm.qa.answers import Answers
from realm.qa.metrics import has_answer
from realm.qa.pipeline import AnswerConfig
from realm.qa.question_files import Question
from realm.workspace.folder import Workspace

__all__ = ["DemoConfig", "DemoRun", "run"]

ANSWER = Section(
    "5. Questions that a person would ask",
    "They were written down before any answer was seen. [[ ]] marks the answer in its passage; the probability is how sure "
    "the reader is, p(z|x) the passage's share of the retriever's trust.",
)
FILL = Section(
    "6. A masked sentence",
    "This is what the retriever is adapted with: the reader fills the gap with the help of passages. p(y|z,x) is the "
    "probability that it gives the word beside a passage; retrieval utility says what the passage gains over none.",
)


HOW = (
    "It takes about 8 minutes on two cores, 15 where they have no bf16 instructions. A line that begins with $ is a command "
    "that can be run alone. Stop at any time: the same command goes on from there."
)


class SettingsJson(TypedDict):
    """What settings.json holds."""

    settings: dict[str, Any]
    config: str | None


def run(
    config: DemoConfig, preset: str | None, folder: Path, run_command: Callable[[Sequence[str]], None]
) -> results.DemoReport:
    """Tells the demo in a folder -> its report; what was done there is not done again.

    Raises:
        InputError: as the stages do; or the folder was made with other settings.
    """
    demo = DemoRun(config, preset, folder)
    print(
        paragraph(
            f"realm demo: {config.source} becomes a workspace that answers questions, in {folder}. {HOW}"
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    _check_settings(demo)
    with PeakMemory() as memory:
        record = Record(folder / "stages.json", memory)
        if not demo.first_fit.exists() or not demo.workspace.exists():
            record.forget()
        run_stages(demo.fitting(), record, run_command)
        run_stages(demo.measuring(), record, run_command)
        articles = results.articles(demo)
        print("", *results.articles_lines(articles), sep="\n")
        run_stages(demo.adding(), record, run_command)
        run_stages(demo.adapting(), record, run_command)
        added = results.added(demo)
        print("", *results.added_lines(added), sep="\n")
        asked = _ask(demo)
        seconds, peak = record.seconds(), record.peak_memory_mb()
    report: results.DemoReport = {
        "source": config.source,
        "later": config.later,
        "articles": articles,
        "added": added,
        "asked": asked,
        "seconds": seconds,
        "peak_memory_mb": peak,
    }
    write_json(folder / "report.json", report)
    print("", paragraph(f"{results.costs_line(report)} All numbers: {folder / 'report.json'}."), sep="\n")
    print(f'Your turn: realm answer "..." --in {demo.workspace}')
    print(f"A page to ask on: realm serve --in {demo.workspace}")
    return report


def _check_settings(demo: DemoRun) -> None:
    """Raises InputError where the folder was made with other settings; half of it would be of each."""
    file = demo.folder / "settings.json"
    settings: SettingsJson = {"settings": dataclasses.asdict(demo.config), "config": demo.preset}
    settings = json.loads(json.dumps(settings))
    if file.exists() and read_json(file) != settings:
        raise ConflictError(
            f"{demo.folder} was made with other settings: name another --dir, or remove that folder"
        )
    write_json(file, settings)


def _ask(demo: DemoRun) -> list[results.Answered]:
    """Chapters 5 and 6: the questions and their answers with evidence, and a masked sentence."""
    workspace = Workspace(demo.workspace, AnswerConfig(answers=1))
    asked: list[results.Answered] = []
    _begin(ANSWER)
    for one in QUESTIONS:
        answers = workspace.answers(one.question)
        print(f"\n$ {shlex.join(('realm', *demo.answer(one.question)))}")
        print(*answers.lines(), f"(the texts say: {one.expected})", sep="\n", flush=True)
        asked.append(_answered(answers, one))
    print(f"\n{results.asked_line(asked)}")
    _begin(FILL)
    print(f"\n$ {shlex.join(('realm', *demo.fill()))}")
    print(*workspace.fill(demo.config.fill).lines(), sep="\n", flush=True)
    return asked


def _begin(section: Section) -> None:
    print(f"\n{section.title}", paragraph(section.why), sep="\n")


def _answered(answers: Answers, asked: Asked) -> results.Answered:
    best = answers.answers[0]
    return {
        "question": answers.question,
        "expected": asked.expected,
        "answer": best.text,
        "right": has_answer(best.text, Question("", asked.question, (asked.right,))),
        "probability": best.probability,
        "found": answers.found,
        "title": best.passage.title,
    }
