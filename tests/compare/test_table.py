"""`realm compare` and `realm ablate` on a dozen made-up towns with random weights."""

import copy
import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from torch import nn

from realm import cli
from realm.compare import layout, plots, results
from realm.compare.checks import deviations
from realm.compare.rows import STARTS, TABLE_1, TABLE_2
from realm.compare.table import DataJson
from realm.model.folder import load_model
from realm.model.manifest import read_manifest
from realm.qa.scoring.significance import p_value
from realm.store.knowledge_base import KnowledgeBase
from realm.systems.system import load_system
from tests.compare.conftest import TESTS, Home, printed, read_lines, undrawn_tables
from tests.compare.scorer import first_with, plain, recall_and_rank, scored
from tests.schemas import assert_holds


@pytest.fixture(scope="module", autouse=True)
def _three_times_as_old() -> Iterator[None]:
    """The row `stale` builds its index after three steps, not after 30."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STARTS, "stale", STARTS["stale"]._replace(stale=3))
        yield


@pytest.fixture
def undrawn() -> Iterator[None]:
    with undrawn_tables():
        yield


@pytest.fixture(scope="module")
def compared(home: Home) -> dict[str, Any]:
    """The report of `realm compare`, which is also in table1/table1.json."""
    text = printed(*home.words("compare", home.table1))
    assert "REALM + BM25" in text
    assert 'The row "published" is left out, because it needs published weights: give a checkpoint' in text
    assert "realm-x is left out" not in text
    assert "Training and dev questions that are left out because they are also in a test: 1." in text
    return json.loads((home.table1 / "table1.json").read_text())


@pytest.fixture(scope="module")
def ablated(home: Home, compared) -> dict[str, Any]:
    """The report of `realm ablate`, which continues from the starts of `realm compare`."""
    shutil.copytree(home.table1, home.table2)
    printed(*home.words("ablate", home.table2))
    assert json.loads((home.table2 / "table1.json").read_text()) == compared  # both tables may share a folder
    return json.loads((home.table2 / "table2.json").read_text())


def test_every_row_is_trained_and_measured_on_the_same_questions(compared, ablated) -> None:
    for report, table in ((compared, TABLE_1), (ablated, TABLE_2)):
        assert_holds(results.TableJson, report)
        assert list(report["rows"]) == [name for name in table if name not in ("given", "published")]
        for test in TESTS:
            tests = [row["tests"][test] for row in report["rows"].values()]
            assert len({one["all"]["n"] for one in tests}) == 1
            assert all(one["seen"]["n"] + one["unseen"]["n"] == one["all"]["n"] for one in tests)
            assert report["rows"]["realm"]["tests"][test]["less"] is None
        assert report["masked_facts"]["n"] > 0


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("table", ["table1", "table2"])
def test_report_has_the_scores_that_an_independent_scorer_computes_from_the_saved_files(
    home, compared, ablated, table, test
) -> None:
    report, folder = (compared, home.table1) if table == "table1" else (ablated, home.table2)
    texts = {passage.id: passage.text for passage in KnowledgeBase.open(folder / "kb")}
    questions = read_lines(home.folder / f"{test}.jsonl")
    trained = [one for line in read_lines(folder / "questions" / "train.jsonl") for one in line["answers"]]
    if test == "patterns":
        seen = [any(re.search(question["answers"][0], one) for one in trained) for question in questions]
    else:
        known = [plain(one) for one in trained]
        seen = [any(plain(one) in known for one in question["answers"]) for question in questions]
    predicted = {name: read_lines(folder / "predictions" / f"{name}.{test}.jsonl") for name in report["rows"]}
    ranks = {
        name: [
            first_with(question, [texts[one] for one in found["passages"]])
            for question, found in zip(questions, lines, strict=True)
        ]
        for name, lines in predicted.items()
    }
    retrieved = {
        name: retrieved_ranks(folder, name, home.folder / f"{test}.jsonl", questions)
        for name in report["starts"]
    }
    found_by = [*ranks.values(), *retrieved.values()]
    answerable = [any(own[place] for own in found_by) for place in range(len(questions))]
    for name, row in report["rows"].items():
        lines, one = predicted[name], row["tests"][test]
        pairs = list(zip(questions, lines, strict=True))
        parts = {"all": [True] * len(pairs), "answerable": answerable, "seen": seen}
        parts["unseen"] = [not known for known in seen]
        for part, chosen in parts.items():
            kept = [pair for pair, taken in zip(pairs, chosen, strict=True) if taken]
            assert one[part]["n"] == len(kept)
            for key, value in scored(kept).items() if kept else ():
                assert one[part][key] == pytest.approx(value, abs=0.006), (name, part, key)
            for key in ("em", "f1") if kept else ():
                low, high = one[part][f"{key}_ci95"]
                assert low <= one[part][key] <= high
        for key, taken in (("less", [True] * len(pairs)), ("less_answerable", answerable)):
            check_difference(one[key], questions, predicted["realm"], lines, taken if name != "realm" else [])
        assert one["ms"] == pytest.approx(mean(line["ms"] for line in lines), abs=0.06)
        if name == "t5":
            assert one["retrieved"] is None
        else:
            check_retrieval(one["retrieved"], ranks[name], answerable)
    for name, start in report["starts"].items():
        check_retrieval(start["tests"][test], retrieved[name], answerable)
    for measure in ("em", "f1"):  # the checks could not fail if all answers were wrong
        assert any(0 < row["tests"][test]["all"][measure] < 100 for row in compared["rows"].values())
    assert any(0 < start["tests"][test]["all"]["recall"]["5"] < 100 for start in report["starts"].values())


def test_every_start_is_measured_on_the_same_masked_facts(home, compared, ablated) -> None:
    for folder, report in ((home.table1, compared), (home.table2, ablated)):
        for name, start in report["starts"].items():
            probe = json.loads((folder / "reports" / f"probe-{name}.json").read_text())
            found = start["facts"]["retrieved"]
            assert found["n"] == probe["n"] > 0
            assert {k: found["recall"][k] for k in probe["recall"]} == probe["recall"]
    facts = {name: start["facts"]["retrieved"] for name, start in ablated["starts"].items()}
    assert facts["realm-retriever"] == facts["realm"]
    assert facts["realm-encoder"] == facts["ict"]


def test_report_has_the_number_of_passages_read(home, compared) -> None:
    for name, row in compared["rows"].items():
        lines = [
            line
            for test in TESTS
            for line in read_lines(home.table1 / "predictions" / f"{name}.{test}.jsonl")
        ]
        assert row["read"] == pytest.approx(mean(line["read"] for line in lines), abs=0.06)
        assert (row["read"] == 0) == (name == "t5")
    assert compared["rows"]["realm"]["read"] == 5


def test_report_has_the_number_of_parameters_of_the_networks_of_each_row(home, compared) -> None:
    kb = KnowledgeBase.open(home.table1 / "kb")
    for name, row in compared["rows"].items():
        folder = home.table1 / "rows" / ("realm" if name == "hybrid" else name)
        if (folder / "system.json").exists():
            loaded = vars(load_system(folder, kb)).values()
            (network,) = (part for part in loaded if isinstance(part, nn.Module))
            networks = [network]
        else:
            model = load_model(folder)
            by_words = name in ("bm25-reader", "first-match", "hard-em")
            networks = [model.span_reader, *([] if by_words else [model.embedder])]
        weights = {id(one): one.numel() for network in networks for one in network.parameters()}
        assert row["parameters"] == sum(weights.values()) > 0, name


def retrieved_ranks(folder: Path, start: str, file: Path, questions: list[dict[str, Any]]) -> list[int]:
    """Ranks of answers in what `realm retrieve` finds."""
    out = folder / "retrieved" / f"{start}.jsonl"
    words = ["--kb", str(folder / "kb"), "--questions", str(file), "--out", str(out)]
    model = ["--method", "bm25"] if start == "bm25" else ["--model", str(folder / "models" / start)]
    assert cli.main(["retrieve", *words, *model, "--top-k", "100"]) == 0
    found = [[one["text"] for one in line["passages"]] for line in read_lines(out)]
    return [first_with(question, texts) for question, texts in zip(questions, found, strict=True)]


def check_difference(
    less: dict[str, Any] | None,
    questions: list[dict[str, Any]],
    realm: list[dict[str, Any]],
    other: list[dict[str, Any]],
    taken: list[bool],
) -> None:
    """Checks the difference in exact match, and McNemar's exact test, on the taken questions; None if there are none."""
    if not any(taken):
        assert less is None
        return
    right = [
        tuple(scored([(question, one)])["em"] == 100 for one in pair)
        for question, pair, own in zip(questions, zip(realm, other, strict=True), taken, strict=True)
        if own
    ]
    only_a, only_b = right.count((True, False)), right.count((False, True))
    n = only_a + only_b
    p = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1)) / 2 ** (n - 1) if n else 1.0
    assert less is not None and (less["only_a"], less["only_b"]) == (only_a, only_b)
    assert less["points"] == pytest.approx(100 * (only_a - only_b) / len(right), abs=0.006)
    assert less["p"] == pytest.approx(min(1.0, p))
    assert less["low"] <= less["points"] <= less["high"]


