"""Parts of the Kubernetes API that a role's pod uses unchanged.

They are typed, so that the API server refuses typing errors, but they have no descriptions: Kubernetes documents them, and the CRD would
be three times as large. The dry-run of the pods checks the rest, such as unknown label keys.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.config.base import Config, FreeMapping, Rule, list_cel
from rlrun.config.formats import RESERVED_VARIABLES, SUBDOMAIN, Format, ObjectName

Quantity = Annotated[
    str,
    Field(min_length=1, max_length=32),
    Format(
        r"[0-9]+(\.[0-9]+)?([numkMGTPE]|[KMGTPE]i|e[0-9][0-9]?)?",
        "a Kubernetes quantity such as 500m, 16Gi or 2Ti",
    ),
]
"""A quantity in Kubernetes' notation."""
Amount = Quantity | Annotated[int, Field(ge=0)]
"""Amount of a resource: a quantity, or a plain number as YAML reads it."""
_POSITIVE = r"([0-9]*[1-9][0-9]*(\.[0-9]+)?|[0-9]+\.[0-9]*[1-9][0-9]*)"
PositiveQuantity = Annotated[
    str,
    Field(min_length=1, max_length=32),
    Format(
        rf"{_POSITIVE}([numkMGTPE]|[KMGTPE]i|e[0-9][0-9]?)?",
        "a Kubernetes quantity above 0 such as 16Gi or 512Mi",
    ),
]
Capacity = Annotated[
    str,
    Field(min_length=1, max_length=32),
    Format(
        rf"{_POSITIVE}([kMGTPE]|[KMGTPE]i|e[0-9][0-9]?)|[1-9][0-9]{{6,}}",
        "a Kubernetes quantity above 0 with its unit, such as 100Gi or 2Ti",
    ),
]
"""Capacity of a volume. A value of less than a million bytes without a unit is refused as a missing unit."""
_UNITS = {
    "n": "1e-9",
    "u": "1e-6",
    "m": "1e-3",
    "k": "1e3",
    "M": "1e6",
    "G": "1e9",
    "T": "1e12",
    "P": "1e15",
    "E": "1e18",
}
_AMOUNT = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)((?P<exponent>e[0-9][0-9]?)|(?P<unit>[numkKMGTPE]?)(?P<binary>i?))")


def read_amount(value: str | int) -> Decimal:
    """Return a valid quantity as a number.

    Raises:
        ValueError: The value is not a quantity.
    """
    found = _AMOUNT.fullmatch(str(value))
    if found is None:
        raise ValueError(f"{value} is not a quantity")
    number, unit = Decimal(found["number"] + (found["exponent"] or "")), found["unit"] or ""
    if found["binary"]:
        return number * Decimal(1024) ** ("KMGTPE".index(unit) + 1)
    return number * Decimal(_UNITS.get(unit, "1"))


LabelValue = Annotated[
    str,
    Field(max_length=63),
    Format(
        r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?",
        "a label value: letters and digits, and -, _ or . between them",
    ),
]
_NAME_PART = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[
    str,
    Field(min_length=1, max_length=317),
    Format(
        rf"({SUBDOMAIN}/)?{_NAME_PART}",
        "a label key such as zone or topology.kubernetes.io/zone: at most 63 letters, digits, '-', '_' and '.' after the domain and '/'",
    ),
]
DataKey = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(
        r"[-_A-Za-z0-9][-._A-Za-z0-9]*|\.[-_A-Za-z0-9][-._A-Za-z0-9]*",
        "a key of a Secret or ConfigMap such as api-key: letters, digits, '-', '_' and '.'",
    ),
]
EnvName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(
        "[A-Za-z_][A-Za-z0-9_]*|[-._A-Za-z][-._A-Za-z0-9]*[-._A-Za-z0-9]",
        "the name of an environment variable such as HF_TOKEN, of letters, digits, '_', '-' and '.', without a digit at the start",
    ),
]
EnvPrefix = Annotated[
    str,
    Field(max_length=253),
    Format("([-._A-Za-z][-._A-Za-z0-9]*)?", "a prefix of names of environment variables such as WANDB_, without '='"),
]
FieldPath = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(
        r"metadata\.(name|namespace|uid)|metadata\.(labels|annotations)\['[^'\x00-\x20]+'\]"
        r"|spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?)",
        "a field of a pod: metadata.name, .namespace, .uid, .labels['KEY'] or .annotations['KEY'], spec.nodeName, "
        "spec.serviceAccountName, status.hostIP, .hostIPs, .podIP or .podIPs",
    ),
]
ExtendedResource = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(
        rf"{SUBDOMAIN}/{_NAME_PART}",
        "an extended resource such as nvidia.com/gpu: a domain, '/', and a name of at most 63 characters",
    ),
]
ResourceName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Format(
        rf"cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i|{SUBDOMAIN}/{_NAME_PART}",
        "the name of a resource: cpu, memory, ephemeral-storage, hugepages-2Mi, or one with a domain such as nvidia.com/gpu",
    ),
]
RESERVED_ENV = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
RESERVED_ENV_PREFIX = RESERVED_VARIABLES


