"""A run's volume that becomes read-only for its pods, as after a server's failover or a file-system error found by the
kernel.

The file system cannot be made read-only while files are open for writing (EBUSY). So a read-only view is mounted over
it inside each container of the pods. New opens are refused (EROFS), `statvfs` reports read-only, and open files stay
writable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.native.cluster import NativeCluster
from tests.e2e.chaos.chaos_run import ChaosRun

MOUNT_PATH = "/data"
_IN_PODS = """
import ctypes, os, pathlib, sys
act, path, uids = sys.argv[1], sys.argv[2].encode(), sys.argv[3:]
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, READ_ONLY, REMOUNT, BIND, DETACH = 0x20000, 1, 32, 4096, 2

def call(name, *arguments):
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise SystemExit(f'{name} in {folder.name}: {os.strerror(number)}')

seen = set()
for folder in pathlib.Path('/proc').iterdir():
    if not folder.name.isdigit():
        continue
    try:
        group = (folder / 'cgroup').read_text().replace('_', '-')
        space = os.readlink(folder / 'ns/mnt')
        there = any(line.split()[4] == path.decode() for line in (folder / 'mountinfo').read_text().splitlines())
    except OSError:
        continue
    if not there or space in seen or not any(uid in group for uid in uids):
        continue
    seen.add(space)
    pid = os.fork()
    if not pid:
        handle = os.open(folder / 'ns/mnt', os.O_RDONLY)
        call('setns', handle, NEWNS)
        if act == 'cover':
            call('mount', path, path, None, BIND, None)
            call('mount', None, path, None, REMOUNT | BIND | READ_ONLY, None)
        else:
            call('umount2', path, DETACH)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(1)
print(len(seen))
"""


@contextmanager
def read_only(cluster: NativeCluster, run: ChaosRun) -> Iterator[float]:
    """Make the volume read-only for all present pods of the run until the end of the block; yield the time."""
    pods = [(str(pod["spec"]["nodeName"]), str(pod["metadata"]["uid"])) for pod in run.pods()]

    def each(act: str) -> int:
        uids = {node: [uid for where, uid in pods if where == node] for node in cluster.nodes}
        return sum(
            int(cluster.sh(n, "python3", "-c", _IN_PODS, act, f"{MOUNT_PATH}/{run.name}", *u))
            for n, u in uids.items()
            if u
        )

    now = time.time()
    try:
        assert each("cover") >= len(pods), "each pod has the run's folder"
        yield now
    finally:
        each("uncover")
