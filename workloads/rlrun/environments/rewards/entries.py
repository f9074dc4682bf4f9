"""Declaration of rewards: one name, or several with weights. Each one is a built-in reward or a function of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from rlrun.config.algorithm.names import is_import_path
from rlrun.config.suggest import unknown_name
from rlrun.environments.rewards.scorers import BUILT_IN


class RewardEntry(BaseModel):
    """One reward of an environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """A built-in reward, or `package.module:function`."""
    weight: float = Field(default=1.0, allow_inf_nan=False, ge=-1e6, le=1e6)
    """Factor of the reward in the sum. A reward with weight 0 is only reported."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of a built-in reward, or additional arguments of a function."""
    processes: int = Field(default=2, ge=1, le=256)
    """Processes that call a plain function at the same time. An `async def` runs in the environment's event loop."""
    timeout_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Deadline of one call of a function."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name not in BUILT_IN and not is_import_path(name):
            raise ValueError(unknown_name("reward", name, BUILT_IN) + ", or an import path package.module:function")
        return name

    @model_validator(mode="after")
    def _check_function_fields(self) -> Self:
        for field in ("processes", "timeout_seconds"):
            if field in self.model_fields_set and not is_import_path(self.name):
                raise ValueError(
                    f"{field} applies only to functions; options of the built-in reward {self.name} belong in args"
                )
        return self

    @property
    def label(self) -> str:
        """Name of the reward in metrics."""
        return self.name.rpartition(":")[2]


def _list_entries(value: object) -> object:
    """Return one reward or a list of rewards as a list of entries."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise ValueError("the list is empty; name at least one reward")
    return [{"name": item} if isinstance(item, str) else item for item in items]


RewardEntries = Annotated[list[RewardEntry], BeforeValidator(_list_entries)]
"""A name, an entry, or a list of names and entries."""

ANY_SOURCE = "*"
"""Key of the rewards for all values of `data_source` without rewards of their own."""


def describe_sources(entries: Mapping[str, object]) -> str:
    """Return a list of source names for messages."""
    return ", ".join(repr(source) for source in entries) or "none"
