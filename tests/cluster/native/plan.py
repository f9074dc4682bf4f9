"""Names and addresses of one cluster, inside one 10.X.0.0/16 that the host does not route."""

import ipaddress
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tests.cluster.errors import ClusterError

NAME = re.compile(r"[a-z][a-z0-9-]{0,11}")  # a link's name has at most 15 characters, and ours has a prefix of 3
NETS = range(77, 128)  # candidates for X
MAX_NODES = 64  # pod ranges .128 to .191; the range above is for the pods of fake nodes
CONTROL_PLANE = "cp"


@dataclass(frozen=True)
class Plan:
    """Names and addresses of the cluster `name` with its second octet `net` and its `nodes`."""

    name: str
    net: int
    nodes: tuple[str, ...]

    @property
    def machines(self) -> tuple[str, ...]:
        """All machines, the control plane first."""
        return (CONTROL_PLANE, *self.nodes)

    @property
    def host_link(self) -> str:
        """The name of the host's end of the link into the rack."""
        return f"rl-{self.name}"

    @property
    def cgroup(self) -> str:
        """The cluster's cgroup, below the root of every hierarchy."""
        return f"rlrun-{self.name}"

    @property
    def gateway(self) -> str:
        """The bridge's address inside the rack."""
        return f"10.{self.net}.0.1"

    @property
    def host_address(self) -> str:
        """The host's address on the bridge."""
        return f"10.{self.net}.0.254"

    @property
    def api_url(self) -> str:
        """The API server as the host and the nodes reach it."""
        return f"https://{self.address(CONTROL_PLANE)}:6443"

    @property
    def service_range(self) -> str:
        """Cluster addresses of Services."""
        return f"10.{self.net}.64.0/18"

    @property
    def api_service(self) -> str:
        """The cluster address of the Service `kubernetes`: Kubernetes takes the first of the range."""
        return f"10.{self.net}.64.1"

    @property
    def dns_service(self) -> str:
        """The cluster address of the Service `kube-dns`."""
        return f"10.{self.net}.64.10"

    @property
    def pod_range(self) -> str:
        """Addresses of pods on real nodes."""
        return f"10.{self.net}.128.0/18"

    @property
    def fake_pod_range(self) -> str:
        """Addresses that pods on fake nodes report; nothing listens there."""
        return f"10.{self.net}.192.0/18"

    def address(self, machine: str) -> str:
        """The address of a machine's `eth0`."""
        if machine == CONTROL_PLANE:
            return f"10.{self.net}.0.2"
        return f"10.{self.net}.0.{10 + self.nodes.index(machine)}"

    def pod_subnet(self, node: str) -> str:
        """The pod addresses of one node."""
        return f"10.{self.net}.{128 + self.nodes.index(node)}.0/24"


def check_name(name: str) -> str:
    """Return `name` if it is a valid name of a cluster.

    Raises:
        ClusterError: it is not valid.
    """
    if not NAME.fullmatch(name):
        raise ClusterError(f"cluster name {name!r}: use 1 to 12 lower-case letters, digits and '-', a letter first")
    return name


def node_names(count: int) -> tuple[str, ...]:
    """Return the names of `count` nodes: n0, n1, ...

    Raises:
        ClusterError: the address plan has no room for them.
    """
    if not 0 <= count <= MAX_NODES:
        raise ClusterError(f"nodes: {count} is not between 0 and {MAX_NODES}")
    return tuple(f"n{index}" for index in range(count))


def free_net(routes: Iterable[str], taken: Collection[int]) -> int:
    """Return the first X for which no route of the host overlaps 10.X.0.0/16.

    Args:
        routes: destinations of the host's routes, in the form that `ip route` prints ("10.1.0.0/16", "192.0.2.1",
            "default").
        taken: X of existing clusters, whose links may not be up yet.

    Raises:
        ClusterError: every candidate overlaps.
    """
    known = [ipaddress.ip_network(route) for route in routes if route[:1].isdigit() and ":" not in route]
    for net in NETS:
        if net not in taken and not any(ipaddress.ip_network(f"10.{net}.0.0/16").overlaps(route) for route in known):
            return net
    raise ClusterError(
        f"no free network: the host routes part of each of 10.{NETS[0]}.0.0/16 to 10.{NETS[-1]}.0.0/16; "
        "take down a cluster (python -m tests.cluster status lists them) or leave a VPN"
    )
