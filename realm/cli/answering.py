"""Commands that use or measure a model: `retrieve`, `answer`, `fill`, `evaluate`, `calibrate`, `probe`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from realm.cli.arguments import (
    Commands,
    Parser,
    add_command,
    given_flags,
    need_model_but_for_words,
    positive,
    report,
    report_outcomes,
    say_where,
    settings,
)
from realm.cli.measuring import add_collection, add_runs, evaluate_collection, refuse_split
from realm.errors import InputError
from realm.progress import counted, wrapped

if TYPE_CHECKING:
    from realm.qa.question_files import Question
    from realm.qa.scoring.evaluation import Report

SCORED = "; the probability p(z|x) of a passage is always computed from vectors"
READS = "span reader to use instead of that of the model"


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the group."""
    retrieve = add_command(
        commands,
        _retrieve,
        "retrieve the best passages for each question of a file, without extracting answers",
        "realm retrieve --kb kb --model models/realm --questions q.jsonl --top-k 20 --out hits.jsonl",
        section="answer",
    )
    retrieve.add_kb()
    retrieve.add_model(required=False)
    retrieve.add_questions()
    retrieve.add_argument(
        "--top-k", metavar="N", type=positive, default=20, help="passages per question (default: 20)"
    )
    retrieve.add_method("; bm25 needs no --model")
    retrieve.add_where("retrieve only passages")
    retrieve.add_written("--out", "JSON Lines file", required=True)

    answer = add_command(
        commands,
        _answer,
        "answer a question, and show the passages from which the answers were extracted",
        'realm answer "Who wrote The Tempest?" --kb kb --model models/qa',
        section="answer",
        reports=True,
    )
    answer.add_argument("question", metavar="QUESTION", type=_one_text, help="question in plain words")
    answer.add_kb(required=False)
    answer.add_model(required=False)
    answer.add_reader(READS)
    answer.add_method(SCORED)
    answer.add_where("answer only from passages")
    answer.add_argument(
        "--server",
        metavar="URL",
        help="let the server at this address (`realm serve`) answer the question; replaces --kb and --model",
    )

    fill = add_command(
        commands,
        _fill,
        "predict the word at [MASK], and show the effect of each passage on the prediction",
        'realm fill "The [MASK] is the currency of the UK." --target pound --kb kb --model models/realm',
        section="answer",
        reports=True,
    )
    fill.add_argument(
        "sentence", metavar="SENTENCE", type=_one_text, help="sentence with [MASK] instead of a whole word"
    )
    fill.add_kb()
    fill.add_model()
    fill.add_argument(
        "--target",
        metavar="WORD",
        type=_one_text,
        help="also print the probability of WORD with and without retrieval, and the effect of each passage on this "
        "probability",
    )
    fill.add_method(SCORED, default="dense")

    evaluate = add_command(
        commands,
        _evaluate,
        "measure answers and retrieval on questions with known answers",
        "realm evaluate --kb kb --model models/qa --questions dev.jsonl",
        section="answer",
        reports=True,
    )
    evaluate.add_kb(required=False)
    evaluate.add_model(required=False)
    evaluate.add_reader(READS)
    evaluate.add_questions(required=False)
    add_collection(evaluate)
    add_runs(evaluate)
    evaluate.add_regex()
    evaluate.add_method(SCORED + "; without --model, only bm25 is possible, and only recall is measured")
    evaluate.add_switch(
        "--gold",
        "measure the reader without retrieval: for each question, read the passages of the document given by "
        "document_id in the question file",
    )
    evaluate.add_switch(
        "--retrieval-only",
        "measure retrieval alone, without reading passages for answers; reading takes most of the time",
    )
    evaluate.add_switch(
        "--unanswerable",
        "also answer each question without the passages that contain a right answer, and report how often the model "
        "then finds no answer",
    )
    evaluate.add_argument(
        "--scoring",
        choices=("realm", "orqa", "dpr", "squad"),
        default="realm",
        help="rules that decide whether an answer is exact, and whether a text contains a right answer: the rules of realm "
        "(default) or of a published script",
    )
    evaluate.add_argument(
        "--predictions",
        metavar="FILE",
        help="score the answers and passages in this JSON Lines file instead of those of a model; needs no --model",
    )
    evaluate.add_written(
        "--save-predictions",
        "write the best answer to each question, the passage of this answer, and the ids of the retrieved passages to "
        "this JSON Lines file; if the command is interrupted, repeat the command: known answers are not computed again",
    )
    _add_outcomes(evaluate, "question")

    calibrate = add_command(
        commands,
        _calibrate,
        "calibrate a model on questions with known answers: fit the probabilities of answers, and the threshold below which "
        "an answer is a guess",
        "realm calibrate --kb kb --model models/qa --questions dev.jsonl",
        section="answer",
        reports=True,
    )
    calibrate.add_kb()
    calibrate.add_model()
    calibrate.add_questions()
    calibrate.add_regex()
    calibrate.add_method(SCORED)

    probe = add_command(
        commands,
        _probe,
        "measure a model on masked names and dates in held-out passages of the knowledge base; needs no questions",
        "realm probe --kb kb --model models/realm",
        section="probe",
        reports=True,
    )
    probe.add_kb()
    probe.add_model()
    probe.add_method(
        "; changes only the recall, because the model always reads passages found by vectors",
        ("dense", "bm25"),
        "dense",
    )
    _add_outcomes(probe, "masked fact")


