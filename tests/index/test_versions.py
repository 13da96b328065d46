"""The index of a knowledge base: built, completed after additions, apart from other models' and never half there."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from realm.errors import RealmError
from realm.index import embedding
from realm.index import versions as index_module
from realm.index.embedding import IndexConfig, batches_by_length, embed_passages
from realm.index.versions import build_index, complete_index, index_folder
from realm.model.folder import load_model, save_model
from realm.store import unfinished, vectors
from realm.store.tables.table import open_table
from realm.text.corpus import Document
from realm.tokens.tokenizer import Tokenizer
from tests.store.tiny import TinyTagger

CONFIG = IndexConfig(device="cpu", precision="fp32")
NEW = Document("Oakham", "Oakham lies on the river Tarn. Berthe sold the bells of Oakham to Corvo.", "new")


@pytest.fixture
def embedded(monkeypatch) -> list[list[list[int]]]:
    """The wordpieces of every passage, for each call that embeds."""
    calls: list[list[list[int]]] = []

    def embed(model, tokens, numbers, **options):
        calls.append([tokens.body.row(n).tolist() for n in numbers])
        return embed_passages(model, tokens, numbers, **options)

    monkeypatch.setattr(index_module, "embed_passages", embed)
    return calls


def expected(kb, model) -> np.ndarray:
    return embed_passages(model, kb.tokens, np.arange(len(kb)))


def assert_searches(version, kb, model) -> None:
    """Every passage's own vector finds it."""
    vectors_ND = expected(kb, model)
    np.testing.assert_allclose(version.index.rows(np.arange(len(kb))), vectors_ND, atol=4e-3)
    hits = version.index.search(torch.from_numpy(vectors_ND.astype(np.float32)), 1)
    assert hits.number_BK[:, 0].tolist() == list(range(len(kb)))


def test_index_holds_every_passages_vector(own_kb, tiny_model, tiny_model_folder) -> None:
    version = complete_index(own_kb, tiny_model, str(tiny_model_folder))
    assert (version.number, version.step) == (1, 3)
    assert_searches(version, own_kb, tiny_model)


def test_building_again_embeds_nothing(own_kb, tiny_model_folder, embedded) -> None:
    report = build_index(own_kb, str(tiny_model_folder), CONFIG)
    assert report["embedded"] == 0 and report["version"] == 1 and report["passages"] == len(own_kb)
    assert embedded == []


@pytest.mark.parametrize(
    ("longest", "says"),
    [
        (48, []),
        (64, []),
        (
            32,
            [
                "passages of KB have up to 48 wordpieces, and the model embeds only the first 32: build the knowledge base "
                "with `--set passage_tokens=32`"
            ],
        ),
    ],
)
def test_passages_that_are_longer_than_the_model_embeds_are_a_warning(
    own_kb, tiny_model, tmp_path, caplog, longest, says
) -> None:
    tiny_model.lengths = replace(tiny_model.lengths, passage=longest)
    save_model(tiny_model, tmp_path / "model")
    for _ in range(2):
        build_index(own_kb, str(tmp_path / "model"), CONFIG)
    assert caplog.messages == [line.replace("KB", str(own_kb.folder)) for line in says]


@pytest.mark.parametrize("by", ["load", "build"])
def test_only_what_was_added_is_embedded(own_kb, tiny_model, tiny_model_folder, embedded, by) -> None:
    before = len(own_kb)
    own_kb.add([NEW], TinyTagger())
    added = [own_kb.tokens.body.row(n).tolist() for n in range(before, len(own_kb))]
    assert added
    if by == "build":
        assert build_index(own_kb, str(tiny_model_folder), CONFIG)["embedded"] == len(added)
    version = complete_index(own_kb, tiny_model, str(tiny_model_folder))
    assert embedded == [added]
    assert version.number == 2
    assert_searches(version, own_kb, tiny_model)
    complete_index(own_kb, tiny_model, str(tiny_model_folder))
    assert len(embedded) == 1  # it was saved