def check_retrieval(one: dict[str, Any], ranks: list[int], answerable: list[bool]) -> None:
    for part, own in (
        ("all", ranks),
        ("answerable", [rank for rank, taken in zip(ranks, answerable, strict=True) if taken]),
    ):
        wanted = recall_and_rank(own)
        assert (one[part]["n"], one[part]["mrr"]) == (wanted["n"], pytest.approx(wanted["mrr"], abs=0.006))
        assert one[part]["recall"] == pytest.approx(wanted["recall"], abs=0.006)


def test_saved_predictions_score_as_the_table(home, compared, capsys) -> None:
    words = ["evaluate", "--kb", str(home.table1 / "kb"), "--json", "--questions"]
    for test in TESTS:
        for name, row in compared["rows"].items():
            saved = home.table1 / "predictions" / f"{name}.{test}.jsonl"
            assert cli.main([*words, str(home.folder / f"{test}.jsonl"), "--predictions", str(saved)]) == 0
            again, one = json.loads(capsys.readouterr().out.splitlines()[-1]), row["tests"][test]["all"]
            assert all(again[key] == one[key] for key in ("n", "em", "f1", "em_ci95")), name


def test_the_picture_shows_every_value_within_its_interval(home, compared) -> None:
    assert (home.table1 / "table1.png").read_bytes().startswith(b"\x89PNG")
    drawn = plots.panels(compared)
    rows, starts = len(compared["rows"]), len(compared["starts"])
    assert [len(panel.labels) for panel in drawn] == [rows, starts, rows, starts, starts]
    for panel in drawn:
        for value, (low, high) in zip(panel.values, panel.intervals, strict=True):
            assert low - 0.01 <= value <= high + 0.01


