"""Defaults that an administrator gives to the runs of a namespace: read, judged, and put below what a run says.

They are never written into a specification: each pass lays the run over them, so that a change of them is to a run what an edit of its
own fields is, and takes effect with its next attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlrun.api.resource import API_VERSION, KIND
from rlrun.api.status import DefaultsStatus
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.defaults.judgement import read_spec
from rlrun.defaults.words import bound_message, shorten_text
from rlrun.runtime.json_types import Json, Manifest

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
"""Fields of a specification that may have such a default, with all below them."""
_WHOLE = frozenset(("nodeSelector", "affinity", "topology"))
"""Blocks that a run has from one side: a half of each would mean something else."""
_OF_HOST = frozenset(("trainer", "inference", "placement", "storage"))
"""Blocks that a guest has from its host."""
_SHOWN = 64
"""Fields that a status names."""
_EXAMPLE: Json = {"model": {"path": "/model"}, "environments": [{"id": "reverse-text"}]}


@dataclass(frozen=True)
class TeamDefaults:
    """Defaults as `read_defaults` finds them."""

    config_map: str
    """`NAMESPACE/NAME` of the ConfigMap that has them."""
    mark: str
    """8 hex digits over them."""
    values: Mapping[str, object] = field(default_factory=dict)
    """By path in the specification."""
    locked: frozenset[str] = frozenset()
    """Paths whose value a run may not change."""
    problems: str = ""
    """Reasons why they cannot be used, with the fix."""


class _Content(BaseModel):
    """One key of the ConfigMap."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: dict[str, object] = Field(default_factory=dict)
    locked: Annotated[tuple[str, ...], Field(max_length=64)] = ()


@dataclass(frozen=True)
class Applied:
    """A run with its namespace's defaults."""

    run: Manifest
    """The RLRun with what it takes of them."""
    taken: tuple[str, ...] = ()
    """Fields that come from them."""
    refusals: tuple[str, ...] = ()
    """Reasons why no attempt may begin: fields that are locked, and defaults that cannot be read."""


def read_defaults(text: str, config_map: str, key: str) -> TeamDefaults:
    """Defaults from one key of a ConfigMap; what is wrong with them is in their `problems`.

    Args:
        text: YAML with `spec` and `locked`.
        config_map: `NAMESPACE/NAME`.
        key: of the ConfigMap.
    """
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    source = f"ConfigMap {config_map}, key {key}"
    try:
        content = _Content.model_validate(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        return TeamDefaults(config_map, mark, problems=f"{source}: it is no YAML: {shorten_text(str(error), 300)}")
    except ValidationError as error:
        found = [
            f"{'.'.join(map(str, e['loc'])) or 'it'} ({shorten_text(str(e['input']), 80)}): {e['msg']}"
            for e in error.errors()
        ]
        return TeamDefaults(
            config_map, mark, problems=f"{source}: {bound_message(found)}; it has spec and locked alone"
        )
    leaves = dict(_leaf_values(content.spec))
    problems = [*_unknown_keys(leaves), *_unlockable_fields(content.locked, leaves)]
    problems = problems or _judge_values(content.spec)
    said = f"{source}: {bound_message(problems)}" if problems else ""
    return TeamDefaults(config_map, mark, {} if said else leaves, frozenset(content.locked), said)


def apply_defaults(run: Manifest, defaults: TeamDefaults | None) -> Applied:
    """A run laid over its namespace's defaults: what it says counts, but for fields that are locked."""
    if defaults is None:
        return Applied(run)
    if defaults.problems:
        return Applied(run, refusals=(defaults.problems,))
    spec = run.get("spec")
    if not isinstance(spec, dict):
        return Applied(run)
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
    """Words for a run's own value of a locked field."""
    fix = f"remove it, or write {shorten_text(str(defaults.values[path]), 120)}"
    return f"{path} ({shorten_text(str(own), 120)}) is locked by ConfigMap {defaults.config_map}; {fix}"


def is_locked(defaults: TeamDefaults, path: str) -> bool:
    """True if a run may have no other value there."""
    return _is_locked(path, defaults.locked)


def status_of(defaults: TeamDefaults | None, taken: tuple[str, ...]) -> DefaultsStatus | None:
    """Record of an attempt's defaults; None: it takes none."""
    if defaults is None or not taken:
        return None
    return DefaultsStatus(config_map=defaults.config_map, mark=defaults.mark, fields=list(taken[:_SHOWN]))


def _leaf_values(block: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Paths and values; lists, and blocks that count as one, are values."""
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
        [f"spec.{', spec.'.join(wrong)}: no default is taken for it; remove it. Fields with defaults: {allowed}"]
        if wrong
        else []
    )


def _unlockable_fields(locked: tuple[str, ...], leaves: Mapping[str, object]) -> list[str]:
    return [
        f"locked ({path}): spec has no value there; give it one, or take it out of locked"
        for path in locked
        if not any(_is_locked(leaf, (path,)) for leaf in leaves)
    ]


def _judge_values(spec: Mapping[str, object]) -> list[str]:
    """Problems of a small run that has these values."""
    metadata = {"name": "defaults", "uid": "", "generation": 0}
    run = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {**_EXAMPLE, **spec}}
    judgement = read_spec(run)
    return [said for said in (judgement.problems, judgement.ignored and f"not known: {judgement.ignored}") if said]


def _concerns_run(path: str, spec: Json) -> bool:
    """False for a field that this kind of run has no use for, and would be refused with."""
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
    """True and the value at a path, or where the way there ends in something else than a block."""
    for name in names:
        if not isinstance(block, dict):
            return True, block
        if block.get(name) is None:
            return False, None
        block = block[name]
    return True, block


def _with_value(block: Json, names: list[str], value: object) -> Json:
    """A copy with a value at a path."""
    name, *rest = names
    return {**block, name: _with_value(block.get(name) or {}, rest, value) if rest else value}
