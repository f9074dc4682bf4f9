"""Journal of rollouts: file format, and flushes from the event loop."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from orch_journal_world import a_rollout
from orch_simulation import begin, make_config

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.orchestrator.journal import journal_writer
from rlrun.orchestrator.journal import journal_writer as journal_module
from rlrun.orchestrator.journal.frames import DroppedEntry, Entry, RolloutEntry, groups_of, read_segment
from rlrun.orchestrator.journal.journal_writer import (
    OF_A_ROLLOUT,
    OF_AN_ENVIRONMENT,
    Journal,
    SegmentWriter,
    remove_settled,
    rollout_fingerprint,
)
from rlrun.orchestrator.journal.recovery import read_journal
from rlrun.protocol.files.attempts import first_attempt, write_attempt
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import SLOW_SECONDS, RefusedError, Volume
from rlrun.runtime import exit_codes


def entry(group: int, member: int = 0, text: str = "é\ud800") -> RolloutEntry:
    return RolloutEntry(group, member, "e", 5, 3, 0.7, a_rollout([3, 4], 1 / 3, text=text))


DROPPED = DroppedEntry(9, "zero_variance", 0.25, 11, 4)


def writer_of(folder: Path, attempt: int = 1, **changes: int) -> SegmentWriter:
    return SegmentWriter(RunPaths(folder), attempt=attempt, fingerprint="f", **changes)


def same(a: Entry, b: Entry) -> bool:
    if isinstance(a, DroppedEntry) or isinstance(b, DroppedEntry):
        return a == b
    columns = ("input_ids", "loss_mask", "logprobs", "versions")
    for one, other in zip(a.rollout.sequences, b.rollout.sequences, strict=True):
        for name in columns:
            left, right = getattr(one, name), getattr(other, name)
            if left.dtype != right.dtype or left.tobytes() != right.tobytes():
                return False
    rest = [{k: v for k, v in vars(e.rollout).items() if k != "sequences"} for e in (a, b)]
    own = [{k: v for k, v in vars(e).items() if k != "rollout"} for e in (a, b)]
    return rest[0] == rest[1] and own[0] == own[1]


def test_journal_returns_written_entries(tmp_path: Path) -> None:
    writer, written = writer_of(tmp_path), [entry(1), DROPPED, entry(1 << 40, 7)]
    writer.write(written[:1])
    writer.write(written[1:])
    writer.close()
    [segment] = RunPaths(tmp_path).journal_on_disk()
    content = read_segment(segment.path)
    assert segment.path.name == "segment_00000001.a0001"
    assert content.head is not None
    assert content.head.fingerprint == "f"
    assert content.torn == 0
    assert all(map(same, content.entries, written))
    assert len(content.entries) == 3
    assert groups_of(segment.path) == {1, 9, 1 << 40}


def test_truncated_journal_returns_its_complete_records(tmp_path: Path) -> None:
    writer, sizes = writer_of(tmp_path), []
    path = RunPaths(tmp_path).journal_segment(1, 1)
    written: list[Entry] = [entry(1), entry(2), DROPPED]
    for one in written:
        writer.write([one])
        sizes.append(path.stat().st_size)
    whole = path.read_bytes()
    for end in sorted(
        {*range(0, len(whole), 9), *sizes, *(size - 1 for size in sizes), *(size + 1 for size in sizes[:-1])}
    ):
        path.write_bytes(whole[:end])
        content = read_segment(path)
        assert len(content.entries) == sum(size <= end for size in sizes)
        assert all(map(same, content.entries, written))
        assert groups_of(path) <= {1, 2, 9}
        path.write_bytes(whole[:end] + bytes(40))  # the file grew, but its content is not written yet
        assert len(read_segment(path).entries) <= sum(size <= end + 40 for size in sizes)


def test_damaged_record_hides_only_later_records(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    path = RunPaths(tmp_path).journal_segment(1, 1)
    writer.write([entry(1)])
    first = path.stat().st_size
    writer.write([entry(2), entry(3)])
    whole = path.read_bytes()
    for place in range(first, first + 60, 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        content = read_segment(path)
        assert [e.group for e in content.entries] == [1]
        assert content.torn > 0


def test_full_segment_is_followed_by_new_one_per_attempt(tmp_path: Path) -> None:
    old, new = writer_of(tmp_path, 1), writer_of(tmp_path, 2, segment_bytes=1)
    old.write([entry(0)])
    new.write([entry(1)])
    new.write([entry(2)])
    old.write([entry(3)])  # a late writer of an ended attempt
    found = RunPaths(tmp_path).journal_on_disk()
    assert [(s.attempt, s.number, groups_of(s.path)) for s in found] == [(1, 1, {0, 3}), (2, 1, {1}), (2, 2, {2})]


def test_cleanup_deletes_only_segments_of_settled_groups(tmp_path: Path) -> None:
    old, new = writer_of(tmp_path, 1), writer_of(tmp_path, 2, segment_bytes=1)
    old.write([entry(0), entry(4)])
    for group in (1, 2, 3):
        new.write([entry(group)])
    removed = remove_settled(new.rotate(), {0, 1, 3}.__contains__)
    assert [(s.attempt, s.number) for s in removed] == [(2, 1), (2, 3)]
    new.write([entry(5)])
    assert [(s.attempt, s.number) for s in RunPaths(tmp_path).journal_on_disk()] == [(1, 1), (2, 2), (2, 3)]
    assert remove_settled(RunPaths(tmp_path).journal_on_disk(), lambda _: True)
    assert RunPaths(tmp_path).journal_on_disk() == []


class Held(SegmentWriter):
    """Journal writer that blocks until the test releases it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(RunPaths(folder), attempt=1, fingerprint="f")
        self.go = threading.Semaphore(0)

    def write(self, entries: object) -> None:
        self.go.acquire()
        super().write(entries)  # type: ignore[arg-type]


