"""`realm demo --from-text`: from plain text alone to answers with evidence, in the commands that anyone could type.

    stages     the stages in their order, each a `realm ...` command and what it makes
    results    what the outcomes say: recall of each retriever, paired tests, accuracy; the table
    plots      the training curves

The folder of a demo is a contract: kb, questions/{train,dev}.jsonl, models/{encoder,ict,realm,qa}, report.json, curves.png.
With several corpora each of the others has such a folder of its own, inside the first one's, by its name.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from realm.demo.from_text import plots, results
from realm.demo.from_text.stages import DemoRun, FromTextConfig
from realm.demo.memory import PeakMemory
from realm.demo.runner import Record, run_stages
from realm.errors import InputError
from realm.files import write_json
from realm.qa.question_files import read_questions

__all__ = ["DemoRun", "FromTextConfig", "run"]


def run(
    config: FromTextConfig,
    preset: str,
    folder: Path,
    question_files: Sequence[str],
    run_command: Callable[[Sequence[str]], None],
) -> dict[str, results.FromTextReport]:
    """Tells the demo of each corpus -> its report, by the corpus' name; what is there already is not made again.

    `preset` is the configuration file of every stage; `question_files` are measured beside the made questions.

    Raises:
        InputError: as the stages do; or there is nothing to draw with.
    """
    if find_spec("matplotlib") is None:
        raise InputError("the demo draws its curves with matplotlib: pip install realm-lm[demo]")
    for file in question_files:
        read_questions(file)  # now, not after hours
    reports = {}
    for number, source in enumerate(config.corpora):
        name = source.removeprefix("package:").rpartition("/")[2].partition(".")[0]
        here = folder if number == 0 else folder / name
        demo = DemoRun(config, preset, source, here, tuple(map(Path, question_files)))
        demo.tests()  # refuses names that clash
        reports[name] = _tell(demo, run_command)
    return reports


def _tell(demo: DemoRun, run_command: Callable[[Sequence[str]], None]) -> results.FromTextReport:
    print(f"realm demo: {demo.source}, from plain text to answers with evidence, in {demo.folder}")
    print("A line that begins with $ is a command of its own. Stop at any time: the demo goes on from there.")
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
    print(f"Training curves: {demo.curves}. All numbers: {demo.folder / 'report.json'}.")
    run_stages(demo.answering(), record, run_command)
    return report
