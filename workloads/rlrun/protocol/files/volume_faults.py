"""The run's volume as a role finds it: full, read-only, failing or silent; who waits for it, and how a write is tried again.

What a run cannot go on without is written with `insist`: it waits until there is space again. A write that hangs is in a thread of its own:
a caller that asks for the `trouble` waits for no file.
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
"""A single request to the volume that takes longer is reported: a healthy one answers in milliseconds, a busy one in seconds."""
LOOK_SECONDS = 5.0
"""Time between two looks at the volume."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 3.0
"""Before a refused write is tried again: doubled each time, up to the longest. A run stands still that long after its volume is of use."""
FAILING_SECONDS = 600.0
"""Longest wait for a volume that fails, where the run waits. Then the role ends: a new pod mounts it anew, which repairs stale handles."""
_LOOKING = "look at it"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Trouble:
    """Trouble of the volume, for a person."""

    reason: StorageReason
    text: str
    """Text on one line; it does not change while the trouble stays the same."""
    blocks: bool = True
    """True if the run waits for it; otherwise a checkpoint alone does, and training goes on."""

    @property
    def remedy(self) -> str:
        """Fix, as the end of a message."""
        if self.reason == "StorageFull":
            return "make space"
        return "make it writable" if self.reason == "StorageReadOnly" else "look at the storage and the way to it"


class RefusedError(RoleError):
    """The volume refused a write; nothing of it was left behind, and it may be tried again."""

    def __init__(self, message: str, trouble: Trouble) -> None:
        super().__init__(message, exit_codes.STORAGE)
        self.trouble = trouble


def may_pass(error: RoleError) -> bool:
    """True if a refusal passes when there is space again; a missing permission does not."""
    return isinstance(error, RefusedError) or refusal_number(error) is not None


def retry_pauses() -> Iterator[float]:
    """Seconds to wait before each new try, without an end."""
    for tries in itertools.count(1):
        yield backoff(tries, first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)


def trouble_of(error: BaseException, folder: Path) -> Trouble | None:
    """Trouble of the volume of `folder` behind an error; None when the volume is not to blame.

    Some libraries report a failed write without a number, and a half-written folder that cannot be removed is in the way of the next try
    with another number. On a volume that takes no writes that is the cause.
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
    """Trouble of the volume of `folder` without a write; None: it is fine, or unknown.

    Args:
        folder: on the volume; it need not exist.
        least: with fewer free bytes than this the volume is full.
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
    """A process's view of the volume that its run's folder is on. Any thread may call any method.

    Args:
        root: the run's folder.
        say: called when a write is refused for the first time, and when it is taken after all.
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
        """Free bytes below which the volume is called full, though no write has failed."""
        self.space: tuple[int, int] | None = None
        """Free bytes and all bytes at the last look; None: not known."""
        self._clock = clock
        self._lock = threading.Lock()
        self._uses: dict[object, tuple[str, float]] = {}
        self._refused: dict[str, tuple[Trouble, str]] = {}
        self._failing: dict[str, float] = {}
        """Since when a volume fails that the run waits for, by what it fails to do."""
        self._closed = threading.Event()

    # ---- writing

    def attempt(self, doing: str, act: Callable[[], _T], *, blocks: bool = True) -> _T:
        """Result of `act`.

        Args:
            doing: what it does, as the end of `cannot ...`.
            act: writes; what it has begun when it fails, it removes.
            blocks: whether the run waits for it.

        Raises:
            RefusedError: the volume refused.
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
        """Repeat `attempt` until the volume takes it; what `wait` raises ends that, and so does a `RoleError` of `attempt`."""
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
        """Record that this thread waits for the volume, for the block."""
        key = object()
        with self._lock:
            self._uses[key] = doing, self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._uses[key]

    def refuse(self, doing: str, trouble: Trouble) -> None:
        """Record that the volume has refused this; `trouble` reports it until it is accepted."""
        with self._lock:
            known = self._refused.get(doing)
            self._refused[doing] = trouble, _now_text() if known is None else known[1]
        if known is None and doing != _LOOKING:
            self._say(f"cannot {doing}: {trouble.text}; it is tried again")

    def accept(self, doing: str) -> None:
        """Record that the volume has taken this, or that it is no longer wanted."""
        with self._lock:
            known = self._refused.pop(doing, None)
            self._failing.pop(doing, None)
        if known is not None and doing != _LOOKING:
            self._say(f"the volume is of use again (could not {doing} since {known[1]})")

    # ---- telling

    def trouble(self) -> Trouble | None:
        """Present trouble: first what the run waits for. Looks at no file."""
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

    # ---- looking

    def look(self) -> None:
        """Ask the volume how it is; may hang as long as the volume does."""
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
        """Look now and then, in a thread, until `close`."""

        def run() -> None:
            while True:
                self.look()
                if self._closed.wait(LOOK_SECONDS):
                    return

        threading.Thread(target=run, name="volume", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()


@contextmanager
def watch_volume(volume: Volume) -> Iterator[None]:
    """Look at the volume now and then during the block."""
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
    """Bytes for a person, with at most two significant digits after the first unit: `12 MiB`, `9.5 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if value < 10 and unit not in ("B", "KiB") else f"{value:.0f} {unit}"
