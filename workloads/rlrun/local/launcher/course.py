"""Main loop of a run on this machine: start, watch and stop its processes."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rlrun.config.models.run import RunConfig
from rlrun.local.launcher.call import Call
from rlrun.local.launcher.place import Place
from rlrun.local.plan import RoleProcess
from rlrun.local.record import Recorder
from rlrun.local.shared.sharing import offer_trainer, shares_trainer, withdraw_offer
from rlrun.local.supervisor import STOP_SECONDS, Running, Supervisor, explain_failure, first_cause
from rlrun.local.view import View, show_duration
from rlrun.tracking.starter import SinkProcess, log_file

_POLL_SECONDS = 0.25


def play_run(
    call: Call,
    config: RunConfig,
    supervisor: Supervisor,
    sink: SinkProcess | None,
    specs: list[RoleProcess],
    place: Place,
    recorder: Recorder,
) -> Running | None:
    """Start the processes, show the run, and stop the processes at its end.

    Returns:
        Process that failed, or None if the run is complete or a signal arrived.
    """
    shared = shares_trainer(config)
    try:
        supervisor.start(specs)
        if shared:
            offer_trainer(call.paths, place.ports)
        view = View(
            call.console, name=call.name, max_steps=call.spec.max_steps if call.trains else None,
            metrics=call.paths.metrics, url=f"http://127.0.0.1:{place.ports.metrics}", api_key=place.api_key,
            plain=call.options.plain or not call.console.is_terminal,
        )  # fmt: skip
        with view:
            failed = _watch_run(supervisor, view, call.interrupted, sink, recorder, shared=shared)
            view.update("")
        if failed:
            explain_failure(failed, call.paths.root)
            print("stopping the other processes", file=sys.stderr)
        return failed
    finally:
        # The order matters: first no other run joins, then the roles save and end, and last the trackers get the remaining records.
        withdraw_offer(call.paths)
        asked = len(call.interrupted)
        if call.interrupted:
            kept = "the last trained step is being saved" if call.trains else "finished answers are saved"
            call.say(
                f"\nstopping: {kept} (press Ctrl-C again to stop immediately without saving)"
                if call.trains
                else f"\nstopping: {kept}"
            )
        supervisor.stop(
            config.trainer.checkpoint.grace_period_seconds + STOP_SECONDS, hurry=lambda: len(call.interrupted) > asked
        )
        if sink is not None:
            _end_tracking(call, sink, hurry=lambda: len(call.interrupted) > asked)


def _end_tracking(call: Call, sink: SinkProcess, *, hurry: Callable[[], bool]) -> None:
    """Send the remaining records to the trackers, or print how to send them later."""
    if not sink.stop(hurry=hurry):
        log = log_file(Path(call.folder))
        call.say(
            f"some records have not reached the trackers, see {log}; send them with `rlrun track {shlex.quote(call.folder)}`"
        )


def _watch_run(
    supervisor: Supervisor,
    view: View,
    interrupted: list[int],
    sink: SinkProcess | None,
    recorder: Recorder,
    *,
    shared: bool,
) -> Running | None:
    """Watch the run. Returns None after the orchestrator has finished or a signal arrived, or the first role that failed.

    A trainer that other runs share ends after the last of them has left it.
    """
    began = time.monotonic()
    while not interrupted:
        if sink is not None:
            sink.keep()
        ended = supervisor.exited()
        done = {r.spec.role for r in ended if r.process.returncode == 0} - {"inference"}
        if done >= ({"orchestrator", "trainer"} if shared else {"orchestrator"}):
            return None
        # The orchestrator may stop the trainer, which then ends with 0 first. An engine must never end before the run.
        failed = [r for r in ended if r.process.returncode != 0 or r.spec.role == "inference"]
        if failed:
            return first_cause(failed)
        view.update(f"the roles to start since {show_duration(time.monotonic() - began)}")
        recorder.beat(view.progress)
        time.sleep(_POLL_SECONDS)
    return None
