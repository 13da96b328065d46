"""Compares a pre-training step of `realm` with a padded implementation and with transformers 4.57.6: time and memory.

    python benchmarks/train_step.py              # 384 hidden units, 6 layers, 4 queries x 8 candidates, 64 + 288 tokens
    python benchmarks/train_step.py --full       # all rows have the maximal length, so that no row needs padding
    python benchmarks/train_step.py --hidden 768 --layers 12 --queries 32      # BERT-base, for a GPU with 80 GB

A step is a forward and a backward pass with dropout 0.1. All implementations get the same weights and inputs, each in a process
of its own. After a warm-up round, `realm` is measured in `--rounds` rounds, of which the fastest counts, and the other
implementations, which take minutes, in one round. The implementations (`--ways`) are:

padded       all rows are padded to 64, 288 and 352 tokens; the layers are those of transformers, and dropout is that of torch.
             Words are predicted at masked positions only. The settings of threads and memory are those of `realm`.
fp32         `realm` in float32
bf16         `realm` in bf16; by default only if the device has instructions for bf16
bf16-unfused the same without the fused kernels of a GPU; by default only on a GPU
...-sampled  the reader is trained through one candidate, which is drawn by its credit (`pretrain.reader_gradient`)
reference    RealmScorer and RealmKnowledgeAugEncoder of transformers 4.57.6 on the CPU, if
             tests/interop/reference_environment.py has made their environment. Words are predicted at every position.

All implementations must give the same loss without dropout: to 1e-5 in float32, to 1 % in bf16. FLOPs are counted for matrix
products and for tokens that are not padding, with two operations for a multiplication and an addition. `utilisation` is their
share of the speed of one large matrix product in the same precision (2048 x 2048, on a GPU 8192 x 8192), which is measured in
the same process. The FLOPs are those of the whole step; most of them are those of the joint encoder (`joint_gflop`). Prints a
table, and one JSON object as the last line.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE),
    str(HERE.parent),
]  # a file that is run by its path does not find the package `realm`
from realm.environment import set_torch_environment

if sys.argv[1:2] == ["--side"]:  # as in the command line; the reference keeps its own settings
    set_torch_environment()

import shared
import torch
from interop_inputs import B, K, print_result, step_inputs, timed
from torch import Tensor, nn

from realm.interop.checkpoint import open_checkpoint
from realm.interop.weight_names import convert
from realm.masking.candidates import RetrievalBatch
from realm.model import flash
from realm.model.device import autocast, choose_device, keep_freed_memory, multiplies_bf16
from realm.model.embedder import Tower, TransformerTower
from realm.model.folder import Model
from realm.model.losses import marginal_loss
from realm.plan.costs import TRAINED, head_work, layers_flop
from realm.tokens.layouts import Tokens
from realm.train.pretrain import Entries, PretrainConfig, read, sampled_reader_loss
from tests.interop import reference_environment
from tests.interop.reference_environment import REFERENCE

REFERENCE_FILE = Path(reference_environment.__file__).relative_to(HERE.parent)
OURS = ("fp32", "fp32-sampled", "bf16", "bf16-unfused", "bf16-sampled")
WAYS = ("padded-fp32", "padded-bf16", *OURS)


def step(folder: Path, rounds: int, way: str, queries: int, full: bool) -> dict[str, Any]:
    """Measures one implementation: seconds, memory, loss without dropout, tokens and FLOPs."""
    device = choose_device("auto")
    model = convert(
        open_checkpoint(str(folder / "scorer")), encoder=open_checkpoint(str(folder / "encoder"))
    ).model
    given = step_inputs(queries, full)
    tokens = {
        name: Tokens(*(given[name][part].to(device) for part in ("ids", "mask", "segments")))
        for name in ("query", "candidate", "joint")
    }
    label_BT, mask_BT = (given["target"][name].to(device) for name in ("labels", "mask"))
    position_BM = mask_BT.nonzero()[:, 1].view(queries, -1)
    place_BK = torch.arange(queries * K, device=device).view(queries, K)
    batch = RetrievalBatch(
        tokens["query"], tokens["candidate"], place_BK, tokens["joint"],
        position_BM, label_BT.gather(1, position_BM), mask_BT.gather(1, position_BM),
    )  # fmt: skip
    padded, sampled = way.startswith("padded"), way.endswith("sampled")
    precision = "bf16" if "bf16" in way else "fp32"
    model.to(device)
    if way == "bf16-unfused":
        flash._is_fused = lambda *_: False
    if device.type == "cpu":
        keep_freed_memory()  # as in a training run
    plain = in_transformers(model) if padded else None
    networks: Sequence[nn.Module] = plain or (model.embedder, model.reader)

    def run(number: int) -> float:
        for part in networks:
            part.to(device).train(number > 0)
            part.zero_grad()
        with autocast(device, precision):
            loss = padded_loss(plain, batch) if plain else our_loss(model, batch, sampled and number > 0)
        loss.backward()
        return loss.item()  # waits until a GPU has finished

    found = timed(run, rounds)
    if device.type == "cuda":
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    count = sum(int(part.mask_BT.sum()) for part in tokens.values())
    embedding, joint = step_flops(model, tokens, position_BM.shape[1], sampled)
    flops = embedding + joint
    ceiling = matmul_ceiling(device, precision)
    return found | {
        "tokens_s": round(count / found["wall_s"]),
        "steps_s": round(1 / found["wall_s"], 3),
        "gflop": round(flops / 1e9),
        "joint_gflop": round(joint / 1e9),
        "ceiling_gflop_s": round(ceiling / 1e9),
        "utilisation": round(flops / found["wall_s"] / ceiling, 3),
    }


def our_loss(model: Model, batch: RetrievalBatch, sampled: bool) -> Tensor:
    """The loss as in `realm pretrain`."""
    config = PretrainConfig(marginal="token", reader_gradient="sampled" if sampled else "all")
    _, score_BK = model.embedder.score(batch.queries, batch.passages, batch.place_BK)
    logp_BKM = read(model.reader, batch, [], None, None, config)
    loss = marginal_loss(score_BK, logp_BKM, batch.mask_BM, "token")
    entries = Entries(score_BK, logp_BKM, torch.arange(K, device=score_BK.device).expand_as(score_BK))
    return loss + sampled_reader_loss(model.reader, batch, entries, config)


class Plain(NamedTuple):
    """The layers of a model as networks of transformers, and the query tower, whose projection follows the layers."""

    embedder: Any
    reader: Any
    tower: Tower


def in_transformers(model: Model) -> Plain:
    """The model in the layers of transformers, which only this function imports: the import would need memory elsewhere."""
    from tests.transformers_twin import masked_twin, twin

    tower = model.embedder.query
    return Plain(twin(cast(TransformerTower, tower).encoder), masked_twin(model.reader.bert), tower)


def padded_loss(plain: Plain, batch: RetrievalBatch) -> Tensor:
    """The loss of REALM (eq. 1 and 2) with the layers of transformers and padded rows."""

    def vectors(tokens: Tokens) -> Tensor:
        found = plain.embedder(tokens.ids_BT, tokens.mask_BT, tokens.segments_BT)
        return plain.tower.project(found.pooler_output)

    query_BD = vectors(batch.queries)
    passage_BKD = vectors(batch.passages).view(len(query_BD), K, -1)
    score_BK = (query_BD[:, None] * passage_BKD).sum(dim=-1)
    states_BTH = plain.reader.bert(batch.joint.ids_BT, batch.joint.mask_BT, batch.joint.segments_BT)[0]
    position_RM = batch.position_BM.repeat_interleave(K, dim=0)
    masked_RMH = states_BTH.gather(1, position_RM[:, :, None].expand(-1, -1, states_BTH.shape[2]))
    logp_RMV = plain.reader.cls(masked_RMH).float().log_softmax(dim=-1)
    target_RM = batch.target_BM.repeat_interleave(K, dim=0)
    logp_BKM = logp_RMV.gather(2, target_RM[:, :, None]).view(len(query_BD), K, -1)
    joint_BKM = score_BK.log_softmax(dim=1)[:, :, None] + logp_BKM
    return -joint_BKM.logsumexp(dim=1).mean()


def step_flops(model: Model, tokens: dict[str, Tokens], masked: int, sampled: bool) -> tuple[float, float]:
    """FLOPs of the matrix products of a step: of the embedder, and of the joint encoder with its head.

    A backward pass costs twice as much as a forward pass. With `sampled`, the reader reads all candidates without gradient, and
    one of K candidates with gradient. In the last layer, keys and values are counted for every token, and all other products
    only for positions whose states are used: [CLS] and masked words.
    """
    encoder = model.reader.config

    def forward(part: Tokens, read: int) -> float:
        return sum(layers_flop(encoder, length, read) for length in part.mask_BT.sum(dim=1).tolist())

    head = head_work(encoder, masked * len(tokens["joint"].ids_BT)).flop
    embedding = TRAINED * (forward(tokens["query"], 1) + forward(tokens["candidate"], 1))
    return embedding, (1 + TRAINED / K if sampled else TRAINED) * (forward(tokens["joint"], masked) + head)


def matmul_ceiling(device: torch.device, precision: str, seconds: float = 1.0) -> float:
    """Operations (multiplications and additions) per second of one large matrix product."""
    # On a GPU, where a product takes a millisecond or more, the program waits only after every ten products.
    size, products = (8192, 10) if device.type == "cuda" else (2048, 1)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    best, end = 0.0, time.perf_counter() + seconds
    (a @ a)[0, 0].item()
    while not best or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(products):
            product = a @ a
        product[0, 0].item()
        best = max(best, 2 * products * size**3 / (time.perf_counter() - start))
    return best


def main() -> None:
    """Runs the comparison; with --side, a process that this program started measures one implementation."""
    if sys.argv[1:2] == ["--side"]:
        folder, threads, rounds, way, queries, full = sys.argv[2:]
        torch.set_num_threads(int(threads))
        print_result(step(Path(folder), int(rounds), way, int(queries), full == "full"))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--queries", type=int, default=B, help="queries of a step, with 8 candidates each")
    parser.add_argument("--full", action="store_true", help="all rows have the maximal length")
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds of `realm`; other implementations have one round"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    device = choose_device("auto").type
    able = [way for way in WAYS if "bf16" not in way or multiplies_bf16(device)]
    able = [way for way in able if "unfused" not in way or device == "cuda"]
    parser.add_argument("--ways", nargs="+", choices=["reference", *WAYS], default=["reference", *able])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        from interop_files import make_step

        make_step(Path(folder), args.hidden, args.layers)
        results = {}
        for way in args.ways:
            if way == "reference" and not (REFERENCE / "bin" / "python").exists():
                print(f"reference: not installed; python {REFERENCE_FILE} makes its environment")
                continue
            rounds = args.rounds if way in OURS else 1
            words = [str(word) for word in (folder, args.threads, rounds)]
            results[way] = side(way, words, str(args.queries), args.full)
            print(row(way, results), flush=True)
    check(results)
    where = {"device": str(choose_device("auto")), "torch": torch.__version__} | shared.machine()
    print(json.dumps({"benchmark": "train_step"} | where | {"settings": vars(args), "ways": results}))


def side(way: str, words: list[str], queries: str, full: bool) -> dict[str, Any]:
    """Measures one implementation in a process of its own."""
    last = [queries, "full" if full else "mixed"]
    command = (
        [str(REFERENCE / "bin" / "python"), str(HERE / "interop_reference.py"), "step", *words, *last]
        if way == "reference"
        else [sys.executable, __file__, "--side", *words, way, *last]
    )
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def row(way: str, results: dict[str, dict[str, Any]]) -> str:
    """A line of the table, with ratios to the first line."""
    one, first = results[way], next(iter(results.values()))
    line = (
        f"{way:13} {one['wall_s']:8.2f} s ({first['wall_s'] / one['wall_s']:5.1f}x)  {one['cpu_s']:8.2f} s cpu"
        f" ({first['cpu_s'] / one['cpu_s']:5.1f}x)  {one['peak_gb']:6.2f} GB ({first['peak_gb'] / one['peak_gb']:4.1f}x)"
    )
    if "tokens_s" not in one:
        return line
    return (
        f"{line}  {one['tokens_s']:7,} tokens/s  {one['gflop']:6,} GFLOP,"
        f" {one['utilisation']:4.0%} of {one['ceiling_gflop_s']:,}/s"
    )


def check(results: dict[str, dict[str, Any]]) -> None:
    """Ends with an error unless all implementations give the same loss."""
    for (one, first), (other, second) in itertools.combinations(results.items(), 2):
        tolerance = 1e-2 if "bf16" in one + other else 1e-5
        if not math.isclose(first["outcome"], second["outcome"], rel_tol=tolerance):
            raise SystemExit(
                f"the loss of {one} is {first['outcome']}, and that of {other} is {second['outcome']}"
            )


if __name__ == "__main__":
    main()
