"""Settings: where values come from, which one wins, and what a wrong one says."""

import dataclasses
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm.environment import set_torch_environment, usable_cores
from realm.errors import InputError, WriteFailed, writing
from realm.files import write_json, write_json_lines
from realm.progress import progress
from realm.settings import config_from, presets, read_config, tables_of
from realm.store.settings import KnowledgeBaseConfig


@dataclass(frozen=True)
class Refresh:
    every: int = 500
    in_background: bool = True


@dataclass(frozen=True)
class Settings:
    rate: float = 1e-4
    name: str = "paper"
    pooling: Literal["cls", "mean"] = "cls"
    sizes: tuple[int, ...] = (1, 2)
    folder: Path | None = None
    refresh: Refresh = field(default_factory=Refresh)
    second: Refresh | None = None

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate is {self.rate}: it must be 0 or more")


@pytest.fixture
def toml(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(
        """
        ict.steps = 1
        [train]
        rate = 1
        sizes = [3, 4]
        folder = "here"
        refresh.every = 7
        """
    )
    return str(path)


def test_without_a_file_the_dataclass_gives_the_values() -> None:
    assert read_config(Settings, None, "train") == Settings()


def test_the_file_beats_the_defaults_and_set_beats_the_file(toml: str) -> None:
    from_file = Settings(rate=1.0, sizes=(3, 4), folder=Path("here"), refresh=Refresh(every=7))
    assert read_config(Settings, toml, "train") == from_file
    overrides = ["refresh.in_background=false", "rate=0.5", "name=small scale"]
    got = read_config(Settings, toml, "train", overrides)
    assert got == Settings(0.5, "small scale", "cls", (3, 4), Path("here"), Refresh(7, False))


def test_a_file_without_the_table_means_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[ict]\nsteps = 1\n")
    assert read_config(Settings, str(path), "mlm") == Settings()


def test_an_override_reaches_an_optional_table() -> None:
    assert read_config(Settings, None, "train", ["second.every=3"]).second == Refresh(every=3)


@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1).filter(lambda s: not s[0].isdigit()))
def test_any_word_is_a_value_for_a_text_setting(word: str) -> None:
    quoted = json.dumps(word, ensure_ascii=False)
    assert read_config(Settings, None, "train", [f"name={quoted}"]).name == word


@given(st.integers(-(2**53), 2**53))
def test_integers_survive_the_way_through_an_override(every: int) -> None:
    assert read_config(Settings, None, "train", [f"refresh.every={every}"]).refresh.every == every


def test_all_problems_come_in_one_line_with_the_known_keys() -> None:
    wrong = ["refresh.evry=5", "rate=fast", "pooling=max", "second.oops=1", "sizes=[1, 2.5]"]
    wrong.append("refresh.in_background=1")
    with pytest.raises(InputError) as error:
        read_config(Settings, None, "train", wrong)
    message = str(error.value)
    assert "\n" not in message
    assert "unknown key refresh.evry (known: every, in_background)" in message
    assert "unknown key second.oops (known: every, in_background)" in message
    assert "rate: input should be a valid number, got 'fast'" in message
    assert "pooling: input should be 'cls' or 'mean', got 'max'" in message
    assert "sizes.1" in message
    assert "refresh.in_background: input should be a valid boolean, got 1" in message


def test_a_refused_value_is_shown_without_the_password_of_an_address() -> None:
    with pytest.raises(InputError, match=r"got \['postgresql://a\.b/c'\]") as error:
        read_config(Settings, None, "train", ['name=["postgresql://me:sesame@a.b/c"]'])
    assert "sesame" not in str(error.value)


def test_a_file_changes_the_keys_of_its_base_and_replaces_tables_inside_tables(
    tmp_path: Path, toml: str
) -> None:
    path = tmp_path / "changed" / "half.toml"
    path.parent.mkdir()
    path.write_text(
        'base = "../run.toml"\n[train]\nrate = 0.5\nrefresh = { in_background = false }\n[kb]\nrate = 2\n'
    )
    last = tmp_path / "last.toml"
    last.write_text('base = "changed/half.toml"\n[train]\nname = "last"\n')
    of_base = read_config(Settings, toml, "train")
    changed = dataclasses.replace(of_base, rate=0.5, refresh=Refresh(in_background=False))
    assert read_config(Settings, str(path), "train") == changed
    assert read_config(Settings, str(last), "train") == dataclasses.replace(changed, name="last")
    assert tables_of(str(last)) == {"ict", "train", "kb"}


