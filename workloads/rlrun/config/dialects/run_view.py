"""View of a run's layer for its completion: values and hints by path, and fields that are set where nothing sets them."""

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
    """Place of the run's description in the layer's values."""

    def hint(self, name: str) -> Any:
        """The value of a hint; None: there is none."""
        found = self.layer.hints.get(name)
        return None if found is None else found.value

    def origin(self, name: str) -> Origin:
        """The origin of a hint, or of the first key in the other project's names."""
        return self.layer.hints.get(name, self.layer.hints[DIALECT]).origin

    def get(self, path: str) -> Any:
        """The value of a field; None: nothing sets it."""
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
        """Set a field that is not set; nothing, where something around it is no table.

        Args:
            path: the field.
            value: its value.
            hint: where it comes from.
            over: replace what is set.
            like: a field that it follows from, which comes before the hint.
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
        """Tell the user something at the place of a hint."""
        origin = self.origin(hint)
        self.layer.notices.append(Problem(origin.source, origin.path, text, origin.line))

    def refuse(self, hint: str, text: str) -> None:
        """Refuse the value of a hint."""
        origin = self.origin(hint)
        self.layer.problems.append(Problem(origin.source, origin.path, text, origin.line))

    def environments(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Environments by index; those that are no tables are left out."""
        found = self.get("environments")
        for i, one in enumerate(found if isinstance(found, list) else ()):
            if isinstance(one, dict):
                yield i, one
