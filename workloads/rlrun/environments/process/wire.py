"""Messages between an environment's process and the orchestrator: JSON documents, one a line, over a socket pair.

JSON and not msgpack, because the other side may be another Python with nothing installed but the environment's own
packages. Each document has an `op`.

To the process:

    load      id, args                                     first, once
    play      rollout, split, index, timeout_seconds, reward_seconds
    compare   rollout, split, index, members, timeout_seconds, reward_seconds
              a group; members: messages, replies, reward, metrics of each
    reply     rollout, call, and the fields of `Reply`     answers `complete`
    refused   rollout, call, message                           answers `complete`: the model cannot
    cancel    rollout
    ping      number

From the process:

    ready     id, single_turn, compares, train, eval       answers `load`: sizes of the splits
    unusable  message                                      answers `load`
    complete  rollout, call, messages, max_tokens, stop, tools
    abandon   rollout, call                                the environment waits no longer for this reply
    played    rollout, task_id, messages, replies, info, reward, metrics
    compared  rollout, rewards, metrics                    answers `compare`: lists, one item for each member
    failed    rollout, kind, task_id, message              answers `play` and `compare`
    pong      number
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

Document = dict[str, Any]

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longer documents are a fault of the environment."""


class WireError(Exception):
    """Error for a received text that is no document of this protocol."""


_to_json = json.JSONEncoder(separators=(",", ":")).encode
"""Bound here, as `_from_json`: user code that replaces `json.dumps` changes neither."""
_from_json = json.JSONDecoder().decode


def encode(document: Document) -> bytes:
    """A document of plain JSON values as a line."""
    return _to_json(document).encode() + b"\n"


class Lines(asyncio.Protocol):
    """One end of the connection.

    Args:
        receive: gets each document, in order.
        lost: called once, when the other end is gone (None) or broke the protocol.
    """

    def __init__(self, receive: Callable[[Document], None], lost: Callable[[WireError | None], None]) -> None:
        self._receive, self._lost = receive, lost
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._waiting = 0
        self._broken: WireError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        *whole, rest = data.split(b"\n")
        try:
            if whole:
                whole[0] = b"".join([*self._parts, whole[0]])
                self._parts, self._waiting = [], 0
                for line in whole:
                    self._receive(_decode(line))
            if rest:
                self._parts.append(rest)
                self._waiting += len(rest)
                if self._waiting > MAX_LINE_BYTES:
                    raise WireError(f"a message has more than {MAX_LINE_BYTES} bytes")
        except WireError as error:
            self._broken = error
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost(self._broken)

    def send(self, document: Document) -> None:
        """Send a document; nothing happens when the other end is gone."""
        self.send_line(encode(document))

    def send_line(self, line: bytes) -> None:
        """Send what `encode` made."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(line)

    def forget(self) -> None:
        """Send nothing any more, without a word to the other end: for a copy of this in a forked child."""
        self._transport = None

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort()


def _decode(line: bytes) -> Document:
    try:
        document = _from_json(line.decode())
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("op"), str):
        raise WireError(f"it sent what is no message: {line[:80]!r}")
    return document