def test_the_curve_of_a_start_has_the_recall_that_its_training_measured(home, compared) -> None:
    assert set(compared["curves"]) == {"realm", "realm-x"}  # the starts that REALM trains
    for start, (curve,) in compared["curves"].items():  # one seed
        logged = read_lines(home.table1 / "models" / start / "metrics.jsonl")
        assert curve == [
            [line["index_step"], line["probe_recall_5"]] for line in logged if "index_step" in line
        ]
        assert [step for step, _ in curve] == [0, 1, 2, 3, 4]
        # The table measures the same facts by an index that it makes anew, so that rounding can move one of them.
        facts = compared["starts"][start]["facts"]["retrieved"]
        assert [curve[-1][1]] == pytest.approx(facts["recall_5_by_seed"], abs=100 / facts["n"] + 0.01)


def test_a_narrow_terminal_shows_the_columns_that_fit(compared) -> None:
    wide = layout.lines(compared)
    assert max(map(len, wide)) > 100 and layout.lines(compared, 400) == wide
    narrow = layout.lines(compared, 80)
    cut = narrow.index("The terminal is too narrow for all columns.")
    assert max(map(len, narrow[:cut])) <= 80 and narrow[cut + 2 :] == layout.made_lines(compared["made_by"])
    for row in compared["rows"].values():
        assert any(line.startswith(row["label"]) for line in narrow)


