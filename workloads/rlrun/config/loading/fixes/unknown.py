"""Suggestions for unknown fields: the intended field, its place, and the text to write there."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import BaseModel

from rlrun.config.loading.fixes.written import to_yaml
from rlrun.config.loading.schema import Shape, field_shapes, list_few, snake_name, spell_name
from rlrun.config.suggest import close_name, did_you_mean, plain_name
from rlrun.runtime import redact

_LENGTH = 160
"""Longest text of a fix, in characters."""
_OTHER_NAMES = {
    "learningrate": "lr", "steps": "max_steps", "trainingsteps": "max_steps", "totalsteps": "max_steps", "numsteps": "max_steps",
    "maxtrainsteps": "max_steps", "gpus": "gpus_per_replica", "numgpus": "gpus_per_replica", "ngpus": "gpus_per_replica",
    "gpucount": "gpus_per_replica", "backofflimit": "max_restarts", "maxretries": "max_restarts", "restarts": "max_restarts",
    "maxseqlen": "seq_len", "maxlength": "seq_len", "sequencelength": "seq_len", "contextlength": "seq_len", "groupsize": "group_size",
    "numgenerations": "group_size", "ngenerations": "group_size", "numrollouts": "group_size", "maxnewtokens": "max_tokens",
    "maxcompletionlength": "max_tokens", "tensorparallelsize": "tensor_parallel", "dataparallelsize": "data_parallel",
    "weightdecayrate": "weight_decay", "gradclip": "max_grad_norm", "maxgradientnorm": "max_grad_norm", "queue": "queue_name",
    "timeout": "active_deadline_seconds", "evalinterval": "interval", "saveinterval": "interval", "vllmargs": "extra_args",
    "args": "extra_args", "rewards": "environments", "dataset": "data", "datasets": "data", "optim": "optimizer", "ckpt": "checkpoint",
}  # fmt: skip
"""Names that other programs use for a field, in lower case without separators, with the field's Python name."""
_OF_STATUS = ("phase", "conditions", "observed_generation", "start_time", "completion_time", "attempt", "current_step")
"""Fields of a run's status."""
_OF_PODS = (
    "containers", "init_containers", "volumes", "security_context", "service_account_name", "host_network", "dns_policy", "restart_policy",
    "host_ipc", "termination_grace_period_seconds", "topology_spread_constraints", "scheduler_name",
)  # fmt: skip
"""Fields of a pod's specification."""
_OF_CONTAINERS = ("volume_mounts", "command", "ports", "liveness_probe", "readiness_probe", "working_dir", "lifecycle")
"""Fields of a container."""
_FREE = ("args", "options")
"""Fields whose content an environment or an objective defines."""
_Path = tuple[str, ...]


def unknown_field(model: type[BaseModel], key: str, root: type[BaseModel], path: str, value: object) -> str:
    """Return the end of the message about an unknown field of a manifest.

    Args:
        model: model of the block.
        key: unknown name.
        root: model of the whole document.
        path: path of the block in the document, as the user spelled it.
        value: value of the field.
    """
    names = {spell_name(model, name, "camel") for name in model.model_fields}
    same = {plain_name(name): name for name in names}
    if plain_name(key) in same:
        return f" (did you mean {same[plain_name(key)]}?)"
    if hint := _kubernetes_hint(model, key, value):
        return hint
    block = tuple(word for word in re.sub(r"\[\d+\]", "[]", path).split(".") if word)
    other = _OTHER_NAMES.get(plain_name(key), "")
    if other in model.model_fields:
        return f" (did you mean {spell_name(model, other, 'camel')}?)"
    # Homes: fields of the same name, or of its usual name here, in other blocks.
    if homes := _find_homes(root, key, block) or (_find_homes(root, other, block) if other else []):
        return _suggest_home(homes, block, value)
    if close := did_you_mean(key, names) or did_you_mean(snake_name(key), names):
        return close
    if model is not root and (
        nearest := close_name(
            key, [spell_name(root, name, "camel") for name in root.model_fields if name != snake_name(key)]
        )
    ):
        return f" (did you mean {nearest}?)"
    # The name may be an argument that an environment or an objective defines.
    free = [name for name in _FREE if name in model.model_fields and field_shapes(model)[name].kind == "mapping"]
    if free:
        return _write_nested({free[0]: {key: value}}) or f"; an argument belongs in {free[0]}"
    # In a block with mappings only, the name may be a key of the first mapping.
    known = field_shapes(model)
    if model.model_fields and all(shape.kind == "mapping" for shape in known.values()):
        first = spell_name(model, next(iter(known)), "camel")
        return _write_nested({first: {key: value}}) or f"; known: {list_few(names)}"
    return f"; known: {list_few(names)}" if names else f": this block has no fields; remove {key}"


