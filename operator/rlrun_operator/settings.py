"""The operator's settings, from its environment (the Helm chart writes it)."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from rlrun_operator.names import Role

HTTP_PORT = 8080
LogFormat = Literal["plain", "json"]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LEVELS = ("debug", "info", "warning", "error")
_IMAGES: dict[str, Role] = {
    "RLRUN_TRAINER_IMAGE": "trainer",
    "RLRUN_ORCHESTRATOR_IMAGE": "orchestrator",
    "RLRUN_INFERENCE_IMAGE": "inference",
}


class SettingsError(Exception):
    """The environment is wrong; the message names each variable, its value and the fix."""


@dataclass(frozen=True)
class RenderSettings:
    """What the builders need to know beside the run."""

    images: dict[Role, str] = field(
        default_factory=lambda: {
            "trainer": "ghcr.io/rlrun/rlrun-trainer:0.1.0",
            "orchestrator": "ghcr.io/rlrun/rlrun-trainer:0.1.0",
            "inference": "ghcr.io/rlrun/rlrun-inference:0.1.0",
        }
    )
    """Image of each role unless the manifest names one (`RLRUN_TRAINER_IMAGE`, `RLRUN_ORCHESTRATOR_IMAGE`, `RLRUN_INFERENCE_IMAGE`)."""
    image_pull_policy: str | None = None
    """Of these images (`RLRUN_IMAGE_PULL_POLICY`); None: Kubernetes' default."""
    cluster_domain: str = "cluster.local"
    """DNS domain of Services (`RLRUN_CLUSTER_DOMAIN`)."""


@dataclass(frozen=True)
class OperatorSettings:
    """One operator process."""

    render: RenderSettings = field(default_factory=RenderSettings)
    name: str = ""
    """What `managedBy` calls it (`RLRUN_OPERATOR_NAME`): a run that names another operator is left alone."""
    namespaces: tuple[str, ...] = ()
    """Namespaces whose runs it looks after (`RLRUN_WATCH_NAMESPACES`, comma-separated); none: all."""
    read_nodes: bool = False
    """Whether messages may use what nodes offer (`RLRUN_READ_NODES`); needs a ClusterRole."""
    log_level: str = "info"
    """`RLRUN_LOG_LEVEL`."""
    log_format: LogFormat = "plain"
    """`RLRUN_LOG_FORMAT`."""
    http_port: int = HTTP_PORT
    """Of /livez, /readyz and /metrics (`RLRUN_HTTP_PORT`)."""
    pod_name: str = ""
    """Holder of the leader Lease (`POD_NAME`); unique among running operators."""
    pod_namespace: str = "default"
    """Where the leader Lease lives (`POD_NAMESPACE`)."""


def from_environment(environ: Mapping[str, str]) -> OperatorSettings:
    """The settings.

    Raises:
        SettingsError: a value is wrong.
    """
    problems: list[str] = []

    def wrong(name: str, fix: str) -> None:
        problems.append(f"{name}={environ[name]!r}: {fix}")

    def choice(name: str, choices: tuple[str, ...], default: str) -> str:
        value = environ.get(name) or default
        if value not in choices:
            wrong(name, f"set one of {', '.join(choices)}")
        return value

    defaults = OperatorSettings()
    namespaces = tuple(sorted({n.strip() for n in environ.get("RLRUN_WATCH_NAMESPACES", "").split(",") if n.strip()}))
    for namespace in namespaces:
        if not _NAMESPACE.fullmatch(namespace):
            wrong("RLRUN_WATCH_NAMESPACES", f"{namespace!r} is not a namespace; list names separated by commas")
    images = dict(defaults.render.images)
    for name, role in _IMAGES.items():
        image = environ.get(name, "")
        if image and (image != image.strip() or " " in image):
            wrong(name, "an image name holds no blanks")
        images[role] = image or images[role]
    domain = environ.get("RLRUN_CLUSTER_DOMAIN") or defaults.render.cluster_domain
    if not _DOMAIN.fullmatch(domain):
        wrong("RLRUN_CLUSTER_DOMAIN", "set the cluster's DNS domain, such as cluster.local")
    policy = environ.get("RLRUN_IMAGE_PULL_POLICY") or None
    if policy is not None:
        choice("RLRUN_IMAGE_PULL_POLICY", get_args(PullPolicy), "")
    port = environ.get("RLRUN_HTTP_PORT") or str(HTTP_PORT)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        wrong("RLRUN_HTTP_PORT", "set a port from 1 to 65535")
    level = choice("RLRUN_LOG_LEVEL", _LEVELS, defaults.log_level)
    log_format = choice("RLRUN_LOG_FORMAT", get_args(LogFormat), defaults.log_format)
    read_nodes = choice("RLRUN_READ_NODES", ("true", "false"), "false")
    name = environ.get("RLRUN_OPERATOR_NAME", "")
    if name and not _NAMESPACE.fullmatch(name):
        wrong("RLRUN_OPERATOR_NAME", "set a name of lower-case letters, digits and '-', of at most 63 characters")
    if problems:
        raise SettingsError("; ".join(problems))
    return OperatorSettings(
        render=RenderSettings(images=images, image_pull_policy=policy, cluster_domain=domain),
        name=name,
        namespaces=namespaces,
        read_nodes=read_nodes == "true",
        log_level=level,
        log_format="json" if log_format == "json" else "plain",
        http_port=int(port),
        pod_name=environ.get("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}",
        pod_namespace=environ.get("POD_NAMESPACE") or defaults.pod_namespace,
    )
