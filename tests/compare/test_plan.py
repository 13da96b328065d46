"""The parts of a table: rows, starts, documents and questions, and what is refused before the first stage."""

import itertools
import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realm import cli
from realm.cli import comparing
from realm.compare import commands, results
from realm.compare.checks import expected_report, scores_of
from realm.compare.official import content_digest
from realm.compare.plan import TablePlan
from realm.compare.questions import held_out_questions, is_dev, ordered_digest, read_all, split_questions
from realm.compare.rows import STARTS, TABLE_1, TABLE_2
from realm.compare.settings import DataConfig, PublishedConfig, TableConfig
from realm.errors import InputError
from realm.files import write_json
from realm.qa.predictions import Prediction
from realm.qa.question_files import Question
from realm.qa.scoring.metrics import normalise_answer


def plan(table=TABLE_1, data: DataConfig | None = None, **settings: Any) -> TablePlan:
    return TablePlan(TableConfig(**settings), data or DataConfig(), None, Path("t"), table)


def test_a_digest_changes_with_the_order_and_with_patterns_and_for_a_file_with_the_ids() -> None:
    asked = [Question(str(place), f"what is {place}?", ("x",)) for place in range(3)]
    named = [one._replace(id=f"q{one.id}") for one in asked]
    assert ordered_digest(named, of_a_file=False) == ordered_digest(asked, of_a_file=False)
    assert ordered_digest(named, of_a_file=True) != ordered_digest(asked, of_a_file=True)
    for other in (asked[::-1], [one._replace(regex=True) for one in asked]):
        assert ordered_digest(other, of_a_file=False) != ordered_digest(asked, of_a_file=False)
    assert content_digest(asked[::-1]) == content_digest(asked)


def test_rows_and_starts_are_made_after_what_they_need() -> None:
    for table in (TABLE_1, TABLE_2):
        every = plan(table, DataConfig(text=("x",), published=PublishedConfig("y")))
        assert list(every.rows()) == [name for name in table if name != "given"]
        made: set[str] = set()
        for name in every.starts():
            start = STARTS[name]
            assert {start.init, start.encoder_of} - {""} <= made
            made.add(name)
    assert list(plan(rows=("hybrid",)).rows()) == ["realm", "hybrid"]
    assert plan(rows=("orqa",)).starts() == ["encoder", "ict"]


def test_without_a_warm_start_no_model_is_made_by_the_inverse_cloze_task() -> None:
    for table in (TABLE_1, TABLE_2):
        cold = plan(table, DataConfig(text=("x",), published=PublishedConfig("y"), warm_start=False))
        assert {"given", "realm"} <= set(cold.rows())
        made: set[str] = set()
        for name in cold.starts():
            start = cold.start(name)
            assert start.made_by != "ict"
            assert {start.init, start.encoder_of} - {""} <= made
            made.add(name)


def test_the_row_without_health_checks_is_made_only_beside_a_realm_that_has_them() -> None:
    def made(*settings: str) -> TablePlan:
        changed = {"pretrain": settings}
        return TablePlan(TableConfig(), DataConfig(), "tables", Path("t"), TABLE_2, changed)

    assert "no-guard" not in made().rows()
    with pytest.raises(InputError, match="no-guard needs health checks"):
        replace(made(), config=TableConfig(rows=("no-guard",))).rows()
    guarded = made("health.margin=2")
    assert "no-guard" in guarded.rows()
    margins = {}
    for name in ("realm", "no-guard"):
        argv = commands._make_start(guarded, name, 0).argv
        given = dict(one.split("=") for flag, one in itertools.pairwise(argv) if flag == "--set")
        margins[name] = given["health.margin"]  # of settings with the same name, the last one counts
    assert margins == {"realm": "2", "no-guard": "-1.0"}


