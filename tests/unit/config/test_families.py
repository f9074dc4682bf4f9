"""Table of model families with tensor, context and expert parallelism: rows, refusals and documentation."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from rlrun.config.families import FAMILIES, Family, Kind, divisible_types, explain_undivided, find_family

PAGE = Path(__file__).parents[3] / "docs" / "parallelism.md"


@pytest.mark.parametrize(
    ("parameter", "named"),
    [
        ("self_attn.q_proj.weight", True),
        ("self_attn.q_proj.bias", True),
        ("self_attn.q_proj.lora_A", True),
        ("self_attn.k_norm.weight", True),
        ("post_feedforward_layernorm.weight", True),
        ("self_attn.sub_layernorm.weight", False),  # a pattern of the layer's norms does not match inner norms
        ("self_attn.sinks", False),
        ("mlp.act_fn.alpha_p", False),
        ("conv.weight", False),
    ],
)
def test_family_row_matches_layer_parameters(parameter: str, named: bool) -> None:
    assert FAMILIES["llama"].names(parameter) == named


def test_module_has_one_role_per_family() -> None:
    for kind, row in FAMILIES.items():
        names = [*row.columns, *row.rows, *row.joined, *row.norms, *row.experts]
        assert len(names) == len(set(names)), kind
        assert not any(
            replace(row, columns=(), rows=(), joined={}, norms=(), experts=()).names(f"{n}.weight") for n in names
        ), kind


def test_unsupported_parallelism_is_refused_with_families_and_fix() -> None:
    assert explain_undivided("mamba", "tp", 1) is None
    assert explain_undivided("qwen2", "tp", 2) is None
    said = explain_undivided("mamba", "tp", 2) or ""
    assert re.fullmatch(
        r"is supported for the model types afmoe, arcee, .*, but the model is of type mamba: its layers carry state along a "
        r"sequence; set tp: 1 and share it by dpShard",
        said,
    )
    assert "gpt_oss" not in said.partition(", but the model is")[0]
    said = explain_undivided("gpt_oss", "tp", 2) or ""
    assert ": its experts have biases and its heads have sinks, which are not divided; " in said
    assert said.endswith("; set tp: 1 and share it by dpShard, or cp")
    assert (explain_undivided("llama", "ep", 2) or "").endswith("set ep: 1 and share it by dpShard")
    assert find_family("gpt_oss", "cp") is not None


def test_family_without_parallelism_has_a_reason() -> None:
    for kind, row in FAMILIES.items():
        assert bool(row.reason) == (not {"tp", "cp"} <= row.by), kind
        assert ("ep" in row.by) == bool(row.experts and "tp" in row.by), kind


def test_documented_table_contains_all_families() -> None:
    """`python -m tests.trainer.families` prints the table with its measurements."""
    rows = re.findall(r"^\| `(\w+)` \|((?: (?:yes|no) \|){3})", PAGE.read_text(), re.MULTILINE)
    shown = {kind: tuple(cell.strip() for cell in cells.split("|")[:3]) for kind, cells in rows}
    assert len(rows) == len(shown)
    assert shown == {
        kind: tuple("yes" if by in row.by else "no" for by in get_args(Kind)) for kind, row in FAMILIES.items()
    }
    assert [kind for kind, _ in rows] == sorted(shown)
    assert set(divisible_types("tp")) == {kind for kind, cells in shown.items() if cells[0] == "yes"}
    assert Family().by == {"tp", "cp"}