def test_a_base_can_be_a_preset() -> None:
    known = presets()
    assert read_config(KnowledgeBaseConfig, "wikipedia-nq", "kb") == read_config(
        KnowledgeBaseConfig, "wikipedia", "kb"
    )
    assert tables_of("wikipedia-nq") == tables_of("wikipedia")
    assert tomllib.loads(known["wikipedia-nq"].read_text()).keys() == {"base", "data"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[train]\nrat = 1\n", r"own\.toml \(with the base .*other\.toml\) \[train\]: unknown key rat "),
        ("[trian]\nrate = 1\n", r"own\.toml \(with the base .*other\.toml\): unknown table trian "),
        ("rate = 1\n", r"with the base .*other\.toml\): rate is in no table"),
        ("train = 3\n", r"other\.toml: train = 3 must be a table, as in .*own\.toml"),
    ],
)
def test_a_mistake_in_a_base_names_the_base(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(content)
    own = tmp_path / "own.toml"
    own.write_text('base = "other.toml"\n[train]\nname = "own"\n')
    with pytest.raises(InputError, match=problem):
        read_config(Settings, str(own), "train")


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("3", r"base is 3: it must be a TOML file or a preset"),
        ('"none"', r"first\.toml: base: no configuration file none: "),
        ('"second.toml"', r"first\.toml: base: .*second\.toml: base: .*first\.toml is its own base"),
        ('"broken.toml"', r"first\.toml: base: .*broken\.toml is not TOML"),
    ],
)
def test_a_base_that_cannot_be_read_is_one_line(base: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "first.toml"
    path.write_text(f"base = {base}\n")
    (tmp_path / "second.toml").write_text('base = "../' + tmp_path.name + '/first.toml"')
    (tmp_path / "broken.toml").write_text("[train")
    with pytest.raises(InputError, match=problem) as error:
        read_config(Settings, str(path), "train")
    assert "\n" not in str(error.value)


def test_an_unknown_key_of_the_file_names_file_and_table(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nrat = 1\n")
    with pytest.raises(InputError, match=r"run\.toml \[train\]: unknown key rat \(known: rate, name,"):
        read_config(Settings, str(path), "train")


def test_an_unknown_table_is_not_taken_for_absent(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[trian]\nrate = 1\n")
    with pytest.raises(InputError, match=r"unknown table trian \(known: .*kb, .*pretrain"):
        read_config(Settings, str(path), "train")


def test_a_key_above_all_tables_is_named_with_the_table_that_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("rate = 1\n")
    with pytest.raises(InputError, match=r"run\.toml: rate is in no table: write \[train\] above it"):
        read_config(Settings, str(path), "train")


def test_a_value_refused_by_the_dataclass_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"rate is -1\.0: it must be 0 or more"):
        read_config(Settings, None, "train", ["rate=-1"])


@pytest.mark.parametrize("override", ["rate", "=1", "refresh.=1", "rate.x=1=2", ".rate=1"])
def test_malformed_overrides_are_refused(toml: str, override: str) -> None:
    with pytest.raises(InputError, match="--set"):
        read_config(Settings, toml, "train", [override])


def test_a_missing_file_lists_the_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "realm.settings.presets", lambda: {"demo": Path("demo.toml"), "tiny": Path("tiny.toml")}
    )
    with pytest.raises(InputError, match=r"no configuration file demmo: .*\(demo, tiny\)"):
        read_config(Settings, "demmo", "train")


@pytest.mark.parametrize("content", [b"[train", b"\xff\xfe", b"rate = 1\nrate = 2\n", b"train = 3\n"])
def test_broken_files_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"broken\.toml") as error:
        read_config(Settings, str(path), "train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layout", ["realm/configs", "configs"])
def test_presets_are_found_in_a_checkout_and_in_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    folder = tmp_path / layout
    folder.mkdir(parents=True)
    (folder / "small.toml").write_text("[train]\nrate = 3\n")
    monkeypatch.setattr("realm.settings.__file__", str(tmp_path / "realm" / "settings.py"))
    assert presets() == {"small": folder / "small.toml"}
    assert read_config(Settings, "small", "train").rate == 3


def test_saved_settings_read_back_the_same(tmp_path: Path) -> None:
    settings = Settings(rate=0.25, sizes=(5,), second=Refresh(1, False))
    write_json(tmp_path / "config.json", dataclasses.asdict(settings))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert config_from(Settings, saved, "config.json") == settings


