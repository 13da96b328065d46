"""The reader's copy term against plain loops over wordpieces and distances.

Letters: B rows, T tokens, H hidden, P predicted positions.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from realm.errors import RealmError
from realm.model.bert import MaskedBert
from realm.model.copying import REACH, CopyHead, passage_mask
from realm.model.masked_reader import MaskedReader, load_reader, save_reader
from realm.tokens.layouts import Lengths, Tokens, joint_inputs
from realm.tokens.tokenizer import Tokenizer
from tests.model.networks import CONFIG, VOCAB
from tests.transformers_twin import twin

HIDDEN = CONFIG.hidden_size
LENGTHS = Lengths(query=16, passage=20)


@pytest.fixture
def reader() -> MaskedReader:
    """Everything random, [PAD]'s embedding and the kernel's middle too: what must not count would show."""
    torch.manual_seed(0)
    reader = MaskedReader(MaskedBert(CONFIG), copy=True).eval()
    with torch.no_grad():
        reader.bert.bert.embeddings.word_embeddings.weight[0].normal_()
        for parameter in reader.copy_head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        reader.copy_head.kernel.normal_()
    return reader


def rows(tokenizer: Tokenizer) -> Tokens:
    """Four queries: beside a passage with repeats, a long one, none, and one so short that the padding is in reach."""
    mask = tokenizer.mask_id
    sentences = [[7, mask, 9, mask, *range(25, 34)], [mask, 8], [6, mask], [8, mask]]
    return joint_inputs(sentences, [[10, 11, 10, 12], list(range(20, 37)), [], [11, 10]], tokenizer, LENGTHS)


ROWS, PLACES = torch.tensor([0, 1, 0, 2, 3]), torch.tensor([4, 1, 2, 2, 2])


def plain_surroundings(
    head: CopyHead, words_TH: Tensor, tokens: Tokens, row: int, place: int, t: int
) -> Tensor:
    """The words around (row, place) against those around t, distance by distance."""
    real = int(tokens.mask_BT[row].sum())
    ids, segments = tokens.ids_BT[row].tolist(), tokens.segments_BT[row].tolist()
    total = torch.zeros(())
    for d in range(-REACH, REACH + 1):
        for e in range(-REACH, REACH + 1):
            asked, read = place + d, t + e
            if not (0 <= asked < real and segments[asked] == 0 and 0 <= read < real and segments[read] == 1):
                continue
            cosine = words_TH[asked] @ words_TH[read] / words_TH[asked].norm() / words_TH[read].norm()
            weight = head.importance.weight[ids[asked], 0] * head.importance.weight[ids[read], 0]
            total = total + head.kernel[REACH + d, REACH + e] * weight * cosine
    return total


def plain_mixture(
    head: CopyHead, states_TH: Tensor, words_TH: Tensor, tokens: Tokens, row: int, place: int
) -> tuple[dict[int, Tensor], Tensor]:
    """{wordpiece of the passage: probability to copy it}, and the probability of the sentinel."""
    real, segments = int(tokens.mask_BT[row].sum()), tokens.segments_BT[row].tolist()
    state_H = states_TH[place]
    passage = [t for t in range(real - 1) if segments[t] == 1]
    score = {}
    for t in passage:
        alike = (head.query.weight @ state_H) @ (head.key.weight @ states_TH[t]) / math.sqrt(len(state_H))
        score[t] = alike + plain_surroundings(head, words_TH, tokens, row, place, t)
    sentinel = head.sentinel.weight[0] @ state_H + head.sentinel.bias[0]
    total = sentinel.exp() + sum(value.exp() for value in score.values())
    return {t: value.exp() / total for t, value in score.items()}, sentinel.exp() / total


def by_hand(reader: MaskedReader, tokens: Tokens, row: int, place: int) -> np.ndarray:
    """p(word) = g p_mlm(word) + the copy probabilities of the passage's wordpieces that are the word; no padding."""
    real = int(tokens.mask_BT[row].sum())
    ids, segments = tokens.ids_BT[row, :real], tokens.segments_BT[row, :real]
    words = reader.bert.bert.embeddings.word_embeddings.weight[ids]
    with torch.no_grad():
        states = twin(reader.bert.bert)(ids[None], token_type_ids=segments[None]).last_hidden_state[0]
        plain = reader.bert.cls(states[place]).softmax(-1).double().numpy()
        copied, keep = plain_mixture(reader.copy_head, states, words, tokens, row, place)
    mixed = keep.item() * plain
    for position, probability in copied.items():
        mixed[ids[position]] += probability.item()
    return mixed


