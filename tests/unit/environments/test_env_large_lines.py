"""Long lines of an environment are decoded in pieces outside of the event loop, with the same result as `json`."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlrun.environments.process import large_json, wire
from rlrun.environments.process.wire import LARGE_BYTES, Document, Lines, WireError, encode_document
from tests.support.waiting import wait_until_async

SMALL_PIECE = 40
CHARACTERS = [
    "a",
    '"',
    "\\",
    "\\\\",
    "\u0001",
    "é",
    "😀",
    "\ud83d",
    "\ude00",
    "{",
    "[",
    ",",
    ":",
    "/",
    "\n",
    " ",
    "u",
    "d83d",
]
TEXTS = st.lists(st.sampled_from(CHARACTERS), max_size=60).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(TEXTS, inner, max_size=8),
    max_leaves=30,
)
DAMAGE = st.lists(
    st.tuples(st.integers(0, 4000), st.sampled_from([b"", b",", b'"', b"[", b"}", b"]", b"\\", b":", b" ", b"1"])),
    max_size=2,
)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "PIECE_BYTES", SMALL_PIECE)
    monkeypatch.setattr(large_json, "_SCAN_BYTES", 64)


def compare(value: Any, ascii_only: bool, indent: int | None, damage: list[tuple[int, bytes]]) -> None:
    data = bytearray(json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass"))
    for at, replacement in damage:
        at = min(at, len(data))
        data[at : at + (not replacement)] = replacement
    try:
        expected = repr(json.loads(bytes(data).decode()))
    except ValueError:
        with pytest.raises(ValueError):
            large_json.decode_json(bytes(data))
    else:
        assert repr(large_json.decode_json(bytes(data))) == expected


@pytest.mark.usefixtures("small_pieces")
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(VALUES, st.booleans(), st.sampled_from([None, 1]), DAMAGE)
def test_decoding_in_pieces_equals_json(
    value: Any, ascii_only: bool, indent: int | None, damage: list[tuple[int, bytes]]
) -> None:
    compare(value, ascii_only, indent, damage)


@pytest.mark.full
@pytest.mark.usefixtures("small_pieces")
@settings(deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(VALUES, st.booleans(), st.sampled_from([None, 1]), DAMAGE)
def test_decoding_in_pieces_equals_json_for_many_values(
    value: Any, ascii_only: bool, indent: int | None, damage: list[tuple[int, bytes]]
) -> None:
    compare(value, ascii_only, indent, damage)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("filler", ["\u0001", "\\", '"', "😀", "é", "\\\\u", "\ud83d", "\ude00\ud83d", "a\\"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_text_is_split_between_characters(filler: str, ascii_only: bool) -> None:
    for offset in range(13):
        text = "x" * offset + filler * 60
        if not ascii_only and any("\ud800" <= character <= "\udfff" for character in filler):
            continue  # not valid in UTF-8
        document = json.dumps([text], ensure_ascii=ascii_only)
        assert large_json.decode_json(document.encode()) == json.loads(document)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "text",
    [
        "[1]" + " " * 60 + "[2]",
        '{"a":1,' + " " * 60 + "}",
        '{1:"' + "x" * 60 + '"}',
        '["' + "x" * 60,
        "[" * 60,
        '{"a"' + " " * 60 + "}",
    ],
)
def test_damaged_documents_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        large_json.decode_json(text.encode())


LARGE: Document = {"op": "played", "info": {"x": ["word " * 40_000, [1.5] * 60_000, {"a": [[]] * 60_000}]}}


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, threading.Thread]]:
    """Record the length and the thread of each decoder call."""
    calls: list[tuple[int, threading.Thread]] = []

    def decode(text: str) -> Any:
        calls.append((len(text), threading.current_thread()))
        return json.loads(text)

    monkeypatch.setattr(wire, "_from_json", decode)
    monkeypatch.setattr(large_json, "_from_json", decode)
    return calls


class End:
    """Connection of the orchestrator, which records received documents."""

    def __init__(self) -> None:
        self.received: list[Document] = []
        self.threads: set[threading.Thread] = set()
        self.lost: list[WireError | None] = []
        self.lines = Lines(self.receive, self.lost.append)

    def receive(self, document: Document) -> None:
        self.received.append(document)
        self.threads.add(threading.current_thread())


@asynccontextmanager
async def connected() -> Any:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    end = End()
    await asyncio.get_running_loop().create_unix_connection(lambda: end.lines, sock=ours)
    _, writer = await asyncio.open_unix_connection(sock=theirs)
    try:
        yield end, writer
    finally:
        end.lines.close()
        if not writer.is_closing():
            writer.transport.abort()


async def test_documents_arrive_in_order_before_connection_end(decoded: list[tuple[int, threading.Thread]]) -> None:
    async with connected() as (end, writer):
        for number in range(3):
            writer.write(
                encode_document(LARGE | {"rollout": number}) + encode_document({"op": "failed", "rollout": number})
            )
        writer.close()
        await wait_until_async(lambda: end.lost)
        assert [(found["op"], found["rollout"]) for found in end.received] == [
            (op, number) for number in range(3) for op in ("played", "failed")
        ]
        assert end.received[2] == LARGE | {"rollout": 1}
        assert (end.lost, end.lines.busy) == ([None], False)
    here = threading.current_thread()
    assert end.threads == {here}
    assert max(size for size, _ in decoded) <= LARGE_BYTES + 2
    assert {thread for size, thread in decoded if size > 1000}.isdisjoint({here})


async def test_small_documents_are_received_immediately(decoded: list[tuple[int, threading.Thread]]) -> None:
    end = End()
    end.lines.data_received(encode_document({"op": "pong"}))
    assert end.received == [{"op": "pong"}]


async def test_protocol_error_is_reported_once_and_ends_reception() -> None:
    async with connected() as (end, writer):
        writer.write(encode_document(LARGE)[:-5] + b"\n" + encode_document({"op": "failed"}))
        await wait_until_async(lambda: end.lost)
        await asyncio.sleep(0)
        assert len(end.lost) == 1
        assert "invalid message" in str(end.lost[0])
        assert end.received == []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Event that lets the decoder continue."""
    event = threading.Event()

    def decode(line: bytes) -> Any:
        assert event.wait(60)
        return json.loads(line)

    monkeypatch.setattr(large_json, "decode_json", decode)
    return event


