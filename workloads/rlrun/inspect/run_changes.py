"""Changes of a run: merge patches of its manifest from words such as `inference.replicas=6`. No side effects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import yaml

from rlrun.runtime.json_types import Json, Manifest

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*")


class WordError(ValueError):
    """Error for an invalid change; the message is one line for people."""


def patch_of(words: Sequence[str]) -> Json:
    """Return a merge patch of `spec` from words `field.name=value`; a value is YAML, and `null` removes the field.

    Raises:
        WordError: a word is invalid; the message contains the expected form.
    """
    spec: Json = {}
    for word in words:
        path, value = _split_patch(word)
        place = spec
        for name in path[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise WordError(f"{word}: {name} is already set to a value")
        if path[-1] in place:
            raise WordError(f"{word}: the field is set twice")
        place[path[-1]] = value
    return {"spec": spec}


def _split_patch(word: str) -> tuple[list[str], object]:
    field, equals, text = word.partition("=")
    names = field.removeprefix("--").removeprefix("spec.").split(".")
    if not equals or not all(names):
        raise WordError(f"got {word!r}, expected field=value, such as inference.replicas=6")
    if (number := next((name for name in names if name.isdecimal()), None)) is not None:
        raise WordError(
            f"{word}: {number} is an item of a list, which cannot change separately; edit the manifest and apply it"
        )
    if (wrong := next((name for name in names if not _WORD.fullmatch(name)), None)) is not None:
        raise WordError(f"{word}: {wrong!r} is not a field name")
    try:
        return [_camel_name(name) for name in names], yaml.safe_load(text)
    except yaml.YAMLError:
        raise WordError(f"{word}: the value is not valid YAML; quote it") from None


def _camel_name(name: str) -> str:
    first, *more = re.split(r"[-_]", name)
    return first + "".join(part[:1].upper() + part[1:] for part in more)


def dropped_fields(patch: Manifest, got: Manifest, path: str = "") -> list[str]:
    """Return the fields of a patch that the API server dropped because it does not know them, such as `spec.inference.replica`."""
    lost = []
    for key, value in patch.items():
        here = f"{path}.{key}" if path else key
        if value is None:
            continue
        there = got.get(key)
        if isinstance(value, Mapping) and value:
            lost += dropped_fields(value, there if isinstance(there, Mapping) else {}, here)
        elif key not in got:
            lost.append(here)
    return lost
