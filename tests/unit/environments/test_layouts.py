"""Conversion of public data sets to `dataset` rows."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.environments.layouts import LAYOUTS, boxed_content, convert_row, recognize_layout

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": " How many? ", "answer": "Add 1000 to 234.\n#### 1,234"},
    "math": {"problem": "Solve.", "solution": "So $\\boxed{\\frac{1}{2}}$.", "level": "Level 5", "type": "Algebra"},
    "dapo": {
        "prompt": [{"role": "user", "content": "Solve."}],
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "data_source": "math_dapo",
        "ability": "MATH",
        "extra_info": {"index": "9a9b6eb4"},
    },
    "deepscaler": {"problem": "Solve.", "answer": "-\\frac{2}{3}", "solution": "..."},
    "geometry3k": {"images": [{"bytes": "..."}], "problem": "<image>Find x.", "answer": "3"},
}
TRUTHS = {"gsm8k": "1234", "math": "\\frac{1}{2}", "dapo": "34", "deepscaler": "-\\frac{2}{3}", "geometry3k": "3"}
ASKED = {"gsm8k": "How many?", "geometry3k": "Find x."}


@pytest.mark.parametrize("name", LAYOUTS)
def test_public_data_set_row_is_converted(name: Any) -> None:
    made = convert_row(name, ROWS[name])
    assert made["prompt"] == [{"role": "user", "content": ASKED.get(name, "Solve.")}]
    assert made["reward_model"]["ground_truth"] == TRUTHS[name]
    assert made["data_source"]
    assert made["ability"].lower() == "math"


def test_additional_columns_are_kept() -> None:
    assert convert_row("math", ROWS["math"])["extra_info"]["level"] == "Level 5"
    own = convert_row("math", ROWS["math"] | {"uid": "a", "data_source": "own"})
    assert (own["uid"], own["data_source"]) == ("a", "own")
    assert convert_row("dapo", ROWS["dapo"])["uid"] == "9a9b6eb4"
    assert (
        convert_row("math", {"problem": "?", "solution": "no box", "answer": "7"})["reward_model"]["ground_truth"]
        == "7"
    )


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("gsm8k", {"question": "?", "answer": "12"}, "no final line '#### ...'"),
        ("gsm8k", ROWS["deepscaler"], r"column 'question' is missing .*; it looks like layout: math"),
        ("math", {"problem": "?", "solution": "It is 7."}, "no .boxed"),
        ("math", {"problem": " ", "solution": "\\boxed{1}"}, "the problem is not a text"),
        ("dapo", ROWS["dapo"] | {"reward_model": {}}, "reward_model has no field 'ground_truth'"),
        ("geometry3k", ROWS["deepscaler"], r"column 'images' is missing"),
    ],
)
def test_row_of_another_layout_is_refused(name: Any, row: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        convert_row(name, row)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\text{a} \\{b\\}}", "\\text{a} \\{b\\}"),
        ("\\fbox{x_{1}}", "x_{1}"),
        ("$\\boxed 7$.", "7"),
        ("\\boxed{never closed", None),
        ("none", None),
    ],
)
def test_last_box_is_the_answer(text: str, found: str | None) -> None:
    assert boxed_content(text) == found


def test_layout_is_recognized_by_columns() -> None:
    assert recognize_layout(ROWS["gsm8k"]) == "gsm8k"
    assert recognize_layout(ROWS["geometry3k"]) == "geometry3k"
    assert recognize_layout(["text"]) is None
