"""Error messages when a role ends a local run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlrun.local.process_plan import RoleProcess
from rlrun.local.supervisor import Running, explain_failure
from rlrun.protocol.files.failures import RoleError, write_error
from rlrun.trainer.ranks.torchrun import last_word

DUMP = """\
Fatal Python error: Segmentation fault

Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f0000000001 (most recent call first):
  File "/opt/safetensors/torch.py", line 323 in save_file
  File "/opt/rlrun/trainer/weights/hf_writer.py", line 121 in publish
"""
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:51000"


def make_ended_trainer(folder: Path, code: int) -> Running:
    """Return a trainer that ended with this exit code."""
    spec = RoleProcess("trainer", "trainer", (), {}, folder / "trainer.log", folder / "error.json")
    spec.log.write_text(f"{DUMP}Traceback (most recent call last):\n{LOST}\n")
    process = subprocess.Popen([sys.executable, "-c", f"import os; os._exit({code})"])
    process.wait()
    return Running(spec, process)


def test_crashed_rank_is_reported_instead_of_its_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_error(tmp_path, "trainer", RoleError(LOST, follows=True))
    write_error(tmp_path, "trainer", last_word(1, -11, DUMP))
    explain_failure(make_ended_trainer(tmp_path, 139), tmp_path)
    said = capsys.readouterr().err
    assert said.splitlines()[1:7] == [
        "error: trainer was ended by SIGSEGV",
        "  rank 1 was ended by SIGSEGV; its last lines:",
        "  | Fatal Python error: Segmentation fault",
        "  | Current thread 0x00007f0000000001 (most recent call first):",
        '  |   File "/opt/safetensors/torch.py", line 323 in save_file',
        '  |   File "/opt/rlrun/trainer/weights/hf_writer.py", line 121 in publish',
    ]
    assert LOST not in said


def test_crash_without_error_file_is_reported_from_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explain_failure(make_ended_trainer(tmp_path, 139), tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert said[4:6] == [
        "  | Current thread 0x00007f0000000001 (most recent call first):",
        '  |   File "/opt/safetensors/torch.py", line 323 in save_file',
    ]
