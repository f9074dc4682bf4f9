"""Services and network policies of a run's pods: one policy for trainer and engines, one for the orchestrator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlrun.protocol.messages import endpoints
from rlrun_operator.names import ROLE_LABEL, RUN_LABEL, Role
from rlrun_operator.render.context import RunContext, child_metadata
from rlrun_operator.render.outside import outside_rules, proxy_rules, with_addresses
from rlrun_operator.restrictions import ANY_ADDRESS
from rlrun_operator.state import Json, Manifest

HUB_PORT = 443
"""Port of model hubs and their storage servers, whose addresses change."""


def render_services(ctx: RunContext) -> list[Manifest]:
    """Return the headless Services: DNS names of the trainer's pods, and one DNS name for all engines.

    A guest has no Services. Both publish pods that are not ready: trainer pods connect to each other before they are ready, and an engine
    is ready only after the orchestrator has sent it weights.
    """
    found = []
    if ctx.has_trainer:
        trainer = [_named_port("channel", endpoints.TRAINER_PORT), _named_port("rendezvous", endpoints.RENDEZVOUS_PORT)]
        found.append(_headless_service(ctx, ctx.names.trainer, "trainer", trainer))
    engines = [_named_port("http", endpoints.ENGINE_PORT)]
    if ctx.has_engines:
        found.append(_headless_service(ctx, ctx.names.inference, "inference", engines))
    if ctx.colocated:
        found.append(_headless_service(ctx, ctx.names.inference, "trainer", engines))
    return found


def _headless_service(ctx: RunContext, name: str, role: Role, ports: list[dict[str, object]]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(ctx, name, role),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: ctx.name, ROLE_LABEL: role},
            "ports": ports,
        },
    }


def _named_port(name: str, number: int) -> dict[str, object]:
    return {"name": name, "port": number, "protocol": "TCP"}


def network_policies(ctx: RunContext) -> list[Manifest]:
    """Return the policies of the run's pods, by role and port; they block all other traffic.

    Policies are additive: a policy of the user can allow more.
    """
    if ctx.spec.network_policy.mode == "None":
        return _host_access(ctx)
    servers = [_server_policies(ctx), *_reference_access(ctx)] if ctx.host is None else []
    return [*_host_access(ctx), *servers, orchestrator_policy(ctx)]


def orchestrator_policy(ctx: RunContext) -> Manifest:
    """Return the policy of the orchestrator. Only metrics scrapers can connect to it. It can connect to the trainer's channel, the engines,
    the API server for its Lease, the servers of trackers and rewards, and its proxy."""
    serving = ctx.name if ctx.host is None else ctx.host.name
    doors = [({"podSelector": _pod_peer(serving, "trainer")}, endpoints.TRAINER_PORT)]
    engines: Role = (
        "trainer" if (ctx.colocated if ctx.host is None else ctx.host.spec.placement.colocate) else "inference"
    )
    doors.append(({"podSelector": _pod_peer(serving, engines)}, endpoints.ENGINE_PORT))
    egress: list[Json] = [{"to": [peer], **_tcp_ports(port)} for peer, port in doors]
    if _data_of_the_hub(ctx) or any(
        _reads_hub(environment.id, environment.args) for environment in ctx.spec.environments
    ):
        egress.append(_tcp_ports(HUB_PORT))
    outside = [*outside_rules(ctx.spec), *proxy_rules(ctx.spec, ["orchestrator"])]
    egress += [rule for i, rule in enumerate(outside) if rule not in (*egress, *outside[:i])]
    both = _both_ways(ctx, _scraper_rules(ctx, endpoints.ORCHESTRATOR_PORT), egress)
    # The installation's policy for runs does not limit the connection to the API server, because it may not contain this address.
    both["egress"] += [
        rule for rule in with_addresses(ctx.settings.network.api_server, ANY_ADDRESS) if rule not in both["egress"]
    ]
    spec = {"podSelector": _pod_peer(ctx.name, "orchestrator"), **both}
    return _network_policy(child_metadata(ctx, ctx.names.orchestrator_access, "orchestrator"), spec)


def _server_policies(ctx: RunContext) -> Manifest:
    """Return the policy of trainer and engines: trainer pods can connect to each other, and the orchestrator to the two ports that need
    the key."""
    trainers = {"podSelector": _pod_peer(ctx.name, "trainer")}
    group = [trainers]
    if ctx.spec.weight_sync.transport == "NCCL" and ctx.has_engines:  # NCCL uses ports that the system selects
        group.append({"podSelector": _pod_peer(ctx.name, "inference")})
    asks = {"podSelector": _pod_peer(ctx.name, "orchestrator")}
    doors = _tcp_ports(endpoints.TRAINER_PORT, endpoints.ENGINE_PORT)
    ingress = [
        {"from": group},
        {"from": [asks], **doors},
        *_scraper_rules(ctx, endpoints.ENGINE_PORT, endpoints.POD_PORT),
    ]
    egress = [{"to": group}, *proxy_rules(ctx.spec, ["trainer", "inference"])]
    spec = {"podSelector": _role_selector(ctx.name), **_both_ways(ctx, ingress, egress)}
    return _network_policy(child_metadata(ctx, ctx.names.account), spec)


def _both_ways(ctx: RunContext, ingress: Sequence[Manifest], egress: Sequence[Json]) -> Json:
    """Return types and rules of a policy, with the egress rules of all pods of the run."""
    hub = [_tcp_ports(HUB_PORT)] if ctx.spec.model.name is not None else []
    common = [*ctx.settings.network.dns, *hub, *ctx.spec.network_policy.extra_egress]
    comes_in = {"ingress": ingress} if ingress else {}  # an empty list would make each apply a change
    allowed = ctx.settings.installation.policy.egress
    return {"policyTypes": ["Ingress", "Egress"], **comes_in, "egress": with_addresses([*egress, *common], allowed)}


def _scraper_rules(ctx: RunContext, *ports: int) -> list[Json]:
    """Return the rules for the metrics scrapers in the chart's values."""
    peers = ctx.settings.network.metrics_from
    return [{"from": list(peers), **_tcp_ports(*ports)}] if peers else []


