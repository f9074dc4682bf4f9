"""Files that an installation has beside its modules: the Helm charts, the CRD and the examples."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import rlrun

_FOLDER = "share/rlrun"
"""Folder into which a wheel installs them, below the environment's (`[tool.setuptools.data-files]`)."""
_KNOWN = "charts"
"""A folder among them."""


def shipped_folder() -> Path | None:
    """The folder above `charts`, `crds` and `examples`; None: this installation has none, as the images.

    A checkout's own are taken before those of a wheel, for an editable installation has copies of an earlier state.
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
