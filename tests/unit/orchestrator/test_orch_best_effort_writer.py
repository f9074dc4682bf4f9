"""Best-effort writes that are pending when a role ends."""

from __future__ import annotations

import threading

import pytest

from rlrun.orchestrator.aio import volume_access as module
from rlrun.orchestrator.aio.volume_access import BestEffortWriter


def test_refused_write_is_retried_on_close() -> None:
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
    """Writer thread of a slow volume: each `join` times out after at most one written file."""

    def __init__(self, writer: BestEffortWriter, files: int) -> None:
        self.writer, self.files, self.waits = writer, files, 0

    def is_alive(self) -> bool:
        return self.files > 0

    def join(self, seconds: float) -> None:
        self.waits += 1
        if self.writer._done < 3:  # then it hangs
            self.writer._done += 1


def test_close_waits_while_pending_files_are_written() -> None:
    writer = BestEffortWriter()
    writer._thread = slow = Slow(writer, 9)  # type: ignore[assignment]
    writer.close()
    assert slow.waits == 3 + 1


def test_close_timeout_skips_writes_without_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, may, written = BestEffortWriter(), threading.Event(), list[str]()

    def first() -> None:
        assert may.wait(60)
        written.append("first")

    writer.write("first", first, keep=True)
    writer.write("trace", lambda: written.append("trace"))
    writer.write("metrics.jsonl", lambda: written.append("line"), keep=True)
    with monkeypatch.context() as patched:
        patched.setattr(module, "CLOSE_SECONDS", -1.0)  # the deadline has already passed
        patched.setattr(writer._thread, "join", lambda seconds: may.set())
        writer.close()
    writer._thread.join(60)
    assert written == ["first", "line"]
