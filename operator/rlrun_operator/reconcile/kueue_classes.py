"""Flavors and priority classes of Kueue, which are cluster-scoped: from the chart's values, or from the cluster if permitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlrun_operator.kube.client import ApiError, Client
from rlrun_operator.kube.resources import FLAVOR, PRIORITY_CLASS, WORKLOAD_PRIORITY_CLASS, Resource
from rlrun_operator.providers import Flavor, Priority
from rlrun_operator.providers.workload import PRIORITY_LABEL
from rlrun_operator.settings import QueueSettings
from rlrun_operator.state import Manifest

CLASS_SECONDS = 60.0
"""Time for which a flavor or a priority class is cached."""


class UnknownError(Exception):
    """Error for an unreadable class or flavor; the message contains its name, the reason and a fix."""


class _Known(NamedTuple):
    found: Manifest
    until: float


class Classes:
    """Flavors and priority classes.

    Args:
        client: client of the API server.
        settings: settings of the queue.
        clock: returns steady seconds.
    """

    def __init__(self, client: Client, settings: QueueSettings, clock: Callable[[], float]) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._read: dict[tuple[str, str], _Known] = {}

    async def priority(self, run: Manifest) -> Priority:
        """Return the priority of a run: from the class in its label, or its own number, or from its trainer's class.

        Raises:
            UnknownError: the class cannot be read.
        """
        spec = run.get("spec") or {}
        named = (run["metadata"].get("labels") or {}).get(PRIORITY_LABEL)
        if named:
            return await self._class(WORKLOAD_PRIORITY_CLASS, str(named))
        if isinstance(own := spec.get("priority"), int) and own:
            return Priority(own)
        trainer = spec.get("trainer")
        name = trainer.get("priorityClassName") if isinstance(trainer, dict) else None
        return await self._class(PRIORITY_CLASS, str(name)) if name else Priority()

    async def _class(self, kind: Resource, name: str) -> Priority:
        value = self._settings.priority_classes.get(name)
        if value is None:
            value = int((await self._get(kind, name, "queue.priorityClasses")).get("value") or 0)
        return Priority(value, kind.group, kind.kind, name)

    async def flavor(self, name: str) -> Flavor:
        """Return the fields of a ResourceFlavor, from the chart's values or the cluster.

        Raises:
            UnknownError: the flavor cannot be read.
        """
        given = self._settings.flavors.get(name)
        if given is not None:
            return Flavor(given.node_labels, given.tolerations)
        spec = (await self._get(FLAVOR, name, "queue.flavors")).get("spec") or {}
        return Flavor(spec.get("nodeLabels") or {}, tuple(spec.get("tolerations") or ()))

    async def _get(self, kind: Resource, name: str, value: str) -> Manifest:
        """Return a cluster-scoped object.

        Raises:
            UnknownError: the object does not exist, or may not be read.
        """
        known = self._read.get((kind.kind, name))
        if known is not None and self._clock() < known.until:
            return known.found
        try:
            found = await self._client.get(kind, None, name)
        except ApiError as error:
            if not error.lacks_permission:
                raise
            fix = f"put it into {value} of the operator's chart"
            raise UnknownError(f"{kind.kind} {name} may not be read by this operator; {fix}") from error
        if found is None:
            raise UnknownError(f"{kind.kind} {name} does not exist; have it made, or name another one")
        self._read[kind.kind, name] = _Known(found, self._clock() + CLASS_SECONDS)
        return found
