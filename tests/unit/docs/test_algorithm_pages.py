"""The pages of algorithms: a text and a curve for each preset, and no field or metric that does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlrun.config.algorithm.presets import PRESETS
from tools.docs_algorithms import ADVICE, CURVES, algorithm_pages

ROOT = Path(__file__).parents[3]
KNOWN = (
    ROOT / "docs/reference/status.md",
    ROOT / "docs/reference/rlrun.md",
    ROOT / "docs/reference/presets.md",
    ROOT / "docs/reference/metrics.md",
)
METRICS = ("workloads/rlrun/orchestrator/progress", "workloads/rlrun/trainer", "workloads/rlrun/algorithms")


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


def names() -> set[str]:
    """Words of the reference pages and of the code that makes metrics."""
    texts = [path.read_text() for path in KNOWN]
    texts += [path.read_text() for folder in METRICS for path in (ROOT / folder).rglob("*.py")]
    return {word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}


def quoted(text: str) -> list[str]:
    """Names in backticks: no command, no file, no value alone."""
    found = re.findall(r"`([^`]+)`", text)
    return [
        name for name in found if re.fullmatch(r"[a-zA-Z_][\w./<>]*(: [\w.]+)?", name) and "." + name[-3:] != ".yaml"
    ]


def test_fields_and_metrics_of_the_advice_exist() -> None:
    known = names()
    assert {"loss", "optimizer"} <= known
    texts = {name: " ".join(advice) for name, advice in ADVICE.items()} | {
        "tuning": (ROOT / "docs/tuning.md").read_text()
    }
    for page, text in texts.items():
        for name in quoted(text):
            last = re.split(r"[./]", name.split(":")[0])[-1]
            assert last in known or name in PRESETS or name.endswith((".jsonl", ".json")), f"{page}: {name}"
