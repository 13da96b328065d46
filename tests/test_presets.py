"""The presets: `paper` has the published values, line by line of docs/paper_map.md, and no preset contradicts itself."""

import functools
import re
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from realm.compare.rows import STARTS, TABLE_1, TABLE_2
from realm.compare.settings import DataConfig, TableConfig
from realm.demo.from_text import FromTextConfig
from realm.demo.stages import DemoConfig
from realm.settings import TABLES, presets, read_config, tables_of
from realm.train.health import GATE_LIMIT
from tests.test_cli import config_classes

DOCUMENT = (Path(__file__).parent.parent / "docs" / "paper_map.md").read_text(encoding="utf-8")
VALUES = DOCUMENT.split("\n## The published values")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| [^|]+ \| `([^`]+)` \| [^|]+ \| `([\w.]+)` \|$", VALUES, re.MULTILINE)
"""Published value and setting, as TOML."""
LONGEST_INPUT = 512
"""Of a BERT."""


@functools.cache
def resolved(preset: str) -> dict[str, Any]:
    """Every table of a preset with all its settings."""
    classes = config_classes() | {"demo": DemoConfig, "from_text": FromTextConfig}
    classes |= {"data": DataConfig, "compare": TableConfig, "ablate": TableConfig}
    return {name: asdict(read_config(classes[name], preset, name)) for name in classes}


def file_of(preset: str) -> dict[str, Any]:
    """What the file of a preset sets."""
    return tomllib.loads(presets()[preset].read_text(encoding="utf-8"))


def setting(tables: dict[str, Any], name: str) -> Any:
    for part in name.split("."):
        tables = tables[part]
    return tables


def names_set(table: dict[str, Any], before: str = "") -> set[str]:
    """The settings that a file sets, with their tables before them."""
    nested = {k: v for k, v in table.items() if isinstance(v, dict)}
    names = {before + name for name in table.keys() - nested.keys()}
    return names.union(*(names_set(inner, f"{before}{name}.") for name, inner in nested.items()))


# -- the paper


@pytest.mark.parametrize(("published", "name"), ROWS, ids=[name for _, name in ROWS])
def test_paper_preset_has_the_published_value(published: str, name: str) -> None:
    assert setting(resolved("paper"), name) == tomllib.loads(f"value = {published}")["value"]


def test_table_of_published_values_has_every_line_and_every_setting_of_the_preset() -> None:
    assert len(ROWS) == VALUES.count("\n|") - 2  # heading and rule
    named = [name for _, name in ROWS]
    assert len(named) == len(set(named))
    (unpublished,) = re.findall(
        r"(?ms)^No value was published for these settings of the preset: (.*?)\n\n", VALUES
    )
    chosen = set(re.findall(r"`([\w.]+)`", unpublished))
    assert names_set(file_of("paper")) - set(named) == chosen


def test_fine_tuning_variants_are_twenty_epochs_of_their_questions() -> None:
    from realm.train.finetune import FinetuneConfig

    text = presets()["paper"].read_text(encoding="utf-8")
    variants = re.findall(r"# (\w+) .*of ([\d,]+)\S* .*`--set (\S+) --set (\S+)`", text)
    assert [name for name, *_ in variants] == ["WebQuestions", "CuratedTREC"]
    nq = read_config(FinetuneConfig, "paper", "finetune")
    for _, questions, *overrides in variants:
        config = read_config(FinetuneConfig, "paper", "finetune", overrides)
        assert config.steps == 20 * int(questions.replace(",", "")) / config.batch_size
        assert replace(config, steps=nq.steps, dev_every=nq.dev_every) == nq


# -- all presets


@pytest.fixture(params=presets())
def preset(request: pytest.FixtureRequest) -> dict[str, Any]:
    return resolved(request.param) | {"named": tables_of(request.param)}


def test_every_table_of_a_command_is_checked() -> None:
    assert set(resolved("paper")) == set(TABLES) - {"baseline"}


def test_inputs_fit_the_encoder_and_each_other(preset: dict[str, Any]) -> None:
    query, passage = preset["mlm"]["query_tokens"], preset["kb"]["passage_tokens"]
    assert query + passage <= LONGEST_INPUT
    assert preset["ict"]["query_tokens"] <= query
    assert (
        preset["finetune"]["reading_tokens"] == 0
        or query < preset["finetune"]["reading_tokens"] <= query + passage
    )


def test_encoder_and_knowledge_base_have_the_same_wordpieces(preset: dict[str, Any]) -> None:
    """So that `realm kb build` and `realm mlm` by the preset alone fit together."""
    assert preset["mlm"]["init"] in (preset["kb"]["tokenizer"], None)


def test_guided_candidates_come_with_a_softmax_over_the_index(preset: dict[str, Any]) -> None:
    """docs/recipe.md: over the candidates alone the ranking inverts."""
    config = preset["pretrain"]
    assert config["injected"] == 0 or config["normalise"] == "index"


def test_reader_gets_to_the_gate_at_its_full_rate(preset: dict[str, Any]) -> None:
    config = preset["pretrain"]
    warmup = config["warmup"]
    warmup = min(10_000, max(100, config["steps"] // 10)) if warmup is None else warmup
    assert config["health"]["gate"] <= 0 or warmup <= GATE_LIMIT


def test_stages_that_continue_each_other_agree(preset: dict[str, Any]) -> None:
    stages = [preset[name] for name in ("ict", "pretrain", "finetune") if name in preset["named"]]
    for name in ("bias_correction", "dropout"):
        assert len({stage[name] for stage in stages}) <= 1, name
    if preset["pretrain"]["ict"]:
        assert preset["pretrain"]["ict_titled"] == preset["ict"]["titled"]
    assert preset["finetune"]["read"] == preset["answer"]["read"]
    assert preset["finetune"]["read"] <= preset["finetune"]["retrieved"]


def test_stale_index_of_table_2_is_refreshed_at_least_once(preset: dict[str, Any]) -> None:
    config = preset["pretrain"]
    if "ablate" in preset["named"]:
        builds = config["steps"] // config["refresh"]["every"]
        assert builds >= 30
        assert STARTS["stale"].stale * config["refresh"]["every"] < config["steps"]


def test_rows_of_the_tables_are_known(preset: dict[str, Any]) -> None:
    for name, table in (("compare", TABLE_1), ("ablate", TABLE_2)):
        assert set(preset[name]["rows"]) <= set(table)


def test_presets_that_start_from_realm_mini_read_as_it_was_taught() -> None:
    made = resolved("realm-mini")
    for name in ("demo", "demo-full"):
        tables = resolved(name)
        assert tables["kb"] | {"tagger": ""} == made["kb"] | {"tagger": ""}
        for key in ("query_tokens", "copy_head"):
            assert tables["mlm"][key] == made["mlm"][key]


def test_full_demo_is_the_demo_with_more_of_it() -> None:
    demo, full = resolved("demo"), resolved("demo-full")
    more = {"pretrain.steps", "pretrain.refresh.every", "finetune.dev_questions"}
    more |= {f"from_text.{name}" for name in demo["from_text"]}
    assert {name for name in names_set(demo) if setting(demo, name) != setting(full, name)} <= more
