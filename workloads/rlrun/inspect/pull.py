"""Copies of a run's parts out of the volume of a cluster: which folder is meant, and its way as a tar stream."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from rlrun.inspect.source import NotFoundError
from rlrun.protocol.files.paths import COMPLETE, TMP_SUFFIX, RunPaths

Part = Literal["model", "checkpoint", "traces", "metrics", "logs", "run"]
PARTS: tuple[Part, ...] = ("model", "checkpoint", "traces", "metrics", "logs", "run")
MANIFEST = "manifest.json"
Names = Callable[[PurePosixPath], list[str]]
"""Names in a folder of the run."""


def place_of(part: Part, step: int | None, names: Names) -> PurePosixPath:
    """Path of a part in the run's folder; of a model or a checkpoint the newest complete one, or that of a step.

    Raises:
        NotFoundError: there is none; says which there are.
    """
    paths = RunPaths(Path())
    match part:
        case "model":
            return _newest(PurePosixPath(paths.weights.name), "v", COMPLETE, step, names)
        case "checkpoint":
            return _newest(PurePosixPath(paths.checkpoints.name), "step_", MANIFEST, step, names)
    if step is not None:
        raise NotFoundError(f"--step is for a model or a checkpoint, not for {part}")
    return PurePosixPath({"traces": paths.traces.name, "metrics": paths.metrics.name, "run": ""}.get(part, "logs"))


def _newest(folder: PurePosixPath, prefix: str, mark: str, step: int | None, names: Names) -> PurePosixPath:
    """Last of the folders that are whole: names sort by step and attempt."""
    there = [
        name
        for name in sorted(names(folder), reverse=True)
        if name.startswith(prefix) and not name.endswith(TMP_SUFFIX)
    ]
    wanted = [name for name in there if step is None or name.startswith(f"{prefix}{step:08d}.")]
    found = next((name for name in wanted if mark in names(folder / name)), None)
    if found is None:
        steps = sorted({name.removeprefix(prefix).partition(".")[0].lstrip("0") or "0" for name in there}, key=int)
        known = f"there are those of steps {', '.join(steps)}" if steps else "there is none yet"
        raise NotFoundError(f"no complete one in {folder}{'' if step is None else f' of step {step}'}; {known}")
    return folder / found


def unpack(stream: IO[bytes], part: PurePosixPath, target: Path) -> int:
    """Unpack a tar stream of one part to a new path; the number of its files. Nothing is written outside of `target`.

    Raises:
        tarfile.TarError: the stream is broken, or has a path or a link that leads out.
    """
    temporary = target.with_name(target.name + TMP_SUFFIX)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    count = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for entry in archive:
                archive.extract(entry, temporary, filter="data")
                count += entry.isfile()
        (temporary / part).rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return count
