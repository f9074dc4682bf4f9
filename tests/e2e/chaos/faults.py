"""Faults of a run on a native cluster: in processes, pods, nodes, the network and the control plane."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlrun_operator.names import RESTART_ANNOTATION
from rlrun_operator.times import format_rfc3339
from tests.cluster import deploy
from tests.e2e.chaos.chaos_run import ChaosRun

CONTROL_PLANE = "cp"
WORDS = {
    "trainer-0": "tests.support.stub.trainer",
    "trainer-1": "tests.support.stub.trainer",
    "orchestrator": "-m rlrun.orchestrator",
    "inference": "tests.support.stub.inference",
}
"""Words in the command line of each role's own process, which is not the first process of its container."""
_SIGNAL = """
import os, pathlib, signal, sys, time
uid, words, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
found = []
for folder in pathlib.Path('/proc').iterdir():
    if folder.name.isdigit() and int(folder.name) != os.getpid():
        try:
            line = (folder / 'cmdline').read_bytes().decode().replace(chr(0), ' ')
            group = (folder / 'cgroup').read_text()
        except OSError:
            continue
        if words in line and uid in group.replace('_', '-'):
            found.append(int(folder.name))
now = time.time()
for pid in found:
    os.kill(pid, number)
print(now if found else 0)
"""
_STARVE = """
import os, pathlib, subprocess, sys, time
uid, words = sys.argv[1], sys.argv[2]
for folder in pathlib.Path('/proc').iterdir():
    if not folder.name.isdigit() or int(folder.name) == os.getpid():
        continue
    try:
        line = (folder / 'cmdline').read_bytes().decode().replace(chr(0), ' ')
        groups = dict(line.split(':')[1:3] for line in (folder / 'cgroup').read_text().splitlines())
    except OSError:
        continue
    if words in line and uid in groups['memory'].replace('_', '-'):
        break
else:
    print(0)
    raise SystemExit
group = pathlib.Path('/sys/fs/cgroup/memory') / groups['memory'].lstrip('/')
usage = int((group / 'memory.usage_in_bytes').read_text())
(group / 'memory.limit_in_bytes').write_text(str(usage + (8 << 20)))
now = time.time()
# Something small that asks for more than is left: the kernel ends what is largest, the role.
hog = (
    'import os, pathlib, time; pathlib.Path(%r).write_text(str(os.getpid())); '
    'pathlib.Path("/proc/self/oom_score_adj").write_text("0"); '
    'b = [bytearray(b"x" * (1 << 20)) for _ in range(24)]; time.sleep(2)'
)
subprocess.run([sys.executable, '-S', '-c', hog % str(group / 'cgroup.procs')], capture_output=True)
print(now)
"""


class Faults:
    """Faults of one run, or of its cluster. Each method returns the time of the fault in seconds since the epoch."""

    def __init__(self, run: ChaosRun) -> None:
        self.cluster, self.run = run.native, run

    def pod(self, who: str) -> dict[str, Any]:
        """Return the name of the pod of `trainer-0`, `trainer-1`, `orchestrator`, `inference` (the first engine), or
        `operator`."""
        if who == "operator":
            listed = self.cluster.kubectl("-n", deploy.SYSTEM, "get", "pods", "-o", "json")
            return next(p for p in json.loads(listed)["items"] if "deletionTimestamp" not in p["metadata"])
        role, _, ordinal = who.partition("-")
        pods = sorted(self.run.pods(role), key=lambda pod: str(pod["metadata"]["name"]))
        return next(
            pod
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
            and (not ordinal or pod["metadata"]["name"].endswith(f"-{ordinal}"))
        )

    def signal(self, who: str, number: int) -> float:
        """Send a signal to a role's own process, from outside its container."""
        pod = self.pod(who)
        words = WORDS.get(who, "rlrun")
        return self._inside(pod, _SIGNAL, words, str(int(number)))

    def starve(self, who: str) -> float:
        """Reduce the memory of a role's container so far that the kernel kills its largest process."""
        return self._inside(self.pod(who), _STARVE, WORDS[who])

    def _inside(self, pod: dict[str, Any], script: str, *arguments: str) -> float:
        uid = str(pod["metadata"]["uid"])
        output = self.cluster.sh(str(pod["spec"]["nodeName"]), "python3", "-c", script, uid, *arguments)
        at = float(output.strip() or 0)
        assert at, f"no process of {pod['metadata']['name']} has {arguments[0]!r} in its command line"
        return at

    def delete_pod(self, who: str, *, force: bool = False) -> float:
        """Delete a pod with `kubectl delete pod`, with or without its grace period."""
        name = str(self.pod(who)["metadata"]["name"])
        now = time.time()
        at_once = ("--grace-period=0", "--force") if force else ()
        self.run.kubectl("delete", "pod", name, "--wait=false", *at_once)
        return now

    def edit(self, **spec: Any) -> None:
        """Edit the run."""
        patch = json.dumps({"spec": spec})
        self.run.kubectl("patch", "rlrun", self.run.name, "--type=merge", "-p", patch)

    def restart(self) -> float:
        """Request a restart, as a user does."""
        now = time.time()
        self.run.kubectl("annotate", "rlrun", self.run.name, f"{RESTART_ANNOTATION}={format_rfc3339(now)}")
        return now

    def node_of(self, who: str) -> str:
        """Return the node of its pod."""
        return str(self.pod(who)["spec"]["nodeName"])

    @contextmanager
    def without(self, machine: str, daemon: str) -> Iterator[float]:
        """Kill a daemon (kubelet, etcd, ...) of a machine; it stays stopped until the end of the block."""
        stopped = self.cluster.state.machine(machine).control / "stopped"
        now = time.time()
        stopped.write_text(f"{daemon}\n")
        try:
            yield now
        finally:
            stopped.unlink(missing_ok=True)

    @contextmanager
    def during(self, begin: Callable[[], None], end: Callable[[], None]) -> Iterator[float]:
        """Apply a fault for the duration of a block."""
        now = time.time()
        begin()
        try:
            yield now
        finally:
            end()
