"""Prometheus and promtool for tests: given, on PATH, in the cache, or unpacked from the distribution's package."""

import os
import shutil
import tempfile
from pathlib import Path

from .cache import cache_root, locked
from .errors import ClusterError
from .packages import unpack
from .progress import Say

PACKAGE = "prometheus"
COMMANDS = ("prometheus", "promtool")


def find(say: Say, *, download: bool) -> dict[str, Path]:
    """Get both programs from `RLRUN_PROMETHEUS_BIN`, the cache, PATH, or by `apt-get download`, which needs no root.

    Args:
        say: receiver of a line about a download.
        download: whether to fetch a missing package.

    Returns:
        The path of each command; empty if a command is missing and `download` is false.

    Raises:
        ClusterError: it cannot be fetched; the message has the fix.
    """
    given = os.environ.get("RLRUN_PROMETHEUS_BIN")
    cached = cache_root() / "bin" / "prometheus-package"
    with locked("binary-prometheus"):
        for folder in (Path(given) if given else None, cached):
            if folder is not None and all(os.access(folder / command, os.X_OK) for command in COMMANDS):
                return {command: folder / command for command in COMMANDS}
        on_path = {command: shutil.which(command) for command in COMMANDS}
        if all(on_path.values()):
            return {command: Path(str(path)) for command, path in on_path.items()}
        if not download:
            return {}
        _fetch(cached)
    say(f"{PACKAGE} unpacked into {cached}")
    return {command: cached / command for command in COMMANDS}


def _fetch(folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ClusterError(
            f"no {PACKAGE} on PATH, and this is no Debian: put {' and '.join(COMMANDS)} on PATH, or set RLRUN_PROMETHEUS_BIN"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".prometheus-", dir=folder.parent) as scratch:
        unpacked = unpack(PACKAGE, Path(scratch))
        shutil.rmtree(folder, ignore_errors=True)
        (unpacked / "usr" / "bin").rename(folder)