def test_distribution_is_the_mixture_written_out(reader, tokenizer) -> None:
    tokens = rows(tokenizer)
    with torch.no_grad():
        probability = reader(tokens, ROWS, PLACES).exp().numpy()
    np.testing.assert_allclose(probability.sum(axis=1), np.ones(5), atol=1e-5)
    for found, row, place in zip(probability, ROWS.tolist(), PLACES.tolist(), strict=True):
        np.testing.assert_allclose(found, by_hand(reader, tokens, row, place), atol=1e-5)


def test_copy_head_passes_on_the_gradient_of_the_plain_loop(reader, tokenizer) -> None:
    """Of its own parameters, kernel and importance too, and of the states and words that it is given."""
    head, tokens = reader.copy_head, rows(tokenizer)
    torch.manual_seed(1)
    states_BTH = torch.randn(*tokens.ids_BT.shape, HIDDEN, requires_grad=True)
    words_BTH = torch.randn(*tokens.ids_BT.shape, HIDDEN, requires_grad=True)
    weight_PT, keep_weight_P = torch.randn(5, tokens.ids_BT.shape[1]), torch.randn(5)

    def batched() -> Tensor:
        copy_logp_PT, keep_P = head(states_BTH, words_BTH, tokens, ROWS, PLACES)
        return (copy_logp_PT.exp() * weight_PT).sum() + (keep_P.exp() * keep_weight_P).sum()

    def plain() -> Tensor:
        total = torch.zeros(())
        for p, (row, place) in enumerate(zip(ROWS.tolist(), PLACES.tolist(), strict=True)):
            copied, keep = plain_mixture(head, states_BTH[row], words_BTH[row], tokens, row, place)
            total = total + keep * keep_weight_P[p]
            total = total + sum(probability * weight_PT[p, t] for t, probability in copied.items())
        return total

    inputs = {**dict(head.named_parameters()), "states": states_BTH, "words": words_BTH}
    mine, theirs = (torch.autograd.grad(function(), list(inputs.values())) for function in (batched, plain))
    for name, one, other in zip(inputs, mine, theirs, strict=True):
        assert other.abs().sum() > 0, name
        assert torch.allclose(one, other, atol=1e-4), name


# -- before the first step


def fresh_head(tokenizer: Tokenizer, vocabulary: int, hidden: int) -> CopyHead:
    """An untrained head to which every word counts alike, [MASK] and the other special tokens not at all."""
    head = CopyHead(hidden, vocabulary)
    weight_V = torch.ones(vocabulary)
    special = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    weight_V[list(special)] = 0
    head.fit_importance(weight_V)
    return head


def surroundings(head: CopyHead, words_BTH: Tensor, tokens: Tokens, rows_P: Tensor, place_P: Tensor):
    """What the surroundings alone say for each wordpiece [P, T]: states of 0 make the rest of the score 0."""
    with torch.no_grad():
        copy_logp_PT, keep_P = head(torch.zeros_like(words_BTH), words_BTH, tokens, rows_P, place_P)
    return copy_logp_PT - keep_P[:, None] + head.sentinel.bias


