"""Learning rate as a pure function of the step, so that a resumed run does not need scheduler state."""

from __future__ import annotations

import math

from rlrun.config.models.learning import SchedulerConfig


def learning_rate(config: SchedulerConfig, peak: float, step: int, max_steps: int) -> float:
    """Return the learning rate of step `step` (from 1 to `max_steps`).

    Warm-up reaches `peak` at step `warmup_steps`; linear and cosine then fall to `min_lr_ratio * peak` at `max_steps`.
    """
    if step < config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.name == "constant":
        return peak
    span = max(max_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    remaining = 1.0 - progress if config.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)
