"""Start and end of a native cluster."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster import binaries
from tests.cluster.cache import cache_root, locked
from tests.cluster.errors import ClusterError
from tests.cluster.packages import ensure_packages
from tests.cluster.progress import Progress, wait_until

from . import cgroups, components, golden, spec
from .apiclient import ApiClient, ApiError
from .cluster import RACK, NativeCluster, first_process, log_tail, plug_in
from .leftovers import leftovers, mounts_below
from .namespaces import checked, start_first_process
from .objects import collection, initial_objects
from .pki import write_credentials
from .plan import CONTROL_PLANE, Plan, check_name, free_net, node_names
from .state import State, recorded_nets

API_TIMEOUT_S = 90.0
NODES_TIMEOUT_S = 90.0
MACHINE_TIMEOUT_S = 20.0
DOWN_TIMEOUT_S = 20.0
# Outermost processes that this process has started, by cluster; `down` waits for their ends.
_started: dict[str, list[subprocess.Popen[bytes]]] = {}


def tools(node_count: int, kwok: bool) -> tuple[str, ...]:
    """Return the tools that a cluster needs."""
    return ("kube", "etcd", "helm", *(["coredns"] if node_count else []), *(["kwok"] if kwok else []))


def prepare(progress: Progress, *, nodes: int = 2, kwok: bool = True) -> dict[str, Path]:
    """Get the slow prerequisites of `up`: packages and binaries.

    Returns:
        The path of every command.

    Raises:
        ClusterError: not root, not Linux, or a prerequisite is not available.
    """
    prepare_packages(progress)
    return binaries.find(*tools(nodes, kwok), progress=progress)


def prepare_packages(progress: Progress) -> None:
    """Install the distribution's packages that a cluster needs.

    Raises:
        ClusterError: not root, not Linux, or a package is not available.
    """
    _require_root()
    ensure_packages(progress)


def _require_root() -> None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise ClusterError(
            "a native cluster needs Linux and root (namespaces, cgroups, mounts): run it with sudo, "
            "or start Docker and install kind, or set RLRUN_KUBECONFIG to the kubeconfig of a cluster"
        )


def up(name: str, *, nodes: int, kwok: bool, images: Sequence[Path], tie: bool, progress: Progress) -> NativeCluster:
    """Start the cluster `name`, or attach to it if it is up.

    Raises:
        ClusterError: a prerequisite is missing, something did not start, or it is up with other nodes.
    """
    names = node_names(nodes)
    with locked(f"cluster-{name}"):
        if running := attach(name):
            if running.nodes != names:
                raise ClusterError(
                    f"cluster {name} is up with {len(running.nodes)} nodes, not {nodes}: "
                    f"take it down first (python -m tests.cluster down --name {name})"
                )
            running.load_image(*images)
            progress(f"cluster {name} is up already")
            return running
        commands = prepare(progress, nodes=nodes, kwok=kwok)
        if leftovers(name):
            _remove(name)
            progress("remains of an earlier cluster removed")
        if nodes:
            golden.add(images, progress)
        plan = _choose_plan(name, names)
        try:
            _start(plan, commands, kwok, tie, progress)
        except BaseException:
            kept = cache_root() / "failed" / name
            shutil.rmtree(kept, ignore_errors=True)
            for machine in (RACK, *plan.machines):
                shutil.copytree(State(name).machine(machine).logs, kept / machine, dirs_exist_ok=True)
            progress(f"failed: logs kept in {kept}")
            _remove(name)
            raise
        return NativeCluster(plan)


def attach(name: str) -> NativeCluster | None:
    """Return the cluster `name`, or None if it is not up."""
    plan = State(check_name(name)).read_plan()
    return NativeCluster(plan) if plan and first_process(plan, RACK) else None


def down(name: str, progress: Progress) -> bool:
    """Take the cluster `name` down, or remove its remains.

    Returns:
        Whether the cluster or remains of it existed.

    Raises:
        ClusterError: something cannot be removed.
    """
    check_name(name)
    with locked(f"cluster-{name}"):
        if not leftovers(name):
            return False
        _require_root()
        _remove(name)
    progress(f"cluster {name} is down")
    return True


def _choose_plan(name: str, nodes: tuple[str, ...]) -> Plan:
    with locked("network"):
        routes = checked(["ip", "-4", "route", "show", "table", "all"]).splitlines()
        destinations = [word for line in routes for word in line.split()[:2]]
        plan = Plan(name, free_net(destinations, recorded_nets()), nodes)
        State(name).write_plan(plan)
    return plan


def _start(plan: Plan, commands: Mapping[str, Path], kwok: bool, tie: bool, progress: Progress) -> None:
    state = State(plan.name)
    _write_folder(plan, state, commands, kwok)
    progress(f"credentials and configuration written, network 10.{plan.net}.0.0/16")
    _start_rack(plan, state, tie)
    for machine in plan.machines:
        start_machine(plan, state, machine)
    progress(f"machines {', '.join(plan.machines)} are on")
    client = ApiClient(state.kubeconfig)
    wait_until(
        client.ready,
        "the API server",
        timeout=API_TIMEOUT_S,
        state=lambda: "\n".join(log_tail(state, CONTROL_PLANE, daemon) for daemon in ("etcd", "kube-apiserver")),
    )
    progress("API server is ready")
    for item in initial_objects(plan):
        _wait_for_namespace(client, item["metadata"].get("namespace"))
        client.create(collection(item), item)
    state.api_ready.touch()
    _wait_for_nodes(plan, state, client)
    if plan.nodes:
        progress(f"nodes {', '.join(plan.nodes)} are Ready")
    wait_until(
        lambda: _exists(client, "/api/v1/namespaces/default/serviceaccounts/default"),
        "the default service account",
        timeout=120,
        state=lambda: log_tail(state, CONTROL_PLANE, "kube-controller-manager"),
    )


def _write_folder(plan: Plan, state: State, commands: Mapping[str, Path], kwok: bool) -> None:
    state.bin.mkdir()
    state.volumes.mkdir()
    state.volumes.chmod(0o1777)
    for command in ("kubectl", "helm"):
        (state.bin / command).symlink_to(commands[command])
    write_credentials(plan, state.credentials)
    shutil.copy(state.credentials / "admin.kubeconfig", state.kubeconfig)
    golden.golden_root().mkdir(exist_ok=True)
    keep = {path.resolve().parent for path in commands.values()} | {path.parent for path in commands.values()}
    interpreter = {Path(sys.prefix), Path(sys.base_prefix), components.REPOSITORY}
    visible = tuple(sorted(keep | interpreter | {golden.golden_root()}))
    for machine in plan.machines:
        folder = state.machine(machine)
        folder.make()
        if machine == CONTROL_PLANE:
            files = components.control_plane_files(plan, state)
            daemons = components.control_plane(plan, state, commands, kwok=kwok)
        else:
            files = components.node_files(plan, state, machine)
            daemons = components.node(plan, state, machine, commands)
            folder.write_images(golden.furnish(folder.lib / "containerd"))
        folder.spec.write_text(spec.machine(plan, state, machine, keep=visible, files=files, daemons=daemons).json())
    rack = state.machine(RACK)
    rack.make()
    rack.spec.write_text(spec.rack(plan, state).json())


def _start_rack(plan: Plan, state: State, tie: bool) -> None:
    for module in ("overlay", "br_netfilter", "nf_tables"):  # built in on some kernels, and then modprobe may fail
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["modprobe", module], capture_output=True)
    pid = _start_first(plan, state, RACK, tie=tie)
    checked(["ip", "link", "add", plan.host_link, "type", "veth", "peer", "name", spec.UPLINK, "netns", str(pid)])
    checked(["ip", "address", "add", f"{plan.host_address}/24", "dev", plan.host_link])
    checked(["ip", "link", "set", plan.host_link, "up"])
    _wait_up(plan, state, RACK)


def start_machine(plan: Plan, state: State, machine: str) -> None:
    """Start a machine for the first time or after a power-off.

    Raises:
        ClusterError: it does not start its daemons.
    """
    pid = _start_first(plan, state, machine)
    plug_in(plan, machine, pid)
    _wait_up(plan, state, machine)


def _start_first(plan: Plan, state: State, machine: str, *, tie: bool = False) -> int:
    folder, cgroup = state.machine(machine), f"{plan.cgroup}/{machine}"
    cgroups.remove(cgroup)
    (folder.control / "up").unlink(missing_ok=True)
    rack = None if machine == RACK else first_process(plan, RACK)
    process = start_first_process(folder.spec, cgroup, folder.logs / "init.log", rack=rack, tie=tie)
    _started.setdefault(plan.name, []).append(process)
    wait_until(
        lambda: first_process(plan, machine) is not None,
        f"machine {machine} to start",
        timeout=MACHINE_TIMEOUT_S,
        interval=0.005,
        state=lambda: log_tail(state, machine, "init"),
    )
    pid = first_process(plan, machine)
    if pid is None:
        raise ClusterError(f"machine {machine} ended at once:\n{log_tail(state, machine, 'init')}")
    return pid


def _wait_up(plan: Plan, state: State, machine: str) -> None:
    mark = state.machine(machine).control / "up"

    def is_up() -> bool:
        if first_process(plan, machine) is None:
            raise ClusterError(f"machine {machine} ended:\n{log_tail(state, machine, 'init')}")
        return mark.exists()

    wait_until(
        is_up,
        f"machine {machine} to be up",
        timeout=MACHINE_TIMEOUT_S,
        interval=0.01,
        state=lambda: log_tail(state, machine, "init"),
    )


def _exists(client: ApiClient, path: str) -> bool:
    try:
        client.get(path)
    except ApiError:
        return False
    return True


def _wait_for_namespace(client: ApiClient, namespace: str | None) -> None:
    """Wait for a namespace: the server creates its namespaces after it reports ready."""
    if namespace:
        wait_until(lambda: _exists(client, f"/api/v1/namespaces/{namespace}"), f"namespace {namespace}", timeout=120)


def _wait_for_nodes(plan: Plan, state: State, client: ApiClient) -> None:
    def not_ready() -> list[str]:
        ready = {
            node["metadata"]["name"]
            for node in client.get("/api/v1/nodes")["items"]
            for condition in node.get("status", {}).get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
        }
        return sorted(set(plan.nodes) - ready)

    def logs() -> str:
        return "\n".join(f"{node}, kubelet:\n{log_tail(state, node, 'kubelet')}" for node in not_ready())

    wait_until(lambda: not not_ready(), "nodes to be Ready", timeout=NODES_TIMEOUT_S, state=logs)


def _remove(name: str) -> None:
    """End every process of the cluster by ending the rack's first, then remove the remains in the kernel and on disk."""
    plan, state = Plan(name, 0, ()), State(name)
    cgroups.thaw_all(plan.cgroup)
    rack = first_process(plan, RACK)
    for pid in [rack] if rack else cgroups.processes(plan.cgroup):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: not cgroups.processes(plan.cgroup),
        f"the processes of cluster {name} to end",
        timeout=DOWN_TIMEOUT_S,
        interval=0.02,
        state=lambda: f"still there: {sorted(cgroups.processes(plan.cgroup))}",
    )
    for process in _started.pop(name, []):
        process.wait(timeout=DOWN_TIMEOUT_S)
    link = Path("/sys/class/net", plan.host_link)
    if link.exists():
        with contextlib.suppress(ClusterError):  # removed with the rack's namespace anyway, a moment later
            checked(["ip", "link", "delete", plan.host_link])
    wait_until(lambda: not link.exists(), f"link {plan.host_link} to go", timeout=60)
    cgroups.remove(plan.cgroup)
    for mount in mounts_below(state.folder):
        checked(["umount", "--lazy", str(mount)])
    if state.folder.exists():
        shutil.rmtree(state.folder)