async def test_closed_connection_receives_nothing(gate: threading.Event) -> None:
    async with connected() as (end, writer):
        writer.write(encode_document(LARGE) + encode_document({"op": "failed"}))
        await wait_until_async(lambda: end.lines.busy)
        end.lines.close()
        gate.set()
        await wait_until_async(lambda: end.lost)
        await asyncio.sleep(0.05)
        assert (end.received, end.lost, end.lines.busy) == ([], [None], False)


async def test_fast_sender_is_blocked_by_slow_decoder(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    monkeypatch.setattr(wire, "MAX_LINE_BYTES", 2 * len(encode_document(LARGE)))
    async with connected() as (end, writer):
        writer.write(encode_document(LARGE) * 8)
        await wait_until_async(lambda: not end.lines._transport.is_reading())
        held = end.lines._queued
        assert held < 4 * len(encode_document(LARGE))
        gate.set()
        await wait_until_async(lambda: len(end.received) == 8)


def test_document_without_event_loop_is_decoded_immediately() -> None:
    end = End()
    end.lines.data_received(encode_document(LARGE))
    assert end.received == [LARGE]


def members(count: int, messages: int, characters: int) -> list[Document]:
    said = [{"role": "assistant", "content": "é\ud83d" + "x" * characters}] * messages
    return [{"messages": said, "replies": messages, "reward": 0.5, "metrics": {"a": 1.0}} for _ in range(count)]


@pytest.mark.parametrize(("count", "messages", "characters"), [(0, 0, 0), (1, 0, 0), (3, 2, 4), (4, 3, LARGE_BYTES)])
async def test_encoded_list_equals_line_of_whole_document(count: int, messages: int, characters: int) -> None:
    group = members(count, messages, characters)
    line = await wire.encode_list({"op": "compare", "rollout": 7}, "members", group)
    assert line.endswith(b"\n")
    assert json.loads(line) == {"op": "compare", "rollout": 7, "members": group}


async def test_large_list_is_encoded_outside_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message is encoded in its own call, because a call holds the interpreter lock."""
    calls: list[tuple[str, int]] = []
    to_json = wire._to_json

    def record(value: Any) -> str:
        text = to_json(value)
        calls.append((threading.current_thread().name, len(text)))
        return text

    monkeypatch.setattr(wire, "_to_json", record)
    await wire.encode_list({"op": "compare"}, "members", members(4, 3, LARGE_BYTES))
    assert {name.split("_")[0] for name, _ in calls} == {"wire"}
    assert max(length for _, length in calls) < 2 * LARGE_BYTES
