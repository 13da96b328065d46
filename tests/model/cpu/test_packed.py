"""Layers without padding, against transformers' own forward pass and plain loops."""

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BertModel

from realm.model.bert import Bert, BertConfig
from realm.model.cpu import packed
from realm.model.modes import recomputed, set_dropout
from realm.model.states import hidden_states, states_at
from realm.tokens.layouts import Tokens
from tests.transformers_twin import twin


def small_bert(dropout: float = 0.0, **more: object) -> Bert:
    torch.manual_seed(1)
    sizes = {"vocab_size": 60, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = BertConfig(**{**sizes, "intermediate_size": 24, "max_position_embeddings": 32, **more})
    bert = Bert(config).double()
    for parameter in bert.parameters():
        torch.nn.init.normal_(parameter, std=0.4)  # far from the start, where every layer says the same
    set_dropout(bert, dropout)
    return bert


def rows_of(lengths: list[int], seed: int = 0) -> Tokens:
    draw = torch.Generator().manual_seed(seed)
    mask_BT = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids_BT = torch.randint(60, mask_BT.shape, generator=draw) * mask_BT
    return Tokens(ids_BT, mask_BT, torch.randint(2, mask_BT.shape, generator=draw) * mask_BT)


def theirs(bert: BertModel, tokens: Tokens) -> Tensor:
    return bert(
        tokens.ids_BT, attention_mask=tokens.mask_BT, token_type_ids=tokens.segments_BT
    ).last_hidden_state


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.sampled_from(["eager", "sdpa"]))
def test_states_and_gradients_are_those_of_transformers_at_every_token(lengths, attention) -> None:
    fast = small_bert()
    plain = twin(fast)
    plain.set_attn_implementation(attention)
    tokens = rows_of(lengths)
    real_BT1 = tokens.mask_BT[:, :, None].bool()
    weight_BTH = torch.randn(*real_BT1.shape[:2], 12, generator=torch.Generator().manual_seed(5)).double()
    found, expected = hidden_states(fast, tokens), theirs(plain, tokens)
    torch.testing.assert_close(found * real_BT1, expected * real_BT1)
    for states in (found, expected):
        (states * weight_BTH * real_BT1).sum().backward()
    for (name, one), other in zip(fast.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.data())
def test_states_at_some_tokens_are_those_among_all_of_them(lengths, data) -> None:
    """In any order, some twice, rows left out."""
    pairs = data.draw(
        st.lists(
            st.integers(0, len(lengths) - 1).flatmap(
                lambda row: st.tuples(st.just(row), st.integers(0, lengths[row] - 1))
            ),
            min_size=1,
            max_size=8,
        )
    )
    bert, tokens = small_bert(), rows_of(lengths)
    row_P, position_P = torch.tensor(pairs).T
    weight_PH = torch.randn(len(pairs), 12, dtype=torch.float64)
    found = states_at(bert, tokens, row_P, position_P)
    plain = twin(bert)
    expected = theirs(plain, tokens)[row_P, position_P]
    torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad((states * weight_PH).sum(), list(network.parameters()))
        for network, states in ((bert, found), (plain, expected))
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_states_at_no_token_are_none() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert states_at(small_bert(), rows_of([3, 2]), nothing, nothing).shape == (0, 12)


@pytest.mark.parametrize("divided", [False, True])
def test_gradients_beside_dropout_are_those_of_the_pass_that_was_made(
    divided, two_threads, monkeypatch
) -> None:
    """Against differences: the backward pass must know what the forward pass dropped, in every layer and head."""
    readers = watch(monkeypatch, divided)
    bert = small_bert(dropout=0.3).train()
    tokens = rows_of([7, 3, 5])
    weight_BTH = torch.randn(3, 7, 12, dtype=torch.float64)

    def value() -> Tensor:
        torch.manual_seed(11)
        return (hidden_states(bert, tokens) * weight_BTH).sum()

    value().backward()
    moved = 1e-6
    attention = bert.encoder.layer[0].attention.self
    for weight in (attention.query.weight, attention.key.weight, attention.value.weight):
        assert weight.grad is not None
        for place in ((0, 0), (5, 7), (11, 3)):
            with torch.no_grad():
                weight[place] += moved
                above = value()
                weight[place] -= 2 * moved
                below = value()
                weight[place] += moved
            difference = (above - below) / (2 * moved)
            torch.testing.assert_close(weight.grad[place], difference, rtol=1e-4, atol=1e-6)
    assert (readers != HERE) == divided


