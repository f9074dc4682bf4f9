"""Files that the ranks write together: where the volume refuses one of them, all of them know it at the same place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from rlrun.protocol.files.volume_faults import STORAGE_REASONS, RefusedError, StorageReason, Trouble, trouble_of
from rlrun.trainer.ranks.group import Group


class Together:
    """One file or folder that all ranks write a part of.

    Args:
        group: the ranks.
        folder: on the volume, for the message.
        doing: as the end of `cannot ...`.
    """

    def __init__(self, group: Group, folder: Path, doing: str) -> None:
        self._group, self._folder, self._doing = group, folder, doing
        self.refused: Trouble | None = None
        """Trouble that kept this rank from writing; it takes part in what the ranks do together all the same."""

    @contextmanager
    def part(self) -> Iterator[None]:
        """Write in the block; what the volume refuses is remembered, other errors pass."""
        try:
            yield
        except Exception as error:
            trouble = trouble_of(error, self._folder)
            if trouble is None:
                raise
            self.refused = self.refused or trouble

    def agree(self) -> None:
        """Wait for all ranks, which all call this.

        Raises:
            RefusedError: on all of them, when one of them was refused.
        """
        mine = 0 if self.refused is None else 1 + STORAGE_REASONS.index(self.refused.reason)
        worst = int(self._group.maxima({"refused": float(mine)})["refused"])
        if worst:  # the same reason on all ranks: they count how long the volume fails
            reason, own = STORAGE_REASONS[worst - 1], self.refused
            told = own if own is not None and own.reason == reason else _trouble_elsewhere(reason)
            raise volume_refusal(told, self._folder, self._doing)


def agree_among(peers: dist.ProcessGroup, error: Exception | None, folder: Path, doing: str) -> None:
    """As `Together.agree`, among the ranks of another process group.

    Args:
        peers: which all call this.
        error: why this rank failed, if it did; raised here when the volume is to blame on no rank.
        folder: on the volume.
        doing: as the end of `cannot ...`.

    Raises:
        RefusedError: on all of them, when one of them was refused.
    """
    mine = None if error is None else trouble_of(error, folder)
    found: list[Trouble | None] = [None] * dist.get_world_size(peers)
    dist.all_gather_object(found, mine, group=peers)
    trouble = mine or next((other for other in found if other is not None), None)
    if trouble is not None:
        raise volume_refusal(trouble, folder, doing) from error
    if error is not None:
        raise error


def volume_refusal(trouble: Trouble, folder: Path, doing: str) -> RefusedError:
    """The error of a write that the volume refused."""
    return RefusedError(f"cannot {doing} in {folder}: {trouble.text}; {trouble.remedy}", trouble)


def catch_error(act: Callable[[], object]) -> Exception | None:
    """Run it; the error that it raised."""
    try:
        act()
    except Exception as error:
        return error
    return None


def _trouble_elsewhere(reason: StorageReason) -> Trouble:
    state = {"StorageFull": "is full", "StorageReadOnly": "is read-only", "StorageFailing": "fails"}
    return Trouble(reason, f"the volume {state.get(reason, 'does not answer')} for another rank")
