"""Comparison of runs: curves at the same steps, and different fields of their manifests.

The fields come from a folder's files or from a cluster's object; all callers use these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import yaml

from rlrun.inspect.screen import align_columns, cut_text, show_number
from rlrun.inspect.small_files import read_config
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.json_types import Json
from rlrun.runtime.printable import escape_controls

Lines = Sequence[Mapping[str, object]]
_POINTS = 10
_METRICS = (
    "reward/mean",
    "loss",
    "validation/loss",
    "mismatch_kl",
    "entropy",
    "off_policy/mean",
    "perf/throughput",
    "time/step",
)
PLACES = ("name", "uid", "output_dir", "port", "host", "metrics_port", "trainer_url", "inference_urls", "engine_urls")
"""Fields that differ between any two runs and are not relevant for a comparison."""
_TEXT = 40
_BYTES_MAX = 4 << 20
"""Maximum size of a manifest in bytes."""


@dataclass(frozen=True)
class RunFields:
    """Fields of a run, with the names of its manifest."""

    values: Mapping[str, object]
    known: Collection[str] | None = None
    """Dotted paths with complete fields below them; None: all fields. A folder without a manifest only contains computed fields."""


@dataclass(frozen=True)
class Curve:
    """Metrics and fields of a run in a comparison."""

    label: str
    lines: Lines
    """Lines of metrics."""
    fields: RunFields
    argument: str = ""
    """Words that name the run on a command line, if they differ from the label."""


def last_step(lines: Lines) -> int:
    """Return the last trained step, or 0."""
    return max((step for line in lines if isinstance(step := line.get("step"), int)), default=0)


def common_metrics(curves: Sequence[Curve]) -> list[str]:
    """Return the metrics that all runs have: the usual ones, and held-out rewards."""
    names = [{name for line in curve.lines for name in line} for curve in curves]
    both = set.intersection(*names) if names else set()
    evaluated = sorted(
        name for name in both if name.startswith("eval/") and name.endswith(("reward/mean", "reward/mean_all"))
    )
    return [name for name in (*_METRICS, *evaluated) if name in both]


def mean_between(lines: Lines, metric: str, first: int, last: int) -> float | None:
    """Return the mean of a metric over steps (inclusive), or None if it was not measured there."""
    values = [
        float(value)
        for line in lines
        if first <= _last_step(line) <= last and isinstance(value := line.get(metric), int | float)
    ]
    return sum(values) / len(values) if values else None


def _last_step(line: Mapping[str, object]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else -1


def curves_table(curves: Sequence[Curve]) -> str:
    """Return a table per metric: one row per span of common steps (at most ten spans), one column per run."""
    common = min(last_step(curve.lines) for curve in curves)
    if common == 0:
        without = [curve for curve in curves if not last_step(curve.lines)]
        names, argument = ", ".join(one.label for one in without), without[0].argument or without[0].label
        return (
            f"the runs have no common trained step: {names} has none yet; `rlrun status {argument}` shows its progress"
        )
    size = -(-common // _POINTS)
    parts = []
    for metric in common_metrics(curves):
        rows: list[Sequence[str]] = [(escape_controls(metric), *(curve.label for curve in curves))]
        for first in range(1, common + 1, size):
            last = min(common, first + size - 1)
            values = [mean_between(curve.lines, metric, first, last) for curve in curves]
            if any(value is not None for value in values):
                rows.append((f"{first}–{last}", *(show_number(value, ".4g") for value in values)))
        parts.append(align_columns(rows))
    return "\n\n".join(parts)


def manifest_differences(curves: Sequence[Curve]) -> list[tuple[str, list[str]]]:
    """Return the manifest fields with different values, and each run's value; a dash means unset and without a default."""
    every = [flatten_config(_set_fields(curve.fields.values), leave_out=()) for curve in curves]
    scopes = [curve.fields.known for curve in curves if curve.fields.known is not None]
    found = []
    for name in sorted({name for one in every for name in one}):
        values = [one.get(name, "–") for one in every]
        if len(set(values)) > 1 and all(_is_within(name, scope) for scope in scopes):
            found.append((name, values))
    return found


def _is_within(name: str, scope: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in scope for count in range(1, len(parts) + 1))


def _set_fields(value: object) -> object:
    """Return a document without its null fields."""
    if isinstance(value, Mapping):
        return {key: _set_fields(one) for key, one in value.items() if one is not None}
    return [_set_fields(one) for one in value] if isinstance(value, list) else value


def flatten_config(value: object, path: str = "", leave_out: Collection[str] = PLACES) -> dict[str, str]:
    """Return the fields of a configuration by path, without the fields in `leave_out`."""
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, one in value.items():
            if key not in leave_out:
                found |= flatten_config(one, f"{path}.{key}" if path else str(key), leave_out)
        return found
    if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        return {
            name: text
            for at, one in enumerate(value)
            for name, text in flatten_config(one, f"{path}.{at}", leave_out).items()
        }
    return {path: escape_controls(str(value))}


def differences_table(curves: Sequence[Curve]) -> str:
    """Return the differences as a table."""
    found = manifest_differences(curves)
    if not found:
        return "the configurations are equal"
    head = ("field", *(curve.label for curve in curves))
    return align_columns([head, *((name, *(cut_text(value, _TEXT) for value in values)) for name, values in found)])


def fields_of_spec(spec: Mapping[str, object]) -> RunFields:
    """Return the fields of a specification with defaults; if this version cannot read it, the fields as they are written."""
    from rlrun.api import resolve

    found = resolve.fields_of_spec(spec)
    if found is not None:
        return RunFields(found)
    return RunFields(_without_variables(spec), sorted(spec))


def fields_of_config(config: Mapping[str, object]) -> RunFields:
    """Return the fields of a resolved configuration (`run.json`)."""
    from rlrun.api import resolve

    return RunFields(resolve.fields_of_config(config), resolve.computed_fields())


def fields_of_folder(
    paths: RunPaths, config: Mapping[str, object], opened: Callable[[Path], BinaryIO] | None = None
) -> RunFields:
    """Return the fields of a run in a folder, from its manifest or otherwise from its configuration.

    Args:
        paths: paths of the run.
        config: sections of its `run.json`.
        opened: function that opens a file of the folder with checks; None: open it directly.
    """
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        with (opened or (lambda path: path.open("rb")))(paths.manifest) as file:
            content = file.read(_BYTES_MAX + 1)
        document = yaml.safe_load(content) if len(content) <= _BYTES_MAX else None
        if isinstance(document, dict) and isinstance(spec := document.get("spec"), dict):
            return fields_of_spec(spec)
    return fields_of_config(config)


def sections_by_hand(paths: RunPaths, attempts: Sequence[int]) -> Json:
    """Return the configuration sections of a run without `run.json`, whose roles were started by hand."""
    config = read_config(paths, attempts)
    return {"trainer": config} if config else {}


def _without_variables(spec: Mapping[str, object]) -> dict[str, object]:
    return {
        name: {key: one for key, one in value.items() if key not in ("env", "envFrom")}
        if isinstance(value, Mapping)
        else value
        for name, value in spec.items()
    }
