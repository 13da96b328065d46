"""DrQA against plain calculations: TF-IDF, features, LSTM, spans; and as a whole, with evidence."""

import itertools
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from realm.errors import InputError, OtherSettings
from realm.files import read_json, write_json
from realm.qa.question_files import Question
from realm.store.knowledge_base import KnowledgeBaseConfig
from realm.systems import drqa, tfidf
from realm.systems.articles import Articles
from realm.systems.drqa import (
    Config,
    DrQa,
    Reader,
    StackedLstm,
    Vocabulary,
    best_spans,
    example_of,
    examples_of_documents,
    loss_of,
    occurrences,
    rows_of,
    train,
)
from realm.systems.system import Ground, ReadingSet, load_system, predict
from realm.systems.tfidf import Ranking, Tfidf, open_tfidf, tokens_of
from realm.text.corpus import Document, Passage
from tests.conftest import RIVERS, TOWNS
from tests.store.tiny import make
from tests.systems.runs import WEIGHTS, check_resumed, renamed

QUESTIONS = [
    Question(str(n), f"on which river lies {town}?", (RIVERS[n % 4],)) for n, town in enumerate(TOWNS)
]
TINY = {
    "hidden": 16,
    "layers": 2,
    "width": 24,
    "device": "cpu",
    "precision": "fp32",
    "dropout": 0.0,
    "log_every": 5,
}


@pytest.fixture(scope="module")
def ground(tiny_kb) -> Ground:
    return Ground(tiny_kb, "", QUESTIONS, QUESTIONS)


@pytest.fixture(scope="module")
def ranking(tiny_kb) -> Ranking:
    articles = Articles.of(tiny_kb)
    return Ranking(Tfidf.of(tiny_kb, articles), articles)


# -- tf-idf


def plain_scores(tiny_kb, question: str) -> dict[str, float]:
    """The score of each document, by the formula of the paper over n-grams as text."""

    def grams(text: str) -> Counter[str]:
        words = re.findall(r"\w+|[^\w\s]", text.lower())
        good = [re.match(r"\w", w) is not None and w not in tfidf.STOP_WORDS for w in words]
        single = [w for w, g in zip(words, good, strict=True) if g]
        pairs = [
            f"{a} {b}"
            for (a, ga), (b, gb) in zip(zip(words, good), zip(words[1:], good[1:]), strict=False)  # noqa: B905
            if ga and gb
        ]
        return Counter([*single, *pairs])

    documents: dict[str, Counter[str]] = {}
    for passage in tiny_kb:
        documents.setdefault(passage.document_id, Counter()).update(grams(f"{passage.title}\n{passage.text}"))
    scores = dict.fromkeys(documents, 0.0)
    for gram, count in grams(question).items():
        df = sum(gram in found for found in documents.values())
        idf = max(0.0, math.log((len(documents) - df + 0.5) / (df + 0.5)))
        for name, found in documents.items():
            scores[name] += math.log1p(count) * idf * math.log1p(found[gram]) * idf
    return scores


@pytest.mark.parametrize(
    "question", [QUESTIONS[0].question, "who built a tower in Kelso for Berthe?", "", "of the"]
)
def test_articles_are_ranked_by_the_papers_formula(tiny_kb, ranking, question) -> None:
    scores = plain_scores(tiny_kb, question)
    wanted = sorted((score for score in scores.values() if score > 0), reverse=True)
    found = ranking.index.best(question, 100, ranking.articles.count)
    documents = [tiny_kb.passages([ranking.articles.lead(one)])[0].document_id for one in found]
    np.testing.assert_allclose([scores[name] for name in documents], wanted, rtol=1e-4)


def test_the_passages_of_a_document_are_together_and_all_there(tiny_kb, ranking) -> None:
    passages, articles = list(tiny_kb), ranking.articles
    every = range(articles.count)
    assert sorted(articles.passages(list(every)).tolist()) == list(range(len(tiny_kb)))
    for document in every:
        assert len({passages[number].document_id for number in articles.passages([document])}) == 1


