"""Last words of a run that was stopped or has failed: what is saved, where things are, and how to go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlrun.protocol.files.checkpoint_manifest import ManifestError, complete_checkpoints, read_manifest
from rlrun.protocol.files.failures import volume_is_full
from rlrun.protocol.files.metrics_line import metrics_lines
from rlrun.protocol.files.paths import Artifact, RunPaths
from rlrun.protocol.files.volume_faults import show_size


@dataclass(frozen=True)
class Farewell:
    """A run that does not go on.

    Args:
        paths: its folder.
        folder: the same as a user types it.
        command: what goes on with the run.
        trains: False if it evaluates alone.
        failed: True if a role has failed.
    """

    paths: RunPaths
    folder: str
    command: str
    trains: bool
    failed: bool = False

    def lines(self) -> Iterator[str]:
        """A line for each thing that a person may want now."""
        checkpoint = max(complete_checkpoints(self.paths), key=lambda one: (one.step, one.attempt), default=None)
        rows = [*self._saved(checkpoint), *self._places(checkpoint)]
        if volume_is_full(self.paths.root):
            rows.append(("full", "the volume has no room: traces/, exports/ and logs/ of the folder may be deleted"))
        if self.failed:
            rows.append(("why", f"rlrun why {self.folder}"))
        rows.append(("repair the cause, then go on" if self.failed else "go on", self.command))
        yield from rows_text(rows).splitlines()

    def _saved(self, checkpoint: Artifact | None) -> Iterator[tuple[str, str]]:
        if not self.trains:
            yield "saved", "what was answered is kept, and nothing of it is asked again"
            return
        last = _last_step(self.paths.metrics)
        if checkpoint is None:
            trained = f"; {_show_steps(1, last)} trained again" if last else ""
            yield "saved", f"no checkpoint is complete, so that it begins again at step 1{trained}"
            return
        where = checkpoint.path.relative_to(self.paths.root)
        yield "saved", f"step {checkpoint.step} in {self.folder}/{where}{_show_size(checkpoint.path)}"
        if last > checkpoint.step:
            yield "lost", f"{_show_steps(checkpoint.step + 1, last)} trained again"

    def _places(self, checkpoint: Artifact | None) -> Iterator[tuple[str, str]]:
        logs = self.paths.root / "logs"
        newest = max((path.name for path in logs.glob("attempt_*")), default=None) if logs.is_dir() else None
        if newest is not None:
            yield "logs", f"{self.folder}/logs/{newest}"
        if self.paths.traces.is_dir():
            yield "traces", f"{self.folder}/{self.paths.traces.name}"
        if self.paths.exports.is_dir():
            yield "exports", f"{self.folder}/{self.paths.exports.name}"
        if checkpoint is not None:
            yield "model", f"rlrun export {self.folder} --output DIR"


def rows_text(rows: Iterable[tuple[str, str]]) -> str:
    """Labels and texts below each other, a line each."""
    return "\n".join(f"  {label + ':':<9} {text}" for label, text in rows)


def _show_size(checkpoint: Path) -> str:
    try:
        return f" ({show_size(sum(file.size for file in read_manifest(checkpoint).files))})"
    except ManifestError:
        return ""


def _show_steps(first: int, last: int) -> str:
    return f"step {first} is" if first == last else f"steps {first} to {last} are"


def _last_step(metrics: Path) -> int:
    """Last trained step that the metrics have; 0: none. A damaged file says nothing."""
    try:
        return max((int(line["step"]) for _, line in metrics_lines(metrics) if line is not None), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0
