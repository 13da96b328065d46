"""`realm fill`: the marginal over passages, and what each did, against a plain sum over BertForMaskedLM's own outputs."""

import json

import numpy as np
import pytest
import torch

from realm.config import InputError
from realm.qa import filling
from realm.qa.filling import Filler
from realm.qa.pipeline import AnswerConfig
from realm.retrieval.embedding import embed_passages
from realm.text.inputs import passage_inputs, query_inputs
from tests.transformers_twin import masked_twin

CONFIG = AnswerConfig(device="cpu")
SENTENCE = "Arden lies on the river [MASK] between [MASK] and the hills."


@pytest.fixture(scope="module")
def filler(tiny_kb, tiny_model_folder) -> Filler:
    filler = Filler.load(str(tiny_kb.folder), str(tiny_model_folder), CONFIG)
    with torch.no_grad():
        for parameter in filler.model.reader.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)  # a reader to whom passages make a difference
    return filler


def by_hand(filler: Filler, sentence: str):
    """Passage numbers of the candidates, log p(z|x) [K], and log p(word|z,x) at each mask [K, P, V]."""
    model, kb = filler.model, filler.kb
    tokenizer = model.tokenizer
    ids = tokenizer.encode_masked(sentence)
    places = [place for place, token in enumerate(ids) if token == tokenizer.mask_id]
    with torch.no_grad():
        query = model.embedder.query(query_inputs([ids], tokenizer, model.lengths))[0]
        vectors = embed_passages(
            model.embedder.passage, kb.tokens, np.arange(len(kb)), tokenizer, model.lengths, model.device
        )
        best = (torch.from_numpy(vectors).float() @ query).argsort(descending=True)[:7].tolist()
        titles = [[], *(kb.tokens.title.row(n) for n in best)]
        bodies = [[], *(kb.tokens.body.row(n) for n in best)]
        prior = (
            model.embedder.passage(passage_inputs(titles, bodies, tokenizer, model.lengths)) @ query
        ).log_softmax(0)
        rows, plain = [], masked_twin(model.reader.bert)
        for body in bodies:
            joint = [tokenizer.cls_id, *ids, tokenizer.sep_id, *body, tokenizer.sep_id]
            segments = [0] * (len(ids) + 2) + [1] * (len(body) + 1)
            logits = plain(torch.tensor([joint]), token_type_ids=torch.tensor([segments])).logits[0]
            rows.append(logits[[place + 1 for place in places]].log_softmax(-1))
    return best, prior, torch.stack(rows)


def test_predictions_are_the_marginal_over_null_and_seven_passages(filler, tiny_kb) -> None:
    best, prior, logp = by_hand(filler, SENTENCE)
    said = filler.fill(SENTENCE)
    marginal = (prior[:, None, None] + logp).logsumexp(dim=0).exp()
    assert len(said.masks) == 2
    for predictions, probability_V in zip(said.masks, marginal, strict=True):
        top = probability_V.topk(5)
        assert [p.text for p in predictions] == filler.model.tokenizer.tokens(top.indices.tolist())
        np.testing.assert_allclose([p.probability for p in predictions], top.values, rtol=1e-3)
    assert [effect.evidence.passage.id for effect in said.passages] == [tiny_kb.ids[n] for n in best]
    assert [effect.evidence.rank for effect in said.passages] == [1, 2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose([e.evidence.probability for e in said.passages], prior[1:].exp(), rtol=1e-2)
    words = marginal.argmax(dim=-1)
    likelihood = logp[:, torch.arange(2), words].sum(dim=1).exp()
    np.testing.assert_allclose(
        [said.null_likelihood, *(effect.likelihood for effect in said.passages)], likelihood, rtol=1e-3
    )


def test_probabilities_add_up_and_utilities_are_gains_over_the_null_passage(filler, monkeypatch) -> None:
    monkeypatch.setattr(filling, "PREDICTIONS", filler.model.tokenizer.vocab_size)
    said = filler.fill(SENTENCE)
    for predictions in said.masks:
        assert sum(p.probability for p in predictions) == pytest.approx(1, abs=1e-3)
    total = said.null_probability + sum(effect.evidence.probability for effect in said.passages)
    assert total == pytest.approx(1, abs=1e-4)
    for effect in said.passages:
        gain = np.log(effect.likelihood) - np.log(said.null_likelihood)
        assert effect.utility == pytest.approx(gain, abs=1e-3)
    assert len({round(effect.utility, 3) for effect in said.passages}) > 1


def test_json_and_lines_say_the_same(filler) -> None:
    said = filler.fill(SENTENCE)
    row = json.loads(json.dumps(said.to_json()))
    assert row.keys() == {"sentence", "masks", "null", "passages"}
    assert row["masks"][0][0].keys() == {"text", "probability"}
    assert row["null"].keys() == {"probability", "likelihood"}
    assert row["passages"][0].keys() == {
        "id",
        "title",
        "text",
        "rank",
        "probability",
        "likelihood",
        "utility",
    }
    lines = said.lines()
    assert len(lines) == 2 + 1 + 7 and all("\n" not in line for line in lines)
    assert row["masks"][0][0]["text"] in lines[0] and row["passages"][0]["title"] in lines[3]


def test_filling_twice_gives_the_same(filler) -> None:
    assert filler.fill(SENTENCE) == filler.fill(SENTENCE)


@pytest.mark.parametrize("sentence", ["", "no mask here", "[mask] [MASK", "wool " * 200])
def test_sentence_without_a_mask_is_one_line(filler, sentence) -> None:
    with pytest.raises(InputError, match=r"no \[MASK\]") as error:
        filler.fill(sentence)
    assert "\n" not in str(error.value)


def test_mask_beyond_what_the_model_reads_is_one_line_not_left_out(filler) -> None:
    fits = "wool " * 28 + "[MASK] [MASK]"
    assert len(filler.fill(fits).masks) == 2
    with pytest.raises(InputError, match=r"last .* is wordpiece 31, the model reads the first 30") as error:
        filler.fill("wool " + fits)
    assert "\n" not in str(error.value)


def test_emptied_knowledge_base_leaves_the_null_passage(own_kb, tiny_model_folder) -> None:
    own_kb.delete([f"d{n}" for n in range(14)])
    said = Filler.load(str(own_kb.folder), str(tiny_model_folder), CONFIG).fill(SENTENCE)
    assert said.passages == [] and said.null_probability == 1.0