def test_changed_settings_of_a_stage_reach_all_its_commands_but_not_the_settings_of_a_row() -> None:
    changed = {
        "pretrain": ("steps=2400", "refresh.every=38"),
        "kb": ("passage_tokens=64",),
        "probe": ("queries=8000",),
        "knn": ("passages=9",),
        "questions": ("dev_share=0.2",),
        "baseline.t5": ("steps=7000",),
    }
    made = TablePlan(TableConfig(seeds=(0, 1)), DataConfig(), "tables", Path("t"), TABLE_2, changed)
    assert (made.pretrain.steps, made.pretrain.refresh.every) == (2400, 38)
    assert commands._build(made, made.kb, "package:realm-mini")[-4:-2] == ("--set", "passage_tokens=64")
    for name, every in (("realm", 38), ("random-masks", 38), ("stale", 30 * 38)):
        argv = commands._make_start(made, name, 1).argv
        given = dict(one.split("=") for flag, one in itertools.pairwise(argv) if flag == "--set")
        assert (given["steps"], given["seed"], given["refresh.every"]) == ("2400", "1", str(every))
    assert "steps=2400" not in commands._make_start(made, "ict", 0).argv
    assert "queries=8000" in commands._probe(made, Path("model"), Path("report")).argv
    assert made.stages()["kb"].passage_tokens == 64 and made.stages()["baseline.t5"].steps == 7000
    made = replace(made, table=TABLE_1, config=TableConfig(rows=("t5", "drqa", "realm"), answer_seeds=1))
    given = {
        stage.name: stage.argv
        for part in (commands.preparing, commands.training, commands.measuring)
        for chain in part(made)
        for stage in chain.stages
    }
    for setting, stage in (
        ("passages=9", "knn"),
        ("dev_share=0.2", "questions"),
        ("steps=7000", "baseline t5 t5"),
    ):
        assert [name for name, argv in given.items() if setting in argv] == [stage]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pretrain.stepz=3", "unknown key stepz"),
        ("ict.steps=many", "steps: input should be a valid integer"),
        ("kb.held_out=0", "kb.held_out is 0"),
        ("pretrain.steps=20", "the index would never be rebuilt"),
        (
            "serve.port=1",
            "--set serve.port=1: the table must be one of data, kb, mlm, ict, pretrain, finetune, probe",
        ),
        ("baseline.t5.stepz=3", "unknown key stepz"),
        (
            "baseline.atlas.steps=3",
            "--set baseline.atlas.steps=3: the table must be one of data, kb",
        ),
    ],
)
def test_a_wrong_setting_of_a_stage_is_refused_before_the_first_stage(
    setting, message, tmp_path, capsys
) -> None:
    code = cli.main(["ablate", "tables", "--dir", str(tmp_path / "t"), "--set", setting])
    assert code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("command", "setting", "problem"),
    [
        (
            "compare",
            "finetune.update_passages=true",
            "the row bm25-reader: --set [finetune]: update_passages",
        ),
        (
            "compare",
            "finetune.objective=mixture",
            'the row bm25-reader: --set [finetune]: objective "mixture"',
        ),
        (
            "compare",
            "finetune.retrieval_score=false",
            'the row realm-mixture: --set [finetune]: objective "mix',
        ),
        (
            "ablate",
            "pretrain.candidates=3",
            "the model bm25-candidates: --set [pretrain]: injected + bm25 is 3",
        ),
        ("ablate", "seeds=[0, -1]", "the model ict: --set [ict]: seed is -1"),
    ],
)
def test_settings_that_do_not_fit_those_of_a_row_are_refused_before_the_first_stage(
    command, setting, problem, tmp_path, capsys
) -> None:
    rows = ["--rows", "bm25-candidates"] if "candidates" in setting else []
    words = [command, "tables-tiny", *rows, "--dir", str(tmp_path / "t"), "--set", setting]
    assert cli.main([*words, "--set", "data.text=[]"]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert not (tmp_path / "t").exists()


def test_models_with_a_frozen_passage_encoder_share_the_states_of_passages() -> None:
    names = [name for name, start in STARTS.items() if start.made_by == "pretrain" and not start.other_text]
    for preset, shared in (("wikipedia-minilm", ["states=t/models/states"]), ("wikipedia", [])):
        made = TablePlan(TableConfig(), DataConfig(), preset, Path("t"), TABLE_2)
        for name, seed in itertools.product(names, (0, 1)):
            argv = commands._make_start(made, name, seed).argv
            assert argv[0] == "pretrain" and [one for one in argv if one.startswith("states=")] == shared


def test_rows_that_cannot_be_made_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="no row 'atlas'"):
        plan(rows=("atlas",)).rows()
    with pytest.raises(InputError, match="realm-x needs another corpus"):
        plan(rows=("realm-x",)).rows()
    with pytest.raises(InputError, match="published needs published weights"):
        plan(rows=("published",)).rows()
    with pytest.raises(InputError, match="given needs an encoder that can already retrieve"):
        plan(rows=("given",)).rows()
    with pytest.raises(InputError, match="orqa needs the inverse cloze task"):
        plan(rows=("orqa",), data=DataConfig(warm_start=False)).rows()
    needy = ("realm-x", "published", "given")
    assert list(plan().rows()) == [name for name in TABLE_1 if name not in needy]
    preset = tmp_path / "none.toml"
    preset.write_text("[kb]\nheld_out = 0.0\n")
    with pytest.raises(InputError, match="held_out is 0"):
        replace(plan(), preset=str(preset)).check()
    with pytest.raises(InputError, match="the row stale rebuilds the index every 30 "):
        plan(TABLE_2, rows=("stale",)).check()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--set", "data.tests.WQ=absent.json"], "no question file absent.json"),
        (["--set", 'data.corpus=["absent.jsonl"]'], "absent.jsonl: no such file or folder"),
        (["--set", 'data.text=["absent"]'], "absent: no such file or folder"),
        (
            ["--set", 'data.train=["absent.json"]', "--set", "data.tests.T=q.jsonl"],
            "no question file absent.json",
        ),
        (
            ["--set", 'data.train=["q.jsonl"]', "--set", "data.tests.T=q.jsonl"],
            "no question is left for train",
        ),
        (
            ["--set", 'data.train=["q.jsonl", "./q.jsonl"]', "--set", "data.tests.T=q.jsonl"],
            "q.jsonl is listed twice",
        ),
        (["--check", "absent.json"], "absent.json does not exist"),
        (["--check", "q.jsonl"], "q.jsonl is not a report"),
        (["--diff", "orqa", "atlas"], "no row 'atlas'"),
        (["--diff", "orqa", "realm"], "tables has no answers of the row orqa to made"),
        (["--diff", "orqa", "realm", "--json"], "leave out --json"),
        (["--diff", "orqa", "realm", "--check", "q.jsonl", "--rows", "orqa"], "leave out --check, --rows"),
        (["--check", "q.jsonl", "--tolerance", "nan"], "'nan' is not a number from 0 to 100"),
        (["--rows", "published"], "published needs published weights"),
        (["--set", "data.documents=-1"], "documents is -1"),
        (["--set", "seeds=[0, 0]", "--set", "answer_seeds=2"], "each seed must be there only once"),
    ],
)
def test_what_cannot_be_used_is_one_line_before_the_first_stage(
    words, problem, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"question": "who?", "answers": ["me"]}\n')
    words = ["--set", 'data.corpus=["q.jsonl"]', "--set", 'data.text=["q.jsonl"]', *words]
    assert cli.main(["compare", "tables-tiny", "--dir", "tables", *words]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.jsonl"]


def test_a_preset_without_documents_and_questions_needs_them_and_the_encoder(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus, encoder = 'data.corpus=["no.tsv"]', "data.encoder=bert-base-uncased"
    # Without data.encoder, the packaged encoder would be trained.
    for given in ([], [corpus], [encoder]):
        words = [word for one in given for word in ("--set", one)]
        assert cli.main(["compare", "paper", "--rows", "orqa", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith(
            "realm: paper has no table [data] with documents and questions: give data.corpus"
        )
        named = error.rstrip().partition("such a table: ")[2].split(", ")
        assert {"tables", "wikipedia", "wikipedia-nq"} <= set(named) and not {"paper", "demo"} & set(named)
    assert cli.main(["compare", "paper", "--rows", "orqa", "--set", corpus, "--set", encoder]) == 2
    assert "no.tsv" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_one_line_before_the_first_stage(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "find_spec", lambda name: None if name == "transformers" else name)
    assert cli.main(["compare", "tables-tiny"]) == 2
    assert (
        capsys.readouterr().err
        == "realm: realm compare needs transformers: pip install 'realm-lm[compare]'\n"
    )
    assert not list(tmp_path.iterdir())


OUTCOMES = '{"outcomes": [{"id": "%s", "correct": %s}, {"id": "%s", "correct": %s}]}'


@pytest.mark.parametrize(
    ("broken", "content", "problem"),
    [
        (
            "reports/orqa.made.json",
            OUTCOMES % ("0", "true", "0", "true"),
            "does not have the outcomes of the 2",
        ),
        (
            "reports/orqa.made.json",
            OUTCOMES % ("1", "true", "0", "false"),
            "does not have the outcomes of the 2",
        ),
        ("reports/orqa.made.json", OUTCOMES % ("0", "1", "1", "0"), "no outcomes with id and correct"),
        ("reports/orqa.made.json", "[]", "no outcomes with id and correct"),
        ("reports/orqa.made.json", "{}", "no outcomes with id and correct"),
        ("predictions/orqa.made.jsonl", '{"id": "0", "answer": "x"}', "no prediction for question '1'"),
        (
            "questions/test.jsonl",
            '{"id": "0", "question": "Who?", "answers": ["me"]}',
            "does not have the outcomes of the 1 question of the test",
        ),
    ],
)
def test_answers_to_other_questions_are_one_line_in_a_diff(
    broken, content, problem, tmp_path, capsys
) -> None:
    ids = ("0", "1")
    files = {"questions/test.jsonl": [{"id": one, "question": "Who?", "answers": ["me"]} for one in ids]}
    for row in ("orqa", "realm"):
        files[f"reports/{row}.made.json"] = [
            {"outcomes": [{"id": one, "correct": row == "orqa"} for one in ids]}
        ]
        files[f"predictions/{row}.made.jsonl"] = [{"id": one, "answer": row} for one in ids]
    for name, lines in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    words = ["compare", "tables-tiny", "--dir", str(tmp_path), "--diff", "orqa", "realm"]
    assert cli.main(words) == 0
    assert "Who?  'orqa', not 'realm'" in capsys.readouterr().out
    (tmp_path / broken).write_text(content)
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


@pytest.mark.parametrize("em", ["NaN", '"many"', "null"])
def test_a_report_without_numbers_is_not_compared_with(em: str, tmp_path: Path) -> None:
    file = tmp_path / "table1.json"
    file.write_text('{"rows": {}, "starts": {}}')
    with pytest.raises(InputError, match="is not a report of a table"):
        expected_report(str(file))
    made: dict[str, Any] = {part: {"em": 5.0, "f1": 6.0} for part in ("answerable", "seen", "unseen")}
    made |= {"all": {"em": "EM", "f1": 43.0}, "retrieved": {}}
    write_json(file, {"starts": {}, "rows": {"orqa": {"tests": {"made": made}}}})
    file.write_text(file.read_text().replace('"EM"', em))
    with pytest.raises(InputError, match="is not a report of a table"):
        expected_report(str(file))
    file.write_text(file.read_text().replace(em, "41.5"))
    scores = scores_of(expected_report(str(file)), ("all", "seen"))
    assert scores == {
        "orqa, made, exact match": 41.5,
        "orqa, made, F1": 43.0,
        "orqa, made, seen, exact match": 5.0,
        "orqa, made, seen, F1": 6.0,
    }


def test_training_questions_that_a_test_asks_are_left_out() -> None:
    def question(name: str, text: str) -> tuple[str, Question]:
        return name, Question("1", text, ("x",))

    train = [
        question("a", "Who painted the Mona Lisa?"),
        *(question("b", f"What is {n}?") for n in range(20)),
    ]
    tests = [Question("t", "who painted mona lisa", ("y",))]
    kept, dev, dropped = split_questions(train, [], tests)
    assert (len(kept) + len(dev), dropped) == (20, 1)
    assert dev == [one for one in [*kept, *dev] if is_dev(one.question)]
    assert {one.id for one in [*kept, *dev]} == {"b:1"}
    kept, dev, dropped = split_questions(train, [question("d", "What is 3?")], tests)
    assert (len(kept), [one.id for one in dev], dropped) == (20, ["d:1"], 1)


def test_questions_of_files_with_the_same_name_have_different_ids(tmp_path) -> None:
    files = [
        tmp_path / name for name in ("a/train.jsonl", "b/train.jsonl", "train-2.jsonl", "c/train:1.json")
    ]
    for place, file in enumerate(files):
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            "".join(f'{{"question": "what is {place} {n}?", "answer": "x"}}\n' for n in range(90))
        )
    paths = [str(file) for file in files]
    split = split_questions(read_all(paths), [], [])
    for questions in ([*split.train, *split.dev], held_out_questions(paths)):
        ids = [one.id for one in questions]
        assert len(ids) == len(set(ids))
        assert {one.rpartition(":")[0] for one in ids} == {"train", "train-2", "train-2-2", "train-1"}
    assert len(split.train) + len(split.dev) == 4 * 90


RESPLIT = {
    "what two countries invaded poland in the beginning of ww2?": True,
    "who is the prime minister of ethiopia?": True,
    "what character did natalie portman play in star wars?": False,
    "what country is the grand bahama island in?": False,
}
"""Training question of WebQuestions -> whether it is in WebQuestions.resplit.dev."""


@pytest.mark.parametrize(("name", "train", "dev"), [("webquestions", 3417, 361), ("curatedtrec", 1353, 133)])
def test_dev_questions_are_as_many_as_in_orqas_resplit(name: str, train: int, dev: int) -> None:
    file = Path(__file__).parent / "questions" / f"{name}.txt.xz"
    questions = lzma.decompress(file.read_bytes()).decode().splitlines()
    every = [("train", Question(str(place), text, ("x",))) for place, text in enumerate(questions)]
    split = split_questions(every, [], [])
    assert (len(split.train), len(split.dev), split.dropped) == (train, dev, 0)


def test_dev_questions_are_those_of_orqas_resplit() -> None:
    assert [is_dev(question) for question in RESPLIT] == list(RESPLIT.values())


def test_shares_are_means_over_the_chosen_questions_and_seeds() -> None:
    correct_SN = np.array([[1, 0, 1, 0], [1, 1, 0, 0]], dtype=bool)
    f1_SN = correct_SN.astype(float)
    chosen_N = np.array([True, True, False, True])
    scored = results._answered(correct_SN, f1_SN, chosen_N)
    assert scored["n"] == 3
    assert scored["em"] == pytest.approx(100 * 3 / 6)
    assert scored["em_ci95"][0] < 50 < scored["em_ci95"][1]
    assert results._answered(correct_SN, f1_SN, np.zeros(4, dtype=bool))["n"] == 0


@pytest.mark.parametrize(
    ("answerable", "wanted"),
    [
        ([1, 1, 1, 0, 0], (2, 0, 66.667, 0.5)),  # p of McNemar's test: 2 (1/2)^2
        ([0, 0, 1, 1, 0], (0, 1, -50.0, 1.0)),
        ([0, 0, 0, 0, 0], None),
    ],
)
def test_one_difference_from_realm_is_over_the_answerable_questions_only(answerable, wanted) -> None:
    right = {"realm": np.array([[1, 1, 0, 0, 1]]) == 1, "t5": np.array([[0, 0, 0, 1, 0]]) == 1}
    f1 = {name: found.astype(float) for name, found in right.items()}
    test = results._Test([], right, f1, {}, {}, np.array(answerable) == 1)
    tested = {
        name: results._tested(name, "realm", test, test.answerable_N, [Prediction("1", "?", "")])
        for name in right
    }
    found = {name: [one[key] for key in ("less", "less_answerable")] for name, one in tested.items()}
    assert found["realm"] == [None, None]
    (every, some) = (one and (one["only_a"], one["only_b"], one["points"], one["p"]) for one in found["t5"])
    assert every == (3, 1, 40.0, 0.625)  # 2 (1 + 4) (1/2)^4
    assert some == wanted


def test_random_masks_are_compared_with_realm_without_injected_positives(tmp_path) -> None:
    own = replace(plan(TABLE_2, rows=("realm", "random-spans")), folder=tmp_path)
    assert list(own.rows()) == ["realm", "no-injected", "random-spans"]
    assert {"masking=span", "injected=0"} <= set(own.start_settings("random-spans", 0))
    (tmp_path / "reports").mkdir()
    hits = {"bm25": 0, "encoder": 0, "ict": 1, "realm": 4, "no-injected": 3, "random-spans": 2}
    for name, found in hits.items():
        outcomes = [{"passage": f"p{place}", "rank": int(place < found)} for place in range(4)]
        write_json(tmp_path / "reports" / f"probe-{name}.json", {"outcomes": outcomes})
    less = {name: one["less"] and one["less"]["points"] for name, one in results.facts_of(own).items()}
    assert less == {
        "bm25": 100,
        "encoder": 100,
        "ict": 75,
        "realm": None,
        "no-injected": 25,
        "random-spans": 25,
    }


def test_a_pattern_is_seen_if_a_training_answer_as_it_was_written_matches() -> None:
    trained = {"July 4, 1976", "The Beatles", "Jean-Paul", r"19\d\d"}
    known = set(map(normalise_answer, trained))
    seen = [r"July\s+4,?\s+1976", "The Beatles", "Jean-Paul", r"19\d\d"]
    for pattern in [*seen, r"July\s+5", "Beatles? songs"]:
        question = Question("q", "who?", (pattern,), regex=True)
        assert results._is_seen(question, trained, known) == (pattern in seen), pattern
    assert results._is_seen(Question("q", "who?", ("beatles",)), trained, known)


def test_masked_facts_are_compared_pair_by_pair_as_means_over_the_seeds(tmp_path) -> None:
    own = replace(plan(TABLE_2, rows=("realm", "orqa"), seeds=(0, 1)), folder=tmp_path)
    rng = np.random.default_rng(0)
    rank = {
        name: rng.integers(0, 120, 60) % 101
        for name in ("bm25", "encoder", "ict", "ict-1", "realm", "realm-1")
    }
    (tmp_path / "reports").mkdir()
    for name, rank_N in rank.items():
        outcomes = [{"passage": f"p{place}", "rank": int(one)} for place, one in enumerate(rank_N)]
        write_json(tmp_path / "reports" / f"probe-{name}.json", {"outcomes": outcomes})
    facts = results.facts_of(own)
    assert list(facts) == ["bm25", "encoder", "ict", "realm"]
    share = {
        name: {k: 100 * sum(0 < one <= k for one in rank_N) / 60 for k in (1, 5, 20, 100)}
        for name, rank_N in rank.items()
    }
    realm = {k: (share["realm"][k] + share["realm-1"][k]) / 2 for k in (1, 5, 20, 100)}
    for name, seeds in {
        "bm25": ["bm25"],
        "encoder": ["encoder"],
        "ict": ["ict", "ict-1"],
        "realm": ["realm", "realm-1"],
    }.items():
        for k in (1, 5, 20, 100):
            mean = sum(share[seed][k] for seed in seeds) / len(seeds)
            assert facts[name]["retrieved"]["recall"][str(k)] == pytest.approx(mean, abs=0.006)
        if name != "realm":
            points = realm[5] - sum(share[seed][5] for seed in seeds) / len(seeds)
            assert facts[name]["less"]["points"] == pytest.approx(points, abs=0.006)
    assert facts["realm"]["less"] is None
