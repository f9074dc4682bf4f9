"""The cgroups of a cluster: `/rlrun-NAME/MACHINE` in every hierarchy, of version 1, version 2 or both.

A machine's own daemons are in the leaf `init`: version 2 allows no processes next to child groups that have
controllers, and the kubelet creates the pods' groups next to that leaf. All processes of a cluster are in this tree. So
the tree lists the live processes, locates the first process of each machine, and shows remains.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.errors import ClusterError
from tests.cluster.progress import wait_until

ROOT = Path("/sys/fs/cgroup")
LEAF = "init"
SHARES = {"cpu.shares": 8192, "cpu.weight": 800}
"""CPU shares of a whole cluster in versions 1 and 2: those of eight processes. With the usual share of one, its control
plane, kubelets and pods together get a tenth of a machine with nine other busy processes, and Leases expire without a
fault."""


def hierarchies() -> list[Path]:
    """Return the root of every mounted hierarchy."""
    if (ROOT / "cgroup.procs").exists():
        return [ROOT]
    return [
        folder for folder in sorted(ROOT.iterdir()) if not folder.is_symlink() and (folder / "cgroup.procs").exists()
    ]


def create(path: str) -> list[Path]:
    """Create the cgroup `path` ("rlrun-demo/n0") with its leaf in every hierarchy.

    Returns:
        The `cgroup.procs` files of the leaf: a process that writes 0 to each moves there.
    """
    files = []
    for root in hierarchies():
        parts = Path(path).parts
        for depth in range(1, len(parts) + 1):
            folder = root.joinpath(*parts[:depth])
            folder.mkdir(exist_ok=True)
            _inherit(folder)
        _claim(root / parts[0])
        leaf = root / path / LEAF
        leaf.mkdir(exist_ok=True)
        _inherit_cpuset(leaf)
        files.append(leaf / "cgroup.procs")
    return files


def _inherit(folder: Path) -> None:
    """Copy the parent's cpuset and controllers to the group; an empty cpuset would accept no process."""
    _inherit_cpuset(folder)
    controllers = folder / "cgroup.controllers"
    if controllers.exists():
        wanted = (folder.parent / "cgroup.controllers").read_text().split()
        (folder.parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers.read_text().split()))


def _claim(cluster: Path) -> None:
    for name, value in SHARES.items():
        if (cluster / name).exists():
            (cluster / name).write_text(str(value))


def _inherit_cpuset(folder: Path) -> None:
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = folder / name
        if not (folder / "cgroup.controllers").exists() and file.exists() and not file.read_text().strip():
            file.write_text((folder.parent / name).read_text())


def groups(path: str) -> list[Path]:
    """Return every cgroup of the tree `path`, the deepest first."""
    found = []
    for root in hierarchies():
        for folder, _, _ in os.walk(root / path, topdown=False):
            found.append(Path(folder))
    return found


def processes(path: str) -> set[int]:
    """Return the ids of all live processes in the tree `path`, without zombies."""
    pids: set[int] = set()
    for group in groups(path):
        try:
            pids |= {int(line) for line in (group / "cgroup.procs").read_text().split()}
        except OSError:  # the group has just been removed
            continue
    return {pid for pid in pids if pid > 0 and _alive(pid)}


def first_process(path: str, depth: int) -> int | None:
    """Return the id of the process in the leaf of `path` that is PID 1 of a namespace nested `depth` deep (rack 1,
    machine 2).

    The id is read from the kernel each time, because a file could name a process of an earlier life.
    """
    for root in hierarchies():
        try:
            pids = (root / path / LEAF / "cgroup.procs").read_text().split()
        except OSError:
            continue
        for pid in pids:
            levels = _namespace_ids(pid)
            if len(levels) == depth + 1 and levels[-1] == "1":
                return int(pid)
    return None


def _namespace_ids(pid: str) -> list[str]:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return []
    return next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def set_frozen(path: str, frozen: bool) -> None:
    """Suspend or resume every process of the tree `path`.

    Raises:
        ClusterError: it was not done within 60 s.
    """
    for root in hierarchies():
        version1, version2 = root / path / "freezer.state", root / path / "cgroup.freeze"
        if version1.exists():
            state = "FROZEN" if frozen else "THAWED"
            version1.write_text(state)
            wait_until(lambda: version1.read_text().strip() == state, f"{path} to be {state}", timeout=60)  # noqa: B023
            return
        if version2.exists() and root == ROOT:
            version2.write_text("1" if frozen else "0")
            # The kernel freezes the processes of all groups below one after the other, after the write has returned.
            line = f"frozen {int(frozen)}"
            events = root / path / "cgroup.events"
            wait_until(lambda: line in events.read_text().splitlines(), f"{path} to report {line!r}", timeout=60)  # noqa: B023
            return
    raise ClusterError("this machine mounts no cgroup hierarchy with a freezer")


def thaw_all(path: str) -> None:
    """Thaw every group of the tree, because SIGKILL has no effect before."""
    for group in groups(path):
        for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            if (group / name).exists():
                (group / name).write_text(value)


def remove(path: str, *, timeout: float = 10.0) -> None:
    """Remove the tree `path`; groups stay busy for a moment after their last process.

    Raises:
        ClusterError: a group still exists after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while left := list(_remove_once(path)):
        if time.monotonic() > deadline:
            raise ClusterError(f"cannot remove cgroup {left[0]}: processes {sorted(processes(path))} are in its tree")
        time.sleep(0.02)


def _remove_once(path: str) -> Iterator[Path]:
    for group in groups(path):
        try:
            group.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            yield group


def cluster_names() -> set[str]:
    """Return the names of clusters that have cgroups."""
    prefix = "rlrun-"
    return {
        folder.name.removeprefix(prefix)
        for root in hierarchies()
        for folder in root.iterdir()
        if folder.name.startswith(prefix) and folder.is_dir()
    }
