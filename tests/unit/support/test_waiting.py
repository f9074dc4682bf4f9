"""Waits of tests, with a simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import pytest

from tests.support.waiting import (
    LATE_FACTOR,
    LIMIT_FACTOR,
    LONGEST_LOOK_SECONDS,
    PATIENCE_SECONDS,
    StalledError,
    Wait,
    result_of,
    wait_until,
    wait_until_async,
)

POLL_SECONDS = 0.125


class Clock:
    """Clock that advances in `sleep`, by `late` seconds more than requested."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late, self.sleeps = 100.0, late, 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.now += seconds + self.late

    def wait_until(self, condition: Callable[[], object], **options: Callable[[], object]) -> object:
        return wait_until(condition, "the step", poll_seconds=POLL_SECONDS, clock=self, sleep=self.sleep, **options)


def after(polls: int) -> Callable[[], bool]:
    """Return a condition that is true after this number of polls."""
    numbers = count()
    return lambda: next(numbers) >= polls


def test_wait_returns_true_value_without_sleep() -> None:
    clock = Clock()
    assert clock.wait_until(lambda: "found", progress=lambda: pytest.fail("read too early")) == "found"
    assert clock.sleeps == 0


@pytest.mark.parametrize("progress", [None, lambda: "step 3"])
def test_wait_without_progress_fails_with_state(progress: Callable[[], object] | None) -> None:
    clock = Clock()
    with pytest.raises(StalledError) as failed:
        clock.wait_until(lambda: False, state=lambda: "pid 7 stopped", **({"progress": progress} if progress else {}))
    assert str(failed.value).startswith(f"the step: no progress for {PATIENCE_SECONDS:.0f} s")
    assert "pid 7 stopped" in str(failed.value)
    assert ("last progress: step 3" in str(failed.value)) == (progress is not None)
    assert PATIENCE_SECONDS <= clock.now - 100.0 < PATIENCE_SECONDS + 2.0


def test_wait_with_slow_progress_passes() -> None:
    """Each step takes nearly the whole patience, and the wait five times that time."""
    clock = Clock()
    polls = int(5 * PATIENCE_SECONDS / POLL_SECONDS)
    clock.wait_until(after(polls), progress=lambda: int(clock.now / (0.9 * PATIENCE_SECONDS)))
    with pytest.raises(StalledError):
        clock.wait_until(after(polls), progress=lambda: int(clock.now / (1.2 * PATIENCE_SECONDS)))


def test_wait_with_progress_has_limit() -> None:
    clock = Clock()
    with pytest.raises(StalledError, match="with progress"):
        clock.wait_until(lambda: False, progress=lambda: clock.now)
    assert clock.now - 100.0 == pytest.approx(LIMIT_FACTOR * PATIENCE_SECONDS, abs=2.0)


def test_wait_counts_late_poll_as_few_polls() -> None:
    """A poll that comes an hour late uses up the patience of few polls."""
    polls = int(0.9 * PATIENCE_SECONDS / (LATE_FACTOR * POLL_SECONDS))
    assert Clock(late=3600.0).wait_until(after(polls)) is True
    with pytest.raises(StalledError):
        Clock(late=3600.0).wait_until(after(2 * polls))


def test_wait_with_snapshot_counts_clock() -> None:
    """Otherwise, polling processes would count as progress on an overloaded machine."""
    clock = Clock(late=5.0)
    with pytest.raises(StalledError):
        clock.wait_until(lambda: False, progress=lambda: "step 3")
    assert clock.now - 100.0 == pytest.approx(PATIENCE_SECONDS, rel=0.1)


def test_slow_condition_uses_patience() -> None:
    clock = Clock()

    def slow() -> bool:
        clock.now += LONGEST_LOOK_SECONDS
        return False

    with pytest.raises(StalledError):
        clock.wait_until(slow)
    assert clock.sleeps == pytest.approx(PATIENCE_SECONDS / LONGEST_LOOK_SECONDS, abs=2)


def test_snapshot_is_read_once_per_second() -> None:
    clock, reads = Clock(), count()
    clock.wait_until(after(80), progress=lambda: next(reads))
    assert next(reads) <= 80 * POLL_SECONDS + 1


async def test_condition_may_be_coroutine_named_by_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count()

    async def third() -> bool:
        return next(numbers) == 2

    await wait_until_async(third, poll_seconds=0.0)
    assert next(numbers) == 3
    monkeypatch.setattr("tests.support.waiting.PATIENCE_SECONDS", 0.0)
    with pytest.raises(StalledError, match=r"next\(numbers\) == 2"):
        await wait_until_async(third, poll_seconds=0.0)


async def test_result_is_returned_and_error_raised() -> None:
    async def fails() -> None:
        raise ValueError("its own")

    assert await result_of(asyncio.sleep(0, "done"), "the answer") == "done"
    with pytest.raises(ValueError, match="its own"):
        await result_of(fails(), "the answer")


async def test_stalled_result_cancels_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wait, "poll", lambda self: (_ for _ in ()).throw(StalledError("no progress")))
    monkeypatch.setattr("tests.support.waiting.LONG_POLL_SECONDS", 0.001)
    task = asyncio.ensure_future(asyncio.Event().wait())
    with pytest.raises(StalledError):
        await result_of(task, "the answer")
    assert task.cancelled()
