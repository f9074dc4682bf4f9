"""Built files of the page, kept in memory, so that a request can never name a path."""

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
    """Whether the name contains a hash of the content, so that browsers can cache the file forever."""


class StaticFiles:
    """Files of the built page.

    Args:
        folder: output folder of Vite.

    Raises:
        FileNotFoundError: the folder contains no page.
    """

    def __init__(self, folder: Path = BUILT) -> None:
        if not (folder / INDEX).is_file():
            raise FileNotFoundError(
                2, "this installation does not contain the page; install the wheel, or run `make ui`", str(folder)
            )
        self._files = {
            path.relative_to(folder).as_posix(): StaticFile(
                path.read_bytes(), _KINDS[path.suffix], re.search(r"-[\w-]{8}\.\w+$", path.name) is not None
            )
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in _KINDS
        }

    def get(self, path: str) -> StaticFile | None:
        """Return the file with a path below `/`, or the page for an empty path."""
        return self._files.get(path or INDEX)
