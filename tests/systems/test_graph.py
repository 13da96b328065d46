"""The passage graph and GraphRetriever against plain searches and loops; and as a whole, with evidence."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from realm.errors import InputError
from realm.files import read_json
from realm.model.folder import load_model
from realm.qa.question_files import Question
from realm.qa.reading import joint_reading
from realm.qa.spans import body_start
from realm.store.knowledge_base import KnowledgeBase
from realm.systems import graph_retriever, passage_graph
from realm.systems.answer_ends import WHOLE_WORDS
from realm.systems.articles import Articles
from realm.systems.graph_retriever import Config, Fusion, GraphReader, Retrieval, marginal_loss, train
from realm.systems.passage_graph import CHILD, MENTIONED, MENTIONS, NONE, PARENT, PassageGraph, Titles
from realm.systems.system import Ground, read_system
from realm.tokens.layouts import Lengths
from tests.conftest import RIVERS, TOWNS
from tests.store.tiny import TOKENIZER
from tests.systems.letters import LENGTHS, lettered_kb, random_encoder, row_of, sharpened, spans_of
from tests.systems.runs import SHORT, check_answers, check_resumed, renamed

QUESTIONS = [
    Question(str(n), f"on which river lies {town}?", (RIVERS[n % 4],)) for n, town in enumerate(TOWNS)
]
TINY = {"device": "cpu", "precision": "fp32", "dropout": 0.0, "log_every": 5, "passages": 12}


@pytest.fixture(scope="module")
def graph(tiny_kb, tmp_path_factory) -> PassageGraph:
    return PassageGraph.open(tiny_kb, tmp_path_factory.mktemp("graph") / "system")


@pytest.fixture(scope="module")
def ground(tiny_kb, tiny_model_folder) -> Ground:
    return Ground(tiny_kb, str(tiny_model_folder), QUESTIONS, QUESTIONS)


# -- the graph


def test_edges_are_the_titles_that_a_plain_search_finds(tiny_kb, graph) -> None:
    passages = list(tiny_kb)
    title_of = {int(graph.articles.document_N[n]): p.title for n, p in enumerate(passages)}
    for number, passage in enumerate(passages):
        named = {title_of[document] for document in graph.named(number)}
        words = set(passage.text.replace(",", " ").replace(".", " ").split())
        assert named == {town for town in TOWNS if town in words and town != passage.title}


class Named:
    """A corpus of empty articles with titles."""

    def __init__(self, titles: list[str]):
        self.titles = titles
        self.document_keys_N = np.arange(len(titles), dtype=np.uint64)


@given(
    st.lists(
        st.lists(st.sampled_from(["Ada", "Bo", "of", "Cork"]), min_size=1, max_size=3),
        min_size=1,
        unique_by=tuple,
    ),
    st.lists(st.sampled_from(["Ada", "Bo", "of", "Cork", "ada", "and", ","]), max_size=12),
)
def test_the_longest_title_at_each_place_is_found(titles: list[list[str]], words: list[str]) -> None:
    kb = Named([" ".join(title) for title in titles])
    finder = Titles(kb, Articles.of(kb))  # type: ignore[arg-type]
    wanted, place = [], 0
    usable = [[w.lower() for w in title] for title in titles]
    while place < len(words):
        fits = [
            n
            for n, title in enumerate(usable)
            if [w.lower() for w in words[place : place + len(title)]] == title
            and words[place][0].isupper()
            and any(w != "of" for w in title)
        ]
        best = max(fits, key=lambda n: len(usable[n]), default=None)
        if best is not None:
            wanted.append(best)
        place += 1 if best is None else len(usable[best])
    assert list(finder.find(" ".join(words))) == wanted


def test_an_explanation_in_brackets_gives_way_to_the_plain_title() -> None:
    kb = Named(["Mercury (planet)", "Mercury", "Mercury (element)", "The"])
    finder = Titles(kb, Articles.of(kb))  # type: ignore[arg-type]
    assert list(finder.find("Mercury and The others")) == [1]
    assert list(finder.find("what is mercury?")) == []
    assert list(finder.find("what is mercury?", any_case=True)) == [1]


def test_expansion_is_a_breadth_first_search(graph) -> None:
    for seeds, hops in itertools.product(([0], [3, 9]), (0, 1, 2, 3)):
        distance = dict.fromkeys(seeds, 0)
        queue = list(seeds)
        while queue:
            one = queue.pop(0)
            for other in graph.neighbours(one):
                if distance[one] < hops and other not in distance:
                    distance[other] = distance[one] + 1
                    queue.append(other)
        found = graph.expand(seeds, hops, 1000)
        assert set(found) == set(distance)
        assert [distance[one] for one in found] == sorted(distance.values())
        assert graph.expand(seeds, hops, 5) == found[:5]


def test_relations_show_which_passage_names_which_and_which_is_first(graph) -> None:
    passages = list(range(12))
    relation_KK = graph.relations(passages)
    document, lead = graph.articles.document_N, graph.articles.lead
    for one, other in itertools.product(passages, passages):
        plain = NONE
        if one != other:
            if document[other] in graph.named(one):
                plain = MENTIONS
            elif document[one] in graph.named(other):
                plain = MENTIONED
            elif document[one] == document[other]:
                plain = (
                    PARENT if lead(document[one]) == one else CHILD if lead(document[one]) == other else NONE
                )
        assert relation_KK[one, other] == plain
    assert len(set(relation_KK.ravel().tolist())) >= 4


def test_the_graph_is_made_once(tiny_kb, tmp_path, monkeypatch) -> None:
    first = PassageGraph.open(tiny_kb, tmp_path / "s")
    made_of = {"kb": tiny_kb.fingerprint, "documents": tiny_kb.documents_digest}
    assert read_json(tmp_path / "s.graph" / "graph.json") == made_of
    monkeypatch.setattr(passage_graph, "edges_of", lambda *_: pytest.fail("made again"))
    again = PassageGraph.open(tiny_kb, tmp_path / "s")
    np.testing.assert_array_equal(first.document_E, again.document_E)


def test_other_document_ids_make_another_graph(tiny_kb, tmp_path) -> None:
    """The edges lead to numbers of documents, which are the order of the keys of their ids."""
    before, other = PassageGraph.open(tiny_kb, tmp_path / "s"), renamed(tiny_kb, tmp_path / "kb")
    after = PassageGraph.open(other, tmp_path / "s")
    assert other.fingerprint == tiny_kb.fingerprint
    assert after.document_E.tolist() != before.document_E.tolist()
    for passage in range(len(tiny_kb)):
        titles = [
            [kb.titles[graph.articles.lead(one)] for one in graph.named(passage)]
            for kb, graph in ((tiny_kb, before), (other, after))
        ]
        assert titles[0] == titles[1]


# -- the reader


def test_fusion_takes_the_greatest_message_of_neighbours() -> None:
    torch.manual_seed(0)
    layer, hidden = Fusion(4), 4
    state, relation = torch.randn(1, 3, hidden), torch.randn(1, 3, 3, hidden)
    linked = torch.tensor([[[0, 1, 1], [0, 0, 0], [1, 0, 0]]], dtype=torch.bool)
    with torch.no_grad():
        found = layer(state, relation, linked)[0]
        for k in range(3):
            messages = [
                torch.relu(layer.message(torch.cat([state[0, j], relation[0, k, j]])))
                for j in range(3)
                if linked[0, k, j]
            ]
            best = torch.stack(messages).amax(dim=0) if messages else torch.zeros(hidden)
            plain = layer.norm(state[0, k] + layer.update(torch.cat([state[0, k], best])))
            assert torch.allclose(found[k], plain, atol=1e-6)


def test_loss_sums_the_probability_of_every_place() -> None:
    torch.manual_seed(0)
    passage_BK = torch.randn(2, 3).log_softmax(dim=1)
    end_2RT = torch.randn(2, 6, 5).log_softmax(dim=2)
    places = [[(0, 1, 2), (2, 0, 0)], [(1, 3, 4)]]
    total = 0.0
    for row, own in enumerate(places):
        p = sum(
            float((passage_BK[row, k] + end_2RT[0, row * 3 + k, a] + end_2RT[1, row * 3 + k, b]).exp())
            for k, a, b in own
        )
        total -= np.log(p)
    assert float(marginal_loss(passage_BK, end_2RT, places)) == pytest.approx(total / 2, rel=1e-5)


def test_probabilities_of_passages_and_of_ends_sum_to_one(ground, graph, tiny_kb) -> None:
    start = load_model(ground.encoder)
    reader = GraphReader(start.reader.bert.bert, start.tokenizer).eval()
    retrieval = Retrieval(tiny_kb, graph, 6)
    system = graph_retriever.GraphRetriever(tiny_kb, graph, retrieval, reader, start.tokenizer, start.lengths)
    numbers = [retrieval.ranking(question.question)[0][:4] for question in QUESTIONS[:2]]
    read = system.read([q.question for q in QUESTIONS[:2]], numbers)
    with torch.no_grad():
        passage_BK, end_2RT = reader(read.reading, read.relation_BKK)
    np.testing.assert_allclose(passage_BK.exp().sum(dim=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(end_2RT.exp().sum(dim=2), 1.0, rtol=1e-5)


@pytest.fixture(scope="module")
def lettered(tmp_path_factory) -> tuple[KnowledgeBase, PassageGraph]:
    folder = tmp_path_factory.mktemp("lettered")
    kb = lettered_kb(folder / "kb")
    return kb, PassageGraph.open(kb, folder / "system")


def fused(reader: GraphReader, state_KH: list[Tensor], relation_KK: np.ndarray) -> list[Tensor]:
    """The states of passages after the fusion layers, passage by passage."""
    for layer in reader.fusion:
        new = []
        for k, state in enumerate(state_KH):
            messages = [
                torch.relu(layer.message(torch.cat([other, reader.relation.weight[relation_KK[k, j]]])))
                for j, other in enumerate(state_KH)
                if relation_KK[k, j] != NONE
            ]
            best = torch.stack(messages).amax(dim=0) if messages else torch.zeros_like(state)
            new.append(layer.norm(state + layer.update(torch.cat([state, best]))))
        state_KH = new
    return state_KH


def test_the_answer_is_the_best_of_all_whole_words_of_all_passages(lettered) -> None:
    """log p(passage) + log p(start) + log p(end), for each span of each passage."""
    kb, graph = lettered
    reader = GraphReader(random_encoder(0), TOKENIZER).eval()
    sharpened([reader.select, reader.ends, reader.relation, reader.fusion], 3)
    retrieval = Retrieval(kb, graph, 10)
    system = graph_retriever.GraphRetriever(kb, graph, retrieval, reader, TOKENIZER, LENGTHS)
    by_passage, by_span, without_fusion = 0, 0, 0
    for question in QUESTIONS[:8]:
        numbers, _ = retrieval.ranking(question.question)
        texts = [passage.text for passage in kb.passages(numbers)]
        rows = [row_of(reader.encoder, question.question, text) for text in texts]
        first_KH = [row.state_TH[0] for row in rows]
        with torch.no_grad():
            states = fused(reader, first_KH, graph.relations(numbers))
            passage_K = torch.tensor([float(reader.select(state)) for state in states]).log_softmax(dim=0)
            plain_K = torch.tensor([float(reader.select(state)) for state in first_KH])
        spans = [
            (one.logp + float(logp), one.logp, k, one)
            for k, (row, text, logp) in enumerate(zip(rows, texts, passage_K, strict=True))
            for one in spans_of(row, reader.ends.score, text)
        ]
        score, _, k, span = max(spans)
        (found,) = system.answer([question.question])
        assert found.score == pytest.approx(score, abs=1e-4)
        assert (found.passage, found.start, found.end) == (numbers[k], span.start, span.end)
        assert found.answer == texts[k][span.start : span.end]
        by_passage += int(passage_K.argmax()) != k
        by_span += max(spans, key=lambda one: one[1])[2:] != (k, span)
        without_fusion += int(plain_K.argmax()) != int(passage_K.argmax())
    assert by_passage and by_span and without_fusion  # each part of the score changes an answer


def test_a_part_of_a_word_is_no_answer_to_train_on(lettered) -> None:
    kb, graph = lettered
    retrieval = Retrieval(kb, graph, 10)

    def answers(*wanted: str) -> set[str]:
        asked = [Question("1", "on which river lies arden?", wanted)]
        (one,) = graph_retriever.examples_of(kb, retrieval, TOKENIZER, LENGTHS, asked)
        found = set()
        for number, places in zip(one.numbers, one.places, strict=True):
            (passage,) = kb.passages([number])
            (body,) = TOKENIZER.encode_with_offsets([passage.text])
            found |= {passage.text[body.starts[first] : body.ends[first + width]] for first, width in places}
        return found

    assert answers("Ouse", "rive", "the river") == {"Ouse", "the river"}
    with pytest.raises(InputError, match="no training question has an answer"):
        answers("rive")


def test_a_passage_without_words_spoils_no_gradient(ground, graph, tiny_kb) -> None:
    start = load_model(ground.encoder)
    reader = GraphReader(start.reader.bert.bert, start.tokenizer).eval()
    ids = start.tokenizer.encode(["where?"])[0]
    reading = joint_reading([ids] * 2, ["the river", "\x01"], start.tokenizer, start.lengths)
    passage_BK, end_2RT = reader(reading, torch.zeros(1, 2, 2, dtype=torch.int64))
    first = body_start(ids, start.lengths)
    loss = marginal_loss(passage_BK, end_2RT, [[(0, first, first)]])
    loss.backward()
    assert loss.isfinite()
    assert all(one.grad is None or one.grad.isfinite().all() for one in reader.parameters())


# -- retrieval, training, answering


def test_retrieval_begins_with_words_and_named_documents_and_follows_edges(
    tiny_kb, graph, monkeypatch
) -> None:
    monkeypatch.setattr(graph_retriever, "SEEDS", 2)
    retrieval = Retrieval(tiny_kb, graph, 12)
    found = retrieval.ranking("on which river lies kelso?")[0]
    leads = {tiny_kb.passages([n])[0].title for n in found[:3]}
    assert "Kelso" in leads
    assert len(found) == len(set(found)) == 12
    assert set(found) <= set(graph.expand(found[:3], 2, 1000))
    assert retrieval.ranking("zzz?")[0] == []
    chosen, ranked = retrieval.ranking("on which river lies kelso?")
    assert chosen == found
    words = retrieval._retriever.search(["on which river lies kelso?"], 100, "bm25", None)[1][0]
    others = [number for number in words.tolist() if number >= 0 and number not in found]
    (score_N,) = retrieval._retriever.load_bm25().scores(["on which river lies kelso?"])
    plain = [number for number in np.argsort(-score_N, kind="stable") if score_N[number] > 0][:100]
    assert words[words >= 0].tolist() == plain
    assert ranked == [*found, *others]


def test_it_learns_and_answers_from_its_folder_with_evidence(ground, tiny_kb, tmp_path) -> None:
    config = Config(steps=40, batch_size=4, learning_rate=1e-3, warmup=4, dev_every=20, **TINY)
    out = train(ground, tmp_path / "graph", config)
    check_answers(out, tiny_kb, QUESTIONS)
    assert WHOLE_WORDS.items() <= read_system(out)["stages"][-1].items()


def test_an_interrupted_run_ends_as_an_uninterrupted_one(ground, tmp_path) -> None:
    config = Config(**TINY | SHORT)
    check_resumed(
        lambda ground, out: train(ground, out, config), ground, tmp_path, graph_retriever, "marginal_loss", 5
    )


def test_answers_that_the_reader_cuts_off_are_no_examples(tiny_kb, tiny_model_folder, graph) -> None:
    start, retrieval = load_model(tiny_model_folder), Retrieval(tiny_kb, graph, 12)

    def places(lengths: Lengths) -> list[int]:
        """The last wordpiece of each answer in its row."""
        found = graph_retriever.examples_of(tiny_kb, retrieval, start.tokenizer, lengths, QUESTIONS)
        starts = [body_start(start.tokenizer.encode([one.question])[0], lengths) for one in found]
        return [
            start + first + width
            for start, one in zip(starts, found, strict=True)
            for own in one.places
            for first, width in own
        ]

    everything = places(start.lengths)
    longest = max(everything)
    assert min(everything) < longest
    assert sorted(places(replace(start.lengths, reading=longest + 1))) == sorted(
        place for place in everything if place < longest
    )
    with pytest.raises(InputError, match="no training question has an answer"):
        places(replace(start.lengths, reading=8))


def test_a_run_with_tensorboard_keeps_its_events(ground, tmp_path) -> None:
    config = Config(steps=2, batch_size=2, dev_every=2, dev_questions=2, tensorboard=True, **TINY)
    out = train(ground, tmp_path / "out", config)
    assert any((out / "tensorboard").iterdir()) and (out / "metrics.jsonl").is_file()


def test_questions_without_answers_in_the_corpus_are_refused(tiny_kb, tiny_model_folder, tmp_path) -> None:
    ground = Ground(
        tiny_kb, str(tiny_model_folder), [Question("1", "on which river lies Arden?", ("nowhere",))], []
    )
    with pytest.raises(InputError, match="no training question has an answer"):
        train(ground, tmp_path / "out", Config(**TINY))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_reads_in_the_precision_of_its_settings(ground, graph, tiny_kb, precision) -> None:
    start = load_model(ground.encoder)
    reader, retrieval = GraphReader(start.reader.bert.bert, start.tokenizer), Retrieval(tiny_kb, graph, 6)
    system = graph_retriever.GraphRetriever(
        tiny_kb, graph, retrieval, reader, start.tokenizer, start.lengths, precision
    )
    seen = set()
    reader.ends.register_forward_pre_hook(lambda *_: seen.add(torch.is_autocast_enabled("cpu")))
    (found,) = system.answer([QUESTIONS[0].question])
    assert found.answer
    assert seen == {precision == "bf16"}
