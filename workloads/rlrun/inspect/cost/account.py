"""Accounts of runs: seconds of GPUs by attempt, role and use."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rlrun.inspect.folder import json_lines, read_folder
from rlrun.inspect.snapshot import CostRow, Snapshot
from rlrun.protocol.files.launcher import read_record
from rlrun.protocol.files.paths import RunPaths

USES = ("trained", "waitedForRollouts", "waitedForTrainer", "startup", "repeated", "stopping", "other")
MACHINE = "machine"
"""Role of the hours of a run without GPUs on one machine."""


@dataclass(frozen=True)
class Account:
    """Cost of one run."""

    name: str
    where: str
    """Namespace, or the run's folder."""
    place: str
    rows: tuple[CostRow, ...] = ()
    budget: float | None = None
    """GPU-hours."""
    gpus: bool = True
    """False: the rows are seconds of the machine."""
    tokens: int | None = None
    """Tokens that were trained; None: not known."""
    samples: int | None = None
    """Samples that were trained; None: not known."""

    @property
    def seconds(self) -> int:
        """All of it."""
        return sum(sum(seconds for _, seconds in row.seconds) for row in self.rows)

    @property
    def hours(self) -> float:
        """All of it."""
        return self.seconds / 3600

    def uses(self) -> dict[str, int]:
        """Seconds by use, in the order of `USES`."""
        return sums(self.rows)


def sums(rows: Iterable[CostRow]) -> dict[str, int]:
    """Seconds of rows by use, in the order of `USES`, and what this release does not know behind them."""
    found: Counter[str] = Counter()
    for row in rows:
        found.update(dict(row.seconds))
    known = {use: found[use] for use in USES if found[use]}
    return known | {use: seconds for use, seconds in sorted(found.items()) if use not in USES and seconds}


def of_snapshot(seen: Snapshot) -> Account:
    """Account of a run in a cluster, as its status counts it."""
    return Account(seen.name, seen.where, seen.place, seen.cost, seen.budget)


def of_folder(root: Path, now: float) -> Account:
    """Account of a run on this machine: the time of its attempts, divided by what each step's line of metrics says.

    Steps that a restart has lost have left no line: their time is in `other`.
    """
    paths, seen = RunPaths(root), read_folder(root, now)
    lines = json_lines(paths.metrics.read_text(errors="replace")) if paths.metrics.is_file() else []
    numbers = {int(_number(line, "attempt")) for line in lines}
    spent = {number: _spent([line for line in lines if line.get("attempt") == number]) for number in numbers}
    rows, roles = _attempts(paths, now, spent)
    base = Account(seen.name, seen.where, seen.place, tuple(rows), gpus=bool(roles))
    if not lines:
        return base
    return replace(base, tokens=int(_total(lines, "batch/tokens")), samples=int(_total(lines, "batch/samples")))


class Spent(NamedTuple):
    """Time of the steps of one attempt, in seconds; times since the epoch, 0: not known."""

    steps: float
    waited: float
    began: float
    """Beginning of the first step."""
    ended: float
    """End of the last step."""


def of_steps(paths: RunPaths, now: float, spent: Mapping[int, Spent]) -> tuple[dict[str, int], bool]:
    """Seconds of a folder's run by use, and whether they are of GPUs.

    Args:
        paths: the run's folder.
        now: seconds since the epoch.
        spent: by attempt; of those that trained.
    """
    rows, roles = _attempts(paths, now, spent)
    return sums(rows), bool(roles)


def _attempts(paths: RunPaths, now: float, spent: Mapping[int, Spent]) -> tuple[list[CostRow], dict[str, int]]:
    """Rows of all attempts, and the GPUs of each role."""
    record = read_record(paths.launcher)
    roles = {role: count for role, count in (record.gpus if record is not None else {}).items() if count}
    rows: list[CostRow] = []
    for number in paths.attempts_on_disk():
        own = spent.get(number, Spent(0.0, 0.0, 0.0, 0.0))
        if record is not None and record.attempt == number:
            own = own._replace(ended=max(own.ended, now if record.alive(now) else record.time))
        rows += _rows(number, own, _began(paths, number), roles)
    return rows, roles


def _spent(lines: Sequence[Mapping[str, object]]) -> Spent:
    """Time of an attempt's steps, by its lines of metrics."""
    began = min((_number(line, "time") - _number(line, "time/step") for line in lines), default=0.0)
    ended = max((_number(line, "time") for line in lines), default=0.0)
    return Spent(_total(lines, "time/step"), _total(lines, "time/wait_for_batch"), began, ended)


def _began(paths: RunPaths, attempt: int) -> float:
    """Start of an attempt, in seconds since the epoch; 0: not known."""
    try:
        document = json.loads(paths.attempt_file(attempt).read_text())
    except (OSError, ValueError):
        return 0.0
    return _number(document, "started_at") if isinstance(document, dict) else 0.0


def _rows(attempt: int, spent: Spent, began: float, roles: Mapping[str, int]) -> list[CostRow]:
    """Rows of one attempt; without GPUs one of the machine."""
    whole = max(0, int(spent.ended - began)) if began else 0
    steps = min(whole, int(spent.steps))
    waited = min(steps, int(spent.waited))
    startup = min(whole - steps, max(0, int((spent.began or spent.ended) - began)))
    found = []
    for role, gpus in (roles or {MACHINE: 1}).items():
        waits = waited if role == "trainer" else 0
        uses = {"trained": steps - waits, "waitedForRollouts": waits, "startup": startup}
        uses["other"] = whole - sum(uses.values())
        found.append(CostRow(attempt, role, tuple((use, gpus * n) for use, n in uses.items() if n)))
    return [row for row in found if row.seconds]


def by_namespace(accounts: Sequence[Account]) -> list[Account]:
    """The sums of namespaces that have more than one run in a cluster."""
    of_cluster = sorted((one for one in accounts if one.place == "cluster"), key=lambda one: one.where)
    found = []
    for where, group in groupby(of_cluster, key=lambda one: one.where):
        runs = list(group)
        if len(runs) > 1:
            rows = tuple(row for run in runs for row in run.rows)
            found.append(Account(f"all {len(runs)} runs", where, "cluster", rows))
    return found


def _total(lines: Sequence[Mapping[str, object]], name: str) -> float:
    return sum(_number(line, name) for line in lines)


def _number(line: Mapping[str, object], name: str) -> float:
    value = line.get(name)
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53
    return float(value) if good and isinstance(value, int | float) else 0.0
