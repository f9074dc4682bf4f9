"""Launcher record of a local run."""

from __future__ import annotations

import os
from pathlib import Path

from rlrun.local.launcher import Recorder
from rlrun.protocol.files.launcher_record import BEAT_SECONDS, read_record
from rlrun.protocol.files.paths import RunPaths


def test_record_writes_progress_periodically_and_end_immediately(tmp_path: Path) -> None:
    now = [1000.0]
    path = RunPaths(tmp_path).launcher
    recorder = Recorder(path, name="a", attempt=2, command="again", clock=lambda: now[0])
    recorder.record_progress(None)
    first = read_record(path)
    assert first is not None
    assert (first.name, first.attempt, first.command, first.pid, dict(first.progress)) == (
        "a",
        2,
        "again",
        os.getpid(),
        {},
    )
    now[0] += BEAT_SECONDS / 2
    recorder.record_progress({"step": 1})
    assert read_record(path) == first, "not yet"
    now[0] += BEAT_SECONDS
    recorder.record_progress(None)
    later = read_record(path)
    assert later is not None
    assert (later.progress["step"], later.progress_time, later.time) == (
        1,
        1000 + BEAT_SECONDS / 2,
        1000 + 1.5 * BEAT_SECONDS,
    )
    recorder.record_end("Interrupted")
    ended = read_record(path)
    assert ended is not None
    assert (ended.state, ended.failed_role, ended.alive(now[0])) == ("Interrupted", None, False)


def test_refused_record_write_does_not_stop_run(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "gone" / "launcher.json", name="a", attempt=1, command="again")
    recorder.record_progress({"step": 1})
    recorder.record_end("Complete")
    assert read_record(tmp_path / "gone" / "launcher.json") is None
    (tmp_path / "gone").mkdir()
    recorder.record_end("Complete")
    found = read_record(tmp_path / "gone" / "launcher.json")
    assert found is not None
    assert (found.state, found.progress) == ("Complete", {"step": 1}), "nothing of it was lost meanwhile"
