"""Choice of the queue in which the runs of an operator wait. All other modules only see its answers."""

from __future__ import annotations

from rlrun_operator.reconcile.admissions import Admissions
from rlrun_operator.reconcile.kueue_queue import KueueQueue
from rlrun_operator.reconcile.queue_objects import Cluster
from rlrun_operator.reconcile.reconciler import Queue
from rlrun_operator.reconcile.volcano_queue import VolcanoQueue
from rlrun_operator.settings import QueueSettings, RenderSettings


def queue_of(cluster: Cluster, settings: QueueSettings, render: RenderSettings) -> Queue | None:
    """Return the configured queue, or None if runs do not wait in a queue."""
    if settings.kind == "kueue":
        return KueueQueue(cluster, settings, render)
    if settings.kind == "volcano":
        return VolcanoQueue(cluster, settings, render)
    if settings.kind == "none":
        return None
    return Admissions(
        cluster.store,
        cluster.look_ups,
        settings,
        render,
        serves=cluster.serves,
        again=cluster.again,
        now=cluster.now,
        clock=cluster.clock,
    )
