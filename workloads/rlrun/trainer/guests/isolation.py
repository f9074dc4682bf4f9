"""Attribution of an exception to one guest: all ranks must have raised it at the same place.

Ranks that stopped at different places have started different collectives. Their next collectives would be paired wrongly and mix the
numbers of several runs. In this case the process must end, and all runs resume from their checkpoints. The comparison uses a separate
process group, so a missing rank causes a timeout instead of a wrong pairing. The rank whose work failed reports it before it ends,
because its peers see only a closed connection.
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
"""Longest wait for the other ranks; exceeds the time difference of ranks within a step of a sharded model."""


class Isolation:
    """Comparison of all ranks after an exception; every rank creates one at the start."""

    def __init__(self, group: Group) -> None:
        self._peers: dist.ProcessGroup | None = None
        if group.world_size > 1:
            self._peers = dist.new_group(backend="gloo", timeout=timedelta(seconds=MEETING_SECONDS))

    def contained(self, error: BaseException, place: int) -> bool:
        """Return whether every rank calls this with the same type of error from the same line at the same place of the work."""
        if self._peers is None:
            return True
        mine = torch.tensor([error_mark(error), place])
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        try:
            dist.all_gather(found, mine, group=self._peers)
        except RuntimeError:  # a rank did not call it in time
            return False
        return all(torch.equal(other, mine) for other in found)


def to_blame(error: BaseException) -> bool:
    """Return whether the work itself raised the error, not the volume and not a connection to an ended rank."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return not isinstance(error, RoleError | OSError) and not between_ranks(error)


def tell_all(host: RunPaths, run: str, attempt: int, failure: RoleError) -> None:
    """Report to the run's orchestrator and to the trainer's next attempt that this run's work ends the trainer. Any rank may call it."""
    state = SharedState(
        run=run,
        attempt=attempt,
        state="Failed",
        reason=str(failure),
        exit_code=failure.code,
        ended_trainer=True,
    )
    with suppress(OSError):  # the process ends in any case
        shared.write_answer(host, state)


def error_mark(error: BaseException) -> int:
    """Return a checksum of an error's type and traceback lines."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return zlib.crc32(repr((type(error).__name__, frames)).encode())
