"""Algorithm pages: text and curve of each preset, with existing fields and metrics only."""

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


def test_presets_have_pages_and_curves() -> None:
    assert list(ADVICE) == list(PRESETS)
    pages = algorithm_pages()
    assert {f"docs/algorithms/{name}.md" for name in PRESETS} <= pages.keys()
    assert {f"docs/algorithms/{name}.svg" for name in PRESETS} <= pages.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_preset_curve_shows_learning(name: str) -> None:
    for run in json.loads(CURVES.read_text())[name]:
        assert len(run) == 41
        assert sum(run[-5:]) / 5 > run[0] + 0.1


def names() -> set[str]:
    """Return the words of the reference pages and of the code that makes metrics."""
    texts = [path.read_text() for path in KNOWN]
    texts += [path.read_text() for folder in METRICS for path in (ROOT / folder).rglob("*.py")]
    return {word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}


def quoted(text: str) -> list[str]:
    """Return the names in backticks, except commands, files and plain values."""
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