def _kubernetes_hint(model: type[BaseModel], key: str, value: object) -> str:
    """Return the fix for a field that other Kubernetes objects have, or that the operator writes."""
    name = snake_name(key)
    if "pod_template" in model.model_fields:
        if name in _OF_PODS:
            return _write_nested({"podTemplate": {"spec": {key: value}}}) or "; it belongs in podTemplate.spec"
        if name in _OF_CONTAINERS:
            return f"; it belongs in podTemplate.spec.containers[].{key}"
    # The model with `maxSteps` is that of `spec`.
    if "max_steps" in model.model_fields:
        if name in _OF_STATUS:
            return f": only the operator writes status; remove {key}"
        if name in ("template", "selector", *_OF_PODS):
            return f": set podTemplate of trainer, inference or orchestrator to change pods; remove {key}"
    return ""


def _find_homes(root: type[BaseModel], name: str, block: _Path) -> list[_Path]:
    """Return the paths of the fields with this name: those inside the block if there are any, and only the simplest ones."""
    found: list[tuple[int, _Path]] = []
    for path, weight in _walk_fields(root, (), 0):
        if plain_name(path[-1]) == plain_name(name) and path[:-1] != block:
            found.append((weight, path))
    # A block at the top contains almost all fields, so it does not limit the choice.
    inside = [entry for entry in found if entry[1][: len(block)] == block]
    if len(block) > 1 and inside:
        found = inside
    least = min((weight for weight, _ in found), default=0)
    return [path for weight, path in found if weight == least]


def _walk_fields(model: type[BaseModel], path: _Path, weight: int) -> Iterator[tuple[_Path, int]]:
    """Yield paths of all fields, each with a weight: 1 for each optional block around it, 10 for each list. Less is simpler to write."""
    for name, shape in field_shapes(model).items():
        item: Shape = shape.parts[0] if shape.kind == "list" else shape
        here = (*path, spell_name(model, name, "camel") + ("[]" if shape.kind == "list" and item.model else ""))
        yield (*path, spell_name(model, name, "camel")), weight
        if item.model is not None:
            yield from _walk_fields(
                item.model, here, weight + (10 if shape.kind == "list" else 0) + (1 if shape.nullable else 0)
            )


def _suggest_home(homes: list[_Path], block: _Path, value: object) -> str:
    """Return the hint with at most two of the paths; for a single path without a new list, also the text to write and the block to write it
    into."""
    shown = " or ".join(".".join(path) for path in homes[:2])
    hint = f" (did you mean {shown}?)"
    if len(homes) > 1 or any(part.endswith("[]") for part in homes[0][len(block) :]):
        return hint
    home, shared = homes[0], 0
    while shared < min(len(block), len(home) - 1) and block[shared] == home[shared]:
        shared += 1
    nested = value
    for part in reversed(home[shared:]):
        nested = {part: nested}
    below = "" if shared == len(block) else f" below {'.'.join(home[:shared])}" if shared else " at the top"
    if any(part.endswith("[]") for part in home[shared:]) or not (written := _write_nested(nested)):
        return hint
    return f"{hint}{written}{below}"


def _write_nested(value: object) -> str:
    """Return `; write a: {b: 1}`, or an empty string if the text is long or contains a secret."""
    text = to_yaml(value).removeprefix("{").removesuffix("}")
    return f"; write {text}" if len(text) <= _LENGTH and redact.redact_text(text, []) == text else ""
