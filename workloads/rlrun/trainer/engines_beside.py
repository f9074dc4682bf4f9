"""Turns of the engines that have the trainer's GPUs, checked against the orchestrator. Without torch: stand-ins use it too."""

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
"""Longest wait for the engines' start: they may have to fetch hundreds of gigabytes and compile."""
ANSWER_SECONDS = 10.0
TRIES = 6
PAUSE_SECONDS = 0.5
_SAY_SECONDS = 60.0
_IS_AWAKE = "is awake"


class EnginesBeside:
    """The engines that have this process's GPUs.

    Args:
        urls: of all on this machine.
        api_key: the run's.
    """

    def __init__(self, urls: Sequence[str], api_key: str) -> None:
        self._urls, self._key = [url.rstrip("/") for url in urls], api_key

    def wait_until_asleep(self, seconds: float = START_SECONDS) -> None:
        """Wait until all of them have started, and sleep.

        Raises:
            RoleError: one does not within `seconds`.
        """
        began = said = time.monotonic()
        while (reason := self._awake()) is not None:
            now = time.monotonic()
            if now - began > seconds:
                raise RoleError(f"the engines did not leave the GPUs within {seconds:g} s: {reason}")
            if now - said > _SAY_SECONDS:
                said = now
                logger.info(f"waiting for the engines beside the trainer: {reason}")
            time.sleep(PAUSE_SECONDS)

    def check(self) -> None:
        """Check that they sleep, before their memory is taken.

        Raises:
            RoleError: one is awake, or does not answer.
        """
        for _ in range(TRIES):
            reason = self._awake()
            if reason is None:
                return
            if reason.endswith(_IS_AWAKE):
                break
            time.sleep(PAUSE_SECONDS)
        raise RoleError(f"the trainer was told to train while engines had its GPUs: {reason}")

    def _awake(self) -> str | None:
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
