"""Cgroups of version 2 against the kernel. A machine with version 1 also has a hierarchy of version 2, with few controllers."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.native import cgroups
from tests.cluster.progress import wait_until

ROUND = 'for file; do echo 0 >"$file" || exit 1; done; for i in 1 2 3; do sleep 600 & done; while :; do :; done'
"""Shell code that moves itself into cgroups, starts processes there, and computes."""


def find_version2_mount() -> Path | None:
    """Return the mount point of version 2, or None."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next((Path(words[1]) for words in lines if words[2] == "cgroup2" and os.access(words[1], os.W_OK)), None)


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a new tree in the hierarchy of version 2, the only hierarchy in the test."""
    root = find_version2_mount()
    if root is None or os.geteuid() != 0:
        pytest.skip("needs root and a writable hierarchy of cgroup version 2")
    monkeypatch.setattr(cgroups, "ROOT", root)
    name = f"rlrun-t{uuid.uuid4().hex[:8]}"
    yield name
    cgroups.thaw_all(name)
    for pid in cgroups.processes(name):
        os.kill(pid, 9)
    cgroups.remove(name, timeout=60)


def read_cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process, in ticks of the kernel."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


def test_version_2_tree_contains_freezes_and_deletes_processes(tree: str) -> None:
    files = cgroups.create(f"{tree}/n0")
    assert files == [cgroups.ROOT / tree / "n0" / cgroups.LEAF / "cgroup.procs"]
    controllers = (cgroups.ROOT / "cgroup.controllers").read_text().split()
    pods = cgroups.ROOT / tree / "n0" / "kubepods"
    pods.mkdir()
    assert (pods / "cgroup.controllers").read_text().split() == controllers, (
        "the kubelet refuses a root that lacks some"
    )
    process = subprocess.Popen(["sh", "-c", ROUND, "sh", *map(str, files)])
    wait_until(lambda: len(cgroups.processes(tree)) == 4, "the processes", timeout=60)
    wait_until(lambda: read_cpu_ticks(process.pid) > 0, "some computing", timeout=60)
    cgroups.set_frozen(f"{tree}/n0", True)
    assert "frozen 1" in (cgroups.ROOT / tree / "n0" / "cgroup.events").read_text().splitlines()
    used = read_cpu_ticks(process.pid)
    cgroups.set_frozen(f"{tree}/n0", False)
    wait_until(lambda: read_cpu_ticks(process.pid) > used, "the process to continue", timeout=60)
    cgroups.set_frozen(f"{tree}/n0", True)
    cgroups.thaw_all(tree)
    wait_until(lambda: read_cpu_ticks(process.pid) > used + 1, "the process to continue", timeout=60)
    for pid in cgroups.processes(tree):
        os.kill(pid, 9)
    process.wait(timeout=60)
    cgroups.remove(tree, timeout=60)
    assert not (cgroups.ROOT / tree).exists()
