"""External queues that admit runs: the objects that the operator writes for them, and their meaning for a run. Pure.

`kueue` decides from a run and its Workload on the next write and on the answer to the run's decisions, `kueue_workload` builds Kueue's
objects, changes their status and explains why a run waits. `volcano` decides for Volcano, and `queue_answers` has the types of both.
"""

from rlrun_operator.providers.kueue import next_step
from rlrun_operator.providers.queue_answers import (
    Create,
    Edit,
    Flavor,
    Priority,
    PutStatus,
    Remove,
    Step,
    Subject,
    Write,
)

__all__ = ["Create", "Edit", "Flavor", "Priority", "PutStatus", "Remove", "Step", "Subject", "Write", "next_step"]
