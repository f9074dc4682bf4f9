"""Annotations of a run's progress Lease: progress, load of engines, spot engines and start times.

The orchestrator writes them, and the operator reads them into the status. The operator writes the wanted engines, also of interruptible
nodes (`ENGINES_SPOT`). All values are strings. Unknown values are absent.

The operator scales the engines by their load over the last steps, which the orchestrator measures.

The seconds of a trainer's start by phase pass from the metrics of an attempt's first step through the Lease to the run's status. Each is a
duration by one process's steady clock, so that clocks of two machines are never compared.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
"""Load of the engines over the last steps, as JSON: `EngineLoad`."""
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


@dataclass(frozen=True)
class SpotWish:
    """Wanted engines on interruptible nodes."""

    engines: int
    hosts: frozenset[str]
    """Hosts of the engines on such nodes."""

    @classmethod
    def read(cls, text: str) -> SpotWish:
        """Parse the annotation.

        Raises:
            ValueError: it does not start with a number.
        """
        number, *hosts = text.split() or [""]
        return cls(max(0, int(number)), frozenset(map(plain_host, hosts)))

    @classmethod
    def from_hosts(cls, engines: int, hosts: Iterable[str]) -> SpotWish:
        """Return the wish with each address in canonical form."""
        return cls(engines, frozenset(map(plain_host, hosts)))

    def text(self) -> str:
        """Return the text of the annotation."""
        return " ".join([str(self.engines), *sorted(self.hosts)])


def plain_host(host: str) -> str:
    """Return an address in canonical form, or a name unchanged."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


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


PREFIX = "time/start_"
"""Prefix of the metrics' names, before the phase."""
MEASURED = ("imports", "group", "base", "model", "checkpoint", "publish")
"""Phases that rank 0 measures, in order: torchrun and the rank import packages; the ranks meet; the base checkpoint is chosen and checked;
the model is sharded (and read, if no checkpoint has the weights); the checkpoint is read; the base version is published."""
PHASES = (*MEASURED, "batch", "step")
"""All phases up to the first new step: in addition to the measured ones, the wait for its batch, and the step itself with compilation."""
OBSERVED = ("ending", "waiting", "scheduling", "containers")
"""Phases of a restart that the operator observes, in order: until the old pods are gone, the next attempt starts, all of its pods have
nodes, and all of their containers run."""
OTHER = "other"
"""Remainder of a restart: waits between pods, and delays of reports."""
RESTART_PHASES = (*OBSERVED, *PHASES, OTHER)
"""All phases of a restart, in the order of `status.lastRestart`."""
SECONDS_MAX = 30 * 86400.0
"""Maximum of a valid measurement."""


def start_times(metrics: Mapping[str, float]) -> dict[str, float] | None:
    """Return seconds by phase from the metrics of an attempt's first step, or None if a later step or an old trainer wrote them.

    Args:
        metrics: metrics of a step, by their names in `metrics.jsonl`.
    """
    found = {name: metrics[PREFIX + name] for name in MEASURED if PREFIX + name in metrics}
    if not found:
        return None
    wait = metrics.get("time/wait_for_batch", 0.0)
    found["batch"], found["step"] = wait, metrics.get("time/step", wait) - wait
    return _valid_durations(found)


def start_text(seconds: Mapping[str, float]) -> str:
    """Return the text of an annotation."""
    return json.dumps({name: round(value, 1) for name, value in seconds.items()}, separators=(",", ":"))


def parse_start(text: str | None) -> dict[str, float]:
    """Return seconds by phase from an annotation; any client may have written it, so invalid durations are dropped."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return _valid_durations(found) if isinstance(found, dict) else {}


def _valid_durations(found: Mapping[str, object]) -> dict[str, float]:
    """Return the durations of known phases, in order; a negative one, after a clock was set back, becomes zero."""
    sound: dict[str, float] = {}
    for name in PHASES:
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= SECONDS_MAX:
            sound[name] = max(0.0, float(value))
    return sound
