"""Commands that compare REALM with other systems and with variants of REALM: `compare`, `ablate`, `knn`, `baseline`."""

import argparse
import json
import math
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from realm.cli.arguments import (
    Commands,
    Parser,
    add_command,
    by_table,
    for_terminal,
    given_flags,
    positive,
    report,
    settings,
)
from realm.errors import DivergedError, InputError
from realm.progress import wrapped
from realm.settings import presets, read_config, tables_of


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the group."""
    compare = add_command(
        commands,
        _compare,
        "train and measure the systems in Table 1 of the REALM paper, on the same passages and questions",
        "realm compare tables --dir tables",
        reports=True,
        continues=True,
    )
    ablate = add_command(
        commands,
        _ablate,
        "train and measure the ablations in Table 2 of the REALM paper",
        "realm ablate tables --dir tables",
        reports=True,
        continues=True,
    )
    for table, section in ((compare, "compare"), (ablate, "ablate")):
        table.set_defaults(section=section)
        table.add_argument(
            "config",
            metavar="PRESET",
            help=f"preset or TOML file: the table [data] has the documents and questions, [{section}] the rows; the other "
            "tables configure the training",
        )
        table.add_argument(
            "--set",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help=f"change one setting of [{section}], or with TABLE.NAME=VALUE of another table: data, kb, mlm, ict, pretrain, "
            "finetune, probe, questions, knn or baseline.SYSTEM; can be given several times",
        )
        table.add_argument(
            "--rows",
            metavar="ROW",
            type=str.lower,
            nargs="+",
            help="make only these rows (default: all rows); an unknown ROW prints all names",
        )
        table.makes(
            table.add_argument(
                "--dir",
                metavar="DIR",
                help="folder for all files (default: the name of the command); compare and ablate can use the same folder",
            )
        )
        table.add_argument(
            "--jobs",
            metavar="N",
            type=positive,
            default=1,
            help="run up to N commands at the same time, each with a share of the threads and, on a machine with several GPUs, "
            "with one GPU (default: 1); the output of each command is in DIR/logs",
        )
        table.add_argument(
            "--diff",
            metavar="ROW",
            type=str.lower,
            nargs=2,
            help="run no stage, but test the difference between these two rows of an earlier run, and show the questions that "
            "only one of them answered right",
        )
        table.add_argument(
            "--check",
            metavar="REPORT",
            help="end with an error if a score differs by more than --tolerance from the score in this table1.json or "
            "table2.json of an earlier run; times and numbers of parameters are not compared; with --rows, only the "
            "scores of the rows that are made are compared",
        )
        table.add_argument(
            "--tolerance",
            metavar="POINTS",
            type=_points,
            default=3.0,
            help="largest difference that --check accepts, in percentage points; for a loss in nats, in percent of the "
            "expected loss (default: 3)",
        )

    knn = add_command(
        commands,
        _knn,
        "predict masked names and dates of held-out passages with the model alone, with kNN-LM, and with retrieved passages",
        "realm knn --kb kb --model models/realm --out datastore",
        section="knn",
        reports=True,
        continues=True,
    )
    knn.add_kb()
    knn.add_model()
    knn.add_out(
        "folder for the datastore of kNN-LM; a datastore of the same model and knowledge base is used again"
    )

    baseline = add_command(
        commands,
        _baseline,
        "train a system with which the paper compares REALM; `realm evaluate --model` measures the trained system",
        "realm baseline drqa --kb kb --model models/encoder --train train.jsonl --dev dev.jsonl --out drqa",
        section="baseline",
        continues=True,
    )
    baseline.add_argument("system", metavar="SYSTEM", help="name of the system: t5, drqa, graph or path")
    baseline.add_kb()
    baseline.add_model()
    baseline.add_train_and_dev()
    baseline.add_argument(
        "--reading-kb",
        metavar="KB",
        help="knowledge base with the documents that the questions of --reading-train name",
    )
    baseline.add_argument(
        "--reading-train",
        metavar="FILE",
        help="further training questions for the system drqa; each question names a document that contains an answer "
        "(document_id)",
    )
    baseline.add_out("folder of the trained system")


def _points(text: str) -> float:
    """Converts the text of a flag to percentage points."""
    try:
        points = float(text)
    except ValueError:
        points = math.nan
    if not 0 <= points <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return points


def _baseline(args: argparse.Namespace) -> None:
    from realm.qa.question_files import read_questions
    from realm.store.knowledge_base import KnowledgeBase
    from realm.systems.system import Ground, ReadingSet, module_of

    system = module_of(args.system)
    args.section = f"baseline.{args.system}"
    config = settings(args, system.Config)
    train, dev = (read_questions(file, regex=args.regex) for file in (args.train, args.dev))
    reading = None
    if args.reading_kb or args.reading_train:
        if args.system != "drqa" or not (args.reading_kb and args.reading_train):
            raise InputError(
                "--reading-kb and --reading-train are only for the system drqa, and are given together"
            )
        reading = ReadingSet(
            KnowledgeBase.open(args.reading_kb), read_questions(args.reading_train, regex=args.regex)
        )
    ground = Ground(KnowledgeBase.open(args.kb), args.model, train, dev, reading)
    system.train(ground, Path(args.out), config)


def _knn(args: argparse.Namespace) -> None:
    from realm.store.knowledge_base import KnowledgeBase
    from realm.systems import knn_lm

    config = settings(args, knn_lm.KnnConfig)
    found = knn_lm.measure(KnowledgeBase.open(args.kb), args.model, Path(args.out), config)
    report(args, found, list(map(wrapped, knn_lm.lines(found))))


def _compare(args: argparse.Namespace) -> None:
    _table(args, "Table 1")


def _ablate(args: argparse.Namespace) -> None:
    _table(args, "Table 2")


def _table(args: argparse.Namespace, title: str) -> None:
    needed = ("farmhash", "matplotlib", "scipy", "transformers")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise InputError(
            f"realm {args.called} needs {' and '.join(missing)}: pip install 'realm-lm[compare]'"
        )

    from realm.cli import run
    from realm.compare import checks, table
    from realm.compare.plan import BASELINES, STAGES, TablePlan
    from realm.compare.rows import TABLES
    from realm.compare.settings import DataConfig, TableConfig

    names = ("data", *STAGES, *BASELINES)
    changed, args.set = by_table(args.set, names)
    if unknown := [one for one in args.set if "." in one.partition("=")[0]]:
        raise InputError(f"--set {unknown[0]}: the table must be one of {', '.join(names)}")
    given_data = {one.partition("=")[0].strip() for one in changed.get("data", ())}
    if "data" not in tables_of(args.config) and not {"corpus", "encoder"} <= given_data:
        known = ", ".join(name for name in presets() if "data" in tables_of(name))
        raise InputError(
            f"{args.config} has no table [data] with documents and questions: give data.corpus and data.encoder with --set, "
            f"and data.train and data.tests.NAME if you have questions; or use one of the presets with such a table: {known}"
        )
    data = read_config(DataConfig, args.config, "data", changed.pop("data", ()))
    config = settings(args, TableConfig)
    if args.rows:
        config = replace(config, rows=tuple(args.rows))
    plan = TablePlan(config, data, args.config, Path(args.dir or args.called), TABLES[title], changed)
    if args.diff:
        if given := given_flags(args, "json", "check", "rows"):
            raise InputError(f"--diff runs no stage: leave out {', '.join(given)}")
        for line in checks.disagreements(plan, *args.diff):
            print(for_terminal(line))
        return
    # A wrong file is an error now, not after hours of training.
    expected = checks.expected_report(args.check) if args.check else None
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        report = table.run(title, plan, run, args.jobs)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    if expected is not None:
        found = checks.deviations(report, expected, args.tolerance, partial=bool(args.rows))
        if found:
            listed = "; ".join(
                f"{one['score']}: {'missing' if one['found'] is None else format(one['found'], 'g')}, "
                f"expected {one['expected']:g}"
                for one in found
            )
            raise DivergedError(
                f"scores differ from those in {args.check} by more than {args.tolerance:g} points (losses: percent): {listed}"
            )
        print(
            f"All scores differ from those in {args.check} by at most {args.tolerance:g} points (losses: percent).",
            file=sys.stderr,
        )
