"""Load of a run's engines over its last steps, measured by the orchestrator; the operator scales the engines by it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Share = Annotated[float, Field(ge=0, le=1)]
Mean = Annotated[float, Field(ge=0, le=1e9)]


class EngineLoad(BaseModel):
    """Means over a window of complete steps with a constant number of engines in use."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    engines: Annotated[int, Field(ge=1, le=2**16)]
    """Number of engines in use."""
    seconds: Mean
    """Length of the window."""
    steps: Annotated[int, Field(ge=1, le=2**31)]
    """Steps that ended in the window."""
    waited: Share
    """Share of the time in which the trainer waited for rollouts."""
    ahead: Share
    """Share of the time in which the orchestrator waited for the trainer, because it had started all allowed rollouts."""
    idle: Share
    """Share of the engines' time without a request while the orchestrator could have started more."""
    busy: Share
    """Share of the engines' time with a request."""
    requests: Mean
    """Continuations in flight per engine."""
    waiting: Mean
    """Queued continuations per engine, for lack of capacity."""
    kv: Share = 0.0
    """Use of the KV cache of the fullest engine; 0 also if engines do not report it."""

    def text(self) -> str:
        """Return JSON for an annotation, with few digits."""
        values = self.model_dump()
        return type(self)(**{name: _round_load(value) for name, value in values.items()}).model_dump_json()


def parse_load(text: str | None) -> EngineLoad | None:
    """Return the load in an annotation, or None if it is absent or invalid; any client may have written it."""
    if not text:
        return None
    try:
        return EngineLoad.model_validate_json(text)
    except ValidationError:
        return None


def _round_load(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")
