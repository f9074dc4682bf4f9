"""Strategic merge of a `podTemplate` over the generated one, as `kubectl patch` does it. Pure; it accepts any JSON.

Maps merge key by key, null removes a key, lists whose elements have a merge key merge by it, other lists are replaced as a whole.
`$patch: delete` and `$patch: replace` work in maps and in lists. A value of another type replaces the generated one: the API server's
dry run then reports the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlrun_operator.state import Json, Manifest

_DIRECTIVE = "$patch"
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
"""Kubernetes' `patchMergeKey` of the lists in a PodTemplateSpec. Tolerations have none."""
_ONE_OF = frozenset({"volumes", "env"})
"""Lists whose elements have one of several sources: the source of the patch replaces the generated one."""


def merge_patch(base: Manifest, patch: Manifest) -> Json:
    """Return `base` with `patch` merged into it; neither is changed.

    Args:
        base: generated map.
        patch: changes by the user.
    """
    directive = patch.get(_DIRECTIVE)
    if directive == "delete":
        return {}
    result = {} if directive == "replace" else dict(base)
    for key, value in patch.items():
        if key == _DIRECTIVE:
            continue
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge_values(key, result.get(key), value)
    return result


def _merge_values(key: str, base: object, patch: object) -> object:
    if isinstance(patch, Mapping):
        return merge_patch(base if isinstance(base, Mapping) else {}, patch)
    if isinstance(patch, Sequence) and not isinstance(patch, str):
        old = base if isinstance(base, Sequence) and not isinstance(base, str) else []
        return _merge_list(key, old, patch)
    return patch


def _merge_list(key: str, base: Sequence[object], patch: Sequence[object]) -> list[object]:
    merge_key = MERGE_KEYS.get(key)
    replaces = any(element == {_DIRECTIVE: "replace"} for element in patch)
    elements = [element for element in patch if element != {_DIRECTIVE: "replace"}]
    if merge_key is None or replaces:
        return [merge_patch({}, element) if isinstance(element, Mapping) else element for element in elements]
    result = list(base)
    for element in elements:
        if not isinstance(element, Mapping):
            result.append(element)
            continue
        where = _find_element(result, merge_key, element.get(merge_key))
        if element.get(_DIRECTIVE) == "delete":
            if where is not None:
                del result[where]
        elif where is None:
            result.append(merge_patch({}, element))
        else:
            old = result[where]
            assert isinstance(old, Mapping)  # see `_find_element`
            if key in _ONE_OF and len(element) > 1:
                old = {name: value for name, value in old.items() if name in element}
            result[where] = merge_patch(old, element)
    return result


def _find_element(elements: Sequence[object], merge_key: str, value: object) -> int | None:
    """Return the index of the element with this value of the merge key."""
    if value is None:
        return None
    matches = (
        i for i, element in enumerate(elements) if isinstance(element, Mapping) and element.get(merge_key) == value
    )
    return next(matches, None)
