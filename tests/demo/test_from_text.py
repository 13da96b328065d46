"""The demo from plain text run on a dozen made-up towns with random weights, and its parts on their own."""

import json
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from realm import cli
from realm.demo import from_text
from realm.demo.from_text import DemoRun, FromTextConfig, plots
from realm.demo.from_text.results import FromTextReport
from realm.errors import InputError
from realm.model.manifest import read_manifest
from realm.qa.scoring.significance import mcnemar, paired_difference, seeds_difference
from realm.settings import presets, read_config
from realm.stages.runner import Costs
from tests.schemas import assert_holds
from tests.towns import TOWNS, write_corpus, write_encoder

SETTINGS = """
[kb]
passage_tokens = 64
held_out = 0.3
tagger = "rules"

[questions]
dev_share = 0.5

[mlm]
steps = 2
query_tokens = 32
[mlm.embedder]
dim = 16

[ict]
steps = 2

[pretrain]
steps = 4
batch_size = 2
candidates = 3
injected = 1
[pretrain.refresh]
every = 2
in_background = false
[pretrain.health]
gate = 0.0
margin = -1.0

[finetune]
steps = 2
batch_size = 2
retrieved = 10
dev_every = 1
"""


class Finished(NamedTuple):
    """A demo that ran."""

    words: list[str]
    """The command, to run it again."""
    folder: Path
    text: str
    report: dict[str, Any]


