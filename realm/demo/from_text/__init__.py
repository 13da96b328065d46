"""`realm demo --from-text`: trains a retriever and a reader from plain text alone, by running and printing `realm` commands.

    stages     the stages in their order, each one `realm` command
    results    reads the reports of the commands: recall of each retriever, paired tests, accuracy; the tables
    plots      draws the training curves

The demo's folder always contains: kb, questions/{train,dev}.jsonl, models/{encoder,ict,realm,qa}, report.json, curves.png.
With several corpora, the folder of the first corpus contains a folder of the same form for each further corpus.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from realm.demo.from_text import plots, results
from realm.demo.from_text.stages import DemoRun, FromTextConfig
from realm.errors import InputError
from realm.files import write_json
from realm.qa.question_files import read_questions
from realm.stages.memory import PeakMemory
from realm.stages.runner import Record, run_stages

__all__ = ["DemoRun", "FromTextConfig", "run"]


def run(
    config: FromTextConfig,
    preset: str,
    folder: Path,
    question_files: Sequence[str],
    run_command: Callable[[Sequence[str]], None],
) -> dict[str, results.FromTextReport]:
    """Runs the demo of each corpus -> report by name of the corpus. Stages that are already done are skipped.

    `preset` is the configuration file of every stage. `question_files` are measured in addition to the made questions.

    Raises:
        InputError: a stage refuses its input, or matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise InputError("the demo draws its curves with matplotlib: pip install 'realm-lm[demo]'")
    for file in question_files:
        read_questions(file)  # so that a bad file is refused now, not after hours
    reports = {}
    for number, source in enumerate(config.corpora):
        name = source.removeprefix("package:").rpartition("/")[2].partition(".")[0]
        here = folder if number == 0 else folder / name
        demo = DemoRun(config, preset, source, here, tuple(map(Path, question_files)))
        demo.tests()  # refuses question files with the same name
        reports[name] = _run_corpus(demo, run_command)
    return reports


def _run_corpus(demo: DemoRun, run_command: Callable[[Sequence[str]], None]) -> results.FromTextReport:
    print(
        f"realm demo: trains a retriever and a reader from the plain text of {demo.source}, in {demo.folder}"
    )
    print("Each line that begins with $ is a command that you can also run yourself.")
    print("You can stop the demo at any time: the same command continues it.")
    demo.folder.mkdir(parents=True, exist_ok=True)
    with PeakMemory() as memory:
        record = Record(demo.folder / "stages.json", memory)
        run_stages(demo.making(), record, run_command)
        run_stages(demo.measuring(), record, run_command)
        seconds, peak = record.seconds(), record.peak_memory_mb()
    report: results.FromTextReport = {**results.read(demo), "seconds": seconds, "peak_memory_mb": peak}
    write_json(demo.folder / "report.json", report)
    metrics = [demo.model("realm", seed) / "metrics.jsonl" for seed in demo.config.seeds]
    plots.draw_if_new(metrics, demo.curves)
    print("", *results.lines(report), sep="\n")
    print(f"Training curves are in {demo.curves}, all numbers in {demo.folder / 'report.json'}.")
    run_stages(demo.answering(), record, run_command)
    return report
