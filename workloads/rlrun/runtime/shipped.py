"""Data files of an installation: the Helm charts, the CRD and the examples."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import rlrun

_FOLDER = "share/rlrun"
"""Folder of a wheel's data files, below that of the environment (`[tool.setuptools.data-files]`)."""
_KNOWN = "charts"
"""One of their folders."""


def shipped_folder() -> Path | None:
    """Return the folder with `charts`, `crds` and `examples`, or None for an installation without them, such as an image.

    A checkout's own folders have precedence over those of a wheel, because an editable installation contains copies of an earlier state.
    """
    checkout = Path(rlrun.__file__).parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / _KNOWN).is_dir():
        return checkout
    try:
        files = importlib.metadata.distribution("rlrun").files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        head, found, _ = file.as_posix().rpartition(f"{_FOLDER}/{_KNOWN}/")
        if found and not head.endswith("/" + _FOLDER):
            folder = Path(str(file.locate())).resolve()
            return next(parent for parent in folder.parents if parent.as_posix().endswith(_FOLDER))
    return None
