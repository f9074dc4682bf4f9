"""Editable installation by paths (`pip install -e .`), which setuptools runs.

By default setuptools adds an import hook, which Python calls last: a folder named `rlrun` in the working directory, such as the clone
itself, is then a namespace package that hides this one. Folders on `sys.path` have precedence over namespace packages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setuptools.command.editable_wheel import _StaticPth, editable_wheel

_FOLDERS = ("workloads", "operator")


class EditableByPath(editable_wheel):  # type: ignore[misc]
    """Build command that puts the folders of the packages on `sys.path`."""

    def _select_strategy(self, name: str, tag: str, build_lib: Any) -> Any:
        root = Path(self.project_dir)
        return _StaticPth(self.distribution, name, [root / folder for folder in _FOLDERS])
