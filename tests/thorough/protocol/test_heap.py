"""Full collections: objects that are loaded or live long are visited once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from rlrun.diagnostics import heap

HELD = 600_000
"""Objects, as of 7,000 rollouts in flight."""
SLICE = 200_000
"""Most objects that one collection may visit: some 100 ms on a slow core."""


class _Node:
    def __init__(self) -> None:
        self.itself = self


class _Plain:
    """In no cycle."""


@pytest.fixture
def slices() -> Iterator[heap.Slices]:
    found = heap.Slices()
    found.begin()
    yield found
    found.end()


def test_what_is_there_is_spared_after_what_is_garbage_is_gone() -> None:
    gc.disable()  # so that nobody else takes the garbage away
    try:
        garbage = weakref.ref(_Node())
        kept = _Node()
        heap.freeze_loaded()
        assert garbage() is None
        assert gc.get_freeze_count() > 0
        assert not any(known is kept for known in gc.get_objects())
        later = _Node()
        assert any(known is later for known in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize(
    "loaded",
    [pytest.param(0, id="little-loaded"), pytest.param(4_000_000, id="much-loaded", marks=pytest.mark.full)],
)
def test_no_collection_visits_all_that_many_rollouts_hold(loaded: int, request: pytest.FixtureRequest) -> None:
    tasks = [[number] for number in range(loaded)]
    request.getfixturevalue("slices")
    visited: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2:
            visited.append(len(gc.get_objects()))

    gc.callbacks.append(note)
    try:
        held = [[number] for number in range(HELD)]
        assert len(visited) > 2, "no full collection was due"
        assert max(visited) < SLICE
        assert len(held) == HELD
        assert len(tasks) == loaded
    finally:
        gc.callbacks.remove(note)


@pytest.mark.usefixtures("slices")
def test_what_is_frozen_is_freed_when_nobody_holds_it() -> None:
    kept = _Plain()
    gc.collect()
    gone = weakref.ref(kept)
    assert not any(known is kept for known in gc.get_objects())
    gc.disable()
    try:
        del kept
        assert gone() is None
    finally:
        gc.enable()


def test_a_cycle_that_closes_through_what_is_frozen_goes_once_memory_has_grown(
    slices: heap.Slices, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = _Node()
    gc.collect()
    gone = weakref.ref(node)
    del node
    gc.collect()
    gc.collect()
    assert gone() is not None, "it was visited again though nothing had grown"
    grown = slices.resident_bytes() + heap.GROWTH_BYTES + 1
    monkeypatch.setattr(slices, "resident_bytes", lambda: grown)
    gc.collect()
    gc.collect()
    assert gone() is None
    assert slices.whole == 1
    gc.collect()
    gc.collect()
    assert slices.whole == 1, "what has not grown since is not visited again"


def test_the_memory_that_counts_is_this_processs(slices: heap.Slices) -> None:
    before = slices.resident_bytes()
    block = b"x" * (64 * 1024**2)
    assert slices.resident_bytes() - before > len(block) // 2
