"""Faults at the named points of `rlrun.diagnostics.fault_points`: a process dies, stops or fails there.

    FAULT_POINTS=checkpoint.manifest.before_rename=sigkill          the first time that a process reaches it
    FAULT_POINTS=batch.told=exit:7@3,journal.appended=enospc        the third time; the first time

Actions of a point:

    sigkill, sigterm, sigstop   this process sends the signal to itself
    exit:CODE                   it ends with this code, at once
    hang                        the thread does nothing any more
    enospc, eio                 the call fails as on a full or broken volume

`FAULT_POINTS_FOLDER` names a folder, for example on the run's volume, for records of faults: then each fault happens
once in the whole run, regardless of restarts. Without it, a fault happens once in each process that reaches its point
often enough. No name starts with `RLRUN_`, so that a manifest's `env` can set both for any role.

The product does not contain this module. `sitecustomize` in the same folder installs it in processes that have this
folder on `PYTHONPATH`: those of the tests, those of the stub image, and those of an image made for faults
(docs/failures.md#breaking-a-run-on-purpose).
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlrun.diagnostics import fault_points
from rlrun.runtime import exit_codes

VARIABLE = "FAULT_POINTS"
FOLDER_VARIABLE = "FAULT_POINTS_FOLDER"
POINTS: Mapping[str, str] = {
    # the trainer
    "attempt.before_write": "the base checkpoint is chosen, the attempt has no file",
    "attempt.before_link": "the attempt's file is durable under another name",
    "attempt.written": "the attempt's file is there",
    "step.trained": "the parameters are those of the next version, nobody knows",
    "weights.before_complete": "all of a version but COMPLETE is in its temporary folder",
    "weights.before_rename": "a version is whole in its temporary folder",
    "weights.written": "a version has its name",
    "weights.told": "the orchestrator can hear of a version",
    "checkpoint.shards.before_write": "a step is trained, nothing of its checkpoint is on the disk",
    "checkpoint.shards.durable": "this rank's shards are durable",
    "checkpoint.manifest.before_write": "all parts of a checkpoint are durable",
    "checkpoint.manifest.before_rename": "the manifest is durable under another name",
    "checkpoint.manifest.written": "the checkpoint is complete, nobody knows",
    "retention.before_remove": "an old checkpoint is whole",
    "retention.manifest_removed": "an old checkpoint has lost its manifest",
    "retention.removed": "an old checkpoint is gone",
    "export.before_rename": "an exported model is whole in its temporary folder",
    # the orchestrator
    "batch.before_rename": "a batch is whole in its temporary folder",
    "batch.written": "a batch has its name, the trainer does not know",
    "batch.told": "the trainer has heard of a batch",
    "metrics.written": "a step's line is in metrics.jsonl",
    "checkpoint.orchestrator.before_rename": "the orchestrator's part is durable under another name",
    "checkpoint.orchestrator.written": "the orchestrator's part has its name, the trainer does not know",
    "checkpoint.orchestrator.told": "the trainer has heard of the orchestrator's part",
    "journal.appended": "finished rollouts are in the journal, perhaps not on the disk",
    "journal.durable": "finished rollouts are durable, nobody knows",
    "journal.before_remove": "a file of the journal is covered by a checkpoint",
    "handover.before_request": "a version is about to be handed to an engine",
    "lease.renewed": "the progress Lease is renewed",
    # the engine
    "engine.paused": "the engine is paused",
    "engine.loaded": "the engine holds new weights under no version",
    "engine.version_set": "the engine holds new weights under their version, paused",
    "engine.resumed": "the engine samples from new weights, nobody knows",
    # trainer and engines that share GPUs in turns
    "turn.engine_falls_asleep": "the engine has its memory, and is about to give it up",
    "turn.engine_asleep": "the engine has given its memory up, nobody knows",
    "turn.engine_half_awake": "the engine has memory for weights, and none in it",
    "turn.engines_asleep": "all engines sleep, the trainer does not know",
    "turn.memory_taken": "the trainer has its memory, and has not begun its step",
    "turn.memory_given": "the trainer has given its memory up, nobody knows",
}
"""Every point in the code, and the state in which a process reaches it."""
_SIGNALS = {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigstop": signal.SIGSTOP}
_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
_FAULT = re.compile(
    rf"(?P<point>[a-z_.]+)=(?:(?P<action>hang|{'|'.join((*_SIGNALS, *_ERRORS))})|exit:(?P<code>\d+))(?:@(?P<nth>[1-9]\d*))?"
)


@dataclass(frozen=True)
class Fault:
    """Action at a point."""

    action: str
    code: int = 0
    """Exit code of `exit`."""
    nth: int = 1
    """Number of times that a process reaches it until the fault happens."""


class FaultPlanError(ValueError):
    """The variable is not a valid plan; the message has the format."""


def read_plan(text: str) -> dict[str, Fault]:
    """Parse `FAULT_POINTS` into faults by point.

    Raises:
        FaultPlanError: a part is wrong; the message names it and the allowed values.
    """
    plan: dict[str, Fault] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        found = _FAULT.fullmatch(part)
        if found is None or int(found["code"] or 0) > 255:
            kinds = ", ".join((*_SIGNALS, *_ERRORS, "hang", "exit:0 to exit:255"))
            raise FaultPlanError(
                f"{VARIABLE} has {part!r}; write POINT=ACTION or POINT=ACTION@N, ACTION one of {kinds}"
            )
        point = found["point"]
        if point not in POINTS:
            raise FaultPlanError(f"{VARIABLE} names the point {point!r}; there are {', '.join(POINTS)}")
        if point in plan:
            raise FaultPlanError(f"{VARIABLE} names the point {point!r} twice; one fault is possible at each")
        plan[point] = Fault(found["action"] or "exit", int(found["code"] or 0), int(found["nth"] or 1))
    return plan


class FaultPoints:
    """The faults of one process.

    Args:
        plan: faults by point.
        folder: folder for records of faults, or None.
    """

    def __init__(self, plan: Mapping[str, Fault], folder: Path | None) -> None:
        self.plan = dict(plan)
        self._folder, self._seen, self._lock = folder, dict[str, int](), threading.Lock()

    def reach(self, point: str) -> None:
        """Execute the planned fault of this point, if any.

        Raises:
            OSError: the planned error.
        """
        fault = self.plan.get(point)
        if fault is None:
            return
        with self._lock:
            self._seen[point] = count = self._seen.get(point, 0) + 1
        if count == fault.nth and self._claim(point):
            os.write(2, f"fault point {point}: {fault.action}\n".encode())
            self._happen(fault)

    def _claim(self, point: str) -> bool:
        if self._folder is None:
            return True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / point).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @staticmethod
    def _happen(fault: Fault) -> None:
        if fault.action in _ERRORS:
            raise OSError(_ERRORS[fault.action], os.strerror(_ERRORS[fault.action]))
        if fault.action == "exit":
            os._exit(fault.code)
        if fault.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.action])
        while fault.action in ("hang", "sigkill"):
            time.sleep(3600)


def install_or_exit() -> None:
    """Install the faults of this process's environment; a wrong plan ends it at once, with a line on stderr."""
    try:
        plan = read_plan(os.environ.get(VARIABLE, ""))
    except FaultPlanError as error:
        os.write(2, f"error: {error}\n".encode())
        os._exit(exit_codes.USAGE)  # an exception does not end a starting interpreter
    folder = os.environ.get(FOLDER_VARIABLE)
    fault_points.install_handler(FaultPoints(plan, Path(folder) if folder else None).reach)
