"""Store of the operator with checks: it may lag but never goes back in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlrun_operator.runtime.cache import Ident, Key, Store


class WatchedStore(Store):
    """Store that records its errors.

    Attributes:
        wrong: an older state that replaced a newer one, or a deleted object that returned; None: no error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wrong: str | None = None
        self._left: set[str] = set()

    def put(self, manifest: Mapping[str, Any], now: float, *, applied: bool = False) -> set[Key]:
        metadata = manifest["metadata"]
        ident: Ident = (manifest["kind"], metadata.get("namespace", ""), metadata["name"])
        before = self.get(*ident)
        keys = super().put(manifest, now, applied=applied)
        after = self.get(*ident)
        if after is not None and after["metadata"]["uid"] in self._left:
            self.wrong = f"{ident[0]} {ident[2]} is back, which was known to be gone"
        if before is not None and after is not None and _version(after) < _version(before):
            self.wrong = f"{ident[0]} {ident[2]} went back from version {_version(before)} to {_version(after)}"
        return keys

    def remove(self, kind: str, namespace: str, name: str, uid: str | None = None) -> set[Key]:
        known = self.get(kind, namespace, name)
        keys = super().remove(kind, namespace, name, uid)
        if known is not None and self.get(kind, namespace, name) is None:
            self._left.add(known["metadata"]["uid"])
        return keys


def _version(manifest: Mapping[str, Any]) -> int:
    return int(manifest["metadata"]["resourceVersion"])
