"""`PYTHONPATH` of a process that a test starts."""

from __future__ import annotations

import os


def before(*folders: os.PathLike[str] | str) -> str:
    """Return these folders followed by those of `PYTHONPATH`; without the latter a process would run the code of
    another installed checkout."""
    return os.pathsep.join(filter(None, [*(os.fspath(folder) for folder in folders), os.environ.get("PYTHONPATH", "")]))
