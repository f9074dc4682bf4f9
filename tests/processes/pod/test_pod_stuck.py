"""Stack dumps of a hanging role before it is killed: real processes, one of them in native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pod_harness import PATIENT, Pod, run_config

from rlrun.diagnostics import stacks
from rlrun.inference.engine_settings import ENGINE_VARIABLE
from rlrun.pod.container_settings import Signals
from rlrun.pod.role_process import Output, StuckRole
from rlrun.protocol.files.paths import RunPaths
from tests.support.programs import finish, run_program, wait_for

HANGS = """
    import ctypes, os, signal, subprocess, sys
    from rlrun.diagnostics import stacks
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = '''
    import signal, sys, time
    from rlrun.diagnostics import stacks
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stacks.answer_requests()
    def child_that_waits():
        print("up", flush=True)
        time.sleep(3600)
    child_that_waits()
    '''
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
    code = [[sys.executable, "-c", __import__("textwrap").dedent(text)] for text in (worker, deaf)]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) for words in code]
    for process in started:
        process.stdout.readline()
    stacks.answer_requests()
    def holds_the_interpreter_for_ever():
        print(os.getpid(), *(process.pid for process in started), flush=True)
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(128)
        lock(mutex)
        lock(mutex)  # it waits for itself, inside C, and keeps the interpreter's lock
    holds_the_interpreter_for_ever()
"""


def stacks_file(pod: Pod, role: str) -> Path:
    folder = RunPaths(pod.root).root / "logs" / "attempt_0001" / role
    return folder / f"{pod.name}.stacks.txt"


def start_hanging_role(pods: Callable[..., Pod], tmp_path: Path) -> tuple[Pod, subprocess.Popen[str], list[int]]:
    """Start an orchestrator that hangs after a stop request; return its processes: itself, a child that listens, one that does not."""
    pod = pods("demo-orchestrator", run_config(tmp_path / "demo", checkpoint={"gracePeriodSeconds": 1}))
    process = pod.start("orchestrator", HANGS, **{PATIENT: "1"})
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    return pod, process, pids


def kill_role(process: subprocess.Popen[str], pids: list[int]) -> tuple[str, str]:
    """Kill the role, as the kubelet does at the end."""
    os.kill(pids[0], signal.SIGKILL)
    return finish(process)


def test_all_processes_of_hanging_role_report_stacks(pods: Callable[..., Pod], tmp_path: Path) -> None:
    pod, process, pids = start_hanging_role(pods, tmp_path)
    process.send_signal(signal.SIGTERM)
    file = stacks_file(pod, "orchestrator")
    told = wait_for(lambda: file.exists() and file.read_text(), "the stacks are on the volume")
    assert Path(f"/proc/{pids[2]}").exists(), "one that does not listen is not ended by the question"
    _, err = kill_role(process, pids)
    assert process.returncode == 128 + signal.SIGKILL
    assert "in holds_the_interpreter_for_ever" in told
    assert "in child_that_waits" in told
    assert f"== process {pids[0]}: " in told
    assert f"== process {pids[2]}: " not in told
    assert f"its stacks are written to {file}" in err
    assert "in holds_the_interpreter_for_ever" in err
    assert pod.message == ""


def test_hanging_volume_loses_only_the_stacks_file(pods: Callable[..., Pod], tmp_path: Path) -> None:
    pod, process, pids = start_hanging_role(pods, tmp_path)
    file = stacks_file(pod, "orchestrator")
    file.parent.mkdir(parents=True, exist_ok=True)  # Otherwise the thread of the log creates the folder later.
    os.mkfifo(file)  # Opening a FIFO blocks until a reader exists.
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    while "in holds_the_interpreter_for_ever" not in (line := process.stderr.readline()):
        assert line, "it ended without a word"
    kill_role(process, pids)
    assert process.returncode == 128 + signal.SIGKILL


def test_role_that_ends_in_time_is_not_dumped(signals: Signals, tmp_path: Path) -> None:
    with StuckRole(signals, after=3600, file=tmp_path / "f", keep=tmp_path / "kept", output=Output(None)) as watch:
        os.kill(os.getpid(), signal.SIGTERM)
        watch._thread.join(0.3)
        assert watch._thread.is_alive(), "it waits for the role"
    assert signals.received == signal.SIGTERM
    assert not watch._thread.is_alive()


LISTENS = "import time; from rlrun.diagnostics import stacks; stacks.answer_requests(); print('up', flush=True); time.sleep(3600)"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Start a listening process; return its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def one() -> int:
        env = {**os.environ, stacks.FILE_VARIABLE: str(tmp_path / "stacks")}
        process = subprocess.Popen([sys.executable, "-c", LISTENS], env=env, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process.pid

    yield one
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def test_frozen_process_blocks_no_other_dump(
    start: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = start()
    os.kill(frozen, signal.SIGSTOP)
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.1)
    told = stacks.request_stacks([frozen], tmp_path / "stacks", why="it is stuck").decode()
    assert "it is stuck\n" in told
    assert told.endswith("no answer: the process is frozen, or inside a hanging system call\n")


def test_early_answer_counts(start: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid, file, kill = start(), tmp_path / "stacks", os.kill

    def and_wait(pid: int, number: int) -> None:
        kill(pid, number)
        wait_for(lambda: "in <module>" in file.read_text(), "the last line of the answer")

    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(os, "kill", and_wait)
    assert "no answer" not in stacks.request_stacks([pid], file, why="it is stuck").decode()


def test_stack_dump_is_bounded(start: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = [start(), start()]
    monkeypatch.setattr(stacks, "MAX_BYTES", 60)
    told = stacks.request_stacks(pids, tmp_path / "stacks", why="it is stuck").decode()
    assert len(told) == 60 + len("\n...\n")
    assert f"== process {pids[1]}: skipped, the limit of size or time is reached" in (tmp_path / "stacks").read_text()


def test_process_with_other_stacks_file_is_skipped(start: Callable[[], int], tmp_path: Path) -> None:
    pid = start()
    other = tmp_path / "of another role"
    other.touch()
    assert stacks.is_listening(pid, tmp_path / "stacks")
    assert not stacks.is_listening(pid, other)
    assert stacks.request_stacks([pid, os.getpid()], other, why="it is stuck") == b""


@pytest.mark.parametrize(("grace", "seconds"), [(1, 0.25), (8, 2.0), (30, 5.0), (86400, 5.0)])
def test_stacks_are_requested_long_before_kill(grace: float, seconds: float) -> None:
    assert stacks.seconds_until_stacks(grace) == seconds


def test_engine_processes_listen_through_vllm_plugin(tmp_path: Path) -> None:
    """In a separate process, because the registration is permanent."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (name,) = project["entry-points"]["vllm.general_plugins"].values()
    load = f"from importlib.metadata import EntryPoint; EntryPoint('rlrun', {name!r}, 'vllm.general_plugins').load()()"
    look = "import faulthandler; from rlrun.diagnostics.stacks import SIGNAL; print(faulthandler.unregister(SIGNAL))"

    def loaded(**more: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k != ENGINE_VARIABLE} | more
        done = run_program([sys.executable, "-c", f"{load}; {look}"], env=environment)
        return done.stdout.splitlines()[-1] if done.stdout else done.stderr

    assert loaded(**{ENGINE_VARIABLE: "1"}) == "True"
    assert loaded() == "False", "a server that is not ours"