async def test_rollouts_during_flush_share_the_next_durable_flush(
    tmp_path: Path,
) -> None:
    writer = Held(tmp_path)
    journal = Journal(writer, Volume(tmp_path))
    path = RunPaths(tmp_path).journal_segment(1, 1)
    tasks = [asyncio.create_task(journal.add(entry(0)))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the first flush has its entries
    tasks += [asyncio.create_task(journal.add(entry(group))) for group in range(1, 50)]
    await asyncio.sleep(0)
    tasks[7].cancel()  # this rollout is already too old, but finished rollouts are written in any case
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks if task is not tasks[7])
    writer.go.release()
    await tasks[0]
    assert groups_of(path) == {0}
    assert not tasks[1].done()
    writer.go.release()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert journal.flushes == 2
    assert groups_of(path) == set(range(50))
    await journal.close()


async def test_journal_close_writes_pending_notes(tmp_path: Path) -> None:
    journal = Journal(writer_of(tmp_path), Volume(tmp_path))
    journal.note(DROPPED)
    await journal.close()
    assert groups_of(RunPaths(tmp_path).journal_segment(1, 1)) == {9}


class Full:
    """Volume that refuses one kind of call until it is released; a refused write leaves half of its bytes."""

    def __init__(self, patch: pytest.MonkeyPatch, failing: str) -> None:
        self.full, self.refused = True, threading.Semaphore(0)
        real, real_write = getattr(os, failing), os.write

        def call(*arguments: Any, **options: Any) -> Any:
            if not self.full:
                return real(*arguments, **options)
            if failing == "write" and len(arguments[1]) > 1:
                return real_write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            self.refused.release()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(journal_module.os, failing, call)


FAILING = ["open", "fdatasync", "fsync", "write"]


@pytest.mark.parametrize("failing", FAILING)
async def test_full_volume_delays_rollouts_without_loss_or_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    paths, volume = RunPaths(tmp_path), Volume(tmp_path)
    journal = Journal(writer_of(tmp_path), volume)
    await journal.add(entry(0))
    await journal.collect(lambda group: False)  # the next record starts a new file
    full = Full(monkeypatch, failing)
    tasks = [asyncio.create_task(journal.add(entry(g))) for g in range(1, 4)]
    for _ in range(2):
        assert await asyncio.to_thread(full.refused.acquire, timeout=60)
    trouble = volume.trouble()
    assert trouble is not None
    assert (trouble.reason, trouble.blocks) == ("StorageFull", True)
    assert "the volume is full" in trouble.text
    assert "cannot write finished rollouts since" in trouble.text
    assert not any(task.done() for task in tasks)
    assert {g for s in paths.journal_on_disk() for e in read_segment(s.path).entries for g in [e.group]} <= {0, 1, 2, 3}
    full.full = False
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)
    assert volume.trouble() is None
    await journal.close()
    found = [e.group for s in paths.journal_on_disk() for e in read_segment(s.path).entries]
    assert sorted(found) == [0, 1, 2, 3]