def test_a_mapped_index_is_completed_on_disk(own_kb, tiny_model, tiny_model_folder, embedded) -> None:
    own_kb.add([NEW], TinyTagger())
    folder = index_folder(own_kb, tiny_model)
    known = vectors.mapped(folder, own_kb.keys_N)
    assert known is not None and len(known.missing) and isinstance(known.array, np.memmap)
    version = complete_index(own_kb, tiny_model, str(tiny_model_folder), mapped=True)
    assert_searches(version, own_kb, tiny_model)
    again = complete_index(own_kb, tiny_model, str(tiny_model_folder), mapped=True)
    assert_searches(again, own_kb, tiny_model)
    assert (
        len(embedded) == 1
        and len(list(folder.glob("*mapped*"))) == len(list(folder.glob("mapped-2-*.npy"))) == 1
    )
    assert not list(folder.glob(".mapped*"))


def test_vectors_of_another_model_are_not_read(own_kb, tiny_model_folder, tmp_path, monkeypatch) -> None:
    """A training run publishes the versions of all its snapshots in one folder."""
    assert build_index(own_kb, str(tiny_model_folder), CONFIG, tmp_path / "run")["embedded"] == len(own_kb)
    model = load_model(tiny_model_folder)
    with torch.no_grad():
        model.embedder.passage.projection.weight.mul_(2)
    save_model(model, tmp_path / "later")
    monkeypatch.delattr(vectors, "read")
    report = build_index(own_kb, str(tmp_path / "later"), CONFIG, tmp_path / "run")
    assert (report["version"], report["embedded"]) == (2, len(own_kb))


@pytest.mark.parametrize("by", ["load", "build"])
def test_what_another_process_embeds_meanwhile_is_used(
    own_kb, tiny_model, tiny_model_folder, monkeypatch, by
) -> None:
    own_kb.add([NEW], TinyTagger())

    def embed(*arguments, **options):
        monkeypatch.setattr(index_module, "embed_passages", embed_passages)
        build_index(own_kb, str(tiny_model_folder), CONFIG)
        return embed_passages(*arguments, **options)

    monkeypatch.setattr(index_module, "embed_passages", embed)
    if by == "build":
        assert build_index(own_kb, str(tiny_model_folder), CONFIG)["embedded"] == 0
    version = complete_index(own_kb, tiny_model, str(tiny_model_folder))
    assert version.number == 2
    assert_searches(version, own_kb, tiny_model)
    table = open_table(index_folder(own_kb, tiny_model) / vectors.TABLE)
    written = {file.path for fragment in table.get_fragments() for file in fragment.data_files()}
    assert {
        file.name for file in (index_folder(own_kb, tiny_model) / vectors.TABLE / "data").iterdir()
    } == written


def test_deleted_passages_are_gone_without_embedding(own_kb, tiny_model, tiny_model_folder, embedded) -> None:
    own_kb.delete(["d0", "d7"])
    version = complete_index(own_kb, tiny_model, str(tiny_model_folder))
    assert embedded == [] and len(version.index) == len(own_kb) == 24
    assert_searches(version, own_kb, tiny_model)


def test_building_again_drops_the_vectors_of_deleted_passages(
    own_kb, tiny_model, tiny_model_folder, embedded
) -> None:
    own_kb.delete(["d0", "d7"])
    report = build_index(own_kb, str(tiny_model_folder), CONFIG)
    assert report["version"] == 2 and report["embedded"] == 0 and embedded == []
    known = vectors.read(index_folder(own_kb, tiny_model), own_kb.keys_N)
    assert known is not None and known.left_over == 0 and known.info.corpus == own_kb.fingerprint
    assert_searches(complete_index(own_kb, tiny_model, str(tiny_model_folder)), own_kb, tiny_model)


def test_additions_and_deletions_together_keep_vectors_with_their_passages(
    own_kb, tiny_model, tiny_model_folder, embedded
) -> None:
    own_kb.delete(["d3"])
    own_kb.add([NEW, Document("Arden", "Arden was flooded. Corvo sent bread.", "d0")], TinyTagger())
    version = complete_index(own_kb, tiny_model, str(tiny_model_folder))
    assert sum(map(len, embedded)) == 2
    assert_searches(version, own_kb, tiny_model)