class LocalObjectReference(Config):
    name: ObjectName


def _parse_amount(kind: str) -> str:
    return f"string(self.{kind}[k])"


_MORE = (
    f"has(self.limits) && k in self.limits && isQuantity({_parse_amount('requests')}) && isQuantity({_parse_amount('limits')}) && "
    f"quantity({_parse_amount('requests')}).isGreaterThan(quantity({_parse_amount('limits')}))"
)
_FIRST_MORE = f"self.requests.filter(k, {_MORE})[0]"


class ResourceRequirements(Config):
    limits: dict[ResourceName, Amount] = Field(default_factory=dict, max_length=32)
    requests: dict[ResourceName, Amount] = Field(default_factory=dict, max_length=32)

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!has(self.requests) || !self.requests.exists(k, {_MORE})",
            f"requests.{{{_FIRST_MORE}}} ({{string(self.requests[{_FIRST_MORE}])}}) is higher than "
            f"limits.{{{_FIRST_MORE}}} ({{string(self.limits[{_FIRST_MORE}])}}); lower it or raise the limit",
        ),
    )

    @model_validator(mode="after")
    def _within_limits(self) -> Self:
        for name, wanted in self.requests.items():
            limit = self.limits.get(name)
            if limit is not None and read_amount(wanted) > read_amount(limit):
                raise ValueError(
                    f"requests.{name} ({wanted}) is higher than limits.{name} ({limit}); lower it or raise the limit"
                )
        return self


class Toleration(Config):
    key: LabelKey | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.operator) || self.operator != 'Exists' || self.?value.orValue('') == ''",
            "value ({self.value}) has no effect with operator Exists; remove it, or set operator: Equal",
            ".value",
        ),
        Rule(
            "has(self.key) || self.?operator.orValue('') == 'Exists'",
            "without key, a toleration tolerates every taint and needs operator: Exists; set key or operator",
        ),
        Rule(
            "!has(self.tolerationSeconds) || self.?effect.orValue('') == 'NoExecute'",
            "tolerationSeconds ({self.tolerationSeconds}) needs effect NoExecute; set effect: NoExecute or remove it",
            ".tolerationSeconds",
        ),
    )

    @model_validator(mode="after")
    def _check_operator(self) -> Self:
        if self.operator == "Exists" and self.value:
            raise ValueError(
                f"value ({self.value}) has no effect with operator Exists; remove it, or set operator: Equal"
            )
        if self.key is None and self.operator != "Exists":
            raise ValueError(
                "without key, a toleration tolerates every taint and needs operator: Exists; set key or operator"
            )
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError(
                f"tolerationSeconds ({self.toleration_seconds}) needs effect NoExecute; set effect: NoExecute or remove it"
            )
        return self


class KeySelector(Config):
    name: ObjectName
    key: DataKey
    optional: bool | None = None


class FieldSelector(Config):
    field_path: FieldPath
    api_version: Literal["v1"] | None = None


class EnvVarSource(Config):
    secret_key_ref: KeySelector | None = None
    config_map_key_ref: KeySelector | None = None
    field_ref: FieldSelector | None = None

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].exists_one(given, given)",
            "set exactly one of secretKeyRef, configMapKeyRef and fieldRef; got "
            "{[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(given, given).size()}",
        ),
    )

    @model_validator(mode="after")
    def _check_single_source(self) -> Self:
        given = [name for name in (self.secret_key_ref, self.config_map_key_ref, self.field_ref) if name is not None]
        if len(given) != 1:
            raise ValueError(f"set exactly one of secretKeyRef, configMapKeyRef and fieldRef; got {len(given)}")
        return self


