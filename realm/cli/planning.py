"""`realm plan`: computes the memory and the time that a preset needs on given hardware."""

import argparse
from collections.abc import Iterator
from typing import Any

from realm.cli.arguments import Commands, Parser, add_command, by_table, positive, report
from realm.errors import InputError

PLANNED = ("kb", "mlm", "ict", "pretrain", "finetune")
"""Tables of a preset that a plan depends on."""


def add_commands(commands: "Commands[Parser]") -> None:
    """Declares the command."""
    plan = add_command(
        commands,
        _plan,
        "compute the memory and the time that the stages of a preset need on given hardware",
        "realm plan paper --hardware h100-x8",
        reports=True,
    )
    plan.add_argument("preset", metavar="PRESET", help="preset, or TOML file of settings")
    plan.add_argument(
        "--set",
        metavar="TABLE.NAME=VALUE",
        action="append",
        default=[],
        help=f"change one setting of the preset, in one of the tables {', '.join(PLANNED)}; can be given several times",
    )
    plan.add_argument(
        "--hardware",
        metavar="FILE",
        help="TOML file with a table [hardware], or the name of known hardware: h100, h100-x8, h100-x64 (required without "
        "--measure)",
    )
    plan.add_switch(
        "--measure",
        "measure the speed of this machine with a few training steps: ten seconds for small networks, a minute or more and "
        "several GB of memory for a BERT-base on a CPU",
    )
    plan.add_argument(
        "--kb", metavar="KB", help="knowledge base whose number of passages and lengths of texts are used"
    )
    plan.add_argument(
        "--passages",
        metavar="N",
        type=positive,
        help="number of passages of the corpus (default: that of --kb, else the 13,353,718 passages of the paper)",
    )


def _plan(args: argparse.Namespace) -> None:
    from realm.plan.estimate import Plan, as_json, measured
    from realm.plan.hardware import read_hardware
    from realm.plan.preset import PASSAGES, Corpus, Preset
    from realm.store.knowledge_base import KnowledgeBase

    if (args.hardware is None) == (not args.measure):
        raise InputError("give either --hardware FILE or --measure")
    changed, others = by_table(args.set, PLANNED)
    if others:
        raise InputError(f"--set {others[0]}: the table must be one of {', '.join(PLANNED)}")
    preset = Preset.read(args.preset, changed)
    if args.kb is not None:
        corpus = Corpus.of(KnowledgeBase.open(args.kb))
        corpus = corpus._replace(passages=args.passages or corpus.passages)
    else:
        corpus = Corpus.assumed(args.passages or PASSAGES, preset.kb.passage_tokens)
    hardware = measured(preset, corpus) if args.measure else read_hardware(args.hardware)
    values = {"preset": args.preset, **as_json(Plan(preset, corpus, hardware))}
    report(args, values, list(_lines(values)))


def _lines(plan: dict[str, Any]) -> Iterator[str]:
    """The plan as lines for a terminal."""
    from realm.progress import counted
    from realm.qa.scoring.tables import aligned

    hardware, corpus = plan["hardware"], plan["corpus"]
    words = f" ({speed:.4g} GB/s for bags of words)" if (speed := hardware["words_gb_per_s"]) else ""
    yield (
        f"{counted(hardware['devices'], 'device')} of {hardware['memory_gb']:g} GB, {hardware['tflops']:.4g} TFLOP/s and "
        f"{hardware['memory_gb_per_s']:.4g} GB/s each{words}; "
        f"{counted(corpus['passages'], 'passage')}"
    )
    yield f"on disk: {corpus['text_gb']:.3g} GB of text, {corpus['vectors_gb']:.3g} GB of vectors"
    yield (
        f"to build the knowledge base: {_hours(corpus['tagging_core_hours'])} core hours for the tagger "
        f"{corpus['tagger']}, {_hours(corpus['rest_core_hours'])} for all other work, "
        f"{_hours(corpus['dump_core_hours'])} more if the documents are a dump of a wiki, "
        f"{corpus['build_memory_gb']:.3g} GB of memory"
    )
    yield f"index: {_duration(plan['index_seconds'])} on one device"
    yield (
        f"one training process: {corpus['process_memory_gb']:.3g} GB of main memory, besides the memory of the device; several "
        "processes of a machine share the wordpieces"
    )
    yield ""
    times = [["stage", "devices", "steps", "per step", "index builds", "total"]]
    memory = [["GB per device", "weights", "optimizer", "activations", "index", "total"]]
    for stage in plan["stages"]:
        builds = "-"
        if stage["refreshes"]:
            builds = f"{stage['refreshes']} x {_duration(stage['refresh_seconds'])}"
        if stage["refresh_steps"]:
            builds += f", every {stage['refresh_steps']:,} steps"
        times.append(
            [
                stage["stage"],
                str(stage["devices"]),
                f"{stage['steps']:,}",
                _duration(stage["step_seconds"]),
                builds,
                _duration(stage["seconds"]),
            ]
        )
        memory.append([stage["stage"], *(f"{value:.3g}" for value in stage["memory_gb"].values())])
        memory[-1][-1] += "" if stage["fits"] else ", too much"
    yield from aligned(times)
    if any(stage["devices"] < hardware["devices"] for stage in plan["stages"]):
        yield "(a stage uses only as many devices as can share its batch_size evenly)"
    yield ""
    yield from aligned(memory)
    for stage in plan["stages"]:
        if stage["fitting_rows"] is not None:
            setting = f"{stage['stage']}.cached_rows={stage['fitting_rows']}"
            yield f"{stage['stage']} would fit with --set {setting}, which computes activations twice"
    yield ""
    yield f"all stages: {_duration(plan['seconds'])}"


def _hours(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _duration(seconds: float) -> str:
    """A duration as text, in the largest unit in which the number is at least 2 (in seconds: at least 1)."""
    for unit, size, least in (("days", 86_400, 2), ("h", 3600, 2), ("min", 60, 2), ("s", 1, 1)):
        if seconds >= least * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"