def _add_outcomes(parser: Parser, what: str) -> None:
    parser.add_written("--out", f"also write the report, with the outcome of each {what}, to this JSON file")


def _one_text(text: str) -> str:
    from realm.qa.question_files import MAX_QUESTION_CHARACTERS

    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8") from None
    if len(text) > MAX_QUESTION_CHARACTERS:
        raise argparse.ArgumentTypeError(
            f"has {len(text)} characters, the limit is {MAX_QUESTION_CHARACTERS}"
        )
    return text


def _retrieve(args: argparse.Namespace) -> None:
    need_model_but_for_words(args)

    from realm.qa import pipeline, question_sets
    from realm.qa.question_files import read_questions

    out = Path(args.out)
    questions = read_questions(args.questions, need_answers=False)
    config = settings(args, pipeline.AnswerConfig)
    question_sets.retrieve_to_file(
        args.kb, args.model, questions, args.top_k, args.method, args.where, out=out, config=config
    )
    say_where(args, f"the passages for {counted(len(questions), 'question')} are", out)


def _answer(args: argparse.Namespace) -> None:
    if args.server is not None:
        here = (args.kb, args.model, args.reader, args.config)
        if any(given is not None for given in here) or args.set:
            raise InputError(
                "the server has its own knowledge base, model and settings: with --server, leave out --kb, --model, --reader, "
                "--config and --set"
            )
        from realm.serve.client import Client

        answer = Client(args.server, os.environ.get("REALM_READ_TOKEN")).answers(
            args.question, method=args.method, where=args.where
        )
    else:
        if args.kb is None or args.model is None:
            raise InputError("give --kb and --model, or --in WORKSPACE, or --server URL")
        from realm.qa import pipeline

        config = settings(args, pipeline.AnswerConfig)
        answerer = pipeline.Answerer.load(args.kb, args.model, config)
        (answer,) = answerer.answer_batch([args.question], args.method, where=args.where)
    report(args, answer.to_json(), list(map(wrapped, answer.lines())))


def _fill(args: argparse.Namespace) -> None:
    from realm.qa import filling, pipeline

    filler = filling.Filler.load(args.kb, args.model, settings(args, pipeline.AnswerConfig))
    filled = filler.fill(args.sentence, args.target, args.method)
    report(args, filled.to_json(), filled.lines())


_OF_A_MODEL = ("method", "reader", "gold", "unanswerable", "retrieval_only")
"""Flags of `realm evaluate` for a model of `realm`."""


def _evaluate(args: argparse.Namespace) -> None:
    from realm.documents.formats.compressed import is_compressed
    from realm.qa.question_files import read_questions
    from realm.systems.system import is_system

    if args.beir is not None:
        return evaluate_collection(args)
    if args.rankings is not None or args.save_run is not None:
        raise InputError("--run and --save-run have rankings of documents: give --beir FOLDER too")
    refuse_split(args)
    if args.kb is None or args.questions is None:
        raise InputError("give --questions and --kb (or --in WORKSPACE), or --beir FOLDER")
    if args.save_predictions and is_compressed(Path(args.save_predictions)):
        raise InputError(
            f"--save-predictions writes a file that is not compressed: {args.save_predictions} would not be read again"
        )
    if args.predictions is not None:
        evaluated_by, why = _score_predictions, "the file of --predictions already contains the answers"
        unused = given_flags(args, "model", *_OF_A_MODEL, "config", "set", "save_predictions")
    elif args.model is not None and is_system(args.model):
        evaluated_by, why = _evaluate_system, f"{args.model} was trained by `realm baseline`"
        unused = given_flags(args, *_OF_A_MODEL)
    else:
        need_model_but_for_words(args)
        evaluated_by, why, unused = _evaluate_model, "", []
    if unused:
        raise InputError(f"{why}: leave out {', '.join(unused)}")
    args.continues = args.save_predictions is not None
    questions = read_questions(args.questions, regex=args.regex)
    evaluated = evaluated_by(args, questions)
    report_outcomes(args, evaluated.as_dict(), evaluated.outcomes(questions), evaluated.lines())