def test_another_model_has_an_index_of_its_own(own_kb, tiny_model, tiny_model_folder, tmp_path) -> None:
    with torch.no_grad():
        for parameter in tiny_model.embedder.passage.projection.parameters():
            parameter.mul_(-1)
    save_model(tiny_model, tmp_path / "other")
    with pytest.raises(RealmError, match=r"no index of .*realm index --kb"):
        complete_index(own_kb, tiny_model, str(tmp_path / "other"))
    build_index(own_kb, str(tmp_path / "other"), CONFIG)
    assert_searches(complete_index(own_kb, tiny_model, str(tmp_path / "other")), own_kb, tiny_model)
    first = load_model(tiny_model_folder)
    assert_searches(complete_index(own_kb, first, str(tiny_model_folder)), own_kb, first)


def test_model_whose_query_side_moved_finds_the_old_index(
    own_kb, tiny_model, tiny_model_folder, embedded
) -> None:
    tiny_model.embedder.untie()
    with torch.no_grad():
        tiny_model.embedder.query.projection.weight.mul_(-1)
    assert len(complete_index(own_kb, tiny_model, str(tiny_model_folder)).index) == len(own_kb)
    assert embedded == []


def test_index_of_another_tokenizer_is_refused(own_kb, tiny_model, tmp_path) -> None:
    tiny_model.tokenizer = Tokenizer.train(["quite other words"], vocab_size=40)
    save_model(tiny_model, tmp_path / "other")
    with pytest.raises(RealmError, match="tokenizer") as error:
        build_index(own_kb, str(tmp_path / "other"), CONFIG)
    assert "\n" not in str(error.value)


def test_build_into_a_folder_of_its_own_leaves_the_knowledge_base_alone(
    own_kb, tiny_model_folder, tmp_path
) -> None:
    def files() -> set[Path]:
        return {path.relative_to(own_kb.folder) for path in own_kb.folder.rglob("*")}

    before = files()
    run = tmp_path / "run" / "index"
    assert build_index(own_kb, str(tiny_model_folder), CONFIG, run)["embedded"] == len(own_kb)
    assert files() == before
    found = vectors.read(run, own_kb.keys_N)
    assert found is not None and len(found.missing) == 0


def test_only_the_newest_versions_stay(own_kb, tiny_model, tiny_model_folder) -> None:
    folder = index_folder(own_kb, tiny_model)
    for number in range(3):
        own_kb.add([NEW._replace(id=f"n{number}", title=f"Oakham {number}")], TinyTagger())
        build_index(own_kb, str(tiny_model_folder), CONFIG)
    assert [vectors.info_of(folder, version) is not None for version in (3, 4)] == [True, True]
    with pytest.raises(RealmError, match="no version 2"):
        vectors.info_of(folder, 2)


