"""Effects of signals on one rank, in a separate process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rlrun
from rlrun.runtime import exit_codes
from rlrun.trainer.ranks.stop import Stop
from tests.support.programs import finish, wait_for
from tests.support.python_path import before

STOPPED = 128 + signal.SIGTERM
ROOT = Path(rlrun.__file__).parent.parent
RANK = """
import sys, time
from rlrun.trainer.ranks.stop import Stop
stop = Stop()
stop.start_listening()
{setup}
print("up", flush=True)
time.sleep(600)
"""
RESEND_SECONDS = 0.3


class Rank:
    """A process that handles signals and computes."""

    def __init__(self, setup: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK.format(setup=setup)],
            env=os.environ | {"PYTHONPATH": before(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def ends(self, *signals: int) -> tuple[int, str, float]:
        """Return exit code, message, and seconds after the first signal; the last signal is repeated until the end.

        A process that has not run since the first of two equal signals receives them as one.
        """
        began = time.monotonic()
        for number in signals:
            assert self.process.poll() is None
            self.process.send_signal(number)
            time.sleep(RESEND_SECONDS if len(signals) > 1 else 0)

        def ends_by_last_signal() -> bool:
            self.process.send_signal(signals[-1])
            return self.process.poll() is not None

        try:
            if len(signals) > 1:
                wait_for(ends_by_last_signal, "the end after a second signal", poll_seconds=RESEND_SECONDS)
            _, said = finish(self.process)
        finally:
            self.process.kill()
        return self.process.returncode, said, time.monotonic() - began


def test_first_signal_before_any_progress_ends_rank() -> None:
    code, said, _ = Rank().ends(signal.SIGINT)
    assert (code, said) == (128 + signal.SIGINT, "trainer: ended by SIGINT\n")


def test_deadline_ends_rank_and_names_the_option() -> None:
    code, said, seconds = Rank("stop.allow_time(0.5)").ends(signal.SIGTERM)
    assert code == STOPPED
    assert "0.5 s after SIGTERM (checkpoint.gracePeriodSeconds)" in said
    assert seconds >= 0.5


def test_frozen_rank_still_ends_at_its_deadline() -> None:
    rank = Rank("stop.allow_time(2)")
    rank.process.send_signal(signal.SIGTERM)
    for _ in range(3):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            rank.process.send_signal(number)
            time.sleep(0.3)
    code, said, _ = rank.ends()
    assert (code, "2 s after SIGTERM" in said) == (STOPPED, True), said


def test_second_signal_ends_rank_at_once() -> None:
    code, said, _ = Rank("stop.allow_time(300)").ends(signal.SIGTERM, signal.SIGTERM)
    assert (code, said) == (STOPPED, "trainer: ended by a second signal, SIGTERM\n")


def test_rank_does_not_wait_for_ended_peer() -> None:
    peer = subprocess.Popen([sys.executable, "-c", "pass"])
    with_zombie = Rank(f"stop.allow_time(300, [{os.getpid()}, {peer.pid}])")  # The peer is still a zombie.
    code, said, _ = with_zombie.ends(signal.SIGTERM)
    assert (code, said) == (STOPPED, "trainer: ended after SIGTERM: another rank has already ended\n")
    peer.wait()
    assert Rank(f"stop.allow_time(300, [{peer.pid}])").ends(signal.SIGTERM)[1] == said


def test_inactive_stop_is_not_requested() -> None:
    stop = Stop()
    assert not stop.is_requested


ANSWERS = """
stop.allow_time(300)
import os, threading
def look():
    while not stop.is_requested: time.sleep(0.01)
    os._exit(stop.exit_code)
threading.Thread(target=look).start()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_request_is_seen_and_keeps_its_code(number: signal.Signals) -> None:
    code, said, _ = Rank(ANSWERS).ends(number)
    assert (code, said) == (128 + number, "")


def test_stop_by_orchestrator_is_not_a_first_signal() -> None:
    """Pods that are deleted together receive their signals in any order, before or after messages between the roles."""
    asked = "stop.allow_time(300); stop.request_stop()"
    code, said, _ = Rank(asked).ends(signal.SIGTERM, signal.SIGTERM)
    assert (code, said) == (STOPPED, "trainer: ended by a second signal, SIGTERM\n")
    code, said, _ = Rank("stop.allow_time(0.5); stop.request_stop()").ends()
    assert code == exit_codes.FAILURE
    assert "0.5 s after the orchestrator, which has to stop" in said


def test_joining_rank_keeps_code_of_other_and_own_time() -> None:
    code, said, _ = Rank("stop.allow_time(1.5); stop.request_stop(2)").ends(signal.SIGINT)
    assert (code, "1.5 s after SIGINT" in said) == (128 + signal.SIGINT, True), said
