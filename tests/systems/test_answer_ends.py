"""Spans of whole words in one paragraph, against plain loops."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

from realm.errors import InputError
from realm.model.states import hidden_states
from realm.qa.reading import joint_reading
from realm.systems.answer_ends import ANSWER_TOKENS, AnswerEnds, answer_scores
from realm.systems.graph_retriever import GraphReader
from realm.systems.path_network import PathNetwork
from realm.systems.system import SystemModel, load_system
from tests.store.tiny import TOKENIZER, make
from tests.systems.letters import LENGTHS, logp_of_ends, random_encoder, row_of, spans_of

QUESTION = "where is it?"
TEXTS = ["It is in Kelso.", "\x01", "a b\n\nKelso\n\nab 12 c, d", "Arden"]


def test_probabilities_are_those_of_a_softmax_over_the_words() -> None:
    encoder = random_encoder(0)
    ends = AnswerEnds(encoder.config, TOKENIZER)
    asked = TOKENIZER.encode([QUESTION]) * len(TEXTS)
    reading = joint_reading(asked, TEXTS, TOKENIZER, LENGTHS)
    with torch.no_grad():
        state_RTH = hidden_states(encoder, reading.tokens)
        end_2RT = ends(state_RTH, reading)
    for number, text in enumerate(TEXTS):
        wanted_2T = torch.full(end_2RT.shape[::2], -torch.inf)
        if text != "\x01":
            row = row_of(encoder, QUESTION, text)
            for end, logp in enumerate(logp_of_ends(row, ends.score)):
                for place, value in logp.items():
                    wanted_2T[end, place] = value
            assert torch.isfinite(wanted_2T).sum() < 2 * len(row.body)  # some wordpieces continue a word
        torch.testing.assert_close(end_2RT[:, number], wanted_2T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_all_spans_within_one_paragraph(seed) -> None:
    encoder = random_encoder(seed)
    ends = AnswerEnds(encoder.config, TOKENIZER)
    texts = [text for text in TEXTS if text != "\x01"]
    reading = joint_reading(TOKENIZER.encode([QUESTION]) * len(texts), texts, TOKENIZER, LENGTHS)
    with torch.no_grad():
        score_RWT = answer_scores(ends(hidden_states(encoder, reading.tokens), reading), reading, texts)
    assert score_RWT.shape == (len(texts), ANSWER_TOKENS, reading.tokens.ids_BT.shape[1])
    for number, text in enumerate(texts):
        found = {
            reading.text_span(number, first, first + width): float(score_RWT[number, width, first])
            for width, first in score_RWT[number].isfinite().nonzero().tolist()
        }
        plain = {
            (one.start, one.end): one.logp
            for one in spans_of(row_of(encoder, QUESTION, text), ends.score, text)
        }
        assert found == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize(("name", "network_of"), [("graph", GraphReader), ("path", PathNetwork)])
def test_a_system_of_the_version_with_parts_of_words_is_refused(name, network_of, tmp_path) -> None:
    encoder, kb = random_encoder(0), make(tmp_path / "kb")
    network = network_of(encoder, TOKENIZER)
    sizes = {"encoder": asdict(encoder.config), "lengths": asdict(LENGTHS), "passages": 10}
    SystemModel(name, network, sizes, TOKENIZER).save(tmp_path / "new")
    load_system(tmp_path / "new", kb)
    network.ends = nn.Linear(encoder.config.hidden_size, 2)
    SystemModel(name, network, sizes, TOKENIZER).save(tmp_path / "old")
    with pytest.raises(InputError, match="was trained by another version of realm: remove the folder"):
        load_system(tmp_path / "old", kb)
