"""Commands of the training stages: `mlm`, `ict`, `pretrain`, `adapt`, `index`, `finetune`."""

import argparse
from pathlib import Path
from typing import TypeVar

from realm.cli.arguments import Commands, Parser, add_command, report, say_where, settings
from realm.errors import InputError

T = TypeVar("T")


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the group."""
    mlm = add_command(
        commands,
        _mlm,
        "train an encoder as a masked language model, from --init or from random weights",
        "realm mlm --kb kb --init package:all-minilm-l6-v2 --out models/encoder",
        section="mlm",
        continues=True,
        shares=True,
    )
    mlm.add_kb()
    mlm.add_init(
        False,
        "ENCODER",
        "model or BERT-like encoder to start from: a folder or a name (default: the setting `init`, else random weights)",
    )
    mlm.add_out("folder of the new model")

    ict = add_command(
        commands,
        _ict,
        "train the embedder with the inverse cloze task: to find the passage from which a sentence was taken",
        "realm ict --kb kb --init models/encoder --out models/ict",
        section="ict",
        continues=True,
        shares=True,
    )
    ict.add_kb()
    ict.add_init(True, "MODEL", "model to start from: a folder, package:NAME or hf:OWNER/NAME")
    ict.add_out("folder of the new model")

    pretrain = add_command(
        commands,
        _pretrain,
        "REALM pre-training: train retriever and reader to predict masked names and dates from retrieved passages; also "
        "writes the index of the new model to KB",
        "realm pretrain --kb kb --model models/ict --out models/realm",
        section="pretrain",
        continues=True,
        shares=True,
    )
    pretrain.add_kb()
    pretrain.add_argument(
        "--text", metavar="KB", help="knowledge base whose sentences are masked (default: --kb)"
    )
    pretrain.add_model()
    pretrain.add_argument(
        "--questions",
        metavar="FILE",
        help="question file on which the recall of each index version is measured; these questions are never used for training",
    )
    pretrain.add_regex()
    pretrain.add_out("folder of the new model")

    adapt = add_command(
        commands,
        _adapt,
        "adapt the retriever of a model to a knowledge base within minutes, with the loss of REALM; the reader reads each "
        "sentence only once",
        "realm adapt --kb kb --model models/start --out models/adapted",
        section="adapt",
        continues=True,
    )
    adapt.add_kb()
    adapt.add_model()
    adapt.add_argument(
        "--minutes",
        metavar="N",
        type=float,
        help="time limit in minutes (default: the setting `minutes`, which is 10)",
    )
    adapt.add_out("folder of the new model")

    index = add_command(
        commands,
        _index,
        "embed all passages of a knowledge base, as a new version of the model's index",
        "realm index --kb kb --model models/realm",
        section="index",
        reports=True,
        continues=True,
    )
    index.add_kb()
    index.add_model()
    index.add_engine("passages are embedded")
    index.add_switch(
        "--approximate",
        "also make the table for approximate search now (default: the first command with --set search=approximate makes "
        "the table)",
    )
    index.add_argument(
        "--supervised",
        metavar="FOLDER",
        type=Path,
        # For training runs, which start this command: writes the index to this folder, prints progress every few seconds, and
        # ends when standard input is closed.
        help=argparse.SUPPRESS,
    )

    finetune = add_command(
        commands,
        _finetune,
        "train a model on questions with answers, and keep the weights that are best on the dev questions",
        "realm finetune --kb kb --model models/realm --train train.jsonl --dev dev.jsonl --out models/qa",
        section="finetune",
        continues=True,
        shares=True,
    )
    finetune.add_kb()
    finetune.add_model()
    finetune.add_reader(
        "span reader to start from (default: that of the model, or a new span reader if the model has none)"
    )
    finetune.add_argument(
        "--method",
        choices=("dense", "bm25", "hybrid"),
        help="retrieve the passages for training by vectors (dense), words (bm25) or both (hybrid); the new model uses the "
        "same method to answer (default: the setting `method`, else the method with which the model was calibrated, else "
        "dense)",
    )
    finetune.add_train_and_dev()
    finetune.add_out("folder of the new model")


def _settings(args: argparse.Namespace, cls: type[T], *flags: str) -> T:
    """Settings of a training command, which searches exactly."""
    if any(override.partition("=")[0].strip() == "search" for override in args.set):
        from realm.search.exact import TRAINING_IS_EXACT

        raise InputError(TRAINING_IS_EXACT)
    return settings(args, cls, *flags)


def _mlm(args: argparse.Namespace) -> None:
    from realm.store.knowledge_base import KnowledgeBase
    from realm.train import mlm

    config = settings(args, mlm.MlmConfig)
    mlm.train(KnowledgeBase.open(args.kb), Path(args.out), config, args.init)


def _ict(args: argparse.Namespace) -> None:
    from realm.store.knowledge_base import KnowledgeBase
    from realm.train import ict

    config = settings(args, ict.IctConfig)
    ict.train(KnowledgeBase.open(args.kb), Path(args.out), config, args.init)


def _pretrain(args: argparse.Namespace) -> None:
    from realm.qa.question_files import read_questions
    from realm.store.knowledge_base import KnowledgeBase
    from realm.train import pretrain

    config = _settings(args, pretrain.PretrainConfig)
    questions = read_questions(args.questions, regex=args.regex) if args.questions else None
    text = KnowledgeBase.open(args.text) if args.text else None
    pretrain.train(KnowledgeBase.open(args.kb), Path(args.out), config, args.model, text, questions)


def _adapt(args: argparse.Namespace) -> None:
    from realm.store.knowledge_base import KnowledgeBase
    from realm.train import adapt

    config = _settings(args, adapt.AdaptConfig, "minutes")
    adapt.train(KnowledgeBase.open(args.kb), Path(args.out), config, args.model)


def _index(args: argparse.Namespace) -> None:
    if args.supervised is not None:
        from realm.watchdog import end_with_parent

        end_with_parent()  # called before the import of torch, which takes seconds in which the trainer may end
    from realm.index.embedding import IndexConfig
    from realm.index.versions import APPROXIMATE, build_index, complete_index
    from realm.model.folder import load_model
    from realm.store.knowledge_base import KnowledgeBase

    config = settings(args, IndexConfig, "engine", "ray_address")
    kb = KnowledgeBase.open(args.kb)
    built = build_index(kb, args.model, config, args.supervised)
    if args.approximate:
        complete_index(kb, load_model(args.model, reader=False), args.model, search=APPROXIMATE)
    report(args, built)
    say_where(args, "the index is", built["folder"])


def _finetune(args: argparse.Namespace) -> None:
    from realm.qa.question_files import read_questions
    from realm.store.knowledge_base import KnowledgeBase
    from realm.train import finetune

    config = _settings(args, finetune.FinetuneConfig, "method")
    train, dev = (read_questions(file, regex=args.regex) for file in (args.train, args.dev))
    finetune.train(KnowledgeBase.open(args.kb), Path(args.out), config, args.model, train, dev)
