"""Fields that the operator's applies still own, by `metadata.managedFields`: a client that edits or removes a field takes its ownership.

The API server keeps this record for every object (KEP 555, structured-merge-diff). Therefore an object's metadata show whether a client
edited what the operator applied, without the object's content and without a record of what was applied.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from rlrun.runtime.printable import shorten_text
from rlrun_operator.names import MANAGER
from rlrun_operator.state import Json, Manifest

EDITS_MAX = 64
"""Maximum number of foreign edits that are kept per object."""
VALUE_MAX = 120
"""Maximum characters of a shown value."""
SCALE = "scale"
"""Subresource with which `kubectl scale` and autoscalers set `spec.replicas`."""
_HIDDEN = ("env", "args", "command", "annotations")
"""Fields whose values are not shown because they may contain secrets."""
_KEPT_OF_METADATA = ("f:labels", "f:ownerReferences")
_UNCOMPARED = ("apiVersion", "kind", "metadata")


def held_fields(manifest: Manifest) -> str:
    """Return the fields that the operator's apply owns, as JSON; objects of one shape share one string. `null` if it owns none.

    Args:
        manifest: object with its `metadata.managedFields`.
    """
    for entry in manifest["metadata"].get("managedFields") or ():
        if entry.get("manager") == MANAGER and entry.get("operation") == "Apply" and not entry.get("subresource"):
            return sys.intern(json.dumps(_field_shape(entry.get("fieldsV1") or {}), sort_keys=True))
    return "null"


def _field_shape(fields: Manifest) -> Json:
    """Return the fields without the parts that differ between two runs: owner UIDs and annotations."""
    metadata = fields.get("f:metadata") or {}
    kept = {name: metadata[name] for name in _KEPT_OF_METADATA if name in metadata}
    if "f:ownerReferences" in kept:
        kept["f:ownerReferences"] = {}
    return {**fields, "f:metadata": kept}


def unheld_fields(found: str, manifest: Manifest) -> list[str]:
    """Return the paths of fields of `manifest` that the operator no longer owns; empty if no client has touched it.

    Args:
        found: result of `held_fields` for the existing object.
        manifest: object as the operator applies it; the values of its fields do not matter.
    """
    fields = _parse_fields(found) or {}
    metadata = manifest["metadata"]
    wanted: Json = {"labels": metadata["labels"]} if metadata.get("labels") else {}
    if metadata.get("ownerReferences"):
        wanted["ownerReferences"] = True
    lost = _missing_paths(fields.get("f:metadata") or {}, wanted, "metadata")
    return lost + _missing_paths(
        fields, {name: value for name, value in manifest.items() if name not in _UNCOMPARED}, ""
    )


@lru_cache(maxsize=256)
def _parse_fields(found: str) -> Json | None:
    fields: Json | None = json.loads(found)
    return fields


def _missing_paths(fields: Manifest, wanted: Manifest, path: str) -> list[str]:
    lost: list[str] = []
    for name, value in wanted.items():
        here = f"{path}.{name}" if path else name
        inner = fields.get(f"f:{name}")
        if inner is None:
            lost.append(here)
        elif isinstance(value, Mapping) and inner:  # {}: the field has one owner for all of its content
            lost += _missing_paths(inner, value, here)
        elif isinstance(value, list) and any(key != "." for key in inner):
            lost += _missing_items(inner, value, here)
    return lost


def _missing_items(fields: Manifest, wanted: Sequence[object], path: str) -> list[str]:
    """Return the unowned items of a list that is a map by keys (`k:{...}`) or a set (`v:...`)."""
    keyed = {key: json.loads(key[2:]) for key in fields if key.startswith("k:")}
    values = [json.loads(key[2:]) for key in fields if key.startswith("v:")]
    lost: list[str] = []
    for index, item in enumerate(wanted):
        here = f"{path}[{index}]"
        if not isinstance(item, Mapping):
            lost += [] if item in values else [here]
            continue
        # The API server adds default keys, such as a port's protocol, which the applied item lacks.
        key = next((key for key, named in keyed.items() if all(item.get(k, v) == v for k, v in named.items())), None)
        lost += [here] if key is None else _missing_paths(fields[key], item, here)
    return lost


def foreign_edits(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """Return the fields of `spec` that other clients have set: path -> (field manager, printable value or empty string).

    Args:
        manifest: complete object with its `metadata.managedFields`. An object that the operator never applied has no foreign edits: all of
            its fields belong to its controller.
    """
    entries = manifest["metadata"].get("managedFields") or ()
    if held_fields(manifest) == "null":
        return {}
    found: dict[str, tuple[str, str]] = {}
    for entry in entries:
        if entry.get("manager") == MANAGER or (entry.get("subresource") or SCALE) != SCALE:
            continue
        fields = (entry.get("fieldsV1") or {}).get("f:spec") or {}
        for path, value in _leaf_fields(fields, manifest.get("spec"), "spec"):
            if len(found) < EDITS_MAX:
                found[path] = (str(entry.get("manager")), value)
    return found


def _leaf_fields(fields: Manifest, value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the paths of the fields that an entry owns, each with its value."""
    inner = {key: each for key, each in fields.items() if key != "."}
    if not inner:
        yield path, _show_scalar(path, value)
    for key, each in inner.items():
        if key.startswith("f:"):
            name = key[2:]
            yield from _leaf_fields(each, value.get(name) if isinstance(value, Mapping) else None, f"{path}.{name}")
        elif key.startswith("k:") and isinstance(value, list):
            named = json.loads(key[2:])
            for index, item in enumerate(value):
                if isinstance(item, Mapping) and all(item.get(k, v) == v for k, v in named.items()):
                    yield from _leaf_fields(each, item, f"{path}[{index}]")
                    break


def _show_scalar(path: str, value: object) -> str:
    """Return a scalar in one line; empty for values that may be secret, and for lists and mappings."""
    hidden = any(part.partition("[")[0] in _HIDDEN for part in path.split("."))
    if hidden or value is None or isinstance(value, Mapping | list):
        return ""
    return shorten_text(str(value), VALUE_MAX)
