"""Process that copies a run to object storage: `python -m rlrun.mirror --config run.json [--once]`.

Every few seconds it looks for new complete artifacts and copies them one at a time at the lowest priority. While the object storage fails,
the pauses grow. After SIGTERM it first copies the rest; its starter decides how long that may take.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from loguru import logger

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.checkpoint import MirrorConfig
from rlrun.config.models.run import RunConfig
from rlrun.mirror.artifacts import complete_artifacts
from rlrun.mirror.remote import GoneError, Remote, UnusableError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.runtime.ending import Ending, on_sigterm

LOOK_SECONDS = 5.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 120.0
_NICEST = 19


class Mirror:
    """Copies of one run.

    Args:
        paths: paths of the run.
        config: address and kinds of artifacts.
        name: name of the run, and of its folder at the address.

    Raises:
        UnusableError: the address cannot be used on this machine.
    """

    def __init__(self, paths: RunPaths, config: MirrorConfig, name: str) -> None:
        self._paths, self._config = paths, config
        self.url = f"{config.url.rstrip('/')}/{name}"
        self._remote = Remote(self.url)
        self._copied: set[str] = set()

    def copy_new(self, *, stop: Callable[[], bool] = lambda: False) -> bool:
        """Copy new complete artifacts. Returns whether all artifacts are copied.

        Raises:
            OSError: the object storage rejects the copy, or cannot be reached.
        """
        for artifact in complete_artifacts(self._paths, self._config):
            if artifact.name in self._copied:
                continue
            began = time.monotonic()
            try:
                size = self._remote.copy(artifact, stop=stop)
            except GoneError as error:
                logger.info(str(error))
                continue
            if size is None:
                return False
            if size:
                seconds = max(time.monotonic() - began, 1e-9)
                logger.info(f"{artifact.name}: {size} bytes copied to {self.url}, {size / seconds / 1e6:.1f} MB/s")
            if artifact.marker is not None:
                self._copied.add(artifact.name)
        return True

    def follow(self, over: Ending) -> bool:
        """Copy until `over` is set, then the rest. Returns whether everything is copied."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            last = over.is_set()
            try:
                copied = self.copy_new()
                pause = FIRST_PAUSE_SECONDS
                wait = LOOK_SECONDS
            except Exception as error:  # each file system has its own error classes
                logger.warning(f"{self.url} rejected a copy: {type(error).__name__}: {error}")
                copied, wait = False, pause
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            if last:
                return copied
            over.wait(wait)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlrun.mirror")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--once", action="store_true", help="copy all complete artifacts, then end")
    options = parser.parse_args(argv)
    over = Ending()
    if options.once:
        over.set()
    on_sigterm(over.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.nice(_NICEST)
    try:
        config = load_file(RunConfig, options.config)
        if config.mirror is None:
            return exit_codes.OK
        paths = RunPaths(Path(config.trainer.output_dir))
        mirror = Mirror(paths, config.mirror, config.trainer.name)
    except ConfigError as error:
        logger.error(str(error))
        return exit_codes.CONFIGURATION
    except UnusableError as error:
        logger.error(str(error))
        return exit_codes.CONFIGURATION
    return exit_codes.OK if mirror.follow(over) else exit_codes.FAILURE
