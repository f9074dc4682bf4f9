"""One page for each preset: when to use it, its formula, its options, and a measured curve."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic.alias_generators import to_camel

from rlrun.config.algorithm.names import (
    ADVANTAGE_ENTRIES,
    AGGREGATIONS,
    LOSS_ENTRIES,
    PRESETS,
    PROXIMAL_METHODS,
    algorithm_inputs,
    default_aggregation,
)
from rlrun.config.algorithm.presets import DEFAULT_PRESET, Preset
from rlrun.inspect.curves import Line, draw_svg
from tools.docs_options import given, option_table
from tools.docs_resource import NOTE, cells, page

FOLDER = "docs/algorithms"
CURVES = Path(__file__).parents[1] / "benchmarks" / "results" / "preset_curves.json"
SMOOTHED = 5


class Advice(NamedTuple):
    """Text that is in no table."""

    use: str
    """When to use the preset."""
    watch: str
    """Signs that another preset, or another value, fits better."""
    source: str
    """Source paper or project."""


ADVICE: Mapping[str, Advice] = {
    name: Advice(**texts)
    for name, texts in yaml.safe_load(Path(__file__).with_name("algorithm_advice.yaml").read_text()).items()
}


def algorithm_pages() -> dict[str, str]:
    """Return every page and every picture, by path from the repository's root."""
    curves: Mapping[str, list[list[float]]] = json.loads(CURVES.read_text())
    files = {f"{FOLDER}/README.md": _index(curves)}
    for name, preset in PRESETS.items():
        files[f"{FOLDER}/{name}.md"] = page(_page(name, preset, curves.get(name, [])))
        if curves.get(name):
            files[f"{FOLDER}/{name}.svg"] = _picture(name, curves[name])
    return files


def _index(curves: Mapping[str, list[list[float]]]) -> str:
    rows = []
    for name in PRESETS:
        ends = [f"{run[0]:.2f} to {_smooth(run)[-1]:.2f}" for run in curves.get(name, [])]
        rows.append(cells(f"[`{name}`]({name}.md)", ADVICE[name].use, ", ".join(ends)))
    return page(
        [
            NOTE,
            "",
            "# Algorithms",
            "",
            f"`spec.algorithm.preset` selects one of these presets; the default is `{DEFAULT_PRESET}`. A preset sets an",
            "advantage, a loss, an aggregation and filters. Each part can be replaced",
            "([all parts](../reference/presets.md)).",
            "",
            "The last column contains the mean reward of a tiny policy before any update and after 40 steps,",
            "for two seeds (`python -m benchmarks.preset_curves`). It shows that the preset learns. It is not a",
            "ranking, because all presets have the same small task and the same learning rate.",
            "",
            "| preset | use | reward |",
            "|---|---|---|",
            *rows,
        ]
    )


def _page(name: str, preset: Preset, runs: list[list[float]]) -> Iterable[str]:
    advice, advantage, loss = ADVICE[name], ADVANTAGE_ENTRIES[preset.advantage], LOSS_ENTRIES[preset.loss]
    aggregation = preset.aggregation or default_aggregation(preset.loss, preset.loss_options)
    yield from (NOTE, "", f"# {name}", "", _wrap(f"{_sentence(preset.description)} Source: {advice.source}."))
    yield from ("", "```yaml", "spec:", f"  algorithm: {{preset: {name}}}", "```")
    yield from ("", "## When to use it", "", _wrap(advice.use), "", "## What to watch", "", _wrap(advice.watch))
    yield from ("", "## Definition", "", "| part | value | |", "|---|---|---|")
    yield cells("advantage", f"`{preset.advantage}`{given(preset.advantage_options)}", advantage.summary)
    yield cells("loss of a token", f"`{preset.loss}`{given(preset.loss_options)}", loss.summary)
    yield cells("aggregation", f"`{aggregation}`", AGGREGATIONS[aggregation])
    if "proximal_logprobs" in loss.reads:
        yield cells("proximal policy", f"`{loss.proximal}`", PROXIMAL_METHODS[loss.proximal])
    if preset.correction is not None:
        yield cells(
            "correction",
            given(preset.correction).strip(),
            "for the mismatch between trainer and engine; `correction: {action: none}` disables it",
        )
    if preset.filters:
        yield cells(
            "filters",
            given({to_camel(key): value for key, value in preset.filters.items()}).strip(),
            "[dropped groups](../data.md#filters)",
        )
    missing = algorithm_inputs("loss", preset.loss, preset.loss_options) | algorithm_inputs(
        "advantage", preset.advantage, preset.advantage_options
    )
    if missing:
        yield cells("needs", ", ".join(missing), "an additional model in `spec.algorithm`")
    yield from ("", "The [table of all presets](../reference/presets.md) explains the letters.")
    for kind, entry in (("advantage", advantage), ("loss", loss)):
        if entry.options:
            yield from ("", f"## Options of the {kind}", "", *option_table(entry.options))
    if runs:
        yield from ("", "## A curve", "", f"![mean reward over 40 steps]({name}.svg)", "")
        substitute = ", with the advantage of `grpo` instead of a critic's" if preset.advantage == "gae" else ""
        yield f"Mean reward (over {SMOOTHED} steps) of a tiny policy on `reverse-text`{substitute}, for two seeds;"
        yield "`python -m benchmarks.preset_curves`."


def _wrap(text: str) -> str:
    """Wrap text in lines of at most 100 columns."""
    return "\n".join(textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."


def _smooth(run: list[float]) -> list[float]:
    return [sum(part) / len(part) for k in range(len(run)) if (part := run[max(0, k + 1 - SMOOTHED) : k + 1])]


def _picture(name: str, runs: list[list[float]]) -> str:
    lines = [
        Line(f"seed {seed}", list(range(len(run))), [round(value, 4) for value in _smooth(run)])
        for seed, run in enumerate(runs)
    ]
    return draw_svg(f"{name}: reward", lines)
