"""Load of a run's engines over its last steps: what the orchestrator measures, and the operator chooses their number by."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Share = Annotated[float, Field(ge=0, le=1)]
Mean = Annotated[float, Field(ge=0, le=1e9)]


class EngineLoad(BaseModel):
    """Means over a window of whole steps, through which the number of engines that take requests was the same."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    engines: Annotated[int, Field(ge=1, le=2**16)]
    """Engines that took requests."""
    seconds: Mean
    """Length of the window."""
    steps: Annotated[int, Field(ge=1, le=2**31)]
    """Steps that ended in it."""
    waited: Share
    """Share of the time that the trainer waited for rollouts."""
    ahead: Share
    """Share of the time that the orchestrator waited for the trainer: all rollouts that it may start were started."""
    idle: Share
    """Share of the engines' time that they had no request meanwhile."""
    busy: Share
    """Share of the engines' time that they had a request."""
    requests: Mean
    """Continuations in flight per engine."""
    waiting: Mean
    """Continuations per engine for which none had room."""
    kv: Share = 0.0
    """Use of the KV cache of the fullest engine; 0 also where engines do not say."""

    def text(self) -> str:
        """JSON for an annotation, of a few digits."""
        values = self.model_dump()
        return type(self)(**{name: _round_load(value) for name, value in values.items()}).model_dump_json()


def parse_load(text: str | None) -> EngineLoad | None:
    """The load in an annotation, which any client may have written; None: there is none that can be read."""
    if not text:
        return None
    try:
        return EngineLoad.model_validate_json(text)
    except ValidationError:
        return None


def _round_load(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")
