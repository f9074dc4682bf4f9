"""Imports without the garbage collector."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from rlrun.diagnostics import heap


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Restore the state of the collector after the test."""
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


def test_without_collector_freezes_newly_imported_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.enable()
    with heap.without_collector():
        assert not gc.isenabled()
        imported = [[]]
        monkeypatch.setitem(sys.modules, "a_new_module", ModuleType("a_new_module"))
    assert gc.isenabled()
    assert not any(found is imported for found in gc.get_objects())


def test_without_collector_without_import_freezes_nothing() -> None:
    with heap.without_collector():
        made = [[]]
    assert any(found is made for found in gc.get_objects())


def test_without_collector_restores_previous_state_after_error() -> None:
    gc.enable()
    with pytest.raises(ImportError), heap.without_collector():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with heap.without_collector():
        pass
    assert not gc.isenabled()
