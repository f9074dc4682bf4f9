"""Cost of runs: GPU-seconds by attempt, role and use, with their tables and JSON documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import NamedTuple

from rlrun.inspect.folder_reader import read_folder
from rlrun.inspect.screen import align_columns
from rlrun.inspect.small_files import each_line, read_json
from rlrun.inspect.snapshot import MACHINE, CostRow, Snapshot
from rlrun.protocol.files.launcher_record import LauncherRecord, read_record
from rlrun.protocol.files.metrics_line import FURTHEST
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import read_fork
from rlrun.protocol.messages.lease_annotations import MEASURED, PREFIX
from rlrun.runtime.json_types import Json

USES = ("trained", "waitedForRollouts", "waitedForTrainer", "startup", "repeated", "stopping", "other")
READ_MAX = 32 * 2**20
"""Maximum bytes of metrics that are read for a run's status; `rlrun cost` reads all."""


@dataclass(frozen=True)
class Account:
    """Cost of one run."""

    name: str
    where: str
    """Namespace, or folder of the run."""
    place: str
    rows: tuple[CostRow, ...] = ()
    budget: float | None = None
    """Budget in GPU-hours."""
    gpus: bool = True
    """Whether the rows are GPU-seconds; False: seconds of the machine."""
    tokens: int | None = None
    """Number of trained tokens, or None if unknown."""
    samples: int | None = None
    """Number of trained samples, or None if unknown."""

    @property
    def seconds(self) -> int:
        """Total seconds."""
        return sum(sum(seconds for _, seconds in row.seconds) for row in self.rows)

    @property
    def hours(self) -> float:
        """Total hours."""
        return self.seconds / 3600

    def seconds_by_use(self) -> dict[str, int]:
        """Return the seconds by use, in the order of `USES`."""
        return sum_uses(self.rows)


def sum_uses(rows: Iterable[CostRow]) -> dict[str, int]:
    """Return the seconds of rows by use, in the order of `USES`, followed by unknown uses of newer releases."""
    found: Counter[str] = Counter()
    for row in rows:
        found.update(dict(row.seconds))
    known = {use: found[use] for use in USES if found[use]}
    return known | {use: seconds for use, seconds in sorted(found.items()) if use not in USES and seconds}


def of_snapshot(seen: Snapshot) -> Account:
    """Return the account of a run in a cluster from its status."""
    trained = dict(seen.trained)
    return Account(
        seen.name, seen.where, seen.place, seen.cost, seen.budget,
        tokens=trained.get("tokens"), samples=trained.get("samples"),
    )  # fmt: skip


def with_local_cost(seen: Snapshot, now: float) -> Snapshot:
    """Return `seen` with the cost of a local run, unless its metrics are too long to read quickly."""
    root = Path(seen.where)
    with suppress(OSError):
        if seen.place == "folder" and RunPaths(root).metrics.stat().st_size <= READ_MAX:
            found = of_folder(root, now)
            trained = {"tokens": found.tokens, "samples": found.samples}
            return replace(seen, cost=found.rows, trained=tuple((what, n) for what, n in trained.items() if n))
    return seen


def of_folder(root: Path, now: float) -> Account:
    """Return the account of a local run: the durations of its attempts, divided by the step metrics."""
    paths, seen = RunPaths(root), read_folder(root, now)
    first = _first_own(paths)
    sums_of: dict[int, _StepSums] = {}
    tokens = samples = 0.0
    for line in each_line(paths.metrics):
        number = int(_read_number(line, "attempt"))
        if number >= first:
            sums_of.setdefault(number, _StepSums()).add(line)
            tokens, samples = tokens + _read_number(line, "batch/tokens"), samples + _read_number(line, "batch/samples")
    rows, roles = _attempt_rows(paths, now, {number: found.spent() for number, found in sums_of.items()})
    base = Account(seen.name, seen.where, seen.place, tuple(rows), gpus=bool(roles))
    return replace(base, tokens=int(tokens) or None, samples=int(samples) or None)


class Spent(NamedTuple):
    """Time of the steps of one attempt after its first step, in seconds. Times are since the epoch; 0: unknown."""

    steps: float = 0.0
    """Duration of all steps."""
    waited: float = 0.0
    """Wait for batches, in steps that were not trained before."""
    repeated: float = 0.0
    """Duration of steps that were trained before and lost by a restart."""
    again: bool = False
    """Whether any step, including the first, was trained before."""
    began: float = 0.0
    """Start of the attempt, as its trainer measures it."""
    trained: float = 0.0
    """End of the first step, which ends the startup."""
    ended: float = 0.0
    """End of the last step."""


