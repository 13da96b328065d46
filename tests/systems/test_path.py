"""PathRetriever: losses against plain sums, beam search against an enumeration of all paths; and as a whole, with evidence."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from realm.errors import InputError
from realm.model.folder import load_model
from realm.qa.question_files import Question
from realm.qa.reading import joint_reading
from realm.qa.spans import body_start
from realm.systems import path_retriever
from realm.systems.answer_ends import WHOLE_WORDS
from realm.systems.path_network import CARRIED, END, PathNetwork, beam_search, path_loss, reading_loss
from realm.systems.path_retriever import Config, PathRetriever, train
from realm.systems.system import Ground, read_system
from tests.conftest import RIVERS, TOWNS
from tests.store.tiny import TOKENIZER
from tests.systems.letters import (
    LENGTHS,
    lettered_kb,
    log_probability,
    random_encoder,
    row_of,
    sharpened,
    spans_of,
)
from tests.systems.runs import SHORT, check_answers, check_resumed

QUESTIONS = [
    Question(str(n), f"on which river lies {town}?", (RIVERS[n % 4],)) for n, town in enumerate(TOWNS)
]
TINY = {"device": "cpu", "precision": "fp32", "dropout": 0.0, "log_every": 5}


@pytest.fixture(scope="module")
def ground(tiny_kb, tiny_model_folder) -> Ground:
    return Ground(tiny_kb, str(tiny_model_folder), QUESTIONS, QUESTIONS)


@pytest.fixture(scope="module")
def network(tiny_model_folder) -> PathNetwork:
    torch.manual_seed(0)
    start = load_model(tiny_model_folder)
    return PathNetwork(start.reader.bert.bert, start.tokenizer).eval()


def log_sigmoid(logit: float) -> float:
    return -math.log1p(math.exp(-logit))


def state_after(network: PathNetwork, picked: Sequence[Tensor]) -> np.ndarray:
    """The state after picks, in plain arithmetic."""
    length = float(network.length.detach())
    state = network.begin.detach().numpy()
    state = length * state / np.linalg.norm(state)
    weight, bias = network.step.weight.detach().numpy(), network.step.bias.detach().numpy()
    for one in picked:
        state = weight @ np.concatenate([state, one.numpy()]) + bias
        state = length * state / np.linalg.norm(state)
    return state


def logp_of(network: PathNetwork, passage_KH: Tensor, path: Sequence[int]) -> float:
    """Log-probability of a path that ends, in plain arithmetic."""
    total, picked = 0.0, []
    for pick in [*path, END]:
        vector = network.end.detach() if pick == END else passage_KH[pick]
        total += log_sigmoid(
            float(state_after(network, picked) @ vector.numpy()) + float(network.bias.detach())
        )
        picked.append(vector)
    return total


def test_loss_of_a_path_is_a_mean_over_its_steps_and_their_candidates(network) -> None:
    passage_KH = torch.randn(4, len(network.end))
    allowed_K = torch.tensor([False, True, False, True])  # 0 and 2 hold an answer
    path, losses = [1, 2, END], []
    every = [*passage_KH, network.end.detach()]
    for step, pick in enumerate(path):
        state = state_after(network, [every[one] for one in path[:step]])
        right = 4 if pick == END else pick
        for place in {1, 3, 4, right}:
            logit = float(state @ every[place].numpy()) + float(network.bias.detach())
            losses.append(-log_sigmoid(logit if place == right else -logit))
    with torch.no_grad():
        found = path_loss(network, passage_KH, path, allowed_K)
    assert float(found) == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_loss_of_reading_sums_the_probability_of_every_place() -> None:
    torch.manual_seed(0)
    holds_R, end_2RT = torch.randn(3), torch.randn(2, 3, 5).log_softmax(dim=2)
    places = [[(0, 1), (2, 2)], [], [(3, 4)]]
    p_2RT = end_2RT.exp()
    spans = [
        -math.log(sum(float(p_2RT[0, row, a] * p_2RT[1, row, b]) for a, b in places[row])) for row in (0, 2)
    ]
    held = [
        -log_sigmoid(float(logit) if own else -float(logit))
        for logit, own in zip(holds_R, places, strict=True)
    ]
    plain = sum(held) / 3 + sum(spans) / 2
    assert float(reading_loss(holds_R, end_2RT, places)) == pytest.approx(plain, rel=1e-5)


def test_a_wide_beam_finds_what_an_enumeration_of_all_paths_finds(network) -> None:
    passage_KH = torch.randn(5, len(network.end)) / 4
    links = {0: [3], 1: [0, 4], 2: [], 3: [4], 4: [1]}
    seeds = [0, 1]
    with torch.no_grad():
        found = beam_search(network, seeds, links.__getitem__, lambda n: passage_KH[list(n)], 2, 100)
    # With two seeds, both are carried: the next candidates are the links and the other seed.
    paths = [(one,) for one in seeds]
    for one in seeds:
        paths += [(one, other) for other in sorted({*links[one], *seeds} - {one})]
    wanted = sorted(paths, key=lambda path: -logp_of(network, passage_KH, path))
    assert [one.path for one in found] == wanted
    for one in found:
        assert one.logp == pytest.approx(logp_of(network, passage_KH, one.path), rel=1e-4)


def plain_beam_search(
    network, seeds, links, passage_KH, passages, beam
) -> list[tuple[tuple[int, ...], float]]:
    """Paths and their log-probabilities; every candidate of every path is encoded and grown on its own."""
    ended, open_paths = [], [((), 0.0, list(seeds))]
    for _ in range(passages):
        grown = []
        for path, logp, candidates in open_paths:
            state = state_after(network, [passage_KH[one] for one in path])
            step = {
                one: log_sigmoid(float(state @ passage_KH[one].numpy()) + float(network.bias.detach()))
                for one in candidates
            }
            ranked = sorted(candidates, key=lambda one: -step[one])[: CARRIED + 1]
            for pick in candidates:
                following = [*links(pick), *[one for one in ranked if one != pick][:CARRIED]]
                after = (*path, pick)
                grown.append(
                    (after, logp + step[pick], [one for one in dict.fromkeys(following) if one not in after])
                )
        grown.sort(key=lambda one: -one[1])
        open_paths = grown[:beam]
        ended += [(path, logp_of(network, passage_KH, path)) for path, _, _ in open_paths]
    return sorted(ended, key=lambda one: -one[1])[:beam]


@pytest.mark.parametrize("seed", range(8))
def test_a_narrow_beam_is_that_of_a_plain_search_and_encodes_each_passage_once(network, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    passage_KH = torch.randn(12, len(network.end), generator=generator) / 4
    drawn = torch.randint(12, (12, 3), generator=generator).tolist()
    encoded: list[int] = []

    def encode(numbers: Sequence[int]) -> Tensor:
        encoded.extend(numbers)
        return passage_KH[list(numbers)]

    with torch.no_grad():
        found = beam_search(network, range(5), drawn.__getitem__, encode, 3, 4)
    wanted = plain_beam_search(network, range(5), drawn.__getitem__, passage_KH, 3, 4)
    assert [one.path for one in found] == [path for path, _ in wanted]
    np.testing.assert_allclose([one.logp for one in found], [logp for _, logp in wanted], rtol=1e-4)
    assert len(encoded) == len(set(encoded))


def test_the_vector_of_a_passage_is_the_same_without_the_states_of_its_words(
    network, tiny_model_folder
) -> None:
    model = load_model(tiny_model_folder)
    asked = model.tokenizer.encode(["where is it?"] * 3)
    reading = joint_reading(asked, ["the river", "a", "a b c d"], model.tokenizer, model.lengths)
    tokens = reading.tokens
    with torch.no_grad():
        found_KH = network.encoded(reading)
        state_BTH = network.encoder(tokens.ids_BT, tokens.mask_BT, tokens.segments_BT)
    assert not network.training
    torch.testing.assert_close(found_KH, state_BTH[:, 0], rtol=1e-4, atol=1e-5)


def test_a_beam_of_one_grows_the_best_path_alone(network) -> None:
    passage_KH = torch.randn(4, len(network.end)) / 4
    with torch.no_grad():
        (found,) = beam_search(network, [0, 1, 2], lambda _: [3], lambda n: passage_KH[list(n)], 1, 1)
        logit_K = network.logits(network.first(), passage_KH[:3])
    assert found.path == (int(logit_K.argmax()),)


def test_paths_repeat_no_passage_and_end_where_nothing_follows(network) -> None:
    passage_KH = torch.randn(3, len(network.end)) / 4
    with torch.no_grad():
        found = beam_search(network, [0], lambda _: [0, 1], lambda n: passage_KH[list(n)], 4, 100)
    assert {one.path for one in found} == {(0,), (0, 1)}


def test_training_paths_end_in_an_answer_and_begin_where_another_names_it(ground, tiny_kb, tmp_path) -> None:
    start = load_model(ground.encoder)
    graph = path_retriever.PassageGraph.open(tiny_kb, tmp_path / "system")
    for one in path_retriever.examples_of(tiny_kb, graph, start.tokenizer, QUESTIONS):
        texts = [passage.text for passage in tiny_kb.passages(one.numbers)]
        (answer,) = one.question.answers
        assert one.held == {place for place, text in enumerate(texts) if answer in text}
        pairs = {
            (before, last, END)
            for before, last in itertools.permutations(range(len(texts)), 2)
            if before not in one.held
            and last in one.held
            and one.numbers[last] in path_retriever.links_of(graph, one.numbers[before])
        }
        assert {tuple(path) for path in one.paths} == {(place, END) for place in one.held} | pairs


def test_passages_that_a_path_links_to_are_negatives_unless_they_hold_an_answer(
    ground, network, tiny_kb, tmp_path, monkeypatch
) -> None:
    start = load_model(ground.encoder)
    graph = path_retriever.PassageGraph.open(tiny_kb, tmp_path / "system")
    monkeypatch.setattr(path_retriever, "SEEDS", 2)
    monkeypatch.setattr(path_retriever, "NEGATIVES", 50)
    system = path_retriever.PathRetriever(tiny_kb, graph, network, start.tokenizer, start.lengths)
    seen = []
    monkeypatch.setattr(
        system, "_encode", lambda _, numbers: seen.append(numbers) or torch.zeros(len(numbers), 4)
    )
    monkeypatch.setattr(path_retriever, "path_loss", lambda *args: args[1].sum())
    texts = [passage.text for passage in tiny_kb]
    linked = 0
    for one in path_retriever.examples_of(tiny_kb, graph, start.tokenizer, QUESTIONS):
        seen.clear()
        system.loss(one, np.random.default_rng(0))
        (numbers,) = seen
        (answer,) = one.question.answers
        found = [number for number in numbers if number not in one.numbers]
        paths = [[one.numbers[place] for place in path[:-1]] for path in one.paths]
        path = next(path for path in paths if path == numbers[: len(path)])
        links = {to for number in path for to in path_retriever.links_of(graph, number)}
        assert set(found) == {to for to in links if to not in one.numbers and answer not in texts[to]}
        linked += len(found)
    assert linked


@pytest.fixture(scope="module")
def lettered(tmp_path_factory) -> PathRetriever:
    """A system with random weights; words have several wordpieces, and passages have several paragraphs."""
    folder = tmp_path_factory.mktemp("lettered")
    kb = lettered_kb(folder / "kb")
    network = PathNetwork(random_encoder(3), TOKENIZER).eval()
    network.reader = random_encoder(2)
    sharpened([network.step, network.holds, network.ends], 3)
    with torch.no_grad():  # a path more often ends after two passages than after one
        cls_H = row_of(network.encoder, QUESTIONS[0].question, next(iter(kb)).text).state_TH[0]
        after_one_H = network.next(network.first(), cls_H)
        network.end.copy_(8 * (network.next(after_one_H, cls_H) - after_one_H))
    graph = path_retriever.PassageGraph.open(kb, folder / "system")
    return PathRetriever(kb, graph, network, TOKENIZER, LENGTHS)


def joined(texts: Sequence[str]) -> str:
    """Passages of a path as paragraphs, so that a span within one paragraph is within one passage."""
    return "\n\n".join(texts)


def test_the_answer_is_the_best_span_of_the_path_that_the_reader_ranks_first(lettered) -> None:
    """Every path is read on its own, and every span is scored on its own."""
    network, graph = lettered._network, lettered._graph
    text_N = [passage.text for passage in lettered._kb]
    from_middle, from_second = 0, 0
    for question in (one.question for one in QUESTIONS[:8]):
        _, number_BK = lettered._retriever.search([question], 100, "bm25", None)
        ranked = [number for number in number_BK[0].tolist() if number >= 0]
        passage_NH = torch.stack([row_of(network.encoder, question, text).state_TH[0] for text in text_N])
        paths = plain_beam_search(
            network, ranked[: path_retriever.SEEDS], lambda one: path_retriever.links_of(graph, one),
            passage_NH, path_retriever.PASSAGES, path_retriever.BEAM,
        )  # fmt: skip
        read = []
        for rank, (path, _) in enumerate(paths):
            text = joined([text_N[number] for number in path])
            row = row_of(network.reader, question, text)
            holds = float(network.holds(row.state_TH[0]).detach())
            read.append((holds, rank, path, text, max(spans_of(row, network.ends.score, text))))
        holds, rank, path, text, span = max(read)
        in_second = span.start > len(text_N[path[0]])
        before = len(joined([text_N[path[0]], ""])) if in_second else 0
        (found,) = lettered.answer([question])
        assert found.score == pytest.approx(log_sigmoid(holds) + span.logp, abs=1e-4)
        assert found.passage == path[int(in_second)]
        assert (found.start, found.end) == (span.start - before, span.end - before)
        assert found.answer == text[span.start : span.end] == text_N[found.passage][found.start : found.end]
        of_paths = [number for one, _ in paths for number in one]
        assert found.read == len(set(of_paths))
        assert list(found.number_K) == list(dict.fromkeys([*of_paths, *ranked]))[:100]
        from_middle += 0 < rank < len(paths) - 1
        from_second += in_second
    assert from_middle and from_second


def test_a_part_of_a_word_is_no_answer_to_train_on(lettered) -> None:
    asked = Question("1", "on which river lies arden?", ("rive", "buri"))
    with pytest.raises(InputError, match="no training question has an answer"):
        path_retriever.examples_of(lettered._kb, lettered._graph, TOKENIZER, [asked])


def test_the_reader_is_trained_on_the_path_and_on_one_negative(lettered, monkeypatch) -> None:
    network, kb = lettered._network, lettered._kb
    encoded: list[list[int]] = []
    monkeypatch.setattr(lettered, "_encode", lambda _, numbers: encoded.append(numbers) or torch.zeros(1))
    monkeypatch.setattr(path_retriever, "path_loss", lambda *_: torch.zeros(()))
    lengths, two_texts = set(), 0
    examples = path_retriever.examples_of(kb, lettered._graph, TOKENIZER, QUESTIONS[:8])
    for example in examples:
        for seed in range(3):
            encoded.clear()
            with torch.no_grad():
                loss = float(lettered.loss(example, np.random.default_rng(seed)))
            (numbers,) = encoded
            texts = [passage.text for passage in kb.passages(numbers)]
            (answer,) = example.question.answers
            held = next(place for place, text in enumerate(texts) if answer in text)  # ends the path
            read, plain = (
                [(joined(texts[: held + 1]), True), *((text, False) for text in texts[held + 1 :][:1])],
                0.0,
            )
            for text, is_right in read:
                row = row_of(network.reader, example.question.question, text)
                holds = float(network.holds(row.state_TH[0]).detach())
                plain -= log_sigmoid(holds if is_right else -holds) / len(read)
                if is_right:
                    plain -= log_probability(row, network.ends.score, text, answer)
            assert loss == pytest.approx(plain, abs=1e-3)
            lengths.add(held + 1)
            two_texts += len(read) == 2
    assert lengths == {1, 2} and two_texts


def test_a_passage_without_words_spoils_no_gradient(network, tiny_model_folder) -> None:
    tokenizer, lengths = load_model(tiny_model_folder).tokenizer, load_model(tiny_model_folder).lengths
    reading = joint_reading(tokenizer.encode(["where?"] * 2), ["the river", "\x01"], tokenizer, lengths)
    first = body_start(tokenizer.encode(["where?"])[0], lengths)
    loss = reading_loss(*network.read(reading), [[(first, first)], []])
    loss.backward()
    assert loss.isfinite()
    assert all(one.grad is None or one.grad.isfinite().all() for one in network.parameters())
    network.zero_grad()


def test_it_learns_and_answers_from_its_folder_with_evidence(ground, tiny_kb, tmp_path) -> None:
    config = Config(steps=20, batch_size=4, learning_rate=2e-3, warmup=2, dev_every=20, **TINY)
    out = train(ground, tmp_path / "path", config)
    check_answers(out, tiny_kb, QUESTIONS)
    assert WHOLE_WORDS.items() <= read_system(out)["stages"][-1].items()


def test_an_interrupted_run_ends_as_an_uninterrupted_one(ground, tmp_path) -> None:
    config = Config(**TINY | SHORT)
    check_resumed(
        lambda ground, out: train(ground, out, config), ground, tmp_path, path_retriever, "path_loss", 9
    )


def test_questions_without_answers_in_the_corpus_are_refused(tiny_kb, tiny_model_folder, tmp_path) -> None:
    question = Question("1", "on which river lies Arden?", ("nowhere",))
    ground = Ground(tiny_kb, str(tiny_model_folder), [question], [])
    with pytest.raises(InputError, match="no training question has an answer"):
        train(ground, tmp_path / "out", Config(**TINY))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_reads_in_the_precision_of_its_settings(tiny_kb, tiny_model_folder, tmp_path, precision) -> None:
    start = load_model(tiny_model_folder)
    network = PathNetwork(start.reader.bert.bert, start.tokenizer)
    graph = path_retriever.PassageGraph.open(tiny_kb, tmp_path / "system")
    system = path_retriever.PathRetriever(tiny_kb, graph, network, start.tokenizer, start.lengths, precision)
    seen = set()
    network.ends.register_forward_pre_hook(lambda *_: seen.add(torch.is_autocast_enabled("cpu")))
    (found,) = system.answer([QUESTIONS[0].question])
    assert found.answer
    assert seen == {precision == "bf16"}
