"""The small network that finds sentences and names: its arithmetic, its offsets, its agreement with the pipeline it repeats."""

import runpy
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from realm.cli import main
from realm.documents.reading import read_documents
from realm.text import tagger_network
from realm.text.corpus import Span
from realm.text.salient_spans import load_tagger
from realm.text.tagger_network import (
    COLUMNS,
    GAPS,
    ROWS,
    Network,
    NetworkTagger,
    Words,
    cut,
)

RECIPE = SimpleNamespace(
    **runpy.run_path(
        str(Path(__file__).parent.parent.parent / "recipes" / "realm_tagger.py"), run_name="recipe"
    )
)
KINDS = ["PERSON", "GPE", "DATE"]
TEXTS = st.text("aB1é '.\n-\ud800", max_size=40)


@pytest.fixture(scope="module")
def torch_network() -> Any:
    """The network of the recipe with random weights, rounded to 16 bits as on disk."""
    torch.manual_seed(0)
    network = RECIPE.TrainedNetwork(2 * len(KINDS) + 1).eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_((weight + 0.1 * torch.randn_like(weight)).half())
    return network


@pytest.fixture(scope="module")
def network(torch_network: Any, tmp_path_factory: pytest.TempPathFactory) -> Network:
    file = tmp_path_factory.mktemp("network") / "model.safetensors"
    save_file({name: value.half() for name, value in torch_network.state_dict().items()}, file)
    return Network.load(file)


@pytest.fixture(scope="module")
def tagger(network: Network) -> NetworkTagger:
    return NetworkTagger(network, KINDS)


def test_the_scores_are_those_that_torch_computes(torch_network, network: Network) -> None:
    rng = np.random.default_rng(0)
    feature_TF = np.stack([rng.integers(0, ROWS[name], 30) for name in COLUMNS], axis=1)
    gap_T, word_T1 = rng.integers(0, GAPS, 30), (rng.random((30, 1)) < 0.8).astype(np.float32)
    with torch.no_grad():
        expected = torch_network(*map(torch.from_numpy, (feature_TF, gap_T, word_T1)))
    input_TH = network.tables["gap"][gap_T] + sum(
        network.tables[name][row_T] for name, row_T in zip(COLUMNS, feature_TF.T, strict=True)
    )
    np.testing.assert_allclose(network.scores(input_TH, word_T1), expected, atol=1e-4)


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_a_text_is_annotated_alike_alone_and_among_other_texts(tagger: NetworkTagger, texts) -> None:
    together = list(tagger.annotate(texts))
    assert together == [one for text in texts for one in tagger.annotate([text])]
    for text, (sentences, names) in zip(texts, together, strict=True):
        covered = "".join(text[start:end] for start, end in sentences)
        assert "".join(covered.split()) == "".join(text.split())
        ends = [0, *(span.end for span in names)]
        assert all(end <= span.start < span.end for end, span in zip(ends, names, strict=False))
        words = cut(text)
        assert {span.start for span in names} <= set(words.start_T.tolist())
        assert {span.end for span in names} <= set(words.end_T.tolist())


@given(st.lists(st.integers(0, 2 * len(KINDS)), max_size=12))
def test_a_name_is_a_first_word_and_the_following_words_of_its_kind(tagger: NetworkTagger, labels) -> None:
    expected: list[list[int]] = []
    kind = 0
    for position, label in enumerate(labels):
        if label and label == 2 * kind:  # the label of a following word of the current kind
            expected[-1][1] = position + 1
        elif label:
            kind = (label + 1) // 2
            expected.append([position, position + 1, kind])
        if not label:
            kind = 0
    numbers = np.arange(len(labels))
    found = tagger._names(Words(numbers, numbers + 1, numbers), np.array(labels, dtype=np.int64))
    assert found == [Span(start, end, KINDS[kind - 1]) for start, end, kind in expected]


