"""Scripted policy, folder of small verifiers tasksets, and a guard against sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlrun.environments import Message, Reply
from rlrun.environments.protocol import Tool
from rlrun.orchestrator.rollouts.message_forms import parse_text

Script = Sequence[str | Reply | Exception] | Callable[[Sequence[Message]], str]


class ScriptedModel:
    """Model that returns the replies of a script and records each conversation."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.seen: list[list[Message]] = []
        self.offered: list[list[Tool]] = []
        """Tools of each request that had tools."""
        self._calls = 0

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
    ) -> Reply:
        if self.seen:
            assert list(messages[: len(self.seen[-1])]) == self.seen[-1], "a conversation may only grow"
        said = self._script(messages) if callable(self._script) else self._script[len(self.seen)]
        self.seen.append([dict(message) for message in messages])
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Reply) or tools is None:
            return said if isinstance(said, Reply) else Reply(said)
        self.offered.append(list(tools))
        taken = await parse_text((), said, tools)
        calls = taken.calls_as_messages(self._calls)
        self._calls += len(calls)
        return Reply(said, tool_calls=tuple(calls), content=taken.content)


@pytest.fixture
def scripted() -> type[ScriptedModel]:
    return ScriptedModel


@pytest.fixture
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "tasksets"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse each connection, bind and name lookup, including loopback; assert at the end of the test that none was tried."""
    tried: list[str] = []

    def forbid(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(target: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(target, socket.socket) and target.family not in (socket.AF_INET, socket.AF_INET6):
                return original(target, *args, **kwargs)
            tried.append(f"{name} {args or target}")
            raise OSError(f"the test forbids {tried[-1]}")

        return guarded

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, forbid(name, getattr(socket.socket, name)))
    monkeypatch.setattr(socket, "getaddrinfo", forbid("getaddrinfo", socket.getaddrinfo))
    yield
    assert tried == []