@pytest.mark.parametrize("failing", FAILING)
async def test_journal_close_does_not_wait_for_full_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    journal = Journal(writer_of(tmp_path), Volume(tmp_path))
    full = Full(monkeypatch, failing)
    waiting = asyncio.create_task(journal.add(entry(1)))
    assert await asyncio.to_thread(full.refused.acquire, timeout=60)
    async with asyncio.timeout(60):
        await journal.close()
    with pytest.raises(RefusedError) as told:
        await waiting
    assert told.value.code == exit_codes.STORAGE
    assert str(tmp_path) in str(told.value)
    with pytest.raises(RefusedError):
        journal.note(DROPPED)


async def test_journal_close_does_not_wait_for_hanging_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "CLOSE_SECONDS", 0.1)
    writer = Held(tmp_path)
    now = [0.0]
    volume = Volume(tmp_path, clock=lambda: now[0])
    journal = Journal(writer, volume)
    waiting = asyncio.create_task(journal.add(entry(1)))
    while volume.trouble() is None:
        now[0] += SLOW_SECONDS
        await asyncio.sleep(0)
    trouble = volume.trouble()
    assert trouble is not None
    assert trouble.reason == "StorageSlow"
    assert "does not answer; cannot write finished rollouts since" in trouble.text
    async with asyncio.timeout(60):
        await journal.close()
    waiting.cancel()
    writer.go.release()


NO_PART_IN_A_ROLLOUT = {
    *(
        "name",
        "uid",
        "output_dir",
        "task",
        "max_steps",
        "colocated",
        "batch_size",
        "max_concurrency",
        "oversampling_factor",
        "record_rollouts",
        "keep_traces",
    ),
    *("max_error_ratio", "algorithm", "data", "policies", "evaluation", "checkpoint", "weight_sync", "trainer_url"),
    *("shared_with", "inference_urls", "inference_service", "metrics_port", "host", "replay", "replay_routes"),
}
NO_PART_OF_AN_ENVIRONMENT = {
    *("ratio", "curriculum", "algorithm", "timeout_seconds", "reward_timeout_seconds", "start_timeout_seconds"),
    *("memory_gib", "workers", "solved_reward", "variables", "volume_paths", "isolation"),
}


def test_fingerprint_classifies_every_configuration_field() -> None:
    for fields, counted, others in (
        (OrchestratorConfig.model_fields, set(OF_A_ROLLOUT), NO_PART_IN_A_ROLLOUT),
        (EnvironmentConfig.model_fields, OF_AN_ENVIRONMENT, NO_PART_OF_AN_ENVIRONMENT),
    ):
        assert counted | others == set(fields)
        assert not counted & others