def test_the_matrix_is_made_once_and_anew_for_another_corpus(tiny_kb, tmp_path, monkeypatch) -> None:
    articles = Articles.of(tiny_kb)
    first = open_tfidf(tiny_kb, articles, tmp_path / "m")
    made_of = {"kb": tiny_kb.fingerprint, "documents": tiny_kb.documents_digest}
    assert read_json(tmp_path / "m" / "tfidf.json") == made_of
    monkeypatch.setattr(Tfidf, "of", lambda *_: pytest.fail("made again"))
    again = open_tfidf(tiny_kb, articles, tmp_path / "m")
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    write_json(tmp_path / "m" / "tfidf.json", {"kb": "another"})
    with pytest.raises(pytest.fail.Exception, match="made again"):
        open_tfidf(tiny_kb, articles, tmp_path / "m")


def test_other_document_ids_make_another_matrix(tiny_kb, tmp_path) -> None:
    """Entries have numbers of documents, which are the order of the keys of their ids."""
    other = renamed(tiny_kb, tmp_path / "kb")
    assert other.fingerprint == tiny_kb.fingerprint
    before, after = (Ranking.open(kb, tmp_path / "system") for kb in (tiny_kb, other))
    for question in QUESTIONS:
        (wanted, *_), (found, *_) = (one.passages(question.question, 1) for one in (before, after))
        assert found == wanted


def test_tokens_are_slices_of_the_text() -> None:
    text = "L'\u00e9t\u00e9: 3,5 km\u2014fin."
    tokens = tokens_of(text)
    assert all(text[one.start : one.end] == one.text for one in tokens)
    assert "".join(one.text for one in tokens) == re.sub(r"\s", "", text)


# -- the reader


def test_features_mark_the_words_of_the_passage_that_the_question_has() -> None:
    question, passage = tokens_of("Who built Kelso?"), tokens_of("kelso who Kelso x")
    rows = rows_of([(question, passage)], Vocabulary(["kelso", "who"]))
    assert rows.feature_BTF[0, :, 0].tolist() == [0, 0, 1, 0]
    assert rows.feature_BTF[0, :, 1].tolist() == [1, 1, 1, 0]
    assert rows.feature_BTF[0, :, 2].tolist() == [0.5, 0.25, 0.5, 0.25]
    assert rows.passage_BT[0].tolist() == [2, 3, 2, 1]
    padded = rows_of(
        [(question, passage), (question, tokens_of("a b c d e")), (question, [])], Vocabulary([])
    )
    assert torch.equal(padded.feature_BTF[0, :4], rows.feature_BTF[0])
    assert (padded.feature_BTF[0, 4:] == 0).all() and (padded.feature_BTF[2] == 0).all()


def test_padding_changes_no_score() -> None:
    torch.manual_seed(0)
    reader = Reader(20, 8, 6, 2).eval()
    vocabulary = Vocabulary(["a", "b", "c", "d"])
    short = (tokens_of("a b?"), tokens_of("c d a"))
    long = (tokens_of("d c b a a a?"), tokens_of("a b c d d c b a b c"))
    with torch.no_grad():
        alone = reader(rows_of([short], vocabulary))
        both = reader(rows_of([short, long], vocabulary))
    for one, two in zip(alone, both, strict=True):
        assert torch.allclose(one[0], two[0, :3], atol=1e-5)
        assert torch.isinf(two[0, 3:]).all()


