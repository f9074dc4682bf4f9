"""Forked programs with pipes: same output, folder, environment and exit code as started programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.program_forks import CODE, program_forks
from tests.support.programs import run_program, wait_for

REPORT = """
import json, os, signal, sys
print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), sys.stdin.read(), __name__]))
print("x" * 200_000, file=sys.stderr)
sys.stdout.flush()
ENDING
"""
ENDS = {
    "returns": "",
    "code": "sys.exit(78)",
    "text": "sys.exit('a last word')",
    "at-once": "os._exit(5)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("ending", ENDS)
def test_forked_program_has_output_and_exit_of_started_program(ending: str, tmp_path: Path) -> None:
    code = REPORT.replace("ENDING", ENDS[ending])
    variables = {"ONE": "of this program", "PATH": os.environ["PATH"], "LC_CTYPE": "C.UTF-8"}
    forked = program_forks().call(CODE, code, "word", environment=variables, folder=tmp_path)
    command = [sys.executable, "-c", code, "word"]
    started = run_program(command, env=variables, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_running_forked_program_is_killed_at_block_end(tmp_path: Path) -> None:
    code = f"import time; open({str(tmp_path / 'up')!r}, 'w'); time.sleep(600)"
    with program_forks().open(CODE, code, environment=os.environ) as program:
        wait_for((tmp_path / "up").exists, "the program runs")
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.communicate(timeout=0.1)
    assert program.poll() == -9
    assert not Path(f"/proc/{program.pid}").exists()
