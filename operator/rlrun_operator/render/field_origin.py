"""Mapping from a field of a refused child to the field of the run's manifest that it was rendered from.

Pure, and defined for every refusal: its message is kept, and a field of unknown origin is reported with the child's kind, name and path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rlrun_operator.names import ROLE_LABEL, ROLES
from rlrun_operator.render.strategic_merge import MERGE_KEYS
from rlrun_operator.state import Manifest

Key = tuple[str | int, ...]
_PART = re.compile(r"\.?([^.\[\]]+)|\[(\w+)=\"([^\"]*)\"\]|\[([^\]]*)\]")
_TYPED = re.compile(r"(?<=[:\s])\s*(\.[A-Za-z]\S*?): ([^\n]+)")
_TYPED_PATCH = "failed to create typed patch object"
_TEMPLATED = ("StatefulSet", "Deployment")
_OF_BLOCK = ("imagePullSecrets", "nodeSelector", "affinity", "priorityClassName", "runtimeClassName")
_OF_CONTAINER = ("image", "imagePullPolicy", "resources", "envFrom")
_OF_VOLUME = {"data": "storage.claimName", "shm": "{role}.sharedMemory"}
_OF_CLAIM = {
    ("spec", "resources"): "storage.claimTemplate.size",
    ("spec", "storageClassName"): "storage.claimTemplate.storageClassName",
    ("spec", "accessModes"): "storage.claimTemplate.accessModes",
}


class Cause(NamedTuple):
    """One cause of a refusal by the API server."""

    field: str
    """Path in the child."""
    message: str


def refusal_causes(message: str, details: Mapping[str, object]) -> list[Cause]:
    """Return the causes of a refusal.

    Args:
        message: message of the `Status`; only here server-side apply names fields of a wrong shape.
        details: details of the `Status`.
    """
    given = details.get("causes")
    found = [
        Cause(each["field"], str(each.get("message") or ""))
        for each in (given if isinstance(given, list) else ())
        if isinstance(each, Mapping) and isinstance(each.get("field"), str) and each["field"]
    ]
    if not found and _TYPED_PATCH in message:
        found = [Cause(field, words) for field, words in _TYPED.findall(message)]
    return list(dict.fromkeys(found))


def explain_refusal(child: Manifest, refused: Sequence[Cause], message: str, run: Manifest) -> list[str]:
    """Return the causes of a refusal with the fields of the run's manifest.

    Args:
        child: refused child.
        refused: causes from `refusal_causes`.
        message: message of the refusal, used if it has no causes.
        run: specification of the run, as stored in the API server.
    """
    name = f"{child.get('kind')} {(child.get('metadata') or {}).get('name')}"
    if not refused:
        return [f"{name}: {message}"]
    result = []
    for cause in refused:
        found = find_origin(child, cause.field, run)
        result.append(f"{found or f'{name}: {cause.field}'}: {cause.message}")
    return list(dict.fromkeys(result))


def find_origin(child: Manifest, field: str, run: Manifest) -> str | None:
    """Return the manifest's field that a child's field comes from, or None if it is unknown."""
    key, kind = _path_key(field, child), child.get("kind")
    labels = (child.get("metadata") or {}).get("labels") or {}
    role = labels.get(ROLE_LABEL)
    if kind == "PersistentVolumeClaim":
        return next((path for start, path in _OF_CLAIM.items() if key[: len(start)] == start), None)
    if kind == "NetworkPolicy":
        return _origin_in_policy(child, key, run)
    if role not in ROLES or kind not in (*_TEMPLATED, "Pod"):
        return None
    if kind in _TEMPLATED:
        if key[:2] == ("spec", "replicas"):
            return f"{role}.replicas"
        if key[:2] != ("spec", "template"):
            return None
        child, key = child["spec"]["template"], key[2:]
    return _origin_in_template(child, role, key, run)


def _path_key(field: str, child: object) -> Key:
    """Parse a path of the API server; elements that it names by their key are replaced by their index."""
    key: list[str | int] = []
    place = child
    for plain, by, value, index in _PART.findall(field):
        if by:
            elements = place if isinstance(place, list) else ()
            at = next((i for i, e in enumerate(elements) if isinstance(e, Mapping) and str(e.get(by)) == value), None)
            if at is None:
                break
            part: str | int = at
        else:
            word = plain or index
            part = int(word) if word.isdecimal() and isinstance(place, list) else word
        key.append(part)
        place = _path_inside(place, part)
    return tuple(key)


def _path_inside(place: object, part: str | int) -> object:
    if isinstance(place, Mapping):
        return place.get(part)
    if isinstance(place, list) and isinstance(part, int) and part < len(place):
        return place[part]
    return None


def _origin_in_policy(child: Manifest, key: Key, run: Manifest) -> str | None:
    """Return the user's rule; the user's rules come after those of the operator."""
    rules, own = (child.get("spec") or {}).get("egress"), (run.get("networkPolicy") or {}).get("extraEgress")
    if key[:2] != ("spec", "egress") or len(key) < 3 or not isinstance(rules, list) or not isinstance(own, list):
        return None
    index = int(key[2]) - (len(rules) - len(own)) if isinstance(key[2], int) else -1
    return _show_path("networkPolicy.extraEgress", (index, *key[3:])) if index >= 0 else None


def _origin_in_template(template: Manifest, role: str, key: Key, run: Manifest) -> str | None:
    block = run.get(role)
    block = block if isinstance(block, Mapping) else {}
    if (patched := _path_in_patch(block.get("podTemplate"), template, key)) is not None:
        return _show_path(f"{role}.podTemplate", patched)
    if key[:1] != ("spec",) or len(key) < 2:
        return None
    if key[1:3] == ("podTemplate", "spec"):  # rendered like this if the user's value is not a map
        return f"{role}.podTemplate.spec"
    match key[1]:
        case "containers" | "initContainers":
            return _origin_in_container(template, role, key, run)
        case "tolerations" | "volumes" | "topologySpreadConstraints" | "terminationGracePeriodSeconds" as part:
            return _origin_in_pod_spec(template, role, part, key, block)
        case str() as part if part in _OF_BLOCK and _is_set(block, key[1:]):
            return _show_path(role, key[1:])
        case "nodeSelector" | "affinity":
            return "placement"
    return None


def _origin_in_pod_spec(template: Manifest, role: str, part: str, key: Key, block: Manifest) -> str | None:
    if part == "tolerations":
        own, every = block.get("tolerations") or (), template["spec"].get("tolerations") or ()
        index = int(key[2]) - (len(every) - len(own)) if len(key) > 2 and isinstance(key[2], int) else -1
        return _show_path(f"{role}.tolerations", (index, *key[3:])) if index >= 0 else None
    if part == "volumes":
        volume = _path_inside(template["spec"].get("volumes"), key[2]) if len(key) > 2 else None
        found = _OF_VOLUME.get(str(volume.get("name"))) if isinstance(volume, Mapping) else None
        return found.format(role=role) if found is not None else None
    return "placement" if part == "topologySpreadConstraints" else "checkpoint.gracePeriodSeconds"


def _origin_in_container(template: Manifest, role: str, key: Key, run: Manifest) -> str | None:
    block = run.get(role)
    block = block if isinstance(block, Mapping) else {}
    container = _path_inside(template["spec"].get(key[1]), key[2]) if len(key) > 2 else None
    if not isinstance(container, Mapping) or len(key) < 4:
        return None
    name, part, rest = str(container.get("name")), str(key[3]), key[3:]
    if (found := re.fullmatch(r"environment-(\d+)", name)) is not None:
        return f"environments[{found[1]}].image" if part == "image" else f"environments[{found[1]}]"
    if part == "env" and len(rest) > 1:
        return _origin_of_variable(container, role, rest, block)
    if part == "volumeMounts":
        return "storage.subPath" if rest[-1] == "subPath" else "storage.mountPath"
    gpu = str((run.get("placement") or {}).get("gpuResource", "nvidia.com/gpu"))
    if part == "resources" and gpu in rest and not _is_set(block, rest):
        return "placement.gpuResource"
    return _show_path(role, rest) if part in _OF_CONTAINER and _is_set(block, rest[:1]) else None


def _origin_of_variable(container: Manifest, role: str, rest: Key, block: Manifest) -> str | None:
    """Return the field of a container's variable, or None if the role's block does not set it."""
    variable = _path_inside(container.get("env"), rest[1])
    names = [each.get("name") for each in block.get("env") or () if isinstance(each, Mapping)]
    wanted = variable.get("name") if isinstance(variable, Mapping) else None
    return _show_path(f"{role}.env", (names.index(wanted), *rest[2:])) if wanted in names else None


def _is_set(block: Manifest, key: Key) -> bool:
    """Return whether the block contains a value at this path."""
    place: object = block
    for part in key:
        place = _path_inside(place, part)
    return place is not None


def _path_in_patch(patch: object, template: object, key: Key) -> Key | None:
    """Return the same path in the user's template, whose lists may have another order, or None if the template does not contain it."""
    found: list[str | int] = []
    name = ""
    for depth, part in enumerate(key):
        template = _path_inside(template, part)
        if isinstance(patch, list):
            index = _find_element(patch, template, part, MERGE_KEYS.get(name))
            if index is None:
                return None
            found.append(index)
            patch = patch[index]
            continue
        name = str(part)
        if not isinstance(patch, Mapping) or part not in patch:
            missing = depth == len(key) - 1 and depth > 1 and isinstance(patch, Mapping) and template is None
            return (*found, part) if missing else None
        found.append(part)
        patch = patch[part]
    return tuple(found)


def _find_element(patch: Sequence[object], element: object, part: str | int, merge_key: str | None) -> int | None:
    if merge_key is None:
        return part if isinstance(part, int) and part < len(patch) else None
    wanted = element.get(merge_key) if isinstance(element, Mapping) else None
    keys: Iterable[object] = (each.get(merge_key) if isinstance(each, Mapping) else None for each in patch)
    return next((i for i, each in enumerate(keys) if each == wanted and each is not None), None)


def _show_path(start: str, key: Key) -> str:
    text = start
    for part in key:
        text += f"[{part}]" if isinstance(part, int) or re.search(r"[^A-Za-z0-9]", part) else f".{part}"
    return text
