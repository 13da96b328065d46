"""`realm demo --from-text` prints and runs `realm` commands, which train a retriever and a reader from plain text alone.

    stages     the stages of the demo in their order, each of which runs one command
    results    reads the reports of the commands, and makes the tables of recall, paired tests and accuracy
    plots      draws the training curves

The folder of the demo contains kb, questions/{train,dev}.jsonl, models/{encoder,ict,realm,qa}, report.json and curves.png.
With several corpora, this is the folder of the first corpus; it contains a folder with the same files for each other corpus.
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
    """Runs the demo for each corpus -> name of the corpus -> report. Stages that are already done are skipped.

    `preset` is the configuration file or preset of every stage. Each retriever is measured on the questions made from the
    corpus, and on the `question_files`.

    Raises:
        InputError: a stage refuses its input, or a package of the extra `demo` is missing.
    """
    if missing := [name for name in ("matplotlib", "scipy") if find_spec(name) is None]:
        raise InputError(f"the demo needs {' and '.join(missing)}: pip install 'realm-lm[demo]'")
    for file in question_files:
        read_questions(file)  # a file that cannot be used is an error now, not after hours of training
    reports = {}
    for number, source in enumerate(config.corpora):
        name = source.removeprefix("package:").rpartition("/")[2].partition(".")[0]
        here = folder if number == 0 else folder / name
        demo = DemoRun(config, preset, source, here, tuple(map(Path, question_files)))
        demo.tests()  # raises an error if two question files have the same name
        reports[name] = _run_corpus(demo, run_command)
    return reports


def _run_corpus(demo: DemoRun, run_command: Callable[[Sequence[str]], None]) -> results.FromTextReport:
    print(
        f"realm demo trains a retriever and a reader from the plain text of {demo.source}, in {demo.folder}."
    )
    print("Each line that begins with $ is a command that you can also run yourself.")
    print("You can stop the demo at any time; the same command continues the demo.")
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
    print(f"Training curves are in {demo.curves}, and all numbers are in {demo.folder / 'report.json'}.")
    run_stages(demo.answering(), record, run_command)
    return report
