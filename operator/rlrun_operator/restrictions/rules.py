"""Types of rules for parts of a manifest. `refusals` applies them in Python, `expressions` as CEL, from one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlrun_operator.restrictions.run_policy import ListName


@dataclass(frozen=True)
class Anything:
    """Any value."""


@dataclass(frozen=True)
class Fields:
    """A map of these fields. `closed`: other fields are forbidden, and so is null, which would remove the operator's value."""

    fields: Mapping[str, Rule]
    closed: bool = True


@dataclass(frozen=True)
class Each:
    """A list whose elements all follow a rule."""

    element: Rule


@dataclass(frozen=True)
class Containers:
    """A list of containers. Each one, except the role's own, must state that it drops privileges.

    Attributes:
        own: whether the role's own container is in this list.
    """

    element: Rule
    own: bool


@dataclass(frozen=True)
class Only:
    """Exactly this value."""

    value: bool | str


@dataclass(frozen=True)
class Holds:
    """A list of names that contains this one."""

    value: str


@dataclass(frozen=True)
class NotRoot:
    """Number of a user or a group other than root."""


@dataclass(frozen=True)
class Listed:
    """A name from one of the policy's lists."""

    list: ListName


@dataclass(frozen=True)
class Keys:
    """A map of strings with allowed keys: `annotations` from the policy's list, `labels` except those of Kubernetes and the operator."""

    kind: Literal["annotations", "labels"]


@dataclass(frozen=True)
class VariableName:
    """Name of an environment variable that the operator does not set itself."""


@dataclass(frozen=True)
class Isolation:
    """Isolation of an environment's code: `Process` only if the policy's `environmentIsolation` is Any."""


Rule = Anything | Fields | Each | Containers | Only | Holds | NotRoot | Listed | Keys | VariableName | Isolation