class EnvVar(Config):
    name: EnvName
    value: Annotated[str, Field(max_length=32768)] | None = None
    value_from: EnvVarSource | None = None

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.?value.orValue('') == '' || !has(self.valueFrom)",
            "{self.name} has both value and valueFrom; remove one of them",
        ),
        Rule(
            r"!has(self.value) || !self.value.contains('\x00')",
            "the value of {self.name} contains a NUL character, which environment variables cannot have; remove it",
            ".value",
        ),
        Rule(
            f"!(self.name in {list_cel(RESERVED_ENV)}) && !self.name.startsWith('{RESERVED_ENV_PREFIX}')",
            "name ({self.name}) is reserved: RLRun sets it itself; remove it",
            ".name",
        ),
    )

    @model_validator(mode="after")
    def _check_name_and_value(self) -> Self:
        if is_reserved(self.name):
            raise ValueError(f"name ({self.name}) is reserved: RLRun sets it itself; remove it")
        if self.value and self.value_from is not None:
            raise ValueError(f"{self.name} has both value and valueFrom; remove one of them")
        if self.value and "\0" in self.value:
            raise ValueError(
                f"the value of {self.name} contains a NUL character, which environment variables cannot have; remove it"
            )
        return self


class EnvSourceReference(Config):
    name: ObjectName
    optional: bool | None = None


class EnvFromSource(Config):
    prefix: EnvPrefix | None = None
    secret_ref: EnvSourceReference | None = None
    config_map_ref: EnvSourceReference | None = None

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.secretRef) != has(self.configMapRef)",
            "set exactly one of secretRef and configMapRef; got {has(self.secretRef) ? 'both' : 'neither'}",
        ),
    )

    @model_validator(mode="after")
    def _check_single_source(self) -> Self:
        if (self.secret_ref is None) == (self.config_map_ref is None):
            got = "neither" if self.secret_ref is None else "both"
            raise ValueError(f"set exactly one of secretRef and configMapRef; got {got}")
        return self


FreeTerms = Annotated[list[FreeMapping], Field(max_length=16)]
"""Terms that only the dry-run of the pods checks."""


class NodeAffinity(Config):
    required_during_scheduling_ignored_during_execution: FreeMapping | None = None
    preferred_during_scheduling_ignored_during_execution: FreeTerms | None = None


class PodAffinity(Config):
    required_during_scheduling_ignored_during_execution: FreeTerms | None = None
    preferred_during_scheduling_ignored_during_execution: FreeTerms | None = None


class Affinity(Config):
    """Affinity as in a PodSpec. `model_dump(by_alias=True, exclude_none=True)` returns the text of the user."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


KEY_VARIABLE = "RLRUN_API_KEY"
"""The run's API key. A `podTemplate` may set it from a Secret of the user."""
OWN_CONTAINERS = ("trainer", "inference", "orchestrator", "folder", "model")
"""Names of the containers that RLRun creates. No `podTemplate` may set their reserved variables."""


def is_reserved(variable: str) -> bool:
    """Return whether RLRun sets an environment variable of this name itself."""
    return variable in RESERVED_ENV or variable.startswith(RESERVED_ENV_PREFIX)


def reserved_variable(template: object) -> tuple[str, str] | None:
    """Return path and name of the first reserved variable that a pod template sets in a container of RLRun. Accepts any JSON value."""
    spec = template.get("spec") if isinstance(template, dict) else None
    for kind in ("containers", "initContainers"):
        containers = spec.get(kind) if isinstance(spec, dict) else None
        for index, container in enumerate(containers if isinstance(containers, list) else ()):
            if not isinstance(container, dict) or container.get("name") not in OWN_CONTAINERS:
                continue
            variables = container.get("env")
            for at, variable in enumerate(variables if isinstance(variables, list) else ()):
                name = variable.get("name") if isinstance(variable, dict) else None
                if isinstance(name, str) and is_reserved(name) and name != KEY_VARIABLE:
                    return f"{kind}[{index}].env[{at}].name", name
    return None
