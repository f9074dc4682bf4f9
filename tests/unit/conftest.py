"""Purity guard of the unit tests: no process, no network, no torch, little time.

Tests that need more belong to `tests/processes`, `tests/tensors` or `tests/thorough`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SECONDS = 20.0
"""Maximum CPU time of one test. The intended time is 0.1 s; on a busy machine the slowest test takes 2 s."""
PROCESSES = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
"""Audit events of all functions that start a process."""
TENSORS = frozenset({"torch", "transformers", "vllm"})
"""Packages that take seconds to import."""
HERE = Path(__file__).parent


class Guard:
    """Audit hook that refuses forbidden actions while it is active, and records them, because the tested code may catch the error."""

    def __init__(self) -> None:
        self.on = False
        self.refused: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Check one audit event of this interpreter (PEP 578).

        Raises:
            RuntimeError: the action belongs to another tier of tests.
        """
        if self.on and (what := impure(event, arguments)) is not None:
            self.refused.append(what)
            raise RuntimeError(f"a unit test {what}; see tests/unit/conftest.py")

    @contextmanager
    def watching(self) -> Iterator[list[str]]:
        """Activate the guard and yield the list of refused actions."""
        before, self.on, self.refused = (self.on, self.refused), True, []
        try:
            yield self.refused
        finally:
            self.on, self.refused = before


def impure(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Return the name of a forbidden action by audit event, or None if the action is allowed."""
    if event in PROCESSES:
        return f"starts a process ({event})"
    if event == "import" and arguments[0] in TENSORS:
        return f"imports {arguments[0]}"
    if event == "socket.connect" and not _own(arguments[1]):
        return f"connects to {arguments[1]}"
    return None


def _own(address: object) -> bool:
    """Return whether only this process can listen at the address. A path is a socket in a test's own folder."""
    return not isinstance(address, tuple) or str(address[0]).startswith(("127.", "::1", "localhost"))


guard = Guard()
sys.addaudithook(guard)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Guard the import of test modules."""
    if not collector.path.is_relative_to(HERE):
        return (yield)
    with guard.watching():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Fail a test that attempted a refused action or exceeded its CPU time."""
    began = time.process_time()
    with guard.watching() as refused:
        result = yield
    assert not refused, f"{item.nodeid} {refused[0]}; see tests/unit/conftest.py"
    seconds = time.process_time() - began
    assert seconds < SECONDS, (
        f"{item.nodeid} computed for {seconds:.1f} s, {SECONDS} are allowed; move it to tests/thorough"
    )
    return result
