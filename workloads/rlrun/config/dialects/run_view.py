"""Access to a run's layer during its completion: values and hints by path, and setting of unset fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlrun.config.dialects.translate import DIALECT, key_of
from rlrun.config.loading.layers import Layer, Origin
from rlrun.config.loading.problems import Problem
from rlrun.config.loading.yaml_text import Key


@dataclass(frozen=True)
class RunView:
    """A run in a layer."""

    layer: Layer
    below: Key
    """Path of the run's description in the layer's values."""

    def hint(self, name: str) -> Any:
        """Return the value of a hint, or None."""
        found = self.layer.hints.get(name)
        return None if found is None else found.value

    def origin(self, name: str) -> Origin:
        """Return the origin of a hint, or of the first key with the other project's name."""
        return self.layer.hints.get(name, self.layer.hints[DIALECT]).origin

    def get(self, path: str) -> Any:
        """Return the value of a field, or None if it is not set."""
        value: Any = self.layer.values
        for part in (*self.below, *key_of(path)):
            if isinstance(value, dict):
                value = value.get(part)
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                return None
        return value

    def put(self, path: str, value: Any, hint: str, *, over: bool = False, like: str = "") -> None:
        """Set an unset field. Nothing happens if the field would be inside a value that is not a table.

        Args:
            path: path of the field.
            value: value to set.
            hint: hint that the value comes from.
            over: whether to replace an existing value.
            like: field whose origin is used instead of the hint's, if it is set.
        """
        if self.get(path) is not None and not over:
            return
        *parents, last = key = (*self.below, *key_of(path))
        place: Any = self.layer.values
        for part in parents:
            inside = place.get(part) if isinstance(place, dict) else None
            if isinstance(place, list) and isinstance(part, int) and part < len(place):
                inside = place[part]
            elif isinstance(place, dict) and inside is None:
                inside = place.setdefault(part, {})
            if not isinstance(inside, dict | list):
                return
            place = inside
        if isinstance(place, dict):
            place[last] = value
            followed = self.layer.origins.get((*self.below, *key_of(like))) if like else None
            self.layer.origins[key] = followed or self.origin(hint)

    def note(self, hint: str, text: str) -> None:
        """Report a notice at the place of a hint."""
        origin = self.origin(hint)
        self.layer.notices.append(Problem(origin.source, origin.path, text, origin.line))

    def refuse(self, hint: str, text: str) -> None:
        """Refuse the value of a hint."""
        origin = self.origin(hint)
        self.layer.problems.append(Problem(origin.source, origin.path, text, origin.line))

    def environments(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the environments that are tables, with their indices."""
        found = self.get("environments")
        for i, environment in enumerate(found if isinstance(found, list) else ()):
            if isinstance(environment, dict):
                yield i, environment
