"""A disk that loses unflushed data at a power cut: content of files, and names in folders.

A new name may reach the disk at any later moment. So everything that it promises has to be durable before: the content
of a renamed file, everything in a renamed folder, everything in the folder of a marker (`COMPLETE`, `manifest.json`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlrun.protocol.files.checkpoint_manifest import MANIFEST
from rlrun.protocol.files.paths import COMPLETE, TMP_SUFFIX


class Disk:
    """Durable content below `root`, computed from the flushes of this process."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.promised: list[str] = []
        """Names that became visible to readers, in order."""
        self.broken: list[str] = []
        """For such a name, promised content that was not durable at that moment."""
        self._content: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        for flush in ("fsync", "fdatasync"):
            patch.setattr(os, flush, self._flushing(getattr(os, flush)))
        for name in ("rename", "replace", "link"):
            patch.setattr(os, name, self._naming(getattr(os, name)))
        patch.setattr(os, "open", self._opening(os.open))
        if root.exists():
            self._note(root)

    def keeps(self, path: Path) -> bool:
        """Return whether a file, or a folder with everything in it, would exist after a power cut now."""
        parts = [path, *(parent for parent in path.parents if self.root in parent.parents or parent == self.root)]
        named = all(self._has_name(part) for part in parts if part != self.root)
        return named and not self._lost(path)

    def _flushing(self, flush: Callable[[int], None]) -> Callable[[int], None]:
        def act(descriptor: int) -> None:
            flush(descriptor)
            self._note(Path(f"/proc/self/fd/{descriptor}").readlink())

        return act

    def _note(self, path: Path) -> None:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._content[found.st_ino] = path.read_bytes()

    def _naming(self, act: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **keywords: Any) -> None:
            self._promise(Path(source), Path(target))
            act(source, target, **keywords)

        return rename

    def _opening(self, act: Callable[..., int]) -> Callable[..., int]:
        def create(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
            if flags & os.O_CREAT and Path(path).name == COMPLETE:
                self._promise(Path(path).parent, Path(path))
            return act(path, flags, *rest, **keywords)

        return create

    def _promise(self, source: Path, target: Path) -> None:
        if self.root not in target.parents:
            return
        hidden = [part.endswith(TMP_SUFFIX) for part in target.relative_to(self.root).parts]
        if hidden[-1] or (any(hidden) and target.name != COMPLETE):  # not read by anything
            return
        self.promised.append(target.name)
        lost = self._lost(source)
        if target.name == MANIFEST:
            lost += [name for name in self._lost(target.parent) if not name.endswith(TMP_SUFFIX)]
        self.broken += [f"{target.name} before {name}" for name in lost]

    def _lost(self, path: Path) -> list[str]:
        """Return the parts of a file or folder that are not durable."""
        if path.is_file():
            return [] if self._content.get(path.stat().st_ino, b"") == path.read_bytes() else [path.name]
        lost = []
        for entry in sorted(path.iterdir()):
            lost += self._lost(entry)
            if not self._has_name(entry):
                lost.append(f"the name {entry.name}")
        return lost

    def _has_name(self, path: Path) -> bool:
        return self._names.get(path.parent.stat().st_ino, {}).get(path.name) == path.stat().st_ino
