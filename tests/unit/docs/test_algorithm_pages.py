"""The pages of algorithms: a text and a curve for each preset, and no field or metric that does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlrun.config.algorithm.presets import PRESETS
from tools.docs_algorithms import ADVICE, CURVES, algorithm_pages

ROOT = Path(__file__).parents[3]
KNOWN = (ROOT / "docs/reference/rlrun.md", ROOT / "docs/reference/presets.md", ROOT / "docs/reference/metrics.md")
METRICS = ("workloads/rlrun/orchestrator/progress", "workloads/rlrun/trainer/learning", "workloads/rlrun/algorithms")


def test_every_preset_has_its_page() -> None:
    assert list(ADVICE) == list(PRESETS)
    pages = algorithm_pages()
    assert {f"docs/algorithms/{name}.md" for name in PRESETS} <= pages.keys()
    assert {f"docs/algorithms/{name}.svg" for name in PRESETS} <= pages.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_curve_is_of_a_preset_that_learns(name: str) -> None:
    for run in json.loads(CURVES.read_text())[name]:
        assert len(run) == 41
        assert sum(run[-5:]) / 5 > run[0] + 0.1


def test_fields_and_metrics_of_the_advice_exist() -> None:
    texts = [path.read_text() for path in KNOWN]
    texts += [path.read_text() for folder in METRICS for path in (ROOT / folder).rglob("*.py")]
    words = set("\n".join(texts).replace('"', " ").replace("`", " ").replace("(", " ").split())
    for name, advice in ADVICE.items():
        for quoted in re.findall(r"`([^`]+)`", " ".join(advice)):
            part = re.split(r"[:/ ]", quoted)[0].split(".")[-1]
            last = re.split(r"[/ ]", quoted)[-1] if "/" in quoted else part
            assert {part, last} & {word.strip("`|,.:[]") for word in words} or quoted in PRESETS, f"{name}: {quoted}"
