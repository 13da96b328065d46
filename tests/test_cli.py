"""The command line from outside: help, exit codes, what is printed where, and what is imported when."""

import dataclasses
import gc
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import DistBackendError

from realm import cli
from realm.cli.arguments import Parser, report, settings
from realm.errors import InputError
from realm.progress import wrapped
from realm.settings import TABLES, config_from, presets, read_config
from realm.store.settings import KnowledgeBaseConfig

COMMANDS = [
    "demo",
    "fit",
    "kb build",
    "kb add",
    "kb delete",
    "kb compact",
    "kb list",
    "kb info",
    "kb verify",
    "questions",
]
COMMANDS += ["mlm", "ict", "pretrain", "adapt", "index", "finetune", "knn", "baseline", "compare", "ablate"]
COMMANDS += ["retrieve", "answer", "fill", "evaluate", "probe", "convert", "share", "serve", "mcp"]
SLOW_TO_IMPORT = {
    "torch",
    "transformers",
    "tokenizers",
    "lance",
    "pyarrow",
    "spacy",
    "numpy",
    "pydantic",
    "bm25s",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^example:\n  realm {command}\b", out, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_the_help_is_accepted_by_the_parser(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main([*command.split(), "--help"])
    for example in capsys.readouterr().out.split("example:")[1].split("\n  realm ")[1:]:
        args = cli._parser().parse_args(shlex.split(example))
        assert args.section is None or args.section in TABLES


def test_the_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^    {command.split()[0]}\s", out, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "COMMAND"),
        (["anser"], "invalid choice: 'anser'"),
        (["kb"], "COMMAND"),
        (["kb", "info", "--kb", "x", "--nonsense"], "--nonsense"),
        (["kb", "info"], "required: --kb, or --in WORKSPACE (see `realm kb info --help`)"),
        (["fill", "A [MASK].", "--kb", "x"], "required: --model, or --in WORKSPACE"),
        (["kb", "info", "--in", "x", "--kb", "y"], "--in x replaces --kb: leave out --kb"),
        (
            ["kb", "info", "--in", "absent"],
            "absent is not a workspace, because it has no folder kb: make a workspace with `realm fit SOURCE...",
        ),
        (["answer", "why?", "--in", ".", "--model", "y"], "replaces --kb and --model: leave out --model"),
        (
            ["retrieve", "--kb", "x", "--questions", "q", "--out", "o", "--top-k", "0"],
            "'0' is not a whole number",
        ),
        (
            ["retrieve", "--kb", "x", "--questions", "q", "--out", "o"],
            "--method dense, the default, needs --model",
        ),
        (["answer", " ", "--kb", "x", "--model", "y"], "empty"),
        (["answer", "why " * 501, "--kb", "x", "--model", "y"], "2004 characters, the limit is 2000"),
        (["kb", "build", "x", "--out", "y", "--config", "absent.toml"], "no configuration file absent.toml"),
        (
            ["kb", "build", "x", "--out", "y", "--vocab-size", "900", "--tokenizer", "z"],
            "leave out --tokenizer",
        ),
        (["kb", "build", "x", "--out", "y", "--set", "nonsense=1"], "unknown key nonsense (known: "),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(
    words: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"realm: [^\n]+\n", captured.err)
    assert says in captured.err
    assert list(tmp_path.iterdir()) == []


WITH_A_FOLDER = {
    "kb info": [],
    "kb delete": ["some"],
    "questions": ["--out", "o"],
    "mlm": ["--out", "o"],
    "ict": ["--out", "o"],
    "pretrain": ["--out", "o"],
    "index": [],
    "finetune": ["--train", "t", "--dev", "d", "--out", "o"],
    "knn": ["--out", "o"],
    "baseline": ["drqa", "--train", "t", "--dev", "d", "--out", "o"],
    "retrieve": ["--questions", "q", "--out", "o"],
    "answer": ["why?"],
    "fill": ["A [MASK]."],
    "evaluate": ["--questions", "q"],
    "probe": [],
    "serve": [],
    "mcp": [],
}


@pytest.mark.parametrize("command", WITH_A_FOLDER)
def test_a_workspace_replaces_the_flags_of_its_knowledge_base_and_model(command: str, tmp_path: Path) -> None:
    for part in ("kb", "model"):
        (tmp_path / part).mkdir()
    words, parser = [*command.split(), *WITH_A_FOLDER[command]], cli._parser()
    by_name = parser.parse_args([*words, "--in", str(tmp_path)])
    flags = [flag for flag in ("kb", "model", "init") if hasattr(by_name, flag)]
    apart = [word for flag in flags for word in (f"--{flag}", str(tmp_path / PARTS[flag]))]
    by_folder = parser.parse_args([*words, *apart])
    assert vars(by_name) | {"workspace": None} == vars(by_folder)
    for flag in flags:
        with pytest.raises(InputError, match=f"replaces .*: leave out --{flag} "):
            parser.parse_args([*words, "--in", str(tmp_path), f"--{flag}", "x"])


PARTS = {"kb": "kb", "model": "model", "init": "model"}


@pytest.mark.parametrize("command", [*COMMANDS, "serve"])
def test_every_command_that_takes_a_knowledge_base_takes_a_workspace(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    takes = "--kb KB " in out and command != "convert"  # what it converts has a name of its own
    assert takes == ("--in WORKSPACE" in out)


def main_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def run(args: object) -> None:
        raise error

    parser = Parser(prog="realm")
    parser.set_defaults(run=run, continues=False, shares=True)
    monkeypatch.setattr(cli, "_parser", lambda: parser)
    return cli.main([])


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("answer q --kb kb --model m", "read=0"),
        ("answer q --kb kb --model m", "answers=0"),
        ("finetune --kb kb --model m --train t --dev d --out o", "read=0"),
        ("finetune --kb kb --model m --train t --dev d --out o", "dev_every=0"),
        ("baseline drqa --kb kb --model m --train t --dev d --out o", "dev_questions=0"),
        ("pretrain --kb kb --model m --out o", "retriever_rate=-1.0"),
        ("pretrain --kb kb --model m --out o", "learning_rate=nan"),
        ("pretrain --kb kb --model m --out o", "health.margin=nan"),
        ("pretrain --kb kb --model m --out o", "health.gate=inf"),
        ("pretrain --kb kb --model m --out o", "titled=7.0"),
        ("pretrain --kb kb --model m --out o", "ict_batch=0"),
        ("pretrain --kb kb --model m --out o", "health.queries=0"),
        ("ict --kb kb --init m --out o", "titled=1.5"),
        ("mlm --kb kb --out o", "reading=-0.5"),
        ("mlm --kb kb --out o", "warmup=-1"),
        ("probe --kb kb --model m", "queries=0"),
        ("questions --kb kb --out o", "dev_share=5.0"),
    ],
)
def test_a_setting_out_of_its_range_is_one_line(command: str, setting: str, capsys) -> None:
    name = setting.partition("=")[0].rpartition(".")[2]
    assert cli.main([*command.split(), "--set", setting]) == 2
    error = capsys.readouterr().err
    assert f"{name} is " in error and "must be" in error and error.count("\n") == 1


