"""Supervisor: all processes of a launch end with it after a kill of any process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlrun.diagnostics import stacks
from rlrun.local.process_plan import RoleProcess
from rlrun.local.supervisor import Supervisor, last_lines, marked_processes, stacks_file
from rlrun.runtime.processes import LAUNCH_VARIABLE
from tests.support.programs import wait_for


@pytest.fixture
def launch_id() -> Iterator[str]:
    mark = uuid.uuid4().hex
    yield mark
    for pid in marked_processes(mark):
        os.kill(pid, signal.SIGKILL)


def make_role(tmp_path: Path, launch_id: str, code: str, name: str = "trainer") -> RoleProcess:
    command = (sys.executable, "-c", textwrap.dedent(code))
    return RoleProcess(
        "trainer", name, command, {LAUNCH_VARIABLE: launch_id}, tmp_path / f"{name}.log", tmp_path / "error.json"
    )


STUBBORN = """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
                     start_new_session=True)
    print("up", flush=True)
    time.sleep(600)
"""


def test_stop_kills_role_ignoring_sigterm_and_its_child(tmp_path: Path, launch_id: str) -> None:
    supervisor = Supervisor(launch_id)
    supervisor.start([make_role(tmp_path, launch_id, STUBBORN)])
    wait_for(lambda: len(marked_processes(launch_id)) == 2, "role and child run")
    supervisor.stop(grace_seconds=0.5)
    assert marked_processes(launch_id) == []


def test_stop_ends_children_of_killed_role(tmp_path: Path, launch_id: str) -> None:
    supervisor = Supervisor(launch_id)
    supervisor.start([make_role(tmp_path, launch_id, STUBBORN)])
    wait_for(lambda: len(marked_processes(launch_id)) == 2, "role and child run")
    os.kill(supervisor.running[0].process.pid, signal.SIGKILL)
    wait_for(lambda: len(supervisor.poll_exited()) == 1, "the role's end is seen")
    supervisor.stop(grace_seconds=0.5)
    assert marked_processes(launch_id) == []


def test_stop_does_not_touch_other_processes(tmp_path: Path, launch_id: str) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, LAUNCH_VARIABLE: "another"}
    )
    try:
        supervisor = Supervisor(launch_id)
        supervisor.start([make_role(tmp_path, launch_id, "import time; time.sleep(600)")])
        supervisor.stop(grace_seconds=5)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_roles_end_when_the_launcher_is_killed(tmp_path: Path, launch_id: str) -> None:
    launcher = f"""
        import sys, time
        from pathlib import Path
        from rlrun.local.process_plan import RoleProcess
        from rlrun.local.supervisor import Supervisor
        command = (sys.executable, "-c", "import time; time.sleep(600)")
        mark = {{"{LAUNCH_VARIABLE}": "{launch_id}"}}
        spec = RoleProcess("trainer", "trainer", command, mark, Path("{tmp_path}/a.log"), Path("{tmp_path}/e"))
        Supervisor("{launch_id}").start([spec])
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)])
    try:
        wait_for(lambda: len(marked_processes(launch_id)) == 1, "the role runs")
        process.kill()
        wait_for(lambda: marked_processes(launch_id) == [], "the role has ended")
    finally:
        process.kill()
        process.wait()


def test_log_keeps_output_and_last_lines_are_shown(tmp_path: Path, launch_id: str) -> None:
    supervisor = Supervisor(launch_id)
    supervisor.start([make_role(tmp_path, launch_id, "print('one'); print('two'); raise SystemExit(7)")])
    wait_for(lambda: len(supervisor.poll_exited()) == 1, "the role has ended")
    assert supervisor.running[0].process.returncode == 7
    assert last_lines(supervisor.running[0].spec.log, 1) == ["two"]


LISTENS = """
    import signal, time
    from rlrun.diagnostics import stacks
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stacks.answer_requests()
    def waits_for_ever():
        print("up", flush=True)
        time.sleep(600)
    waits_for_ever()
"""


def test_role_that_does_not_end_reports_its_stack(
    tmp_path: Path, launch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 60.0)
    supervisor = Supervisor(launch_id)
    stuck, other = (
        make_role(tmp_path, launch_id, LISTENS),
        make_role(tmp_path, launch_id, "import time; time.sleep(600)", "other"),
    )
    supervisor.start([stuck, other])
    wait_for(lambda: "up" in stuck.log.read_text(), "the role is up")
    told = stacks_file(stuck)
    supervisor.stop(grace_seconds=60, hurry=lambda: str(told) in stuck.log.read_text())
    assert "in waits_for_ever" in told.read_text()
    assert not stacks_file(other).exists(), "one that ended leaves nothing"
