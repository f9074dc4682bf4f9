"""Addresses of the API server, for the NetworkPolicies of orchestrators.

In most networks a policy sees the address behind the Service `kubernetes`; in some it sees the Service's own. Both are in the namespace
`default`, and they may change while runs are active, because control planes are replaced.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from rlrun_operator.kube.client import ApiError, Client
from rlrun_operator.kube.resources import Resource
from rlrun_operator.state import Json

NAMESPACE, SERVICE = "default", "kubernetes"
ENDPOINT_SLICE = Resource("EndpointSlice", "discovery.k8s.io", "v1", "endpointslices")
_SERVICES = Resource("Service", "", "v1", "services")

Rules = tuple[Json, ...]


async def api_server_rules(client: Client) -> Rules:
    """Return egress rules that allow only the API server.

    Raises:
        LookupError: the addresses cannot be determined; the message has the cause.
        UnavailableError: the API server does not answer.
    """
    try:
        found = await client.get(ENDPOINT_SLICE, NAMESPACE, SERVICE)
        service = await client.get(_SERVICES, NAMESPACE, SERVICE)
    except ApiError as error:
        raise LookupError(str(error)) from error
    rules = (*_endpoint_rules(found or {}), *_service_rules((service or {}).get("spec") or {}))
    if found is None or not rules:
        raise LookupError(f"EndpointSlice {NAMESPACE}/{SERVICE} has no address")
    return rules


def _endpoint_rules(endpoint_slice: Json) -> Rules:
    addresses = [a for endpoint in endpoint_slice.get("endpoints") or () for a in endpoint.get("addresses") or ()]
    return _access_rule(addresses, [port["port"] for port in endpoint_slice.get("ports") or () if port.get("port")])


def _service_rules(service: Json) -> Rules:
    return _access_rule(service.get("clusterIPs") or (), [port["port"] for port in service.get("ports") or ()])


def _access_rule(addresses: Iterable[str], ports: list[int]) -> Rules:
    blocks = sorted({str(ipaddress.ip_network(address)) for address in addresses if _is_address(address)})
    if not blocks or not ports:
        return ()
    return (
        {
            "to": [{"ipBlock": {"cidr": block}} for block in blocks],
            "ports": [{"protocol": "TCP", "port": port} for port in sorted(set(ports))],
        },
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
