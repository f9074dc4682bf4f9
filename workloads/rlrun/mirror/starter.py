"""The copying process as a child of what starts a run's roles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlrun.config.models.run import RunConfig
from rlrun.tracking.starter import SinkProcess, kept_beside

DRAIN_SECONDS = 600.0
"""Longest time that the end of a run waits for its last checkpoint and export to be copied."""


def log_file(root: Path) -> Path:
    """Log of a run's copies."""
    return root / "logs" / "mirror.log"


@contextmanager
def mirror_beside(
    config: RunConfig, file: Path, environ: Mapping[str, str], *, say: Callable[[str], None], hurry: Callable[[], bool]
) -> Iterator[None]:
    """Copy what the run completes to object storage, if it says where, while the block runs; afterwards the rest.

    Args:
        config: the run's.
        file: the same, as the process reads it.
        environ: of the process; holds the credentials.
        say: logs a line.
        hurry: ends the time for the rest early.
    """
    if config.mirror is None:
        yield
        return
    root = Path(config.trainer.output_dir)
    process = SinkProcess(file, root, environ, module="rlrun.mirror", log=log_file(root))
    try:
        with kept_beside(process):
            yield
    finally:
        if not process.stop(seconds=DRAIN_SECONDS, hurry=hurry) and not hurry():
            say(
                f"not everything is copied to {config.mirror.url}, see {log_file(root)}; "
                f"the next attempt or `rlrun mirror {root}` copies the rest"
            )