def test_the_message_of_an_interrupted_command_shows_whether_the_same_command_continues(
    monkeypatch, capsys
) -> None:
    def interrupted(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("realm.workspace.fit.run", interrupted)
    assert cli.main(["fit", "docs", "--out", "manual"]) == 130
    assert capsys.readouterr().err == "realm: interrupted: repeat the command to continue\n"
    monkeypatch.setattr("realm.store.knowledge_base.KnowledgeBase.open", interrupted)
    assert cli.main(["kb", "info", "--kb", "kb"]) == 130
    assert capsys.readouterr().err == "realm: interrupted\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("kb has 3 passages,\n  index 4"), 2, "realm: kb has 3 passages, index 4"),
        (KeyboardInterrupt(), 130, "realm: interrupted"),
        (
            PermissionError(13, "Permission denied", "/kb"),
            2,
            "realm: Permission denied: /kb; give this user permission (`chmod`, or ask the owner), "
            "or give another path",
        ),
        (
            OSError(122, "Disk quota exceeded", "/kb/x"),
            2,
            "realm: Disk quota exceeded: /kb/x; remove files of this user, or make a knowledge base smaller with "
            "`realm kb compact`",
        ),
        (OSError(36, "File name too long", "x"), 2, "realm: File name too long: x"),
        (OSError(39, "Directory not empty", "/kb"), 2, "realm: Directory not empty: /kb"),
        (OSError(24, "Too many open files"), 2, "realm: Too many open files"),
    ],
)
def test_errors_that_the_user_can_correct_are_one_line(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main_that_raises(monkeypatch, error) == code
    assert capsys.readouterr().err == line + "\n"


def test_a_full_disk_is_one_line_with_the_room_that_is_left_where_the_file_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main_that_raises(monkeypatch, OSError(28, "No space left on device")) == 2
    advice = "remove files, or make a knowledge base smaller with `realm kb compact`"
    assert capsys.readouterr().err == f"realm: No space left on device; {advice}\n"
    assert main_that_raises(monkeypatch, OSError(28, "No space left on device", str(tmp_path / "x"))) == 2
    room = r"[\d,]+\.\d MB are free: remove files, or make a knowledge base smaller with `realm kb compact`"
    assert re.fullmatch(f"realm: No space left on device: {tmp_path}/x; {room}\n", capsys.readouterr().err)


def config_classes() -> dict[str, type]:
    from realm.index.embedding import IndexConfig
    from realm.qa.pipeline import AnswerConfig
    from realm.qa.probe import ProbeConfig
    from realm.questions import QuestionsConfig
    from realm.serve.settings import ServeConfig
    from realm.store.knowledge_base import KnowledgeBaseConfig
    from realm.train.adapt import AdaptConfig
    from realm.train.finetune import FinetuneConfig
    from realm.train.ict import IctConfig
    from realm.train.mlm import MlmConfig
    from realm.train.pretrain import PretrainConfig
    from realm.workspace.settings import FitConfig

    stages = {"mlm": MlmConfig, "ict": IctConfig, "pretrain": PretrainConfig}
    stages |= {"adapt": AdaptConfig, "finetune": FinetuneConfig}
    from realm.systems.knn_lm import KnnConfig

    uses = {
        "knn": KnnConfig,
        "index": IndexConfig,
        "answer": AnswerConfig,
        "probe": ProbeConfig,
        "serve": ServeConfig,
    }
    kept = {"fit": FitConfig, "kb": KnowledgeBaseConfig, "questions": QuestionsConfig}
    return kept | stages | uses


@pytest.mark.parametrize("preset", presets())
def test_every_setting_of_a_preset_is_a_setting_of_its_command(preset: str) -> None:
    for table, cls in config_classes().items():
        assert isinstance(read_config(cls, preset, table), cls)


@pytest.mark.parametrize("table", [table for table in TABLES if table in config_classes()])
def test_the_defaults_of_a_command_are_values_that_it_accepts(table: str) -> None:
    cls = config_classes()[table]
    assert config_from(cls, dataclasses.asdict(cls()), table) == cls()


@pytest.mark.parametrize(
    "words", ["kb build docs --out kb", "answer x --kb kb --model m", "adapt --kb kb --model m --out o"]
)
def test_a_command_of_one_process_is_refused_under_torchrun(words: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "realm")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(words.split()) == 2
    command = words.split(" --")[0].removesuffix(" docs").removesuffix(" x")
    assert capsys.readouterr().err == (
        f"realm: realm {command} runs in one process; torchrun is for mlm, ict, pretrain and finetune\n"
    )


GLOO = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer")


@pytest.mark.parametrize("error", [GLOO, DistBackendError("NCCL error: remote process exited")])
def test_a_rank_whose_partner_has_ended_says_so_in_one_line(error: Exception, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "realm")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main_that_raises(monkeypatch, error) == 2
    line = capsys.readouterr().err
    assert (
        line.startswith("realm: the connection to another process of torchrun broke")
        and line.count("\n") == 1
    )
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(RuntimeError):
        main_that_raises(monkeypatch, error)


def exhausted(allocate: Callable[[], object]) -> Exception:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        allocate()
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        exhausted(lambda: torch.empty(2**58)),
        exhausted(lambda: np.empty(2**58)),
        MemoryError(),
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.93 GiB of which 1.20 GiB is free."
        ),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    ],
    ids=repr,
)
def test_missing_memory_is_one_line_with_a_way_to_need_less(error: Exception, monkeypatch, capsys) -> None:
    assert main_that_raises(monkeypatch, error) == 2
    line = capsys.readouterr().err
    assert line.startswith("realm: there is not enough memory (") and line.count("\n") == 1
    assert "`cached_rows=64`" in line and "GPU 0" not in line


