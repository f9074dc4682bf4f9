"""Sandbox for code: legitimate programs work, and each escape is blocked."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from rlrun.environments.rewards import code_execution as code_module
from rlrun.environments.rewards.code_execution import (
    Case,
    CodeLimits,
    CodeRunner,
    SandboxUnavailableError,
    last_code_block,
)
from tests.support.programs import children_progress
from tests.support.waiting import UNREACHED_SECONDS, result_of

HONEST = """
import sys, json, math, re, collections, itertools, functools, heapq, random, threading, datetime, decimal, fractions, string
numbers = [int(word) for word in sys.stdin.read().split()]
found = []
thread = threading.Thread(target=lambda: found.append(math.lcm(*numbers)))
thread.start(); thread.join()
print(json.dumps(found)); print(random.Random(1).random() < 1, sum(range(10**6)))
"""

ESCAPES = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "raw socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "unix socket": "import socket; socket.socketpair()",
    "fork": "import os; os.fork()",
    "spawn": "import subprocess; subprocess.run(['/bin/true'])",
    "posix_spawn": "import os; os.posix_spawn('/bin/true', ['true'], dict())",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "system": "import os; assert os.system('true') == 0",
    "write a file": "open('{folder}/new', 'w')",
    "write over a file": "open('{folder}/secret', 'a')",
    "shared memory": "open('/dev/shm/rlrun-escape', 'w')",
    "remove": "import os; os.remove('{folder}/secret')",
    "rename": "import os; os.rename('{folder}/secret', '{folder}/other')",
    "truncate": "import os; os.truncate('{folder}/secret', 0)",
    "empty without access": "import os; os.open('{folder}/secret', 3 | os.O_TRUNC)",
    "empty by reading": "import os; os.open('{folder}/secret', os.O_RDONLY | os.O_TRUNC)",
    "empty by open(2)": "import ctypes; assert ctypes.CDLL(None).syscall(2, b'{folder}/secret', 3 | 0o1000, 0) >= 0",
    "empty by openat2": "import ctypes, struct; h = struct.pack('QQQ', 3 | 0o1000, 0, 0); "
    "assert ctypes.CDLL(None).syscall(437, -100, b'{folder}/secret', h, 24) >= 0",
    "unnamed file": "import os; os.open('{folder}', os.O_TMPFILE | os.O_RDWR)",
    "change rights": "import os; os.chmod('{folder}/secret', 0o777)",
    "link": "import os; os.symlink('/etc/passwd', '{folder}/link')",
    "make a folder": "import os; os.mkdir('{folder}/new')",
    "read a file": "open('{folder}/secret').read()",
    "read accounts": "open('/etc/passwd').read()",
    "read others' variables": "open('/proc/{pid}/environ').read()",
    "read own parent's memory": "open('/proc/{pid}/mem', 'rb')",
    "list": "import os; os.listdir('{folder}')",
    "kill": "import os; os.kill({pid}, 0)",
    "kill by thread": "import ctypes; assert ctypes.CDLL(None).syscall(234, {pid}, {pid}, 0) == 0",
    "signal by fcntl": "import fcntl; fcntl.fcntl(1, 8, {pid})",
    "trace": "import ctypes; assert ctypes.CDLL(None).syscall(101, 16, {pid}, 0, 0) == 0",
    "unshare": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "io_uring": "import ctypes; b = ctypes.create_string_buffer(256); assert ctypes.CDLL(None).syscall(425, 1, b) >= 0",
    "memfd": "import os; os.memfd_create('x')",
    "clone a process": "import ctypes; assert ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) >= 0",
    "more memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "limits of others": "import resource; resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))",
    "nice others": "import os; os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    "big memory": "x = bytearray(10**9)",
    "recursion": "f = lambda n: f(n + 1); f(0)",
    "third-party": "import numpy",
}

THREADS_FOR_EVER = """
import threading, time
threading.stack_size(32768)
while True:
    try:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError:
        time.sleep(0.01)
