"""Sleep checks of colocated engines, which use the trainer's GPUs in turn. Does not import torch, because test doubles use it too."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from loguru import logger

from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.messages.endpoints import ENGINE_STATUS

START_SECONDS = 7200.0
"""Time limit for the engines' start, which may download hundreds of gigabytes and compile."""
ANSWER_SECONDS = 10.0
TRIES = 6
PAUSE_SECONDS = 0.5
_SAY_SECONDS = 60.0
_IS_AWAKE = "is awake"


class EnginesBeside:
    """Engines on the GPUs of this process.

    Args:
        urls: addresses of all engines on this machine.
        api_key: key of the run.
    """

    def __init__(self, urls: Sequence[str], api_key: str) -> None:
        self._urls, self._key = [url.rstrip("/") for url in urls], api_key

    def wait_until_asleep(self, seconds: float = START_SECONDS) -> None:
        """Wait until all engines have started and sleep.

        Raises:
            RoleError: an engine is not asleep after `seconds`.
        """
        began = said = time.monotonic()
        while (reason := self._find_awake()) is not None:
            now = time.monotonic()
            if now - began > seconds:
                raise RoleError(f"the engines did not release the GPUs within {seconds:g} s: {reason}")
            if now - said > _SAY_SECONDS:
                said = now
                logger.info(f"waiting for the engines on the trainer's GPUs: {reason}")
            time.sleep(PAUSE_SECONDS)

    def check(self) -> None:
        """Check that all engines sleep, before the trainer uses their GPU memory.

        Raises:
            RoleError: an engine is awake or does not answer.
        """
        for _ in range(TRIES):
            reason = self._find_awake()
            if reason is None:
                return
            if reason.endswith(_IS_AWAKE):
                break
            time.sleep(PAUSE_SECONDS)
        raise RoleError(f"the trainer received a batch while engines used its GPUs: {reason}")

    def _find_awake(self) -> str | None:
        for url in self._urls:
            try:
                asleep = _ask_engine(url + ENGINE_STATUS, self._key).get("asleep")
            except (OSError, ValueError) as error:
                return f"{url}: {getattr(error, 'reason', None) or error}"
            if asleep is not True:
                return f"{url} {_IS_AWAKE}"
        return None


def _ask_engine(url: str, key: str) -> dict[str, object]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=ANSWER_SECONDS) as answer:
        found = json.load(answer)
    return found if isinstance(found, dict) else {}
