"""Files for the repeated computation of a step, selected by the lineage of the newest attempt. Read-only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from loguru import logger

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TRAINING_TASKS, OrchestratorConfig, TrainerConfig
from rlrun.config.models.run_config import config_fingerprint
from rlrun.protocol.files.attempts import Attempt, Origin, read_attempt
from rlrun.protocol.files.checkpoint_manifest import (
    ManifestError,
    check_sizes,
    complete_checkpoints,
    newest_attempt,
    read_manifest,
)
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.metrics_line import MetricsLine
from rlrun.protocol.files.paths import Artifact, Role, RunPaths
from rlrun.runtime import exit_codes

ConfigT = TypeVar("ConfigT", TrainerConfig, OrchestratorConfig)
KEEP_BATCHES = (
    "batches are kept from the oldest kept checkpoint on; keep all batches with orchestrator.recordRollouts: true, or more "
    "checkpoints with checkpoint.keepLast and keepInterval"
)


class ReplayError(RoleError):
    """Error for a step that cannot be repeated, in one line with the setting that keeps the missing file."""

    def __init__(self, message: str, code: int = exit_codes.DATA) -> None:
        super().__init__(message, code)


@dataclass(frozen=True)
class Recorded:
    """A run in a folder: its configuration and the files of its steps."""

    paths: RunPaths
    trainer: TrainerConfig
    orchestrator: OrchestratorConfig | None
    """Configuration of the orchestrator. None if it is unreadable; then advantages are not explained."""
    lineage: Attempt
    """Newest attempt."""
    checkpoints: tuple[Artifact, ...]
    """Complete checkpoints of the lineage."""
    batches: dict[int, Path]
    """Batches by step, of the attempt in the lineage that trained the step."""

    @property
    def starts(self) -> list[int]:
        """Steps after which a computation can start: the model (0) and the checkpoints."""
        return [0, *(checkpoint.step for checkpoint in self.checkpoints)]

    def repeatable_steps(self) -> list[int]:
        """Return the steps that can be repeated."""
        found, reached = [], set(self.starts)
        for step in sorted(self.batches):
            if step - 1 in reached:
                found.append(step)
                reached.add(step)
        return found


@dataclass(frozen=True)
class Plan:
    """Files for the computation of one step."""

    run: Recorded
    step: int
    start: Path | None
    """Checkpoint to start from. None: the model."""
    start_step: int
    origin: Origin | None
    """Other run's checkpoint equal to `start`, if this run started from one."""
    batches: tuple[tuple[int, Path], ...]
    end: Path | None
    """Checkpoint of the step, if it exists."""
    attempt: Attempt
    """Attempt that trained the step."""
    lines: dict[int, MetricsLine] = field(default_factory=dict)
    """Lines of `metrics.jsonl` by step."""

    @property
    def reconfigured(self) -> bool:
        """Whether the configuration was changed after the step was trained."""
        return self.attempt.config_hash not in ("", config_fingerprint(self.run.trainer))


def read_run(root: Path) -> Recorded:
    """Read the parts of a run in a folder.

    Raises:
        ReplayError: the folder contains no run, a run without training, or a guest of another run's trainer.
    """
    paths = RunPaths(root)
    attempts = paths.attempts_on_disk()
    if not attempts:
        raise ReplayError(
            f"{root} does not contain a run (no attempts/); copy the folder of a run in a cluster with `rlrun pull NAME run --to DIR`",
            exit_codes.USAGE,
        )
    trainer = _read_config(TrainerConfig, paths, attempts[-1])
    if trainer.task not in TRAINING_TASKS:
        raise ReplayError(f"{trainer.name} has task {trainer.task}, which has no training steps", exit_codes.USAGE)
    if trainer.shared_with is not None:
        raise ReplayError(
            f"{trainer.name} is trained by {trainer.shared_with} (trainer.sharedWith), whose layout affects its steps and is not in "
            "its folder; only runs with their own trainer can be replayed",
            exit_codes.USAGE,
        )
    lineage = newest_attempt(paths, logger.warning)
    if lineage is None:
        raise ReplayError(
            f"{paths.attempt_file(attempts[-1])} is damaged, and no attempt has a complete checkpoint; restore the file from a backup",
            exit_codes.DATA,
        )
    orchestrator: OrchestratorConfig | None
    try:
        orchestrator = _read_config(OrchestratorConfig, paths, attempts[-1])
    except ReplayError:
        orchestrator = None
    batches = {a.step: a.path for a in paths.batches_on_disk() if trained_by(lineage, a.step) == a.attempt}
    owned = [a for a in complete_checkpoints(paths) if trained_by(lineage, a.step) == a.attempt]
    return Recorded(paths, trainer, orchestrator, lineage, tuple(owned), batches)


def trained_by(lineage: Attempt, step: int) -> int | None:
    """Return the attempt of a lineage that trained a step, or None."""
    for segment in lineage.lineage:
        if segment.first <= step and (segment.last is None or step <= segment.last):
            return segment.attempt
    return None


