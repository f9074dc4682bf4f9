"""Defaults that an administrator sets for the runs of a namespace: reading, validation and application.

The first part reads specifications for the operator: strictly, but without an error for fields of a newer release.

Defaults are never written into a specification. Each reconciliation applies them below the run's own values, so a change of the defaults
acts like an edit of the run and takes effect at the run's next attempt.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlrun.api.resource import API_VERSION, KIND, RLRun, RLRunSpec
from rlrun.api.run_status import DefaultsStatus
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.layers import Reader
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.runtime.json_types import Json, Manifest
from rlrun.runtime.printable import bound_message, shorten_text

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """Result of validating a specification without the cluster."""

    spec: RLRunSpec | None
    """Valid specification, or None."""
    problems: str = ""
    """All problems, each with field, value and fix."""
    ignored: str = ""
    """Unknown fields, which may come from the CRD of a newer release."""


def read_spec(document: Manifest) -> Reading:
    """Validate the specification of an RLRun."""
    try:
        return _validate_spec(document)
    except (
        Exception
    ) as error:  # no content of a user's object may stop the operator: any error means an invalid specification
        log.exception("cannot read the specification of run %s", document["metadata"].get("name"))
        return Reading(None, problems=f"the specification cannot be read ({type(error).__name__}); simplify spec")


def _validate_spec(document: Manifest) -> Reading:
    try:
        return Reading(RLRun.model_validate(document, strict=True).spec)
    except ValidationError:
        pass
    layer = Reader(RLRun, "", camel_only=True).read(document)
    ignored = bound_message(problem.path for problem in layer.problems)
    layer.problems.clear()
    try:
        return Reading(validate_layer(RLRun, layer).spec, ignored=ignored)
    except ConfigError as error:
        return Reading(None, problems=bound_message(str(problem) for problem in error.problems))


_ROLES = ("trainer", "inference", "orchestrator")
POD_FIELDS = (
    *("image", "imagePullPolicy", "imagePullSecrets", "nodeSelector", "tolerations", "affinity"),
    *("priorityClassName", "runtimeClassName"),
)
_PLACEMENT = (
    "gpuProduct",
    "pool",
    "trainer",
    "inference",
    "orchestrator",
    "topology",
    "spreadInference",
    "gpuResource",
)
ALLOWED = (
    *(f"{role}.{field}" for role in _ROLES for field in POD_FIELDS),
    *(f"placement.{field}" for field in _PLACEMENT),
    *("failurePolicy", "ttlSecondsAfterFinished", "tracking"),
    *("storage.claimTemplate.storageClassName", "storage.claimTemplate.accessModes"),
)
"""Fields of a specification that may have a default, including all fields below them."""
_WHOLE = frozenset(("nodeSelector", "affinity", "topology"))
"""Blocks that a run takes entirely from its own values or from the defaults, because a mixture would have another meaning."""
_OF_HOST = frozenset(("trainer", "inference", "placement", "storage"))
"""Blocks that a guest takes from its host."""
_SHOWN = 64
"""Most fields in a status."""
_EXAMPLE: Json = {"model": {"path": "/model"}, "environments": [{"id": "reverse-text"}]}


@dataclass(frozen=True)
class TeamDefaults:
    """Defaults as `read_defaults` returns them."""

    config_map: str
    """ConfigMap of the defaults, as `NAMESPACE/NAME`."""
    mark: str
    """Fingerprint of the defaults, 8 hex digits."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Values by path in the specification."""
    locked: frozenset[str] = frozenset()
    """Paths whose values a run may not change."""
    problems: str = ""
    """Reasons why the defaults cannot be used, with the fix."""


class _Content(BaseModel):
    """One key of the ConfigMap."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: dict[str, object] = Field(default_factory=dict)
    locked: Annotated[tuple[str, ...], Field(max_length=64)] = ()


@dataclass(frozen=True)
class Applied:
    """A run with its namespace's defaults."""

    run: Manifest
    """RLRun with the defaults filled in."""
    taken: tuple[str, ...] = ()
    """Fields that come from the defaults."""
    refusals: tuple[str, ...] = ()
    """Reasons why no attempt may start: changed locked fields, or unreadable defaults."""


