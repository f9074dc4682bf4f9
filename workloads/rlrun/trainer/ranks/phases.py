"""Phase of each rank, reported to rank 0 without a collective, so that the last phase of a hanging rank is known.

Every rank except rank 0 writes its phase under its own key into torchrun's store on the first machine, over a separate connection. Rank 0
reads the phases at a request of the orchestrator. Neither waits for other ranks, and training continues if the store fails.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

from loguru import logger
from torch.distributed import TCPStore

from rlrun.protocol.messages.trainer_channel import Phase, RankState

_CONNECT_SECONDS = 30.0
_ANSWER_SECONDS = 2.0


class Phases:
    """Phases of all ranks, from the view of one rank.

    Args:
        rank: number of this rank.
        world_size: number of ranks of the group.
        address: host and port of the store, or None to disable reports.
    """

    def __init__(self, rank: int, world_size: int, address: tuple[str, int] | None) -> None:
        self._rank, self._others = rank, range(1, world_size)
        self._store: TCPStore | None = None
        if world_size == 1 or address is None:
            return
        try:
            self._store = TCPStore(*address, timeout=timedelta(seconds=_CONNECT_SECONDS), wait_for_workers=False)
            self._store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        except RuntimeError as error:
            logger.warning(f"cannot report the phase of each rank: {error}")

    @classmethod
    def of_group(cls, rank: int, world_size: int) -> Phases:
        """Connect to the store that torchrun names in the environment."""
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        return cls(rank, world_size, (host, int(port)) if host and port else None)

    def report_phase(self, phase: Phase, step: int, part: int = 0) -> None:
        """Set the phase of this rank."""
        if self._store is None or self._rank == 0:
            return
        word: dict[str, object] = {"phase": phase, "step": step, "part": part, "since": time.time()}
        try:
            self._store.set(_store_key(self._rank), json.dumps(word))
        except RuntimeError:  # the first machine has ended, and with it the group
            self._store = None

    def other_states(self) -> list[RankState]:
        """Return the last phase of every other rank; an empty list before all ranks have reported, or if the store does not answer."""
        keys = [_store_key(rank) for rank in self._others]
        if self._store is None or not keys:
            return []
        try:
            if not self._store.check(keys):
                return []
            words = self._store.multi_get(keys)
        except RuntimeError:
            return []
        return [RankState(rank=rank, **json.loads(word)) for rank, word in zip(self._others, words, strict=True)]


def _store_key(rank: int) -> str:
    return f"rlrun/phase/{rank}"
