"""Names and addresses of a native cluster."""

import ipaddress
import itertools

import pytest

from tests.cluster import ClusterError
from tests.cluster.native.plan import MAX_NODES, NETS, Plan, check_name, free_net, node_names


def test_address_ranges_are_inside_network_without_overlap() -> None:
    plan = Plan("a", 77, node_names(MAX_NODES))
    machines = ipaddress.ip_network("10.77.0.0/24")
    ranges = [
        machines,
        *map(ipaddress.ip_network, (plan.service_range, plan.pod_range, plan.fake_pod_range)),
    ]
    assert all(part.subnet_of(ipaddress.ip_network("10.77.0.0/16")) for part in ranges)  # type: ignore[arg-type]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(ranges, 2))


def test_machines_and_nodes_have_unique_addresses() -> None:
    plan = Plan("a", 80, node_names(MAX_NODES))
    addresses = [plan.gateway, plan.host_address, *map(plan.address, plan.machines)]
    assert len(set(addresses)) == len(addresses) == MAX_NODES + 3
    subnets = [ipaddress.ip_network(plan.pod_subnet(node)) for node in plan.nodes]
    assert len(set(subnets)) == MAX_NODES
    assert all(subnet.subnet_of(ipaddress.ip_network(plan.pod_range)) for subnet in subnets)  # type: ignore[arg-type]


def test_occupied_networks_are_skipped() -> None:
    routes = ["default", "via", "10.77.0.0/24", "local", "10.78.3.4", "192.0.2.0/24"]
    assert free_net(routes, taken=set()) == 79
    assert free_net(routes, taken={79, 80}) == 81


def test_missing_free_network_is_reported_with_fix() -> None:
    with pytest.raises(ClusterError, match=r"no free network.*leave a VPN"):
        free_net(["10.0.0.0/8"], taken=set())
    with pytest.raises(ClusterError, match="no free network"):
        free_net([], taken=set(NETS))


def test_names_of_kernel_objects_have_room() -> None:
    plan = Plan(check_name("a-cluster-12"), 77, ())
    assert len(plan.host_link) <= 15


@pytest.mark.parametrize("name", ["", "Upper", "1st", "a-cluster-123", "a/b", "a_b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ClusterError, match=r"cluster name .*use 1 to 12 lower-case letters"):
        check_name(name)


def test_node_count_is_limited() -> None:
    assert node_names(0) == ()
    assert node_names(2) == ("n0", "n1")
    with pytest.raises(ClusterError, match="nodes: 65 is not between 0 and 64"):
        node_names(65)
