"""Commands and flags that measure rankings of documents and compare models: `compare-models`, and `evaluate --beir`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from realm.cli.arguments import (
    Commands,
    Parser,
    add_command,
    given_flags,
    need_model_but_for_words,
    report,
    report_outcomes,
    settings,
)
from realm.errors import InputError

if TYPE_CHECKING:
    from realm.measures.collection import Collection
    from realm.measures.ranking import RankingReport


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the group."""
    compare = add_command(
        commands,
        _compare_models,
        "compare two models on the same questions: scores, paired tests, and the questions that only one model answers right",
        "realm compare-models models/a models/b --kb kb --questions dev.jsonl",
        section="answer",
        reports=True,
    )
    for name in ("a", "b"):
        compare.add_argument(
            name, metavar=name.upper(), help="model: a folder, package:NAME or hf:OWNER/NAME"
        )
    compare.add_kb()
    compare.add_questions(required=False)
    compare.add_regex()
    add_collection(compare)
    compare.add_method()


def add_collection(parser: Parser) -> None:
    """Adds --beir and --split, which replace --questions by a test collection."""
    parser.add_argument(
        "--beir",
        metavar="FOLDER",
        help="measure the ranking of documents for the queries of this BEIR collection (queries.jsonl, qrels/SPLIT.tsv) by "
        "nDCG@10, recall@100 and MRR@10; replaces --questions",
    )
    parser.add_argument(
        "--split", metavar="NAME", help="with --beir: split of the collection (default: test)"
    )


def refuse_split(args: argparse.Namespace) -> None:
    """Raises an InputError if a command without --beir has --split."""
    if args.split is not None:
        raise InputError("--split names a split of a test collection: give --beir FOLDER too")


def add_runs(parser: Parser) -> None:
    """Adds --run and --save-run, rankings in the format of TREC."""
    parser.add_argument(
        "--run",
        dest="rankings",  # `args.run` is the function of the command
        metavar="FILE",
        help="with --beir: measure the rankings in this file, in the format of TREC, instead of those of a model",
    )
    parser.add_written("--save-run", "with --beir: write the rankings to this file in the format of TREC")


def evaluate_collection(args: argparse.Namespace) -> None:
    """Runs `realm evaluate --beir`."""
    from realm.measures.collection import read_collection
    from realm.measures.ranking import measure
    from realm.measures.runs import read_run

    of_questions = "questions", "reader", "predictions", "save_predictions", "regex"
    given = given_flags(args, *of_questions, "gold", "unanswerable", "retrieval_only")
    if args.scoring != "realm":
        given.append("--scoring")
    if given:
        raise InputError(f"--beir measures rankings of documents: leave out {', '.join(given)}")
    collection = read_collection(args.beir, args.split or "test")
    own = {
        path.resolve()
        for pattern in ("corpus.jsonl", "queries.jsonl", "qrels/*")
        for path in Path(args.beir).glob(pattern)
    }
    for name in ("out", "save_run"):
        if (file := getattr(args, name)) is not None and Path(file).resolve() in own:
            flag, *_ = given_flags(args, name)
            raise InputError(f"{flag} {file} is a file of the collection {args.beir}: name another file")
    if args.rankings is not None:
        if given := given_flags(args, "kb", "model", "method", "save_run", "config", "set"):
            raise InputError(f"--run already contains the rankings: leave out {', '.join(given)}")
        found = measure(collection, read_run(args.rankings))
    else:
        if args.kb is None:
            raise InputError("--beir needs the knowledge base of the corpus: give --kb, or --in WORKSPACE")
        need_model_but_for_words(args)
        found = _ranked(args, collection, args.model)
    report_outcomes(args, found.as_dict(), found.outcomes(), found.lines())


def _ranked(args: argparse.Namespace, collection: "Collection", model: str | None) -> "RankingReport":
    from realm.measures.ranking import count_unknown, measure, rank_documents
    from realm.measures.runs import write_run
    from realm.qa.pipeline import AnswerConfig
    from realm.qa.question_sets import searcher

    kb, search = searcher(args.kb, model, args.method, settings(args, AnswerConfig))
    unknown = count_unknown(kb, collection)
    run = rank_documents(kb, collection.queries, search)
    if save := getattr(args, "save_run", None):
        write_run(Path(save), run)
    return measure(collection, run, unknown)


def _compare_models(args: argparse.Namespace) -> None:
    from realm.measures import paired

    if args.beir is not None:
        from realm.measures.collection import read_collection

        if args.questions is not None or args.regex is not None:
            raise InputError("--beir replaces --questions: leave out --questions and --regex")
        collection = read_collection(args.beir, args.split or "test")
        rankings = paired.compare_rankings(
            collection, _ranked(args, collection, args.a), _ranked(args, collection, args.b)
        )
        report(args, rankings, paired.lines(rankings, args.a, args.b))
        return
    refuse_split(args)
    if args.questions is None:
        raise InputError("give --questions FILE, or --beir FOLDER")
    from realm.qa.pipeline import AnswerConfig
    from realm.qa.question_files import read_questions

    questions = read_questions(args.questions, regex=args.regex)
    config = settings(args, AnswerConfig)
    a, b = (paired.ask_model(args.kb, name, questions, args.method, config) for name in (args.a, args.b))
    compared = paired.compare_models(questions, a, b)
    report(args, compared, [*paired.lines(compared, args.a, args.b), *paired.disagreement_lines(compared)])
