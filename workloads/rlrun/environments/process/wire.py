"""Messages between an environment's process and the orchestrator: JSON documents, one per line, over a socket pair.

The format is JSON, not msgpack, because the process may be another Python that has only the environment's own packages. Each document has
a field `op`.

To the process:

    load      id, args                                     first, once
    play      rollout, split, index, timeout_seconds, reward_seconds
    compare   rollout, split, index, members, timeout_seconds, reward_seconds
              a group; members: messages, replies, reward, metrics of each
    reply     rollout, call, and the fields of `Reply`     answers `complete`
    refused   rollout, call, message                           answers `complete`: the model client failed
    cancel    rollout
    ping      number

From the process:

    ready     id, single_turn, compares, train, eval       answers `load`: sizes of the splits
    unusable  message                                      answers `load`
    complete  rollout, call, messages, max_tokens, stop, tools
    abandon   rollout, call                                the environment no longer waits for this reply
    played    rollout, task_id, messages, replies, info, reward, metrics
    compared  rollout, rewards, metrics                    answers `compare`: lists, one item for each member
    failed    rollout, kind, task_id, message              answers `play` and `compare`
    pong      number
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

Document = dict[str, Any]

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Largest size of a document. A longer one is a fault of the environment."""
LARGE_BYTES = 1 << 17
"""Largest size of documents that are decoded in the event loop, in 1 to 3 ms."""
_POOL = ThreadPoolExecutor(2, thread_name_prefix="wire")
"""Threads for large documents. They are separate from `rlrun.runtime.background_compute`, where they would delay the prompts of all
environments."""


class WireError(Exception):
    """Error for received data that is not a document of this protocol."""


_to_json = json.JSONEncoder(separators=(",", ":")).encode
"""Bound at import, like `_from_json`, so that user code that replaces `json.dumps` does not change them."""
_from_json = json.JSONDecoder().decode


def encode_document(document: Document) -> bytes:
    """Return a document of plain JSON values as a line."""
    return _to_json(document).encode() + b"\n"


async def encode_list(document: Document, name: str, items: Sequence[Document]) -> bytes:
    """Return the line of a document with an additional field, a list of any length.

    Large lists are encoded in a thread, one item and one message at a time, because each call of `json` holds the interpreter's lock.

    Args:
        document: other fields of the document.
        name: name of the list.
        items: items of the list; the field `messages` of an item is a list.
    """

    def pieces() -> Iterator[str]:
        yield f"{_to_json(document)[:-1]},{_to_json(name)}:["
        for number, item in enumerate(items):
            rest = {key: value for key, value in item.items() if key != "messages"}
            yield f'{"," if number else ""}{_to_json(rest)[:-1]},"messages":['
            for place, message in enumerate(item["messages"]):
                yield ("," if place else "") + _to_json(message)
            yield "]}"
        yield "]}\n"

    def joined() -> bytes:
        return b"".join(piece.encode() for piece in pieces())

    if sum(len(str(message.get("content") or "")) for item in items for message in item["messages"]) <= LARGE_BYTES:
        return joined()
    return await asyncio.get_running_loop().run_in_executor(_POOL, joined)