def test_the_report_has_all_settings_with_which_each_stage_was_trained(home, compared) -> None:
    stages = compared["made_by"]["stages"]
    for name, model in (("pretrain", "models/realm"), ("ict", "models/ict"), ("finetune", "rows/realm")):
        used = json.loads((home.table1 / model / "realm.json").read_text())["stages"][-1]
        differing = {key for key, value in stages[name].items() if used[key] != value}
        assert used["stage"] == name and differing <= {
            "precision"
        }  # a model names the precision that "auto" chose
    assert stages["baseline.t5"]["steps"] == 2 and stages["knn"]["passages"] == 0


@pytest.mark.usefixtures("undrawn")
def test_a_finished_table_is_only_read_again(home, compared) -> None:
    text = printed(*home.words("compare", home.table1))
    assert "$ realm" not in text
    assert json.loads((home.table1 / "table1.json").read_text()) == compared


def test_a_folder_keeps_to_the_data_that_it_was_made_with(home, compared, tmp_path, capsys) -> None:
    assert_holds(DataJson, json.loads((home.table1 / "data.json").read_text()))
    other = tmp_path / "spans.jsonl"
    other.write_text((home.folder / "spans.jsonl").read_text().replace("what", "which"))
    for setting, part in (
        (f"data.tests.spans={other}", "spans"),
        ("data.documents=3", "documents"),
        ("data.encoder=package:realm-mini", "encoder"),
        (f'data.train=["{other}"]', "train, dev"),
        ("data.train=[]", "train, dev"),
        ("seeds=[1]", "first_seed"),
    ):
        words = home.words("compare", home.table1, "--set", setting)
        assert cli.main(words) == 2
        assert f"table1 was made with other data ({part}): use another --dir" in capsys.readouterr().err
    changed = tmp_path / "changed.toml"
    changed.write_text(f'base = "{home.folder}/tables.toml"\n[pretrain]\nsteps = 5\n')
    message = "was made with other settings (pretrain.steps was 4 and is now 5)"
    words = home.words("compare", home.table1)
    for more in (
        [*words, "--set", "pretrain.steps=5"],
        [words[0], str(changed), *words[2:]],
    ):
        assert cli.main(more) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    reordered = tmp_path / "reordered.jsonl"
    lines = (home.folder / "spans.jsonl").read_text().splitlines(keepends=True)
    reordered.write_text("".join(lines[::-1]))
    assert cli.main(home.words("compare", home.table1, "--set", f"data.tests.spans={reordered}")) == 2
    assert "was made with other data (spans)" in capsys.readouterr().err
    named = [json.dumps({**json.loads(line), "id": f"n{place}"}) + "\n" for place, line in enumerate(lines)]
    reordered.write_text("".join(named))  # the same questions in the same order, with other ids
    assert cli.main(home.words("compare", home.table1, "--set", f"data.tests.spans={reordered}")) == 2
    assert "was made with other data (spans)" in capsys.readouterr().err
    made = json.loads((home.table1 / "data.json").read_text()) | {"questions": {}}
    (tmp_path / "data.json").write_text(json.dumps(made))
    assert cli.main(home.words("compare", tmp_path)) == 2
    assert "was made with other data (train, dev): use another --dir" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_settings_of_where_a_stage_runs_can_change_in_a_folder(home, compared, tmp_path) -> None:
    folder = tmp_path / "table1"
    shutil.copytree(home.table1, folder)
    words = home.words("compare", folder, "--set", "pretrain.device=cpu", "--set", "ict.checkpoint_seconds=3")
    assert "\n$ realm" not in printed(*words)
    assert (folder / "data.json").read_text() == (home.table1 / "data.json").read_text()