def test_the_reader_computes_the_papers_equations() -> None:
    """One row, word by word, with the weights of the reader."""
    torch.manual_seed(1)
    reader = Reader(12, 8, 6, 2).eval()
    vocabulary = Vocabulary(["a", "b", "c", "d"])
    rows = rows_of([(tokens_of("a b?"), tokens_of("c d a b"))], vocabulary)
    with torch.no_grad():
        question, passage = reader.embedding(rows.question_BJ[0]), reader.embedding(rows.passage_BT[0])
        inputs = []
        for place, word in enumerate(passage):
            keys = [
                float(torch.relu(reader.align(word)) @ torch.relu(reader.align(other))) for other in question
            ]
            shares = np.exp(keys) / np.exp(keys).sum()
            aligned = sum(float(share) * other for share, other in zip(shares, question, strict=True))
            inputs.append(torch.cat([word, aligned, rows.feature_BTF[0, place]]))
        states = {}
        for name, stack, given in (
            ("p", reader.passage, torch.stack(inputs)),
            ("q", reader.question, question),
        ):
            found, last = [], given[None]
            for layer in stack.layers:
                last, _ = layer(last)
                found.append(last)
            states[name] = torch.cat(found, dim=2)[0]
        weights = reader.weigh(states["q"]).softmax(dim=0)
        asked = (weights * states["q"]).sum(dim=0)
        start = [float(state @ reader.start(asked)) for state in states["p"]]
        end = [float(state @ reader.end(asked)) for state in states["p"]]
        start_BT, end_BT = reader(rows)
    np.testing.assert_allclose(start_BT[0], start, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(end_BT[0], end, rtol=1e-4, atol=1e-5)


def test_states_of_all_layers_are_concatenated() -> None:
    stack = StackedLstm(4, 3, 3)
    found = stack(torch.randn(2, 5, 4), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool))
    assert found.shape == (2, 5, 18)
    assert (found[1, 2:] == 0).all()


def test_the_best_span_is_that_of_a_search_of_all(monkeypatch) -> None:
    monkeypatch.setattr(drqa, "ANSWER_WORDS", 4)
    lengths = (1, 2, 7, 30)
    scores = torch.full((2, len(lengths), max(lengths)), -torch.inf)
    for row, length in enumerate(lengths):
        scores[:, row, :length] = torch.randn(2, length, generator=torch.Generator().manual_seed(row))
    found = best_spans(*scores)
    for row, length in enumerate(lengths):
        every = [
            (float(scores[0, row, i] + scores[1, row, j]), i, j)
            for i in range(length)
            for j in range(i, min(length, i + 4))
        ]
        score, first, last = max(every)
        assert (int(found[0][row]), int(found[1][row])) == (first, last)
        assert float(found[2][row]) == pytest.approx(score)


# -- training and answering


def test_answers_are_found_as_whole_words_and_patterns_cover_their_words() -> None:
    text = "The river Ouse, called ouse; not Ousel."
    tokens = tokens_of(text)
    places = occurrences(Question("1", "?", ("Ouse", "river ouse")), text, tokens)
    assert [" ".join(t.text for t in tokens[a : b + 1]) for a, b in places] == ["river Ouse", "Ouse", "ouse"]
    (place,) = occurrences(Question("1", "?", (r"called \w+",), regex=True), text, tokens)
    assert [t.text for t in tokens[place[0] : place[1] + 1]] == ["called", "ouse"]


def test_a_passage_trains_only_if_words_around_the_answer_are_asked_for(tiny_kb) -> None:
    passage = next(iter(tiny_kb))
    river = next(name for name in RIVERS if name in passage.text)
    made = example_of(Question("1", "which river runs by the hills?", (river,)), passage)
    assert made is not None
    example = made[1]
    assert [t.text for t in example.passage[example.first : example.last + 1]] == [river]
    assert example_of(Question("1", "zzz?", (river,)), passage) is None
    assert example_of(Question("1", "which of the and?", (river,)), passage) is None  # only stop words
    assert example_of(Question("1", "which river?", ("nowhere",)), passage) is None
    assert example_of(Question("1", "which river?", (river,)), passage._replace(text="x" * 2000)) is None


