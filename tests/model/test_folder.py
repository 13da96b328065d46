"""Model folders: what comes back, what belongs together, and how a folder is written."""

import json
import os
import re
import resource
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM

from realm.errors import RealmError
from realm.model import folder as folder_module
from realm.model.bert import Bert
from realm.model.embedder import EmbedderConfig, embedder_from
from realm.model.folder import Model, load_model, save_model
from realm.model.masked_reader import EncoderConfig, new_reader
from realm.model.span_reader import SpanReader
from realm.tokens.layouts import Lengths, query_inputs
from realm.tokens.tokenizer import Tokenizer
from tests.damages import full_disk_at
from tests.transformers_twin import masked_twin


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["one two three four"], vocab_size=40)


def small_model(tokenizer: Tokenizer, seed: int = 0, **embedder) -> Model:
    torch.manual_seed(seed)
    reader = new_reader(EncoderConfig(layers=1, hidden=16, heads=2, positions=32), tokenizer)
    config = EmbedderConfig(**{"dim": 4, **embedder})
    return Model(
        tokenizer,
        Lengths(query=8, passage=16),
        reader.eval(),
        embedder_from(reader, config).eval(),
        step=7,
        stages=[{"stage": "mlm", "steps": 7, "seed": seed}],
    )


def states(model: Model) -> dict[str, torch.Tensor]:
    return {f"{n}.{k}": v for n, part in model.parts().items() for k, v in part.state_dict().items()}


def assert_same_weights(one: Model, other: Model) -> None:
    assert states(one).keys() == states(other).keys()
    assert all(torch.equal(value, states(other)[name]) for name, value in states(one).items())


def change(module: torch.nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).add_(1e-3)


