"""Annotations of a run's progress Lease: the orchestrator writes them, the operator reads them into the status.

All values are strings. Unknown values are absent.
"""

from __future__ import annotations

RENEW_SECONDS = 20.0
"""Maximum seconds between two renewals of the Lease. Its readers tolerate one lost renewal."""

STEP = "rlrun.io/step"
"""The last trained step."""
TOTAL_STEPS = "rlrun.io/total-steps"
"""Steps of the whole run."""
POLICY_VERSION = "rlrun.io/policy-version"
"""Newest policy version of any engine."""
CHECKPOINT_STEP = "rlrun.io/checkpoint-step"
"""Step of the newest complete checkpoint."""
RESUMED_FROM_STEP = "rlrun.io/resumed-from-step"
"""Step of the checkpoint from which this attempt started; absent if it started from the model."""
REWARD = "rlrun.io/reward"
"""Mean reward of the last trained step."""
TOKENS_PER_SECOND = "rlrun.io/tokens-per-second"
"""Tokens trained per second in the last step."""
STALENESS_MEAN = "rlrun.io/staleness-mean"
"""Versions between sampling and training, mean over the tokens of the last step."""
ETA_SECONDS = "rlrun.io/eta-seconds"
"""Estimated seconds to the last step."""
ATTEMPT = "rlrun.io/attempt"
"""Number of the reporting attempt."""
WAITING_ON = "rlrun.io/waiting-on"
"""Work that the next step waits for, as a phrase."""
WAITING_ON_ROLE = "rlrun.io/waiting-on-role"
"""Role that does this work: trainer, inference or orchestrator (which includes environments)."""
WAITING_ON_PHASE = "rlrun.io/waiting-on-phase"
"""Activity of that role, in one or two stable words."""
WAITING_ON_SINCE = "rlrun.io/waiting-on-since"
"""Start of the wait (RFC 3339), by the orchestrator's clock; informational."""
ACTIVITY = "rlrun.io/activity"
"""Counter of the events that make up a step (kept rollouts, micro-batches, a delivered version, a checkpoint). Each step has a bounded
number of them, so that a run in an endless loop does not appear to make progress."""
STORAGE = "rlrun.io/storage"
"""Problem of the volume: reason of a condition, colon and message."""
RESULTS = "rlrun.io/results"
"""Results of an evaluation: a line per policy and environment."""
RESULTS_MAX = 64
"""Maximum number of lines; the volume has all results."""
RESULT_MAX = 512
"""Characters of a line."""
ENGINES = "rlrun.io/engines"
"""Load of the engines over the last steps, as JSON: `engine_load.EngineLoad`."""
ENGINES_DRAINED = "rlrun.io/engines-drained"
"""Space-separated addresses of engines without current or future requests; empty: none. Absent: the orchestrator does not drain engines."""
DRAINED_MAX = 64
"""Addresses."""
ENGINES_WANTED = "rlrun.io/engines-wanted"
"""Number of engines that the operator wants. The operator writes it; the orchestrator reads it in the answers to its renewals, and drains
surplus engines."""
ENGINES_SPOT = "rlrun.io/engines-spot"
"""Number of wanted engines on interruptible nodes, then the addresses of the engines there, separated by spaces. Written and read in the
same way: surplus engines are drained separately for interruptible and other nodes."""
ENGINES_WINDOW = "rlrun.io/engines-window"
"""Seconds that a report of the load should cover; written and read in the same way."""

TRAINED = "rlrun.io/trained"
"""Trained tokens and samples of the run, separated by a space, without steps that restarts lost. Absent: none."""
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
