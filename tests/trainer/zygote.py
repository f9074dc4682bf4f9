"""Process that has imported the trainer and forks ranks from it, so that a test's group starts quickly.

Each line of stdin is a JSON request: `{"environment": {...}, "arguments": [...], "log": path, "module": name}` calls
`main(arguments)` of the module. Answers on stdout: `{"pid": p}`, and `{"pid": p, "code": c}` when a rank ends
(negative: its signal). The process and its ranks end with stdin.

A rank with `TEST_SIGTERM_IN=<phase>:<step>` gets SIGTERM when it enters that phase of that step; with
`TEST_KILL_IN=<phase>:<step>:<milliseconds>` it gets SIGKILL that long afterwards. `TEST_MEETING_SECONDS` limits how
long ranks wait for each other after an exception, and `TEST_SWITCH_SECONDS` how long a thread may block others.
`TEST_BUCKET_BYTES` bounds the buckets of weights and makes each root report its content; with
`TEST_DIE_SENDING=<version>` a rank gets SIGKILL after it has sent its first bucket of that version.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import rlrun.trainer.__main__
import rlrun.trainer.loop  # noqa: F401  the imports that take seconds
from rlrun.trainer.guests import shared_runs
from rlrun.trainer.trained_run import Run
from rlrun.trainer.weights import publisher, senders
from tests.support.forks import serve


def start(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(dict(request["environment"]))  # type: ignore[call-overload]
    if "TEST_SIGTERM_IN" in os.environ:
        signal_in(*os.environ["TEST_SIGTERM_IN"].split(":"))
    if "TEST_MEETING_SECONDS" in os.environ:
        shared_runs.MEETING_SECONDS = float(os.environ["TEST_MEETING_SECONDS"])
    if "TEST_SWITCH_SECONDS" in os.environ:
        sys.setswitchinterval(float(os.environ["TEST_SWITCH_SECONDS"]))
    if "TEST_BUCKET_BYTES" in os.environ:
        publisher.BUCKET_BYTES = int(os.environ["TEST_BUCKET_BYTES"])
        say_what_is_held()
    if "TEST_DIE_SENDING" in os.environ:
        die_sending(int(os.environ["TEST_DIE_SENDING"]))
    if "TEST_KILL_IN" in os.environ:
        kill_in(*os.environ["TEST_KILL_IN"].split(":"))
    code = 1
    try:
        code = importlib.import_module(request["module"]).main(list(request["arguments"]))
    finally:
        sys.stderr.flush()
        os._exit(code)


def signal_in(phase: str, step: str) -> None:
    """Send SIGTERM to this rank once, when it enters `phase` of `step`."""
    enter, sent = Run.phase, []

    def entered(self: Run, now: str) -> None:
        enter(self, now)  # type: ignore[arg-type]
        if (now, step_of(self, now)) == (phase, int(step)) and not sent:
            sent.append(now)
            os.kill(os.getpid(), signal.SIGTERM)
            while not self._check_stop.__self__.stop.is_requested:  # type: ignore[attr-defined]
                time.sleep(0.01)

    Run.phase = entered  # type: ignore[method-assign]


def kill_in(phase: str, step: str, milliseconds: str) -> None:
    """Kill this rank `milliseconds` after it entered `phase` of `step`, and at the latest at the end of the next step."""
    enter, timer = Run.phase, threading.Timer(int(milliseconds) / 1000, os.kill, (os.getpid(), signal.SIGKILL))

    def entered(self: Run, now: str) -> None:
        enter(self, now)  # type: ignore[arg-type]
        if (now, step_of(self, now)) == (phase, int(step)):
            timer.start()
        elif step_of(self, now) > int(step) + 1:
            timer.join()

    Run.phase = entered  # type: ignore[method-assign]


def say_what_is_held() -> None:
    """Print `root R holds N bytes of version V` for each version."""
    hold = senders.RootSender.hold

    def held(self: senders.RootSender, version: int, buckets: Mapping[int, Any]) -> None:
        size = sum(bucket.nbytes for bucket in buckets.values())
        print(f"root {self._root} holds {size} bytes of version {version}", flush=True)
        hold(self, version, buckets)

    senders.RootSender.hold = held  # type: ignore[method-assign]


def die_sending(version: int) -> None:
    """Kill this rank between two buckets of a version."""
    send = senders.RootSender._send_version

    def killed(self: senders.RootSender, link: senders.links.Link, sent: senders.Order) -> None:
        if sent.version == version:
            held = self._held[version]
            assert len(held) > 1, "it has no second bucket"
            link.broadcast(held[min(held)])
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, link, sent)

    senders.RootSender._send_version = killed  # type: ignore[method-assign]


def step_of(slot: Run, phase: str) -> int:
    """Return the step of a phase: a step counts after its training, so earlier phases belong to the next step."""
    return slot.progress.step + (phase in ("waiting_for_batch", "training"))


def main() -> None:
    gc.freeze()  # otherwise each rank's garbage collector would visit and copy the imported objects
    print(json.dumps({"ready": True}), flush=True)
    serve(start, lambda answer: print(json.dumps(answer), flush=True))


if __name__ == "__main__":
    main()
