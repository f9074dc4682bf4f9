"""All paths of a run, relative to its folder. No other module builds a path of the file protocol.

A name that ends in `.a0003` was written by attempt 3; readers accept only attempts of the current lineage (`attempts`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["trainer", "inference", "orchestrator"]
COMPLETE = "COMPLETE"
TMP_SUFFIX = ".tmp"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""The two files of an adapter version, in PEFT's format."""
_STEP = re.compile(r"^step_(\d{8})\.a(\d{4,})$")
_WEIGHTS = re.compile(r"^v(\d{8})\.a(\d{4,})$")
_DELTA = re.compile(r"^d(\d{8})\.a(\d{4,})$")
_TRACE = re.compile(r"^step_(\d{8})\.jsonl$")
_ATTEMPT = re.compile(r"^(\d{4,})\.json$")
_SEGMENT = re.compile(r"^segment_(\d{8})\.a(\d{4,})$")


@dataclass(frozen=True, order=True)
class Artifact:
    """Folder that an attempt wrote for a step (or a policy version)."""

    step: int
    attempt: int
    path: Path


@dataclass(frozen=True, order=True)
class JournalSegment:
    """File of the journal."""

    attempt: int
    number: int
    """Number within the attempt, from 1."""
    path: Path

    @property
    def routes(self) -> Path:
        """`journal/routes_00000002.a0003`: routes of its rollouts; the file may not exist."""
        return self.path.with_name(self.path.name.replace("segment_", "routes_", 1))


def _list_artifacts(folder: Path, pattern: re.Pattern[str]) -> list[Artifact]:
    if not folder.is_dir():
        return []
    found = [(pattern.match(path.name), path) for path in folder.iterdir()]
    return sorted(Artifact(int(m[1]), int(m[2]), path) for m, path in found if m is not None)


def artifacts_in_steps(folder: Path) -> list[Artifact]:
    """Return all complete `step_*` folders of `folder` (without `.tmp`), such as batches of another run, by step and attempt."""
    return _list_artifacts(folder, _STEP)


