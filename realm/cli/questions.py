"""`realm questions`: makes questions from a knowledge base, or lets a person review made questions."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TypedDict

from realm.cli.arguments import Commands, Parser, add_command, for_terminal, report, say_where, settings
from realm.errors import InputError
from realm.files import has_lines, write_lines


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the command."""
    questions = add_command(
        commands,
        _questions,
        "make questions from a knowledge base, for training and evaluation; or review made questions by hand",
        "realm questions --kb kb --out questions",
        section="questions",
        reports=True,
    )
    questions.add_kb()
    questions.add_argument(
        "--review",
        metavar="FILE",
        help="show the questions of this file one after the other with their passages, and ask whether to accept, correct or "
        "reject each; repeat the command to continue",
    )
    questions.add_out("folder for train.jsonl and dev.jsonl; with --review, file for the accepted questions")


class MadeJson(TypedDict):
    """Report of `realm questions`: numbers of questions."""

    train: int
    dev: int


def _questions(args: argparse.Namespace) -> None:
    from realm.questions import QuestionsConfig, make_questions, split
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
    files = {
        out / f"{name}.jsonl": [json.dumps(question._asdict(), ensure_ascii=False) for question in part]
        for name, part in (("train", train), ("dev", dev))
    }
    for file, lines in files.items():  # a person may have corrected the questions of an existing file
        if file.is_file() and not has_lines(file, lines):
            raise InputError(f"{file} exists already, and has other questions: choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    for file, lines in files.items():
        write_lines(file, lines)
    counts: MadeJson = {"train": len(train), "dev": len(dev)}
    report(args, counts)
    say_where(args, "the questions are", " and ".join(map(str, files)))


def _review(args: argparse.Namespace) -> None:
    from realm.qa.question_files import Question, read_questions
    from realm.questions.review import Review, rejected_file, review
    from realm.store.knowledge_base import KnowledgeBase

    if args.set or args.config:
        raise InputError("--review makes no questions: leave out --set and --config")
    out = Path(args.out)
    if out.is_dir():
        raise InputError(f"--out {out} is a folder: with --review, give the path of a file")
    for file, what in (
        (out, f"--out {out}"),
        (rejected_file(out), f"{rejected_file(out)}, for rejected questions,"),
    ):
        if os.path.realpath(file) == os.path.realpath(args.review):  # its questions would count as decided
            raise InputError(f"{what} is also --review: name another file")
    questions, kb = read_questions(args.review), KnowledgeBase.open(args.kb)
    numbers = {passage: number for number, passage in enumerate(kb.ids)}

    def evidence_of(question: Question) -> str:
        number = numbers.get(question.passage_id)
        return "" if number is None else kb.passages([number])[0].text

    decisions = Review(questions, out)
    review(decisions, _prompted, lambda line: print(for_terminal(line), file=sys.stderr), evidence_of)
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
