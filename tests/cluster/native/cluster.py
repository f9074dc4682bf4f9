"""A running native cluster: images, faults, commands in its machines."""

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster.base import ApiServer, Cluster
from tests.cluster.cache import locked
from tests.cluster.docker_archive import read_content
from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress, wait_until

from . import cgroups, golden
from .apiclient import ApiClient
from .namespaces import checked, enter, run_in
from .plan import CONTROL_PLANE, Plan
from .spec import BRIDGE
from .state import State

RACK = "rack"
CONTROLLERS = ("kube-controller-manager", "kube-scheduler")
RACK_DEPTH, MACHINE_DEPTH = 1, 2
IMPORT_TIMEOUT_S = 900.0


def first_process(plan: Plan, machine: str) -> int | None:
    """Return the host's id of the first process of a machine or of the rack, or None while it is off."""
    return cgroups.first_process(f"{plan.cgroup}/{machine}", RACK_DEPTH if machine == RACK else MACHINE_DEPTH)


def link_name(machine: str) -> str:
    """Return the name of the rack's end of a machine's cable."""
    return f"v-{machine}"


def log_tail(state: State, machine: str, daemon: str, lines: int = 15) -> str:
    """Return the last lines of a daemon's log."""
    file = state.machine(machine).logs / f"{daemon}.log"
    text = file.read_text(errors="replace").splitlines() if file.exists() else ["(no log)"]
    return "\n".join(text[-lines:])


class NativeApiServer:
    """The API server of a native cluster (`base.ApiServer`)."""

    def __init__(self, cluster: "NativeCluster") -> None:
        self._cluster = cluster
        self._control = cluster.state.machine(CONTROL_PLANE).control
        self._pid_file = self._control / "kube-apiserver.pid"

    def stop(self) -> None:
        """End it; connections are refused until `start`."""
        (self._control / "stopped").write_text("kube-apiserver\n")
        wait_until(lambda: not self._pid_file.exists(), "the API server to end", timeout=120)

    def start(self) -> None:
        """Start it again and wait until it is ready."""
        (self._control / "stopped").unlink(missing_ok=True)
        self._wait_ready()
        self._renew_controllers()

    def freeze(self) -> None:
        """Suspend it; requests hang until `thaw`."""
        self._cluster.sh(CONTROL_PLANE, "kill", "-STOP", self._pid_file.read_text())

    def thaw(self) -> None:
        """Resume it and wait until it is ready."""
        self._cluster.sh(CONTROL_PLANE, "kill", "-CONT", self._pid_file.read_text())
        self._wait_ready()
        self._renew_controllers()

    def _renew_controllers(self) -> None:
        """Restart the controllers, which lose their leadership and end after a long outage in ordinary clusters.

        Here each of them runs without replicas and leader election, and would wait for up to a minute before its next
        request.
        """
        for daemon in CONTROLLERS:
            with contextlib.suppress(FileNotFoundError):  # the machine restarts it
                self._cluster.sh(CONTROL_PLANE, "kill", (self._control / f"{daemon}.pid").read_text())

    def _wait_ready(self) -> None:
        client = ApiClient(self._cluster.kubeconfig)
        state = self._cluster.state
        wait_until(
            client.ready,
            "the API server to be ready",
            timeout=180,
            state=lambda: log_tail(state, CONTROL_PLANE, "kube-apiserver"),
        )