def _evaluate_model(args: argparse.Namespace, questions: "Sequence[Question]") -> "Report":
    from realm.qa import pipeline, question_sets
    from realm.qa.kept_answers import kept_answers
    from realm.qa.predictions import write_predictions
    from realm.qa.scoring.metrics import SCORINGS
    from realm.store.knowledge_base import KnowledgeBase

    config = settings(args, pipeline.AnswerConfig)
    needs_answers = args.gold or args.unanswerable or args.save_predictions
    if (needs_answers or args.reader is not None) and (args.model is None or args.retrieval_only):
        remedy = "leave out --retrieval-only" if args.model else "give --model"
        raise InputError(f"--gold, --unanswerable, --reader and --save-predictions need answers: {remedy}")
    if args.model is None:
        return question_sets.evaluate_bm25(KnowledgeBase.open(args.kb), questions, SCORINGS[args.scoring])
    answerer = pipeline.Answerer.load(args.kb, args.model, config)
    if args.retrieval_only or (answerer.model.span_reader is None and not needs_answers):
        if not args.retrieval_only:
            note = f"{args.model} has no span reader, so only passages are measured"
            print(f"{args.called}: {note}", file=sys.stderr)
        return question_sets.evaluate_retrieval(answerer, questions, args.method, SCORINGS[args.scoring])
    flags = (args.method, args.unanswerable, args.gold)
    if args.save_predictions is None:
        asked = question_sets.ask(answerer, questions, *flags)
        return asked.report(questions, answerer.threshold, SCORINGS[args.scoring])
    with kept_answers(args.save_predictions, *question_sets.identity(answerer, *flags)) as kept:
        asked = question_sets.ask(answerer, questions, *flags, kept)
        write_predictions(Path(args.save_predictions), asked.predictions)
        return asked.report(questions, answerer.threshold, SCORINGS[args.scoring])


def _evaluate_system(args: argparse.Namespace, questions: "Sequence[Question]") -> "Report":
    from realm.qa.kept_answers import kept_answers
    from realm.qa.pipeline import AnswerConfig
    from realm.qa.predictions import score_predictions, write_predictions
    from realm.qa.scoring.metrics import SCORINGS
    from realm.store.knowledge_base import KnowledgeBase
    from realm.systems.system import load_system, predict, read_system

    config, kb = settings(args, AnswerConfig), KnowledgeBase.open(args.kb)
    system = load_system(args.model, kb, config)
    if args.save_predictions is None:
        return score_predictions(kb, list(predict(system, kb, questions)), questions, SCORINGS[args.scoring])
    identity = (read_system(args.model), kb.fingerprint, kb.table.version, config.precision)
    with kept_answers(args.save_predictions, *identity) as kept:
        predictions = list(predict(system, kb, questions, kept))
        write_predictions(Path(args.save_predictions), predictions)
        return score_predictions(kb, predictions, questions, SCORINGS[args.scoring])


def _score_predictions(args: argparse.Namespace, questions: "Sequence[Question]") -> "Report":
    from realm.qa.predictions import in_order, read_predictions, score_predictions
    from realm.qa.scoring.metrics import SCORINGS
    from realm.store.knowledge_base import KnowledgeBase

    predictions = in_order(read_predictions(args.predictions), questions, args.predictions)
    return score_predictions(KnowledgeBase.open(args.kb), predictions, questions, SCORINGS[args.scoring])


def _calibrate(args: argparse.Namespace) -> None:
    from realm.qa import calibrating, pipeline
    from realm.qa.question_files import read_questions

    questions = read_questions(args.questions, regex=args.regex)
    config = settings(args, pipeline.AnswerConfig)
    found = calibrating.calibrate(args.kb, args.model, questions, args.method, config)
    report(args, found.to_json(), found.lines())
    say_where(args, "the calibration is", args.model)


def _probe(args: argparse.Namespace) -> None:
    from realm.qa.probe import ProbeConfig, probe
    from realm.store.knowledge_base import KnowledgeBase

    config = settings(args, ProbeConfig)
    probed = probe(KnowledgeBase.open(args.kb), args.model, config, args.method)
    report_outcomes(args, probed.as_dict(), probed.outcomes())
