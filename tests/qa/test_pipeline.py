"""Answering: the JSON, answers as slices of passages, and scores against plain loops."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import realm
from realm.errors import InputError
from realm.index.versions import complete_index
from realm.model.folder import save_model
from realm.model.span_reader import body_mask
from realm.qa import pipeline, question_sets
from realm.qa.answers import LIKELY, Answer, AnsweringIndex, Answers, RankedPassage, Span, _around
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.qa.question_files import Question
from realm.qa.question_sets import ask, evaluate_retrieval, question_ranks, retrieve_to_file
from realm.qa.scoring.evaluation import Report
from realm.qa.scoring.metrics import first_hit, normalise_answer, stands_for
from realm.search.bm25 import Bm25Index
from realm.search.retriever import Retriever
from realm.text.corpus import Document
from realm.tokens.layouts import joint_inputs, passage_inputs
from realm.tokens.tokenizer import Tokenizer
from tests.conftest import GOODS, RIVERS, RULERS, TOWNS
from tests.qa.conftest import PASSAGE_KEYS
from tests.store.tiny import TinyTagger

CONFIG = AnswerConfig(device="cpu")
QUESTIONS = [
    Question(f"q{n}", f"on which river lies {town}?", (RIVERS[n % 4],)) for n, town in enumerate(TOWNS)
]


@pytest.fixture(scope="module")
def answerer(tiny_kb, qa_folder) -> Answerer:
    return Answerer.load(str(tiny_kb.folder), str(qa_folder), CONFIG)


def random_questions(count: int) -> list[str]:
    draw = random.Random(0)
    words = [*TOWNS, *RIVERS, *RULERS, *GOODS, "who", "built", "the", "tower", "in", "?", "é", "1284"]
    return [" ".join(draw.choices(words, k=draw.randint(1, 12))) for _ in range(count)]


# -- the contract


def test_evidence_begins_and_ends_between_words() -> None:
    words = [f"word{n:03}" for n in range(100)]
    text = " ".join(words)
    for place in range(0, len(text), 7):
        part = _around(text, place).removeprefix("... ").removesuffix(" ...")
        assert set(part.split()) <= set(words) and len(part) > 60
    assert _around("x" * 999, 500) == "... " + "x" * 320 + " ..."


def test_evidence_joins_wrapped_lines_and_separates_paragraphs_rows_and_items() -> None:
    text = "The pump is\n  maintained in\nHalle.\n\nhe said\nCity: Halle.\n- oil\n- water"
    passage = RankedPassage("", "", text, 1, 1.0, "", {})
    place = text.index("maintained")
    shown = Answer("maintained", 0.0, 0.5, place, place + 10, passage).evidence()
    assert shown == "The pump is [[maintained]] in / Halle. / he said / City: Halle. / - oil / - water"


def test_json_is_the_contract(answerer) -> None:
    said = json.loads(json.dumps(answerer.answer("who built a tower in Arden?").to_json()))
    assert list(said) == ["question", "found", "answers", "index", "ms"]
    assert said["question"] == "who built a tower in Arden?"
    assert said["index"] == {"version": 1, "step": 3}
    assert said["ms"].keys() == {"embed", "search", "read"} and all(ms >= 0 for ms in said["ms"].values())
    assert len(said["answers"]) == 5
    for answer in said["answers"]:
        assert answer.keys() == {"text", "score", "probability", "start", "end", "passage"}
        assert answer["passage"].keys() == PASSAGE_KEYS


def test_answers_are_slices_of_their_passages(answerer, tiny_kb) -> None:
    """Checks the answers to 50 random questions."""
    texts = {passage.id: passage.text for passage in tiny_kb}
    seen = 0
    for found in answerer.answer_batch(random_questions(50)):
        for answer in found.to_json()["answers"]:
            passage = answer["passage"]
            assert passage["text"] == texts[passage["id"]]
            assert passage["text"][answer["start"] : answer["end"]] == answer["text"] != ""
            assert answer["text"] == answer["text"].strip()
            seen += 1
    assert seen >= 200


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_a_question_with_half_of_a_surrogate_pair_is_one_clear_error(answerer, method) -> None:
    for call in (
        lambda: answerer.answer_batch(["\ud83d where?"], method),
        lambda: answerer.passages("\ud83d where?", 5, method),
    ):
        with pytest.raises(InputError, match=r"^'\\ud83d where\?' has one half of a surrogate pair$"):
            call()


def test_an_evaluation_reads_as_many_passages_as_an_answer(tiny_kb, qa_folder, monkeypatch) -> None:
    """Also more than are listed in the predictions."""
    monkeypatch.setattr(question_sets, "DEPTH", 3)
    answerer = Answerer.load(str(tiny_kb.folder), str(qa_folder), replace(CONFIG, read=8))
    asked = [Question("q", "who built a tower in Arden?", ("Berthe",))]
    (found,) = question_sets.ask(answerer, asked, None, False, False).predictions
    said = answerer.answer(found.question)
    assert (found.read, len(found.passages)) == (len(said.passages), 3) == (8, 3)
    assert found.answer == said.answers[0].text


def test_answers_are_best_first_and_their_probabilities_are_at_most_1_together(answerer) -> None:
    for found in answerer.answer_batch(random_questions(20)):
        scores = [answer.score for answer in found.answers]
        assert scores == sorted(scores, reverse=True)
        assert sum(answer.probability for answer in found.answers) <= 1 + 1e-6


def inner_products(answerer, question: str) -> torch.Tensor:
    """Inner products of a question with every passage."""
    query = answerer.embed(answerer.model.tokenizer.encode([question]))[0]
    return answerer.version.index.rows(np.arange(len(answerer.kb))) @ query.detach()


def ranked_by_hand(answerer, question: str, method: str) -> tuple[list[int], np.ndarray]:
    """All passages in the order of a method, and the scores that a hybrid ranking adds to the spans of each passage."""
    kb = answerer.kb
    dense_N, bm25_N = inner_products(answerer, question).numpy(), np.zeros(len(kb))
    scores, ranked = Bm25Index(kb.titles, kb.texts()).search([question], len(kb))
    by_words = ranked[0][ranked[0] >= 0].tolist()
    bm25_N[by_words] = scores[0][: len(by_words)]
    if method == "bm25":
        return by_words, np.zeros(len(kb))
    if method == "dense":
        return np.argsort(-dense_N).tolist(), np.zeros(len(kb))
    sum_N = 2 * dense_N / dense_N.std() + (bm25_N / bm25_N.std() if by_words else 0)
    return sorted(np.argsort(-dense_N).tolist(), key=lambda n: -sum_N[n]), sum_N


def best_by_hand(answerer, question: str, method: str) -> tuple:
    """The best span of the first five passages: score, text, passage, rank, p(y|x) of its answer, and p(z|x).

    The answer has all spans for whose texts the best span would stand (`stands_for`).
    """
    model, scores = answerer.model, inner_products(answerer, question)
    ranked, added_N = ranked_by_hand(answerer, question, method)
    ranked = ranked[:5]
    (ids,) = model.tokenizer.encode([question])
    spans, total, of_text = [], 0.0, Counter()
    for rank, number in enumerate(ranked, start=1):
        (passage,) = answerer.kb.passages([number])
        (encoding,) = model.tokenizer.encode_with_offsets([passage.text])
        tokens = joint_inputs([ids], [encoding.ids], model.tokenizer, model.lengths)
        with torch.no_grad():
            grid = model.span_reader(tokens, body_mask(tokens, model.tokenizer.sep_id))[0]
        for width, place in grid.isfinite().nonzero().tolist():
            first = place - tokens.segments_BT[0].tolist().index(1)
            text = passage.text[encoding.starts[first] : encoding.ends[first + width]]
            score = (grid[width, place] + scores[number]).item() + added_N[number]
            spans.append((score, text, passage.id, rank))
            total += float(np.exp(score))
            of_text[normalise_answer(text)] += float(np.exp(score))
    best = max(spans)
    prior = torch.stack([scores[n] for n in ranked]).softmax(0)[best[3] - 1]
    agreeing = sum(mass for text, mass in of_text.items() if stands_for(normalise_answer(best[1]), text))
    return *best, agreeing / total, float(prior)


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_best_answer_is_that_of_scoring_every_span_of_every_passage(answerer, method) -> None:
    for question in random_questions(8 if method == "dense" else 4):
        score, *place, probability, prior = best_by_hand(answerer, question, method)
        answer = answerer.answer_batch([question], method)[0].answers[0]
        assert [answer.text, answer.passage.id, answer.passage.rank] == place
        assert answer.score == pytest.approx(score, abs=1e-3)
        assert answer.probability == pytest.approx(probability, rel=1e-2)
        assert answer.passage.probability == pytest.approx(prior, rel=1e-2)


def test_batch_gives_what_each_question_gives_alone(answerer) -> None:
    questions = random_questions(9)
    for together, question in zip(answerer.answer_batch(questions), questions, strict=True):
        alone = answerer.answer(question)
        assert together.question == alone.question == question
        assert [a.text for a in together.answers] == [a.text for a in alone.answers]
        np.testing.assert_allclose(
            [a.score for a in together.answers], [a.score for a in alone.answers], atol=1e-3
        )


def test_lines_show_the_answer_in_its_passage(answerer) -> None:
    found = answerer.answer("who built a tower in Arden?")
    lines = found.lines()
    assert len(lines) == 3 * (1 + sum(answer.probability >= 0.05 for answer in found.answers[1:]))
    assert all("\n" not in line for line in lines)
    assert f"[[{found.answers[0].text}]]" in lines[2]
    assert found.answers[0].passage.title in lines[1]


def test_answers_differ_and_do_not_overlap_and_are_the_best_of_these(answerer) -> None:
    for question in random_questions(6):
        answers = answerer.answer(question).answers
        texts = [normalise_answer(one.text) for one in answers]
        assert not any(stands_for(one, later) for one, later in itertools.combinations(texts, 2))
        assert len(answers) == 5
        assert [one.score for one in answers] == sorted((one.score for one in answers), reverse=True)
        for one, other in itertools.combinations(answers, 2):
            assert one.passage.id != other.passage.id or one.end <= other.start or other.end <= one.start


@pytest.mark.parametrize(
    ("texts", "firsts"),
    [
        (["fleming", "sir alexander fleming", "alexander fleming"], [0, 1, 0]),
        (["alexander fleming", "fleming", "sir alexander fleming", "alexander"], [0, 0, 0, 0]),
        (["in 1954 and 1960", "1954", "1960", "1954 and 1961"], [0, 0, 0, 3]),
        (["", "1960", "", "16"], [0, 1, 0, 3]),
    ],
)
def test_a_text_has_the_answer_of_the_first_text_that_stands_for_it(texts, firsts) -> None:
    found = pipeline._first_of_answer(texts)
    assert [found[text] for text in texts] == [texts[first] for first in firsts]


def test_no_listed_answer_stands_for_a_later_one_if_the_best_span_of_an_answer_is_covered() -> None:
    passage = RankedPassage("1", "", "k l m d x y z", 1, 1.0, "d", {})
    places = {"k l m d": (0, 7), "d x y z": (6, 13), "x y": (20, 23), "x y w v": (30, 37), "n": (40, 41)}
    first_of = pipeline._first_of_answer(places)
    found = [
        pipeline._Found(0, first_of[text], Span(text, 0.0, 0.1, start, end))
        for text, (start, end) in places.items()
    ]
    assert [one.text for one in pipeline._distinct(found, [passage], 5)] == ["k l m d", "x y w v", "n"]
    assert [one.text for one in pipeline._distinct(found, [passage], 1)] == ["k l m d"]


@pytest.mark.parametrize(
    ("probability", "words"), [(0.81, "very likely right"), (0.5, "probably right"), (0.38, "unsure")]
)
def test_a_terminal_has_the_words_of_the_page_beside_the_probability(probability, words) -> None:
    passage = RankedPassage("p", "Arden", "It was founded in 1492.", 1, 1.0, "d", {})
    best = Answer("1492", 1.0, probability, 18, 22, passage)
    other, unlikely = replace(best, text="It", probability=0.1), replace(best, text="in", probability=0.01)
    found = Answers("?", [best, other, unlikely], AnsweringIndex(1, 0), {}, [], None, found=True)
    first, place, evidence, *rest = found.lines()
    assert place == "    Arden, rank 1"
    (_, place, _) = replace(best, passage=replace(passage, fields={"path": "docs/towns.md"})).lines()
    assert place == "    Arden, rank 1, docs/towns.md"
    assert first == f"1492   ({words}, probability {probability:.2f})" and "in [[1492]]." in evidence
    assert rest[0] == "It   (probability 0.10)" and len(rest) == 3
    page = (Path(realm.__file__).parent / "serve" / "page" / "words.js").read_text().lower()
    assert f'"{words}"' in page and f"likely = {LIKELY};" in page


# -- odd questions and knowledge bases


def test_question_longer_than_the_model_takes_is_cut(answerer) -> None:
    asked = ["river wool " * times for times in (8000, answerer.model.lengths.query)]
    long, short = ([a.text for a in answerer.answer(question).answers] for question in asked)
    assert long == short


@pytest.mark.parametrize(
    "question", ["", " ", "\u200b", "[SEP] [MASK] [CLS]", "日本", "?" * 50, "\ud7ff\x00\x07"]
)
def test_odd_questions_get_answers_too(answerer, question) -> None:
    found = answerer.answer(question)
    for answer in found.answers:
        assert answer.passage.text[answer.start : answer.end] == answer.text
    assert found.answers


def test_model_without_a_span_reader_is_one_line(tiny_kb, tiny_model_folder) -> None:
    answerer = Answerer.load(str(tiny_kb.folder), str(tiny_model_folder), CONFIG)
    with pytest.raises(InputError, match="realm finetune") as error:
        answerer.answer("who?")
    assert "\n" not in str(error.value)


def test_model_with_another_tokenizer_is_refused(tiny_kb, tiny_model, tmp_path) -> None:
    tiny_model.tokenizer = Tokenizer.train(["quite other words"], vocab_size=40)
    save_model(tiny_model, tmp_path / "other")
    with pytest.raises(InputError, match="tokenizer") as error:
        Answerer.load(str(tiny_kb.folder), str(tmp_path / "other"), CONFIG)
    assert "\n" not in str(error.value)


def test_added_documents_answer_at_once_and_deleted_ones_no_more(own_kb, qa_folder) -> None:
    def titles() -> set[str]:
        answerer = Answerer.load(
            str(own_kb.folder), str(qa_folder), AnswerConfig(device="cpu", read=40, answers=500)
        )
        return {a.passage.title for a in answerer.answer("who sold the bells of Oakham?").answers}

    assert "Oakham" not in titles()
    own_kb.add(
        [Document("Oakham", "Oakham lies on the Tarn. Quirin sold the bells of Oakham.", "o")], TinyTagger()
    )
    assert "Oakham" in titles()
    own_kb.delete(["o", "d0"])
    assert not {"Oakham", "Arden"} & titles()


def test_emptied_knowledge_base_has_no_answer(own_kb, qa_folder) -> None:
    own_kb.delete([f"d{n}" for n in range(14)])
    found = Answerer.load(str(own_kb.folder), str(qa_folder), CONFIG).answer("who built a tower?")
    assert found.answers == [] and len(found.lines()) == 1


# -- retrieval to a file


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def retrieve(kb, model, tmp_path: Path, method, questions=QUESTIONS, k: int = 4) -> list[dict]:
    retrieve_to_file(str(kb.folder), model, questions, k, method, out=tmp_path / "out.jsonl", config=CONFIG)
    return lines(tmp_path / "out.jsonl")


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_retrieved_file_has_the_form_of_the_contract(tiny_kb, tiny_model_folder, tmp_path, method) -> None:
    passages = {passage.id: passage for passage in tiny_kb}
    rows = retrieve(tiny_kb, str(tiny_model_folder), tmp_path, method)
    assert [(row["id"], row["question"]) for row in rows] == [(q.id, q.question) for q in QUESTIONS]
    for row in rows:
        assert row.keys() == {"id", "question", "passages"} and len(row["passages"]) == 4
        scores = [p["score"] for p in row["passages"]]
        assert scores == sorted(scores, reverse=True)
        for found in row["passages"]:
            assert found.keys() == {"id", "title", "text", "score", "document", "fields"}
            assert (found["title"], found["text"]) == (
                passages[found["id"]].title,
                passages[found["id"]].text,
            )
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_dense_ranking_is_that_of_all_inner_products(
    tiny_kb, tiny_model, tiny_model_folder, tmp_path
) -> None:
    answerer = Answerer.load(str(tiny_kb.folder), str(tiny_model_folder), CONFIG)
    vectors = answerer.version.index.rows(np.arange(len(tiny_kb)))
    for row in retrieve(tiny_kb, str(tiny_model_folder), tmp_path, "dense"):
        query = answerer.embed(tiny_model.tokenizer.encode([row["question"]]))[0]
        best = (vectors @ query).argsort(descending=True)[:4].tolist()
        assert [p["id"] for p in row["passages"]] == [tiny_kb.ids[n] for n in best]


def test_bm25_needs_no_model_and_finds_the_town(tiny_kb, tmp_path) -> None:
    rows = retrieve(tiny_kb, None, tmp_path, "bm25", k=2)
    assert all(row["passages"][0]["title"] in row["question"] for row in rows)


@pytest.mark.parametrize(("method", "expected"), [("bm25", 0), ("hybrid", 4)])
def test_bm25_finds_nothing_for_a_question_without_a_known_word(
    tiny_kb, tiny_model_folder, tmp_path, method, expected
) -> None:
    """BM25 ranks no passage for it; a hybrid search ranks the dense passages."""
    asked = [Question("1", "zzz qqq", ("x",)), Question("2", "zzz Arden qqq", ("x",))]
    strange, known = retrieve(tiny_kb, str(tiny_model_folder), tmp_path, method, asked)
    assert len(strange["passages"]) == expected
    assert any("Arden" in passage["text"] for passage in known["passages"][:2])


def test_file_that_cannot_be_finished_leaves_the_old_one(
    tiny_kb, tiny_model_folder, tmp_path, monkeypatch
) -> None:
    (tmp_path / "out.jsonl").write_text("old")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Retriever, "search", die)
    with pytest.raises(KeyboardInterrupt):
        retrieve(tiny_kb, str(tiny_model_folder), tmp_path, "dense")
    assert (tmp_path / "out.jsonl").read_text() == "old"


# -- evaluation


def reported(answerer, questions, method=None) -> Report:
    return ask(answerer, questions, method).report(questions, answerer.threshold)


def test_evaluation_without_a_span_reader_counts_recall_only(tiny_kb, tiny_model_folder) -> None:
    answerer = Answerer.load(str(tiny_kb.folder), str(tiny_model_folder), CONFIG)
    report = evaluate_retrieval(answerer, QUESTIONS).as_dict()
    assert (
        report["n"] == 14 and report["em"] is report["em_ci95"] is report["contains"] is report["f1"] is None
    )
    ranks = []
    for question in QUESTIONS:
        query = answerer.embed(answerer.model.tokenizer.encode([question.question]))[0]
        order = (answerer.version.index.rows(np.arange(28)) @ query).argsort(descending=True).tolist()
        texts = [passage.text for passage in tiny_kb.passages(order)]
        ranks.append(1 + next(i for i, text in enumerate(texts) if question.answers[0] in text))
    assert report["recall"]["5"] == round(100 * np.mean([rank <= 5 for rank in ranks]), 3)
    assert report["mrr"] == round(100 * np.mean([1 / rank for rank in ranks]), 3)
    retriever = Retriever(tiny_kb, complete_index(tiny_kb, answerer.model, str(tiny_model_folder)).index)
    assert question_ranks(answerer.model, tiny_kb, retriever, QUESTIONS, 28).tolist() == ranks
    assert question_ranks(answerer.model, tiny_kb, retriever, QUESTIONS, 3).tolist() == [
        r if r <= 3 else 0 for r in ranks
    ]


def test_evaluation_scores_the_first_answer(answerer) -> None:
    questions = [
        Question(str(n), q.question, (answerer.answer(q.question).answers[0].text if n % 2 else "no",))
        for n, q in enumerate(QUESTIONS)
    ]
    assert reported(answerer, questions).as_dict()["em"] == 50.0


@pytest.mark.parametrize("method", ["bm25", "hybrid"])
def test_evaluation_reads_answers_from_the_passages_that_recall_counts(answerer, method) -> None:
    asked = [q._replace(answers=(best_by_hand(answerer, q.question, method)[1],)) for q in QUESTIONS[::2]]
    dense, report = reported(answerer, asked), reported(answerer, asked, method)
    assert report.correct_N.all() and not dense.correct_N.all()
    for question, rank in zip(asked, report.first_hit_N, strict=True):
        ranked, _ = ranked_by_hand(answerer, question.question, method)
        texts = [p.text for p in answerer.kb.passages(ranked)]
        assert rank == first_hit(texts, question)


@pytest.mark.parametrize("method", ["bm25", "hybrid"])
def test_evaluation_accepts_a_question_without_bm25_passages(answerer, method) -> None:
    asked = [*QUESTIONS, Question("strange", "zzz qqq", ("x",))]
    report = reported(answerer, asked, method).as_dict()
    assert report["n"] == 15 and report["recall"]["100"] is not None


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_the_best_passages_are_the_same_however_many_are_asked_for(answerer, method) -> None:
    asked = random_questions(12)
    _, all_BK = answerer.retrieve(asked, 28, method)
    for k in (1, 3, 5):
        assert (answerer.retrieve(asked, k, method)[1] == all_BK[:, :k]).all()


def test_evaluation_report_is_the_contract(answerer) -> None:
    report = reported(answerer, QUESTIONS).as_dict()
    assert report.keys() == {"n", "em", "em_ci95", "contains", "f1", "recall", "mrr", "confidence"}
    assert list(report["recall"]) == ["1", "5", "20", "100"]


# -- what a server asks for


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_probabilities_of_passages_are_the_embedders_for_every_method(answerer, tiny_kb, method) -> None:
    question = "who built a tower in Arden?"
    (found,) = answerer.answer_batch([question], method, read=4)
    _, numbers = answerer.retrieve([question], 4, method)
    assert [one.id for one in found.passages] == [tiny_kb.ids[n] for n in numbers[0] if n >= 0]
    assert [one.rank for one in found.passages] == list(range(1, len(found.passages) + 1))
    query = answerer.embed(answerer.model.tokenizer.encode([question]))[0]
    scores = answerer.version.index.rows(numbers[0]) @ query.detach()
    np.testing.assert_allclose([one.probability for one in found.passages], scores.softmax(0), rtol=1e-4)
    nothing = answerer.model.embedder.passage(
        passage_inputs([[]], [[]], answerer.model.tokenizer, answerer.model.lengths)
    )[0]
    with_null = torch.cat([(nothing @ query)[None], scores]).softmax(0).detach()
    assert found.null_probability == pytest.approx(float(with_null[0]), rel=1e-3)


def test_questions_asked_together_get_the_answers_they_get_alone(answerer, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "ROWS_READ", 7)  # not a multiple of the five read per question
    questions = random_questions(6)
    for question, together in zip(questions, answerer.answer_batch(questions), strict=True):
        alone = answerer.answer(question)
        assert [a.text for a in together.answers] == [a.text for a in alone.answers]
        np.testing.assert_allclose(
            [a.score for a in together.answers], [a.score for a in alone.answers], rtol=1e-4, atol=1e-4
        )


def test_a_question_without_a_known_word_has_no_bm25_passages_and_no_answer(answerer) -> None:
    found, other = answerer.answer_batch(["zzz qqq", "Arden"], "bm25")
    assert found.answers == found.passages == [] and found.null_probability == 1.0
    assert other.answers


def test_answers_come_back_from_their_json(answerer) -> None:
    said = answerer.answer("who built a tower in Arden?")
    back = Answers.from_json(json.loads(json.dumps(said.to_json())))
    assert back.to_json() == said.to_json() and back.lines() == said.lines()