"""
BARE_THREADS_FOR_EVER = """
import _thread, time
_thread.stack_size(32768)
def again():
    while True:
        try:
            _thread.start_new_thread(again, ())
        except RuntimeError:
            pass
        time.sleep(0.001)
again()
"""
"""Each thread starts others."""


def change_sandbox(monkeypatch: pytest.MonkeyPatch, script: Path, old: str, new: str) -> None:
    """Run programs in a sandbox with one changed line."""
    text = Path(code_module.sandbox.__file__).read_text()
    assert text.count(old) == 1
    script.write_text(text.replace(old, new))
    monkeypatch.setattr(code_module.sandbox, "__file__", str(script))


async def test_legitimate_program_runs_in_sandbox() -> None:
    result = await CodeRunner().run(HONEST, "4 6 10")
    assert (result.outcome, result.stdout, result.stderr) == ("ok", "[60]\nTrue 499999500000\n", "")


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_each_escape_is_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Each version of Landlock with other rights than the previous one."""
    change_sandbox(monkeypatch, tmp_path.with_name("sandbox.py"), "abi - 1", f"min(abi, {version}) - 1")
    (tmp_path / "secret").write_text("42")
    with socket.create_server(("127.0.0.1", 0)) as server:
        fields = {"folder": tmp_path, "pid": os.getpid(), "port": server.getsockname()[1]}
        # One program makes all attempts, so that a single start is enough; each entry is one attempt.
        attempts = {name: text.format(**fields) for name, text in ESCAPES.items()}
        program = f"""
import json
refused = {{}}
for name, text in {attempts!r}.items():
    try:
        exec(text, {{}})
    except BaseException as error:
        refused[name] = type(error).__name__
print(json.dumps(sorted(refused)))
"""
        result = await CodeRunner().run(program)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert result.outcome == "ok", result.stderr
    assert sorted(ESCAPES) == json.loads(result.stdout)
    assert os.listdir(tmp_path) == ["secret"]  # noqa: PTH208
    assert (tmp_path / "secret").read_text() == "42"


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(600)", "timeout"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys; sys.stderr.write('x' * 10**6)", "output"),
        ("x = []\nwhile True: x.append(bytearray(10**6))", "failed"),
        ("import os; os.abort()", "failed"),
        ("raise SystemExit(3)", "failed"),
        ("def f(:", "failed"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
            "timeout",
        ),
        ("import os, time; os.close(1); os.close(2); time.sleep(600)", "timeout"),
        (THREADS_FOR_EVER, "threads"),
        (BARE_THREADS_FOR_EVER, "threads"),
    ],
)
async def test_program_over_limits_is_stopped(program: str, outcome: str) -> None:
    limits = CodeLimits(
        timeout_seconds=1 if outcome == "timeout" else UNREACHED_SECONDS,
        memory_bytes=256 * 1024**2,
        output_bytes=10_000,
    )
    result = await result_of(CodeRunner(limits).run(program), "the end of the program", progress=children_progress)
    assert result.outcome == outcome, result
    assert len(result.stdout) <= 10_000


async def test_program_may_have_a_thread_pool() -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
import time
with ThreadPoolExecutor(32) as pool:
    print(sum(pool.map(lambda x: (time.sleep(0.1), x)[1], range(64))))
"""
    result = await CodeRunner(CodeLimits(memory_bytes=8 * 1024**3)).run(program)
    assert (result.outcome, result.stdout) == ("ok", "2016\n"), result


async def test_code_reward_is_share_of_passed_cases() -> None:
    cases = [Case("1", "2"), Case("5", "10\n"), Case("x", "")]
    assert await CodeRunner().score_cases("print(2 * int(input()))", cases) == pytest.approx(2 / 3)


async def test_program_is_refused_without_confinement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_sandbox(monkeypatch, tmp_path / "sandbox.py", '"x86_64" or', '"pdp11" or')
    with pytest.raises(SandboxUnavailableError, match="supports Linux on x86-64"):
        await CodeRunner().run("print(1)")


def test_last_code_block_counts() -> None:
    assert last_code_block("```python\na\n```\nno:\n```py\nb\n```") == "b\n"
    assert last_code_block("print(1)") is None
