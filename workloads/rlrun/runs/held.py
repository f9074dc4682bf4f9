"""State of a `Run` object: its manifest, its place, its launcher process, and its access to a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlrun.inspect.compare import Curve
from rlrun.inspect.kubectl import RUNS, Kubectl, ask_json
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.source import ClusterRun, FolderRun, NotFoundError, read_run
from rlrun.runs import reading

if TYPE_CHECKING:
    from rlrun.runs.launch import Launched
    from rlrun.runs.manifest import Manifest


def make_kubectl(namespace: str | None, context: str | None, kubeconfig: str | Path | None) -> Kubectl:
    """Return `kubectl` with the flags of a call. None: the configured value."""
    given = (("namespace", namespace), ("context", context), ("kubeconfig", kubeconfig))
    return Kubectl([f"--{name}={value}" for name, value in given if value is not None])


class Held:
    """Local state of a run."""

    _manifest: Manifest | None
    _place: FolderRun | ClusterRun | None
    _launched: Launched | None

    def _set_manifest(self, manifest: Manifest | None) -> None:
        self._manifest, self._place, self._launched, self._api = manifest, None, None, Kubectl()

    def _read_snapshot(self, now: float) -> Snapshot:
        place = self._require_place()
        if self._launched is None:
            return read_run(place, self._api, now)
        from rlrun.runs.launch import read_snapshot

        return read_snapshot(place, self._api, self._launched, now)

    def _require_place(self) -> FolderRun | ClusterRun:
        if self._place is None:
            raise NotFoundError(
                f"{self._require_manifest().name} was not started; start it with .local() or .apply(), or use Run.open"
            )
        return self._place

    def _require_manifest(self) -> Manifest:
        if self._manifest is not None:
            return self._manifest
        if isinstance(self._place, ClusterRun):
            from rlrun.runs.manifest import manifest_from_resource

            return manifest_from_resource(ask_json(self._api, ["get", RUNS, self._place.name]))
        raise NotFoundError("a run opened from a folder has no manifest; read it with Run.load(FILE)")

    def _curve(self) -> Curve:
        place = self._require_place()
        label = place.root.name if isinstance(place, FolderRun) else place.name
        return reading.read_curve(place, self._api, label)
