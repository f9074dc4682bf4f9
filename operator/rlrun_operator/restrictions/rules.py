"""Rules that a part of a manifest is judged by. `refusals` applies them in Python, `expressions` as CEL: one table, two judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlrun_operator.restrictions.run_policy import ListName


@dataclass(frozen=True)
class Anything:
    """Every value."""


@dataclass(frozen=True)
class Fields:
    """A map of these fields. `closed`: it has no other fields, and none is null, which would remove what the operator has set."""

    fields: Mapping[str, Rule]
    closed: bool = True


@dataclass(frozen=True)
class Each:
    """A list whose elements all obey a rule."""

    element: Rule


@dataclass(frozen=True)
class Containers:
    """A list of containers. All but the operator's own of the role's name state that they loosen nothing.

    Attributes:
        own: whether the role's own container is in this list.
    """

    element: Rule
    own: bool


@dataclass(frozen=True)
class Only:
    """One value."""

    value: bool | str


@dataclass(frozen=True)
class Holds:
    """A list of names with this one in it."""

    value: str


@dataclass(frozen=True)
class NotRoot:
    """The number of a user or a group other than root."""


@dataclass(frozen=True)
class Listed:
    """A name from one of the policy's lists."""

    list: ListName


@dataclass(frozen=True)
class Keys:
    """A map of strings, by its keys: `annotations` by the policy's list, `labels` without those of Kubernetes and of the operator."""

    kind: Literal["annotations", "labels"]


@dataclass(frozen=True)
class VariableName:
    """The name of an environment variable that the operator does not set itself."""


@dataclass(frozen=True)
class Isolation:
    """The place of an environment's code: `Process` only if the policy's `environmentIsolation` is Any."""


Rule = Anything | Fields | Each | Containers | Only | Holds | NotRoot | Listed | Keys | VariableName | Isolation