class NativeCluster(Cluster):
    """A cluster whose machines are process trees of this host."""

    provider = "native"

    def __init__(self, plan: Plan) -> None:
        self.plan, self.state = plan, State(plan.name)
        super().__init__(plan.name, self.state.kubeconfig, self.state.bin, plan.nodes)

    def down(self) -> None:
        """Take the cluster down and remove its files."""
        from .lifecycle import down  # it builds this class

        down(self.name, Progress(lambda _: None))

    @property
    def api_server(self) -> ApiServer:
        """The API server's process."""
        return NativeApiServer(self)

    @property
    def audit_log(self) -> Path:
        """Audit log with one JSON line for each answered write request."""
        return self.state.machine(CONTROL_PLANE).log / "audit.log"

    def _damage(self) -> str:
        off = [machine for machine in (RACK, *self.plan.machines) if first_process(self.plan, machine) is None]
        return "".join(
            f"\nmachine {name} is off; its last words:\n{log_tail(self.state, name, 'init')}" for name in off
        )

    def load_image(self, *archives: Path) -> None:
        """Import into the golden root for later clusters, and into every node that is on.

        A name and archive that the cluster already has costs nothing.
        """
        golden.add(archives, Progress(lambda _: None))
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(self._load_on, node, archive) for archive in archives for node in self.nodes]:
                done.result()

    def _load_on(self, node: str, archive: Path) -> None:
        content, folder = read_content(archive), self.state.machine(node)
        with locked(f"images-{self.name}-{node}"):
            if content.is_in(folder.read_images()):
                return
            command = ("ctr", "images", "import", "-")  # through stdin: a machine sees its own /tmp
            run_in(self._pid(node), command, stdin=archive, timeout=IMPORT_TIMEOUT_S)
            folder.write_images(folder.read_images() | dict.fromkeys(content.names, content.key))

    def sh(self, machine: str, *command: str, timeout: float = 60.0) -> str:
        """Run a command as root inside a machine ("cp", "n0", ...) and return its output."""
        return run_in(self._pid(machine), command, timeout=timeout)

    def folder_of(self, machine: str, path: str) -> Path:
        """Return a folder of a machine as a path of this machine, valid while the machine is on."""
        return Path(f"/proc/{self._pid(machine)}/root{path}")

    def _pid(self, machine: str) -> int:
        if machine not in (RACK, *self.plan.machines):
            raise ClusterError(f"cluster {self.name} has no machine {machine!r}, only {', '.join(self.plan.machines)}")
        pid = first_process(self.plan, machine)
        if pid is None:
            raise ClusterError(f"machine {machine} of cluster {self.name} is off")
        return pid

    def _on_the_bridge(self, *command: str) -> None:
        checked(enter(self._pid(RACK), command, namespaces=["--net"]), shown=command)

    def power_off(self, node: str) -> None:
        """Cut a node's power: all its processes end at once."""
        cgroup = f"{self.plan.cgroup}/{node}"
        pid = self._pid(node)
        cgroups.thaw_all(cgroup)
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: not cgroups.processes(cgroup),
            f"the processes of {node} to end",
            timeout=60,
            state=lambda: str(cgroups.processes(cgroup)),
        )

    def power_on(self, node: str) -> None:
        """Start a node that is off; its disk is unchanged."""
        from .lifecycle import start_machine

        if first_process(self.plan, node) is not None:
            raise ClusterError(f"machine {node} of cluster {self.name} is on")
        start_machine(self.plan, self.state, node)

    def freeze(self, node: str) -> None:
        """Suspend every process of a node."""
        self._pid(node)
        cgroups.set_frozen(f"{self.plan.cgroup}/{node}", True)

    def thaw(self, node: str) -> None:
        """Resume a frozen node."""
        self._pid(node)
        cgroups.set_frozen(f"{self.plan.cgroup}/{node}", False)

    def unplug(self, node: str) -> None:
        """Pull a node's network cable."""
        self._on_the_bridge("ip", "link", "set", link_name(node), "down")

    def plug(self, node: str) -> None:
        """Plug the cable in again."""
        self._on_the_bridge("ip", "link", "set", link_name(node), "up")

    def isolate(self, node: str) -> None:
        """Cut a node off from all isolated nodes; it still reaches the API server. Isolate both nodes to separate them."""
        self._on_the_bridge("ip", "link", "set", link_name(node), "type", "bridge_slave", "isolated", "on")

    def join(self, node: str) -> None:
        """End `isolate`."""
        self._on_the_bridge("ip", "link", "set", link_name(node), "type", "bridge_slave", "isolated", "off")


def plug_in(plan: Plan, machine: str, pid: int) -> None:
    """Connect a machine that has just started: a cable from its `eth0` to the rack's bridge.

    A cable of an earlier life disappears with its namespace, a little later than its processes, so the name may still
    be in use for a moment.
    """
    rack = first_process(plan, RACK)
    if rack is None:
        raise ClusterError(f"cluster {plan.name} is down")
    link = link_name(machine)
    add = ["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid)]
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(ClusterError):
            checked(enter(rack, add, namespaces=["--net"]), shown=add)
            break
        if time.monotonic() > deadline:
            raise ClusterError(f"cannot make the link of machine {machine}: {link} stays taken")
        time.sleep(0.05)
    attach = ["ip", "link", "set", link, "master", BRIDGE, "up"]
    checked(enter(rack, attach, namespaces=["--net"]), shown=attach)
