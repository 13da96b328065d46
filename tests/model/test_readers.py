"""Readers against plain transformers forwards and explicit loops."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from transformers import BertForMaskedLM

from realm.model import masked_reader
from realm.model.bert import Bert
from realm.model.span_reader import SpanReader, body_mask
from realm.tokens.layouts import Tokens, joint_inputs
from realm.tokens.tokenizer import Tokenizer
from tests.model.networks import CONFIG, LENGTHS, VOCAB, masked_batch, plain_states, some_ids
from tests.transformers_twin import masked_twin


def plain_logp(bert: BertForMaskedLM, joint: Tokens, position_BM, target_BM, mask_BM) -> torch.Tensor:
    """Row by row, mask by mask, through the whole BertForMaskedLM."""
    queries, most = position_BM.shape
    candidates = len(joint.ids_BT) // queries
    rows = []
    for row in range(len(joint.ids_BT)):
        real = int(joint.mask_BT[row].sum())
        logits = bert(
            joint.ids_BT[row : row + 1, :real], token_type_ids=joint.segments_BT[row : row + 1, :real]
        ).logits[0]
        query = row // candidates
        values = [
            logits[position_BM[query, m]].log_softmax(-1)[target_BM[query, m]]
            if mask_BM[query, m]
            else torch.zeros(())
            for m in range(most)
        ]
        rows.append(torch.stack(values))
    return torch.stack(rows).view(queries, candidates, most)


@pytest.mark.parametrize("at_once", [4, 64])
def test_token_logp_equals_a_plain_loop_over_unpadded_rows(reader, tokenizer, monkeypatch, at_once) -> None:
    monkeypatch.setattr(masked_reader, "ROWS_AT_ONCE", at_once)
    batch = masked_batch(tokenizer, queries=5, candidates=3)
    with torch.no_grad():
        assert torch.allclose(
            reader.token_logp(*batch), plain_logp(masked_twin(reader.bert), *batch), atol=1e-4
        )


def test_token_logp_passes_on_the_gradient_of_the_plain_loop(reader, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(masked_reader, "ROWS_AT_ONCE", 4)
    batch = masked_batch(tokenizer, queries=3, candidates=3)
    weights = torch.randn(3, 3, 3)
    gradients = []
    plain = masked_twin(reader.bert)
    for network, function in ((reader, reader.token_logp), (plain, partial(plain_logp, plain))):
        (function(*batch) * weights).sum().backward()
        gradients.append([p.grad for p in network.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-3)


def test_token_logp_is_the_targets_part_of_vocabulary_logp(reader, tokenizer) -> None:
    joint, position, target, mask = masked_batch(tokenizer, queries=4, candidates=3)
    with torch.no_grad():
        token = reader.token_logp(joint, position, target, mask)
        vocabulary = reader.vocabulary_logp(joint, position, mask)
    assert torch.allclose(vocabulary.exp().sum(-1), torch.ones(vocabulary.shape[:2]), atol=1e-5)
    for place, (row, masked) in enumerate(mask.nonzero().tolist()):
        expected = vocabulary[place, :, target[row, masked]]
        assert torch.allclose(token[row, :, masked], expected, atol=1e-4)


def test_no_span_begins_or_ends_inside_a_word(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    bert = Bert(CONFIG)
    inner = set(range(10, VOCAB, 3))
    continues_V = torch.tensor([i in inner for i in range(VOCAB)])
    free, whole = SpanReader(bert).eval(), SpanReader(bert, continues_V).eval()
    whole.load_state_dict(free.state_dict() | {"continues_V": continues_V})
    tokens = joint_inputs(some_ids(4, 2, 1), some_ids(13, 3, 0), tokenizer, LENGTHS)
    body_BT = body_mask(tokens, tokenizer.sep_id)
    with torch.no_grad():
        anywhere, score = free(tokens, body_BT), whole(tokens, body_BT)
    kept = 0
    for row, width, first in anywhere.isfinite().nonzero().tolist():
        ids = tokens.ids_BT[row].tolist()
        after = ids[first + width + 1]
        if ids[first] in inner or after in inner:
            assert score[row, width, first] == -math.inf
        else:
            kept += 1
            assert score[row, width, first] == anywhere[row, width, first]
    assert 0 < kept < int(anywhere.isfinite().sum())
    assert not score[anywhere == -math.inf].isfinite().any()


def test_span_scores_equal_a_double_loop_over_first_and_last_piece(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    reader = SpanReader(Bert(CONFIG)).eval()
    nn.init.normal_(reader.ends.weight)
    nn.init.normal_(reader.score.weight)
    tokens = joint_inputs(some_ids(4, 2, 1), some_ids(13, 3, 0), tokenizer, LENGTHS)
    with torch.no_grad():
        score = reader(tokens, body_mask(tokens, tokenizer.sep_id))
    length = tokens.ids_BT.shape[1]
    assert score.shape == (3, 10, length)
    for row in range(3):
        states = plain_states(reader.encoder, tokens, row).last_hidden_state[0]
        real = len(states)
        body = [t for t in range(real - 1) if tokens.segments_BT[row, t] == 1]
        for first in range(length):
            for width in range(10):
                last = first + width
                value = float(score[row, width, first])
                if first not in body or last not in body:
                    assert value == -math.inf
                    continue
                weight, bias = reader.ends.weight, reader.ends.bias
                hidden = states[first] @ weight[:256].T + bias[:256] + states[last] @ weight[256:].T
                hidden = nn.functional.layer_norm(
                    (hidden + bias[256:]).relu(), (256,), reader.norm.weight, reader.norm.bias, 1e-3
                )
                expected = (hidden @ reader.score.weight[0] + reader.score.bias).item()
                assert math.isclose(value, expected, abs_tol=1e-3)


def test_short_inputs_have_no_spans_wider_than_themselves(tokenizer: Tokenizer) -> None:
    reader = SpanReader(Bert(CONFIG)).eval()
    tokens = joint_inputs(some_ids(1), some_ids(2), tokenizer, LENGTHS)
    score = reader(tokens, body_mask(tokens, tokenizer.sep_id))
    assert score.shape == (1, 6, 6)
    assert int(score.isfinite().sum()) == 3


def test_body_mask_leaves_out_question_separators_and_padding(tokenizer: Tokenizer) -> None:
    tokens = joint_inputs([[7, 8], [7]], [[9], [9, 10, 11]], tokenizer, LENGTHS)
    assert body_mask(tokens, tokenizer.sep_id).int().tolist() == [
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0],
    ]
