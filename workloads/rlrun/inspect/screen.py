"""Texts of snapshots and explanations for a terminal: tables and screens of plain characters, without colors."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence

from rlrun.inspect.snapshot import MACHINE, Failure, Progress, Snapshot, show_ago, show_span
from rlrun.inspect.why import STALE_SECONDS, Explanation, Finding
from rlrun.protocol.files.volume_faults import show_size

WIDTH = 100
_HEAD = ("NAME", "PHASE", "STEP", "REWARD", "TRAINER", "INFERENCE", "RESTARTS", "CKPT", "AGE", "REASON")
_WIDE = ("TASK", "ATTEMPT", "VERSION", "STALENESS", "TOK/S", "TOK/GPU-H", "ETA", "WAITS FOR")
_MESSAGE_MAX = 300


def runs_table(runs: Sequence[Snapshot], now: float, *, wide: bool = False, everywhere: bool = False) -> str:
    """Return a table with one line per run; guests, which use the trainer of another run, follow that run (their host)."""
    head = (*(("NAMESPACE",) if everywhere else ()), *_HEAD, *(_WIDE if wide else ()))
    rows = [head]
    for depth, run in _run_tree(runs):
        # A run on this machine is shown by its folder (`where`).
        name = f"{'└─ ' if depth else ''}{run.name if run.place == 'cluster' else run.where}"
        rows.append(
            (*((run.where,) if everywhere else ()), name, *_run_cells(run, now), *(_wide_cells(run) if wide else ()))
        )
    return align_columns(rows)


def _run_tree(runs: Sequence[Snapshot]) -> Iterator[tuple[int, Snapshot]]:
    """Yield runs with their depth: guests follow their host if it is among the runs."""
    names = {(run.place, run.where, run.name) for run in runs if run.place == "cluster"}

    def has_host_row(run: Snapshot) -> bool:
        return run.host is not None and (run.place, run.where, run.host) in names

    for run in runs:
        if not has_host_row(run):
            yield 0, run
            yield from (
                (1, one) for one in runs if has_host_row(one) and (one.where, one.host) == (run.where, run.name)
            )


def _run_cells(run: Snapshot, now: float) -> Sequence[str]:
    progress, roles = run.progress, dict(run.roles)
    ready = [
        f"{roles[name].ready}/{roles[name].desired}" if name in roles else "–" for name in ("trainer", "inference")
    ]
    return (
        run.phase,
        show_steps(run),
        show_number(progress.reward, ".3f"),
        *ready,
        str(run.restarts),
        "–" if progress.checkpoint_step is None else str(progress.checkpoint_step),
        show_ago(run.created or run.started, now),
        run.reason or "–",
    )


def _wide_cells(run: Snapshot) -> Sequence[str]:
    progress = run.progress
    version = "–" if progress.policy_version is None else str(progress.policy_version)
    waits = run.wait.text if run.wait is not None else "–"
    return (
        *(run.task, str(run.attempt), version, show_number(progress.staleness_mean, ".2f")),
        *(show_number(progress.tokens_per_second, ",.0f"), show_number(_per_hour(run).get("tokens"), ",.0f")),
        *(show_span(progress.eta_seconds), cut_text(waits, 60)),
    )


def show_steps(run: Snapshot) -> str:
    """Return the steps as `412/1000`, or a dash."""
    step, total = run.progress.step, run.progress.total_steps
    return "–" if total is None else f"{step or 0}/{total}"


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns, separated by three spaces."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def show_number(value: float | None, form: str) -> str:
    """Return a formatted number, or a dash."""
    return "–" if value is None else f"{value:{form}}"


def cut_text(text: str, most: int) -> str:
    """Shorten a text to at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def status_screen(run: Snapshot, told: Explanation, now: float) -> str:
    """Return one screen about a run."""
    lines = [f"{run.title}  task {run.task}", ""]
    rows = [
        _phase_lines(run, now),
        *_step_lines(run, now),
        *_measure_lines(run),
        *_wait_lines(run, now),
        *_more_lines(run),
    ]
    lines += [f"{label:<11} {text}" for label, text in rows]
    lines += [f"{'':<11} {line}" for line in run.results]
    lines += _failure_lines(run.failures[-3:], now)
    lines += _finding_lines("why", told.now, now)
    lines += _to_do(told)
    # Parts of the run that could not be read.
    lines += ["", *(_point_lines(line) for line in run.unread)] if run.unread else []
    return "\n".join(lines)