@given(TEXTS)
def test_words_are_all_characters_but_spaces_and_gaps_count_line_breaks(text: str) -> None:
    words = cut(text)
    assert "".join(text[a:b] for a, b in zip(words.start_T, words.end_T, strict=True)) == "".join(
        text.split()
    )
    last = 0
    for number, (start, end, gap) in enumerate(zip(*words, strict=True)):
        between = text[last:start]
        assert gap == (3 if not number else min(3, 1 + between.count("\n")) if between else 0)
        last = end


def test_scores_do_not_depend_on_how_many_words_are_computed_at_a_time(network: Network, monkeypatch) -> None:
    rng = np.random.default_rng(1)
    input_TH = rng.normal(size=(50, network.tables["gap"].shape[1])).astype(np.float32)
    word_T1 = (rng.random((50, 1)) < 0.9).astype(np.float32)
    expected = network.scores(input_TH, word_T1)
    monkeypatch.setattr(tagger_network, "AT_ONCE", 7)
    np.testing.assert_allclose(network.scores(input_TH, word_T1), expected, atol=1e-5)


@pytest.mark.filterwarnings("error")
def test_words_that_were_forgotten_are_computed_again(network: Network, monkeypatch) -> None:
    monkeypatch.setattr(tagger_network, "MOST_WORDS", 3)
    texts = ["Ada met Babbage.", "Arden lies on the Tamm.", "Ada met Babbage."]
    tagger = NetworkTagger(network, KINDS)
    assert [one for text in texts for one in tagger.annotate([text])] == list(
        NetworkTagger(network, KINDS).annotate(texts)
    )


def test_a_word_keeps_its_accents_and_long_words_are_cut(network: Network) -> None:
    """Accents can be characters of their own, and a text without spaces must not stay in memory as one word."""
    text = f"Lo\u0301pez met {'x' * 250}."
    words = cut(text)
    found = [text[a:b] for a, b in zip(words.start_T, words.end_T, strict=True)]
    assert found == ["Lo\u0301pez", "met", "x" * 100, "x" * 100, "x" * 50, "."]


def test_a_folder_without_a_network_is_refused_in_one_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("Ada.")

    def error(name: str) -> str:
        command = ["kb", "build", str(tmp_path / "a.txt"), "--out", str(tmp_path / "kb"), "--tagger", name]
        assert main(command) == 2
        return capsys.readouterr().err

    folder = tmp_path / "network"
    folder.mkdir()
    assert f"{folder} has no network that finds names: " in error(f"realm:{folder}")
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert f"{folder} has no network that finds names: " in error(f"realm:{folder}")
    (folder / "model.safetensors").write_bytes((tagger_network.PACKAGED / "model.safetensors").read_bytes())
    (folder / "kinds.json").write_text('["PERSON"]')
    assert "was not made for the 1 kinds of names in kinds.json" in error(f"realm:{folder}")
    assert "unknown tagger realm:" in error("realm:")


def test_the_packaged_network_agrees_with_the_pipeline_that_it_repeats() -> None:
    """F1 of names without their kinds, and of sentences, on introductions of the CIA World Factbook."""
    texts = [document.text for document in islice(read_documents(["package:factbook"]), 8)]
    ours, theirs = (list(load_tagger(name).annotate(texts)) for name in ("realm", "en_core_web_sm"))
    names = RECIPE.f1(*([{span[:2] for span in one.spans} for one in found] for found in (ours, theirs)))
    sentences = RECIPE.f1(*([set(one.sentences) for one in found] for found in (ours, theirs)))
    assert names > 80 and sentences > 95, (names, sentences)


def test_two_processes_annotate_as_one_process_does() -> None:
    texts = [
        f"Town {number} is in Ruritania. Ada Lovelace built it in 18{number % 90 + 10}."
        for number in range(400)
    ]
    alone = list(load_tagger("realm").annotate(texts))
    assert list(load_tagger("realm", processes=2).annotate(texts)) == alone
    assert any(span.label == "PERSON" for one in alone for span in one.spans)