def read_defaults(text: str, config_map: str, key: str) -> TeamDefaults:
    """Read defaults from one key of a ConfigMap. Errors are returned in `problems`.

    Args:
        text: YAML with `spec` and `locked`.
        config_map: ConfigMap, as `NAMESPACE/NAME`.
        key: key of the ConfigMap.
    """
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    source = f"ConfigMap {config_map}, key {key}"
    try:
        content = _Content.model_validate(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        return TeamDefaults(config_map, mark, problems=f"{source}: not YAML: {shorten_text(str(error), 300)}")
    except ValidationError as error:
        found = [
            f"{'.'.join(map(str, e['loc'])) or 'content'} ({shorten_text(str(e['input']), 80)}): {e['msg']}"
            for e in error.errors()
        ]
        return TeamDefaults(
            config_map, mark, problems=f"{source}: {bound_message(found)}; it may only have spec and locked"
        )
    leaves = dict(_leaf_values(content.spec))
    problems = [*_unknown_keys(leaves), *_unlockable_fields(content.locked, leaves)]
    problems = problems or _judge_values(content.spec)
    refusal = f"{source}: {bound_message(problems)}" if problems else ""
    return TeamDefaults(config_map, mark, {} if refusal else leaves, frozenset(content.locked), refusal)


def apply_defaults(run: Manifest, defaults: TeamDefaults | None) -> Applied:
    """Apply a namespace's defaults to a run. The run's own values take precedence, except for locked fields."""
    if defaults is None:
        return Applied(run)
    if defaults.problems:
        return Applied(run, refusals=(defaults.problems,))
    spec = run.get("spec")
    if not isinstance(spec, dict):
        return Applied(run)
    # A locked path is checked even if the run sets it: the run keeps its value, but no attempt starts.
    result, taken, refusals = spec, [], []
    for path, value in defaults.values.items():
        if not _concerns_run(path, spec):
            continue
        names = path.split(".")
        found, own = _value_at(spec, names)
        if not found:
            result = _with_value(result, names, value)
            taken.append(path)
        elif own != value and _is_locked(path, defaults.locked):
            refusals.append(refuse_locked(defaults, path, own))
    return Applied({**run, "spec": result} if taken else run, tuple(taken), tuple(refusals))


def refuse_locked(defaults: TeamDefaults, path: str, own: object) -> str:
    """Return the message about a run's own value of a locked field."""
    fix = f"remove it, or write {shorten_text(str(defaults.values[path]), 120)}"
    return f"{path} ({shorten_text(str(own), 120)}) is locked by ConfigMap {defaults.config_map}; {fix}"


def is_locked(defaults: TeamDefaults, path: str) -> bool:
    """Return whether a run may not set another value for a field."""
    return _is_locked(path, defaults.locked)


def status_of(defaults: TeamDefaults | None, taken: tuple[str, ...]) -> DefaultsStatus | None:
    """Return the record of an attempt's defaults, or None if it takes none."""
    if defaults is None or not taken:
        return None
    return DefaultsStatus(config_map=defaults.config_map, mark=defaults.mark, fields=list(taken[:_SHOWN]))


def _leaf_values(block: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield paths and values. Lists and indivisible blocks are values."""
    for name, value in block.items():
        path = f"{above}{name}"
        if isinstance(value, dict) and value and name not in _WHOLE:
            yield from _leaf_values(value, f"{path}.")
        else:
            yield path, value


def _unknown_keys(leaves: Mapping[str, object]) -> list[str]:
    allowed = ", ".join(ALLOWED)
    wrong = [p for p in leaves if not any(p == a or p.startswith(f"{a}.") for a in ALLOWED)]
    return (
        [f"spec.{', spec.'.join(wrong)} cannot have a default; remove it. Fields that can have defaults: {allowed}"]
        if wrong
        else []
    )


def _unlockable_fields(locked: tuple[str, ...], leaves: Mapping[str, object]) -> list[str]:
    return [
        f"locked ({path}) has no value in spec; add a value, or remove it from locked"
        for path in locked
        if not any(_is_locked(leaf, (path,)) for leaf in leaves)
    ]


def _judge_values(spec: Mapping[str, object]) -> list[str]:
    """Return the problems of a small run with these values."""
    metadata = {"name": "defaults", "uid": "", "generation": 0}
    run = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {**_EXAMPLE, **spec}}
    judgement = read_spec(run)
    return [text for text in (judgement.problems, judgement.ignored and f"unknown fields: {judgement.ignored}") if text]


def _concerns_run(path: str, spec: Json) -> bool:
    """Return whether this kind of run has the field. Without the field, the run would be refused because of the default."""
    root, _, rest = path.partition(".")
    trainer, storage, placement = spec.get("trainer"), spec.get("storage"), spec.get("placement")
    if isinstance(trainer, dict) and trainer.get("sharedWith") and root in _OF_HOST:
        return False
    if root == "storage" and isinstance(storage, dict) and storage.get("claimName"):
        return False
    colocated = isinstance(placement, dict) and placement.get("colocate") is True
    task = spec.get("task", "RL")
    engines = task != "SFT" and not colocated
    trains = task in TRAINING_TASKS
    needed = {
        "inference": engines,
        "trainer": trains,
        "tracking": trains,
        "placement": trains or not rest.startswith("trainer"),
    }
    return needed.get(root, True) and (
        engines or not path.startswith(("placement.inference", "placement.spreadInference"))
    )


def _is_locked(path: str, locked: frozenset[str] | tuple[str, ...]) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in locked)


def _value_at(block: object, names: list[str]) -> tuple[bool, object]:
    """Return whether a path has a value, with the value. A path through a value that is not a block counts as set."""
    for name in names:
        if not isinstance(block, dict):
            return True, block
        if block.get(name) is None:
            return False, None
        block = block[name]
    return True, block


def _with_value(block: Json, names: list[str], value: object) -> Json:
    """Return a copy with a value at a path."""
    name, *rest = names
    return {**block, name: _with_value(block.get(name) or {}, rest, value) if rest else value}
