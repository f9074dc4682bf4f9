"""Models of a local run: the specification of a manifest plus the run's name and folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from rlrun.api.resource import RLRunSpec, check_name
from rlrun.config.models.roles import Task
from rlrun.evaluate.served.client import ClientConfig

ALIASES = {"ckpt": "checkpoint"}
"""Alternative names of RLRun's own fields."""


class RlConfig(RLRunSpec):
    """A local run: the specification of a manifest plus the run's name and folder."""

    name: Annotated[str, Field(min_length=1, max_length=40)] = "rl"
    """Name of the run."""
    output_dir: str | None = None
    """The run's folder; default: runs/<name>."""

    @field_validator("name")
    @classmethod
    def _rfc1035(cls, name: str) -> str:
        return check_name(name)

    def spec(self) -> RLRunSpec:
        """Return the part that a manifest's `spec` contains."""
        return RLRunSpec(**{name: getattr(self, name) for name in RLRunSpec.model_fields})


class SftConfig(RlConfig):
    """A local supervised run: the specification of a manifest plus the run's name and folder."""

    name: str = "sft"
    """Name of the run."""
    task: Task = "SFT"
    """Kind of the run. Default: SFT."""


class EvalConfig(RlConfig):
    """A local evaluation: the specification of a manifest plus the run's name and folder."""

    name: str = "eval"
    """Name of the run."""
    task: Task = "Eval"
    """Kind of the run. Default: Eval."""
    client: ClientConfig | None = None
    """OpenAI-style servers that are used instead of engines. Default: none."""