def find_step(root: Path, step: int, *, computes: bool = True) -> Plan:
    """Find the files for the computation of a step from the nearest start.

    Args:
        root: folder of the run.
        step: step to repeat.
        computes: whether the step will be computed; otherwise only its batch is needed.

    Raises:
        ReplayError: a file is missing; the message contains it, the setting that keeps it, and the steps that can
            be repeated.
    """
    run = read_run(root)
    attempt = trained_by(run.lineage, step)
    lines = _read_lines(run.paths.metrics)
    newest = max([*lines, *run.batches, *run.starts])
    if step > newest or attempt is None:
        raise ReplayError(
            f"{run.trainer.name} has not trained step {step} yet; its newest step is {newest}", exit_codes.USAGE
        )
    if not computes:
        return _plan_of_batch(run, step, lines, read_attempt(run.paths.attempt_file(attempt)))
    before = [start for start in run.starts if start < step]
    begin = next(
        (start for start in reversed(before) if all(n in run.batches for n in range(start + 1, step + 1))), None
    )
    if begin is None:
        raise ReplayError(_explain_missing(run, step, before[-1]))
    start = next((c for c in run.checkpoints if c.step == begin), None)
    path, origin = (None, run.lineage.origin) if start is None else (start.path, None)
    if origin is not None:
        path = Path(origin.path)
    if path is not None:
        _check_checkpoint(path, step)
    end = next((c.path for c in run.checkpoints if c.step == step), None)
    wanted = range(begin + 1, step + 1)
    return Plan(
        run,
        step,
        path,
        begin,
        origin,
        tuple((number, run.batches[number]) for number in wanted),
        end,
        read_attempt(run.paths.attempt_file(attempt)),
        {number: lines[number] for number in wanted if number in lines},
    )


def _plan_of_batch(run: Recorded, step: int, lines: dict[int, MetricsLine], attempt: Attempt) -> Plan:
    """Create a plan without a computation.

    Raises:
        ReplayError: the batch is missing.
    """
    if step not in run.batches:
        raise ReplayError(
            f"the batch of step {step} is not on the volume; {KEEP_BATCHES}; "
            f"steps with a batch: {show_spans(sorted(run.batches))}"
        )
    found = {number: line for number, line in lines.items() if number == step}
    return Plan(run, step, None, step - 1, None, ((step, run.batches[step]),), None, attempt, found)


def _explain_missing(run: Recorded, step: int, start: int) -> str:
    lacking = next(number for number in range(start + 1, step + 1) if number not in run.batches)
    name = run.paths.batch(lacking, trained_by(run.lineage, lacking) or 1).relative_to(run.paths.root)
    nearest = "the model" if start == 0 else f"the checkpoint of step {start}"
    return (
        f"step {step} cannot be replayed: {name} is not on the volume (the nearest start before it is {nearest}); "
        f"{KEEP_BATCHES}; steps that can be replayed: {show_spans(run.repeatable_steps())}"
    )


def show_spans(steps: Sequence[int]) -> str:
    """Format ascending steps as `3 to 6, 9`."""
    found: list[list[int]] = []
    for step in steps:
        if found and found[-1][-1] == step - 1:
            found[-1].append(step)
        else:
            found.append([step])
    return ", ".join(f"{one[0]} to {one[-1]}" if len(one) > 1 else f"{one[0]}" for one in found) or "none"


def _check_checkpoint(checkpoint: Path, step: int) -> None:
    """Refuse an incomplete checkpoint. Its content is verified when it is read."""
    try:
        check_sizes(checkpoint, read_manifest(checkpoint).files)
    except (ManifestError, OSError) as error:
        raise ReplayError(f"step {step} cannot be replayed: {checkpoint} is unusable: {error}") from None


def _read_config(model: type[ConfigT], paths: RunPaths, attempt: int) -> ConfigT:
    role: Role = "trainer" if model is TrainerConfig else "orchestrator"
    files = [paths.run_json, paths.logs(attempt, role) / "config.json"]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ReplayError(
            f"{paths.root} has neither run.json nor the {role}'s config.json, so its settings are unknown"
        )
    try:
        return load_file(model, file, section=role)
    except ConfigError as error:
        raise ReplayError(" / ".join(str(error).splitlines()), exit_codes.CONFIGURATION) from None


def _read_lines(path: Path) -> dict[int, MetricsLine]:
    """Return the lines of `metrics.jsonl` by step, the last line of each step, without an incomplete line."""
    found: dict[int, MetricsLine] = {}
    for line in _whole_lines(path):
        try:
            document = json.loads(line)
            found[int(document["step"])] = document
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _whole_lines(path: Path) -> Iterable[str]:
    return path.read_text(errors="replace").rpartition("\n")[0].splitlines() if path.is_file() else ()