def test_fingerprint_changes_with_each_rollout_option(tmp_path: Path) -> None:
    def make_fingerprint(**changes: object) -> str:
        return rollout_fingerprint(make_config(tmp_path, tmp_path, **changes))

    def with_environment(**changes: object) -> str:
        return make_fingerprint(environments=[{"id": "reverse-text", "group_size": 2} | changes])

    assert (
        make_fingerprint()
        == make_fingerprint(max_steps=99)
        == with_environment(ratio=3)
        == with_environment(timeout_seconds=7)
    )
    others = [
        make_fingerprint(seed=2),
        make_fingerprint(seq_len=65),
        make_fingerprint(model={"name": "org/model"}),
        make_fingerprint(sampling={"max_tokens": 9}),
        make_fingerprint(trajectory_strategy="branching"),
        make_fingerprint(engine_parsers=["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]),
        make_fingerprint(engine_parsers=["--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"]),
        make_fingerprint(engine_parsers=["--reasoning-parser=qwen3"]),
        with_environment(args={"num_tasks": 9}),
        with_environment(group_size=4),
        with_environment(python="/venv/bin/python"),
        with_environment(image="registry/env:2"),
        with_environment(name="other"),
        with_environment(sampling={"temperature": 0.5}),
    ]
    assert len({make_fingerprint(), *others}) == 1 + len(others)


def rewritten(path: Path, change: Callable[[int, Any], bytes | None]) -> None:
    """Rewrite a journal as another version would: `change` receives each record's number and document and returns the new bytes."""
    data, place, frames = path.read_bytes(), 0, b""
    for number in itertools.count():
        if place == len(data):
            break
        length = struct.unpack_from("<I", data, place)[0]
        key, payload = data[place + 8 : place + 21], data[place + 21 : place + 21 + length]
        rollout = key[0] == 2
        start = 4 + struct.unpack_from("<I", payload)[0] if rollout else len(payload)
        document = json.loads(payload[4:start] if rollout else payload)
        if (text := change(number, document)) is not None:
            payload = struct.pack("<I", len(text)) + text + payload[start:] if rollout else text
        frames += struct.pack("<II", len(payload), zlib.crc32(payload, zlib.crc32(key))) + key + payload
        place += 21 + length
    path.write_bytes(frames)


def without(name: str) -> Callable[[dict[str, Any]], bytes]:
    return lambda document: json.dumps({key: value for key, value in document.items() if key != name}).encode()


def having(**more: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda document: json.dumps(document | more).encode()


ODD = [
    (1, without("temperature"), "no key 'temperature'"),
    (1, without("lengths"), "no key 'lengths'"),
    (1, without("messages"), "no key 'messages'"),
    (1, having(judge=1), "the unknown key 'judge'"),
    (1, having(lengths=[3]), "do not match its lengths"),
    (1, having(lengths=["3"]), "unsupported operand"),
    (1, lambda _: b"[]", "not a JSON object"),
    (1, lambda _: b"{", "not a JSON document"),
    (2, without("next_group"), "no key 'next_group'"),
    (2, having(cause=""), "the unknown key 'cause'"),
]


@pytest.mark.parametrize(("number", "change", "says"), ODD)
def test_journal_record_of_another_version_is_reported_and_skipped(
    tmp_path: Path, number: int, change: Callable[[Any], bytes], says: str
) -> None:
    writer, path = writer_of(tmp_path), RunPaths(tmp_path).journal_segment(1, 1)
    written: list[Entry] = [entry(1, 4), DROPPED, entry(2)]
    writer.write(written)
    rewritten(path, lambda i, document: change(document) if i == number else None)
    content = read_segment(path)
    [foreign] = content.foreign
    assert says in foreign.reason
    assert (foreign.group, foreign.member) == ((1, 4) if number == 1 else (9, -1))
    assert len(content.entries) == 2
    assert all(map(same, content.entries, [e for i, e in enumerate(written) if i != number - 1]))
    assert content.torn == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (having(format_version=2), "format version 2; this version reads 1"),
        (without("format_version"), "no key 'format_version'"),
        (without("fingerprint"), "no key 'fingerprint'"),
        (having(uid="u"), "the unknown key 'uid'"),
    ],
)
def test_rollouts_of_another_journal_version_are_regenerated_with_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Any], bytes], says: str
) -> None:
    writer, paths = writer_of(tmp_path), RunPaths(tmp_path)
    writer.write([entry(1, 4), DROPPED, entry(2)])
    rewritten(paths.journal_segment(1, 1), lambda i, document: change(document) if i == 0 else None)
    write_attempt(paths, first_attempt(world_size=1, config_hash="hash"))
    attempt = begin(paths, 2)
    found = read_journal(paths, attempt, fingerprint="f", settled=lambda group: group == 2)
    assert found.entries == []
    assert found.refused == {(1, 4): "format"}
    assert found.uncounted == {(1, 4)}
    said = capsys.readouterr().err
    assert "come from another version of rlrun" in said
    assert says in said