def test_saved_model_comes_back_bit_for_bit(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small_model(tokenizer)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert_same_weights(loaded, model)
    assert loaded.embedder.query is loaded.embedder.passage
    assert (loaded.step, loaded.stages, loaded.lengths) == (
        7,
        [{"stage": "mlm", "steps": 7, "seed": 0}],
        Lengths(8, 16),
    )
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    assert loaded.embedder.config == model.embedder.config
    assert not any(module.training for part in loaded.parts().values() for module in part.modules())
    inputs = query_inputs([[7, 8]], tokenizer, model.lengths)
    assert torch.equal(loaded.embedder.query(inputs), model.embedder.query(inputs))


@pytest.mark.parametrize("pooling", ["mean", "cls", "words"])
def test_two_towers_and_a_span_reader_come_back_bit_for_bit(
    tokenizer: Tokenizer, tmp_path: Path, pooling
) -> None:
    model = small_model(tokenizer, pooling=pooling, norm="layer")
    model.embedder.untie()
    change(model.embedder.query)
    encoder = Bert(model.reader.config)
    model.span_reader = SpanReader(encoder)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.embedder.query is not loaded.embedder.passage
    assert_same_weights(loaded, model)


def test_the_reader_may_stay_on_disk_but_not_a_damaged_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small_model(tokenizer)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", reader=False)
    assert loaded.parts().keys() == {"embedder"}
    model.masked_reader = None
    assert_same_weights(loaded, model)
    (tmp_path / "model" / "encoder" / "model.safetensors").write_bytes(b"")
    with pytest.raises(RealmError, match="does not load as a BERT"):
        load_model(tmp_path / "model", reader=False)


def test_saving_again_changes_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_model(small_model(tokenizer), tmp_path / "one")
    save_model(load_model(tmp_path / "one"), tmp_path / "two")
    assert (
        load_model(tmp_path / "two").compute_passage_fingerprint()
        == load_model(tmp_path / "one").compute_passage_fingerprint()
    )
    manifests = [json.loads((tmp_path / name / "realm.json").read_text()) for name in ("one", "two")]
    assert manifests[0] == manifests[1]


def test_fingerprint_follows_the_passage_tower_and_nothing_else(tokenizer: Tokenizer) -> None:
    model = small_model(tokenizer)
    before = model.compute_passage_fingerprint()
    change(model.reader)
    model.embedder.untie()
    assert model.compute_passage_fingerprint() == before
    change(model.embedder.query)
    assert model.compute_passage_fingerprint() == before
    change(model.embedder.passage)
    assert model.compute_passage_fingerprint() != before


def test_fingerprint_follows_how_states_become_vectors(tokenizer: Tokenizer) -> None:
    plain = small_model(tokenizer)
    assert (
        small_model(tokenizer, scale=10.0).compute_passage_fingerprint()
        != plain.compute_passage_fingerprint()
    )
    assert (
        small_model(tokenizer, shared=False).compute_passage_fingerprint()
        == plain.compute_passage_fingerprint()
    )


@pytest.mark.parametrize("pooling", ["cls", "words"])
def test_two_towers_start_equal(tokenizer: Tokenizer, pooling) -> None:
    embedder = small_model(tokenizer, shared=False, pooling=pooling).embedder
    assert embedder.query is not embedder.passage
    for name, value in embedder.query.state_dict().items():
        assert torch.equal(value, embedder.passage.state_dict()[name])


def test_fingerprint_survives_the_disk(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small_model(tokenizer)
    save_model(model, tmp_path / "model")
    assert load_model(tmp_path / "model").compute_passage_fingerprint() == model.compute_passage_fingerprint()
    manifest = json.loads((tmp_path / "model" / "realm.json").read_text())
    assert manifest["passage_fingerprint"] == model.compute_passage_fingerprint()


def test_encoder_folder_loads_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small_model(tokenizer)
    save_model(model, tmp_path / "model")
    bert, loading = BertForMaskedLM.from_pretrained(tmp_path / "model" / "encoder", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ids = torch.tensor([[2, 7, 8, 3]])
    with torch.no_grad():
        assert torch.equal(bert.eval()(ids).logits, masked_twin(model.reader.bert)(ids).logits)
    assert Tokenizer.load(tmp_path / "model" / "encoder").fingerprint == tokenizer.fingerprint


# -- atomic


def test_save_that_dies_leaves_the_old_model(tokenizer: Tokenizer, tmp_path: Path, monkeypatch) -> None:
    old, new = small_model(tokenizer, seed=0), small_model(tokenizer, seed=1)
    save_model(old, tmp_path / "model")

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for step in ("save_tensors", "write_json", "replace_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(folder_module, step, die)
            with pytest.raises(KeyboardInterrupt):
                save_model(new, tmp_path / "model")
        assert_same_weights(load_model(tmp_path / "model"), old)
    save_model(new, tmp_path / "model")  # over the litter of the dead ones
    assert_same_weights(load_model(tmp_path / "model"), new)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_rights_of_every_file_follow_the_umask(tokenizer: Tokenizer, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        model = small_model(tokenizer)
        model.span_reader = SpanReader(Bert(model.reader.config))
        save_model(model, tmp_path / "model")
    finally:
        os.umask(before)
    rights = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert len(rights) > 4
    assert set(rights.values()) == {0o666 & ~mask}


def test_a_full_disk_at_any_step_is_one_line_and_the_old_model_stays(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch
) -> None:
    old, new = small_model(tokenizer, seed=0), small_model(tokenizer, seed=1)
    new.span_reader = SpanReader(Bert(new.reader.config))
    folder = tmp_path / "model"
    save_model(old, folder)
    whole = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    for number in count():
        said = ""
        try:
            with full_disk_at(number, monkeypatch) as steps:
                save_model(new, folder)
        except RealmError as error:
            said = str(error)
        if not said:
            assert_same_weights(load_model(folder), new)
            if number == len(steps):  # no step failed
                break
            save_model(
                old, folder
            )  # a step failed after the exchange, when the new model had its name already
            continue
        advice = r"[\d,.]+ MB are free: remove files, or .*`realm kb compact`"
        assert re.fullmatch(f"{folder} cannot be written: No space left on device; {advice}", said), steps
        left = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
        assert left == whole, steps
    assert number > 15


@pytest.mark.parametrize("name", ["embedder.safetensors", "encoder/model.safetensors", "encoder/config.json"])
def test_a_file_that_does_not_fit_is_one_line_and_the_old_model_stays(
    tokenizer: Tokenizer, tmp_path: Path, name: str
) -> None:
    """With a real limit, so that the libraries are stopped in the middle."""
    save_model(small_model(tokenizer), tmp_path / "model")
    size = (tmp_path / "model" / name).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, before[1]))
    try:
        with pytest.raises(RealmError, match=r"model cannot be written: .*File too large") as error:
            save_model(small_model(tokenizer, seed=1), tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value)
    assert_same_weights(load_model(tmp_path / "model"), small_model(tokenizer))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_extra_files_travel_with_the_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    save_model(small_model(tokenizer), tmp_path / "model", extra=[tmp_path / "metrics.jsonl"])
    assert (tmp_path / "model" / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("reader", [True, False])
@pytest.mark.parametrize("damage", [{"hidden_size": "abc"}, {"num_attention_heads": 5}])
def test_an_encoder_whose_sizes_make_no_sense_is_refused(tokenizer, tmp_path, damage, reader) -> None:
    folder = tmp_path / "model"
    save_model(small_model(tokenizer), folder)
    config = folder / "encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | damage))
    with pytest.raises(RealmError, match=r"encoder"):
        load_model(folder, reader)
