"""Commands that compare REALM with other systems: `baseline`."""

import argparse
from pathlib import Path

from realm.cli.arguments import Commands, Parser, add_command, add_kb, add_model, add_out, add_regex, settings


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the group."""
    baseline = add_command(
        commands,
        "baseline",
        _baseline,
        "train a system that the paper compares REALM with; `realm evaluate --model` measures it",
        "realm baseline drqa --kb kb --model models/encoder --train train.jsonl --dev dev.jsonl --out drqa",
        section="baseline",
    )
    baseline.add_argument("system", metavar="SYSTEM", help="name of the system: docs/compare.md lists them")
    add_kb(baseline)
    add_model(baseline)
    baseline.add_argument("--train", metavar="FILE", required=True, help="questions with answers to train on")
    baseline.add_argument(
        "--dev", metavar="FILE", required=True, help="questions with answers to choose the best weights by"
    )
    add_regex(baseline)
    add_out(baseline, "folder of the trained system")


def _baseline(args: argparse.Namespace) -> None:
    from realm.compare.system import Ground, module_of
    from realm.qa.question_files import read_questions
    from realm.store.knowledge_base import KnowledgeBase

    system = module_of(args.system)
    args.section = f"baseline.{args.system}"
    config = settings(args, system.Config)
    train, dev = (read_questions(file, regex=args.regex) for file in (args.train, args.dev))
    ground = Ground(KnowledgeBase.open(args.kb), args.model, train, dev)
    system.train(ground, Path(args.out), config)