def test_a_failed_write_leaves_the_old_json_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 1, "name": "é"})
    with pytest.raises(TypeError):
        write_json(path, {"step": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"step": 1, "name": "é"}
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_json_lines_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"

    def rows() -> Iterator[dict[str, str]]:
        yield {"question": "Où?\u2028"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_json_lines(path, rows())
    assert list(tmp_path.iterdir()) == []
    write_json_lines(path, [{"question": "Où?\u2028"}, {"question": "b"}])
    lines = path.read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["question"] for line in lines[:-1]] == ["Où?\u2028", "b"]
    assert lines[-1] == ""


def test_a_bar_is_silent_when_standard_error_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    bar = progress(range(3), total=3, description="reading", unit="passages")
    assert list(bar) == [0, 1, 2]
    assert stderr.getvalue() == ""


def test_a_bar_on_a_terminal_waits_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress(None, total=3, description="reading", unit="passages") as bar:
        bar.update(3)
        assert not bar.disable and stderr.getvalue() == ""


def test_reading_this_module_imports_neither_pydantic_nor_tqdm() -> None:
    code = (
        "import sys, realm.settings, realm.progress; print(sorted({'pydantic', 'tqdm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("set_before", "policy", "spins"),
    [
        ({}, "PASSIVE", "5000"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", None),
        ({"GOMP_SPINCOUNT": "9"}, "PASSIVE", "9"),
    ],
)
def test_variables_of_waiting_threads_that_are_set_stay(set_before, policy, spins, monkeypatch):
    """A count of spins would win over a policy, so who has said one gets no count."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that what it was comes back
        monkeypatch.delenv(name)
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    set_torch_environment()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT")) == (policy, spins)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs the list of threads of Linux")
@pytest.mark.skipif(usable_cores() == 1, reason="there is one thread in any case")
def test_products_of_numpy_have_one_thread():
    """Several processes tag documents; with a thread per core in each of them, a build took several times as long."""
    code = (
        "import os, sys, realm.cli; assert 'numpy' not in sys.modules; realm.cli.set_torch_environment(); "
        "import numpy; numpy.ones((2000, 99)) @ numpy.ones((99, 2000)); print(len(os.listdir('/proc/self/task')))"
    )
    given = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 3000])
def test_a_number_of_too_many_digits_and_too_deep_a_value_are_one_line(value: str, tmp_path: Path) -> None:
    @dataclasses.dataclass(frozen=True)
    class Steps:
        steps: int = 1

    file = tmp_path / "steps.toml"
    file.write_text(f"[mlm]\nsteps = {value}\n")
    for arguments in ((str(file), "mlm"), (None, "mlm", [f"steps={value}"])):
        with pytest.raises(InputError) as caught:
            read_config(Steps, *arguments)
        assert "\n" not in str(caught.value)


# --- what the system refuses to write -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            r"[\d,]+\.\d MB are free: .*`realm kb compact`",
        ),
        (
            RuntimeError("No space left on device (os error 28), /src/lib.rs:9"),
            r"[\d,]+\.\d MB are free: .*`realm kb compact`",
        ),
        (
            shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")]),
            r"[\d,]+\.\d MB are free: .*`realm kb compact`",
        ),
        (OSError(errno.EDQUOT, "Quota exceeded"), "remove files .*`realm kb compact`"),
        (OSError(errno.EROFS, "Read-only file system"), "give a folder .*"),
        (PermissionError(errno.EACCES, "Permission denied"), "give this user permission .*"),
        (OSError(errno.EFBIG, "File too large"), r"raise the limit .*`ulimit -f`\)"),
    ],
)
def test_a_refusal_to_write_has_a_way_out(error: Exception, advice: str, tmp_path: Path) -> None:
    out = tmp_path / "not" / "there"
    with pytest.raises(WriteFailed) as refused, writing(out, RuntimeError):
        raise error
    assert re.fullmatch(rf"{out} cannot be written: [\w -]+( \(os error 28\))?; {advice}", str(refused.value))


def test_a_refusal_without_a_common_way_out_has_only_its_reason(tmp_path: Path) -> None:
    with pytest.raises(WriteFailed) as refused, writing(tmp_path):
        raise OSError(errno.EIO, "Input/output error")
    assert str(refused.value) == f"{tmp_path} cannot be written: Input/output error"