@pytest.mark.parametrize(
    ("asked", "overlap", "place"),
    [
        ("who built the old stone bridge?", 3 + 2, 1),  # old, stone, bridge, old stone, stone bridge
        ("who built bridges of stone, and an old one?", 2, 1),  # old, stone
        ("a mill, a mill, a mill?", 2, 0),  # each occurrence counts once
        ("is it the Ouse?", 1, 0),  # the answer itself; the first place of equal ones
    ],
)
def test_the_place_of_an_answer_is_that_of_most_shared_words_and_pairs(asked, overlap, place) -> None:
    filler = " ".join(["and"] * 21)
    text = f"The mill by the mill stands at the Ouse. {filler} The old stone bridge crosses the Ouse."
    found = example_of(Question("1", asked, ("Ouse",)), Passage("0", "d", "", text, (), ()))
    assert found is not None
    places = [n for n, token in enumerate(found[1].passage) if token.text == "Ouse"]
    assert (found[0], found[1].first) == (overlap, places[place])


def test_questions_about_a_known_document_train_without_shared_words(tmp_path) -> None:
    texts = ["It has a mint.", "It lies on the Ouse. " * 80]
    answer = "on the Ouse . It lies " * 4 + "on the Ouse"
    kb = make(
        tmp_path / "kb",
        [Document(f"t{n}", text, f"t{n}") for n, text in enumerate(texts)],
        KnowledgeBaseConfig(passage_tokens=1000),
    )
    asked = [
        Question("0", "zzz?", ("mint",), document_id="t0"),
        Question("1", "zzz?", (answer,), document_id="t1"),
        Question("2", "zzz?", ("Ouse",), document_id="t0"),
    ]
    found = examples_of_documents(ReadingSet(kb, asked))
    assert [(one.first, one.last) for one in found] == [(3, 3), (2, 28)]


def test_loss_is_that_of_the_first_and_the_last_word() -> None:
    reader = Reader(20, 8, 6, 1).eval()
    rows = rows_of(
        [(tokens_of("a?"), tokens_of("b c d")), (tokens_of("b?"), tokens_of("a"))], Vocabulary(list("abcd"))
    )
    first, last = torch.tensor([1, 0]), torch.tensor([2, 0])
    with torch.no_grad():
        start_BT, end_BT = reader(rows)
        plain = 0.0
        for row in range(2):
            for scores, place in ((start_BT[row], first[row]), (end_BT[row], last[row])):
                finite = scores[torch.isfinite(scores)]
                plain -= float(scores[place]) - math.log(float(finite.exp().sum()))
        assert float(loss_of(reader, rows, first, last)) == pytest.approx(plain / 2, rel=1e-4)