def test_first_kernel_likes_equal_distances_best_then_the_same_side_and_never_the_middle() -> None:
    kernel, near = CopyHead(4, 9).kernel.tolist(), range(1, REACH + 1)
    for d in range(-REACH, REACH + 1):
        assert kernel[REACH][REACH + d] == kernel[REACH + d][REACH] == 0
    for d in near:
        for side in (-1, 1):
            row = {e: kernel[REACH + side * d][REACH + side * e] for e in (*near, *(-e for e in near))}
            assert max(row, key=row.get) == d
            assert all(row[e] > row[-e] > 0 for e in near)
            assert row[d] == pytest.approx(5 * math.exp(-0.2 * d))


def test_word_in_the_middle_does_not_count_before_training(tokenizer) -> None:
    torch.manual_seed(0)
    head, tokens = fresh_head(tokenizer, VOCAB, HIDDEN), rows(tokenizer).rows(torch.tensor([1]))
    words_BTH, row, place = torch.randn(*tokens.ids_BT.shape, HIDDEN), torch.tensor([0]), torch.tensor([2])
    before = surroundings(head, words_BTH, tokens, row, place)[0]
    words_BTH[0, 2] = torch.randn(HIDDEN)  # the query's own
    assert torch.allclose(surroundings(head, words_BTH, tokens, row, place)[0], before, atol=1e-5)
    place -= 1
    before = surroundings(head, words_BTH, tokens, row, place)[0]
    words_BTH[0, 9] = torch.randn(HIDDEN)  # a candidate's own: seen by its neighbours only
    after = surroundings(head, words_BTH, tokens, row, place)[0]
    assert abs(after[9] - before[9]) < 1e-5
    assert abs(after[8] - before[8]) > 1e-3 and abs(after[10] - before[10]) > 1e-3


WORDS, WIDE = 400, 128


@pytest.mark.parametrize("seed", range(3))
def test_untrained_head_copies_the_right_wordpiece_of_a_verbatim_passage(tokenizer, seed) -> None:
    """And leaves the word to the encoder beside a passage that says something else."""
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed).permutation(np.arange(5, WORDS))
    sentence, hidden = draw[:10], [0, 4, 5, 9]
    shown = sentence.copy()
    shown[hidden] = tokenizer.mask_id
    verbatim = np.concatenate([draw[10:14], sentence, draw[14:18]])
    tokens = joint_inputs([shown, shown], [verbatim, draw[20:38]], tokenizer, LENGTHS)
    words_BTH, states_BTH = torch.randn(WORDS, WIDE)[tokens.ids_BT], torch.randn(*tokens.ids_BT.shape, WIDE)
    head = fresh_head(tokenizer, WORDS, WIDE)
    places = torch.tensor(hidden) + 1
    with torch.no_grad():
        found, other = (
            head(states_BTH, words_BTH, tokens, torch.full((len(hidden),), row), places) for row in (0, 1)
        )
    copied_PT = found[0].exp()
    right = copied_PT[torch.arange(len(hidden)), 2 + len(shown) + 4 + torch.tensor(hidden)]
    assert (right > 0.9 * copied_PT.sum(dim=1)).all()
    assert (right > found[1].exp()).all()
    assert (other[1].exp() > 0.5).all()


def test_surroundings_are_not_rounded_under_autocast(tokenizer) -> None:
    torch.manual_seed(0)
    head, tokens = fresh_head(tokenizer, VOCAB, HIDDEN), rows(tokenizer).rows(torch.tensor([0, 1]))
    arguments = torch.randn(*tokens.ids_BT.shape, HIDDEN), tokens, ROWS[:3], PLACES[:3]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = surroundings(head, *arguments)
    assert torch.allclose(rounded, surroundings(head, *arguments), atol=1e-4)


