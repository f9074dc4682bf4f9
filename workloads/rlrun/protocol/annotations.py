"""Annotations of a run's progress Lease: the orchestrator writes them, the operator reads them into the status.

All values are strings. What is not known (yet) is absent.
"""

from __future__ import annotations

STEP = "rlrun.io/step"
"""The last trained step."""
TOTAL_STEPS = "rlrun.io/total-steps"
"""Steps of the whole run."""
POLICY_VERSION = "rlrun.io/policy-version"
"""The newest policy version that an engine holds."""
CHECKPOINT_STEP = "rlrun.io/checkpoint-step"
"""Step of the newest complete checkpoint."""
RESUMED_FROM_STEP = "rlrun.io/resumed-from-step"
"""Step of the checkpoint that this attempt started from; absent when it started from the model."""
REWARD = "rlrun.io/reward"
"""Mean reward of the last trained step."""
TOKENS_PER_SECOND = "rlrun.io/tokens-per-second"
"""Tokens trained per second in the last step."""
STALENESS_MEAN = "rlrun.io/staleness-mean"
"""Versions between sampling and training, mean over the tokens of the last step."""
ETA_SECONDS = "rlrun.io/eta-seconds"
"""Estimated seconds to the last step."""
ATTEMPT = "rlrun.io/attempt"
"""The attempt that reports."""
WAITING_ON = "rlrun.io/waiting-on"
"""What the next step waits for, in words."""

ALL = (
    STEP,
    TOTAL_STEPS,
    POLICY_VERSION,
    CHECKPOINT_STEP,
    RESUMED_FROM_STEP,
    REWARD,
    TOKENS_PER_SECOND,
    STALENESS_MEAN,
    ETA_SECONDS,
    ATTEMPT,
    WAITING_ON,
)