class Lines(asyncio.Protocol):
    """One end of the connection.

    Args:
        receive: function that gets each document, in order.
        lost: function that is called once, after all documents. It gets None if the other end closed the connection, or the error if the
            other end violated the protocol.
        apart: whether documents of more than `LARGE_BYTES` are decoded in a thread, in pieces. In one call they would block the event
            loop.
    """

    def __init__(
        self,
        receive: Callable[[Document], None],
        lost: Callable[[WireError | None], None],
        *,
        apart: bool = True,
    ) -> None:
        self._receive, self._on_connection_lost, self._apart = receive, lost, apart
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._waiting = 0
        """Size of the incomplete line in bytes."""
        self._broken: WireError | None = None
        self._queue: deque[list[bytes]] = deque()
        """Lines (in parts) that wait until the current one is decoded."""
        self._queued = 0
        """Size of these lines and of the current one, in bytes."""
        self._decoding: asyncio.Future[Document] | None = None
        self._settled = asyncio.Event()
        self._settled.set()
        self._closed = self._gone = self._reported = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        *whole, rest = data.split(b"\n")
        # Each newline ends a line, whose first part may have arrived earlier.
        try:
            for line in whole:
                parts, self._parts, self._waiting = [*self._parts, line], [], 0
                self._take_line(parts)
            # The rest waits for its newline. The limit is checked here, too, because a line may never end.
            if rest:
                self._parts.append(rest)
                self._waiting += len(rest)
                if self._waiting > MAX_LINE_BYTES:
                    raise WireError(f"a message has more than {MAX_LINE_BYTES} bytes")
        except WireError as error:
            self._fail_connection(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._gone = True
        self._report_loss()

    def _report_loss(self) -> None:
        if self._gone and not self._reported and self._settled.is_set():
            self._reported = True
            self._on_connection_lost(self._broken)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were sent and that the other end has not received yet."""
        transport = self._transport  # another thread may call this while the connection is lost
        return 0 if transport is None else transport.get_write_buffer_size()

    @property
    def busy(self) -> bool:
        """Whether received documents are not decoded yet."""
        return not self._settled.is_set()

    async def settled(self) -> None:
        """Wait until all received documents are decoded and passed on."""
        await self._settled.wait()

    def _take_line(self, parts: list[bytes]) -> None:
        size = sum(map(len, parts))
        if self._settled.is_set() and (size <= LARGE_BYTES or not self._apart):
            # Fast path: a small document is decoded immediately, unless earlier documents are still being decoded.
            self._receive(_decode_line(parts, in_pieces=False))
            return
        # Slow path: later documents wait, so that they are received in order. Reading pauses if too many bytes wait.
        self._queue.append(parts)
        self._queued += size
        self._settled.clear()
        if self._queued > MAX_LINE_BYTES and self._transport is not None:
            self._transport.pause_reading()
        if self._decoding is None:
            self._decode_waiting()

    def _decode_waiting(self) -> None:
        """Decode waiting lines, up to the next one that needs a thread."""
        while self._queue:
            parts = self._queue.popleft()
            size = sum(map(len, parts))
            decode = partial(_decode_line, parts, in_pieces=size > LARGE_BYTES)
            if size <= LARGE_BYTES:
                document = decode()
            elif (loop := _running_loop()) is not None:
                self._decoding = loop.run_in_executor(_POOL, decode)
                self._decoding.add_done_callback(partial(self._on_decoded, size))
                return
            else:  # no event loop is running, so the caller waits for the thread
                document = _POOL.submit(decode).result()
            self._queued -= size
            self._receive(document)
        self._settled.set()
        self._report_loss()

    def _on_decoded(self, size: int, decoding: asyncio.Future[Document]) -> None:
        self._decoding = None
        if decoding.cancelled():  # the event loop is closing
            return
        error = decoding.exception()
        if self._closed:
            return
        self._queued -= size
        try:
            if error is not None:
                raise error
            self._receive(decoding.result())
            self._decode_waiting()
        except WireError as broken:
            self._fail_connection(broken)
        # Reading resumes only after the waiting documents fit into the limit again.
        if self._queued <= MAX_LINE_BYTES and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _fail_connection(self, error: WireError) -> None:
        self._broken = error
        self.close()
        self._report_loss()

    def send(self, document: Document) -> None:
        """Send a document. Does nothing if the connection is closed."""
        self.send_line(encode_document(document))

    def send_line(self, line: bytes) -> None:
        """Send a line from `encode_document` or `encode_list`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(line)

    def stop_sending(self) -> None:
        """Stop sending without closing the connection, for the copy of this object in a forked child."""
        self._transport = None

    def close(self) -> None:
        """Close the connection. Unreceived documents are dropped."""
        self._closed = True
        self._queue.clear()
        self._settled.set()
        if self._transport is not None:
            self._transport.abort()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _decode_line(parts: list[bytes], *, in_pieces: bool) -> Document:
    line = b"".join(parts)
    try:
        document = _in_pieces(line) if in_pieces else _from_json(line.decode())
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("op"), str):
        raise WireError(f"it sent an invalid message: {line[:80]!r}")
    return document


def _in_pieces(line: bytes) -> Any:
    try:
        from rlrun.environments.process import (
            large_json,
        )  # imported here because an environment's Python may have no numpy
    except ImportError:
        return _from_json(line.decode())
    return large_json.decode_json(line)
