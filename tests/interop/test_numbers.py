"""The published arithmetic: our networks with the reference's weights give the numbers that transformers 4.57.6 wrote down.

`reference_transformers.py` writes `fixtures/` in an environment of its own; nothing in them comes from this package.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from realm.interop.checkpoint import open_checkpoint
from realm.interop.weight_names import MASKED_READER, SPAN_READER, TOWER, convert, huggingface_names
from realm.model.folder import Model
from realm.model.losses import any_correct_loss
from realm.qa.reading import reference_question, reference_reading
from realm.tokens.layouts import Tokens, query_inputs
from realm.tokens.tokenizer import Tokenizer
from tests.interop.reference_environment import FIXTURES, block_texts, reference_values
from tests.interop.reference_loss import masked_lm_loss

EXPECTED = load_file(FIXTURES / "expected.safetensors")
TOLD = reference_values()


def expected(name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}/"): v for key, v in EXPECTED.items() if key.startswith(f"{name}/")}


def model_of(name: str) -> Model:
    return convert(open_checkpoint(str(FIXTURES / name / "new"))).model


def tokens_of(values: dict[str, Tensor], before: str = "") -> Tokens:
    return Tokens(*(values[before + name] for name in ("ids", "mask", "segments")))


def close(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-5, relative to the size of what is compared."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp_min(1e-3)


def same_gradients(
    network: torch.nn.Module, table: dict[str, str], theirs: dict[str, Tensor], prefix: str = ""
) -> None:
    names = huggingface_names(network.state_dict(), table, prefix)
    largest = max(float(v.abs().max()) for k, v in theirs.items() if k.startswith(f"grad/{prefix}"))
    compared = 0
    for name, parameter in network.named_parameters():
        gradient = theirs.get(f"grad/{names[name]}")
        if gradient is not None:
            assert parameter.grad is not None, name
            # Some cancel: no softmax feels a key's bias, or what all candidates share. They are what rounding left.
            off = (parameter.grad - gradient).abs().max()
            assert off <= 1e-5 * gradient.abs().max() + 1e-6 * largest, name
            compared += 1
        else:
            assert parameter.grad is None or not parameter.grad.any(), name
    assert compared > 5


def test_embedder_gives_the_references_vectors_and_gradients() -> None:
    values, tower = expected("embedder"), model_of("embedder").embedder.query
    vector_BD = tower(tokens_of(values))
    close(vector_BD, values["vector"])
    (vector_BD * values["weight"]).sum().backward()
    same_gradients(tower, TOWER, values)


@pytest.mark.parametrize("name", ["scorer", "towers"])
def test_scorer_gives_the_references_relevance_and_gradients(name: str) -> None:
    values, embedder = expected(name), model_of(name).embedder
    assert (embedder.query is embedder.passage) == (name == "scorer")
    place_BK = torch.arange(6).view(2, 3)
    query_BD, score_BK = embedder.score(tokens_of(values), tokens_of(values, "candidate_"), place_BK)
    close(query_BD, values["query"])
    close(embedder.passage(tokens_of(values, "candidate_")).view(2, 3, -1), values["candidate"])
    close(score_BK, values["relevance"])
    (-score_BK.log_softmax(dim=1)[:, 1].sum()).backward()
    same_gradients(embedder.passage, TOWER, values, "embedder.")
    if name == "towers":
        same_gradients(embedder.query, TOWER, values, "query_embedder.")


def test_encoder_gives_the_references_logits() -> None:
    values, reader = expected("encoder"), model_of("encoder").reader
    tokens = tokens_of(values)
    logits_BTV = reader.bert.cls(reader.bert.bert(tokens.ids_BT, tokens.mask_BT, tokens.segments_BT))
    close(logits_BTV, values["logits"].view_as(logits_BTV))


def test_marginalised_loss_and_its_gradients_are_the_references() -> None:
    values, reader = expected("encoder"), model_of("encoder").reader
    score_BK = values["relevance"].clone().requires_grad_()
    loss = masked_lm_loss(reader, tokens_of(values), score_BK, values["labels"], values["mlm_mask"])
    close(loss, values["loss"])
    loss.backward()
    assert score_BK.grad is not None
    close(score_BK.grad, values["relevance_grad"])
    same_gradients(reader.bert, MASKED_READER, values)


def test_reference_compat_dilutes_the_loss_and_hides_nan_as_the_reference_does() -> None:
    values, reader = expected("encoder"), model_of("encoder").reader
    joint, score_BK, labels, mask = (
        tokens_of(values),
        values["relevance"],
        values["labels"],
        values["mlm_mask"],
    )
    ignored = labels.masked_fill(mask == 0, -100)

    def loss(*inputs: Any, compat: bool) -> Tensor:
        return masked_lm_loss(reader, joint, *inputs, reference_compat=compat)

    close(loss(score_BK, ignored, None, compat=True), values["loss_without_mask"])
    close(loss(score_BK, ignored, None, compat=False), values["loss"])
    close(loss(score_BK, ignored, mask, compat=True), values["loss_of_ignored"])
    nan_BK = torch.full_like(score_BK, torch.nan)
    assert loss(nan_BK, labels, mask, compat=True) == values["loss_of_nan"] == 0
    with pytest.raises(ValueError, match="not a finite number"):
        loss(nan_BK, labels, mask, compat=False)
    for compat in (True, False):
        assert loss(score_BK, labels, torch.zeros_like(mask), compat=compat) == values["loss_of_nothing"] == 0


@pytest.mark.parametrize("compat", [True, False])
def test_labels_where_nothing_can_be_predicted_are_refused_in_a_sentence(compat: bool) -> None:
    values, reader = expected("encoder"), model_of("encoder").reader
    joint, score_BK = tokens_of(values), values["relevance"]
    ignored = torch.full_like(values["labels"], -100)
    lengths = joint.mask_BT.sum(dim=1).view(len(ignored), -1).amin(dim=1)
    assert lengths[0] < ignored.shape[1]  # its candidates' rows end before the longest does

    def refused(label_BT: Tensor, mask_BT: Tensor | None, what: str) -> None:
        with pytest.raises(ValueError, match=what):
            masked_lm_loss(reader, joint, score_BK, label_BT, mask_BT, reference_compat=compat)

    at_padding = ignored.clone()
    at_padding[0, lengths[0]] = 7
    refused(at_padding, None, f"label 7 of query 0 at position {lengths[0]} stands at padding")
    beyond = torch.nn.functional.pad(ignored, (0, 1), value=7)
    refused(beyond, None, f"at position {ignored.shape[1]} stands at padding")
    no_word = ignored.clone()
    no_word[1, 1] = 10**6
    refused(no_word, None, "label 1000000 of query 1 at position 1 is not a word")
    nothing = torch.zeros_like(ignored)
    inputs = reader, joint, score_BK
    assert (
        masked_lm_loss(*inputs, at_padding, nothing, compat).item() == 0
    )  # what does not count may be anything


def test_span_scores_losses_and_gradients_are_the_references() -> None:
    values, reader = expected("reader"), model_of("reader").span_reader
    assert reader is not None
    tokens, score_K = tokens_of(values), values["relevance"].clone().requires_grad_()
    body_BT = (tokens.segments_BT == 1) & (tokens.mask_BT == 1)
    span_KWT = reader(tokens, body_BT)
    first, last = values["first"], values["last"]
    theirs = values["logits"].masked_fill(values["logits"] < -1e30, -torch.inf)
    ours = span_KWT[:, last - first, first]
    assert torch.equal(ours.isfinite(), theirs.isfinite()) and theirs.isfinite().any(dim=1).all()
    close(ours[ours.isfinite()], theirs[theirs.isfinite()])
    joint_KWT = span_KWT + score_K[:3, None, None]
    block, width, start = torch.unravel_index(joint_KWT.argmax(), joint_KWT.shape)
    assert [int(block), int(start), int(start + width)] == values["chosen"].tolist()
    correct_KWT = torch.zeros_like(joint_KWT, dtype=torch.bool)
    for row, (starts, ends) in enumerate(zip(values["starts"][:3], values["ends"][:3], strict=True)):
        for s, e in zip(starts.tolist(), ends.tolist(), strict=True):
            if s >= 0 and e - s < reader.config.max_width:
                correct_KWT[row, e - s, s] = True
    retriever_loss = any_correct_loss(score_K[None], (values["starts"][:, 0] >= 0)[None])
    reader_loss = any_correct_loss(joint_KWT.view(1, -1), correct_KWT.view(1, -1))
    close(retriever_loss, values["retriever_loss"])
    close(reader_loss, values["reader_loss"])
    (retriever_loss + reader_loss).backward()
    assert score_K.grad is not None
    close(score_K.grad, values["relevance_grad"])
    same_gradients(reader, SPAN_READER, values)


# -- open-domain question answering


@pytest.fixture(scope="module")
def openqa() -> Model:
    return model_of("openqa")


@pytest.fixture(scope="module")
def block_emb() -> Tensor:
    return torch.load(FIXTURES / "openqa" / "new" / "pytorch_model.bin", weights_only=True)["block_emb"]


def reference_places(
    tokens: Tokens, answers: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> list[list[tuple[int, int]]]:
    """(first, last) positions of every answer in each row, as the reference finds them: wordpieces between the two [SEP]."""
    found = []
    for row in tokens.ids_BT.tolist():
        first = row.index(tokenizer.sep_id) + 1
        end = row.index(tokenizer.sep_id, first)
        places = [
            (start, start + len(answer) - 1)
            for answer in answers
            for start in range(first, end)
            if answer and row[start : start + len(answer)] == list(answer)
        ]
        found.append(places)
    return found


@pytest.mark.parametrize("number", range(len(TOLD)))
def test_fine_tuning_losses_and_gradients_are_the_references(
    number: int, openqa: Model, block_emb: Tensor
) -> None:
    told, values = TOLD[number], expected(f"openqa/{number}")
    tokenizer, reader = openqa.tokenizer, openqa.span_reader
    assert reader is not None
    for part in openqa.parts().values():
        part.zero_grad()
    ids = reference_question(told["question"], tokenizer)
    assert [tokenizer.cls_id, *ids, tokenizer.sep_id] == told["question_ids"]
    query_BD = openqa.embedder.query(query_inputs([ids], tokenizer, replace(openqa.lengths, query=64)))
    close(query_BD[0], values["vector"])
    wide = (query_BD[0] @ block_emb.T).topk(len(told["wide"])).indices.tolist()
    assert wide == told["wide"]
    texts = block_texts()
    reading = reference_reading(
        [ids] * len(wide), [texts[n] for n in wide], tokenizer, openqa.lengths.reading
    )
    answers = [reference_question(answer, tokenizer) for answer in told["answers"]]
    places = reference_places(reading.tokens, answers, tokenizer)
    theirs = [
        sorted((s, e) for s, e in zip(*row, strict=True) if s >= 0)
        for row in zip(told["starts"], told["ends"], strict=True)
    ]
    assert [sorted(row) for row in places] == theirs
    score_BN = query_BD @ block_emb[wide].T
    retriever_loss = any_correct_loss(score_BN, torch.tensor([[bool(row) for row in places]]))
    read = Tokens(
        *(t[:3] for t in (reading.tokens.ids_BT, reading.tokens.mask_BT, reading.tokens.segments_BT))
    )
    joint_KWT = reader(read, reading.body_BT[:3]) + score_BN[0, :3, None, None]
    correct_KWT = torch.zeros_like(joint_KWT, dtype=torch.bool)
    for row, found in enumerate(places[:3]):
        for s, e in found:
            if e - s < reader.config.max_width:
                correct_KWT[row, e - s, s] = True
    reader_loss = any_correct_loss(joint_KWT.view(1, -1), correct_KWT.view(1, -1))
    close(retriever_loss, values["retriever_loss"])
    close(reader_loss, values["reader_loss"])
    (retriever_loss + reader_loss).backward()
    if number < 2:
        same_gradients(openqa.embedder.query, TOWER, values, "embedder.")
        same_gradients(reader, SPAN_READER, values, "reader.")
