"""`realm demo` prints and runs `realm` commands, which make a workspace that can answer questions.

    stages      the stages of the demo in their order, each of which runs one command; the questions of section 5
    results     reads the reports of the commands, and makes the tables of recall, exact match and paired tests
    from_text/  another demo, which trains a retriever and a reader from plain text alone

The folder of the demo contains the workspace made by `realm fit` in `workspace`, questions/dev.jsonl and report.json.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from realm.demo import results
from realm.demo.stages import QUESTIONS, SENTENCE, Asked, DemoConfig, DemoRun
from realm.errors import ConflictError
from realm.files import read_json, write_json
from realm.progress import wrapped
from realm.qa.answers import Answers
from realm.qa.pipeline import AnswerConfig
from realm.qa.question_files import Question
from realm.qa.scoring.metrics import has_answer
from realm.qa.scoring.tables import costs, paragraph
from realm.stages.memory import PeakMemory
from realm.stages.runner import Record, Section, run_stages
from realm.workspace.folder import Workspace

__all__ = ["DemoConfig", "DemoRun", "run"]

ANSWER = Section(
    "5. Questions that a person would ask",
    "The questions were chosen before the model answered any of these questions. [[ ]] marks the answer in the passage. "
    "The probability is an estimate of how likely the answer is right. p(z|x) is the retriever's probability "
    "of passage z for question x.",
)
FILL = Section(
    "6. A masked sentence",
    "The retriever was adapted on sentences of this kind: the reader predicts the word at [MASK] from the sentence and a "
    "passage. p(y|z,x) is the probability of word y given sentence x and passage z. The retrieval utility of a passage is the "
    "log probability of the word with this passage, minus its log probability without a passage.",
)


HOW = (
    "The demo takes about 8 minutes on two CPU cores, or 15 if the cores have no bf16 instructions. Each line that begins with "
    "$ is a command that you can also run yourself. You can stop the demo at any time; the same command continues the demo."
)


class SettingsJson(TypedDict):
    """Content of settings.json."""

    settings: dict[str, Any]
    config: str | None


def run(
    config: DemoConfig, preset: str | None, folder: Path, run_command: Callable[[Sequence[str]], None]
) -> results.DemoReport:
    """Runs the demo in a folder -> report of the demo. Stages that are already done are skipped.

    Raises:
        InputError: a stage refuses its input, or the folder was made with other settings.
    """
    demo = DemoRun(config, preset, folder)
    print(
        paragraph(
            f"realm demo makes a workspace in {folder}, which can answer questions about {config.source}. {HOW}"
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
        print("", *results.lines(articles), "", paragraph(results.READ_IT), sep="\n")
        run_stages(demo.adding(), record, run_command)
        run_stages(demo.adapting(), record, run_command)
        added = results.added(demo)
        print("", *results.lines(added), sep="\n")
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
    spent = costs(seconds, peak, ("fit", "evaluate"))
    print("", paragraph(f"{spent} All numbers are in {folder / 'report.json'}."), sep="\n")
    print(f'Ask your own questions: realm answer "..." --in {demo.workspace}')
    print(f"Ask them on a web page: realm serve --in {demo.workspace}")
    return report


def _check_settings(demo: DemoRun) -> None:
    """Raises ConflictError if the folder was made with other settings.

    The report would then mix results of different settings.
    """
    file = demo.folder / "settings.json"
    settings: SettingsJson = {"settings": dataclasses.asdict(demo.config), "config": demo.preset}
    settings = json.loads(json.dumps(settings))
    if file.exists() and read_json(file) != settings:
        raise ConflictError(
            f"{demo.folder} was made with other settings: use another --dir, or remove {demo.folder}"
        )
    write_json(file, settings)


def _ask(demo: DemoRun) -> list[results.Answered]:
    """Prints sections 5 and 6: answers with evidence to `QUESTIONS`, and predictions for a masked sentence."""
    workspace = Workspace(demo.workspace, AnswerConfig(answers=1))
    asked: list[results.Answered] = []
    _print_section(ANSWER)
    for one in QUESTIONS:
        answers = workspace.answers(one.question)
        print(f"\n$ {shlex.join(('realm', *demo.answer(one.question)))}")
        print(*map(wrapped, answers.lines()), f"(expected: {one.expected})", sep="\n", flush=True)
        asked.append(_answered(answers, one))
    print(f"\n{results.asked_line(asked)}")
    _print_section(FILL)
    print(f"\n$ {shlex.join(('realm', *demo.fill()))}")
    print(*map(wrapped, workspace.fill(SENTENCE).lines()), sep="\n", flush=True)
    return asked


def _print_section(section: Section) -> None:
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