@dataclass(frozen=True)
class RunPaths:
    """Layout of a run's folder."""

    root: Path

    @property
    def run_json(self) -> Path:
        """Resolved configuration of all roles."""
        return self.root / "run.json"

    @property
    def identity(self) -> Path:
        """Name and UID of a run whose roles are started one by one; see `protocol.files.identity`."""
        return self.root / "identity.json"

    @property
    def launcher(self) -> Path:
        """State of `rlrun local` and of the run in this folder; see `protocol.files.launcher_record`."""
        return self.root / "launcher.json"

    @property
    def manifest(self) -> Path:
        """Manifest with the values that the user of `rlrun local` set; `rlrun fork` starts from it."""
        return self.root / "manifest.yaml"

    @property
    def fork(self) -> Path:
        """Run and step from which this run was forked; see `protocol.files.run_folder`."""
        return self.root / "fork.json"

    @property
    def model(self) -> Path:
        """Tiny model, if the manifest requests one."""
        return self.root / "model"

    @property
    def revisions(self) -> Path:
        """Commits of the hub repositories that the run reads; see `rlrun.hub.repository`."""
        return self.root / "revisions"

    @property
    def attempts(self) -> Path:
        """One file per attempt."""
        return self.root / "attempts"

    @property
    def rollouts(self) -> Path:
        """Packed batches."""
        return self.root / "rollouts"

    @property
    def journal(self) -> Path:
        """Finished rollouts that no complete checkpoint covers yet."""
        return self.root / "journal"

    @property
    def weights(self) -> Path:
        """Published policy versions."""
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of trainer and orchestrator."""
        return self.root / "checkpoints"

    @property
    def exports(self) -> Path:
        """Model folders for other programs."""
        return self.root / "exports"

    @property
    def traces(self) -> Path:
        """Rollouts in a readable form."""
        return self.root / "traces"

    @property
    def metrics(self) -> Path:
        """One JSON line per step."""
        return self.root / "metrics.jsonl"

    @property
    def shared(self) -> Path:
        """Requests of other runs for a slot in this run's trainer, and the answers; see `protocol.files.shared_trainer_files`."""
        return self.root / "shared"

    def attempt_file(self, attempt: int) -> Path:
        """`attempts/0003.json`."""
        return self.attempts / f"{attempt:04d}.json"

    def attempt_config(self, attempt: int) -> Path:
        """`attempts/0003.config.json`: `run.json` at the start of the attempt."""
        return self.attempts / f"{attempt:04d}.config.json"

    def batch(self, step: int, attempt: int) -> Path:
        """`rollouts/step_00000123.a0003`."""
        return self.rollouts / f"step_{step:08d}.a{attempt:04d}"

    def journal_segment(self, number: int, attempt: int) -> Path:
        """`journal/segment_00000002.a0003`."""
        return self.journal / f"segment_{number:08d}.a{attempt:04d}"

    def validation(self, attempt: int) -> Path:
        """`rollouts/validation.a0003`: held-out samples of supervised fine-tuning."""
        return self.rollouts / f"validation.a{attempt:04d}"

    def version(self, version: int, attempt: int) -> Path:
        """`weights/v00000123.a0003`."""
        return self.weights / f"v{version:08d}.a{attempt:04d}"

    def delta(self, version: int, attempt: int) -> Path:
        """`weights/d00000123.a0003`: difference from the previous version, for engines only."""
        return self.weights / f"d{version:08d}.a{attempt:04d}"

    def checkpoint(self, step: int, attempt: int) -> Path:
        """`checkpoints/step_00000120.a0003`, with `trainer/`, `orchestrator/` and `manifest.json` inside."""
        return self.checkpoints / f"step_{step:08d}.a{attempt:04d}"

    def export(self, step: int, attempt: int) -> Path:
        """`exports/step_00000120.a0003`: model after that step."""
        return self.exports / f"step_{step:08d}.a{attempt:04d}"

    def trace(self, step: int) -> Path:
        """`traces/step_00000123.jsonl`: groups that were trained on in this step."""
        return self.traces / f"step_{step:08d}.jsonl"

    def evaluation_trace(self, version: int) -> Path:
        """`traces/eval_00000120.jsonl`: held-out answers of a policy version."""
        return self.traces / f"eval_{version:08d}.jsonl"

    def logs(self, attempt: int, role: Role) -> Path:
        """`logs/attempt_0003/trainer`."""
        return self.root / "logs" / f"attempt_{attempt:04d}" / role

    def batches_on_disk(self) -> list[Artifact]:
        """Return all complete batch folders (without `.tmp`), of any attempt, in order of step and attempt."""
        return _list_artifacts(self.rollouts, _STEP)

    def journal_on_disk(self) -> list[JournalSegment]:
        """Return all files of the journal, of any attempt, in the order in which they were written."""
        if not self.journal.is_dir():
            return []
        found = [(_SEGMENT.match(path.name), path) for path in self.journal.iterdir()]
        return sorted(JournalSegment(int(m[2]), int(m[1]), path) for m, path in found if m is not None)

    def versions_on_disk(self) -> list[Artifact]:
        """Return all weight folders with `COMPLETE`, of any attempt, in order of version and attempt."""
        return [a for a in _list_artifacts(self.weights, _WEIGHTS) if (a.path / COMPLETE).exists()]

    def deltas_on_disk(self) -> list[Artifact]:
        """Return all delta folders with `COMPLETE`, of any attempt, in order of version and attempt."""
        return [a for a in _list_artifacts(self.weights, _DELTA) if (a.path / COMPLETE).exists()]

    def checkpoints_on_disk(self) -> list[Artifact]:
        """Return all checkpoint folders, complete or not, of any attempt, in order of step and attempt."""
        return _list_artifacts(self.checkpoints, _STEP)

    def traced_steps(self) -> list[int]:
        """Return the steps with a trace, ascending."""
        if not self.traces.is_dir():
            return []
        return sorted(int(m[1]) for m in (_TRACE.match(path.name) for path in self.traces.iterdir()) if m is not None)

    def attempts_on_disk(self) -> list[int]:
        """Return the numbers of the started attempts, ascending."""
        if not self.attempts.is_dir():
            return []
        return sorted(int(m[1]) for m in (_ATTEMPT.match(p.name) for p in self.attempts.iterdir()) if m is not None)
