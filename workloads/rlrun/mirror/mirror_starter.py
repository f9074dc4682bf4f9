"""The copying process as a child process of the program that starts a run's roles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlrun.config.models.run_config import RunConfig
from rlrun.tracking.sink_starter import SinkProcess, kept_beside

DRAIN_SECONDS = 600.0
"""Longest time that the end of a run waits for its last checkpoint and export to be copied."""


def log_file(root: Path) -> Path:
    """Return the log file of a run's copies."""
    return root / "logs" / "mirror.log"


@contextmanager
def mirror_beside(
    config: RunConfig, file: Path, environ: Mapping[str, str], *, say: Callable[[str], None], hurry: Callable[[], bool]
) -> Iterator[None]:
    """Copy the run's artifacts to object storage, if a mirror is configured, during the `with` block, and the rest afterwards.

    Args:
        config: configuration of the run.
        file: file with this configuration.
        environ: environment variables of the process, with the credentials.
        say: function that logs a line.
        hurry: function that ends the wait for the rest as soon as it returns True.
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
                f"some artifacts are not copied to {config.mirror.url} yet, see {log_file(root)}; "
                f"the next attempt or `rlrun mirror {root}` copies them"
            )
