"""From figures to Markdown: what was measured, beside the goals."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.many_runs.by_hand import ByHand
from benchmarks.many_runs.fleet import ENGINES, PODS, Told, spread
from benchmarks.many_runs.usage import DAEMONS, OPERATOR, SERVER, Write
from rlrun.protocol.messages.lease_annotations import RENEW_SECONDS

REFERENCE_APPLY_SECONDS = 0.27e-3
"""CPU of one plain apply where the goal for a run's CPU was set."""
GOAL_CPU_SECONDS = 19e-3
GOAL_RATIO = 1.6
GOAL_STATUS_WRITE = 4e-3
GOAL_STEADY = 0.10
GOAL_STEADY_RUNS = 1000
GOAL_COLD_SECONDS = 5.0
SHOWN_WRITES = 0.1
"""Per run; rarer ones are one line together."""

Row = tuple[str, str, str]
"""Figure, value, goal."""


@dataclass(frozen=True)
class Start:
    """All runs, from the first request until the last one is Running."""

    count: int
    created: float
    """Seconds until the last run's creation was answered."""
    ready: Mapping[str, float]
    """Run -> seconds until all its pods were ready."""
    told: Told
    cpu: Mapping[str, float]
    """Seconds of each process, the operator's included."""
    memory: Mapping[str, float]
    """MB of each process at the end."""
    idle_memory: float
    """MB of the operator before."""
    writes: Counter[Write]
    reads: float
    """Requests of the operator that change nothing."""


@dataclass(frozen=True)
class Steady:
    """A while in which all runs train."""

    seconds: float
    cpu: Mapping[str, float]
    """Seconds of each process, the operator's included."""
    without: float
    """The API server's share of a core while the operator is away: what the orchestrators' Leases and the rest of the cluster cost."""
    renewals: float
    """Per run and minute."""
    status_writes: float
    """Per run and minute."""
    memory: float
    """MB of the operator."""


@dataclass(frozen=True)
class Again:
    """The operator, killed and started again among its runs."""

    ready: float
    """Seconds."""
    cpu: float
    memory: float


def goal(value: float, limit: float, text: str) -> str:
    """A goal, and whether it is met."""
    return f"≤ {text}: {'met' if value <= limit else 'missed'}"


def of_start(start: Start, bare: ByHand, whole: ByHand, one_apply: float, one_status: float) -> list[Row]:
    """Rows about the start."""
    ready, server, operator = max(start.ready.values()), start.cpu[SERVER], start.cpu[OPERATOR]
    in_time, in_cpu = ready / bare.ready, server / bare.cpu[SERVER]
    in_applies = operator / start.count / one_apply
    limit = GOAL_CPU_SECONDS / REFERENCE_APPLY_SECONDS
    return [
        ("all runs created", f"{start.created:.0f} s", ""),
        ("all pods ready: median / 95 % / last run", _times(start.ready.values()), ""),
        ("runs told that their pods are made: the same", _times(start.told.pods.values()), ""),
        ("runs told that trainer and engines are ready: the same", _times(start.told.ready.values()), ""),
        ("runs Running: the same", _times(start.told.running.values()), ""),
        (f"{bare.count * PODS} small pods made by hand: all ready", f"{bare.ready:.0f} s", ""),
        ("all pods of the runs ready, in that unit", f"{in_time:.1f}", goal(in_time, GOAL_RATIO, f"{GOAL_RATIO}")),
        ("API server's CPU per run", _ms(server / start.count), ""),
        ("the same for the pods of a run, small and made by hand", _ms(bare.cpu[SERVER] / bare.count), ""),
        ("API server's CPU, in that unit", f"{in_cpu:.1f}", goal(in_cpu, GOAL_RATIO, f"{GOAL_RATIO}")),
        (
            f"API server's CPU for the very children of a run made by hand ({whole.count} runs), in that unit",
            f"{whole.cpu[SERVER] / whole.count / (bare.cpu[SERVER] / bare.count):.1f}",
            "",
        ),
        (
            "writes of all users per run: with the operator / its children by hand / small pods by hand",
            f"{sum(start.writes.values()) / start.count:.0f} / {whole.writes:.0f} / {bare.writes:.0f}",
            "",
        ),
        ("API reads of the operator per run", f"{start.reads / start.count:.1f}", ""),
        (
            "API server's CPU for one write of a status",
            f"{one_status * 1000:.1f} ms",
            goal(one_status, GOAL_STATUS_WRITE, "4 ms"),
        ),
        ("operator's CPU per run", _ms(operator / start.count), ""),
        ("CPU of one plain apply by bare aiohttp, on these cores", f"{one_apply * 1000:.2f} ms", ""),
        (
            "operator's CPU per run, in plain applies",
            f"{in_applies:.0f}",
            goal(in_applies, limit, f"{limit:.0f} (19 ms where an apply takes 0.27 ms)"),
        ),
        ("CPU of the other processes per run", _others(start), ""),
        ("memory of all processes", ", ".join(f"{name} {mb:.0f} MB" for name, mb in start.memory.items()), ""),
        (
            "operator's memory per run",
            f"{(start.memory[OPERATOR] - start.idle_memory) / start.count * 1000:.0f} kB over {start.idle_memory:.0f} MB",
            "",
        ),
    ]


