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
    """As it was before, afterwards."""
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


def test_nothing_is_collected_meanwhile_and_what_came_is_not_looked_through_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.enable()
    with heap.without_collector():
        assert not gc.isenabled()
        imported = [[]]
        monkeypatch.setitem(sys.modules, "a_new_module", ModuleType("a_new_module"))
    assert gc.isenabled()
    assert not any(found is imported for found in gc.get_objects())


def test_what_is_imported_already_freezes_nothing() -> None:
    with heap.without_collector():
        made = [[]]
    assert any(found is made for found in gc.get_objects())


def test_a_failed_import_leaves_the_collector_on_and_one_that_is_off_stays_off() -> None:
    gc.enable()
    with pytest.raises(ImportError), heap.without_collector():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with heap.without_collector():
        pass
    assert not gc.isenabled()