def test_ablations_differ_in_what_they_name_only(home, ablated) -> None:
    starts, models = ablated["starts"], home.table2 / "models"
    assert starts["realm-retriever"]["tests"] == starts["realm"]["tests"]  # the same retriever
    assert starts["realm-encoder"]["tests"] == starts["ict"]["tests"]
    assert starts["towers-encoder"]["tests"] == starts["encoder"]["tests"]
    encoder = {
        name: (models / name / "encoder" / "model.safetensors").read_bytes()
        for name in ("ict", "realm", "realm-retriever", "realm-encoder")
    }
    assert encoder["realm-retriever"] == encoder["ict"] != encoder["realm"] == encoder["realm-encoder"]
    last = {name: read_manifest(models / name) for name in starts if name not in ("bm25", "encoder")}
    for name, manifest in last.items():
        assert manifest["embedder"]["shared"] == (
            name not in ("towers-encoder", "towers-ict", "two-towers")
        ), name
    base = last["realm"]["stages"][-1]
    changed = {
        name: {key for key in base if manifest["stages"][-1][key] != base[key]} - {"init", "seconds"}
        for name, manifest in last.items()
        if manifest["stages"][-1]["stage"] == "pretrain"
    }
    assert changed == {
        "realm": set(),
        "random-masks": {"masking", "injected"},
        "bert-masks": {"masking", "injected"},
        "random-spans": {"masking", "injected"},
        "stale": {"refresh"},
        "no-null": {"null_passage"},
        "own-passage": {"exclude_own"},
        "per-token": {"marginal"},
        "two-towers": set(),
        "no-ict": {"ict"},
        "no-warmup": {"warmup"},
        "no-guard": {"health"},
        "no-injected": {"injected"},
        "bm25-candidates": {"bm25"},
    }
    assert last["stale"]["stages"][-1]["refresh"]["every"] == 3 * base["refresh"]["every"]
    assert len(last["no-ict"]["stages"]) == len(last["realm"]["stages"]) - 1


def test_training_time_is_that_of_all_models_that_a_row_started_from(home, compared, ablated) -> None:
    def seconds(folder: Path) -> list[float]:
        manifest = "realm.json" if (folder / "realm.json").exists() else "system.json"
        return [one.get("seconds", 0.0) for one in json.loads((folder / manifest).read_text())["stages"]]

    rows, models = home.table2 / "rows", home.table2 / "models"
    for name in ("realm", "stale", "realm-retriever"):
        assert ablated["rows"][name]["seconds"] == pytest.approx(sum(seconds(rows / name)), abs=0.06)
    tuned = sum(seconds(models / "realm")) + seconds(rows / "realm-encoder")[-1]
    assert ablated["rows"]["realm-encoder"]["seconds"] == pytest.approx(tuned, abs=0.06)
    rows, encoder = home.table1 / "rows", sum(seconds(home.table1 / "models" / "encoder"))
    for name in ("t5", "drqa", "graph", "path"):
        before = encoder if name in ("graph", "path") else 0.0
        assert compared["rows"][name]["seconds"] == pytest.approx(
            before + sum(seconds(rows / name)), abs=0.06
        )


