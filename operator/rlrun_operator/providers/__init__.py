"""Queues of others that admit runs: what the operator writes for them, and what their objects mean for a run. Pure.

`kueue` decides from a run and its Workload what to write next and what to answer to the run's decisions, `workload` makes Kueue's
objects and changes their status, `assigned` reads what an admission adds to pods, `words` says why a run waits.
"""

from rlrun_operator.providers.kueue import next_step
from rlrun_operator.providers.model import Create, Edit, Flavor, Priority, PutStatus, Remove, Step, Subject, Write

__all__ = ["Create", "Edit", "Flavor", "Priority", "PutStatus", "Remove", "Step", "Subject", "Write", "next_step"]