def of_steps(paths: RunPaths, now: float, spent: Mapping[int, Spent]) -> tuple[dict[str, int], bool]:
    """Return the seconds of a local run by use, and whether they are GPU-seconds.

    Args:
        paths: folder of the run.
        now: seconds since the epoch.
        spent: time of the steps by attempt, for attempts that trained.
    """
    rows, roles = _attempt_rows(paths, now, spent)
    return sum_uses(rows), bool(roles)


def _first_own(paths: RunPaths) -> int:
    """Return the number of this run's first attempt; earlier attempts in a fork belong to the original run."""
    forked = read_fork(paths.fork)
    return 0 if forked is None else forked.attempt + 1


def _attempt_rows(paths: RunPaths, now: float, spent: Mapping[int, Spent]) -> tuple[list[CostRow], dict[str, int]]:
    """Return the rows of all attempts, and the GPUs of each role."""
    record, first = read_record(paths.launcher), _first_own(paths)
    roles = {role: count for role, count in (record.gpus if record is not None else {}).items() if count}
    rows: list[CostRow] = []
    numbers = [number for number in paths.attempts_on_disk() if number >= first]
    for number, following in zip_longest(numbers, numbers[1:]):
        span = _attempt_span(paths, number, spent.get(number, Spent()), record, now)
        lost = following is not None and spent.get(following, Spent()).again
        rows += _rows_of_attempt(number, span, roles, lost=lost)
    return rows, roles


class Span(NamedTuple):
    """Duration of one attempt, in seconds since the epoch."""

    spent: Spent
    began: float
    """Start of the attempt; 0: unknown."""
    ended: float
    goes_on: bool


def _attempt_span(paths: RunPaths, number: int, spent: Spent, record: LauncherRecord | None, now: float) -> Span:
    """Return start and end of an attempt, from the launcher's record if it is the last attempt, otherwise from files."""
    began = [time for time in (_attempt_start(paths, number), spent.began) if time]
    ended, goes_on = max(spent.ended, _last_word(paths, number)), False
    if record is not None and record.attempt == number:
        goes_on = record.alive(now)
        began, ended = [*began, record.began], max(spent.ended, now if goes_on else record.time)
    return Span(spent, min(filter(None, began), default=0.0), ended, goes_on)


def _last_word(paths: RunPaths, attempt: int) -> float:
    """Return the time of the last log line of an attempt's roles, in seconds since the epoch; 0 without logs."""
    times = []
    for file in (paths.root / "logs" / f"attempt_{attempt:04d}").glob("*/*.log"):
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times, default=0.0)


class _StepSums:
    """Running sums over the steps of one attempt, because a long run has 1 GB of metrics."""

    def __init__(self) -> None:
        self._first: Mapping[str, object] | None = None
        self._steps = self._new_steps = self._waited = self._ended = 0.0
        self._again = False

    def add(self, line: Mapping[str, object]) -> None:
        """Add one line of metrics."""
        seconds = _read_number(line, "time/step")
        if not seconds:
            return
        self._again |= FURTHEST in line
        self._ended = max(self._ended, _read_number(line, "time"))
        if self._first is None:
            self._first = line
            return
        self._steps += seconds
        if FURTHEST not in line:
            self._new_steps += seconds
            self._waited += _read_number(line, "time/wait_for_batch")

    def spent(self) -> Spent:
        """Return the sums of the lines so far."""
        first = self._first
        if first is None:
            return Spent()
        start = sum(_read_number(first, PREFIX + phase) for phase in MEASURED)
        return Spent(
            steps=self._steps,
            waited=self._waited,
            repeated=self._steps - self._new_steps,
            again=self._again,
            began=max(0.0, _read_number(first, "time") - _read_number(first, "time/step") - start),
            trained=_read_number(first, "time"),
            ended=self._ended,
        )


def _attempt_start(paths: RunPaths, attempt: int) -> float:
    """Return the start of an attempt in seconds since the epoch; 0: unknown."""
    return _read_number(read_json(paths.attempt_file(attempt)), "started_at")


def _rows_of_attempt(attempt: int, span: Span, roles: Mapping[str, int], *, lost: bool) -> list[CostRow]:
    """Return the rows of one attempt; without GPUs one row of the machine. `lost`: the next attempt repeated its last steps."""
    found = []
    for role, gpus in (roles or {MACHINE: 1}).items():
        uses = _seconds_by_use(span, waits=role == "trainer" and "inference" in roles, lost=lost)
        found.append(CostRow(attempt, role, tuple((use, gpus * n) for use, n in uses.items() if n)))
    return [row for row in found if row.seconds]


