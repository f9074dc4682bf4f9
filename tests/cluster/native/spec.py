"""The setup of a machine as data: computed here from the plan, applied by `init.py`."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from .plan import CONTROL_PLANE, Plan
from .state import State

UPLINK = "up0"  # the rack's end of the link to the host
BRIDGE = "br0"
VOLUMES = "/tmp/hostpath_pv"  # folder in which Kubernetes' host-path provisioner creates volume folders
# Kernel settings of the whole host that a kubelet sets if they differ from its values.
KUBELET_SETTINGS = {
    "/proc/sys/vm/overcommit_memory": "1",
    "/proc/sys/vm/panic_on_oom": "0",
    "/proc/sys/kernel/panic": "10",
    "/proc/sys/kernel/panic_on_oops": "1",
    "/proc/sys/kernel/keys/root_maxkeys": "1000000",
    "/proc/sys/kernel/keys/root_maxbytes": "25000000",
}
NO_IPV6 = {"net.ipv6.conf.all.disable_ipv6": "1"}


@dataclass(frozen=True)
class Daemon:
    """A program that runs as long as its machine.

    Attributes:
        after: file that must exist before it starts; empty to start at once.
    """

    name: str
    argv: tuple[str, ...]
    after: str = ""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Spec:
    """One first process and its setup.

    Attributes:
        mounts: folder by its mount point in the machine.
        keep: folders of the host that stay visible, although a mount may cover them.
        masks: text by path of an existing file, which returns this text and can be written without effect outside.
        files: text by path, written after the mounts.
        ip: lines for `ip -batch` before the link from outside exists.
        link: the link from outside.
        ip_linked: lines for `ip -batch` after it exists.
        control: folder shared with the host (`init.Daemons`).
        logs: folder of the daemons' output.
        volumes: folder whose new subfolders become writable for every user; empty for none.
    """

    hostname: str
    control: str
    logs: str
    link: str
    mounts: dict[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    masks: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    ip: tuple[str, ...] = ("link set lo up",)
    ip_linked: tuple[str, ...] = ()
    sysctl: dict[str, str] = field(default_factory=dict)
    daemons: tuple[Daemon, ...] = ()
    volumes: str = ""

    def json(self) -> str:
        """Return the text that `init.py` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1)


def rack(plan: Plan, state: State) -> Spec:
    """Return the rack, which has only the bridge."""
    folder = state.machine("rack")
    return Spec(
        hostname=f"rack-{plan.name}",
        control=str(folder.control),
        logs=str(folder.logs),
        keep=(str(state.folder),),
        link=UPLINK,
        ip=(
            "link set lo up",
            f"link add {BRIDGE} type bridge",
            f"address add {plan.gateway}/24 dev {BRIDGE}",
            f"link set {BRIDGE} up",
        ),
        ip_linked=(f"link set {UPLINK} master {BRIDGE} up",),
        sysctl={"net.ipv4.ip_forward": "1", "net.bridge.bridge-nf-call-iptables": "0", **NO_IPV6},
    )


def machine(
    plan: Plan, state: State, name: str, *, keep: tuple[Path, ...], files: dict[str, str], daemons: tuple[Daemon, ...]
) -> Spec:
    """Return the control plane or a node: its own folders, its address, a route to each other node's pods."""
    folder = state.machine(name)
    routes = tuple(f"route add {plan.pod_subnet(node)} via {plan.address(node)}" for node in plan.nodes if node != name)
    return Spec(
        hostname=name,
        control=str(folder.control),
        logs=str(folder.logs),
        keep=(str(state.folder), *map(str, keep)),
        mounts={
            "/var/lib": str(folder.lib),
            "/var/log": str(folder.log),
            "/tmp": str(folder.tmp),
            VOLUMES: str(state.volumes),
        },
        masks={} if name == CONTROL_PLANE else KUBELET_SETTINGS,
        files=files,
        link="eth0",
        ip_linked=(
            "link set eth0 up",
            f"address add {plan.address(name)}/24 dev eth0",
            f"route add default via {plan.gateway}",
            *routes,
        ),
        # Bridged packets between two pods of one node must pass the netfilter hooks too: Services and policies act there.
        sysctl={"net.ipv4.ip_forward": "1", "net.bridge.bridge-nf-call-iptables": "1", **NO_IPV6},
        daemons=daemons,
        volumes=VOLUMES if name == CONTROL_PLANE else "",
    )
