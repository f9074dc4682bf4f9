"""Addresses of a run's pods, and what they may talk to."""

from __future__ import annotations

from typing import Any

from rlrun.protocol import endpoints
from rlrun_operator.build.context import Host, RunContext, metadata
from rlrun_operator.names import ROLE_LABEL, RUN_LABEL, Role
from rlrun_operator.state import Manifest

DNS_PORT = 53
API_SERVER_PORTS = (443, 6443)
"""A policy sees the API server's own port, not that of its Service: these two are in use almost everywhere."""
HUB_PORT = 443


def services(ctx: RunContext) -> list[Manifest]:
    """Headless Services: names of the trainer's pods, and one name for all engines, where there are any.

    A guest has none. Both publish pods that are not ready: the trainer's meet before they are, and an engine becomes ready by the
    weights that the orchestrator hands over to it.
    """
    found = []
    if ctx.has_trainer:
        trainer = [_port("channel", endpoints.TRAINER_PORT), _port("rendezvous", endpoints.RENDEZVOUS_PORT)]
        found.append(_headless(ctx, ctx.names.trainer, "trainer", trainer))
    engines = [_port("http", endpoints.ENGINE_PORT)]
    if ctx.has_engines:
        found.append(_headless(ctx, ctx.names.inference, "inference", engines))
    if ctx.colocated:
        found.append(_headless(ctx, ctx.names.inference, "trainer", engines))
    return found


def _headless(ctx: RunContext, name: str, role: Role, ports: list[dict[str, Any]]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(ctx, name, role),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: ctx.name, ROLE_LABEL: role},
            "ports": ports,
        },
    }


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "port": number, "protocol": "TCP"}


def network_policies(ctx: RunContext) -> list[Manifest]:
    """The run's pods talk to each other and ask for names; the orchestrator alone reaches the API server, to renew its Lease.

    Policies add up: one of a person's own can open more, such as the way of a metrics scraper.
    """
    policy = ctx.spec.network_policy
    if policy.mode == "None":
        return _host_access(ctx)
    own: dict[str, Any] = {"podSelector": {"matchLabels": {RUN_LABEL: ctx.name}}}
    peers = [own] if ctx.host is None else [own, {"podSelector": _serving(ctx.host)}]
    egress: list[Any] = [
        {"to": peers},
        {"ports": [{"protocol": protocol, "port": DNS_PORT} for protocol in ("UDP", "TCP")]},
    ]
    if ctx.spec.model.name is not None or _data_of_the_hub(ctx):
        egress.append(_tcp(HUB_PORT))
    egress += policy.extra_egress
    api = {"podSelector": {"matchLabels": {RUN_LABEL: ctx.name, ROLE_LABEL: "orchestrator"}}}
    return [
        *_host_access(ctx),
        _policy(
            metadata(ctx, ctx.names.account),
            {**own, "policyTypes": ["Ingress", "Egress"], "ingress": [{"from": [own]}], "egress": egress},
        ),
        _policy(
            metadata(ctx, ctx.names.api_access, "orchestrator"),
            {**api, "policyTypes": ["Egress"], "egress": [_tcp(*API_SERVER_PORTS)]},
        ),
    ]


def _host_access(ctx: RunContext) -> list[Manifest]:
    """A guest's own policy for its host's pods: it goes with the guest, and needs no change of what the host has.

    Not where the host has no policies: a first one would close its pods to everybody else.
    """
    host = ctx.host
    if host is None or host.spec.network_policy.mode == "None":
        return []
    guest = {"podSelector": {"matchLabels": {RUN_LABEL: ctx.name, ROLE_LABEL: "orchestrator"}}}
    ports = {"ports": [_tcp_port(port) for port in (endpoints.TRAINER_PORT, endpoints.ENGINE_PORT)]}
    spec = {"podSelector": _serving(host), "policyTypes": ["Ingress"], "ingress": [{"from": [guest], **ports}]}
    return [_policy(metadata(ctx, ctx.names.host_access, "orchestrator"), spec)]


def _serving(host: Host) -> dict[str, Any]:
    """A host's pods that its guests talk to."""
    among = {"key": ROLE_LABEL, "operator": "In", "values": ["trainer", "inference"]}
    return {"matchLabels": {RUN_LABEL: host.name}, "matchExpressions": [among]}


def _data_of_the_hub(ctx: RunContext) -> bool:
    data = ctx.spec.data
    if data is None:
        return False
    return any(place is not None and place.name is not None for place in (*data.sources, data.validation))


def _policy(meta: dict[str, Any], spec: dict[str, Any]) -> Manifest:
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": spec}


def _tcp(*ports: int) -> dict[str, Any]:
    return {"ports": [_tcp_port(port) for port in ports]}


def _tcp_port(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}
