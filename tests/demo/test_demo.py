"""The demo of a workspace run on made-up towns with random weights, and its parts on their own."""

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from realm import cli, demo
from realm.demo import results, stages
from realm.demo.results import DemoReport
from realm.demo.stages import QUESTIONS, DemoConfig, DemoRun
from realm.errors import InputError
from realm.settings import read_config
from realm.stages.runner import Costs
from realm.text import salient_spans
from tests.conftest import TOWNS
from tests.qa.conftest import qa_folder
from tests.schemas import assert_holds
from tests.test_terminal import terminal
from tests.workspace.conftest import YEARS, Tagger, made_small, text_of

__all__ = ["qa_folder"]

RUN = cli.run
NEW_TOWNS = ("Quorn", "Ravensby", "Selmarsh", "Tolworth", "Ulverley", "Vexham")


class Finished(NamedTuple):
    """A demo that ran."""

    words: list[str]
    """The command, to run it again."""
    folder: Path
    text: str
    report: dict[str, Any]


def write_towns(file: Path, towns: Sequence[str]) -> None:
    """A JSON Lines file of towns, each founded in one of few years."""
    documents = [
        {"id": f"{town}/History", "title": town, "text": text_of(town, YEARS[number % 4])}
        for number, town in enumerate(towns)
    ]
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))


def run_demo(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """What `realm demo` prints, and its report."""
    printed = StringIO()
    with redirect_stdout(printed):
        assert cli.main(words) == 0
    return printed.getvalue(), json.loads((Path(words[words.index("--dir") + 1]) / "report.json").read_text())


def commands_in(text: str) -> list[list[str]]:
    return [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("$ realm ")]


@pytest.fixture(scope="module")
def tagger():
    """All commands find names and years without spaCy, and adapt in two steps."""
    with pytest.MonkeyPatch.context() as patch:
        made_small(patch)
        patch.setattr(salient_spans, "load_tagger", lambda name, processes=0, engine=None: Tagger(name))
        yield


@pytest.fixture(scope="module")
def finished(tagger: None, qa_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    home = tmp_path_factory.mktemp("demo")
    write_towns(home / "towns.jsonl", TOWNS)
    write_towns(home / "later.jsonl", NEW_TOWNS)
    (home / "settings.toml").write_text(
        f"[demo]\nsource = '{home / 'towns.jsonl'}'\nlater = '{home / 'later.jsonl'}'\nstart = '{qa_folder}'\n"
        "[fit]\ntagger = 'tiny'\nheld_out = 0.3\ndevice = 'cpu'\n"
    )
    words = ["demo", "--dir", str(home / "work"), "--config", str(home / "settings.toml")]
    return Finished(words, home / "work", *run_demo(words))


def test_the_demo_leaves_the_documented_files(finished: Finished) -> None:
    made = ["workspace/kb", "workspace/model", "later.jsonl", "questions/dev.jsonl", "report.json"]
    assert [name for name in made if not (finished.folder / name).exists()] == []
    assert_holds(DemoReport, finished.report)
    assert_holds(Costs, json.loads((finished.folder / "stages.json").read_text()))
    assert_holds(demo.SettingsJson, json.loads((finished.folder / "settings.json").read_text()))


def test_every_command_of_the_demo_is_one_that_the_parser_takes(finished: Finished) -> None:
    shown = commands_in(finished.text)
    kept = finished.report["articles"]["adaptation"]["kept"]
    assert [words[0] for words in shown] == [
        "fit", "evaluate", "evaluate", *["evaluate"] * kept, "evaluate",
        "kb", "questions", "evaluate", "evaluate",
        "fit", "evaluate", "evaluate", *["answer"] * len(QUESTIONS), "fill",
    ]  # fmt: skip
    for words in shown:
        assert cli._parser().parse_args(words).run


def test_the_tables_hold_what_the_commands_reported(finished: Finished) -> None:
    articles, added = finished.report["articles"], finished.report["added"]
    assert (articles["documents"], added["documents"]) == (len(TOWNS), len(TOWNS) + len(NEW_TOWNS))
    kept = articles["adaptation"]["kept"]
    assert list(articles["systems"]) == ["bm25", "start", *["adapted"] * kept, "hybrid"]
    assert list(added["systems"]) == ["bm25", "before", "after", "hybrid"]
    assert [list(part["less"]) for part in (articles, added)] == [
        ["bm25", *["start"] * kept],
        ["bm25", "before"],
    ]
    first, second = finished.text.split("2. Compare the retrievers")[1].split("3. Add documents")
    for part, prefix, text in ((articles, "articles", first), (added, "later", second)):
        for name, scores in part["systems"].items():
            reported = json.loads((finished.folder / "reports" / f"{prefix}-{name}.json").read_text())
            assert [scores["found"][k] for k in ("1", "5", "20")] == [
                reported["recall"][k] for k in ("1", "5", "20")
            ]
            assert scores["exact"] == reported["em"]
            row = next(
                line for line in text.splitlines() if line.startswith(f"{results.LABELS.get(name, name)}  ")
            )
            assert row.split()[1:5] == [f"{reported['recall'][k]:.1f}" for k in ("1", "5", "20")] + [
                f"{reported['em']:.1f}"
            ]
    fit = json.loads((finished.folder / "reports" / "fit.json").read_text())
    assert articles["masked_facts"] == fit["tests"]["masked_facts"]
    judged = fit["tests"]["made_questions"]  # the fit and the table ask the same questions
    assert (articles["questions"], articles["systems"]["bm25"]["found"]) == (judged["n"], judged["bm25"])


def test_later_questions_are_about_the_later_documents_alone(finished: Finished) -> None:
    asked = (finished.folder / "questions" / "dev.jsonl").read_text().splitlines()
    assert {json.loads(line)["title"] for line in asked} <= set(NEW_TOWNS)
    assert finished.report["added"]["questions"] == len(asked) > 0


def test_the_answers_are_those_of_the_commands_that_are_shown(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [words for words in commands_in(finished.text) if words[0] in ("answer", "fill")]
    assert [one["question"] for one in finished.report["asked"]] == [one.question for one in QUESTIONS]
    for words in (shown[0], shown[-1]):
        assert cli.main([*words, "--set", "device=cpu"]) == 0
        assert capsys.readouterr().out in finished.text


def test_a_second_run_only_asks_and_with_json_prints_its_report_alone(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*finished.words, "--json"]) == 0
    captured = capsys.readouterr()
    assert {words[0] for words in commands_in(captured.err)} == {"answer", "fill"}
    assert captured.err.count("done before: ") == 4  # two fits, kb add, questions
    report, same = json.loads(captured.out), set(finished.report) - {"peak_memory_mb"}
    assert {key: report[key] for key in same} == {key: finished.report[key] for key in same}


def test_other_settings_need_another_folder(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*finished.words, "--set", "minutes=0.9"]) == 2
    assert "was made with other settings: use another --dir, or remove" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--full"], ["--questions", "q.jsonl"]])
def test_flags_of_the_other_demo_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *words]) == 2
    assert "add --from-text" in capsys.readouterr().err


