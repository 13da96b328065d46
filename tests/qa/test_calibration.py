"""Probabilities of answers: the curve, the threshold, and the report."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import optimize

from realm import cli
from realm.errors import InputError
from realm.model.calibration import Calibration, Features
from realm.model.folder import load_model, save_model
from realm.model.manifest import set_calibration
from realm.qa.calibrating import CalibrationJson, calibrate
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.question_files import Question
from realm.qa.question_sets import ask
from realm.qa.scoring import calibration
from realm.qa.scoring.calibration import Confidence, Evidence, calibration_error, fit
from realm.qa.scoring.evaluation import Report
from realm.train.finetune import start_reader
from tests.test_schemas import assert_holds

CONFIG = AnswerConfig(device="cpu")
TOO_SURE = Calibration(slope=0.5, offset=-0.8)
WARY = Calibration(slope=0.5, inner=0.3, span=0.2, offset=-3.0)


def reported(answerer, questions, *flags, **named) -> Report:
    return ask(answerer, questions, *flags, **named).report(questions, answerer.threshold)


def drawn(count: int, curve: Calibration = TOO_SURE, seed: int = 0) -> tuple[Evidence, np.ndarray, Evidence]:
    """Random evidence, outcomes that are right with the probabilities of `curve`, and evidence without positives."""
    draw = np.random.default_rng(seed)

    def evidence(inner: float, span: float) -> Evidence:
        features = [Features(draw.normal(inner, 1.0), 0.0, draw.normal(span, 2.0)) for _ in range(count)]
        return Evidence(draw.beta(2, 1, count), features)

    said, without = evidence(6.0, 3.0), evidence(4.0, 1.0)
    return said, draw.random(count) < said.probability_N(curve), without


def test_fitted_weights_are_those_of_another_logistic_regression() -> None:
    """Both steps of the fit, with scipy's minimiser."""
    said, right_N, without = drawn(500, WARY)
    fitted = fit(said, right_N, without)

    def maximum_likelihood(value_NF: np.ndarray, right_N: np.ndarray) -> np.ndarray:
        rights, wrongs = right_N.sum(), (~right_N).sum()
        target_N = np.where(right_N, (rights + 1) / (rights + 2), 1 / (wrongs + 2))

        def negative_log_likelihood(weight_F1: np.ndarray) -> float:
            odds_N = value_NF @ weight_F1[:-1] + weight_F1[-1]
            return float((np.logaddexp(0, odds_N) - target_N * odds_N).sum())

        return optimize.minimize(negative_log_likelihood, np.zeros(value_NF.shape[1] + 1), tol=1e-9).x

    def values(evidence: Evidence) -> np.ndarray:
        logit_N = np.log(evidence.share_N / (1 - evidence.share_N))
        return np.column_stack([logit_N, *([one[place] for one in evidence.features_N] for place in (0, 2))])

    both_NF = np.concatenate([values(said), values(without)])
    weight_F = maximum_likelihood(both_NF, np.concatenate([right_N, np.zeros(500, dtype=bool)]))[:-1]
    scale, offset = maximum_likelihood((values(said) @ weight_F)[:, None], right_N)
    assert (fitted.slope, fitted.inner, fitted.span) == pytest.approx(tuple(scale * weight_F), abs=1e-4)
    assert (fitted.ranking, fitted.offset) == (0.0, pytest.approx(offset, abs=1e-3))


def test_calibrated_probabilities_equal_the_share_of_right_answers() -> None:
    fitted = fit(*drawn(4000))
    said, right_N, _ = drawn(4000, seed=1)
    probability_N = said.probability_N(fitted)
    assert calibration_error(said.share_N, right_N) > 0.2 > 0.04 > calibration_error(probability_N, right_N)
    lost = (probability_N[right_N] < fitted.threshold).mean()
    assert lost == pytest.approx(calibration.RIGHT_LOST, abs=0.03)


def test_features_detect_questions_without_their_positives() -> None:
    """At an equal loss of right answers, features decline more of these questions than shares alone, uninformative here."""
    said, right_N, without = drawn(2000, WARY)
    fitted = fit(said, right_N, without)
    nothing = [Features()] * 2000
    of_shares = fit(said._replace(features_N=nothing), right_N, without._replace(features_N=nothing))
    declined = (without.probability_N(fitted) < fitted.threshold).mean()
    by_shares = (without._replace(features_N=nothing).probability_N(of_shares) < of_shares.threshold).mean()
    assert declined > by_shares + 0.2


