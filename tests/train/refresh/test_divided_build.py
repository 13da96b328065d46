"""Builds for which training waits are divided among the ranks."""

import json
from pathlib import Path

import numpy as np
import torch.distributed as dist

from realm.store.knowledge_base import KnowledgeBase
from tests.ranks import run_on_ranks
from tests.train.refresh.refreshing import expected, move, refresher, rows


def of_rank(rank: int, kb_folder: str, model_folder: str, run: str, results: str) -> None:
    """The vectors of a first build, a later one and the last one, and how many passages this rank embedded for each."""
    from realm.model.folder import load_model
    from realm.train.refresh import divided_build

    dist.init_process_group("gloo", init_method=f"file://{results}.meet", rank=rank, world_size=2)
    embedded: list[int] = []
    embed_passages = divided_build.embed_passages

    def counting(model, tokens, numbers, **shown) -> np.ndarray:
        embedded.append(len(numbers))
        return embed_passages(model, tokens, numbers, **shown)

    divided_build.embed_passages = counting
    kb, model = KnowledgeBase.open(kb_folder), load_model(model_folder)
    warned: list[str] = []
    divided_build.warn_if_cut = lambda *_: warned.append("cut")
    with refresher(kb, Path(run), in_background=False) as builds:
        versions = [builds.build_initial(model, 0)]
        first = rows(versions[0])
        move(model)
        builds.request(model, 10)
        versions.append(builds.poll(10))
        versions.append(builds.build_final(model, 15))
    np.save(f"{results}.{rank}.npy", np.stack([first, rows(versions[1]), rows(versions[2])]))
    seen = {
        "embedded": embedded,
        "steps": [version.step for version in versions],
        "warned": len(warned),
        "timed": versions[1].cost.get("build_seconds", 0) > 0,
    }
    Path(f"{results}.{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def test_ranks_embed_a_part_each_and_all_search_the_same_vectors(
    tiny_kb, tiny_model, tiny_model_folder, run_folder, tmp_path
) -> None:
    results = tmp_path / "seen"
    run_on_ranks(of_rank, (str(tiny_kb.folder), str(tiny_model_folder), str(run_folder), str(results)), 2)
    before = expected(tiny_kb, tiny_model)
    move(tiny_model)
    after = expected(tiny_kb, tiny_model)
    half = len(tiny_kb) // 2
    for rank in range(2):
        found = np.load(f"{results}.{rank}.npy")
        np.testing.assert_allclose(found, np.stack([before, after, after]), atol=4e-3)
        assert json.loads(Path(f"{results}.{rank}.json").read_text()) == {
            "embedded": [half] * 3 if rank == 0 else [len(tiny_kb) - half] * 3,
            "steps": [0, 10, 15],
            "warned": 3 if rank == 0 else 0,
            "timed": rank == 0,
        }
    assert not (run_folder / "parts").exists()
