"""What the real published weights are known to give (the reference's own tests, tolerance 1e-4), where they are at hand.

REALM_PUBLISHED=/models pytest tests/interop/test_golden.py
REALM_PUBLISHED=hub     pytest tests/interop/test_golden.py
"""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from realm.interop.blocks import convert_checkpoint
from realm.interop.checkpoint import open_checkpoint
from realm.interop.weight_names import convert
from realm.model.folder import Model
from realm.qa.pipeline import AnswerConfig, Answerer
from realm.tokens.layouts import Tokens

WHERE = os.environ.get("REALM_PUBLISHED")
pytestmark = pytest.mark.skipif(
    not WHERE, reason="REALM_PUBLISHED names neither a folder with the published checkpoints nor the hub"
)


def place_of(name: str) -> str:
    """The checkpoint's folder or hub name; skips where the folder does not have it."""
    if WHERE == "hub":
        return f"google/{name}"
    folder = Path(WHERE or "") / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    return str(folder)


def model_of(name: str) -> Model:
    return convert(open_checkpoint(place_of(name))).model


def plain(*rows: list[int]) -> Tokens:
    """Ids without masks or segments: all real, all of the first segment."""
    ids_BT = torch.tensor(rows)
    return Tokens(ids_BT, torch.ones_like(ids_BT), torch.zeros_like(ids_BT))


FIRST, SECOND = list(range(6)), list(range(6, 12))


def close(ours: Tensor, known: list[float]) -> None:
    torch.testing.assert_close(ours.flatten(), torch.tensor(known), rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_embedder_has_the_published_vectors() -> None:
    vector_BD = model_of("realm-cc-news-pretrained-embedder").embedder.query(plain(FIRST))
    close(vector_BD[:, :3], [-0.0714, -0.0837, -0.1314])


@torch.no_grad()
def test_the_scorer_has_the_published_scores() -> None:
    embedder = model_of("realm-cc-news-pretrained-scorer").embedder
    _, score_BK = embedder.score(plain(FIRST), plain(FIRST, SECOND), torch.tensor([[0, 1]]))
    close(score_BK, [0.7410, 0.7170])


@torch.no_grad()
def test_the_encoder_has_the_published_logits() -> None:
    bert = model_of("realm-cc-news-pretrained-encoder").reader.bert
    tokens = plain(FIRST, SECOND)
    logits = bert.cls(bert.bert(tokens.ids_BT, tokens.mask_BT, tokens.segments_BT))
    close(logits[1, :2, :2], [-11.0888, -11.2544, -10.2170, -10.3874])


@torch.no_grad()
def test_the_reader_has_the_published_values() -> None:
    reader = model_of("realm-orqa-nq-reader").span_reader
    assert reader is not None
    ids = torch.arange(10).view(2, 5)
    tokens = Tokens(ids, torch.ones_like(ids), torch.tensor([[0, 0, 1, 1, 1]] * 2))
    body = torch.tensor([[False, False, True, True, False]] * 2)
    joint_KWT = reader(tokens, body)[:, :3] + torch.tensor([0.3, 0.7])[:, None, None]
    block, width, start = torch.unravel_index(joint_KWT.argmax(), joint_KWT.shape)
    assert (int(block), int(start), int(start + width)) == (1, 3, 3)


def test_the_published_model_answers_the_question_of_its_card(tmp_path: Path) -> None:
    """Converts all of Wikipedia: the texts and 6.8 GB of vectors go to disk once more."""
    convert_checkpoint(place_of("realm-orqa-nq-openqa"), tmp_path / "nq")
    config = AnswerConfig(device="cpu", reference_compat=True, mapped_index=True)
    answerer = Answerer.load(str(tmp_path / "nq" / "kb"), str(tmp_path / "nq" / "model"), config)
    (best, *_) = answerer.answer("Who is the pioneer in modern computer science?").answers
    assert best.text == "alan mathison turing"
