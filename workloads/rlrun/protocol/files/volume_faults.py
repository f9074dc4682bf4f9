"""State of the run's volume for a role: full, read-only, failing or slow; who waits for it, and how writes are retried.

Data that a run cannot continue without is written with `insist`, which waits until there is space again. Writes that may hang run in their
own threads, so that a caller of `trouble` never waits for a file.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar, get_args

from rlrun.backoff import backoff
from rlrun.protocol.files.failures import FAILING, FULL_BYTES, RoleError, refusal_number
from rlrun.runtime import exit_codes

StorageReason = Literal["StorageFull", "StorageReadOnly", "StorageFailing", "StorageSlow"]
STORAGE_REASONS: tuple[StorageReason, ...] = get_args(StorageReason)
SLOW_SECONDS = 30.0
"""Seconds after which a single request to the volume is reported: a healthy volume answers in milliseconds, a busy one in seconds."""
LOOK_SECONDS = 5.0
"""Seconds between two checks of the volume."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 3.0
"""Pauses before a refused write is retried, doubled up to the longest: a run stays idle for at most this long after its volume recovers."""
FAILING_SECONDS = 600.0
"""Maximum wait of a run for a failing volume. Then the role ends: a new pod mounts the volume again, which repairs stale handles."""
_LOOKING = "look at it"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Trouble:
    """Problem of the volume, with its message."""

    reason: StorageReason
    text: str
    """Message on one line; it does not change while the problem stays the same."""
    blocks: bool = True
    """Whether the run waits for it; otherwise only a checkpoint waits, and training continues."""

    @property
    def remedy(self) -> str:
        """Fix, as the end of a message."""
        if self.reason == "StorageFull":
            return "make space"
        return "make it writable" if self.reason == "StorageReadOnly" else "look at the storage and the way to it"


class RefusedError(RoleError):
    """Refused write of the volume; no partial data is left, so the write may be retried."""

    def __init__(self, message: str, trouble: Trouble) -> None:
        super().__init__(message, exit_codes.STORAGE)
        self.trouble = trouble


def may_pass(error: RoleError) -> bool:
    """Return whether a refusal ends when there is space again; a missing permission does not."""
    return isinstance(error, RefusedError) or refusal_number(error) is not None


def retry_pauses() -> Iterator[float]:
    """Yield the seconds to wait before each retry, without end."""
    for tries in itertools.count(1):
        yield backoff(tries, first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)


def trouble_of(error: BaseException, folder: Path) -> Trouble | None:
    """Return the problem of the volume of `folder` that caused an error, or None if the volume did not cause it.

    Some libraries report a failed write without a number, and an undeletable partial folder makes the next try fail with another number.
    On a volume that refuses writes, that is the cause.
    """
    number = refusal_number(error)
    if number is None:
        return trouble_at(folder, least=FULL_BYTES)
    if number in FAILING:
        return Trouble("StorageFailing", f"the volume fails ({os.strerror(number)})")
    if number == errno.EROFS:
        return Trouble("StorageReadOnly", "the volume is read-only")
    if number == errno.EDQUOT:
        return Trouble("StorageFull", "the volume's quota is used up")
    return Trouble("StorageFull", f"the volume is full{_free_bytes(_volume_statistics(folder))}")


def trouble_at(folder: Path, *, least: int) -> Trouble | None:
    """Return the problem of the volume of `folder`, without a write, or None if it has none or its state is unknown.

    Args:
        folder: path on the volume; it need not exist.
        least: free bytes below which the volume counts as full.
    """
    state = _volume_statistics(folder)
    if state is None:
        return None
    if state.f_flag & os.ST_RDONLY:
        return Trouble("StorageReadOnly", "the volume is read-only")
    no_space = state.f_blocks > 0 and state.f_bavail * state.f_frsize < least
    if no_space or _without_inodes(state):
        return Trouble("StorageFull", f"the volume is full{_free_bytes(state)}")
    return None


