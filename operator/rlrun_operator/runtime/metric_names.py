"""Metrics of the operator: about its own work, and about each run by its status."""

from __future__ import annotations

from rlrun.runtime.metric_table import Kind, MetricSpec, MetricTable

RUN = ("namespace", "run")
"""Labels of a series about one run. Only the leading process has such series, and they end with the run."""


def _of_run(
    name: str, text: str, *labels: str, counter: bool = False, timestamp: bool = False, seconds: bool = False
) -> MetricSpec:
    kind: Kind = "counter" if counter else "gauge"
    return MetricSpec(name, kind, text, (*RUN, *labels), "timestamp" if timestamp else "seconds" if seconds else "")


RUNS = MetricTable(
    _of_run("rlrun_info", "Facts about the run; always 1", "model", "uid"),
    _of_run("rlrun_phase", "1 for the phase that the run is in, 0 for each other one", "phase"),
    _of_run(
        "rlrun_condition",
        "1 for each condition of the run's status, with its current values",
        "type",
        "status",
        "reason",
    ),
    _of_run("rlrun_attempt", "Number of the current attempt"),
    _of_run("rlrun_step", "Last trained step"),
    _of_run("rlrun_max_steps", "Steps of the run"),
    _of_run("rlrun_reward_mean", "Mean reward of the last trained step"),
    _of_run(
        "rlrun_last_step_timestamp_seconds", "Time of the last change of the step, since the epoch", timestamp=True
    ),
    _of_run("rlrun_steps_lost_total", "Steps that restarts had to train again", counter=True),
    _of_run("rlrun_restarts_total", "Restarts; counted: towards failurePolicy.maxRestarts", "counted", counter=True),
    _of_run("rlrun_failures_total", "Ends of attempts that this process saw, by the cause", "reason", counter=True),
    _of_run("rlrun_gpus_allocated", "GPUs of pods that have a node and have not ended", "role"),
    _of_run(
        "rlrun_gpu_seconds_total",
        "GPU time of the run's pods, from scheduling to end, by use; all attempts together",
        "role",
        "use",
        counter=True,
    ),
    _of_run("rlrun_tokens_per_gpu_hour", "Tokens trained per GPU-hour, since the run started"),
    _of_run("rlrun_samples_per_gpu_hour", "Samples trained per GPU-hour, since the run started"),
    _of_run("rlrun_budget_gpu_seconds", "GPU time that `spec.budget` allows", seconds=True),
    _of_run("rlrun_engines_wanted", "Wanted engines of a run"),
    _of_run("rlrun_engines_ready", "Engines that are ready"),
    _of_run("rlrun_spot_engines_wanted", "Wanted engines on interruptible nodes"),
    _of_run("rlrun_spot_engines_ready", "Engines on interruptible nodes that are ready"),
    _of_run("rlrun_spot_engines_lost_total", "Engines that were lost with interruptible nodes", counter=True),
    _of_run("rlrun_trainer_size_wanted", "Wanted pods of the trainer"),
    _of_run(
        "rlrun_trainer_size",
        "Pods of the attempt's trainer: fewer than wanted with `trainer.elastic` while nodes are missing",
    ),
    _of_run("rlrun_queue_position", "Position of a waiting run in the queue, from 1"),
    _of_run(
        "rlrun_queue_since_timestamp_seconds",
        "Time since which a run waits in the queue, since the epoch",
        timestamp=True,
    ),
)
"""Metrics of runs, created at each scrape from the operator's cache."""

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
        "Time from taking a run from the work queue to the end of its actions",
        ("outcome",),
        "seconds",
    ),
    MetricSpec(
        "rlrun_phase_duration_seconds",
        "histogram",
        "Time that runs spent in a phase, observed at its end",
        ("phase",),
        "seconds",
    ),
    MetricSpec(
        "rlrun_restart_seconds",
        "histogram",
        "Time of each phase of a restart, once its attempt has trained a new step; phase total: the sum",
        ("phase",),
        "seconds",
    ),
    MetricSpec("rlrun_operator_queue_depth", "gauge", "Runs that wait for a worker"),
    MetricSpec("rlrun_operator_queue_age_seconds", "gauge", "Wait of the oldest of them", unit="seconds"),
    MetricSpec(
        "rlrun_operator_watch_age_seconds",
        "gauge",
        "Time since the last data of a watch, including bookmarks; about 60 if nothing happens",
        ("resource", "namespace"),
        "seconds",
    ),
    MetricSpec("rlrun_operator_leader", "gauge", "1 while this process acts, 0 while it stands by"),
    MetricSpec(
        "rlrun_operator_serves",
        "gauge",
        "1 if this operator serves the runs of a namespace (that name it as managed_by), 0 if another operator does",
        ("namespace", "managed_by"),
    ),
    MetricSpec("rlrun_operator_objects", "gauge", "Objects in memory", ("kind",)),
    MetricSpec("rlrun_queue_stops_total", "counter", "Runs that the queue has suspended, by the cause", ("reason",)),
)
"""Metrics that the process updates while it works."""
