"""Size limits of logs on the volume."""

from __future__ import annotations

import os
import threading
import uuid
from pathlib import Path

import pytest

from rlrun.local.process_plan import RoleProcess
from rlrun.local.supervisor import Supervisor
from rlrun.pod import role_process
from rlrun.runtime import process_logs
from rlrun.runtime.process_logs import BoundedLog, cut_back


def test_full_log_is_rotated_and_newest_lines_are_kept(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "logs" / "role.log", max_bytes=1000)
    for number in range(1000):
        log.append(b"line %05d\n" % number)
    files = {path.name: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    assert files.keys() == {"role.log", "role.log.1"}
    assert all(len(text) <= 1011 for text in files.values())
    assert (files["role.log.1"] + files["role.log"]).splitlines()[-1] == b"line 00999"
    numbers = [int(line.split()[1]) for line in (files["role.log.1"] + files["role.log"]).splitlines()]
    assert numbers == [*range(numbers[0], 1000)]


def test_concurrent_threads_lose_only_oldest_lines(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "role.log", max_bytes=1 << 20)

    def write(name: int) -> None:
        for number in range(500):
            log.append(b"%d %d\n" % (name, number))

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((tmp_path / "role.log").read_bytes().splitlines()) == 2000


def test_log_without_folder_recovers_later(tmp_path: Path) -> None:
    blocker = tmp_path / "logs"
    blocker.write_text("a file")
    log = BoundedLog(blocker / "role.log")
    log.append(b"lost\n")
    blocker.unlink()
    log.append(b"kept\n")
    assert (blocker / "role.log").read_bytes() == b"kept\n"


def test_log_of_another_process_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "role.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        cut_back(path, max_bytes=100)
        assert path.stat().st_size == 100, "full is more than that"
        writer.write(b"y")
        cut_back(path, max_bytes=100)
        writer.write(b"the end\n")
    assert path.read_bytes() == b"the end\n"
    assert process_logs.earlier_file(path).read_bytes() == b"x" * 100 + b"y"


def test_pod_bounds_output_of_its_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_process, "BoundedLog", lambda path: BoundedLog(path, max_bytes=100_000))
    monkeypatch.setattr(role_process, "_write_stream", lambda stream, chunk: None)
    kept = role_process.Output(tmp_path / "role.log")
    reading, writing = os.pipe()
    kept.forward_stream(reading, role_process.STDOUT)
    with os.fdopen(writing, "wb") as pipe:
        for _ in range(100):
            pipe.write(b"z" * 9_999 + b"\n")
    kept.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert {"role.log.1"} <= sizes.keys() <= {"role.log", "role.log.1"}  # The last chunk may have filled the log.
    assert all(size < 200_000 for size in sizes.values())


def test_local_run_bounds_output_of_its_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlrun.local.supervisor.cut_back", lambda path: cut_back(path, max_bytes=1000))
    supervisor = Supervisor(uuid.uuid4().hex)
    log, all_said = tmp_path / "trainer.log", tmp_path / "all said"
    says = "i=0; while [ $i -lt 200 ]; do echo aaaaaaaaaaaaaaaaaaaa; i=$((i+1)); done"
    chatty = ("/bin/sh", "-c", f"{says}; touch '{all_said}'; sleep 600")
    supervisor.start([RoleProcess("trainer", "trainer", chatty, {}, log, tmp_path / "error.json")])
    try:
        for _ in range(6000):
            ended = all_said.exists()
            supervisor.poll_exited()
            if ended:
                break
            threading.Event().wait(0.01)
        assert all_said.exists()
        assert process_logs.earlier_file(log).stat().st_size > 1000
        assert log.stat().st_size <= 1000, "what came after the last look that found too much"
    finally:
        supervisor.stop(0.1)
