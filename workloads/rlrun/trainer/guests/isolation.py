"""Attribution of an exception to one guest: all ranks must have met it at the same place.

Ranks that stopped at different places have begun different collectives, and the next ones would pair up wrongly: numbers of one run
would end in another's. Then the process has to end, and all runs go on from their checkpoints. The group of the meeting is used for
nothing else, so a rank that is not there is waited for, and mixes nothing up. The rank whose work it was says so before it ends: its peers
see no more than a connection that is closed.
"""

from __future__ import annotations

import traceback
import zlib
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from rlrun.diagnostics.symptoms import between_ranks
from rlrun.protocol.files import shared
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared import SharedState
from rlrun.trainer.ranks.group import Group

MEETING_SECONDS = 30.0
"""Longest wait for the other ranks: longer than they are apart in a step of a model that many ranks share."""


class Isolation:
    """The ranks' meeting after an exception; every rank makes one at the start."""

    def __init__(self, group: Group) -> None:
        self._peers: dist.ProcessGroup | None = None
        if group.world_size > 1:
            self._peers = dist.new_group(backend="gloo", timeout=timedelta(seconds=MEETING_SECONDS))

    def contained(self, error: BaseException, place: int) -> bool:
        """True if every rank calls this, with the same kind of error from the same line at the same place of the work."""
        if self._peers is None:
            return True
        mine = torch.tensor([error_mark(error), place])
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        try:
            dist.all_gather(found, mine, group=self._peers)
        except RuntimeError:  # a rank is not there
            return False
        return all(torch.equal(other, mine) for other in found)


def to_blame(error: BaseException) -> bool:
    """True if the work itself raised it, not the volume, and not the way to another rank that has ended."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return not isinstance(error, RoleError | OSError) and not between_ranks(error)


def tell_all(host: RunPaths, run: str, attempt: int, failure: RoleError) -> None:
    """Report that this run's work ends the trainer, for its orchestrator and for the trainer's next attempt. On any rank."""
    state = SharedState(
        run=run,
        attempt=attempt,
        state="Failed",
        reason=str(failure),
        exit_code=failure.code,
        ended_trainer=True,
    )
    with suppress(OSError):  # the end comes anyway
        shared.write_answer(host, state)


def error_mark(error: BaseException) -> int:
    """A number for the kind of an error and the lines it came through."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return zlib.crc32(repr((type(error).__name__, frames)).encode())
