"""The rule of unit tests is held: nothing outside of this process, and nothing that takes seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.unit.conftest import guard, impure


def connect() -> None:
    with socket.socket() as client:
        client.connect(("192.0.2.1", 80))


FORBIDDEN: dict[str, Callable[[], object]] = {
    "starts a process (subprocess.Popen)": lambda: subprocess.run([sys.executable, "-c", ""]),
    "starts a process (os.fork)": os.fork,
    "connects to ('192.0.2.1', 80)": connect,
    "imports transformers": lambda: __import__("transformers"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_unit_test_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with guard.watching() as refused, pytest.raises(RuntimeError, match=r"see tests/unit/conftest\.py"):
        FORBIDDEN[what]()
    assert refused == [what]


def test_what_was_refused_counts_when_the_code_swallows_the_error() -> None:
    with guard.watching() as refused, suppress(RuntimeError):
        os.fork()
    assert refused == ["starts a process (os.fork)"]


@pytest.mark.parametrize("address", [("127.0.0.1", 1), ("127.3.2.1", 1), ("::1", 1, 0, 0), "/tmp/x/socket"])
def test_a_test_may_talk_to_itself(address: object) -> None:
    assert impure("socket.connect", (None, address)) is None