def test_it_learns_and_answers_from_its_folder_with_evidence(ground, tiny_kb, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(drqa, "ARTICLES", 1)
    config = Config(steps=60, batch_size=16, learning_rate=1e-2, warmup=5, dev_every=20, **TINY)
    out = train(ground, tmp_path / "drqa", config)
    found = list(predict(load_system(out, tiny_kb), tiny_kb, QUESTIONS))
    text_of = {passage.id: passage.text for passage in tiny_kb}
    for one in found:
        assert text_of[one.passage_id][one.start : one.end] == one.answer
        assert one.passage_id in one.passages
    right = sum(one.answer == question.answers[0] for one, question in zip(found, QUESTIONS, strict=True))
    assert right >= 10  # of 14, in passages of some 25 words


def test_questions_answered_together_have_the_answers_of_plain_loops(tiny_kb, ranking, monkeypatch) -> None:
    """Every question alone, every passage alone, every span alone."""
    monkeypatch.setattr(drqa, "ARTICLES", 3)
    monkeypatch.setattr(drqa, "READ_AT_ONCE", 2)
    torch.manual_seed(0)
    vocabulary = Vocabulary.of(tokens_of(passage.text) for passage in tiny_kb)
    reader = Reader(len(vocabulary), 8, 6, 2).eval()
    questions = [*(one.question for one in QUESTIONS[:6]), "zzz?", QUESTIONS[0].question]
    found = DrQa(tiny_kb, ranking, reader, vocabulary, "fp32").answer(questions)
    for question, one in zip(questions, found, strict=True):
        numbers = ranking.passages(question, 3)
        spans = []
        for number in numbers.tolist():
            (passage,) = tiny_kb.passages([number])
            tokens = tokens_of(passage.text)
            with torch.no_grad():
                start_BT, end_BT = reader(rows_of([(tokens_of(question), tokens)], vocabulary))
            spans += [
                (float(start_BT[0, i] + end_BT[0, j]), number, tokens[i].start, tokens[j].end)
                for i in range(len(tokens))
                for j in range(i, min(len(tokens), i + drqa.ANSWER_WORDS))
            ]
        assert one.read == len(numbers)
        assert list(one.number_K) == ranking.passages(question, 100)[:100].tolist()
        if not spans:
            assert (one.answer, one.passage, one.score) == ("", -1, 0.0)
            continue
        score, number, start, end = max(spans)
        assert one.score == pytest.approx(score, abs=1e-5)
        assert (one.passage, one.start, one.end) == (number, start, end)
        assert one.answer == tiny_kb.passages([number])[0].text[start:end]


def test_an_interrupted_run_ends_as_an_uninterrupted_one(ground, tmp_path) -> None:
    config = Config(steps=10, batch_size=4, warmup=2, dev_every=5, checkpoint_seconds=0.0, **TINY)
    files = (*WEIGHTS, "words.json")
    check_resumed(lambda ground, out: train(ground, out, config), ground, tmp_path, drqa, "loss_of", 8, files)


def test_an_interrupted_run_does_not_continue_with_other_reading_passages(
    ground, tiny_kb, tmp_path, monkeypatch
) -> None:
    """The vocabulary is computed from these passages."""
    questions = [Question("r", "which river or town is it in?", (*RIVERS, "Ruritania"), document_id="d1")]
    config = Config(steps=8, batch_size=4, warmup=2, checkpoint_seconds=0.0, **TINY)
    calls, original = itertools.count(1), drqa.loss_of

    def stopping(*args):
        if next(calls) == 7:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(drqa, "loss_of", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(replace(ground, reading=ReadingSet(tiny_kb, questions)), tmp_path / "out", config)
    for other in (make(tmp_path / "texts"), renamed(tiny_kb, tmp_path / "ids")):
        with pytest.raises(OtherSettings, match="with another model or other data"):
            train(replace(ground, reading=ReadingSet(other, questions)), tmp_path / "out", config)
    train(replace(ground, reading=ReadingSet(tiny_kb, questions)), tmp_path / "out", config)


def test_questions_without_answers_in_the_corpus_are_refused(tiny_kb, tmp_path) -> None:
    ground = Ground(tiny_kb, "", [Question("1", "on which river lies Arden?", ("nowhere",))], [])
    with pytest.raises(InputError, match="no training question has an answer"):
        train(ground, tmp_path / "out", Config(**TINY))


def test_a_question_of_unknown_words_has_no_answer(tiny_kb, ranking) -> None:
    vocabulary = Vocabulary(["a"])
    system = DrQa(tiny_kb, ranking, Reader(len(vocabulary), 8, 6, 1), vocabulary)
    (found,) = system.answer(["zzz?"])
    assert (found.answer, found.passage, found.score) == ("", -1, 0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_reads_in_the_precision_of_its_settings(tiny_kb, ranking, precision) -> None:
    vocabulary = Vocabulary(["a"])
    reader = Reader(len(vocabulary), 8, 6, 1)
    system = DrQa(tiny_kb, ranking, reader, vocabulary, precision)
    seen = set()
    reader.passage.register_forward_pre_hook(lambda *_: seen.add(torch.is_autocast_enabled("cpu")))
    (found,) = system.answer([QUESTIONS[0].question])
    assert found.answer
    assert seen == {precision == "bf16"}
