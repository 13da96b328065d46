"""BERT beside transformers' own: the same numbers, the same draws, the same files."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig as TheirConfig
from transformers import BertForMaskedLM, BertModel

from realm.errors import RealmError
from realm.model.bert import ACTIVATIONS, Bert, BertConfig, MaskedBert
from realm.model.bert_files import load_bert, save_bert
from realm.model.cpu.dropout import FastDropout
from realm.model.modes import set_dropout
from tests.transformers_twin import masked_twin, twin

CONFIG = BertConfig(
    vocab_size=50,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=24,
    max_position_embeddings=16,
    initializer_range=0.5,  # states that differ visibly
    pad_token_id=3,
)


def inputs(rows: int = 3, length: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    mask_BT = (torch.arange(length) < torch.tensor([length, 4, 1])[:rows, None]).long()
    return (
        torch.randint(50, (rows, length), generator=draw),
        mask_BT,
        torch.randint(2, (rows, length), generator=draw),
    )


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_padded_states_logits_and_gradients_are_those_of_transformers(activation) -> None:
    torch.manual_seed(0)
    ours = MaskedBert(replace(CONFIG, hidden_act=activation)).double()
    set_dropout(ours, 0.0)
    theirs = masked_twin(ours)
    ids, mask, segments = inputs()
    real_BT1 = mask[:, :, None]
    logits = [
        ours.cls(ours.bert(ids, mask, segments)),
        theirs(ids, attention_mask=mask, token_type_ids=segments).logits,
    ]
    torch.testing.assert_close(logits[0] * real_BT1, logits[1] * real_BT1)
    for one in logits:
        (one.square() * real_BT1).sum().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_the_pooler_is_that_of_transformers() -> None:
    bert = Bert(CONFIG, pooler=True).eval()
    ids, mask, segments = inputs()
    assert bert.pooler is not None
    found = bert.pooler(bert(ids, mask, segments)[:, 0])
    expected = twin(bert)(ids, attention_mask=mask, token_type_ids=segments).pooler_output
    torch.testing.assert_close(found, expected)


def test_the_same_seed_draws_the_weights_that_transformers_draws() -> None:
    config = TheirConfig(**asdict(CONFIG))
    for ours, theirs in (
        (lambda: MaskedBert(CONFIG), lambda: BertForMaskedLM(config)),
        (lambda: Bert(CONFIG, pooler=True), lambda: BertModel(config)),
        (lambda: Bert(CONFIG), lambda: BertModel(config, add_pooling_layer=False)),
    ):
        drawn = []
        for make in (ours, theirs):
            torch.manual_seed(3)
            drawn.append(make().state_dict())
        assert list(drawn[0]) == list(drawn[1])
        assert all(torch.equal(value, drawn[1][name]) for name, value in drawn[0].items())


def test_defaults_are_those_of_transformers() -> None:
    theirs = TheirConfig()
    assert all(getattr(theirs, name) == value for name, value in asdict(BertConfig()).items())


def test_every_dropout_is_the_fast_one_with_the_probability_of_its_place() -> None:
    bert = MaskedBert(replace(CONFIG, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2))
    found = [part for part in bert.modules() if isinstance(part, torch.nn.Dropout)]
    assert {type(part) for part in found} == {FastDropout}
    assert sorted(part.p for part in found) == [0.2] * 2 + [0.3] * (1 + 2 * 2)


# -- files


def assert_same(network: MaskedBert, folder: Path) -> None:
    loaded = load_bert(folder, "it").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize("most", ["100GB", "3KB"])
def test_what_transformers_saves_loads_here_in_one_file_or_many(most, tmp_path) -> None:
    network = MaskedBert(CONFIG)
    masked_twin(network).save_pretrained(tmp_path, max_shard_size=most)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (most == "3KB")
    assert_same(network, tmp_path)
    assert load_bert(tmp_path, "it").bert.config == CONFIG


def test_what_is_saved_here_loads_in_transformers(tmp_path) -> None:
    network = MaskedBert(CONFIG).eval()
    save_bert(network, tmp_path / "masked")
    save_bert(network.bert, tmp_path / "plain")
    masked, loading = BertForMaskedLM.from_pretrained(tmp_path / "masked", output_loading_info=True)
    assert not any(loading.values())
    plain = BertModel.from_pretrained(tmp_path / "plain", add_pooling_layer=False)
    ids, mask, segments = inputs()
    expected = network.bert(ids, mask, segments)
    for theirs in (masked.bert, plain):
        states = theirs(ids, attention_mask=mask, token_type_ids=segments).last_hidden_state
        torch.testing.assert_close(states[mask == 1], expected[mask == 1])


def test_names_of_berts_first_years_and_half_precision_load(tmp_path) -> None:
    network = MaskedBert(CONFIG)
    for parameter in network.parameters():
        parameter.data = parameter.data.half().float()
    save_bert(network, tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value.half()
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    assert any(name.endswith("gamma") for name in old)
    save_file(old | {"cls.seq_relationship.bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert_same(network, tmp_path)


def test_the_second_name_of_the_heads_bias_is_enough_and_second_values_are_refused(tmp_path) -> None:
    network = MaskedBert(CONFIG)
    torch.nn.init.normal_(network.cls.predictions.bias)
    save_bert(network, tmp_path)
    states = load_file(tmp_path / "model.safetensors")
    states["cls.predictions.decoder.bias"] = states.pop("cls.predictions.bias")
    save_file(states, tmp_path / "model.safetensors")
    assert_same(network, tmp_path)
    save_file(states | {"cls.predictions.decoder.weight": torch.ones(50, 12)}, tmp_path / "model.safetensors")
    with pytest.raises(RealmError, match=r"cls\.predictions\.decoder\.weight and \S+ must be equal"):
        load_bert(tmp_path, "it")
    for wrong, says in (
        (torch.zeros(50).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.zeros(49), r"\(49,\)"),
    ):
        save_file(states | {"cls.predictions.decoder.bias": wrong}, tmp_path / "model.safetensors")
        with pytest.raises(RealmError, match=f"bias is {says}"):
            load_bert(tmp_path, "it")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "roberta"}, "is a 'roberta' model"),
        ({"is_decoder": True}, "is a decoder"),
        ({"position_embedding_type": "relative_key"}, "'relative_key'"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"hidden_size": 13}, "hidden_size is 13: it must be a multiple of num_attention_heads, 3"),
        ({"hidden_size": "12"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"vocab_size": 10**30}, "vocab_size is 1000"),
        ({"pad_token_id": 50}, "pad_token_id is 50: .* below vocab_size, 50"),
        ({"hidden_dropout_prob": 1.5}, r"hidden_dropout_prob is 1\.5"),
        ({"num_hidden_layers": 3}, r"layer\.2\.attention\S+ is missing"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000: it must be 1000 or less"),
        ({"hidden_size": 9 * 10**6}, r"is \(50, 12\), but config\.json requires \(50, 9000000\)"),
        ({"hidden_size": 3 * 2**29}, "no network has the sizes in config.json"),
        ({"vocab_size": 51}, r"word_embeddings\.weight is \(50, 12\), but config\.json requires \(51, 12\)"),
    ],
)
def test_what_is_no_bert_of_ours_is_one_line(change, says, tmp_path) -> None:
    save_bert(MaskedBert(CONFIG), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(RealmError, match=says) as error:
        load_bert(tmp_path, "it")
    assert "\n" not in str(error.value) and str(error.value).startswith("it")


@pytest.mark.parametrize(
    "index",
    ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 4}}', "{", '{"weight_map": {"a": "../x"}}'],
)
def test_a_damaged_index_of_weights_is_one_line(index, tmp_path) -> None:
    save_bert(MaskedBert(CONFIG), tmp_path / "it")
    (tmp_path / "it" / "model.safetensors").rename(tmp_path / "x")
    (tmp_path / "it" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(
        RealmError, match=r"it/model\.safetensors\.index\.json (is damaged|lists (4|\.\./x))"
    ) as error:
        load_bert(tmp_path / "it", "it")
    assert "\n" not in str(error.value)
