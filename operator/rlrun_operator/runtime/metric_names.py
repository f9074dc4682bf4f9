"""Every metric of the operator: of its own work, and of each run as the run's status says."""

from __future__ import annotations

from rlrun.runtime.metric_table import Kind, MetricSpec, MetricTable

RUN = ("namespace", "run")
"""Labels of a series about one run. Such series are those of the process that leads, and go with the run."""


def _of_run(
    name: str, text: str, *labels: str, counter: bool = False, timestamp: bool = False, seconds: bool = False
) -> MetricSpec:
    kind: Kind = "counter" if counter else "gauge"
    return MetricSpec(name, kind, text, (*RUN, *labels), "timestamp" if timestamp else "seconds" if seconds else "")


RUNS = MetricTable(
    _of_run("rlrun_info", "Facts about the run; always 1", "model", "uid"),
    _of_run("rlrun_phase", "1 for the phase that the run is in, 0 for each other one", "phase"),
    _of_run(
        "rlrun_condition", "1 for each condition of the run's status, as it stands now", "type", "status", "reason"
    ),
    _of_run("rlrun_attempt", "Number of the current attempt"),
    _of_run("rlrun_step", "Last trained step"),
    _of_run("rlrun_max_steps", "Steps of the run"),
    _of_run("rlrun_reward_mean", "Mean reward of the last trained step"),
    _of_run("rlrun_last_step_timestamp_seconds", "When the step changed last, since the epoch", timestamp=True),
    _of_run("rlrun_steps_lost_total", "Steps that restarts had to train again", counter=True),
    _of_run("rlrun_restarts_total", "Restarts; counted: towards failurePolicy.maxRestarts", "counted", counter=True),
    _of_run("rlrun_failures_total", "Ends of attempts that this process saw, by the cause", "reason", counter=True),
    _of_run("rlrun_gpus_allocated", "GPUs of pods that have a node and have not ended", "role"),
    _of_run(
        "rlrun_gpu_seconds_total",
        "GPU time of the run's pods, from node to end, by what it was spent on; all attempts together",
        "role",
        "use",
        counter=True,
    ),
    _of_run("rlrun_tokens_per_gpu_hour", "Tokens trained per GPU-hour, since the run began"),
    _of_run("rlrun_samples_per_gpu_hour", "Samples trained per GPU-hour, since the run began"),
    _of_run("rlrun_budget_gpu_seconds", "GPU time that `spec.budget` allows", seconds=True),
    _of_run("rlrun_engines_wanted", "Engines that a run is to have"),
    _of_run("rlrun_engines_ready", "Engines that are ready"),
    _of_run("rlrun_spot_engines_wanted", "Engines that a run is to have on interruptible nodes"),
    _of_run("rlrun_spot_engines_ready", "Engines on interruptible nodes that are ready"),
    _of_run("rlrun_spot_engines_lost_total", "Engines that were lost with interruptible nodes", counter=True),
    _of_run("rlrun_trainer_size_wanted", "Pods of the trainer that a run asks for"),
    _of_run(
        "rlrun_trainer_size",
        "Pods of the trainer that the attempt is made of: fewer with `trainer.elastic` while nodes are missing",
    ),
    _of_run("rlrun_queue_position", "Place of a run that waits in the queue, from 1"),
    _of_run(
        "rlrun_queue_since_timestamp_seconds",
        "When a run that waits in the queue asked first, since the epoch",
        timestamp=True,
    ),
)
"""Made at each scrape from the operator's cache."""

OPERATOR = MetricTable(
    MetricSpec(
        "rlrun_operator_api_requests_total",
        "counter",
        "Requests to the API server; verb dry-run changes nothing",
        ("verb", "resource", "code"),
    ),
    MetricSpec(
        "rlrun_operator_reconcile_seconds",
        "histogram",
        "Time from taking a run from the queue of work to having acted",
        ("outcome",),
        "seconds",
    ),
    MetricSpec(
        "rlrun_phase_duration_seconds",
        "histogram",
        "Time that runs spent in a phase, when they left it",
        ("phase",),
        "seconds",
    ),
    MetricSpec(
        "rlrun_restart_seconds",
        "histogram",
        "Time of each phase of a restart, once its attempt has trained a new step; phase total: all of them",
        ("phase",),
        "seconds",
    ),
    MetricSpec("rlrun_operator_queue_depth", "gauge", "Runs that wait for a worker"),
    MetricSpec("rlrun_operator_queue_age_seconds", "gauge", "How long the oldest of them waits", unit="seconds"),
    MetricSpec(
        "rlrun_operator_watch_age_seconds",
        "gauge",
        "Time since a watch brought anything, bookmarks included; about 60 when nothing happens",
        ("resource", "namespace"),
        "seconds",
    ),
    MetricSpec("rlrun_operator_leader", "gauge", "1 while this process acts, 0 while it stands by"),
    MetricSpec(
        "rlrun_operator_serves",
        "gauge",
        "1 where this operator looks after the runs of a namespace (that name it as managed_by), 0 where another one does",
        ("namespace", "managed_by"),
    ),
    MetricSpec("rlrun_operator_objects", "gauge", "Objects in memory", ("kind",)),
    MetricSpec("rlrun_queue_stops_total", "counter", "Runs that the queue has suspended, by the cause", ("reason",)),
)
"""Kept by the process while it works."""
