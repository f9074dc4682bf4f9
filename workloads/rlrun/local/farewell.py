"""Last lines of a stopped or failed run: the saved state, the folders, and the command that continues it."""

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
    """A run that has stopped.

    Args:
        paths: paths of the run's folder.
        folder: the folder as the user typed it.
        command: command that continues the run.
        trains: whether the run trains; False for an evaluation.
        failed: whether a role has failed.
    """

    paths: RunPaths
    folder: str
    command: str
    trains: bool
    failed: bool = False

    def lines(self) -> Iterator[str]:
        """Yield the lines to print, one for each fact."""
        checkpoint = max(complete_checkpoints(self.paths), key=lambda one: (one.step, one.attempt), default=None)
        rows = [*self._saved_rows(checkpoint), *self._folder_rows(checkpoint)]
        if volume_is_full(self.paths.root):
            rows.append(("full", "the volume is full: you can delete traces/, exports/ and logs/ of the folder"))
        if self.failed:
            rows.append(("why", f"rlrun why {self.folder}"))
        rows.append(("repair the cause, then continue" if self.failed else "continue", self.command))
        yield from rows_text(rows).splitlines()

    def _saved_rows(self, checkpoint: Artifact | None) -> Iterator[tuple[str, str]]:
        if not self.trains:
            yield "saved", "finished answers are saved and will not be requested again"
            return
        last = _last_step(self.paths.metrics)
        if checkpoint is None:
            trained = f"; {_show_steps(1, last)} trained again" if last else ""
            yield "saved", f"no checkpoint is complete, so the run starts again at step 1{trained}"
            return
        where = checkpoint.path.relative_to(self.paths.root)
        yield "saved", f"step {checkpoint.step} in {self.folder}/{where}{_show_size(checkpoint.path)}"
        if last > checkpoint.step:
            yield "lost", f"{_show_steps(checkpoint.step + 1, last)} trained again"

    def _folder_rows(self, checkpoint: Artifact | None) -> Iterator[tuple[str, str]]:
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
    """Return labels and texts as aligned lines."""
    return "\n".join(f"  {label + ':':<9} {text}" for label, text in rows)


def _show_size(checkpoint: Path) -> str:
    try:
        return f" ({show_size(sum(file.size for file in read_manifest(checkpoint).files))})"
    except ManifestError:
        return ""


def _show_steps(first: int, last: int) -> str:
    return f"step {first} is" if first == last else f"steps {first} to {last} are"


def _last_step(metrics: Path) -> int:
    """Last trained step in the metrics, or 0 if there is no such step or the file is damaged."""
    try:
        return max((int(line["step"]) for _, line in metrics_lines(metrics) if line is not None), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0
