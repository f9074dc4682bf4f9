"""The web page's files, built from their sources: `python -m tools.ui_bundle --write`. Needs npm, and a registry once
for each lock file."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOM = Path(__file__).parents[1] / "workloads/rlrun/ui"
SOURCES, BUILT = ROOM / "web", ROOM / "static"
_SECONDS = 300.0


class BundleError(Exception):
    """The page cannot be built here; the message has the reason."""


def modules() -> Path:
    """Return folder `node_modules` of the lock file, installed once for all checkouts.

    Raises:
        BundleError: npm is not installed, or fails.
    """
    digest = hashlib.sha256((SOURCES / "package.json").read_bytes() + (SOURCES / "package-lock.json").read_bytes())
    chosen = os.environ.get("RLRUN_CACHE")
    cache = Path(chosen).resolve() if chosen else Path.home() / ".cache" / "rlrun"
    folder = cache / "ui" / digest.hexdigest()[:16]
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
        for name in ("package.json", "package-lock.json", ".npmrc"):
            shutil.copy(SOURCES / name, made)
        _run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], made)
        try:
            made.rename(folder)
        except OSError:  # another process has installed it
            shutil.rmtree(made)
    return folder / "node_modules"


def build(target: Path) -> None:
    """Check the sources' types and build them into a folder that is replaced.

    Raises:
        BundleError: the sources have errors, or npm is not installed.
    """
    installed = modules()
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "web"
        shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("node_modules"))
        (copy / "node_modules").symlink_to(installed)
        _run(["npm", "run", "--silent", "build"], copy)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(Path(scratch) / "static", target)


def differences(first: Path, second: Path) -> list[str]:
    """Return names of files that differ between two folders."""
    files = [
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (first, second)
    ]
    return sorted(name for name in files[0].keys() | files[1].keys() if files[0].get(name) != files[1].get(name))


def _run(command: Sequence[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise BundleError(
            f"{command[0]} is not installed; the web page is built with Node.js 20.19 or later (apt-get install npm)"
        )
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode != 0:
        raise BundleError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def main(words: Sequence[str]) -> int:
    """Build the page, or report whether it matches its sources; return the exit code."""
    try:
        if words == ["--write"]:
            build(BUILT)
            return 0
        with tempfile.TemporaryDirectory() as scratch:
            build(Path(scratch) / "static")
            found = differences(BUILT, Path(scratch) / "static")
    except BundleError as error:
        print(f"tools.ui_bundle: {error}", file=sys.stderr)
        return 1
    if found:
        print(f"{', '.join(found)} of {BUILT} differ from a build of the sources; run: make ui", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
