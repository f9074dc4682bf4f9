"""A repository of the hub that a manifest field names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["model", "dataset"]
MAIN = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r".*/models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?")


@dataclass(frozen=True)
class Repository:
    """Repository to download."""

    kind: Kind
    name: str
    """Name such as `Qwen/Qwen3-8B`."""
    revision: str | None
    """Branch, tag or commit. None: the main branch."""
    name_field: str
    """Manifest field with the name, for messages."""
    revision_field: str
    """Manifest field with the revision, for messages."""

    @property
    def asked(self) -> str:
        """Requested revision."""
        return self.revision or MAIN

    @property
    def folder_name(self) -> str:
        """Name of the repository's folder in the hub's cache."""
        return "--".join([f"{self.kind}s", *self.name.split("/")])

    def __str__(self) -> str:
        return f"{'data set' if self.kind == 'dataset' else 'model'} {self.name}"


def show_source(source: str) -> str:
    """Return a model's folder for messages: `org/name@commit` if the folder is in the hub's cache."""
    match = _SNAPSHOT.fullmatch(source)
    return source if match is None else f"{match['name'].replace('--', '/')}@{match['commit'][:7]}"
