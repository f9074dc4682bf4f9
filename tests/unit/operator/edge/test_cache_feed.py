"""Delay between an event and its pass. Renewals with only progress wait until a status can be written."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.protocol.messages import lease_annotations as keys
from rlrun_operator.reconcile.cache_feed import PROGRESS_SETTLE_SECONDS, Feed
from rlrun_operator.reconcile.reconciler import SETTLE_SECONDS
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.state import LONGEST_PROGRESS_SECONDS
from rlrun_operator.times import format_rfc3339

BORN = 1_700_000_000.0
OLD = 3600.0


class Fed:
    """Feed of one run that records the delay of its pass."""

    def __init__(self, age: float, phase: str = "Running", progressing: str = "True") -> None:
        self.waits: list[float] = []
        self.feed = Feed(Store(), None, self._add, now=lambda: BORN + age)  # type: ignore[arg-type]
        conditions = [{"type": "Progressing", "status": progressing}]
        self._version = 0
        metadata = {"creationTimestamp": format_rfc3339(BORN)}
        self._put("RLRun", "run", metadata, status={"phase": phase, "conditions": conditions})
        self.renew(**{keys.ATTEMPT: "1", keys.STEP: "1"})
        self.waits.clear()

    def _add(self, key: Key, seconds: float) -> None:
        assert key == ("team", "run")
        self.waits.append(seconds)

    def _put(self, kind: str, name: str, metadata: dict[str, Any], **more: Any) -> None:
        self._version += 1
        metadata |= {"namespace": "team", "name": name, "uid": f"uid-{name}", "resourceVersion": str(self._version)}
        self.feed.on_object("MODIFIED", {"kind": kind, "metadata": metadata, **more})

    def renew(self, **said: str) -> float | None:
        """Renew the Lease and return the delay of the pass in seconds."""
        labels = {"rlrun.io/run": "run"}
        spec = {"renewTime": f"2026-01-01T00:00:{self._version:02}.000000Z"}
        self._put("Lease", "run-progress", {"annotations": said, "labels": labels}, spec=spec)
        return self.waits[-1] if self.waits else None


def test_progress_renewal_waits_for_next_status_write() -> None:
    old, young = Fed(OLD), Fed(10.0)
    assert old.renew(**{keys.ATTEMPT: "1", keys.STEP: "2"}) == LONGEST_PROGRESS_SECONDS - keys.RENEW_SECONDS
    assert young.renew(**{keys.ATTEMPT: "1", keys.STEP: "2"}) == PROGRESS_SETTLE_SECONDS


@pytest.mark.parametrize(
    "said",
    [
        {keys.ATTEMPT: "2"},
        {keys.STORAGE: "StorageFull: no space"},
        {keys.RESULTS: "a: 1"},
        {keys.RESUMED_FROM_STEP: "9"},
        {keys.START_SECONDS: "{}"},
    ],
)
def test_other_lease_annotations_shorten_the_delay(said: dict[str, str]) -> None:
    assert Fed(OLD).renew(**{keys.ATTEMPT: "1", keys.STEP: "1"} | said) == PROGRESS_SETTLE_SECONDS


@pytest.mark.parametrize("progressing", ["Unknown", "False"])
def test_progress_after_silence_or_hang_shortens_the_delay(progressing: str) -> None:
    assert Fed(OLD, progressing=progressing).renew(**{keys.ATTEMPT: "1", keys.STEP: "2"}) == PROGRESS_SETTLE_SECONDS


def test_first_step_shortens_the_delay() -> None:
    assert Fed(OLD, phase="Starting").renew(**{keys.ATTEMPT: "1", keys.STEP: "2"}) == SETTLE_SECONDS