def _phase_lines(run: Snapshot, now: float) -> tuple[str, str]:
    reason = f" ({run.reason})" if run.reason else ""
    over = f", ended {show_ago(run.ended, now)} ago" if run.ended else ""
    attempt = f", attempt {run.attempt}" if run.attempt else ", no attempt yet"
    began = f", started {show_ago(since, now)} ago" if (since := run.started or run.created) else ""
    return "phase", f"{run.phase}{reason}{attempt}{began}{over}"


def _step_lines(run: Snapshot, now: float) -> Iterator[tuple[str, str]]:
    """Yield the steps so far, and the remaining time."""
    progress = run.progress
    percent = f" ({100 * (progress.step or 0) // progress.total_steps} %)" if progress.total_steps else ""
    trained = f", last one {show_ago(progress.last_step_time, now)} ago" if progress.last_step_time else ""
    yield "step", f"{show_steps(run)}{percent}{trained}"
    if run.phase in ("Running", "Starting") and progress.eta_seconds is not None:
        yield "ETA", f"in {show_span(progress.eta_seconds)}"


def _measure_lines(run: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield reward or loss, throughput and staleness."""
    progress = run.progress
    has_loss = progress.reward is None and progress.loss is not None
    label, value = ("loss", progress.loss) if has_loss else ("reward", progress.reward)
    speed = f", {progress.tokens_per_second:,.0f} tokens/s" if progress.tokens_per_second is not None else ""
    yield label, f"{show_number(value, '.4f')}{speed}"
    if progress.staleness_mean is not None or progress.policy_version is not None:
        holds = f"the engines hold version {progress.policy_version}" if progress.policy_version is not None else ""
        age = f"{progress.staleness_mean:.2f} versions" if progress.staleness_mean is not None else ""
        yield "staleness", "; ".join(filter(None, (age, holds, _travelled_share(progress))))


def _travelled_share(progress: Progress) -> str:
    """Return the transferred share of the newest version; empty if versions are transferred completely, or it is unknown."""
    sent, whole = progress.sent_bytes, progress.version_bytes
    if sent is None or whole is None or not math.isfinite(sent + whole):
        return ""
    return f"the newest was transferred as {show_size(int(sent))} of {show_size(int(whole))}"


def _wait_lines(run: Snapshot, now: float) -> Iterator[tuple[str, str]]:
    if run.wait is not None:
        since = f" (for {show_ago(run.wait.since, now)})" if run.wait.since else ""
        yield "waits for", cut_text(run.wait.text, _MESSAGE_MAX) + since


def _more_lines(run: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield the last report, pods, GPU use, checkpoint, restarts, cost, startup, claim, host and fork of a run."""
    progress = run.progress
    if run.heard_seconds is not None:
        old = "; the values above are outdated" if run.heard_seconds > STALE_SECONDS else ""
        yield "last report", f"{show_span(run.heard_seconds)} ago{old}"
    if run.roles:
        yield "pods", ", ".join(f"{name} {role.ready}/{role.desired}" for name, role in run.roles)
    for name, role in run.roles:
        if role.why is not None:
            yield name, cut_text(role.why, _MESSAGE_MAX)
    yield from _gpu_lines(run)
    saved = (
        "no complete checkpoint" if progress.checkpoint_step is None else f"step {progress.checkpoint_step} is complete"
    )
    resumed = f", this attempt started from step {progress.resumed_from_step}" if progress.resumed_from_step else ""
    lost = f", {progress.steps_lost} steps were trained twice" if progress.steps_lost else ""
    yield "checkpoint", saved + resumed + lost
    if run.restarts:
        most = f" of at most {run.max_restarts}" if run.max_restarts is not None else ""
        counted = f", {run.restarts_counted} counted{most}" if run.place == "cluster" else ""
        yield "restarts", f"{run.restarts}{counted}"
    if run.cost:
        yield "cost", _cost_lines(run)
    if run.start is not None:
        yield "start", run.start.text
        if run.start.slow:
            yield "", cut_text(run.start.slow, _MESSAGE_MAX)
    if run.storage:
        yield "claim", run.storage
    if run.host:
        yield "host", run.host
    if run.forked_from:
        yield "forked", f"from {run.forked_from}"


def _gpu_lines(run: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield the use of each role's GPUs, one line per role."""
    label = "GPU use"
    for role, use in run.gpus:
        busy = (
            f"{use.utilization:.0%} busy"
            if use.utilization is not None
            else "a share of a GPU, whose use is not measured"
        )
        memory = f"{use.used_bytes / 2**30:,.1f} of {use.size_bytes / 2**30:,.1f} GiB"
        idle = f", idle for {use.idle:.0%} of the attempt" if use.idle is not None else ""
        measured = f"{use.gpus} GPU{'s' if use.gpus > 1 else ''}{f' of {use.of}' if use.of > use.gpus else ''}"
        yield label, f"{role}: {measured}, {busy}, {memory}{idle}"
        label = ""
    if run.gpus_unknown:
        yield label, cut_text(run.gpus_unknown, _MESSAGE_MAX)


def _cost_lines(run: Snapshot) -> str:
    """Return GPU-hours, or hours of this machine, and the rates of trained tokens and samples."""
    gpus = any(row.role != MACHINE for row in run.cost)
    budget = f" of {run.budget:g} (budget)" if run.budget is not None else ""
    whole = f"{run.gpu_hours:.2f}{budget} GPU-hours" if gpus else f"{run.gpu_hours:.2f} hours of this machine, no GPUs"
    rates = [f"{rate:,.0f} {what}" for what, rate in _per_hour(run).items()]
    each = f"; {' and '.join(rates)} per {'GPU-hour' if gpus else 'hour'}" if rates else ""
    return f"{whole}{each}; see `rlrun cost`"


def _per_hour(run: Snapshot) -> dict[str, float]:
    """Return trained tokens and samples per GPU-hour; without GPUs, per hour of this machine."""
    return {what: count / run.gpu_hours for what, count in run.trained} if run.gpu_hours else {}


def _failure_lines(failures: Sequence[Failure], now: float) -> list[str]:
    lines = []
    for one in reversed(failures):
        where = f"{one.process}" + (f" on {one.node}" if one.node else "")
        lines.append(f"  attempt {one.attempt}, {show_ago(one.time, now)} ago: {one.reason} of {where}")
        lines += _wrap_text(cut_text(one.message, _MESSAGE_MAX), "    ")
    return ["", "last failures", *lines] if lines else []


def explanation_text(told: Explanation, now: float) -> str:
    """Return an explanation as text."""
    lines = [told.headline]
    below = {one.evidence for one in told.before}
    lines += _finding_lines("current state", told.now, now, below)
    lines += _finding_lines("why attempts ended, newest first", told.before, now)
    if told.besides:
        lines += [
            "",
            "also",
            *(part for line in told.besides for part in _wrap_text(cut_text(line, 400), "    ", "  - ")),
        ]
    lines += _to_do(told)
    return "\n".join(lines)


def _finding_lines(title: str, found: Sequence[Finding], now: float, below: Collection[str] = ()) -> list[str]:
    """Return findings with evidence and advice; evidence that is in `below` is omitted here."""
    lines = []
    for one in found:
        since = f" (since {show_ago(one.since, now)})" if one.since else ""
        lines.append(f"  {one.what}{since}")
        lines += _wrap_text(cut_text(one.evidence, 2000), "    ") if one.evidence and one.evidence not in below else []
        lines += _wrap_text(one.do, "      ", "    → ")
    return ["", title, *lines] if lines else []


def _to_do(told: Explanation) -> list[str]:
    todo = told.steps()
    return ["", "what to do", *(_point_lines(line) for line in todo)] if todo else ["", "no action is needed"]


def _point_lines(text: str) -> str:
    return "\n".join(_wrap_text(text, "    ", "  - "))


def _wrap_text(text: str, indent: str, first: str | None = None) -> list[str]:
    """Return the lines of a text; commands and paths are not broken."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def pods_tree(run: Snapshot) -> str:
    """Return the pods of a run as a tree: roles with their pods and states."""
    lines = []
    for role in dict.fromkeys(one.role for one in run.processes):
        lines.append(f"├─ {role}")
        for one in (p for p in run.processes if p.role == role):
            restarts = f", {one.restarts} restarts" if one.restarts else ""
            ready = "ready" if one.ready else "not ready"
            lines.append(f"│  └─ {one.name}: {one.state}, {ready}{restarts}{f', on {one.node}' if one.node else ''}")
    return "\n".join(lines)


def join_blocks(parts: Iterable[str]) -> str:
    """Join texts with an empty line between them."""
    return "\n\n".join(part for part in parts if part)
