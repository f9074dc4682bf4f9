"""Progress lines of long steps: one line per half minute in a log, one rewritten line on a terminal."""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.cluster.cache import locked
from tests.cluster.progress import LOG_SECONDS, Progress, duration


class Clock:
    """Clock set by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def only_the_test_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the thread of `Progress`, which would print at unpredictable times."""
    monkeypatch.setattr("tests.cluster.progress.SCREEN_SECONDS", 3600.0)


def test_step_in_log_has_a_line_each_half_minute() -> None:
    clock, lines = Clock(), list[str]()
    progress = Progress(lines.append, clock=clock)
    parts = iter(["3 of 9 packages", "7 of 9 packages"])
    with progress.step("kube 1.2", lambda: next(parts)):
        for seconds in range(1, 71):
            clock.now = 100.0 + seconds
            progress.report()
    assert lines == [
        "  30.0 s  kube 1.2: 3 of 9 packages, 30 s",
        "  60.0 s  kube 1.2: 7 of 9 packages, 1 min 0 s",
    ]
    assert LOG_SECONDS < 60, "a log is never silent for a minute"


def test_step_that_ended_has_no_more_lines() -> None:
    clock, lines = Clock(), list[str]()
    progress = Progress(lines.append, clock=clock)
    with pytest.raises(ValueError, match="broken"), progress.step("kube"):
        raise ValueError("broken")
    clock.now += 1000
    progress.report()
    assert lines == []


def test_concurrent_steps_have_separate_lines() -> None:
    clock, lines = Clock(), list[str]()
    progress = Progress(lines.append, clock=clock)
    with progress.step("kube", lambda: "half"):
        clock.now += 20
        with progress.step("image"):
            clock.now += 15
            progress.report()
            clock.now += 15
            progress.report()
    assert lines == ["  35.0 s  kube: half, 35 s", "  50.0 s  image: 30 s"]


def test_terminal_progress_rewrites_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    clock, screen = Clock(), io.StringIO()
    progress = Progress(lambda text: print(text, file=screen), screen=screen, clock=clock)
    with progress.step("kube", lambda: "1 of 2 packages"), progress.step("image", lambda: "a state that is long"):
        clock.now += 5
        progress.report()
        progress("etcd built")
        shown = screen.getvalue()
    assert "\r\x1b[Kkube: 1 of 2 packages, 5 s | image: a s\r\x1b[K" in shown, (
        "cut to the terminal's width, then cleared"
    )
    assert shown.endswith("\r\x1b[K   5.0 s  etcd built\n")
    assert screen.getvalue().endswith("\r\x1b[K"), "nothing of a step stays"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (754.2, "12 min 34 s")])
def test_duration_has_minutes_from_sixty_seconds(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_held_lock_is_reported_and_then_acquired(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path))
    waits, order = threading.Event(), list[str]()

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.set()
        yield
        order.append("waited")

    def second() -> None:
        with locked("binary-kube", waiting=waiting()):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked("binary-kube", waiting=nullcontext()):
        thread.start()
        assert waits.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "waited", "second"]