def _seconds_by_use(span: Span, *, waits: bool, lost: bool) -> dict[str, int]:
    """Divide the whole seconds of an attempt by use; their sum is the attempt's length.

    The startup ends with the first step, as in a cluster. The time after the last recorded step is a step that a restart lost, the
    current step, or the shutdown.
    """
    spent = span.spent
    whole = max(0, int(span.ended - span.began)) if span.began else 0
    if not spent.trained:
        return {"startup": whole}
    startup = min(whole, max(0, int(spent.trained - span.began)))
    middle = min(whole - startup, max(0, int(spent.ended - spent.trained)))
    steps = min(middle, int(spent.steps))
    repeated = min(steps, int(spent.repeated))
    waited = min(steps - repeated, int(spent.waited)) if waits else 0
    rest = whole - startup - middle
    tail = rest if span.goes_on or lost else 0
    return {
        "trained": steps - repeated - waited + tail,
        "waitedForRollouts": waited,
        "startup": startup,
        "repeated": repeated,
        "stopping": rest - tail,
        "other": middle - steps,
    }


def by_namespace(accounts: Sequence[Account]) -> list[Account]:
    """Return the sums of namespaces with more than one run in a cluster."""
    of_cluster = sorted((one for one in accounts if one.place == "cluster"), key=lambda one: one.where)
    found = []
    for where, group in groupby(of_cluster, key=lambda one: one.where):
        runs = list(group)
        if len(runs) > 1:
            rows = tuple(row for run in runs for row in run.rows)
            found.append(Account(f"all {len(runs)} runs", where, "cluster", rows))
    return found


def _read_number(line: Mapping[str, object], name: str) -> float:
    value = line.get(name)
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53
    return float(value) if good and isinstance(value, int | float) else 0.0


_HEADS = ("TRAINED", "FOR ROLLOUTS", "FOR TRAINER", "STARTUP", "REPEATED", "STOPPING", "OTHER")
"""Column titles of `USES`."""
NO_GPUS = "* no GPUs: hours of the machine"


def cost_table(accounts: Sequence[Account], *, wide: bool) -> str:
    """Return a table with a line per run, and per namespace with several runs. `wide` adds a line per attempt and role."""
    head = ("RUN", "HOURS", "BUDGET", *_HEADS, *(("TOKENS/HOUR", "SAMPLES/HOUR") if wide else ()))
    rows = [head]
    several = len({one.where for one in accounts if one.place == "cluster"}) > 1
    for one in (*accounts, *by_namespace(accounts)):
        name = one.where if one.place == "folder" else f"{one.where}/{one.name}" if several else one.name
        rates = (_rate_text(one.tokens, one), _rate_text(one.samples, one)) if wide else ()
        rows.append(
            (
                name + ("" if one.gpus else " *"),
                f"{one.hours:.2f}",
                _budget_text(one),
                *_use_shares(one.seconds_by_use()),
                *rates,
            )
        )
        if wide:
            rows += [
                (f"  {_name_row(row)}", f"{_show_seconds(row) / 3600:.2f}", "", *_use_shares(sum_uses((row,))), "", "")
                for row in one.rows
            ]
    told = "" if all(one.gpus for one in accounts) else f"\n{NO_GPUS}"
    return align_columns(rows) + told


def cost_document(one: Account) -> Json:
    """Return the JSON document of an account."""
    unit = "gpuSeconds" if one.gpus else "machineSeconds"
    found: Json = {"name": one.name, "where": one.where, "place": one.place}
    found |= {"gpuHours" if one.gpus else "machineHours": round(one.hours, 4), unit: one.seconds_by_use()}
    if one.budget is not None:
        found["budget"] = {"gpuHours": one.budget}
    trained = {what: count for what, count in (("tokens", one.tokens), ("samples", one.samples)) if count}
    if trained and one.seconds:
        rates = {what: round(count / one.hours, 1) for what, count in trained.items()}
        found |= {"trained": trained, "perGpuHour" if one.gpus else "perMachineHour": rates}
    found["attempts"] = [{"attempt": row.attempt, "role": row.role, unit: dict(row.seconds)} for row in one.rows]
    return found


def _name_row(row: CostRow) -> str:
    return f"attempt {row.attempt}, {row.role}" if row.attempt else f"earlier attempts, {row.role}"


def _show_seconds(row: CostRow) -> int:
    return sum(seconds for _, seconds in row.seconds)


def _use_shares(uses: dict[str, int]) -> list[str]:
    """Return the share of each use; unknown uses of newer releases are added to `other`."""
    whole = sum(uses.values())
    known = {use: uses.get(use, 0) for use in USES}
    known["other"] += sum(seconds for use, seconds in uses.items() if use not in USES)
    return [f"{100 * seconds / whole:.0f} %" if seconds else "–" for seconds in known.values()]


def _budget_text(one: Account) -> str:
    return "–" if one.budget is None else f"{one.budget:g} ({100 * one.hours / one.budget:.0f} %)"


def _rate_text(count: int | None, one: Account) -> str:
    return "–" if not count or not one.seconds else f"{count / one.hours:,.0f}"