def test_half_written_version_is_never_loaded(own_kb, tiny_model, tiny_model_folder, monkeypatch) -> None:
    """A build that dies before its commit leaves files that no version names."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    folder = index_folder(own_kb, tiny_model)
    shutil.copytree(folder, folder.parent / "other")
    own_kb.add([NEW], TinyTagger())
    with monkeypatch.context() as patch:
        patch.setattr(vectors, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            build_index(own_kb, str(tiny_model_folder), CONFIG)
    known = vectors.read(folder, own_kb.keys_N)
    assert known is not None and known.version == 1 and len(known.missing) == 1
    assert_searches(complete_index(own_kb, tiny_model, str(tiny_model_folder)), own_kb, tiny_model)


@pytest.fixture
def stops(monkeypatch) -> list[int]:
    """Builds of several batches that keep their vectors; one that is asked for more batches than are left here is killed."""
    monkeypatch.setattr(embedding, "BATCH_TOKENS", 60)
    monkeypatch.setattr(unfinished, "WORTH_KEEPING", 1)
    left, rows = [1000], embedding.passage_rows

    def counted(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return rows(*arguments)

    monkeypatch.setattr(embedding, "passage_rows", counted)
    return left


@pytest.mark.parametrize("damage", ["none", "cut", "lost", "another model's"])
def test_a_killed_build_goes_on_and_ends_as_if_it_never_was(
    damage, own_kb, tiny_model, tiny_model_folder, stops, tmp_path
) -> None:
    build_index(own_kb, str(tiny_model_folder), CONFIG, tmp_path / "whole")
    wanted, batches = vectors.read(tmp_path / "whole", own_kb.keys_N), 1000 - stops[0]
    assert wanted is not None and batches > 4
    stops[0] = 3
    with pytest.raises(KeyboardInterrupt):
        build_index(own_kb, str(tiny_model_folder), CONFIG, tmp_path / "index")
    assert vectors.newest(tmp_path / "index") is None
    (file,) = (tmp_path / "index").glob("unfinished-*")
    content, again = file.read_bytes(), batches - 3
    if damage == "cut":  # within the last vector
        file.write_bytes(content[:-7])
        again += 1
    elif damage == "lost":  # as after a power cut
        file.write_bytes(bytes(len(content)))
        again += 3
    elif damage == "another model's":
        file.rename(file.with_name("unfinished-0123456789abcdef-all"))
        again += 3
    stops[0] = 1000
    build_index(own_kb, str(tiny_model_folder), CONFIG, tmp_path / "index")
    assert 1000 - stops[0] == again
    found = vectors.read(tmp_path / "index", own_kb.keys_N)
    assert found is not None and np.array_equal(found.array, wanted.array) and len(found.missing) == 0
    assert not list((tmp_path / "index").glob("unfinished-*"))


def test_a_killed_build_is_not_taken_for_an_index_by_the_commands_that_run_stages(
    own_kb, tiny_model, tiny_model_folder, stops
) -> None:
    folder = index_folder(own_kb, tiny_model)
    shutil.rmtree(folder)
    done = vectors.first_commit_of(own_kb.folder, tiny_model.compute_passage_fingerprint())
    stops[0] = 3
    with pytest.raises(KeyboardInterrupt):
        build_index(own_kb, str(tiny_model_folder), CONFIG)
    assert folder.is_dir() and not done.exists()
    stops[0] = 1000
    build_index(own_kb, str(tiny_model_folder), CONFIG)
    assert done.is_dir()


def test_additions_that_were_being_embedded_go_on_too(own_kb, tiny_model, tiny_model_folder, stops) -> None:
    own_kb.add(
        [Document(f"Oak {n}", f"Oak {n} lies on the river Tarn.", f"o{n}") for n in range(30)], TinyTagger()
    )
    known = vectors.read(index_folder(own_kb, tiny_model), own_kb.keys_N)
    assert known is not None and len(known.missing) >= 30
    title, body = own_kb.tokens.title, own_kb.tokens.body
    length_M = title.lengths_of(known.missing) + body.lengths_of(known.missing) + 3
    stops[0] = 2
    with pytest.raises(KeyboardInterrupt):
        complete_index(own_kb, tiny_model, str(tiny_model_folder))
    stops[0] = 1000
    version = complete_index(own_kb, tiny_model, str(tiny_model_folder))
    assert 1000 - stops[0] == len(batches_by_length(length_M, 60)) - 2
    assert_searches(version, own_kb, tiny_model)


def test_two_builds_at_a_time_do_not_write_into_one_file(tmp_path) -> None:
    keys = np.arange(unfinished.WORTH_KEEPING, dtype=np.uint64)
    with (
        unfinished.kept(tmp_path, "m", "all", keys, 4) as one,
        unfinished.kept(tmp_path, "m", "all", keys, 4) as two,
    ):
        assert one is not None and two is None


def test_damaged_index_is_one_line(own_kb, tiny_model, tiny_model_folder) -> None:
    (data,) = (index_folder(own_kb, tiny_model) / "vectors.lance" / "data").iterdir()
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(RealmError, match="damaged") as error:
        complete_index(own_kb, tiny_model, str(tiny_model_folder))
    assert "\n" not in str(error.value)


def test_emptied_knowledge_base_has_an_empty_index(own_kb, tiny_model, tiny_model_folder) -> None:
    own_kb.delete([f"d{n}" for n in range(14)])
    version = complete_index(own_kb, tiny_model, str(tiny_model_folder))
    assert len(version.index) == 0
    assert version.index.search(torch.ones(2, 16), 5).number_BK.shape == (2, 0)