def test_without_a_hybrid_score_the_probability_is_that_of_a_typical_hybrid_score() -> None:
    said, right_N, without = drawn(500, WARY)
    ranking_N = np.random.default_rng(3).normal(14.0, 2.0, 500)

    def ranked(evidence: Evidence, by: np.ndarray) -> Evidence:
        pairs = zip(evidence.features_N, by, strict=True)
        return evidence._replace(features_N=[one._replace(ranking=float(score)) for one, score in pairs])

    hybrid = ranked(said, ranking_N + 2 * right_N)
    fitted = fit(hybrid, right_N, ranked(without, ranking_N - 2))
    assert fitted.ranking > 0.1
    np.testing.assert_allclose(
        said.probability_N(fitted),
        ranked(said, np.full(500, hybrid.odds_NF()[:, 2].mean())).probability_N(fitted),
    )
    assert said.probability_N(fitted).mean() == pytest.approx(right_N.mean(), abs=0.05)


def test_calibration_error_is_that_of_a_plain_loop_over_ten_bins() -> None:
    said, right_N, _ = drawn(300, seed=2)
    share_N = said.share_N
    share_N[0] = 1.0
    total = 0.0
    for low in range(10):
        inside = [i for i, p in enumerate(share_N) if low / 10 <= p < low / 10 + 0.1 or (low == 9 and p == 1)]
        if inside:
            said, right = np.mean([share_N[i] for i in inside]), np.mean([right_N[i] for i in inside])
            total += len(inside) / 300 * abs(said - right)
    assert calibration_error(share_N, right_N) == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize("share", [0.0, 1e-300, 1e-9, 0.5, 1 - 1e-12, 1.0])
def test_probabilities_stay_between_0_and_1_and_in_order(share: float) -> None:
    for curve in (Calibration(), TOO_SURE, Calibration(slope=300, offset=5)):
        assert 0 <= curve.probability(share) <= 1
        assert curve.probability(share * 0.9) <= curve.probability(share)
    assert Calibration().probability(share) == share


@given(st.floats(0, 1), st.floats(0, 1), st.floats(-5, 5), st.floats(0.1, 3))
@example(1.0, 0.0, 0.0, 1.0)
def test_probabilities_of_all_answers_are_at_most_1_together(
    best: float, others: float, inner: float, slope: float
) -> None:
    curve = Calibration(slope=slope, inner=1.0, offset=-1.0)
    others *= 1 - best  # shares add up to at most 1
    scale = curve.scale(best, Features(inner))
    assert 0 <= curve.probability(best, Features(inner)) + others * scale <= 1 + 1e-6
    assert Calibration().scale(best, Features(inner)) == pytest.approx(1 if best > 0 else 0)


def test_too_few_answers_of_one_outcome_are_refused() -> None:
    said, _, without = drawn(200)
    with pytest.raises(InputError, match="200 answers are right and 0 are wrong"):
        fit(said, np.ones(200, dtype=bool), without)
    with pytest.raises(InputError, match="have the same probability"):
        fit(said._replace(share_N=np.full(200, 0.4)), np.arange(200) % 2 == 0, without)
    with pytest.raises(InputError, match="not right more often"):
        fit(said, said.share_N < np.median(said.share_N), without)


def test_guesses_are_counted_among_right_wrong_and_unanswerable() -> None:
    said = Confidence(np.array([0.9, 0.2, 0.6, 0.1]), 0.5, np.array([0.6, 0.1, 0.2, 0.0]))
    report = said.as_dict(np.array([True, True, False, False]))
    assert (report["right_declined"], report["wrong_declined"]) == (50.0, 50.0)
    assert report["unanswerable"]["n"] == 4 and report["unanswerable"]["declined"] == 75.0
    none_declined = Confidence(np.array([0.9, 0.0]), 0.0).as_dict(np.array([True, False]))
    assert (none_declined["right_declined"], none_declined["wrong_declined"]) == (0.0, 100.0)
    assert none_declined["unanswerable"] is None


# -- of a model


@pytest.fixture
def calibrated_folder(tiny_kb, qa_folder, tmp_path):
    """A copy of the model with the span reader, and questions of which half count as answered right."""
    folder = tmp_path / "model"
    save_model(load_model(qa_folder), folder)
    answerer = Answerer.load(str(tiny_kb.folder), str(folder), CONFIG)
    asked = [
        f"{start} {town}?"
        for start in ("on which river lies", "where is", "who was born in", "when was the tower built in")
        for town in ("Arden", "Corvo", "Ivrea", "Oakham", "Velka", "Bergen")
    ]
    said = [answerer.answer(question).answers[0] for question in asked]
    middle = float(np.median([one.probability for one in said]))
    questions = [
        Question(str(n), question, (answer.text if (answer.probability > middle) == (n != 0) else "Nile",))
        for n, (question, answer) in enumerate(zip(asked, said, strict=True))
    ]
    return folder, questions


