"""`PYTHONPATH` of a process that a test starts."""

from __future__ import annotations

import os


def before(*folders: os.PathLike[str] | str) -> str:
    """Folders before those that `PYTHONPATH` has; without these a process would run the code of another checkout, which is installed."""
    return os.pathsep.join(filter(None, [*map(os.fspath, folders), os.environ.get("PYTHONPATH", "")]))