def of_steady(steady: Steady, count: int) -> list[Row]:
    """Rows about the time in which all `count` runs train. The goal is of a thousand runs: fewer have their share of it."""
    operator, server = (steady.cpu[name] / steady.seconds for name in (OPERATOR, SERVER))
    most = GOAL_STEADY * min(1.0, count / GOAL_STEADY_RUNS)
    limit = f"{most:.0%}" + ("" if count >= GOAL_STEADY_RUNS else f" ({GOAL_STEADY:.0%} for {GOAL_STEADY_RUNS:,} runs)")
    return [
        (
            f"operator's CPU while all train (Leases renewed every {RENEW_SECONDS:.0f} s)",
            f"{operator:.1%} of a core",
            goal(operator, most, limit),
        ),
        ("API server's CPU in that time", f"{server:.1%} of a core", goal(server, most, limit)),
        ("of it without the operator: Leases, nodes, this program", f"{steady.without:.1%} of a core", ""),
        ("Leases renewed per run and minute", f"{steady.renewals:.1f}", ""),
        ("statuses written per run and minute", f"{steady.status_writes:.2f}", ""),
        ("operator's memory in that time", f"{steady.memory:.0f} MB", ""),
    ]


def of_again(again: Again) -> list[Row]:
    """Rows about the operator's start among its runs."""
    return [
        (
            "operator killed and started again: ready",
            f"{again.ready:.1f} s, {again.cpu:.1f} s of CPU, {again.memory:.0f} MB, no write but to statuses",
            goal(again.ready, GOAL_COLD_SECONDS, f"{GOAL_COLD_SECONDS:.0f} s"),
        )
    ]


def markdown(count: int, rows: Iterable[Row], writes: Counter[Write], load: str) -> str:
    """The page of one run of the benchmark."""
    lines = [
        f"# {count:,} runs of {PODS} pods on one control plane",
        "",
        f"`python -m benchmarks.many_runs --runs {count}`; {os.cpu_count()} cores ({platform.machine()}), shared by the API server,",
        f"etcd, the controllers, kwok, this program, the operator and {load}. One trainer pod, {ENGINES} engines and one",
        "orchestrator per run.",
        "",
        "| figure | value | goal |",
        "|---|---|---|",
        *(f"| {name} | {value} | {aim} |" for name, value, aim in rows),
        "",
        "| write | by | per run |",
        "|---|---|---|",
        *of_writes(writes, count),
        "",
    ]
    return "\n".join(lines)


def of_writes(writes: Counter[Write], count: int) -> list[str]:
    """Lines of the table of writes; the rare ones in one."""
    common = [(write, n / count) for write, n in writes.most_common() if n >= SHOWN_WRITES * count]
    rest = sum(writes.values()) / count - sum(n for _, n in common)
    return [
        *(f"| {write.verb} {write.resource} | {write.who} | {n:.2f} |" for write, n in common),
        f"| all others | | {rest:.2f} |",
    ]


def _others(start: Start) -> str:
    return ", ".join(f"{name} {_ms(start.cpu[name] / start.count)}" for name in DAEMONS if name != SERVER)


def _times(times: Iterable[float]) -> str:
    return " / ".join(f"{seconds:.0f}" for seconds in spread(times)) + " s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