@pytest.mark.slow
def test_a_demo_that_is_interrupted_after_any_command_goes_on_to_the_same_end(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*finished.words[:2], str(tmp_path / "work"), *finished.words[3:]]
    interrupted = 0
    with redirect_stdout(StringIO()):
        while True:
            monkeypatch.setattr(cli, "run", stopping_after(1, RUN))
            if cli.main(words) != 130:
                break
            interrupted += 1
    monkeypatch.setattr(cli, "run", RUN)
    assert (
        interrupted
        == len([one for one in commands_in(finished.text) if one[0] not in ("answer", "fill")]) - 1
    )
    text, report = run_demo(words)
    assert {"answer", "fill"} <= {one[0] for one in commands_in(text)}
    for part in ("articles", "added"):
        assert report[part]["systems"] == finished.report[part]["systems"]


@pytest.mark.slow
def test_the_demo_runs_on_a_narrow_terminal(finished: Finished, tmp_path: Path) -> None:
    words = [*finished.words[:2], str(tmp_path / "work"), *finished.words[3:]]
    with terminal(80) as screen:
        code = cli.main(words)
    assert code == 0, screen.text
    assert "Traceback" not in screen.text
    assert "6. A masked sentence" in screen.text


def stopping_after(count: int, run: Callable[[Sequence[str]], None]) -> Callable[[Sequence[str]], None]:
    """Runs so many commands; the one after them ends at its last line."""
    left = count

    def stopped(argv: Sequence[str]) -> None:
        nonlocal left
        run(argv)
        if argv[0] == "demo":  # the demo itself is a command too
            return
        if left == 0:
            raise KeyboardInterrupt
        left -= 1

    return stopped


@pytest.mark.parametrize("factbook", [True, False])
def test_of_the_factbook_one_part_is_added_and_of_other_sources_everything(
    factbook: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"id": f"ke/{part}", "title": "Kenya", "text": f"About its {part}."}
        for part in ("Introduction", "Energy")
    ]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    later = str(tmp_path / "facts.jsonl")
    if factbook:
        monkeypatch.setattr(stages, "FACTBOOK", later)
    demo = DemoRun(DemoConfig(later=later), None, tmp_path / "work")
    (tmp_path / "work").mkdir()
    next(demo.adding())
    written = [json.loads(line) for line in demo.later.read_text().splitlines()]
    assert written[0] == {"id": "facts/ke/Introduction", "title": "Kenya", "text": "About its Introduction."}
    assert [row["id"] for row in written[1:]] == ([] if factbook else ["facts/ke/Energy"])


def test_tables_fit_a_terminal_of_80_columns_and_show_which_model_was_kept() -> None:
    systems = {
        name: {"found": {"1": 100.0, "5": 100.0, "20": 100.0}, "exact": 100.0}
        for name in ("bm25", "start", "adapted", "hybrid")
    }
    less = {"points": -10.25, "low": -12.75, "high": 11.5, "p": 0.0001}
    part: Any = {"questions": 400, "systems": systems, "adaptation": {"kept": False, "why": "made it worse"}}
    part["less"] = {name: {"found": less, "exact": less} for name in ("bm25", "start")}
    part["masked_facts"] = {"n": 1000, "difference": less} | {n: systems[n]["found"] for n in systems}
    lines = "\n".join(results.lines(part)).split("\n")
    assert [line for line in lines if len(line) > 80] == []
    assert "The start model was kept: made it worse." in lines
    assert sum("-10.2 (-12.8 to +11.5) p < .001" in line for line in lines) == 3


def test_guesses_are_counted_apart_from_answers() -> None:
    asked: list[Any] = [{"found": True, "right": True}, {"found": False, "right": True}]
    assert results.asked_line(asked[:1]) == "Right answers: 1 of 1."
    assert results.asked_line(asked) == (
        "Right answers: 2 of 2. Guesses, whose probability is below the threshold of the model: 1."
    )


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(InputError, match="minutes is 0: it must be above 0"):
        read_config(DemoConfig, None, "demo", ["minutes=0.0"])