class Volume:
    """A process's view of the volume of its run's folder. Thread-safe.

    Args:
        root: folder of the run.
        say: callback when a write is refused for the first time, and when it succeeds afterwards.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        root: Path,
        *,
        say: Callable[[str], object] = lambda message: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root, self._say = root, say
        self.least = FULL_BYTES
        """Free bytes below which the volume counts as full even before a write fails."""
        self.space: tuple[int, int] | None = None
        """Free bytes and total bytes at the last check; None: unknown."""
        self._clock = clock
        self._lock = threading.Lock()
        self._uses: dict[object, tuple[str, float]] = {}
        self._refused: dict[str, tuple[Trouble, str]] = {}
        self._failing: dict[str, float] = {}
        """Start of each failure of the volume for which the run waits, by operation."""
        self._closed = threading.Event()

    # ---- writing

    def attempt(self, doing: str, act: Callable[[], _T], *, blocks: bool = True) -> _T:
        """Return the result of `act`.

        Args:
            doing: description of the operation, as the end of `cannot ...`.
            act: function that writes; on failure it must remove its partial data.
            blocks: whether the run waits for it.

        Raises:
            RefusedError: the volume refused the write.
            RoleError: the volume has failed for `FAILING_SECONDS`, and the run waits for it.
        """
        with self.using(doing):
            try:
                result = act()
            except Exception as error:
                trouble = error.trouble if isinstance(error, RefusedError) else trouble_of(error, self.root)
                if trouble is None:
                    raise
                self.refuse(doing, replace(trouble, blocks=blocks))
                message = f"cannot {doing} in {self.root}: {trouble.text}; {trouble.remedy}"
                if self._has_failed_for_long(doing, replace(trouble, blocks=blocks)):
                    raise RoleError(f"{message} (after {FAILING_SECONDS:.0f} s)", exit_codes.STORAGE) from error
                raise RefusedError(message, trouble) from error
        self.accept(doing)
        return result

    def insist(
        self, doing: str, act: Callable[[], _T], *, blocks: bool = True, wait: Callable[[float], object] = time.sleep
    ) -> _T:
        """Repeat `attempt` until it succeeds; an exception of `wait`, or a `RoleError` of `attempt`, ends the loop."""
        for pause in retry_pauses():
            with suppress(RefusedError):
                return self.attempt(doing, act, blocks=blocks)
            wait(pause)
        raise AssertionError

    def _has_failed_for_long(self, doing: str, trouble: Trouble) -> bool:
        with self._lock:
            if trouble.reason != "StorageFailing" or not trouble.blocks:
                self._failing.pop(doing, None)
                return False
            return self._clock() - self._failing.setdefault(doing, self._clock()) >= FAILING_SECONDS

    @contextmanager
    def using(self, doing: str) -> Iterator[None]:
        """Record that this thread waits for the volume during the block."""
        key = object()
        with self._lock:
            self._uses[key] = doing, self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._uses[key]

    def refuse(self, doing: str, trouble: Trouble) -> None:
        """Record that the volume refused this operation; `trouble` reports it until it is accepted."""
        with self._lock:
            known = self._refused.get(doing)
            self._refused[doing] = trouble, _now_text() if known is None else known[1]
        if known is None and doing != _LOOKING:
            self._say(f"cannot {doing}: {trouble.text}; the role retries")

    def accept(self, doing: str) -> None:
        """Record that the operation succeeded, or is no longer needed."""
        with self._lock:
            known = self._refused.pop(doing, None)
            self._failing.pop(doing, None)
        if known is not None and doing != _LOOKING:
            self._say(f"the volume works again (could not {doing} since {known[1]})")

    # ---- reporting

    def trouble(self) -> Trouble | None:
        """Return the current problem, first one that blocks the run. Reads no file."""
        now = self._clock()
        with self._lock:
            refused = sorted(self._refused.items(), key=lambda item: (item[0] == _LOOKING, not item[1][0].blocks))
            slow = [(doing, now - began) for doing, began in self._uses.values() if now - began >= SLOW_SECONDS]
        for doing, (trouble, since) in refused:
            if trouble.blocks:
                return _trouble_message(doing, trouble, since)
        if slow:
            doing, seconds = max(slow, key=lambda use: use[1])
            return _trouble_message(doing, Trouble("StorageSlow", "the volume does not answer"), _now_text(seconds))
        return _trouble_message(refused[0][0], *refused[0][1]) if refused else None

    # ---- checking

    def look(self) -> None:
        """Check the volume; may hang as long as the volume does."""
        with self.using(_LOOKING):
            trouble = trouble_at(self.root, least=self.least)
            state = _volume_statistics(self.root)
        known = state is not None and state.f_blocks > 0
        self.space = (state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize) if state and known else None
        if trouble is None:
            self.accept(_LOOKING)
        else:
            self.refuse(_LOOKING, replace(trouble, blocks=self.least > FULL_BYTES))

    def watch(self) -> None:
        """Check the volume periodically in a thread, until `close`."""

        def run() -> None:
            while True:
                self.look()
                if self._closed.wait(LOOK_SECONDS):
                    return

        threading.Thread(target=run, name="volume", daemon=True).start()

    def close(self) -> None:
        """Stop the periodic checks."""
        self._closed.set()


@contextmanager
def watch_volume(volume: Volume) -> Iterator[None]:
    """Check the volume periodically during the block."""
    volume.watch()
    try:
        yield
    finally:
        volume.close()


def _trouble_message(doing: str, trouble: Trouble, since: str) -> Trouble:
    what = "" if doing == _LOOKING else f"; cannot {doing}"
    return replace(trouble, text=f"{trouble.text}{what} since {since}")


def _now_text(ago: float = 0.0) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(time.time() - ago))


def _volume_statistics(folder: Path) -> os.statvfs_result | None:
    for place in (folder, *folder.parents):
        try:
            return os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _without_inodes(state: os.statvfs_result) -> bool:
    return state.f_files > 0 and state.f_favail == 0


def _free_bytes(state: os.statvfs_result | None) -> str:
    if state is None or not state.f_blocks:
        return ""
    if _without_inodes(state):
        return f": no inodes are left of {state.f_files}"
    return f": {show_size(state.f_bavail * state.f_frsize)} free of {show_size(state.f_blocks * state.f_frsize)}"


def show_size(count: int) -> str:
    """Return a size as text, with at most two significant digits after the first unit: `12 MiB`, `9.5 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if value < 10 and unit not in ("B", "KiB") else f"{value:.0f} {unit}"