@pytest.mark.parametrize("body", [1, REACH // 2, 3 * REACH])
def test_surroundings_are_the_plain_loop_also_in_rows_shorter_than_the_reach(reader, tokenizer, body) -> None:
    head = reader.copy_head
    tokens = joint_inputs([[10, 11]], [list(range(12, 12 + body))], tokenizer, Lengths(32, 48))
    words_BTH = torch.randn(*tokens.ids_BT.shape, HIDDEN)
    found_PT = surroundings(head, words_BTH, tokens, torch.tensor([0, 0]), torch.tensor([1, 2]))
    for p, place in enumerate((1, 2)):
        for t in range(4, 4 + body):
            plain = plain_surroundings(head, words_BTH[0], tokens, 0, place, t)
            assert float(found_PT[p, t]) == pytest.approx(plain.item(), abs=1e-4)
    assert surroundings(head, words_BTH, tokens, ROWS[:0], PLACES[:0]).shape == (0, tokens.ids_BT.shape[1])


# -- the mixture


@pytest.mark.parametrize("target", [10, 12, 25, 30])
def test_target_logp_is_the_targets_part_of_the_distribution(reader, tokenizer, target) -> None:
    tokens = rows(tokenizer)
    with torch.no_grad():
        whole = reader(tokens, ROWS, PLACES)[:, target]
        alone = reader.target_logp(tokens, ROWS, PLACES, torch.full((5,), target))
    assert torch.allclose(alone, whole, atol=1e-4)


def test_beside_no_passage_nothing_is_copied(reader, tokenizer) -> None:
    tokens = rows(tokenizer).rows(torch.tensor([2]))
    plain = MaskedReader(reader.bert)
    row, place = torch.tensor([0]), torch.tensor([2])
    with torch.no_grad():
        assert torch.allclose(reader(tokens, row, place), plain(tokens, row, place), atol=1e-5)


def test_gradients_are_those_of_the_mixture_and_finite_where_nothing_can_be_copied(reader, tokenizer) -> None:
    tokens, targets = rows(tokenizer), torch.tensor([10, 25, 30, 10, 11])
    gradients = []
    for values in (
        lambda: reader.target_logp(tokens, ROWS, PLACES, targets),
        lambda: reader(tokens, ROWS, PLACES)[torch.arange(5), targets],
    ):
        reader.zero_grad()
        values().sum().backward()
        gradients.append([p.grad.clone() for p in reader.parameters() if p.grad is not None])
    assert all(gradient.isfinite().all() for gradient in gradients[0])
    head = reader.copy_head
    for parameter in (head.kernel, head.importance.weight, head.sentinel.weight):
        assert parameter.grad.abs().sum() > 0
    for mine, other in zip(*gradients, strict=True):
        assert torch.allclose(mine, other, atol=1e-3)


def test_only_the_passage_is_copied_from(tokenizer) -> None:
    tokens = rows(tokenizer)
    expected = (tokens.segments_BT == 1) & (tokens.ids_BT != tokenizer.sep_id) & (tokens.mask_BT == 1)
    assert torch.equal(passage_mask(tokens), expected)


def test_word_hidden_in_the_passage_itself_is_not_copied(reader, tokenizer) -> None:
    """As in a plain row of `realm mlm`: it could copy itself, or another [MASK]."""
    tokens, row = rows(tokenizer), torch.tensor([0])
    place = passage_mask(tokens)[0].nonzero()[1]
    with torch.no_grad():
        assert torch.allclose(
            reader(tokens, row, place), MaskedReader(reader.bert)(tokens, row, place), atol=1e-5
        )


def test_copy_head_travels_with_its_encoder(reader, tokenizer, tmp_path: Path) -> None:
    save_reader(reader, tmp_path)
    loaded = load_reader(str(tmp_path))
    tokens = rows(tokenizer)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens, ROWS, PLACES), reader(tokens, ROWS, PLACES))
    (tmp_path / "copy_head.safetensors").write_bytes(b"garbage")
    with pytest.raises(RealmError, match="copy_head") as error:
        load_reader(str(tmp_path))
    assert "\n" not in str(error.value)
