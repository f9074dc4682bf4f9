"""Phase of each rank, sent to rank 0 without a collective: a rank that hangs has reported before where it was going.

Every rank but rank 0 puts its word under its own key into the store at which the group met (torchrun's, on the first machine), over a
connection of its own; rank 0 reads them when the orchestrator asks. Neither waits for a rank, and the group trains without the store too.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

from loguru import logger
from torch.distributed import TCPStore

from rlrun.protocol.messages.channel import Phase, RankState

_CONNECT_SECONDS = 30.0
_ANSWER_SECONDS = 2.0


class Phases:
    """One rank's view.

    Args:
        rank: this one.
        world_size: ranks of the group.
        address: of the store; None: there is none, nothing is reported.
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
            logger.warning(f"what the ranks do cannot be told: {error}")

    @classmethod
    def of_group(cls, rank: int, world_size: int) -> Phases:
        """Phases at the store that torchrun names in the environment."""
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        return cls(rank, world_size, (host, int(port)) if host and port else None)

    def say(self, phase: Phase, step: int, part: int = 0) -> None:
        """Set the phase of this rank."""
        if self._store is None or self._rank == 0:
            return
        word: dict[str, object] = {"phase": phase, "step": step, "part": part, "since": time.time()}
        try:
            self._store.set(_store_key(self._rank), json.dumps(word))
        except RuntimeError:  # the first machine is gone, and so is the group
            self._store = None

    def others(self) -> list[RankState]:
        """The last word of every other rank; none while one has not spoken yet, or the store does not answer."""
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
