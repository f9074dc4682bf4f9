"""The page's built files, in memory: a request names one of them, never a path."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

BUILT = Path(__file__).parent / "static"
INDEX = "index.html"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class StaticFile:
    """One file."""

    content: bytes
    kind: str
    hashed: bool
    """True if its name changes with its content, so that a browser may keep it for ever."""


class StaticFiles:
    """All files of a folder.

    Args:
        folder: what Vite has built.

    Raises:
        FileNotFoundError: there is no page in it.
    """

    def __init__(self, folder: Path = BUILT) -> None:
        if not (folder / INDEX).is_file():
            raise FileNotFoundError(
                2, "the page is not in this installation; install the wheel, or run `make ui`", str(folder)
            )
        self._files = {
            path.relative_to(folder).as_posix(): StaticFile(
                path.read_bytes(), _KINDS[path.suffix], re.search(r"-[\w-]{8}\.\w+$", path.name) is not None
            )
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in _KINDS
        }

    def get(self, path: str) -> StaticFile | None:
        """The file of a path below `/`; the page itself for the empty one."""
        return self._files.get(path or INDEX)
