"""Conversion of the example files of other trainers: every key has a fate, and the result is a manifest."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from rlrun.api.run_manifest import examine_manifest
from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import DIALECTS, Converted, convert_settings
from rlrun.convert.draft import KINDS
from rlrun.convert.readers.hydra import Setting
from rlrun.convert.tables.row import row_of
from tools.convert_corpus import CORPUS, converted, corpus

Case = tuple[str, list[Setting], Converted]
CASES = [case for name in ("verl", "areal") for case in converted(name)]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_every_key_has_a_fate_in_the_manifest(case: Case) -> None:
    title, settings, result = case
    assert sorted(fate.setting.key for fate in result.fates) == sorted(setting.key for setting in settings)
    for fate in result.fates:
        assert fate.kind in KINDS
        assert f"{fate.setting.key}=" in result.text, f"{title}: no comment tells of {fate.setting.key}"
        assert fate.to or fate.note, f"{title}: {fate.setting.key} is {fate.kind} without a reason"
        assert fate.kind != "unknown", f"{title}: {fate.setting.key} has no row"


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_conversion_result_is_a_valid_manifest(case: Case) -> None:
    title, _, result = case
    examined, _ = examine_manifest(result.text, title)
    assert [str(problem) for problem in examined.problems] == []
    assert examined.result is not None or result.refused


def test_corpus_refusals_match_expected_files() -> None:
    refused = {case[0]: [fate.setting.key for fate in case[2].refused] for case in CASES if case[2].refused}
    assert set(refused) == {
        "examples/gmpo_trainer/run_qwen3_8b_fsdp.sh",
        "examples/grpo_trainer/run_qwen2_5_vl_7b_fsdp.sh",
        "examples/ascend_extras/remax_trainer/run_qwen3_8b_fsdp.sh",
        "examples/math/multi-turn/config.yaml",
        "examples/math/gsm8k_distill.yaml",
    }


def test_dialect_rows_are_reachable() -> None:
    """A wider row hides all later rows that it matches."""
    for dialect in DIALECTS:
        for row in dialect.rows:
            example = row.key.replace("*", "x")
            assert row_of(example, dialect.rows) is row, f"{dialect.name}: {row.key} is hidden by an earlier row"


@pytest.mark.parametrize("title", ["recipe/dapo/run_dapo_qwen2.5_32b.sh", "examples/math/gsm8k_grpo_lora.yaml"])
def test_wrong_value_of_any_key_never_raises(title: str) -> None:
    strange = itertools.cycle(["abc", -1, [1], {"a": 1}, float("inf"), "a\n: {#"])
    settings = {**corpus("verl"), **corpus("areal")}[title]
    for index, (setting, value) in enumerate(zip(settings, strange, strict=False)):
        changed = [*settings[:index], replace(setting, value=value), *settings[index + 1 :]]
        result = convert_settings(changed, Context("run", 1000), [title])
        assert len(result.fates) == len(settings)


def test_corpus_stays_below_60_kilobytes() -> None:
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 60_000
