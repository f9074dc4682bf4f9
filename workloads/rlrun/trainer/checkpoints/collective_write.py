"""Collective writes: if the volume refuses the write of one rank, all ranks raise at the same place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from rlrun.protocol.files.volume_faults import STORAGE_REASONS, RefusedError, StorageReason, Trouble, trouble_of
from rlrun.trainer.ranks.group import Group


class Together:
    """File or folder to which all ranks write a part.

    Args:
        group: all ranks.
        folder: folder on the volume, for the message.
        doing: action in the message `cannot ...`.
    """

    def __init__(self, group: Group, folder: Path, doing: str) -> None:
        self._group, self._folder, self._doing = group, folder, doing
        self.refused: Trouble | None = None
        """Volume fault of this rank's write. The rank still takes part in later collectives."""

    @contextmanager
    def part(self) -> Iterator[None]:
        """Context of this rank's write; stores a refusal of the volume and raises other errors."""
        try:
            yield
        except Exception as error:
            trouble = trouble_of(error, self._folder)
            if trouble is None:
                raise
            self.refused = self.refused or trouble

    def agree(self) -> None:
        """Compare the results of all ranks; all ranks call it together.

        Raises:
            RefusedError: the volume refused the write of at least one rank; raised on all ranks.
        """
        mine = 0 if self.refused is None else 1 + STORAGE_REASONS.index(self.refused.reason)
        worst = int(self._group.maxima({"refused": float(mine)})["refused"])
        if worst:  # all ranks use the same reason, because each measures how long the volume fails
            reason, own = STORAGE_REASONS[worst - 1], self.refused
            told = own if own is not None and own.reason == reason else _trouble_elsewhere(reason)
            raise volume_refusal(told, self._folder, self._doing)


def agree_among(peers: dist.ProcessGroup, error: Exception | None, folder: Path, doing: str) -> None:
    """Compare the results of all ranks like `Together.agree`, in another process group.

    Args:
        peers: process group; all its ranks call this function.
        error: error of this rank, or None; raised here if no rank has a volume fault.
        folder: folder on the volume, for the message.
        doing: action in the message `cannot ...`.

    Raises:
        RefusedError: the volume refused the write of at least one rank; raised on all ranks.
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
    """Return the error for a write that the volume refused."""
    return RefusedError(f"cannot {doing} in {folder}: {trouble.text}; {trouble.remedy}", trouble)


def catch_error(act: Callable[[], object]) -> Exception | None:
    """Call `act` and return its error, or None."""
    try:
        act()
    except Exception as error:
        return error
    return None


def _trouble_elsewhere(reason: StorageReason) -> Trouble:
    state = {"StorageFull": "is full", "StorageReadOnly": "is read-only", "StorageFailing": "fails"}
    return Trouble(reason, f"the volume {state.get(reason, 'does not answer')} for another rank")
