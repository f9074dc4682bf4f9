"""The data pipeline's part of a checkpoint: the position in the data, and fingerprints of the data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rlrun.diagnostics.fault_points import reach
from rlrun.orchestrator.sft.samples import Position
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.checkpoint_manifest import ORCHESTRATOR_PART
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes

STATE_FILE = "data.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Snapshot:
    """State of the pipeline after the batch of a step was made."""

    step: int
    position: Position
    fingerprints: tuple[str, ...]
    """Fingerprints of the sources; a position is valid only for the same data."""


def write_snapshot(checkpoint: Path, snapshot: Snapshot) -> None:
    """Write the pipeline's part of `checkpoint` durably."""
    document = asdict(snapshot) | {"format_version": FORMAT_VERSION}
    state = checkpoint / ORCHESTRATOR_PART / STATE_FILE
    write_json(state, document, before_rename="checkpoint.orchestrator.before_rename")
    reach("checkpoint.orchestrator.written")


def base_position(paths: RunPaths, attempt: Attempt, fingerprints: tuple[str, ...]) -> Position:
    """Return the position in the data at which this attempt starts.

    Raises:
        RoleError: the part is missing or has another format, or the data has changed.
    """
    if attempt.base_attempt is None:
        return Position()
    checkpoint = paths.checkpoint(attempt.base_step, attempt.base_attempt)
    path = checkpoint / ORCHESTRATOR_PART / STATE_FILE
    try:
        document = json.loads(path.read_text())
        if document["format_version"] != FORMAT_VERSION:
            raise ValueError("it has another format")
        position = Position(int(document["position"]["draws"]), dict(document["position"]["counters"]))
        before = tuple(document["fingerprints"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RoleError(
            f"cannot resume from {checkpoint}: {path.relative_to(checkpoint)} is unreadable ({error})",
            exit_codes.DATA,
        ) from error
    if before != fingerprints:
        changed = next((i for i, (a, b) in enumerate(zip(before, fingerprints, strict=False)) if a != b), None)
        change = "data.sources has another length" if changed is None else f"data.sources[{changed}] has other files"
        raise RoleError(
            f"cannot resume from {checkpoint}: {change} than when it was saved; restore the data, or start a new run",
            exit_codes.DATA,
        )
    return position
