"""Writes that are still to be done when a role ends."""

from __future__ import annotations

import threading

import pytest

from rlrun.orchestrator.aio import volume_access as module
from rlrun.orchestrator.aio.volume_access import BestEffortWriter


def test_what_was_refused_is_tried_once_more_at_the_end() -> None:
    writer, tried, written = BestEffortWriter(), threading.Event(), list[str]()
    refuses = [True]

    def act() -> None:
        if refuses[0]:
            tried.set()
            raise OSError("the volume is full")
        written.append("line")

    writer.write("metrics.jsonl", act, keep=True)
    assert tried.wait(60)
    refuses[0] = False
    writer.close()
    assert written == ["line"]


class Slow:
    """The writer's thread, seen from its end: each wait is over before the volume has taken more than one file."""

    def __init__(self, writer: BestEffortWriter, files: int) -> None:
        self.writer, self.files, self.waits = writer, files, 0

    def is_alive(self) -> bool:
        return self.files > 0

    def join(self, seconds: float) -> None:
        self.waits += 1
        if self.writer._done < 3:  # then it hangs
            self.writer._done += 1


def test_its_end_waits_as_long_as_the_volume_takes_one_file_after_the_other() -> None:
    writer = BestEffortWriter()
    writer._thread = slow = Slow(writer, 9)  # type: ignore[assignment]
    writer.close()
    assert slow.waits == 3 + 1


def test_once_the_end_takes_too_long_only_what_is_kept_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, may, written = BestEffortWriter(), threading.Event(), list[str]()

    def first() -> None:
        assert may.wait(60)
        written.append("first")

    writer.write("first", first, keep=True)
    writer.write("trace", lambda: written.append("trace"))
    writer.write("metrics.jsonl", lambda: written.append("line"), keep=True)
    with monkeypatch.context() as patched:
        patched.setattr(module, "CLOSE_SECONDS", -1.0)  # over as soon as it begins
        patched.setattr(writer._thread, "join", lambda seconds: may.set())
        writer.close()
    writer._thread.join(60)
    assert written == ["first", "line"]
