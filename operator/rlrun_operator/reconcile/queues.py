"""Choice of the queue in which the runs of an operator wait. All other modules only see a `Queue`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlrun_operator.reconcile.admissions import Admissions
from rlrun_operator.reconcile.external_queue import ExternalQueue, QueueAdapter
from rlrun_operator.reconcile.kueue_queue import KueueAdapter
from rlrun_operator.reconcile.queue_objects import Cluster
from rlrun_operator.reconcile.reconciler import Queue
from rlrun_operator.reconcile.volcano_queue import VolcanoAdapter
from rlrun_operator.settings import Provider, QueueSettings, RenderSettings

_ADAPTERS: Mapping[Provider, Callable[[Cluster, QueueSettings], QueueAdapter]] = {
    "kueue": KueueAdapter,
    "volcano": VolcanoAdapter,
}
"""Adapters of the external queues."""


def queue_of(cluster: Cluster, settings: QueueSettings, render: RenderSettings) -> Queue | None:
    """Return the configured queue, or None if runs do not wait in a queue."""
    if (adapter := _ADAPTERS.get(settings.kind)) is not None:
        return ExternalQueue(cluster, render, adapter(cluster, settings))
    if settings.kind == "none":
        return None
    return Admissions(
        cluster.store,
        cluster.look_ups,
        settings,
        render,
        serves=cluster.serves,
        requeue=cluster.requeue,
        now=cluster.now,
        clock=cluster.clock,
    )
