"""What signals do to one rank, in a process of its own."""

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
from tests.support.python_path import before

STOPPED = 128 + signal.SIGTERM
ROOT = Path(rlrun.__file__).parent.parent
RANK = """
import sys, time
from rlrun.trainer.ranks.stop import Stop
stop = Stop()
stop.listen()
{setup}
print("up", flush=True)
time.sleep(600)
"""
SOON_SECONDS = 120.0
"""Less than the time that is allowed in any test where it is not to be used."""


class Rank:
    """A process that listens and computes."""

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
        """Exit code, message, and seconds after the first signal; the last one is sent until it has ended.

        A process that has not run since the first of two equal signals sees them as one.
        """
        began = time.monotonic()
        for number in signals:
            assert self.process.poll() is None
            self.process.send_signal(number)
            time.sleep(0.3 if len(signals) > 1 else 0)
        while len(signals) > 1 and self.process.poll() is None and time.monotonic() - began < SOON_SECONDS:
            self.process.send_signal(signals[-1])
            time.sleep(0.3)
        try:
            _, said = self.process.communicate(timeout=120)
        finally:
            self.process.kill()
        return self.process.returncode, said, time.monotonic() - began


def test_before_there_is_something_to_save_the_first_signal_ends_it() -> None:
    code, said, seconds = Rank().ends(signal.SIGINT)
    assert (code, said) == (128 + signal.SIGINT, "trainer: ended by SIGINT\n")
    assert seconds < SOON_SECONDS


def test_the_deadline_ends_it_and_names_the_option() -> None:
    code, said, seconds = Rank("stop.allow_time(0.5)").ends(signal.SIGTERM)
    assert code == STOPPED
    assert "0.5 s after SIGTERM (checkpoint.gracePeriodSeconds)" in said
    assert 0.5 <= seconds < SOON_SECONDS


def test_a_process_that_was_frozen_meanwhile_still_ends_at_its_deadline() -> None:
    rank = Rank("stop.allow_time(2)")
    rank.process.send_signal(signal.SIGTERM)
    for _ in range(3):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            rank.process.send_signal(number)
            time.sleep(0.3)
    code, said, _ = rank.ends()
    assert (code, "2 s after SIGTERM" in said) == (STOPPED, True), said


def test_a_second_signal_ends_it_at_once() -> None:
    code, said, seconds = Rank("stop.allow_time(300)").ends(signal.SIGTERM, signal.SIGTERM)
    assert (code, said) == (STOPPED, "trainer: ended by a second signal, SIGTERM\n")
    assert seconds < SOON_SECONDS


def test_a_peer_that_is_gone_is_not_waited_for() -> None:
    peer = subprocess.Popen([sys.executable, "-c", "pass"])
    with_zombie = Rank(f"stop.allow_time(300, [{os.getpid()}, {peer.pid}])")  # nobody has collected the peer yet
    code, said, seconds = with_zombie.ends(signal.SIGTERM)
    assert (code, said) == (STOPPED, "trainer: ended after SIGTERM: another rank is gone already\n")
    assert seconds < SOON_SECONDS
    peer.wait()
    assert Rank(f"stop.allow_time(300, [{peer.pid}])").ends(signal.SIGTERM)[1] == said


def test_nobody_asks_a_stop_that_does_not_listen() -> None:
    stop = Stop()
    assert not stop.asked


ANSWERS = """
stop.allow_time(300)
import os, threading
def look():
    while not stop.asked: time.sleep(0.01)
    os._exit(stop.exit_code)
threading.Thread(target=look).start()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_is_seen_and_keeps_its_code(number: signal.Signals) -> None:
    code, said, _ = Rank(ANSWERS).ends(number)
    assert (code, said) == (128 + number, "")


def test_what_the_orchestrator_asks_is_no_first_signal_and_its_code_blames_another() -> None:
    """Pods that are deleted together get their signals in any order, before or after what the roles tell each other."""
    asked = "stop.allow_time(300); stop.join()"
    code, said, seconds = Rank(asked).ends(signal.SIGTERM, signal.SIGTERM)
    assert (code, said) == (STOPPED, "trainer: ended by a second signal, SIGTERM\n")
    assert seconds < SOON_SECONDS
    code, said, _ = Rank("stop.allow_time(0.5); stop.join()").ends()
    assert code == exit_codes.FAILURE
    assert "0.5 s after the orchestrator, which was told to stop" in said


def test_a_rank_that_joins_another_keeps_that_ones_code_and_its_own_time() -> None:
    code, said, _ = Rank("stop.allow_time(1.5); stop.join(2)").ends(signal.SIGINT)
    assert (code, "1.5 s after SIGINT" in said) == (128 + signal.SIGINT, True), said
