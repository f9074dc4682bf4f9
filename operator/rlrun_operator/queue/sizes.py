"""Sizes of elastic runs: which size fits now, which fits after other runs have left, and to which an admitted run may grow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rlrun_operator.queue.fit import place_gang
from rlrun_operator.queue.model import Amounts, Applicant
from rlrun_operator.queue.rooms import Rooms


class Patience:
    """Elastic runs that wait for leaving runs, so that none starts with fewer pods a moment too early.

    Args:
        since: start of each wait from the previous pass, by UID.
        waiting: UIDs of the waiting runs.
        seconds: maximum wait of a run, summed over all of its waits.
        now: seconds, of the same clock as the times of runs.
    """

    def __init__(self, since: Mapping[str, float], waiting: Collection[str], seconds: float, now: float) -> None:
        self.since = {uid: at for uid, at in since.items() if uid in waiting}
        self.hoped: dict[str, int] = {}
        """Expected numbers of trainer pods, by UID."""
        self._seconds, self._now = seconds, now

    def find_larger(
        self, run: Applicant, now: int, leaving: Iterable[Mapping[str, Amounts]], rooms: Rooms
    ) -> tuple[Applicant, dict[str, dict[str, float]]] | None:
        """Return the run in a larger size that fits after other runs have left, with its room, or None if it need not wait.

        Args:
            run: waiting run with all of its trainer pods.
            now: number of trainer pods that fit now.
            leaving: resources of each leaving run, by room.
            rooms: rooms that the run may use; changed.
        """
        held = [each for each in leaving if each]
        if not held or self._now - self.since.get(run.uid, self._now) >= self._seconds:
            return None
        for each in held:
            rooms.charge_all(each, -1.0)
        for size in sorted({*run.sizes, run.trainers}, reverse=True):
            sized = run.sized(size)
            if now < size <= run.trainers and (placed := place_gang(rooms, sized.gang)) is not None:
                self.since.setdefault(run.uid, self._now)
                self.hoped[run.uid] = size
                return sized, placed
        return None

    def explain_wait(self, uid: str) -> str:
        """Return a message if a run waits for leaving runs, else an empty string."""
        size = self.hoped.get(uid)
        if not size:
            return ""
        return f"there is room for fewer of its trainer pods; {size} fit when the leaving runs have ended"


def by_size(run: Applicant) -> Iterator[Applicant]:
    """Yield a waiting run with all of its trainer pods, then in the smaller sizes of an elastic run."""
    yield run
    yield from (run.sized(size) for size in reversed(run.sizes) if size < run.trainers)


def choose_growth(rooms: Rooms, run: Applicant, sizes: Sequence[int], held: dict[str, dict[str, float]]) -> int:
    """Return the first size for which there is room, and charge it; 0 if there is none."""
    rooms.charge_all(held, -1.0)
    for size in sizes:
        if (placed := place_gang(rooms, run.sized(size).gang)) is not None:
            rooms.charge_all(placed)
            return size
    rooms.charge_all(held)
    return 0
