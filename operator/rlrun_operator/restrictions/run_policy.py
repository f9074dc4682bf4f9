"""Policy of the installation for runs: the chart's value `policy`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlrun.config.base import Config
from rlrun.config.formats import Format


def _policy_block(text: str) -> str:
    try:
        network, _, length = text.partition("/")
        return str(ipaddress.ip_network(f"{network}/{int(length)}"))
    except ValueError as error:
        raise ValueError(f"got {text}, expected an address block such as 10.0.0.0/8: {error}") from None


NamePattern = Annotated[
    str,
    Field(min_length=1, max_length=512),
    Format(r"[^*]*\*?", "a name, or a prefix of names followed by *"),
]
AddressBlock = Annotated[
    str,
    Field(max_length=64),
    AfterValidator(_policy_block),
    Format(r"[0-9A-Fa-f:.]+/[0-9]{1,3}", "an address block such as 10.0.0.0/8"),
]
Patterns = Annotated[tuple[NamePattern, ...], Field(max_length=256)]
ListName = Literal["serviceAccounts", "claims", "secrets", "images", "priorityClasses", "annotations"]
ANY_ADDRESS = ("0.0.0.0/0", "::/0")
"""Blocks that contain all addresses."""
WHOLE_IMAGE_PART = re.compile(r"\*|.*[/:@]\*|[^*]*")
"""An image pattern must end between two parts of a name: `registry.example.com*` would also match `registry.example.com.evil.io/x`."""
RUN_KEY = r".*-key-[0-9a-f]{8}(-[0-9]+)?"
"""Names of the Secrets with the keys of runs (`Names.key_secret`). No list allows them: only a run's own pods may read its key."""


class RunPolicy(Config):
    """Limits on runs. A list contains names, and prefixes of names that end in `*`; a single `*` allows everything."""

    pod_template: Literal["Restricted", "Any"] = "Restricted"
    """Restricted: only the fields of `allowed_fields.POD_TEMPLATE`. Any: everything that the namespace's Pod Security accepts."""
    service_accounts: Patterns = ()
    """Accounts that a `podTemplate` may name."""
    claims: Patterns = ("*",)
    """PersistentVolumeClaims that a run may use."""
    secrets: Patterns = ("for-rlrun-*",)
    """Secrets that a run may read, including those with registry passwords."""
    images: Patterns = ("*",)
    """Images that a run may name; the installation's own images need no entry."""
    priority_classes: Patterns = ()
    """PriorityClasses that a run may name."""
    annotations: Patterns = (
        "prometheus.io/*",
        "cluster-autoscaler.kubernetes.io/safe-to-evict",
        "karpenter.sh/do-not-disrupt",
    )
    """Pod annotations that a `podTemplate` may set: some of them control container runtimes and networks."""
    environment_isolation: Literal["Any", "Container"] = "Any"
    """Container: code of environments, and of rewards that `dataset` names, never runs in the orchestrator's container."""
    egress: Annotated[tuple[AddressBlock, ...], Field(max_length=64)] = ANY_ADDRESS
    """Addresses that rules without an address open (hubs, trackers), and that other rules of a run may name."""

    @property
    def limits_egress(self) -> bool:
        """Whether some addresses are forbidden."""
        return set(self.egress) != set(ANY_ADDRESS)

    def allows_block(self, cidr: str) -> bool:
        """Return whether an address block is within an allowed one; False for an invalid block."""
        try:
            inner = ipaddress.ip_network(cidr, strict=False)
        except ValueError:
            return False
        return any(contains_network(ipaddress.ip_network(block), inner) for block in self.egress)

    @model_validator(mode="after")
    def _image_parts(self) -> Self:
        for pattern in self.images:
            if not WHOLE_IMAGE_PART.fullmatch(pattern):
                raise ValueError(
                    f"images ({pattern}) must end in /*, :* or @*, or be *: a partial name would match other images"
                )
        return self

    def patterns_of(self, name: ListName) -> Patterns:
        """Return the list of this name."""
        lists: dict[ListName, Patterns] = {
            "serviceAccounts": self.service_accounts,
            "claims": self.claims,
            "secrets": self.secrets,
            "images": self.images,
            "priorityClasses": self.priority_classes,
            "annotations": self.annotations,
        }
        return lists[name]

    def allows_value(self, name: ListName, value: str) -> bool:
        """Return whether the list of this name contains `value`."""
        if name == "secrets" and re.fullmatch(RUN_KEY, value):
            return False
        return any(_matches_pattern(pattern, value) for pattern in self.patterns_of(name))


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def contains_network(outer: Network, inner: Network) -> bool:
    """Return whether `inner` is `outer` or a part of it; never for networks of two versions of IP."""
    if isinstance(outer, ipaddress.IPv4Network):
        return isinstance(inner, ipaddress.IPv4Network) and outer.supernet_of(inner)
    return isinstance(inner, ipaddress.IPv6Network) and outer.supernet_of(inner)


@dataclass(frozen=True)
class Installation:
    """Policy, and the operator's identity, which no run may use."""

    policy: RunPolicy = field(default_factory=RunPolicy)
    namespace: str = "default"
    """Namespace of the operator."""
    account: str = ""
    """ServiceAccount of the operator; empty: it runs outside of the cluster."""


def _matches_pattern(pattern: str, value: str) -> bool:
    return value.startswith(pattern[:-1]) if pattern.endswith("*") else value == pattern