def test_a_name_with_an_emoji_reaches_the_settings_of_a_command() -> None:
    args = cli._parser().parse_args(["kb", "build", "x", "--out", "y", "--tokenizer", 'models/📚 "a"'])
    assert settings(args, KnowledgeBaseConfig, "tokenizer").tokenizer == 'models/📚 "a"'


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        FileNotFoundError(2, "no such file", "x"),
        OSError("a library's"),
        OSError(9, "bad file"),
    ],
)
def test_a_bug_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        main_that_raises(monkeypatch, error)


def test_a_closed_pipe_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with os.fdopen(write_end, "w") as closed:
        command = [sys.executable, "-m", "realm", "--help"]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (141, "")


ON_WINDOWS = """
import runpy, sys
sys.platform = "win32"
sys.modules |= dict.fromkeys(["fcntl", "resource", "pwd", "grp", "termios"])  # what Windows' Python lacks
sys.argv[0] = "realm"
runpy.run_module("realm", run_name="__main__")
"""


@pytest.mark.parametrize("words", [["--help"], ["mlm", "--kb", "kb", "--out", "encoder"], ["nonsense"]])
def test_on_windows_every_command_is_one_sentence(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", ON_WINDOWS, *words], capture_output=True, text=True)
    says = "realm: realm runs on Linux and macOS; on Windows, use the Windows Subsystem for Linux (WSL)\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "realm", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - started
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert imported & SLOW_TO_IMPORT == set()
    assert seconds < 1


def test_networks_leave_no_cycles_for_a_collector_that_seldom_comes(tiny_model: Any) -> None:
    import torch

    from realm.tokens.layouts import passage_inputs

    inputs = passage_inputs([[5, 6]], [[7, 8, 9]], tiny_model.tokenizer, tiny_model.lengths)
    first = torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        loss = tiny_model.embedder.passage(inputs).sum() + tiny_model.reader.target_logp(
            inputs, first, first, first
        )
        loss.sum().backward()

    step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            step()
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "module",
    [
        "realm.text.corpus",
        "realm.documents.reading",
        "realm.text.salient_spans",
        "realm.qa.scoring.evaluation",
    ],
)
def test_reading_documents_and_scoring_answers_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_report_is_one_json_line_or_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser()
    parser.add_argument("--json", action="store_true")
    result = {
        "passages": 14013,
        "em": 41.23456,
        "name": "é",
        "ok": True,
        "recall": {"1": 60.0, "5": 65.5},
        "left": [],
        "reasons": {},
    }
    report(parser.parse_args(["--json"]), result)
    assert capsys.readouterr().out == json.dumps(result, ensure_ascii=False) + "\n"
    report(parser.parse_args([]), result)
    assert capsys.readouterr().out.splitlines() == [
        "passages  14,013",
        "em        41.23",
        "name      é",
        "ok        True",
        "recall    1 60, 5 65.5",
        "left      none",
        "reasons   none",
    ]


def test_long_lines_are_broken_between_words_on_a_terminal_but_rows_of_tables_are_not(monkeypatch) -> None:
    prose, row = "   " + "word " * 30 + "well-known", "BM25 (words)            40.8   59.2   77.5"
    assert wrapped(prose) == prose  # standard output is no terminal
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("COLUMNS", "40")
    lines = wrapped(prose).split("\n")
    assert len(lines) > 3 and all(len(line) <= 40 and line.startswith("   ") for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(prose.split())
    assert wrapped(row) == row
    assert wrapped("short") == "short"