@pytest.mark.usefixtures("undrawn")
def test_retrieval_is_measured_before_any_question_for_every_seed(home, ablated, tmp_path) -> None:
    folder = tmp_path / "table2"
    shutil.copytree(home.table2, folder)
    more = ["--rows", "realm", "orqa", "--set", "seeds=[0, 1]", "--set", "answer_seeds=0"]
    printed(*home.words("ablate", folder, *more))
    report = json.loads((folder / "table2.json").read_text())
    assert_holds(results.TableJson, report)
    assert report["rows"] == {}
    assert list(report["starts"]) == ["bm25", "encoder", "ict", "realm"]
    assert (folder / "models" / "realm-1").is_dir()
    reports = [
        json.loads((folder / "reports" / f"retrieval-{name}.spans.json").read_text())["recall"]["5"]
        for name in ("realm", "realm-1")
    ]
    one = report["starts"]["realm"]["tests"]["spans"]["all"]
    assert one["recall"]["5"] == pytest.approx(mean(reports), abs=0.006)
    assert report["starts"]["realm"]["facts"]["retrieved"]["n"] > 0
    assert (folder / "reports" / "probe-realm-1.json").is_file()
    assert "seeds 0, 1; number of seeds with training on questions: 0" in (folder / "table2.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_the_training_times_of_a_table_do_not_depend_on_its_path(home, compared, tmp_path) -> None:
    shutil.copytree(home.table1, tmp_path / "moved")
    assert cli.main(home.words("compare", tmp_path / "moved")) == 0
    report = json.loads((tmp_path / "moved" / "table1.json").read_text())
    for name, row in compared["rows"].items():
        assert report["rows"][name]["seconds"] == row["seconds"], name


@pytest.mark.usefixtures("undrawn")
def test_scores_are_checked_against_an_earlier_report(home, compared, capsys) -> None:
    words = home.words("compare", home.table1)
    assert cli.main([*words, "--check", str(home.table1 / "table1.json")]) == 0
    other = copy.deepcopy(compared)
    other["rows"]["realm"]["tests"]["spans"]["all"]["em"] += 50
    (home.folder / "other.json").write_text(json.dumps(other))
    assert cli.main([*words, "--check", str(home.folder / "other.json")]) == 2
    assert "realm, spans, exact match" in capsys.readouterr().err
    assert cli.main([*words, "--check", str(home.folder / "other.json"), "--tolerance", "50.1"]) == 0
    other = copy.deepcopy(compared)
    other["starts"]["ict"]["facts"]["retrieved"]["recall"]["5"] += 50
    (home.folder / "other.json").write_text(json.dumps(other))
    assert cli.main([*words, "--check", str(home.folder / "other.json")]) == 2
    assert "start ict, masked facts, first 5" in capsys.readouterr().err
    other = copy.deepcopy(compared)
    other["masked_facts"]["knn_lm"]["span_accuracy"] += 50
    (home.folder / "other.json").write_text(json.dumps(other))
    assert cli.main([*words, "--check", str(home.folder / "other.json")]) == 2
    assert "masked facts, knn_lm, spans" in capsys.readouterr().err
    other = copy.deepcopy(compared)
    for start in other["starts"].values():
        del start["facts"]  # as in some reports in docs/tables
    (home.folder / "other.json").write_text(json.dumps(other))
    assert cli.main([*words, "--check", str(home.folder / "other.json")]) == 0


def leaves(value: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """Paths of all numbers in a report."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, *path, key)
    elif isinstance(value, int | float):
        yield path


def test_a_check_compares_every_score(compared) -> None:
    """Each number of the report is changed by 4 points or 4 percent: two numbers of a report are never one score."""
    compared_kinds: dict[str, set[bool]] = defaultdict(set)
    other = copy.deepcopy(compared)
    for path in leaves({part: compared[part] for part in ("rows", "starts", "masked_facts")}):
        *before, last = path
        place = other
        for key in before:
            place = place[key]
        own = place[last]
        place[last] = 1.04 * own if last.startswith("nats") else own + 4
        found = deviations(other, compared, 3.0)
        assert len(found) <= 1 and len(found) == len(deviations(compared, other, 3.0))
        assert deviations(other, compared, 5.0) == []
        place[last] = own
        compared_kinds["recall" if before[-1] == "recall" else last].add(bool(found))
    always = {kind for kind, found in compared_kinds.items() if found == {True}}
    parts = {"nats_found", "nats_missed"}  # of so few facts, one part can be empty
    assert always - parts == {"em", "f1", "recall", "mrr", "span_accuracy", "nats"} and always & parts
    assert all(found == {False} for kind, found in compared_kinds.items() if kind not in always)


def test_answerable_questions_of_other_rows_are_not_compared(compared) -> None:
    other = copy.deepcopy(compared)
    for row in other["rows"].values():
        row["tests"]["spans"]["answerable"]["em"] += 50
    assert len(deviations(compared, other, 3.0)) == len(compared["rows"])
    del other["rows"]["orqa"]
    assert deviations(compared, other, 3.0) == []


def test_masked_facts_of_other_settings_are_not_compared(home, ablated, tmp_path, capsys) -> None:
    folder = tmp_path / "table2"
    shutil.copytree(home.table2, folder)
    file = folder / "reports" / "probe-ict.json"
    report = json.loads(file.read_text())
    report["outcomes"].pop()
    file.write_text(json.dumps(report))
    assert cli.main(home.words("ablate", folder, "--rows", "realm", "orqa")) == 2
    assert "probe-*.json are about different masked facts" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_file_of_a_table_is_one_line(home, compared, tmp_path, capsys) -> None:
    folder = tmp_path / "table1"
    shutil.copytree(home.table1, folder)
    short = json.dumps({"outcomes": [{"id": "1", "correct": True, "f1": 1.0, "rank": 1}]})
    orqa = json.loads((folder / "reports" / "orqa.spans.json").read_text())["outcomes"]
    reversed_ = json.dumps({"outcomes": orqa[::-1]})  # outcomes of two rows are compared place by place
    for name, contents in {
        "data.json": ("[]", "{}", "{", '{"questions": 1}'),
        "stages.json": ("[]", "{"),
        "reports/orqa.spans.json": ("{}", '{"outcomes": [1]}', short, reversed_),
        "reports/retrieval-bm25.spans.json": ("[]", short),
        "reports/probe-realm.json": ("{}", short),
        "datastore/report.json": (
            "{}",
            "[]",
            json.dumps(compared["masked_facts"] | {"knn_lm": {"nats": 1.0}}),
        ),
        "models/realm/metrics.jsonl": ('{"probe_recall_5": 1.0}', '{"step'),
    }.items():
        file = folder / name
        kept = file.read_text()
        for content in contents:
            file.write_text(content)
            capsys.readouterr()
            assert cli.main(home.words("compare", folder)) == 2, (name, content)
            error = capsys.readouterr().err
            assert str(file) in error and error.count("\n") == 1, error
        file.write_text(kept)


@pytest.mark.usefixtures("undrawn")
def test_a_row_whose_predictions_were_removed_answers_again(home, compared, tmp_path) -> None:
    folder = tmp_path / "table1"
    shutil.copytree(home.table1, folder)
    file = folder / "predictions" / "bm25-reader.spans.jsonl"
    lines = read_lines(file)
    file.unlink()
    text = printed(*home.words("compare", folder))
    assert text.count("\n$ realm") == 1
    assert [one["answer"] for one in read_lines(file)] == [one["answer"] for one in lines]


@pytest.mark.usefixtures("undrawn")
def test_a_check_of_some_rows_compares_only_these_rows(home, compared, tmp_path, capsys) -> None:
    folder = tmp_path / "table1"
    shutil.copytree(home.table1, folder)
    words = [*home.words("compare", folder, "--rows", "orqa"), "--check"]
    assert cli.main([*words, str(home.table1 / "table1.json")]) == 0
    other = copy.deepcopy(compared)
    other["rows"]["realm"]["tests"]["spans"]["all"]["em"] += 50
    (home.folder / "other.json").write_text(json.dumps(other))
    assert cli.main([*words, str(home.folder / "other.json")]) == 0
    other["rows"]["orqa"]["tests"]["spans"]["all"]["em"] += 50
    (home.folder / "other.json").write_text(json.dumps(other))
    assert cli.main([*words, str(home.folder / "other.json")]) == 2
    found = capsys.readouterr().err
    assert "orqa, spans, exact match" in found and "missing" not in found
    none_of_these = {"rows": {"realm": other["rows"]["realm"]}, "starts": {}}
    (home.folder / "other.json").write_text(json.dumps(other | none_of_these))
    assert cli.main([*words, str(home.folder / "other.json")]) == 2
    assert "no score of the rows and tests of this table" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_a_row_that_was_trained_again_is_measured_again(home, compared, tmp_path) -> None:
    folder = tmp_path / "table1"
    shutil.copytree(home.table1, folder)
    for model in (folder / "rows" / "orqa" / "realm.json", folder / "rows" / "drqa" / "system.json"):
        later = model.stat().st_mtime + 1000
        os.utime(model, (later, later))
    record = json.loads((folder / "stages.json").read_text())
    for stage in record["stages"].values():
        stage["version"] = "0.0.1, commit abc"
    (folder / "stages.json").write_text(json.dumps(record))
    text = printed(*home.words("compare", folder))
    run = {
        line.split("rows/")[1].split()[0] for line in text.splitlines() if line.startswith("$ realm evaluate")
    }
    assert run == {"orqa", "drqa"}
    by = json.loads((folder / "table1.json").read_text())["made_by"]
    now = layout.version_line(by["realm"], by["commit"])
    assert by["stages_by"] == ["0.0.1, commit abc", now] and "stages by realm 0.0.1, commit abc\n" in text


def test_a_diff_tests_the_difference_and_names_questions_that_only_one_row_answers(home, compared) -> None:
    rows = {
        name: row["tests"]
        for name, row in compared["rows"].items()
        if name != "realm" and name != "published"
    }
    other = max(rows, key=lambda name: sum(abs(rows[name][test]["less"]["points"]) for test in TESTS))
    label = compared["rows"][other]["label"]
    text = printed(*home.words("compare", home.table1, "--diff", "REALM", other.upper()))
    for test in TESTS:
        em, less = rows[other][test]["all"]["em"], rows[other][test]["less"]
        realm = compared["rows"]["realm"]["tests"][test]["all"]["em"]
        tested = f"{less['points']:+.1f} ({less['low']:+.1f} to {less['high']:+.1f}) p {p_value(less['p'])}"
        both = f"exact match {realm:.1f} % (REALM, X = Z) and {em:.1f} % ({label})"
        assert f"{test}: {both}, difference in points {tested}" in text
        assert f"{test}: REALM, X = Z is right and {label} is wrong for {less['only_a']} question" in text
        assert f"{test}: {label} is right and REALM, X = Z is wrong for {less['only_b']} question" in text
    assert any(rows[other][test]["less"]["points"] for test in TESTS)


@pytest.mark.slow
def test_commands_that_run_at_the_same_time_make_the_same_table(home, tmp_path) -> None:
    rows = ("--rows", "bm25-reader", "orqa", "realm", "hybrid")
    reports = []
    for folder, jobs in ((tmp_path / "one", "1"), (tmp_path / "three", "3")):
        printed(*home.words("compare", folder, *rows, "--jobs", jobs))
        report = json.loads((folder / "table1.json").read_text())
        assert_holds(results.TableJson, report)
        assert report["made_by"].pop("jobs") == int(jobs)
        for row in report["rows"].values():
            del row["seconds"]
            for test in row["tests"].values():
                del test["ms"]
        reports.append(report)
    assert reports[0] == reports[1]
    assert (tmp_path / "three" / "logs" / "evaluate-realm-spans.log").is_file()
