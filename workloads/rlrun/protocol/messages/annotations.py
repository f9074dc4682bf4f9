"""Annotations of a run's progress Lease: the orchestrator writes them, the operator reads them into the status.

All values are strings. What is not known (yet) is absent.
"""

from __future__ import annotations

RENEW_SECONDS = 20.0
"""Longest time between two renewals of the Lease. Its readers allow for one that is lost."""

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
"""Work that the next step waits for, in words."""
WAITING_ON_ROLE = "rlrun.io/waiting-on-role"
"""Role whose work that is: trainer, inference or orchestrator (which environments are part of)."""
WAITING_ON_PHASE = "rlrun.io/waiting-on-phase"
"""Activity of that role, in one or two stable words."""
WAITING_ON_SINCE = "rlrun.io/waiting-on-since"
"""Time since which (RFC 3339), by the orchestrator's clock; for people."""
ACTIVITY = "rlrun.io/activity"
"""Grows with what a step is made of (rollouts that are kept, micro-batches, a version handed over, a checkpoint): each step has a bounded
number of such moves, so that a run that goes round in circles does not seem to get on."""
STORAGE = "rlrun.io/storage"
"""Trouble of the volume: the reason of a condition, a colon and words."""
RESULTS = "rlrun.io/results"
"""Measures of an evaluation: a line per policy and environment."""
RESULTS_MAX = 64
"""Lines; all of them are on the volume."""
RESULT_MAX = 512
"""Characters of a line."""
ENGINES = "rlrun.io/engines"
"""Load of the engines over the last steps, as JSON: `engine_load.EngineLoad`."""
ENGINES_DRAINED = "rlrun.io/engines-drained"
"""Addresses of engines that get no more requests and have none, apart by spaces; empty: there is none. Absent: who reports drains none."""
DRAINED_MAX = 64
"""Addresses."""
ENGINES_WANTED = "rlrun.io/engines-wanted"
"""Number of engines that the operator wants. The operator writes it, and the orchestrator reads it in the answer to its renewals, and
drains engines beyond."""
ENGINES_SPOT = "rlrun.io/engines-spot"
"""Number of those that are to be on interruptible nodes, then the addresses of the engines there, apart by spaces. Written and read
likewise: the others beyond the rest are drained, and of these those beyond this number."""
ENGINES_WINDOW = "rlrun.io/engines-window"
"""Seconds that a report of the load is to cover; written and read likewise."""

TRAINED = "rlrun.io/trained"
"""Tokens and samples that the run has trained, apart by a space; steps that restarts have lost are left out. Absent: none."""
START_SECONDS = "rlrun.io/start-seconds"
"""Seconds of the attempt's start by phase, as JSON (`start_times`), once its first step is trained."""

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
    WAITING_ON_ROLE,
    WAITING_ON_PHASE,
    WAITING_ON_SINCE,
    ACTIVITY,
    STORAGE,
    RESULTS,
    ENGINES,
    ENGINES_DRAINED,
    TRAINED,
    START_SECONDS,
)
"""Annotations that the orchestrator writes."""
