"""Forks ranks of the trainer from a process that has imported everything already, so that a test's group starts in a moment.

One JSON request per line on stdin: `{"environment": {...}, "arguments": [...], "log": path}`. Answers on stdout: `{"pid": p}`, and
`{"pid": p, "code": c}` when one ends (negative: the signal that ended it). Ends, with its ranks, when stdin does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys

import rlrun.trainer.__main__ as trainer
import rlrun.trainer.main  # noqa: F401  the imports that take seconds

_POLL_SECONDS = 0.02


def start(request: dict[str, object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(dict(request["environment"]))  # type: ignore[call-overload]
    code = 1
    try:
        code = trainer.main(list(request["arguments"]))  # type: ignore[call-overload]
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    ranks: set[int] = set()
    pending = b""
    print(json.dumps({"ready": True}), flush=True)
    while True:
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            received = os.read(0, 65536)
            if not received:
                break
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                pid = start(json.loads(line))
                ranks.add(pid)
                print(json.dumps({"pid": pid}), flush=True)
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ranks.discard(pid)
                print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
