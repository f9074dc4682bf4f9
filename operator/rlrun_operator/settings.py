"""Settings of the operator, read from the environment that the Helm chart sets."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from rlrun_operator.names import MANAGER, Role
from rlrun_operator.restrictions import Installation, RunPolicy
from rlrun_operator.state import Json

HTTP_PORT = 8080
LogFormat = Literal["plain", "json"]
Provider = Literal["none", "own", "kueue", "volcano"]
"""Queue that admits runs."""
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
ANY_API_SERVER: tuple[Json, ...] = ({"ports": [{"protocol": "TCP", "port": port} for port in (443, 6443)]},)
"""Default rule while the API server's addresses are unknown. A policy sees the server's own port, not that of its Service; almost all
clusters use one of these two."""
_FLAGS = ("RLRUN_READ_NODES", "RLRUN_ASSIGNED_USERS")
"""Variables with the value true or false, in the order in which `from_environment` reads them."""
_LEVELS = ("debug", "info", "warning", "error")
_IMAGES: dict[str, Role] = {
    "RLRUN_TRAINER_IMAGE": "trainer",
    "RLRUN_ORCHESTRATOR_IMAGE": "orchestrator",
    "RLRUN_INFERENCE_IMAGE": "inference",
}


class SettingsError(Exception):
    """A wrong environment; the message names each variable, its value and the fix."""


@dataclass(frozen=True)
class NetworkSettings:
    """Rules and peers of NetworkPolicies that depend on the cluster, in the form of a manifest (`RLRUN_NETWORK`, a JSON map)."""

    dns: tuple[Json, ...] = (
        {
            "to": [
                {
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
                    "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
                },
                {"ipBlock": {"cidr": "169.254.20.10/32"}},  # NodeLocal DNSCache
            ],
            "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")],
        },
    )
    """Rules that let all pods of a run reach the cluster's DNS."""
    api_server: tuple[Json, ...] = ANY_API_SERVER
    """Rules that let an orchestrator reach the API server."""
    metrics_from: tuple[Json, ...] = ()
    """Peers that may scrape the pods of runs."""
    given: bool = False
    """Whether the chart's values set `api_server`; otherwise the operator reads the addresses from the API server."""
    discovered: bool = False
    """Whether `api_server` was read from the API server."""

    @property
    def api_server_text(self) -> str:
        """Hosts and ports of `api_server` as text for messages."""
        shown = []
        for rule in self.api_server:
            hosts = [str((peer.get("ipBlock") or {}).get("cidr", "pods by label")) for peer in rule.get("to") or ()]
            ports = [str(port.get("port", "any")) for port in rule.get("ports") or ()]
            shown.append(f"{', '.join(hosts) or 'any host'} on port {', '.join(ports) or 'any'}")
        return "; ".join(shown) or "nothing"

    @property
    def mark(self) -> str:
        """Hash of `api_server`, 8 hex digits. Another hash means that the addresses have changed."""
        return hashlib.sha256(json.dumps(self.api_server, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class RenderSettings:
    """Inputs for rendering a run's objects, in addition to the run."""

    images: dict[Role, str] = field(
        default_factory=lambda: {
            "trainer": "ghcr.io/rlrun/rlrun-trainer:0.1.0",
            "orchestrator": "ghcr.io/rlrun/rlrun-trainer:0.1.0",
            "inference": "ghcr.io/rlrun/rlrun-inference:0.1.0",
        }
    )
    """Image of each role unless the manifest names one (`RLRUN_TRAINER_IMAGE`, `RLRUN_ORCHESTRATOR_IMAGE`, `RLRUN_INFERENCE_IMAGE`)."""
    image_pull_policy: str | None = None
    """Pull policy of these images (`RLRUN_IMAGE_PULL_POLICY`); None: Kubernetes' default."""
    cluster_domain: str = "cluster.local"
    """DNS domain of Services (`RLRUN_CLUSTER_DOMAIN`)."""
    network: NetworkSettings = field(default_factory=NetworkSettings)
    """Peers outside of a run that its NetworkPolicies allow."""
    installation: Installation = field(default_factory=Installation)
    """Limits on runs (`RLRUN_POLICY`, a JSON map), and operator identity (`POD_NAMESPACE`, `POD_SERVICE_ACCOUNT`)."""
    assigned_users: bool = False
    """Whether the namespace assigns users and groups to pods, as OpenShift does (`RLRUN_ASSIGNED_USERS`); otherwise the pods use 1000."""
    provider: Provider = "none"
    """Queue that admits runs (`RLRUN_QUEUE`); `spec.queueName` has an effect only with kueue and volcano."""


class FlavorSettings(BaseModel):
    """Fields of a Kueue ResourceFlavor, for an operator that may not read it."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    node_labels: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[Json, ...] = ()


class QueueSettings(BaseModel):
    """Queue for all runs of an operator: `queue` in the chart's values."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    provider: Literal["", Provider] = ""
    """Queue that admits runs; empty: `own` if `enabled`, else `none`."""
    enabled: bool = False
    """Older form of `provider: own`: hold runs back until there is room for all of their pods."""
    name: str = ""
    """Kueue LocalQueue, or Volcano Queue, of runs without `spec.queueName`. Empty: with Kueue these runs start at once, with Volcano they
    use `default`."""
    flavors: dict[str, FlavorSettings] = Field(default_factory=dict)
    """Kueue's ResourceFlavors by name, for an operator that may not read them."""
    capacity: dict[str, float] = Field(default_factory=dict)
    """Maximum that all runs together may use, by resource; for an operator that may not read nodes."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Weight of a namespace's share; the default is 1."""
    preemption: Literal["PriorityAndShare", "Priority", "Never"] = "PriorityAndShare"
    """Rule by which a run may preempt other runs."""
    priority_classes: dict[str, int] = Field(default_factory=dict)
    """Priorities by name of the class: the PriorityClass of the trainer of a run without `spec.priority`; with Kueue, also the
    WorkloadPriorityClass of a run."""
    pass_seconds: Annotated[float, Field(ge=0)] = 300
    """Seconds during which other runs may pass the first waiting run; afterwards resources are reserved for it."""
    reserve_seconds: Annotated[float, Field(gt=0)] = 86400
    """Seconds for which resources stay reserved; afterwards other runs may pass for the same time."""
    start_seconds: Annotated[float, Field(gt=0)] = 600
    """Seconds within which all pods of an admitted run must have nodes; otherwise the run is released and retried later."""

    @property
    def kind(self) -> Provider:
        """Effective provider."""
        return self.provider or ("own" if self.enabled else "none")


@dataclass(frozen=True)
class OperatorSettings:
    """Settings of one operator process."""

    render: RenderSettings = field(default_factory=RenderSettings)
    name: str = ""
    """Value of `managedBy` for this operator (`RLRUN_OPERATOR_NAME`); it ignores runs that name another operator."""
    namespaces: tuple[str, ...] = ()
    """Namespaces that the operator serves (`RLRUN_WATCH_NAMESPACES`, comma-separated); empty: all."""
    read_nodes: bool = False
    """Whether the operator may read nodes and the pods of all namespaces, for messages and for its own queue (`RLRUN_READ_NODES`); needs a
    ClusterRole."""
    log_level: str = "info"
    """`RLRUN_LOG_LEVEL`."""
    log_format: LogFormat = "plain"
    """`RLRUN_LOG_FORMAT`."""
    http_port: int = HTTP_PORT
    """Port of /livez, /readyz and /metrics (`RLRUN_HTTP_PORT`)."""
    pod_name: str = ""
    """Holder of the leader Lease (`POD_NAME`); unique among running operators."""
    pod_namespace: str = "default"
    """Namespace of the leader Lease (`POD_NAMESPACE`)."""
    lease_name: str = MANAGER
    """Name of the leader Lease (`RLRUN_LEASE_NAME`): one per release in a namespace."""
    queue: QueueSettings = field(default_factory=QueueSettings)
    """Admission of runs (`RLRUN_QUEUE`, a JSON map)."""
    defaults_folder: Path | None = None
    """Folder of the mounted ConfigMap with defaults for runs (`RLRUN_DEFAULTS_FOLDER`); None: no defaults."""
    defaults_name: str = ""
    """Name of that ConfigMap in the operator's namespace (`RLRUN_DEFAULTS_NAME`)."""


def from_environment(environ: Mapping[str, str]) -> OperatorSettings:
    """Return the settings in the environment.

    Raises:
        SettingsError: a value is wrong; the message lists all wrong values.
    """
    problems: list[str] = []

    def report_wrong(name: str, fix: str) -> None:  # only for a variable that is set: the defaults are valid
        problems.append(f"{name}={environ[name]!r}: {fix}")

    def read_choice(name: str, choices: tuple[str, ...], default: str) -> str:
        value = environ.get(name) or default
        if value not in choices:
            report_wrong(name, f"set one of {', '.join(choices)}")
        return value

    def read_label(name: str, default: str) -> str:
        value = environ.get(name) or default
        if value and not _NAMESPACE.fullmatch(value):
            report_wrong(name, "set a name of lower-case letters, digits and '-', of at most 63 characters")
        return value

    defaults = OperatorSettings()
    namespaces = _read_namespaces(environ, report_wrong)
    images = _read_images(environ, report_wrong)
    domain = _read_domain(environ, report_wrong, defaults.render.cluster_domain)
    if (policy := environ.get("RLRUN_IMAGE_PULL_POLICY") or None) is not None:  # otherwise the default of Kubernetes
        read_choice("RLRUN_IMAGE_PULL_POLICY", get_args(PullPolicy), "")
    level = read_choice("RLRUN_LOG_LEVEL", _LEVELS, defaults.log_level)
    log_format = read_choice("RLRUN_LOG_FORMAT", get_args(LogFormat), defaults.log_format)
    read_nodes, assigned = (read_choice(name, ("true", "false"), "false") == "true" for name in _FLAGS)
    name, lease = read_label("RLRUN_OPERATOR_NAME", ""), read_label("RLRUN_LEASE_NAME", MANAGER)
    installation, network = _read_installation(environ, problems), _read_network(environ, problems)
    queue, port = _read_queue(environ, problems), _read_port(environ, problems)
    if problems:
        raise SettingsError("; ".join(problems))
    return OperatorSettings(
        render=RenderSettings(
            images=images,
            image_pull_policy=policy,
            cluster_domain=domain,
            network=network,
            installation=installation,
            assigned_users=assigned,
            provider=queue.kind,
        ),
        name=name,
        namespaces=namespaces,
        read_nodes=read_nodes,
        log_level=level,
        log_format="json" if log_format == "json" else "plain",
        http_port=port,
        pod_name=environ.get("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}",
        pod_namespace=installation.namespace,
        lease_name=lease,
        queue=queue,
        defaults_folder=Path(folder) if (folder := environ.get("RLRUN_DEFAULTS_FOLDER")) else None,
        defaults_name=environ.get("RLRUN_DEFAULTS_NAME", ""),
    )


def _read_domain(environ: Mapping[str, str], wrong: Callable[[str, str], None], default: str) -> str:
    domain = environ.get("RLRUN_CLUSTER_DOMAIN") or default
    if not _DOMAIN.fullmatch(domain):
        wrong("RLRUN_CLUSTER_DOMAIN", "set the cluster's DNS domain, such as cluster.local")
    return domain


def _read_namespaces(environ: Mapping[str, str], wrong: Callable[[str, str], None]) -> tuple[str, ...]:
    """Return the served namespaces, sorted; wrong names go to `wrong`."""
    namespaces = tuple(sorted({n.strip() for n in environ.get("RLRUN_WATCH_NAMESPACES", "").split(",") if n.strip()}))
    for namespace in namespaces:
        if not _NAMESPACE.fullmatch(namespace):
            wrong("RLRUN_WATCH_NAMESPACES", f"{namespace!r} is not a namespace; list names separated by commas")
    return namespaces


def _read_port(environ: Mapping[str, str], problems: list[str]) -> int:
    port = environ.get("RLRUN_HTTP_PORT") or str(HTTP_PORT)
    if port.isdecimal() and 0 < int(port) < 65536:
        return int(port)
    problems.append(f"RLRUN_HTTP_PORT={port!r}: set a port from 1 to 65535")
    return HTTP_PORT


def _read_queue(environ: Mapping[str, str], problems: list[str]) -> QueueSettings:
    """Return the queue's settings; errors are added to `problems`."""
    try:
        return QueueSettings.model_validate_json(environ.get("RLRUN_QUEUE") or "{}")
    except ValidationError as error:
        _note_problem("RLRUN_QUEUE", "queue", error, problems)
        return QueueSettings()


def _read_images(environ: Mapping[str, str], wrong: Callable[[str, str], None]) -> dict[Role, str]:
    """Return the image of each role; wrong values go to `wrong`, with variable and fix."""
    images = dict(RenderSettings().images)
    for name, role in _IMAGES.items():
        image = environ.get(name, "")
        if image and (image != image.strip() or " " in image):
            wrong(name, "remove the blanks: image names have none")
        images[role] = image or images[role]
    return images


def _read_installation(environ: Mapping[str, str], problems: list[str]) -> Installation:
    """Return the policy for runs and the operator's identity; errors are added to `problems`."""
    policy = RunPolicy()
    try:
        policy = RunPolicy.model_validate_json(environ.get("RLRUN_POLICY") or "{}")
    except ValidationError as error:
        _note_problem("RLRUN_POLICY", "policy", error, problems)
    namespace = environ.get("POD_NAMESPACE") or OperatorSettings.pod_namespace
    return Installation(policy, namespace, environ.get("POD_SERVICE_ACCOUNT", ""))


class _Network(BaseModel):
    """Schema of `RLRUN_NETWORK`."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)

    dns: tuple[Json, ...] = Field(NetworkSettings.dns, min_length=1)
    api_server: tuple[Json, ...] = ()
    metrics_from: tuple[Json, ...] = ()


def _read_network(environ: Mapping[str, str], problems: list[str]) -> NetworkSettings:
    """Return the network's settings; errors are added to `problems`."""
    try:
        given = _Network.model_validate_json(environ.get("RLRUN_NETWORK") or "{}")
    except ValidationError as error:
        _note_problem("RLRUN_NETWORK", "networkPolicy", error, problems)
        return NetworkSettings()
    ways = given.api_server or ANY_API_SERVER
    return NetworkSettings(given.dns, ways, given.metrics_from, given=bool(given.api_server))


def _note_problem(variable: str, value: str, error: ValidationError, problems: list[str]) -> None:
    """Add the errors of a variable to `problems`; `value`: key of the chart's values that sets the variable."""
    for problem in error.errors():
        path = ".".join(map(str, problem["loc"])) or "as a whole"
        problems.append(
            f"{variable} {path} ({problem['input']!r}): {problem['msg']}; correct {value} in the chart's values"
        )
