"""The purity guard of unit tests refuses actions outside of this process and slow imports."""

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
def test_impure_action_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with guard.watching() as refused, pytest.raises(RuntimeError, match=r"see tests/unit/conftest\.py"):
        FORBIDDEN[what]()
    assert refused == [what]


def test_refused_action_counts_if_error_is_caught() -> None:
    with guard.watching() as refused, suppress(RuntimeError):
        os.fork()
    assert refused == ["starts a process (os.fork)"]


@pytest.mark.parametrize("address", [("127.0.0.1", 1), ("127.3.2.1", 1), ("::1", 1, 0, 0), "/tmp/x/socket"])
def test_may_connect_to_itself(address: object) -> None:
    assert impure("socket.connect", (None, address)) is None
