"""`run_complete.sh`: packs, time limits and messages, with stand-ins of Python and of the packs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.pack_run import ARCHIVE, write_archive, write_sums

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu" / "run_complete.sh"
PYTHON = """#!/bin/bash
# Stand-in: only `pack_run check` is real, and other modules do as the test says.
case "$*" in
  *"-m pip --version"*) exit 0 ;;
  *"-m pip install"*) exit 0 ;;
  *benchmarks.gpu.pack_run*) exec {python} "$@" ;;
  *cuInit*) exit {gpu} ;;
  *benchmarks.gpu.check_pack*) echo "checked $*"; exit {check} ;;
  *benchmarks.gpu.run_rl*) echo "started $*"; {run} ;;
esac
"""


class Machine:
    """A checkout with packs, and a folder that stays between calls."""

    def __init__(self, folder: Path) -> None:
        self.packs, self.site, self.out, self.python = (
            folder / name for name in ("packs", "site", "out", "python")
        )  # fmt: skip
        for name in ("run1", "run2"):
            (self.packs / name).mkdir(parents=True)
        write_archive(self.packs / "run1" / ARCHIVE, [("vllm/version.py", b"__version__ = '0'\n")])
        (self.packs / "run2" / "one-1.0-py3-none-any.whl").write_bytes(b"wheel")
        for name in ("run1", "run2"):
            write_sums(self.packs / name)
        self.write_python()

    def write_python(self, *, gpu: int = 0, check: int = 0, run: str = "exit 0") -> None:
        self.python.write_text(PYTHON.format(python=sys.executable, gpu=gpu, check=check, run=run))
        self.python.chmod(0o755)

    def call(self, *arguments: str, limit: int = 60) -> subprocess.CompletedProcess[str]:
        """Run the script; messages and output of programs are in `stdout`."""
        variables = {
            "PYTHON": str(self.python), "RLRUN_PACKS": str(self.packs), "SITE": str(self.site), "OUT": str(self.out),
            "LIMIT": str(limit), "DRY_PYTHON": str(self.python),
        }  # fmt: skip
        return subprocess.run(
            [str(SCRIPT), *arguments], env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=300,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_both_calls_pass_the_rest_of_the_time_and_keep_the_site(machine: Machine) -> None:
    first = machine.call("1")
    assert first.returncode == 0, first.stdout
    assert (machine.site / "vllm" / "version.py").exists()
    assert "--gpu" in first.stdout
    assert "--only nccl" in first.stdout
    second = machine.call("2", "--", "--only", "colocated")
    assert second.returncode == 0, second.stdout
    started = next(line for line in second.stdout.splitlines() if line.startswith("started"))
    assert started.endswith("--only colocated")
    words = started.split()
    assert 20 <= int(words[words.index("--seconds") + 1]) <= 50
    assert words[words.index("--site") + 1] == str(machine.site)
    assert "call 2 ended after" in (machine.out / "complete.txt").read_text()


def test_hanging_program_is_stopped_at_the_limit(machine: Machine) -> None:
    machine.write_python(run="sleep 600")
    began = time.monotonic()
    done = machine.call("1", limit=12)
    assert done.returncode == 1
    assert "error: stopped, the 12 s of this call are over" in done.stdout
    assert time.monotonic() - began < 60


def test_process_that_stays_behind_does_not_delay_the_script(machine: Machine) -> None:
    machine.write_python(run="setsid sleep 100 < /dev/null & exit 3")
    began = time.monotonic()
    done = subprocess.run(
        [str(SCRIPT), "1"],
        env=os.environ
        | {"PYTHON": str(machine.python), "RLRUN_PACKS": str(machine.packs), "SITE": str(machine.site), "OUT": str(machine.out)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert time.monotonic() - began < 60
    assert "error: exit code 3" in (machine.out / "complete.txt").read_text()


def test_interrupted_first_call_is_reported_by_the_second(machine: Machine) -> None:
    (machine.site / "vllm").mkdir(parents=True)
    done = machine.call("2")
    assert done.returncode == 1
    assert f"{machine.site} does not have the first pack; run `{SCRIPT} 1` first" in done.stdout
    assert "started" not in done.stdout


def test_wrong_kernel_does_not_stop_the_calls(machine: Machine) -> None:
    """The second call replaces the kernel."""
    machine.write_python(check=1)
    assert machine.call("1").returncode == 1
    second = machine.call("2")
    assert second.returncode == 1
    assert "started" in second.stdout


def test_machine_without_a_gpu_and_damaged_pack_are_reported(machine: Machine) -> None:
    machine.write_python(gpu=100)
    done = machine.call("1")
    assert done.returncode == 1
    assert "the CUDA driver finds no GPU (exit code 100 of cuInit)" in done.stdout
    assert not (machine.site / "vllm").exists()
    (machine.packs / "run1" / ARCHIVE).write_bytes(b"damaged")
    dry = machine.call("1", "--dry")
    assert dry.returncode == 1
    assert f"{ARCHIVE} has another SHA-256 sum" in dry.stdout
    assert not (machine.site / "run1.SHA256SUMS").exists()


def test_dry_call_has_no_gpu_options(machine: Machine) -> None:
    machine.write_python(gpu=100)
    first, second = machine.call("1", "--dry"), machine.call("2", "--dry")
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + second.stdout
    assert "--symbols" in first.stdout
    assert "--dry" in next(line for line in second.stdout.splitlines() if line.startswith("started"))
