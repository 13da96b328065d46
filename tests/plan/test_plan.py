"""The arithmetic of `realm plan` against counters of torch, and its predictions against steps that are measured here."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from realm.cli import main
from realm.index.embedding import embed_passages
from realm.model.bert import Bert, BertConfig, MaskedBert
from realm.model.cpu import packed
from realm.model.device import autocast, chosen
from realm.model.embedder import Embedder, EmbedderConfig, embedder_from
from realm.model.folder import Model
from realm.model.masked_reader import EncoderConfig, MaskedReader, new_reader
from realm.model.modes import set_dropout
from realm.plan import hardware
from realm.plan.costs import TRAINED, activation_bytes, count_parameters, head_work, layers_flop
from realm.plan.estimate import Plan, StagePlan, measured
from realm.plan.hardware import Hardware, machines, read_hardware
from realm.plan.preset import Corpus, Preset
from realm.settings import presets
from realm.store.knowledge_base import KnowledgeBase
from realm.tokens.layouts import Lengths, Tokens
from realm.train.finetune import FinetuneConfig
from realm.train.loop import TrainRun

SMALL = BertConfig(
    vocab_size=500, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=96
)
ROWS, LENGTH = 4, 40
ONE = Hardware(devices=1, memory_gb=10, tflops=2, memory_gb_per_s=100)
EIGHT = Hardware(devices=8, memory_gb=10, tflops=2, memory_gb_per_s=100, network_gb_per_s=10)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids_BT = torch.randint(1, 500, (ROWS, LENGTH))
    return ids_BT, torch.ones_like(ids_BT), torch.zeros_like(ids_BT)


def test_layers_have_the_flop_that_torch_counts() -> None:
    bert = Bert(SMALL)
    with FlopCounterMode(display=False) as forward:
        states_BTH = bert(*inputs())
    assert forward.get_total_flops() == ROWS * layers_flop(SMALL, LENGTH, LENGTH)
    with FlopCounterMode(display=False) as backward:
        states_BTH.sum().backward()
    trained = forward.get_total_flops() + backward.get_total_flops()
    assert trained == pytest.approx(TRAINED * ROWS * layers_flop(SMALL, LENGTH, LENGTH), rel=0.03)


def test_head_has_the_flop_that_torch_counts() -> None:
    head = MaskedBert(SMALL).cls
    with FlopCounterMode(display=False) as counter:
        head(torch.zeros(7, 32))
    assert counter.get_total_flops() == head_work(SMALL, 7).flop


def test_activations_are_about_those_that_autograd_keeps() -> None:
    bert = Bert(SMALL).train()
    set_dropout(bert, 0.0)
    kept: dict[int, int] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in bert.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states_BTH = bert(*inputs())
    assert sum(kept.values()) == pytest.approx(activation_bytes(SMALL, ROWS * LENGTH, 32), rel=0.25)
    states_BTH.sum().backward()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("pooling", ["cls", "mean", "words"])
def test_parameters_are_those_of_the_networks(pooling, shared) -> None:
    config = EmbedderConfig(dim=16, pooling=pooling, shared=shared)
    embedder, reader = Embedder(SMALL, config), MaskedReader(MaskedBert(SMALL), copy=True)
    found = count_parameters(SMALL, config, copy_head=True)
    assert found.towers == sum(p.numel() for p in embedder.parameters())
    assert found.reader == sum(p.numel() for p in reader.parameters())
    projection = sum(p.numel() for p in embedder.passage.projection.parameters())
    assert found.passage_encoder == sum(p.numel() for p in embedder.passage.parameters()) - projection


def planned(preset: str, hardware: Hardware, passages: int = 1_000_000) -> dict[str, StagePlan]:
    read = Preset.read(preset)
    corpus = Corpus.assumed(passages, read.kb.passage_tokens)
    return {stage.stage: stage for stage in Plan(read, corpus, hardware).stages()}


def test_eight_devices_divide_the_work_the_activations_and_the_index() -> None:
    one, eight = planned("single-gpu", ONE)["pretrain"], planned("single-gpu", EIGHT)["pretrain"]
    assert eight.flop == pytest.approx(one.flop, rel=0.01)
    assert eight.compute_seconds == pytest.approx(one.compute_seconds / 8, rel=0.05)
    assert (one.exchange_seconds, one.memory.index) == (0, 1_000_000 * 128 * 3)  # float16 and int8
    assert eight.memory.index == one.memory.index / 8
    assert eight.memory.activations == pytest.approx(one.memory.activations / 8, rel=0.01)
    assert (eight.memory.weights, eight.memory.optimizer) == (one.memory.weights, one.memory.optimizer)
    weights = eight.memory.optimizer / 12
    assert eight.exchange_seconds == pytest.approx(weights * 4 * 2 * 7 / 8 / 10e9)


@pytest.mark.parametrize(("cached_rows", "gathered"), [(0, 0), (8, 4)])
def test_sharded_weights_need_an_eighth_of_the_memory_and_half_more_exchange(cached_rows, gathered) -> None:
    preset, corpus = Preset.read("single-gpu"), Corpus.assumed(1_000_000, 288)
    config = replace(preset.stages["pretrain"], cached_rows=cached_rows)
    whole, sharded = (
        next(Plan(preset._replace(stages={"pretrain": one}), corpus, EIGHT).stages())
        for one in (config, replace(config, shard_weights=True))
    )
    trained = whole.memory.optimizer / 12
    assert sharded.memory.weights == pytest.approx(whole.memory.weights / 8 + gathered * trained)
    assert sharded.memory.optimizer == whole.memory.optimizer / 8
    assert sharded.exchange_seconds == pytest.approx(1.5 * whole.exchange_seconds)


def test_devices_that_cannot_share_a_batch_evenly_are_left_out() -> None:
    paper = planned("paper", read_hardware("h100-x64"))
    assert (paper["pretrain"].devices, paper["finetune"].devices) == (64, 1)


def test_more_devices_than_rows_of_a_batch_are_left_out_without_counting_them_one_by_one() -> None:
    stages = planned("paper", replace(EIGHT, devices=10**15))
    assert (stages["pretrain"].devices, stages["finetune"].devices) == (512, 1)


def test_devices_of_their_own_build_beside_the_training() -> None:
    """Training waits for the first and the last index."""
    waits, apart = (
        planned("paper", read_hardware(name), 13_000_000)["pretrain"] for name in ("h100-x8", "h100-x64")
    )
    assert waits.seconds == pytest.approx(
        waits.steps * waits.step_seconds + waits.refreshes * waits.refresh_seconds
    )
    assert apart.seconds == pytest.approx(apart.steps * apart.step_seconds + 2 * apart.refresh_seconds)
    assert (apart.refreshes - 2) * apart.refresh_seconds <= apart.steps * apart.step_seconds


def test_a_build_in_the_background_delays_the_next_one_and_named_devices_share_it() -> None:
    preset, corpus = Preset.read("paper"), Corpus.assumed(13_000_000, 288)
    settings = preset.stages["pretrain"]

    def plan(**refresh) -> StagePlan:
        changed = replace(settings, refresh=replace(settings.refresh, **refresh))
        stages = {"pretrain": changed}
        return next(Plan(preset._replace(stages=stages), corpus, read_hardware("h100-x8")).stages())

    behind, waits = plan(), plan(in_background=False)
    assert waits.refresh_steps == 500 and waits.refreshes == 401
    assert waits.refresh_seconds == pytest.approx(behind.refresh_seconds / 8)
    assert behind.refresh_steps == math.ceil(behind.refresh_seconds / behind.step_seconds) > 500
    assert behind.refreshes == -(-behind.steps // behind.refresh_steps) + 1
    shared = plan(device=",".join(f"cuda:{n}" for n in range(8)))
    assert shared.refresh_seconds == pytest.approx(behind.refresh_seconds / 8)
    assert shared.refresh_steps == 500


def test_paper_needs_the_flop_that_its_rows_have() -> None:
    """512 queries of 32 wordpieces, 8 candidates, passages of 216: by the rule of 2 FLOP per weight and wordpiece."""
    stage = planned("paper", ONE)["pretrain"]
    layer_weights = 12 * (4 * 768**2 + 2 * 768 * 3072)
    tokens = 512 * (32 / 4 + 32 + 7 * 216 + 7 * (32 + 211) + 33)
    assert stage.flop == pytest.approx(4 * 2 * layer_weights * tokens, rel=0.15)


def test_words_of_a_bag_are_read_with_their_own_speed() -> None:
    preset, corpus = Preset.read("tables"), Corpus.assumed(1_000_000, 112)
    given = [Plan(preset, corpus, replace(ONE, words_gb_per_s=speed)) for speed in (0, 100, 200, 400)]
    for seconds in (
        [plan.index() for plan in given],
        [next(stage.compute_seconds for stage in plan.stages() if stage.stage == "ict") for plan in given],
    ):
        assert seconds[0] == seconds[1]  # 100 is the speed of the memory
        assert seconds[1] > seconds[2]
        assert seconds[1] - seconds[2] == pytest.approx(2 * (seconds[2] - seconds[3]))


def test_titles_longer_than_a_passage_leave_a_row_with_the_query() -> None:
    preset = Preset.read("tables")
    corpus = Corpus(passages=1000, pieces=300, title=290, sentence=30)
    assert Plan(preset, corpus, ONE).joint == 32 + 1


@pytest.mark.parametrize("length", [1, 5, 40])
@pytest.mark.parametrize("pooling", ["mean", "words"])
def test_a_machine_is_measured_with_rows_of_any_length(pooling, length, monkeypatch) -> None:
    monkeypatch.setattr(hardware, "MEASURED", 0.0)
    monkeypatch.setattr(hardware, "NUMBERS", 10_000)
    found = hardware.measure(SMALL, EmbedderConfig(dim=16, pooling=pooling), False, length, 3)
    assert min(found.tflops, found.memory_gb_per_s, found.python_time) > 0
    assert (found.words_gb_per_s > 0) == (pooling == "words")


@pytest.mark.parametrize("threads", range(2, packed.MOST + 1))
@pytest.mark.parametrize("mean", [30, 113, 243])
def test_threads_can_share_the_measured_rows_evenly(mean, threads) -> None:
    lengths = hardware._lengths(mean, 4, 512)
    assert np.mean(lengths) == pytest.approx(mean, rel=0.02)
    mask_BT = torch.arange(512) < torch.tensor(lengths)[:, None]
    rows = packed._Rows.of(Tokens(mask_BT.long(), mask_BT.long(), mask_BT.long()))
    largest = max(share.own.stop - share.own.start for share in rows.shares(threads, None))
    assert largest * threads <= packed.EVENLY * sum(lengths)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_is_planned(preset, capsys) -> None:
    if preset in ("realm-small", "minilm"):
        pytest.skip("needs an encoder that is not in the package")
    assert main(["plan", preset, "--hardware", "h100-x8", "--passages", "1000", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["seconds"] == pytest.approx(sum(stage["seconds"] for stage in plan["stages"]))
    assert all(stage["memory_gb"]["all"] > 0 < stage["step_seconds"] for stage in plan["stages"])


def test_a_plan_has_the_settings_of_the_command_line(capsys) -> None:
    words = ["plan", "paper", "--hardware", "h100-x8", "--set", "pretrain.refresh.every=0", "--set"]
    assert main([*words, "pretrain.steps=7", "--json"]) == 0
    stage = next(one for one in json.loads(capsys.readouterr().out)["stages"] if one["stage"] == "pretrain")
    assert (stage["steps"], stage["refreshes"], stage["refresh_steps"]) == (7, 2, 0)
    assert main([*words, "steps=7"]) == 2
    assert "--set steps=7: the table must be one of kb, mlm" in capsys.readouterr().err


def test_plan_is_a_table_that_marks_what_does_not_fit(tmp_path, tiny_kb, capsys) -> None:
    file = tmp_path / "small.toml"
    file.write_text("[hardware]\ndevices = 1\nmemory_gb = 0.001\ntflops = 1\nmemory_gb_per_s = 1\n")
    assert main(["plan", "tiny", "--hardware", str(file), "--kb", str(tiny_kb.folder)]) == 0
    printed = capsys.readouterr().out
    assert f"{len(tiny_kb):,} passages" in printed and "too much" in printed
    assert [line.split()[0] for line in printed.splitlines() if "too much" in line] == [
        "mlm", "ict", "pretrain", "finetune",
    ]  # fmt: skip


def test_plan_names_the_gradient_cache_with_which_a_stage_fits(capsys) -> None:
    words = ["plan", "paper", "--hardware", "h100", "--json", "--set"]

    def pretraining(rows: int) -> dict[str, Any]:
        assert main([*words, f"pretrain.cached_rows={rows}"]) == 0
        stages = json.loads(capsys.readouterr().out)["stages"]
        assert all(one["fitting_rows"] is None for one in stages if one["fits"])
        return next(one for one in stages if one["stage"] == "pretrain")

    without = pretraining(0)
    rows = without["fitting_rows"]
    assert not without["fits"] and rows >= 1
    assert pretraining(rows)["fits"] and not pretraining(2 * rows)["fits"]
    main([*words[:-2], "--set", "pretrain.cached_rows=0"])
    assert f"pretrain would fit with --set pretrain.cached_rows={rows}," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("machine", "devices", "noted"), [("h100", "1 device of", 0), ("h100-x8", "8 devices of", 1)]
)
def test_plan_says_why_a_stage_uses_fewer_devices(machine, devices, noted, capsys) -> None:
    assert main(["plan", "paper", "--hardware", machine, "--passages", "1000"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(devices)
    assert printed.count("only as many devices as can share its batch_size evenly") == noted


def test_machines_of_the_package_are_read() -> None:
    assert {"h100", "h100-x8", "h100-x64"} <= machines().keys()
    assert all(read_hardware(name).devices > 0 for name in machines())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "devices: field required"),
        (
            "[hardware]\ndevices = 2\nmemory_gb = 1\ntflops = 1\nmemory_gb_per_s = 1",
            "network_gb_per_s must be above 0",
        ),
        (
            "[hardware]\ndevices = 0\nmemory_gb = 1\ntflops = 1\nmemory_gb_per_s = 1",
            "devices is 0: it must be above 0",
        ),
        (
            "[hardware]\ndevices = 1\nmemory_gb = 1\ntflops = 1e-320\nmemory_gb_per_s = 1",
            "tflops is 1e-320: it must be from 1e-06 to 1e+15",
        ),
        (
            "[hardware]\ndevices = 1\nmemory_gb = 1\ntflops = 1\nmemory_gb_per_s = 1\npython_time = 1e308",
            "python_time is 1e+308: it must be from 1e-06 to 1e+15",
        ),
        (
            "[hardware]\ndevices = 1\nmemory_gb = inf\ntflops = 1\nmemory_gb_per_s = 1",
            "memory_gb is inf: it must be a finite number",
        ),
        (
            "[hardware]\ndevices = 2\nmemory_gb = 1\ntflops = 1\nmemory_gb_per_s = 1\nnetwork_gb_per_s = nan",
            "network_gb_per_s is nan: it must be a finite number",
        ),
        (
            "[hardware]\ndevices = 1\nmemory_gb = 1\ntflops = 1\nmemory_gb_per_s = 1\nwords_gb_per_s = -1",
            "words_gb_per_s is -1.0: it must be 0 or more",
        ),
        ("[hardware]\ndevices = 'two'\nmemory_gb = 1\ntflops = 1\nmemory_gb_per_s = 1", "devices: "),
        ("[hardware]\nspeed = 3", "unknown key speed"),
        ("[machine]\ndevices = 3", "unknown table machine"),
        ("hardware", "is not TOML"),
        (None, "no hardware file"),
    ],
)
def test_bad_hardware_file_is_one_line(text, wrong, tmp_path, capsys) -> None:
    file = tmp_path / "bad.toml"
    if text is not None:
        file.write_text(text)
    assert main(["plan", "tiny", "--hardware", str(file)]) == 2
    printed = capsys.readouterr()
    assert wrong in printed.err and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.parametrize("text", ["", "[kb]\npassage_tokens = 64\n", "[mlm]\nsteps = 0\n"])
def test_a_file_without_stages_has_no_plan(text, tmp_path, capsys) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    assert main(["plan", str(file), "--hardware", "h100"]) == 2
    printed = capsys.readouterr()
    assert "settings.toml has no stage to plan" in printed.err and printed.out == ""


@pytest.mark.parametrize("flags", [[], ["--measure", "--hardware", "h100"]])
def test_plan_needs_a_machine_or_a_measurement(flags, capsys) -> None:
    assert main(["plan", "tiny", *flags]) == 2
    assert "give either --hardware FILE or --measure" in capsys.readouterr().err


@pytest.mark.parametrize("passages", ["0", "1e9", "9" * 400, "9" * 5000])
def test_a_number_of_passages_that_cannot_be_is_one_line(passages, capsys) -> None:
    assert main(["plan", "tiny", "--hardware", "h100", "--passages", passages]) == 2
    assert "is not a whole number of 1 or more" in capsys.readouterr().err


def keep_answerable(kb: Path, model: Path, questions: Path, out: Path) -> None:
    """The questions with an answer in the passages that are read: `realm finetune` does not read the others."""
    words = ["--kb", str(kb), "--model", str(model)]
    report = out.with_name("report.json")
    assert main(["index", *words]) == 0
    assert (
        main(["evaluate", *words, "--questions", str(questions), "--method", "dense", "--out", str(report)])
        == 0
    )
    ranks = [one["rank"] for one in json.loads(report.read_text())["outcomes"]]
    lines = questions.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line, rank in zip(lines, ranks, strict=True) if rank and rank <= FinetuneConfig.read]
    out.write_text("".join(kept), encoding="utf-8")


@pytest.mark.slow
def test_planned_steps_take_the_time_of_measured_ones(tmp_path, monkeypatch) -> None:
    """In CPU seconds of one thread: the fastest steps of a stage, and the fastest measurements between these steps."""
    trained = presets()["tables"].read_text(encoding="utf-8").replace("[mlm]\n", "[mlm]\nbatch_size = 32\n")
    config = tmp_path / "tables.toml"
    config.write_text(trained.replace("steps = 0", "steps = 12"), encoding="utf-8")
    kb = tmp_path / "kb"
    build = ["kb", "build", "package:factbook", "--out", str(kb), "--config", "tables", "--tagger", "rules"]
    assert main(build) == 0
    assert main(["questions", "--kb", str(kb), "--out", str(tmp_path / "questions")]) == 0
    preset, corpus = Preset.read(str(config)), Corpus.of(KnowledgeBase.open(kb))
    found, took, steps = {}, {}, TrainRun.steps

    def timed(run: TrainRun) -> Iterator[int]:
        found[run.stage], took[run.stage] = [], []
        for step in steps(run):
            if step % 4 == 0:
                found[run.stage].append(measured(preset, corpus, time.process_time))
            started = time.process_time()
            yield step
            took[run.stage].append(time.process_time() - started)

    monkeypatch.setattr(TrainRun, "steps", timed)
    asked = [f"--train={tmp_path / 'answerable.jsonl'}", f"--dev={tmp_path / 'questions' / 'dev.jsonl'}"]
    for stage, start, more in (
        ("mlm", "", []),
        ("ict", "--init", []),
        ("pretrain", "--model", ["refresh.every=0", "health.gate=0", "health.margin=-1", "health.queries=1"]),
        ("finetune", "--model", [*asked, "dev_every=12", "dev_questions=1"]),
    ):
        command = [stage, "--kb", str(kb), "--config", str(config), "--out", str(tmp_path / stage)]
        command += [start, str(tmp_path / "mlm")] if start else []
        if stage == "finetune":
            keep_answerable(
                kb, tmp_path / "mlm", tmp_path / "questions" / "train.jsonl", tmp_path / "answerable.jsonl"
            )
        for word in ["steps=12", "device=cpu", *more]:
            command += [word] if word.startswith("--") else ["--set", word]
        assert main(command) == 0
    assert list(took) == ["mlm", "ict", "pretrain", "finetune"]
    for stage, times in took.items():
        plan = Plan(preset, corpus, fastest(found[stage]))
        planned = next(one.step_seconds for one in plan.stages() if one.stage == stage)
        assert planned == pytest.approx(min(times), rel=0.25), stage


def fastest(measurements: list[Hardware]) -> Hardware:
    """The largest speeds, and the shortest time of Python, of several measurements of one machine."""
    speeds = {
        name: max(getattr(one, name) for one in measurements)
        for name in ("tflops", "memory_gb_per_s", "words_gb_per_s")
    }
    return replace(measurements[0], **speeds, python_time=min(one.python_time for one in measurements))


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["words", "mean"])
def test_a_planned_index_takes_the_time_of_a_measured_one(pooling, tmp_path) -> None:
    """In CPU seconds of one thread: the fastest builds and measurements, which take turns."""
    kb = tmp_path / "kb"
    build = ["kb", "build", "package:factbook", "--out", str(kb), "--config", "tables", "--tagger", "rules"]
    assert main(build) == 0
    opened = KnowledgeBase.open(kb)
    numbers = np.arange(0, len(opened), 1 if pooling == "words" else 15)
    torch.manual_seed(0)
    reader = new_reader(EncoderConfig(layers=4, hidden=320, heads=5), opened.tokenizer)
    embedder = embedder_from(reader, EmbedderConfig(dim=128, pooling=pooling))
    model = Model(opened.tokenizer, Lengths(), reader, embedder)
    preset = Preset.read("tables")._replace(encoder=reader.config, embedder=embedder.config)
    corpus = Corpus.of(opened)._replace(passages=len(numbers))
    found, took = [], []
    for _ in range(4):
        found.append(measured(preset, corpus, time.process_time))
        started = time.process_time()
        with autocast(model.device, "auto"):
            embed_passages(model, opened.tokens, numbers, description=None)
        took.append(time.process_time() - started)
    assert Plan(preset, corpus, fastest(found)).index() == pytest.approx(min(took), rel=0.25)


@pytest.mark.slow
def test_planned_memory_is_that_of_measured_processes(tmp_path) -> None:
    """Peak memory of training processes on a CPU, in which weights and activations need more than the libraries."""
    config, documents, kb = tmp_path / "c.toml", tmp_path / "documents.jsonl", tmp_path / "kb"
    config.write_text(
        """
        [kb]
        tagger = "rules"
        [mlm]
        steps = 2
        batch_size = 64
        [mlm.encoder]
        layers = 8
        hidden = 768
        heads = 12
        [mlm.embedder]
        pooling = "mean"
        [ict]
        steps = 2
        batch_size = 64
        [pretrain]
        steps = 2
        batch_size = 8
        candidates = 6
        reader_gradient = "all"
        ict = 0
        [pretrain.refresh]
        every = 0
        [pretrain.health]
        gate = 0
        margin = -1
        queries = 1
        """,
        encoding="utf-8",
    )
    rng = np.random.default_rng(0)
    words = ["river", "town", "bridge", "king", "market", "road", "castle", "island", "war", "church"]
    lines = (
        " ".join(f"In {1500 + y} the {' '.join(rng.choice(words, 12))} of Vienna was old." for y in range(9))
        for _ in range(100)
    )
    documents.write_text(
        "".join(
            json.dumps({"id": str(n), "title": f"Town {n}", "text": text}) + "\n"
            for n, text in enumerate(lines)
        )
    )
    build = ["kb", "build", str(documents), "--out", str(kb), "--config", str(config)]
    assert main([*build, "--tokenizer", "package:realm-mini"]) == 0
    bits = 16 if chosen(torch.device("cpu"), "auto") == "bf16" else 32
    plan = Plan(Preset.read(str(config)), Corpus.of(KnowledgeBase.open(kb)), Hardware(1, 1, 1, 1, bits=bits))
    process_gb = plan.corpus_costs()["process_memory_gb"]
    stages = {stage.stage: stage for stage in plan.stages()}
    for name, start in (
        ("mlm", []),
        ("ict", ["--init", str(tmp_path / "mlm")]),
        ("pretrain", ["--model", str(tmp_path / "ict")]),
    ):
        command = [name, "--kb", str(kb), "--config", str(config), "--out", str(tmp_path / name), *start]
        child = subprocess.Popen([sys.executable, "-m", "realm", *command, "--set", "device=cpu"])
        _, child.returncode, usage = os.wait4(child.pid, 0)
        assert child.returncode == 0
        planned_gb = stages[name].memory.total / 1e9 + process_gb
        assert planned_gb == pytest.approx(usage.ru_maxrss * 1024 / 1e9, rel=0.25), name