def test_calibrate_changes_the_probabilities_of_answers_and_nothing_else(
    tiny_kb, calibrated_folder, monkeypatch
) -> None:
    folder, questions = calibrated_folder
    monkeypatch.setattr(calibration, "LEAST_QUESTIONS", 1)
    before = Answerer.load(str(tiny_kb.folder), str(folder), CONFIG).answer(questions[1].question)
    found = calibrate(str(tiny_kb.folder), str(folder), questions, "dense", CONFIG)
    assert load_model(folder).calibration == found.calibration != Calibration()
    assert_holds(CalibrationJson, found.to_json())
    answerer = Answerer.load(str(tiny_kb.folder), str(folder), CONFIG)
    after = answerer.answer(questions[1].question)
    assert [one.text for one in after.answers] == [one.text for one in before.answers]
    assert [one.score for one in after.answers] == [one.score for one in before.answers]
    (best, *others), (was_best, *were) = after.answers, before.answers
    assert best.probability == pytest.approx(
        found.calibration.probability(was_best.probability, before.features)
    )
    for one, was in zip(others, were, strict=True):
        assert one.probability / was.probability == pytest.approx(others[0].probability / were[0].probability)
    assert sum(one.probability for one in after.answers) < 1
    measured = reported(answerer, questions, unanswerable=True)
    np.testing.assert_allclose(
        measured.confidence.probability_N, found.after.confidence.probability_N, rtol=1e-5
    )
    np.testing.assert_allclose(measured.confidence.without_N, found.after.confidence.without_N, rtol=1e-5)
    assert measured.confidence.threshold == found.calibration.threshold


def test_an_answer_below_the_threshold_is_a_guess(tiny_kb, qa_folder) -> None:
    kb, question = str(tiny_kb.folder), "on which river lies Arden?"
    sure = Answerer.load(kb, str(qa_folder), CONFIG).answer(question)
    assert sure.found and sure.to_json()["found"]
    guess = Answerer.load(kb, str(qa_folder), AnswerConfig(device="cpu", threshold=1.0)).answer(question)
    assert not guess.found and guess.answers == sure.answers
    first, *rest = guess.lines()
    assert first == "no answer found; the best guess:" and rest[:3] == guess.answers[0].lines()
    assert rest[3] == "the best passages:" and len(rest) == 10
    for place, text, passage in zip(rest[4::2], rest[5::2], guess.passages, strict=False):
        assert place == f"    {passage.title}, rank {passage.rank}"
        assert passage.text.startswith(text.strip().removesuffix(" ..."))


@pytest.mark.parametrize("method", ["dense", "hybrid"])
def test_questions_without_their_passages_are_read_from_the_best_of_the_others(
    tiny_kb, qa_folder, method
) -> None:
    answerer = Answerer.load(str(tiny_kb.folder), str(qa_folder), CONFIG)
    question = Question("1", "on which river lies Arden?", ("Ouse",))
    measured = reported(answerer, [question], method, unanswerable=True).confidence
    scores, ranked = answerer.retrieve([question.question], len(tiny_kb), method)
    added = dict(zip(ranked[0].tolist(), scores[0] * (method == "hybrid"), strict=True))
    others = [n for n in ranked[0].tolist() if "Ouse" not in tiny_kb.passages([n])[0].text][:5]
    assert others != ranked[0, :5].tolist()
    (said,) = answerer.answer_from(
        [question.question], np.array([others]), np.array([[added[n] for n in others]])
    )
    assert measured.without_N == pytest.approx(np.array([said.answers[0].probability]))
    assert {passage.id for passage in said.passages} == {p.id for p in tiny_kb.passages(others)}


def test_gold_passages_are_those_of_the_document_that_a_question_names(tiny_kb, qa_folder) -> None:
    answerer = Answerer.load(str(tiny_kb.folder), str(qa_folder), CONFIG)
    documents = [passage.document_id for passage in tiny_kb]
    names = [documents[0], max(documents, key=documents.count)]
    questions = [Question(name, "who built the tower?", ("nobody",), document_id=name) for name in names]
    report = reported(answerer, questions, gold=True)
    for question, probability in zip(questions, report.confidence.probability_N, strict=True):
        own = [n for n, name in enumerate(documents) if name == question.document_id]
        (said,) = answerer.answer_from([question.question], np.array([own]))
        assert probability == pytest.approx(said.answers[0].probability, rel=1e-4)
    for name, problem in (("", "names no document"), ("d99", "names document 'd99'")):
        with pytest.raises(InputError, match=problem):
            reported(answerer, [questions[0]._replace(document_id=name)], gold=True)


