"""`realm fill`: the marginal over passages and the effect of each, against a plain sum over outputs of BertForMaskedLM."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from realm.errors import InputError
from realm.index.embedding import embed_passages
from realm.qa import filling
from realm.qa.filling import Filler
from realm.qa.pipeline import AnswerConfig
from realm.search.bm25 import Bm25Index
from realm.tokens.layouts import passage_inputs, query_inputs
from tests.qa.conftest import PASSAGE_KEYS
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
        vectors = embed_passages(model, kb.tokens, np.arange(len(kb)))
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


def widened(sentence: str, mask: int, pieces: int) -> str:
    """The sentence with `pieces` masks in place of one mask."""
    parts = sentence.split("[MASK]")
    between = ["[MASK]"] * (len(parts) - 1)
    between[mask] = " ".join(["[MASK]"] * pieces)
    return parts[0] + "".join(one + part for one, part in zip(between, parts[1:], strict=True))


def vocabulary(filler: Filler) -> tuple[list[int], list[int]]:
    """Wordpieces that can begin a word, and wordpieces that continue a word."""
    pieces = list(enumerate(filler.model.tokenizer.vocabulary()))
    first = [
        i for i, p in pieces if not p.startswith("##") and p not in "[PAD] [UNK] [CLS] [SEP] [MASK]".split()
    ]
    return first, [i for i, p in pieces if p.startswith("##")]


def words_by_hand(filler: Filler, mask: int) -> dict[str, float]:
    """p(y|x) of every word of one or two wordpieces: a plain sum over passages of products over wordpieces."""
    spelled, (first, later) = filler.model.tokenizer.vocabulary(), vocabulary(filler)
    _, prior, logp = by_hand(filler, SENTENCE)
    one = torch.einsum("k,kv->v", prior.exp(), logp[:, mask].exp())
    found = {spelled[v]: float(one[v]) for v in first}
    _, prior, logp = by_hand(filler, widened(SENTENCE, mask, 2))
    begun, ended = (logp[:, mask + place].exp() for place in (0, 1))
    two = torch.einsum("k,ku,kv->uv", prior.exp(), begun[:, first], ended[:, later])
    pairs = [(row, column) for row in range(len(first)) for column in range(len(later))]
    spellings = [spelled[first[row]] + spelled[later[column]].removeprefix("##") for row, column in pairs]
    own = filler.model.tokenizer.encode(spellings)
    return found | {
        spelling: float(two[row, column])
        for (row, column), spelling, pieces in zip(pairs, spellings, own, strict=True)
        if pieces == [first[row], later[column]]
    }


def test_predictions_are_the_words_that_the_marginal_over_null_and_seven_passages_prefers(
    filler, tiny_kb, monkeypatch
) -> None:
    monkeypatch.setattr(filling, "PIECES", 2)
    best, prior, logp = by_hand(filler, SENTENCE)
    said = filler.fill(SENTENCE)
    assert len(said.masks) == 2
    for mask, predictions in enumerate(said.masks):
        words = words_by_hand(filler, mask)
        top = sorted(words, key=words.__getitem__, reverse=True)[:5]
        assert [p.text for p in predictions] == top
        np.testing.assert_allclose(
            [p.probability for p in predictions], [words[word] for word in top], rtol=1e-3
        )
    own = filler.model.tokenizer.encode([predictions[0].text for predictions in said.masks])
    assert all(len(pieces) == 1 for pieces in own)
    assert [effect.id for effect in said.passages] == [tiny_kb.ids[n] for n in best]
    assert [effect.rank for effect in said.passages] == [1, 2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose([e.probability for e in said.passages], prior[1:].exp(), rtol=1e-2)
    words = torch.tensor([pieces[0] for pieces in own])
    likelihood = logp[:, torch.arange(2), words].sum(dim=1).exp()
    np.testing.assert_allclose(
        [said.null.likelihood, *(effect.likelihood for effect in said.passages)], likelihood, rtol=1e-3
    )


def test_probabilities_add_up_and_utilities_are_gains_over_the_null_passage(filler, monkeypatch) -> None:
    monkeypatch.setattr(filling, "PREDICTIONS", filler.model.tokenizer.vocab_size)
    monkeypatch.setattr(filling, "PIECES", 1)
    said = filler.fill(SENTENCE)
    _, prior, logp = by_hand(filler, SENTENCE)
    first, _ = vocabulary(filler)
    for mask, predictions in enumerate(said.masks):
        no_words = (prior[:, None] + logp[:, mask]).logsumexp(dim=0).exp()
        no_words[first] = 0
        assert sum(p.probability for p in predictions) == pytest.approx(1 - float(no_words.sum()), abs=1e-3)
    total = said.null.probability + sum(effect.probability for effect in said.passages)
    assert total == pytest.approx(1, abs=1e-4)
    for effect in said.passages:
        gain = np.log(effect.likelihood) - np.log(said.null.likelihood)
        assert effect.utility == pytest.approx(gain, abs=1e-3)
    assert len({round(effect.utility, 3) for effect in said.passages}) > 1


def test_json_and_lines_have_the_same_content(filler) -> None:
    said = filler.fill(SENTENCE)
    row = json.loads(json.dumps(said.to_json()))
    assert row.keys() == {"sentence", "masks", "null", "passages"}
    assert row["masks"][0][0].keys() == {"text", "probability"}
    assert row["null"].keys() == {"probability", "likelihood"}
    assert row["passages"][0].keys() == PASSAGE_KEYS | {"likelihood", "utility"}
    lines = said.lines()
    assert len(lines) == 2 + 1 + 7 and all("\n" not in line for line in lines)
    assert row["masks"][0][0]["text"] in lines[0] and row["passages"][0]["title"] in lines[3]


def test_a_passage_without_a_title_has_the_id_of_its_document_in_the_lines(filler) -> None:
    said = filler.fill(SENTENCE)
    untitled = replace(said.passages[0], title="", document="crawl.jsonl:7")
    assert "  crawl.jsonl:7: " in replace(said, passages=[untitled]).lines()[3]


def test_every_word_of_one_or_two_pieces_has_its_marginal_and_no_other_does(filler, monkeypatch) -> None:
    monkeypatch.setattr(filling, "PREDICTIONS", 10**6)
    visible = SENTENCE.replace("[MASK]", " ")
    ids, places, _ = filler._masked(SENTENCE)
    for mask, place in enumerate(places):
        found = [
            word
            for width in (1, 2)
            for word in filler._words(
                filler._read(filler._widened(ids, {place: width}), visible, "dense"), mask, width
            )
        ]
        words = words_by_hand(filler, mask)
        assert sum(len(word.pieces) == 2 for word in found) > 5000
        predictions = [word.prediction for word in found]
        assert len(predictions) == len({p.text for p in predictions}) == len(words)
        np.testing.assert_allclose(
            [p.probability for p in predictions], [words[p.text] for p in predictions], rtol=1e-3
        )


def test_predictions_have_as_many_wordpieces_as_the_best_so_that_they_add_up(filler, monkeypatch) -> None:
    monkeypatch.setattr(filling, "PREDICTIONS", 10**6)
    monkeypatch.setattr(filling, "PIECES", 2)
    for mask, predictions in enumerate(filler.fill(SENTENCE).masks):
        words = words_by_hand(filler, mask)
        best = max(words, key=lambda word: words[word])
        assert predictions[0].text == best
        own = filler.model.tokenizer.encode([p.text for p in predictions])
        assert len({len(pieces) for pieces in own}) == 1
        assert sum(p.probability for p in predictions) <= 1 + 1e-4


@pytest.mark.parametrize("target", ["salt", "qx7", "Berthe salt"])
def test_a_target_is_scored_with_and_without_retrieval_and_beside_each_passage(
    filler, tiny_kb, target
) -> None:
    """Targets of one wordpiece, of one word of three wordpieces, and of two words."""
    sentence = "Arden lies on the river [MASK] between the hills."
    (pieces,) = filler.model.tokenizer.encode([target])
    assert len(pieces) == {"salt": 1, "qx7": 3, "Berthe salt": 2}[target]
    best, prior, logp = by_hand(filler, widened(sentence, 0, len(pieces)))
    likelihood = torch.stack([logp[:, t, piece] for t, piece in enumerate(pieces)]).sum(dim=0).exp()
    said = filler.fill(sentence, target)
    assert said.target is not None
    assert said.target.probability == pytest.approx(float((prior.exp() * likelihood).sum()), rel=1e-3)
    assert said.null.likelihood == pytest.approx(float(likelihood[0]), rel=1e-3)
    assert [e.id for e in said.passages] == [tiny_kb.ids[n] for n in best]
    np.testing.assert_allclose([e.likelihood for e in said.passages], likelihood[1:], rtol=1e-3)
    np.testing.assert_allclose(
        [e.utility for e in said.passages], (likelihood[1:] / likelihood[0]).log(), atol=1e-3
    )
    np.testing.assert_allclose([e.probability for e in said.passages], prior[1:].exp(), rtol=1e-2)
    row = json.loads(json.dumps(said.to_json()))
    assert row["target"] == {
        "text": target,
        "probability": said.target.probability,
        "without_retrieval": said.null.likelihood,
    }
    assert row["masks"] == filler.fill(sentence).to_json()["masks"]
    assert f"p({target}|x) {said.target.probability:.3g} with retrieval" in said.lines()[1]


def test_the_best_word_as_target_has_the_probability_of_the_prediction(filler) -> None:
    sentence = "Arden lies on the river [MASK] between the hills."
    best, *_ = filler.fill(sentence).masks[0]
    again = filler.fill(sentence, best.text)
    assert again.target is not None and again.target.text == best.text
    assert again.target.probability == pytest.approx(best.probability, rel=1e-5)
    assert replace(again, target=None) == filler.fill(sentence)


def test_passages_of_a_sentence_are_found_by_the_named_method_and_weighed_by_the_model(
    filler, tiny_kb
) -> None:
    sentence = "Arden lies on the river [MASK] between the hills."
    by_words = (
        Bm25Index(tiny_kb.titles, tiny_kb.texts()).search([sentence.replace("[MASK]", "")], 7).number_BK[0]
    )
    said = filler.fill(sentence, method="bm25")
    assert [e.id for e in said.passages] == [tiny_kb.ids[n] for n in by_words]
    query = filler.model.embedder.query(
        query_inputs(
            [filler.model.tokenizer.encode_masked(sentence)], filler.model.tokenizer, filler.model.lengths
        )
    )[0]
    ratio = filler.version.index.rows(by_words) @ query.detach()
    found = torch.tensor([e.probability for e in said.passages]).log()
    np.testing.assert_allclose(found - found[0], ratio - ratio[0], atol=2e-2)


@pytest.mark.parametrize(
    ("sentence", "target", "message"),
    [
        (SENTENCE, "salt", r"one \[MASK\], but it has 2"),
        ("wool " * 28 + "[MASK]", "x" * 3, r"3 wordpieces, but the model can read only 2"),
        ("The [MASK]", "日本", "no wordpieces for the target"),
        ("The [MASK]", " ", "no wordpieces for the target"),
        ("[MASK] " * 9, None, "has 9 masks, but at most 8"),
    ],
)
def test_targets_and_sentences_that_cannot_be_filled_are_one_line(filler, sentence, target, message) -> None:
    with pytest.raises(InputError, match=message) as error:
        filler.fill(sentence, target)
    assert "\n" not in str(error.value)


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
    with pytest.raises(
        InputError, match=r"last .* is wordpiece 31, but the model reads only the first 30"
    ) as error:
        filler.fill("wool " + fits)
    assert "\n" not in str(error.value)


def test_emptied_knowledge_base_leaves_the_null_passage(own_kb, tiny_model_folder) -> None:
    own_kb.delete([f"d{n}" for n in range(14)])
    said = Filler.load(str(own_kb.folder), str(tiny_model_folder), CONFIG).fill(SENTENCE)
    assert said.passages == [] and said.null.probability == 1.0