def _reference_access(ctx: RunContext) -> list[Manifest]:
    """Return the trainer's policy for the hub, if not the run's model but its reference or a tiny model's warm-up is read from it."""
    if not ctx.has_trainer or ctx.spec.model.name is not None:
        return []
    reference, tiny = ctx.spec.algorithm.reference, ctx.spec.model.tiny
    fetched = reference is not None and reference.resolved(ctx.spec.model).name is not None
    if not fetched and (tiny is None or not _reads_hub(tiny.warmup_environment, tiny.warmup_args)):
        return []
    egress = with_addresses([_tcp_ports(HUB_PORT)], ctx.settings.installation.policy.egress)
    spec = {"podSelector": _pod_peer(ctx.name, "trainer"), "policyTypes": ["Egress"], "egress": egress}
    return [_network_policy(child_metadata(ctx, ctx.names.reference_access, "trainer"), spec)]


def _host_access(ctx: RunContext) -> list[Manifest]:
    """Return a guest's policy for its host's pods: it is deleted with the guest, and the host's policies stay unchanged.

    If the host has no policies, the guest has none either: a first policy would block all other traffic to the host's pods.
    """
    host = ctx.host
    if host is None or host.spec.network_policy.mode == "None":
        return []
    guest = {"podSelector": _pod_peer(ctx.name, "orchestrator")}
    ports = _tcp_ports(endpoints.TRAINER_PORT, endpoints.ENGINE_PORT)
    spec = {
        "podSelector": _role_selector(host.name),
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [guest], **ports}],
    }
    return [_network_policy(child_metadata(ctx, ctx.names.host_access, "orchestrator"), spec)]


def _pod_peer(run: str, role: Role) -> Json:
    return {"matchLabels": {RUN_LABEL: run, ROLE_LABEL: role}}


def _role_selector(run: str) -> Json:
    """Return the selector of a run's trainer and engines."""
    among = {"key": ROLE_LABEL, "operator": "In", "values": ["trainer", "inference"]}
    return {"matchLabels": {RUN_LABEL: run}, "matchExpressions": [among]}


def _data_of_the_hub(ctx: RunContext) -> bool:
    data = ctx.spec.data
    if data is None:
        return False
    return any(place is not None and place.name is not None for place in (*data.sources, data.validation))


def _reads_hub(id: str | None, args: Mapping[str, object]) -> bool:
    """Return whether a bundled environment reads a data set of the hub; other environments need `extraEgress`."""
    if id == "gsm8k":
        return args.get("source", "hub") == "hub" and args.get("path") is None
    return id == "dataset" and args.get("name") is not None


def _network_policy(meta: Json, spec: Json) -> Manifest:
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": spec}


def _tcp_ports(*ports: int) -> Json:
    return {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