def run_demo(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """What `realm demo` prints, and its report."""
    printed = StringIO()
    with redirect_stdout(printed):
        assert cli.main(words) == 0
    return printed.getvalue(), json.loads((Path(words[words.index("--dir") + 1]) / "report.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    home = tmp_path_factory.mktemp("demo")
    texts = write_corpus(home / "towns.jsonl")
    write_encoder(home / "encoder", texts)
    table = f"[from_text]\ncorpora = ['{home / 'towns.jsonl'}']\nencoder = '{home / 'encoder'}'\n"
    (home / "settings.toml").write_text(SETTINGS + table)
    words = ["demo", "--from-text", "--dir", str(home / "work"), "--config", str(home / "settings.toml")]
    return Finished(words, home / "work", *run_demo(words))


def commands_in(text: str) -> list[list[str]]:
    return [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("$ realm ")]


def test_the_demo_leaves_the_documented_files(finished: Finished) -> None:
    made = ["kb", "questions/train.jsonl", "questions/dev.jsonl", "report.json", "curves.png"]
    made += [f"models/{name}/realm.json" for name in ("encoder", "ict", "realm", "qa")]
    assert [name for name in made if not (finished.folder / name).exists()] == []
    assert (finished.folder / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_all_four_models_can_be_asked_for_passages(finished: Finished, tmp_path: Path) -> None:
    for name in ("encoder", "ict", "realm", "qa"):
        words = f"retrieve --kb {finished.folder}/kb --model {finished.folder}/models/{name} --top-k 2"
        out = tmp_path / f"{name}.jsonl"
        questions = str(finished.folder / "questions" / "dev.jsonl")
        assert cli.main([*words.split(), "--questions", questions, "--out", str(out)]) == 0
        assert all(len(json.loads(line)["passages"]) == 2 for line in out.read_text().splitlines())


def test_every_command_that_is_shown_is_one_that_the_parser_takes(finished: Finished) -> None:
    shown = commands_in(finished.text)
    verbs = {words[0] for words in shown}
    assert verbs == {
        "kb", "questions", "mlm", "ict", "pretrain", "index", "finetune", "probe", "evaluate", "answer", "fill",
    }  # fmt: skip
    for words in shown:
        assert cli._parser().parse_args(words).run


def test_the_report_holds_the_numbers_of_the_table(finished: Finished) -> None:
    report = finished.report
    assert_holds(FromTextReport, report)
    assert_holds(Costs, json.loads((finished.folder / "stages.json").read_text()))
    assert set(report) == {
        "source", "documents", "passages", "made_questions", "seeds", "recall", "realm_against", "reading",
        "exact_match", "answers", "seconds", "peak_memory_mb",
    }  # fmt: skip
    assert report["documents"] == len(TOWNS)
    dev = (finished.folder / "questions" / "dev.jsonl").read_text().splitlines()
    assert report["made_questions"]["dev"] == len(dev)
    for test in ("probe", "dev"):
        assert list(report["recall"][test]) == ["bm25", "encoder", "ict", "realm"]
        assert list(report["realm_against"][test]) == ["bm25", "encoder", "ict"]
        for by_rank in report["recall"][test].values():
            assert 0 <= by_rank["1"] <= by_rank["5"] <= by_rank["20"] <= 100
    of_realm, of_qa = (
        json.loads((finished.folder / "reports" / f"{name}.dev.json").read_text())["outcomes"]
        for name in ("realm", "qa")
    )
    ranks = [outcome["rank"] for outcome in of_realm]
    assert report["answers"]["dev"]["f1"] == pytest.approx(
        100 * np.mean([outcome["f1"] for outcome in of_qa]), abs=0.01
    )
    assert len(ranks) == len(dev)
    assert report["recall"]["dev"]["realm"]["5"] == pytest.approx(
        100 * sum(0 < rank <= 5 for rank in ranks) / len(dev), abs=0.01
    )
    assert report["exact_match"]["after"] >= report["exact_match"]["before"]
    assert report["answers"]["dev"]["n"] == len(dev)
    assert report["seconds"]["total"] == pytest.approx(
        sum(seconds for name, seconds in report["seconds"].items() if name != "total"), abs=0.1
    )
    assert report["peak_memory_mb"] > 50
    row = next(line for line in finished.text.splitlines() if line.startswith("REALM "))
    assert row.split()[1:4] == [f"{report['recall']['probe']['realm'][k]:.1f}" for k in ("1", "5", "20")]


def test_the_end_shows_five_questions_with_evidence_and_a_filled_mask(finished: Finished) -> None:
    end = finished.text.split("\n7. ")[1]
    verbs = [words[0] for words in commands_in(end)]
    assert verbs == ["answer"] * 5 + ["fill"]
    assert end.count("expected: ") == 5
    assert end.count("[[") == 1 + 5  # the explanation, and a marked span for each question
    assert "[MASK] 1: " in end


def test_a_second_run_only_answers(finished: Finished) -> None:
    text, report = run_demo(finished.words)
    assert {words[0] for words in commands_in(text)} == {"answer", "fill"}
    assert text.split("\n7. ")[1] == finished.text.split("\n7. ")[1]
    same = set(report) - {"peak_memory_mb"}
    assert {key: report[key] for key in same} == {key: finished.report[key] for key in same}


def test_with_json_only_the_report_is_on_standard_output(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*finished.words, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["towns"]["recall"] == finished.report["recall"]
    assert "7. Answers" in captured.err


@pytest.mark.slow
def test_the_full_demo_compares_with_its_controls_over_seeds_and_corpora(
    finished: Finished, tmp_path: Path
) -> None:
    home = finished.folder.parent
    write_corpus(tmp_path / "more.jsonl")
    controls = ["ict-same-seconds", "shuffled", "entity"]
    chosen = {
        "seeds": [0, 1],
        "controls": controls,
        "corpora": [str(home / "towns.jsonl"), str(tmp_path / "more.jsonl")],
    }
    words = ["demo", "--from-text", "--dir", str(tmp_path / "full"), "--config", str(home / "settings.toml")]
    for name, value in chosen.items():
        words += ["--set", f"{name}={json.dumps(value)}"]
    text, report = run_demo([*words, "--questions", str(finished.folder / "questions" / "train.jsonl")])
    assert list(report["recall"]) == ["probe", "dev", "train"]
    assert list(report["realm_against"]["train"]) == ["bm25", "encoder", "ict", *controls]
    assert set(report["recall"]["dev"]["shuffled"]["spread"]) == {"1", "5", "20"}
    assert {path.name for path in (tmp_path / "full" / "models").iterdir()} == {
        "encoder", "qa", *(f"{name}{seed}" for name in ("ict", "realm", *controls) for seed in ("", "-1")),
    }  # fmt: skip
    assert (tmp_path / "full" / "more" / "report.json").exists()
    assert all(cli._parser().parse_args(words).run for words in commands_in(text))


# -- the parts


def demo_in(folder: Path, **settings: Any) -> DemoRun:
    return DemoRun(FromTextConfig(**settings), "demo", "package:vital-articles", folder)


def test_ict_for_the_same_seconds_counts_all_that_realm_had(tiny_model_folder: Path, tmp_path: Path) -> None:
    stages = [
        {"stage": "mlm", "seconds": 10.0},
        {"stage": "ict", "seconds": 20.0, "steps": 100},
        {"stage": "pretrain", "seconds": 70.0},
    ]
    for name in ("realm", "ict-same-seconds"):
        (tmp_path / "models" / name).mkdir(parents=True)
        described = read_manifest(tiny_model_folder) | {"stages": stages, "checksums": {}}
        (tmp_path / "models" / name / "realm.json").write_text(json.dumps(described))
    longer, _ = demo_in(tmp_path, controls=("ict-same-seconds",))._longer_ict(0)
    assert "steps=500" in longer.argv
    assert str(tmp_path / "models" / "encoder") in longer.argv


def test_seeds_beyond_the_first_are_in_the_names_of_their_models(tmp_path: Path) -> None:
    demo = demo_in(tmp_path, seeds=(3, 4))
    assert demo.retrievers() == {
        "bm25": ["bm25"], "encoder": ["encoder"], "ict": ["ict", "ict-4"], "realm": ["realm", "realm-4"],
    }  # fmt: skip


def test_question_files_of_one_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    files = [
        tmp_path / name
        for name in ("wiki/train.jsonl", "factbook/train.jsonl", "trec.jsonl", "mine/dev.jsonl")
    ]
    demo = DemoRun(FromTextConfig(), "demo", "x", tmp_path, tuple(files))
    assert list(demo.tests()) == ["probe", "dev", "wiki-train", "factbook-train", "trec", "mine-dev"]
    with pytest.raises(InputError, match="both have the name"):
        DemoRun(FromTextConfig(), "demo", "x", tmp_path, (files[2], files[2])).tests()


@pytest.mark.parametrize("preset", [name for name in ("demo", "demo-full") if name in presets()])
def test_the_settings_of_the_packaged_demos_are_known(preset: str) -> None:
    assert isinstance(read_config(FromTextConfig, preset, "from_text"), FromTextConfig)


def test_an_empty_list_of_corpora_is_refused() -> None:
    with pytest.raises(InputError, match="corpora is empty"):
        read_config(FromTextConfig, None, "from_text", ["corpora=[]"])


def test_without_matplotlib_the_demo_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_text, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs matplotlib and scipy: pip install"):
        from_text.run(FromTextConfig(), "demo", tmp_path / "work", [], print)
    assert not (tmp_path / "work").exists()


def test_pairs_are_compared_query_by_query_and_seed_by_seed() -> None:
    realm = np.array([[1, 5, 6, 0], [2, 3, 1, 0]])
    other = np.array([[6, 1, 0, 0], [1, 0, 0, 0]])
    found = paired_difference(realm, other)
    assert found["points"] == pytest.approx(100 * (5 - 2) / 8)
    assert (found["only_a"], found["only_b"]) == (3, 0)
    hits, others = [[100, 100, 0, 0], [100, 100, 100, 0]], [[0, 100, 0, 0], [100, 0, 0, 0]]
    assert found["p"] == seeds_difference(np.array(hits), np.array(others)).p
    assert paired_difference(realm, realm)["p"] == 1
    assert paired_difference(realm[:1], other[:1])["p"] == mcnemar([1, 1, 0, 0], [0, 1, 0, 0]).p == 1.0
    one_for_all_seeds = paired_difference(realm, other[:1])
    assert one_for_all_seeds == paired_difference(realm, np.concatenate([other[:1], other[:1]]))


def test_a_picture_is_drawn_of_runs_that_measured_little(tmp_path: Path) -> None:
    out = tmp_path / "curves.png"
    plots.draw([[{"step": 10, "loss": 3.0, "retrieval_utility": None}], []], out)
    assert out.read_bytes()[:4] == b"\x89PNG"