def test_dropout_inside_attention_leaves_its_mean_where_it_was() -> None:
    bert = small_bert(num_hidden_layers=1).train()
    bert.encoder.layer[0].attention.self.dropout.p = 0.5
    layer = bert.encoder.layer[0]
    seen: list[Tensor] = []
    layer.attention.output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    tokens = rows_of([16, 9])
    for seed in range(800):
        torch.manual_seed(seed)
        hidden_states(bert, tokens)
    bert.eval()
    hidden_states(bert, tokens)
    drawn_SNH, plain_NH = torch.stack(seen[:-1]), seen[-1]
    error_NH = drawn_SNH.std(dim=0) / len(drawn_SNH) ** 0.5
    assert error_NH.min() > 0  # every number is drawn
    assert ((drawn_SNH.mean(dim=0) - plain_NH).abs() / error_NH).max() < 5


def test_rows_of_one_length_are_multiplied_together_and_apart_with_the_same_result(monkeypatch) -> None:
    bert, tokens = small_bert(), rows_of([5, 9, 5, 5, 9, 1, 5])
    together = hidden_states(bert, tokens)
    monkeypatch.setattr("realm.model.cpu.attention.SCORES", 2 * 3 * 5 * 5)  # two rows of 5
    torch.testing.assert_close(hidden_states(bert, tokens), together)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_two_threads_give_the_states_and_gradients_of_one(dropout, two_threads, monkeypatch) -> None:
    monkeypatch.setattr("realm.model.cpu.attention.SCORES", 64)
    bert, tokens = small_bert(dropout).train(), rows_of([9, 6, 4, 6, 12, 1])
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        states = hidden_states(bert, tokens)
        found.append([states, *torch.autograd.grad(states.square().sum(), list(bert.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)  # products beside attention add in another order


def watch(monkeypatch: pytest.MonkeyPatch, divided: bool = True) -> set[str]:
    """Threads that read rows, as they come; where `divided`, few rows are divided too."""
    readers: set[str] = set()
    watched = packed._layers
    monkeypatch.setattr(packed, "SHARED", 0 if divided else 1 << 30)
    monkeypatch.setattr(
        packed, "_layers", lambda *a: readers.add(threading.current_thread().name) or watched(*a)
    )
    return readers


HERE = {threading.main_thread().name}
LENGTHS = [([7, 6, 5, 6, 7, 5], True), ([4, 4, 4, 4], True), ([30, 2, 2], False), ([5], False)]


@pytest.mark.parametrize(("lengths", "shared"), LENGTHS)
@pytest.mark.parametrize("bf16", [False, True])
def test_threads_that_read_rows_of_their_own_find_what_one_finds(
    lengths, shared, bf16, two_threads, monkeypatch
) -> None:
    """Also where one of them is asked for nothing."""
    bert, tokens = small_bert().float().eval(), rows_of(lengths)
    row_P, position_P = torch.tensor([0, 0, len(lengths) - 1]), torch.tensor([3, 0, 0])
    readers = watch(monkeypatch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        together = hidden_states(bert, tokens), states_at(bert, tokens, row_P, position_P)
        assert (readers != HERE) == shared
        torch.set_num_threads(1)
        alone = hidden_states(bert, tokens), states_at(bert, tokens, row_P, position_P)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, **({"rtol": 2e-2, "atol": 2e-2} if bf16 else {}))
        assert one.dtype == other.dtype


def gradients(value: Callable[[], Tensor], bert: Bert) -> list[Tensor]:
    learning = [weight for weight in bert.parameters() if weight.requires_grad]
    return [*torch.autograd.grad(value(), learning, materialize_grads=True)]


@pytest.mark.parametrize(("lengths", "shared"), LENGTHS)
@pytest.mark.parametrize("frozen", [None, "encoder", "embeddings"])
def test_threads_that_learn_from_rows_of_their_own_learn_what_one_learns(
    lengths, shared, frozen, two_threads, monkeypatch
) -> None:
    bert, tokens = small_bert(), rows_of(lengths)
    if frozen:
        getattr(bert, frozen).requires_grad_(False)
    rows, readers = torch.zeros(2, dtype=torch.int64), watch(monkeypatch)
    values = [
        lambda: hidden_states(bert, tokens).square().sum(),
        lambda: (
            states_at(bert, tokens, rows, torch.tensor([3, 0])).square().sum()
        ),  # of one thread's rows alone
    ]
    together = [gradients(value, bert) for value in values]
    assert (readers != HERE) == shared
    torch.set_num_threads(1)
    for found, value in zip(together, values, strict=True):
        for one, other in zip(found, gradients(value, bert), strict=True):
            torch.testing.assert_close(one, other)


def test_a_seed_determines_what_threads_drop_in_any_order(two_threads, monkeypatch) -> None:
    bert, tokens = small_bert(dropout=0.3).train(), rows_of([7, 6, 5, 6, 7, 5])
    readers, found = watch(monkeypatch), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(hidden_states(bert, tokens))
    assert readers != HERE
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    bert.embeddings.dropout.p = 0.0  # it is drawn for all rows before they are divided
    same_text = rows_of([7, 7])
    same_text.ids_BT[1], same_text.segments_BT[1] = same_text.ids_BT[0], same_text.segments_BT[0]
    one, other = hidden_states(bert, same_text)
    assert not torch.allclose(one, other)  # each has draws of its own


def test_without_dropout_threads_draw_nothing(two_threads, monkeypatch) -> None:
    """Several ranks then draw candidates as one process does, however many threads each has."""
    bert, tokens = small_bert().train(), rows_of([7, 6, 5, 6, 7, 5])
    readers, before = watch(monkeypatch), torch.get_rng_state()
    hidden_states(bert, tokens).sum().backward()
    assert readers != HERE
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_learn_in_bf16_under_autocast(two_threads, monkeypatch) -> None:
    bert, tokens = small_bert().float(), rows_of([7, 6, 5, 6, 7, 5])
    seen, attend = set(), packed.attend
    monkeypatch.setattr(packed, "attend", lambda *a: seen.add(a[0].dtype) or attend(*a))
    readers, found = watch(monkeypatch), []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            found.append(gradients(lambda: hidden_states(bert, tokens).square().sum(), bert))
        assert (readers - HERE) and seen == {torch.bfloat16}
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.03 * max(1.0, other.norm().item())


def test_a_hook_on_a_weight_is_called_once(two_threads, monkeypatch) -> None:
    bert, tokens = small_bert(), rows_of([7, 6, 5, 6, 7, 5])
    watch(monkeypatch)
    plain, called = gradients(lambda: hidden_states(bert, tokens).square().sum(), bert), []
    bert.encoder.layer[0].intermediate.dense.weight.register_hook(lambda g: called.append(1) or 2 * g)
    doubled = gradients(lambda: hidden_states(bert, tokens).square().sum(), bert)
    assert called == [1]
    assert sum(not torch.allclose(one, other) for one, other in zip(plain, doubled, strict=True)) == 1


def test_threads_learn_twice_from_a_graph_that_is_kept(two_threads, monkeypatch) -> None:
    bert, tokens = small_bert(), rows_of([7, 6, 5, 6, 7, 5])
    readers = watch(monkeypatch)
    value, weight = hidden_states(bert, tokens).square().sum(), bert.encoder.layer[0].output.dense.weight
    assert readers != HERE
    value.backward(retain_graph=True)
    once = weight.grad.clone()
    value.backward()
    torch.testing.assert_close(weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="a second time"):
        value.backward()


def test_threads_leave_a_weight_alone_that_no_layer_uses(two_threads, monkeypatch) -> None:
    bert, tokens = small_bert(), rows_of([7, 6, 5, 6, 7, 5])
    bert.encoder.unused = torch.nn.Linear(3, 3)
    readers = watch(monkeypatch)
    hidden_states(bert, tokens).square().sum().backward()
    assert readers != HERE
    assert bert.encoder.unused.weight.grad is None
    assert bert.encoder.layer[1].output.dense.weight.grad is not None


def test_threads_drop_anew_where_only_the_layers_train(two_threads, monkeypatch) -> None:
    bert, tokens = small_bert(dropout=0.3).eval(), rows_of([7, 6, 5, 6, 7, 5])
    bert.encoder.train()
    readers = watch(monkeypatch)
    one, other = hidden_states(bert, tokens), hidden_states(bert, tokens)
    assert readers != HERE
    assert not torch.allclose(one, other)


def test_so_many_threads_that_their_gradients_would_fill_memory_share_products(
    two_threads, monkeypatch
) -> None:
    readers = watch(monkeypatch)
    monkeypatch.setattr(packed, "MOST", 1)
    hidden_states(small_bert(), rows_of([7, 6, 5, 6, 7, 5]))
    assert readers == HERE


def test_what_is_to_be_made_again_is_not_kept_by_threads(two_threads, monkeypatch) -> None:
    """Their graphs would be: autograd, which throws away what is to be made again, does not see them."""
    bert, tokens = small_bert(), rows_of([7, 6, 5, 6, 7, 5])
    readers = watch(monkeypatch)
    found = gradients(lambda: recomputed(hidden_states, bert, tokens).square().sum(), bert)
    assert readers == HERE
    expected = gradients(lambda: hidden_states(bert, tokens).square().sum(), bert)
    assert readers != HERE
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_row_is_read_alike_whatever_stands_beside_it(dropout) -> None:
    bert = small_bert(dropout).train(dropout > 0)
    one, other = rows_of([9, 6, 4], seed=1), rows_of([9, 6, 4], seed=2)
    other.ids_BT[0], other.segments_BT[0] = one.ids_BT[0], one.segments_BT[0]
    found = []
    for tokens in (one, other):
        torch.manual_seed(0)
        found.append(hidden_states(bert, tokens))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("lengths", [[20, 13, 2, 20], [33, 64, 32, 45, 45]])
def test_bf16_is_as_near_to_float32_as_transformers_is(lengths) -> None:
    """Also where rows are filled up: what fills them says nothing and learns nothing."""
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 192}
    fast = small_bert(**sizes, max_position_embeddings=64).float()
    plain = twin(fast)
    tokens = rows_of(lengths)
    real_BT1 = tokens.mask_BT[:, :, None].bool()
    names = [name for name, _ in plain.named_parameters() if not name.startswith("pooler")]

    def found(network: Bert | BertModel) -> list[Tensor]:
        states = hidden_states(network, tokens) if network is fast else theirs(network, tokens)
        states = states.float() * real_BT1
        weights = [dict(network.named_parameters())[name] for name in names]
        return [states.detach(), *torch.autograd.grad(states.pow(3).sum(), weights)]

    exact = found(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        errors = [
            [(one - other).norm().item() for one, other in zip(found(network), exact, strict=True)]
            for network in (fast, plain)
        ]
    assert 0 < errors[0][0] < 1.2 * errors[1][0]
    assert 0 < sum(errors[0][1:]) < 1.2 * sum(errors[1][1:])


@pytest.mark.parametrize("bf16", [False, True])
def test_some_tokens_of_long_rows_learn_what_they_learn_among_all(bf16) -> None:
    """40 of 45 that ask are filled up apart from the 45 that are asked."""
    bert = small_bert(max_position_embeddings=64).float()
    tokens = rows_of([45, 37])
    row_P, position_P = torch.zeros(40, dtype=torch.int64), torch.arange(40).flip(0)

    def some() -> Tensor:
        return states_at(bert, tokens, row_P, position_P).square().sum()

    def among_all() -> Tensor:
        return hidden_states(bert, tokens)[row_P, position_P].square().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        for one, other in zip(gradients(some, bert), gradients(among_all, bert), strict=True):
            # Beside the largest: keys' biases move nothing, and their gradients are what rounding leaves.
            assert (one - other).norm() <= (0.05 if bf16 else 1e-4) * max(1.0, other.norm().item())