def test_no_answer_takes_its_share_where_the_reader_may_find_none(tiny_kb, qa_folder, tmp_path) -> None:
    """A span's share is exp(score) / (1 + the sum over all spans)."""
    model = load_model(qa_folder)
    always = model.span_reader
    start_reader(model, seed=0, finds_none=True).load_state_dict(always.state_dict())
    save_model(model, tmp_path / "model")
    kb, question = str(tiny_kb.folder), "on which river lies Arden?"
    plain = Answerer.load(kb, str(qa_folder), CONFIG).answer(question).answers[0]
    with_none = Answerer.load(kb, str(tmp_path / "model"), CONFIG).answer(question).answers[0]
    together = math.exp(plain.score) / plain.probability
    assert with_none.text == plain.text
    assert with_none.score == pytest.approx(plain.score, abs=1e-5)
    assert with_none.probability == pytest.approx(math.exp(plain.score) / (1 + together), rel=1e-3)


def test_calibration_survives_saving(qa_folder, tmp_path) -> None:
    save_model(load_model(qa_folder), tmp_path / "model")
    set_calibration(tmp_path / "model", TOO_SURE)
    model = load_model(tmp_path / "model")
    save_model(model, tmp_path / "again")
    assert load_model(tmp_path / "again").calibration == model.calibration == TOO_SURE


def test_the_method_of_the_calibration_is_the_default_method(
    tiny_kb, calibrated_folder, tmp_path, monkeypatch, capsys
) -> None:
    folder, questions = calibrated_folder
    kb, asked = str(tiny_kb.folder), [one.question for one in questions]
    monkeypatch.setattr(calibration, "LEAST_QUESTIONS", 1)
    before = Answerer.load(kb, str(folder), CONFIG)
    expected = {method: before.retrieve(asked, 5, method)[1].tolist() for method in ("dense", "hybrid")}
    assert before.retrieve(asked, 5)[1].tolist() == expected["dense"] != expected["hybrid"]
    for method in ("hybrid", None):  # a second calibration without a method keeps the first one's
        found = calibrate(kb, str(folder), questions, method, CONFIG)
        assert found.calibration.method == found.to_json()["calibration"]["method"] == "hybrid"
    after = Answerer.load(kb, str(folder), CONFIG)
    assert after.retrieve(asked, 5)[1].tolist() == expected["hybrid"]
    for said, ranked in zip(after.answer_batch(asked), expected["hybrid"], strict=True):
        assert [one.id for one in said.passages] == [one.id for one in tiny_kb.passages(ranked)]
    assert [one.id for one in after.passages(asked[0], 5)] == [tiny_kb.ids[n] for n in expected["hybrid"][0]]
    assert reported(after, questions).as_dict() == reported(after, questions, "hybrid").as_dict()
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": asked[0]}))
    words = ["retrieve", "--kb", kb, "--model", str(folder), "--questions", str(tmp_path / "q.jsonl")]
    assert (
        cli.main([*words, "--out", str(tmp_path / "hits.jsonl"), "--top-k", "5", "--set", "device=cpu"]) == 0
    )
    hits = json.loads((tmp_path / "hits.jsonl").read_text())["passages"]
    assert [one["id"] for one in hits] == [tiny_kb.ids[n] for n in expected["hybrid"][0]]
    manifest = json.loads((folder / "realm.json").read_text())
    manifest["calibration"]["method"] = "guess"
    del manifest["checksums"]
    (folder / "realm.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="method"):
        load_model(folder)


def test_calibration_of_an_unsuitable_model_is_refused_in_one_line(
    tiny_kb, tiny_model_folder, qa_folder, tmp_path, capsys
) -> None:
    asked = tmp_path / "q.jsonl"
    asked.write_text('{"question": "on which river lies Arden?", "answers": ["Ouse"]}')
    rest = ["--kb", str(tiny_kb.folder), "--questions", str(asked), "--set", "device=cpu"]
    gold = ["evaluate", *rest, "--gold"]
    assert cli.main([*gold, "--model", str(tiny_model_folder)]) == 2
    assert "no span reader" in capsys.readouterr().err
    assert cli.main([*gold, "--method", "bm25"]) == 2
    assert "give --model" in capsys.readouterr().err
    for model, problem in (
        (tiny_model_folder, "no span reader"),
        (qa_folder, "calibration needs at least 50 of each"),
        ("hf:some/model", "not a local folder"),
    ):
        assert cli.main(["calibrate", "--model", str(model), *rest]) == 2
        assert problem in capsys.readouterr().err.splitlines()[-1]
