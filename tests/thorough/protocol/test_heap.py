"""Full garbage collections: loaded and long-lived objects are visited once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from rlrun.diagnostics import heap

HELD = 600_000
"""Number of objects of 7,000 rollouts in flight."""
SLICE = 200_000
"""Largest number of objects per collection: about 100 ms on a slow core."""


class _Node:
    def __init__(self) -> None:
        self.itself = self


class _Plain:
    """Object outside of any cycle."""


@pytest.fixture
def slices() -> Iterator[heap.Slices]:
    found = heap.Slices()
    found.begin()
    yield found
    found.end()


def test_loaded_objects_are_frozen_after_collection() -> None:
    gc.disable()  # otherwise another collection would delete the garbage
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
def test_collection_does_not_visit_all_rollouts(loaded: int, request: pytest.FixtureRequest) -> None:
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
def test_frozen_object_is_freed_without_references() -> None:
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


def test_frozen_cycle_is_collected_after_memory_growth(slices: heap.Slices, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_resident_bytes_count_this_process(slices: heap.Slices) -> None:
    before = slices.resident_bytes()
    block = b"x" * (64 * 1024**2)
    assert slices.resident_bytes() - before > len(block) // 2
