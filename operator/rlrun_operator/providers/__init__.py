"""External queues that admit runs: the objects that the operator writes for them, and their meaning for a run. Pure.

`kueue` decides from a run and its Workload on the next write and on the answer to the run's decisions, `workload` builds Kueue's objects
and changes their status, `assigned` reads the fields that an admission adds to pods, `words` explains why a run waits.
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
