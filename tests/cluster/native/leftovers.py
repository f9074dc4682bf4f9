"""Remains of a cluster on the host, for tests that `down` removes everything."""

import os
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.cache import clusters_root

from . import cgroups
from .plan import Plan
from .state import State


def leftovers(name: str) -> list[str]:
    """Return everything that this host still has of the cluster `name`, one line each. A running cluster has many
    lines."""
    plan, folder = Plan(name, 0, ()), State(name).folder
    found = [f"process {pid} ({_command(pid)})" for pid in sorted(cgroups.processes(plan.cgroup) | _naming(folder))]
    found += [f"cgroup {group}" for group in cgroups.groups(plan.cgroup)]
    found += [f"mount {mount}" for mount in mounts_below(folder)]
    if Path("/sys/class/net", plan.host_link).exists():
        found.append(f"network link {plan.host_link}")
    if folder.exists():
        found.append(f"folder {folder}")
    return found


def known_names() -> list[str]:
    """Return the names of all clusters with any folder, cgroup or link."""
    links = {path.name.removeprefix("rl-") for path in Path("/sys/class/net").glob("rl-*")}
    folders = {folder.name for folder in clusters_root().glob("*/")}
    return sorted(links | folders | cgroups.cluster_names())


def standing() -> dict[str, int | None]:
    """Return the time in nanoseconds at which each of `known_names` was recorded, or None for remains without a record."""
    return {name: _recorded(name) for name in known_names()}


def left_since(before: Mapping[str, int | None]) -> list[str]:
    """Return the `leftovers` of all clusters except those in `before`, which may belong to other users.

    A cluster of the same name that was started since then counts.
    """
    return [
        line
        for name, recorded in standing().items()
        if name not in before or before[name] != recorded
        for line in leftovers(name)
    ]


def _recorded(name: str) -> int | None:
    try:
        return State(name).record.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def mounts_below(folder: Path) -> list[Path]:
    """Return the host's mount points at or below `folder`, the deepest first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = (Path(line.split()[4].replace("\\040", " ")) for line in lines)
    return sorted((point for point in points if point.is_relative_to(folder)), reverse=True)


def _naming(folder: Path) -> set[int]:
    """Return processes that have a file of `folder` in their command line, without this one and its ancestors."""
    own = set(_ancestors())
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in own and f"{folder}/" in _command(int(entry.name)):
            found.add(int(entry.name))
    return found


def _ancestors() -> list[int]:
    chain = [os.getpid()]
    while chain[-1] > 1:
        try:
            stat = Path(f"/proc/{chain[-1]}/stat").read_text()
        except OSError:
            break
        chain.append(int(stat.rpartition(")")[2].split()[1]))
    return chain


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return ""
