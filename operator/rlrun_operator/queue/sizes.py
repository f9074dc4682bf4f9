"""Sizes of elastic runs: which fit, which fit when others have left, and which an admitted run may grow to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rlrun_operator.queue.fit import place_gang
from rlrun_operator.queue.model import Amounts, Applicant
from rlrun_operator.queue.rooms import Rooms


class Patience:
    """Elastic runs that wait for room that others are leaving, so that none begins with fewer pods a moment too early.

    Args:
        since: times of the pass before, by UID.
        waiting: UIDs of the runs that wait.
        seconds: longest wait of a run, all of its waits together.
        now: seconds, as all times of runs.
    """

    def __init__(self, since: Mapping[str, float], waiting: Collection[str], seconds: float, now: float) -> None:
        self.since = {uid: at for uid, at in since.items() if uid in waiting}
        self.hoped: dict[str, int] = {}
        """Numbers of trainer pods that are waited for, by UID."""
        self._seconds, self._now = seconds, now

    def larger(
        self, run: Applicant, now: int, leaving: Iterable[Mapping[str, Amounts]], rooms: Rooms
    ) -> tuple[Applicant, dict[str, dict[str, float]]] | None:
        """The run in a larger size that fits once others have left, with its room then; None: it need not wait.

        Args:
            run: one that waits, with all of its trainer pods.
            now: number of trainer pods that it has room for.
            leaving: what each of the runs that leave holds, by room.
            rooms: what it may have now; changed.
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

    def words(self, uid: str) -> str:
        """Room that a run waits for, in words; empty: it does not wait for others to leave."""
        size = self.hoped.get(uid)
        return (
            f"there is room for fewer of its trainer pods; {size} fit when the runs that leave are gone" if size else ""
        )


def by_size(run: Applicant) -> Iterator[Applicant]:
    """A waiting run, with all of its trainer pods first, then with the fewer ones that an elastic one may have."""
    yield run
    yield from (run.sized(size) for size in reversed(run.sizes) if size < run.trainers)


def choose_growth(rooms: Rooms, run: Applicant, sizes: Sequence[int], held: dict[str, dict[str, float]]) -> int:
    """First of the sizes that there is room for, which is charged; 0: none."""
    rooms.charge_all(held, -1.0)
    for size in sizes:
        if (placed := place_gang(rooms, run.sized(size).gang)) is not None:
            rooms.charge_all(placed)
            return size
    rooms.charge_all(held)
    return 0
