"""A tokenizer and a reader for the tests of networks."""

import pytest
import torch

from realm.model.bert import MaskedBert
from realm.model.masked_reader import MaskedReader
from realm.tokens.tokenizer import Tokenizer
from tests.model.networks import CONFIG, VOCAB


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a b c d e f g h"], vocab_size=VOCAB)


@pytest.fixture
def reader() -> MaskedReader:
    torch.manual_seed(0)
    return MaskedReader(MaskedBert(CONFIG)).eval()
