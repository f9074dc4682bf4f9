"""Content of a run's volume for commands and for Python: metrics, rollouts and checkpoints, from a folder or through
the cluster.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rlrun.config.suggest import unknown_name
from rlrun.inspect import trace_rollouts
from rlrun.inspect.comparison import Curve, RunFields, fields_of_folder, fields_of_spec, sections_by_hand
from rlrun.inspect.curves import MetricColumns
from rlrun.inspect.kubectl import RUNS, Api, ask_json
from rlrun.inspect.small_files import each_line, json_lines, read_json
from rlrun.inspect.source import FolderRun, NoFileError, NotFoundError, Run, Volume, read_run, traced_steps
from rlrun.inspect.why import not_there
from rlrun.protocol.files.checkpoint_manifest import MANIFEST
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import redact

_PATHS = RunPaths(Path())
_CHECKPOINT = re.compile(r"step_(\d{8})\.a(\d{4,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    attempt: int
    path: str
    """Folder of the checkpoint on the run's volume."""
    size: int
    """Size in bytes."""
    time: float
    """Time of its completion, in seconds since the epoch."""


class Trace(NamedTuple):
    """Rollouts of one step, or answers of one evaluation."""

    label: str
    rows: Sequence[trace_rollouts.Row]


def metric_lines(run: Run, api: Api) -> Iterator[dict[str, object]]:
    """Yield the lines of a run's metrics, one per step; empty before the first trained step. For a folder only one line
    is in memory.
    """
    if isinstance(run, FolderRun):
        yield from each_line(RunPaths(run.root).metrics)
        return
    seen = read_run(run, api, time.time(), events=False)
    try:
        yield from json_lines(Volume(run, seen, api).read_text(PurePosixPath(_PATHS.metrics.name)))
    except NoFileError:
        return


def read_curve(run: Run, api: Api, label: str) -> Curve:
    """Read metrics and configuration of a run."""
    lines = MetricColumns(metric_lines(run, api))
    if isinstance(run, FolderRun):
        paths = RunPaths(run.root)
        config = read_json(paths.run_json) or sections_by_hand(paths, paths.attempts_on_disk())
        return Curve(label, lines, _without_secrets(fields_of_folder(paths, config)))
    found = ask_json(api, ["get", RUNS, run.name])
    namespace = (found.get("metadata") or {}).get("namespace")
    fields = _without_secrets(fields_of_spec(found.get("spec") or {}))
    return Curve(label, lines, fields, f"{run.name} -n {namespace}" if namespace else run.name)


def _without_secrets(fields: RunFields) -> RunFields:
    document = redact.redact_document(fields.values, redact.known_secrets(os.environ))
    assert isinstance(document, dict)
    return replace(fields, values=document)


def read_trace(run: Run, api: Api, step: int | None = None, evaluation: int | None = None) -> Trace:
    """Read the rollouts of a step, or the evaluation answers of a policy version.

    Args:
        run: run to read.
        api: access to the cluster.
        step: trained step. None: the newest step with a trace.
        evaluation: policy version, instead of a step.

    Raises:
        NotFoundError: the trace does not exist; the message lists the existing ones.
    """
    seen = read_run(run, api, time.time(), events=False)
    volume, folder = Volume(run, seen, api), PurePosixPath(_PATHS.traces.name)
    if evaluation is not None:
        name, label = _PATHS.evaluation_trace(evaluation).name, f"evaluation of version {evaluation}"
    else:
        if step is None:
            steps = traced_steps(volume.list_names(folder))
            if not steps:
                lacks = f"has no traces yet (task {seen.task}); the first trained step writes one"
                raise NotFoundError(not_there(seen, lacks))
            step = steps[-1]
        name, label = _PATHS.trace(step).name, f"step {step}"
    return Trace(label, trace_rollouts.newest_rollouts(json_lines(_read_trace_file(volume, folder, name))))


def _read_trace_file(volume: Volume, folder: PurePosixPath, name: str) -> str:
    try:
        return volume.read_text(folder / name)
    except NotFoundError as error:
        steps = traced_steps(volume.list_names(folder))
        existing = f"the run has traces of steps {steps[0]} to {steps[-1]}" if steps else "the run has no traces"
        raise NotFoundError(f"{error}; {existing}") from None


def check_environment(rows: Sequence[trace_rollouts.Row], environment: str | None, what: str) -> None:
    """Refuse an environment without rollouts.

    Args:
        rows: rollouts to search.
        environment: name of the environment. None: all.
        what: name of the option in messages.

    Raises:
        NotFoundError: no rollout belongs to it; the message lists the existing environments.
    """
    if environment is not None and environment not in (known := trace_rollouts.environment_names(rows)):
        raise NotFoundError(f"{what}: {unknown_name('environment', environment, known)}")


def read_checkpoints(run: Run, api: Api) -> list[Checkpoint]:
    """Read the complete checkpoints of a run, in order of step and attempt."""
    seen = read_run(run, api, time.time(), events=False)
    volume, folder = Volume(run, seen, api), PurePosixPath(_PATHS.checkpoints.name)
    root = str(run.root) if isinstance(run, FolderRun) else str(seen.folder)
    found = []
    for name in volume.list_names(folder):
        if (match := _CHECKPOINT.fullmatch(name)) is None:
            continue
        try:
            document = json.loads(volume.read_text(folder / name / MANIFEST))
            size = sum(int(file["size"]) for file in document["files"])
            when = float(document["created_at"])
        except (NotFoundError, ValueError, TypeError, KeyError):
            continue  # incomplete or damaged
        found.append(Checkpoint(int(match[1]), int(match[2]), f"{root}/{folder / name}", size, when))
    return found
