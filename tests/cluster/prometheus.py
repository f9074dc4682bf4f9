"""Prometheus and promtool for tests: given, on PATH, in the cache, or out of the distribution's package without installing it."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .cache import cache_root, locked
from .errors import ClusterError
from .progress import Say

PACKAGE = "prometheus"
COMMANDS = ("prometheus", "promtool")


def find(say: Say, *, download: bool) -> dict[str, Path]:
    """Get both programs: from `RLRUN_PROMETHEUS_BIN`, the cache, PATH, or by `apt-get download`, which needs no root.

    Args:
        say: gets a line when something is downloaded.
        download: fetch the package where there is none.

    Returns:
        The path of each command; empty where there is none and `download` is false.

    Raises:
        ClusterError: it cannot be fetched; the message says what to do.
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
        found = _downloaded(Path(scratch))
        unpacked = Path(scratch) / "files"
        subprocess.run(["dpkg-deb", "-x", str(found), str(unpacked)], check=True, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
        (unpacked / "usr" / "bin").rename(folder)


def _downloaded(folder: Path) -> Path:
    """The package's file. The lists of packages are fetched first when the first try fails, which needs root."""
    command, said = ["apt-get", "download", "-q", PACKAGE], ""
    for last in (False, True):
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if files := sorted(folder.glob("*.deb")):
            return files[0]
        said = result.stderr.strip()
        if not last:
            subprocess.run(["apt-get", "update", "-q"], capture_output=True)
    raise ClusterError(f"{' '.join(command)} failed: {said[-300:]}; install the package {PACKAGE}")
