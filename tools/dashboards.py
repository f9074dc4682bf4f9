"""Grafana's dashboards of the chart: operator, fleet of runs, one run. Tables of panels here become JSON files of the
chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 24
HEIGHT = 8
_OF_RUN = 'namespace="$namespace", run="$run"'
_OF_FLEET = 'namespace=~"$namespace"'
_BY_RUN = "{{namespace}}/{{run}}"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: its heading.
        text: description for the help of the panel and for docs/monitoring.md.
        queries: expressions, each with the legend of its series.
        unit: Grafana's name of the values' unit.
        kind: Grafana's name of the panel's type.
        width: width in columns of 24.
    """

    title: str
    text: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8


@dataclass(frozen=True)
class Dashboard:
    """One page of Grafana.

    Attributes:
        name: name of the file, also used for its id.
        title: its heading.
        variables: query of the values of each variable, by name.
        panels: panels in order, row by row.
        many: whether a variable may have several values, and all.
    """

    name: str
    title: str
    variables: Sequence[tuple[str, str]]
    panels: Sequence[Panel]
    many: bool = False


FLEET = Dashboard(
    "fleet",
    "RLRun: all runs",
    [("namespace", "label_values(rlrun_info, namespace)")],
    [
        Panel(
            "Runs by phase",
            "How many runs are in each phase.",
            [(f"sum by (phase) (rlrun_phase{{{_OF_FLEET}}}) > 0", "{{phase}}")],
            kind="bargauge",
        ),
        Panel(
            "GPUs allocated",
            "GPUs of pods that have a node, by namespace.",
            [(f"sum by (namespace) (rlrun_gpus_allocated{{{_OF_FLEET}}})", "{{namespace}}")],
        ),
        Panel(
            "GPU time by use, a day",
            "GPU-hours of the last day by namespace and use.",
            [
                (
                    f"sum by (namespace, use) (increase(rlrun_gpu_seconds_total{{{_OF_FLEET}}}[1d])) / 3600",
                    "{{namespace}} {{use}}",
                )
            ],
        ),
        Panel(
            "GPU use",
            "Mean use of the GPUs of each run's pods, by role.",
            [
                (
                    f"avg by (namespace, run, role) (rlrun_gpu_utilization_ratio{{{_OF_FLEET}}})",
                    f"{_BY_RUN} {{{{role}}}}",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            "Progress",
            "Share of its steps that each run has trained.",
            [(f"max by (namespace, run) (rlrun_step{{{_OF_FLEET}}} / rlrun_max_steps{{{_OF_FLEET}}})", _BY_RUN)],
            unit="percentunit",
            kind="bargauge",
        ),
        Panel(
            "Time since the last step",
            "Of runs that have trained one.",
            [(f"time() - max by (namespace, run) (rlrun_last_step_timestamp_seconds{{{_OF_FLEET}}})", _BY_RUN)],
            unit="s",
        ),
        Panel(
            "Reward",
            "Mean reward of each run's last step.",
            [(f"max by (namespace, run) (rlrun_reward_mean{{{_OF_FLEET}}})", _BY_RUN)],
        ),
        Panel(
            "Restarts in the last hour",
            "By run, counted and uncounted together.",
            [(f"sum by (namespace, run) (increase(rlrun_restarts_total{{{_OF_FLEET}}}[1h]))", _BY_RUN)],
            kind="bargauge",
        ),
        Panel(
            "Causes of failures",
            "Ends of attempts that the leading operator has seen, by cause.",
            [(f"sum by (reason) (rlrun_failures_total{{{_OF_FLEET}}})", "{{reason}}")],
            kind="bargauge",
        ),
        Panel(
            "Queue",
            "Place of each run that waits, and for how long it has.",
            [
                (f"max by (namespace, run) (rlrun_queue_position{{{_OF_FLEET}}})", _BY_RUN),
                (
                    f"(time() - max by (namespace, run) (rlrun_queue_since_timestamp_seconds{{{_OF_FLEET}}})) / 3600",
                    f"{_BY_RUN}: hours",
                ),
            ],
        ),
        Panel(
            "What is wrong",
            "Conditions with a problem: configuration, storage, progress, checkpoints, changed objects.",
            [
                (
                    "max by (namespace, run, type, reason) (rlrun_condition{"
                    + _OF_FLEET
                    + ', status="False", type=~"ConfigurationValid|StorageReady|Progressing|CheckpointHealthy|ChildrenIntact"})',
                    f"{_BY_RUN}: {{{{type}}}} {{{{reason}}}}",
                )
            ],
            kind="table",
            width=WIDTH,
        ),
    ],
    many=True,
)

RUN = Dashboard(
    "run",
    "RLRun: one run",
    [
        ("namespace", "label_values(rlrun_info, namespace)"),
        ("run", 'label_values(rlrun_info{namespace="$namespace"}, run)'),
    ],
    [
        Panel("Phase", "The phase that the run is in.", [(f"rlrun_phase{{{_OF_RUN}}} == 1", "{{phase}}")], kind="stat"),
        Panel(
            "Step",
            "Last trained step, steps of the run, and the newest complete checkpoint.",
            [
                (f"max(rlrun_step{{{_OF_RUN}}})", "step"),
                (f"max(rlrun_max_steps{{{_OF_RUN}}})", "of"),
                (f"max(rlrun_checkpoint_step{{{_OF_RUN}}})", "checkpoint"),
            ],
            kind="stat",
        ),
        Panel(
            "Time left",
            "Estimate by the speed of the last steps.",
            [(f"max(rlrun_eta_seconds{{{_OF_RUN}}})", "left")],
            unit="s",
            kind="stat",
        ),
        Panel(
            "Reward",
            "Mean reward of the last step, all together and by environment, and the latest held-out reward.",
            [
                (f"max(rlrun_reward_mean{{{_OF_RUN}}})", "all"),
                (f"max by (environment) (rlrun_environment_reward_mean{{{_OF_RUN}}})", "{{environment}}"),
                (f"max by (environment) (rlrun_eval_reward_mean{{{_OF_RUN}}})", "{{environment}} held out"),
            ],
            width=12,
        ),
        Panel(
            "Share of hopeless or cut-off rollouts",
            "Groups in which no rollout is solved, and rollouts that a limit of tokens has cut off.",
            [
                (f"max(rlrun_unsolved_groups_ratio{{{_OF_RUN}}})", "groups without a solution"),
                (f"max(rlrun_truncated_ratio{{{_OF_RUN}}})", "cut off"),
            ],
            unit="percentunit",
            width=12,
        ),
        Panel(
            "Loss and gradient",
            "Loss and norm of the gradient of the last step.",
            [(f"max(rlrun_loss{{{_OF_RUN}}})", "loss"), (f"max(rlrun_gradient_norm{{{_OF_RUN}}})", "gradient norm")],
        ),
        Panel(
            "Entropy and learning rate",
            "Entropy of the policy over its loss tokens; the learning rate, times a million.",
            [
                (f"max(rlrun_entropy{{{_OF_RUN}}})", "entropy"),
                (f"max(rlrun_learning_rate{{{_OF_RUN}}}) * 1e6", "learning rate, millionths"),
            ],
        ),
        Panel(
            "Trainer against engines",
            "mismatch_kl: how far the two disagree about the same tokens. Far above 1e-3 is a fault.",
            [(f"max(rlrun_mismatch_kl{{{_OF_RUN}}})", "mismatch_kl")],
        ),
        Panel(
            "Staleness",
            "Versions between sampling and training, and the newest version that engines hold.",
            [
                (f"max(rlrun_staleness_mean{{{_OF_RUN}}})", "staleness"),
                (f"max(rlrun_policy_version{{{_OF_RUN}}})", "version"),
            ],
        ),
        Panel(
            "What the next step waits for",
            "Share of the time, by the role whose work is missing.",
            [(f"max by (on) (avg_over_time(rlrun_waiting{{{_OF_RUN}}}[$__rate_interval]))", "{{on}}")],
            unit="percentunit",
        ),
        Panel(
            "Trainer",
            "Share of its time that it waits for batches, and its FLOPs utilization.",
            [
                (
                    f"sum(rate(rlrun_trainer_wait_seconds_total{{{_OF_RUN}}}[30m]))"
                    f" / sum(rate(rlrun_trainer_step_seconds_total{{{_OF_RUN}}}[30m]))",
                    "waits",
                ),
                (f"max(rlrun_mfu_ratio{{{_OF_RUN}}})", "MFU"),
            ],
            unit="percentunit",
        ),
        Panel(
            "Steps and tokens",
            "Steps an hour, and thousands of tokens trained per second.",
            [
                (f"sum(rate(rlrun_trainer_steps_total{{{_OF_RUN}}}[30m])) * 3600", "steps an hour"),
                (f"max(rlrun_tokens_per_second{{{_OF_RUN}}}) / 1000", "thousand tokens/s"),
            ],
        ),
        Panel(
            "Engines",
            "Engines by state, and their requests.",
            [
                (f"sum by (state) (rlrun_engines{{{_OF_RUN}}})", "engines {{state}}"),
                (f"sum by (state) (rlrun_engine_requests{{{_OF_RUN}}})", "requests {{state}}"),
                (f"max(rlrun_rollouts_in_flight{{{_OF_RUN}}})", "rollouts in flight"),
            ],
        ),
        Panel(
            "Engines on interruptible nodes",
            "Wanted and ready spot engines (inference.spot); engines lost with their nodes since the start of the run. Empty "
            "without them.",
            [
                (f"max(rlrun_spot_engines_wanted{{{_OF_RUN}}})", "wanted"),
                (f"max(rlrun_spot_engines_ready{{{_OF_RUN}}})", "ready"),
                (f"max(rlrun_spot_engines_lost_total{{{_OF_RUN}}})", "lost"),
            ],
        ),
        Panel(
            "Size of the trainer",
            "Requested pods, and pods of the attempt: fewer with trainer.elastic while nodes are missing.",
            [
                (f"max(rlrun_trainer_size_wanted{{{_OF_RUN}}})", "wanted"),
                (f"max(rlrun_trainer_size{{{_OF_RUN}}})", "there"),
            ],
        ),
        Panel(
            "KV cache",
            "Share in use, of the fullest engine.",
            [(f"max(rlrun_engine_kv_cache_ratio{{{_OF_RUN}}})", "in use")],
            unit="percentunit",
        ),
        Panel(
            "Rollouts",
            "Errors in five minutes; finished rollouts that restarts reused or lost, since the start of the run; tokens per rollout.",
            [
                (f"sum(increase(rlrun_rollout_errors_total{{{_OF_RUN}}}[5m]))", "errors"),
                (f"max(rlrun_rollouts_readmitted_total{{{_OF_RUN}}})", "given back"),
                (f"max(rlrun_rollouts_discarded_total{{{_OF_RUN}}})", "lost"),
                (f"max(rlrun_completion_tokens_mean{{{_OF_RUN}}})", "tokens"),
            ],
        ),
        Panel(
            "GPU time by use",
            "GPUs by use: training, waiting, startup, repeated steps, stopping.",
            [(f"sum by (role, use) (rate(rlrun_gpu_seconds_total{{{_OF_RUN}}}[15m]))", "{{role}} {{use}}")],
        ),
        Panel(
            "GPU use",
            "By role, mean over its GPUs.",
            [(f"avg by (role) (rlrun_gpu_utilization_ratio{{{_OF_RUN}}})", "{{role}}")],
            unit="percentunit",
        ),
        Panel(
            "GPU memory",
            "Share in use, by role, of the fullest GPU.",
            [
                (
                    f"max by (role) (rlrun_gpu_memory_used_bytes{{{_OF_RUN}}} / rlrun_gpu_memory_size_bytes{{{_OF_RUN}}})",
                    "{{role}}",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            "GPU idle time",
            "Share of the last half hour, by role, mean over its GPUs.",
            [(f"avg by (role) (rate(rlrun_gpu_idle_seconds_total{{{_OF_RUN}}}[30m]))", "{{role}}")],
            unit="percentunit",
        ),
        Panel(
            "Volume",
            "Space that is left.",
            [
                (f"min(rlrun_volume_free_bytes{{{_OF_RUN}}})", "free"),
                (f"max(rlrun_volume_size_bytes{{{_OF_RUN}}})", "size"),
            ],
            unit="bytes",
        ),
        Panel(
            "Trouble with the volume",
            "1 while the run cannot write: full, read-only or silent.",
            [(f"max by (reason) (rlrun_volume_trouble{{{_OF_RUN}}})", "{{reason}}")],
        ),
        Panel(
            "Attempts",
            "Number of the attempt, restarts, steps trained again, age of the newest pod in hours.",
            [
                (f"max(rlrun_attempt{{{_OF_RUN}}})", "attempt"),
                (f"sum by (counted) (rlrun_restarts_total{{{_OF_RUN}}})", "restarts, counted: {{counted}}"),
                (f"max(rlrun_steps_lost_total{{{_OF_RUN}}})", "steps lost"),
                (f"(time() - max(rlrun_pod_start_timestamp_seconds{{{_OF_RUN}}})) / 3600", "newest pod, hours"),
            ],
        ),
        Panel(
            "Conditions",
            "Of the run's status.",
            [(f"max by (type, status, reason) (rlrun_condition{{{_OF_RUN}}})", "{{type}} {{status}} {{reason}}")],
            kind="table",
            width=WIDTH,
        ),
    ],
)

OPERATOR = Dashboard(
    "operator",
    "RLRun: operator",
    [("job", "label_values(rlrun_operator_leader, job)")],
    [
        Panel(
            "Who leads",
            "1 for the process that acts.",
            [('max by (pod, instance) (rlrun_operator_leader{job="$job"})', "{{pod}} {{instance}}")],
            kind="stat",
        ),
        Panel(
            "Runs that wait for a worker",
            "And how long the oldest of them has, in seconds.",
            [
                ('sum(rlrun_operator_queue_depth{job="$job"})', "runs"),
                ('max(rlrun_operator_queue_age_seconds{job="$job"})', "oldest, seconds"),
            ],
        ),
        Panel(
            "Time of a pass over a run",
            "95 of 100 passes are faster, by outcome.",
            [
                (
                    "histogram_quantile(0.95, sum by (le, outcome) "
                    '(rate(rlrun_operator_reconcile_seconds_bucket{job="$job"}[5m])))',
                    "{{outcome}}",
                ),
            ],
            unit="s",
        ),
        Panel(
            "Requests to the API server",
            "Per second, by verb.",
            [('sum by (verb) (rate(rlrun_operator_api_requests_total{job="$job"}[5m]))', "{{verb}}")],
            unit="reqps",
        ),
        Panel(
            "Refused or lost requests",
            "Per second, by answer.",
            [('sum by (code) (rate(rlrun_operator_api_requests_total{job="$job", code!~"2.."}[5m]))', "{{code}}")],
            unit="reqps",
        ),
        Panel(
            "Age of watches",
            "Time since each has brought anything; about 60 s when nothing happens.",
            [('max by (resource) (rlrun_operator_watch_age_seconds{job="$job"})', "{{resource}}")],
            unit="s",
        ),
        Panel(
            "Objects in memory",
            "By kind.",
            [('sum by (kind) (rlrun_operator_objects{job="$job"})', "{{kind}}")],
        ),
        Panel(
            "Memory and processor",
            "Resident memory in bytes; processors in use, in thousandths.",
            [
                ('max(process_resident_memory_bytes{job="$job"})', "bytes"),
                ('sum(rate(process_cpu_seconds_total{job="$job"}[5m])) * 1000', "thousandths of a processor"),
            ],
        ),
        Panel(
            "Time in phases",
            "Half of the runs left the phase sooner.",
            [
                (
                    "histogram_quantile(0.5, sum by (le, phase) "
                    '(rate(rlrun_phase_duration_seconds_bucket{job="$job"}[1h])))',
                    "{{phase}}",
                ),
            ],
            unit="s",
        ),
        Panel(
            "Served namespaces",
            "1 if this operator serves the namespace, 0 if another one does.",
            [('max by (namespace, managed_by) (rlrun_operator_serves{job="$job"})', "{{namespace}} {{managed_by}}")],
            kind="table",
            width=12,
        ),
        Panel(
            "Suspended by the queue",
            "Runs that had to give their room back, by cause.",
            [('sum by (reason) (rlrun_queue_stops_total{job="$job"})', "{{reason}}")],
            kind="bargauge",
            width=12,
        ),
    ],
)

DASHBOARDS = (FLEET, RUN, OPERATOR)


def dashboard_json(dashboard: Dashboard) -> str:
    """Return the file that Grafana reads."""
    document = {
        "uid": f"rlrun-{dashboard.name}",
        "title": dashboard.title,
        "description": "Generated by `python -m tools.operator_docs --write` from tools/dashboards.py.",
        "tags": ["rlrun"],
        "editable": True,
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_datasource(), *(_variable(*v, many=dashboard.many) for v in dashboard.variables)]},
        "panels": _panels(dashboard.panels),
    }
    return json.dumps(document, indent=1) + "\n"


def _datasource() -> dict[str, object]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str, query: str, *, many: bool) -> dict[str, object]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": many,
        "includeAll": many,
        **({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if many else {}),
    }


def _panels(panels: Sequence[Panel]) -> list[dict[str, object]]:
    """Return panels with their places, from left to right."""
    placed, x, y = [], 0, 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > WIDTH:
            x, y = 0, y + HEIGHT
        placed.append(_panel(number, panel, x, y))
        x += panel.width
    return placed


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    now = {"instant": True} if panel.kind != "timeseries" else {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": source, "expr": expression, "legendFormat": legend, **now}
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }
