"""Explanation of why a run waits, restarted or failed, computed from one snapshot of a folder or of a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlrun.inspect.advice import Advice, find_advice
from rlrun.inspect.snapshot import Condition, Failure, Snapshot, seconds_of, show_span

_OVER = ("Complete", "Failed")
_EVENTS = 5
_OF_THE_FAILURE = ("RoleFailed", "BackOff", "PermanentFailure", "MaxRestartsExceeded", "FailedByRule")
"""Reasons that only mean that an attempt has ended."""
_PLACES = re.compile(r"\b(NAME|WHERE|NAMESPACE|HOST|GO_ON|POD|NODE|ROLE|N|attempt_N)\b")
_ROLLOUTS = "rollouts for step"
"""Start of the orchestrator's phase in which engines and environments have not produced a batch yet."""
STALE_SECONDS = 60.0
"""Age in seconds from which values are outdated; an orchestrator renews its Lease every 20 s."""


@dataclass(frozen=True)
class Finding:
    """One cause, its evidence, and the suggested action."""

    what: str
    evidence: str
    do: str
    since: str | None = None
    """Start of the cause (RFC 3339)."""
    kind: str = "problem"
    """waits, problem or ended; see `advice.Kind`."""
    follows: bool = False
    """Whether the cause is only a consequence of the last attempt's end, which must be repaired first."""


@dataclass(frozen=True)
class Explanation:
    """Explanation of a run's state."""

    headline: str
    now: tuple[Finding, ...]
    """Causes of the current state, most important first."""
    before: tuple[Finding, ...]
    """Ends of attempts, newest first."""
    besides: tuple[str, ...]
    """Additional facts: warnings, excluded nodes, unreadable parts."""

    def steps(self) -> tuple[str, ...]:
        """Return the actions for a person, most important first; empty if no action is needed."""
        first = [f for f in self.now if not f.follows]
        found = [
            f.do
            for f in (*first, *self.before[:1], *(f for f in self.now if f.follows))
            if f.kind in ("problem", "ended") or not f.do.startswith("Nothing")
        ]
        return tuple(dict.fromkeys(found))


def explain_run(run: Snapshot, now: float) -> Explanation:
    """Explain a run.

    Args:
        run: snapshot of the run.
        now: seconds since the epoch.
    """
    causes = [*_explain_unserved(run), *_telling_conditions(run)]
    if run.phase not in _OVER:
        causes += [*_wait_finding(run, now, bool(causes))]
    failures = (
        () if run.phase == "Complete" else tuple(_end_finding(run, failure) for failure in reversed(run.failures))
    )
    return Explanation(_make_headline(run, now), tuple(causes), failures, tuple(_other_findings(run, now)))


def not_there(run: Snapshot, lacks: str) -> str:
    """Return a message for a missing part of a run: that it has not started, or `lacks`; its state, and a command for details."""
    state = lacks if run.attempt else "has not started"
    reason = f" ({run.reason})" if run.reason else ""
    told = (run.message or "").partition("\n")[0].rstrip(".")
    place = run.where if run.place == "folder" else run.name
    said = f": {told}" if told else ""
    return (
        f"{place} {state}: it is {run.phase}{reason}{said}; `rlrun why {run.argument}` explains the cause and the fix"
    )


def _make_headline(run: Snapshot, now: float) -> str:
    progress = run.progress
    step = (
        f"step {progress.step} of {progress.total_steps}" if progress.step is not None and progress.total_steps else ""
    )
    counted = f", {run.restarts_counted} counted" + (
        f" of at most {run.max_restarts}" if run.max_restarts is not None else ""
    )
    word = "restart" if run.restarts == 1 else "restarts"
    restarts = f"{run.restarts} {word}{counted if run.place == 'cluster' else ''}" if run.restarts else ""
    retry = ""
    if run.phase == "Restarting" and (then := seconds_of(run.next_retry_time)) is not None and then > now:
        retry = f"next attempt in {show_span(then - now)}"
    words = [word for word in (step, f"attempt {run.attempt}" if run.attempt else "", restarts, retry) if word]
    return f"{run.title}: {run.phase}" + (f" ({', '.join(words)})" if words else "")


def _explain_unserved(run: Snapshot) -> Iterator[Finding]:
    if run.phase == "Unserved":
        told = run.message or "no operator has taken this run yet"
        yield Finding(
            "no operator manages the run", told, _fill_names(find_advice("Unserved", local=False).do, run), run.created
        )


def _telling_conditions(run: Snapshot) -> list[Finding]:
    """Return conditions with a problem or a wait; first the condition that the run's reason names; each cause once."""
    found: list[tuple[int, Finding]] = []
    told: set[tuple[str, str]] = set()
    for one in run.conditions:
        known = find_advice(one.reason, local=run.place == "folder")
        if known.kind == "fine" or (one.reason, one.message) in told or not _adds_information(run, one, known):
            continue
        told.add((one.reason, one.message))
        rank = {"ended": 1, "problem": 2, "waits": 3}[known.kind]
        rank = 0 if one.reason == run.reason else rank
        found.append((rank, _condition_finding(run, one, known)))
    return [finding for _, finding in sorted(found, key=lambda item: item[0])]


def _adds_information(run: Snapshot, one: Condition, known: Advice) -> bool:
    """Return False for a condition without new information: a wait of a run that is over, or a restart that is reported elsewhere."""
    if run.phase in _OVER:
        return known.kind == "ended" or one.reason == run.reason
    return not (one.type in ("Progressing", "Reconciling", "Stalled") and one.reason == "Restarting")


def _condition_finding(run: Snapshot, one: Condition, known: Advice) -> Finding:
    follows = bool(run.failures) and one.reason in _OF_THE_FAILURE
    return Finding(f"{one.type}: {one.reason}", one.message, _fill_names(known.do, run), one.since, known.kind, follows)


def _wait_finding(run: Snapshot, now: float, explained: bool) -> Iterator[Finding]:
    """Yield the cause that the next step waits for, from the orchestrator's report."""
    if run.wait is None or (explained and run.phase == "Starting" and run.place == "folder"):
        return
    since = seconds_of(run.wait.since)
    waited = now - since if since is not None else None
    who = f"the next step waits for the {run.wait.role}" if run.wait.role else "the next step waits"
    if run.wait.phase:
        who += f" ({run.wait.phase})"
    if (run.wait.phase or "").startswith(_ROLLOUTS):
        who = f"the next step waits for {run.wait.phase}"
    long = waited is not None and waited > 300
    look = (
        f"`rlrun logs {run.argument} --role {run.wait.role or 'orchestrator'}` shows its activity."
        if long
        else "Nothing: short waits between steps are normal."
    )
    yield Finding(who, run.wait.text, look, run.wait.since, "problem" if long and not explained else "waits")


def _end_finding(run: Snapshot, failure: Failure) -> Finding:
    """Return the finding for the end of an attempt."""
    known = find_advice(failure.reason, local=run.place == "folder")
    process = failure.process + (f" on {failure.node}" if failure.node else "")
    code = f", exit code {failure.exit_code}" if failure.exit_code is not None else ""
    at = f" at step {failure.step}" if failure.step is not None else ""
    counts = "" if run.place == "folder" else "; it counted" if failure.counted else "; it did not count"
    what = f"attempt {failure.attempt} ended{at}: {failure.reason} ({process}{code}{counts})"
    return Finding(what, failure.message, _fill_names(known.do, run, failure), failure.time, known.kind)


def _other_findings(run: Snapshot, now: float) -> Iterator[str]:
    told = {one.reason for one in run.conditions} | {failure.reason for failure in run.failures}
    events = [one for one in run.events if one.warning and one.reason not in told and one.reason != "AttemptFailed"]
    for one in events[-_EVENTS:]:
        times = f" ({one.count} times)" if one.count > 1 else ""
        yield f"event {one.reason}{times}: {one.message} → {_fill_names(find_advice(one.reason, local=False).do, run)}"
    if run.excluded_nodes:
        yield f"excluded nodes: {', '.join(run.excluded_nodes)}"
    if run.defaults:
        yield f"defaults of the namespace: {run.defaults}"
    if run.progress.steps_lost:
        yield f"{run.progress.steps_lost} steps were trained again after restarts"
    if run.start is not None and run.place == "cluster" and run.phase not in _OVER:
        yield f"the last restart: {run.start.text}" + (f"; {run.start.slow}" if run.start.slow else "")
    if run.phase == "Running" and run.heard_seconds is not None and run.heard_seconds > STALE_SECONDS:
        yield f"the orchestrator was last heard {show_span(run.heard_seconds)} ago: numbers are as old"
    yield from run.unread


def _fill_names(text: str, run: Snapshot, failure: Failure | None = None) -> str:
    """The names of this run and failure in the place of the words that stand for them."""
    words = {
        "NAME": run.where if run.place == "folder" else run.name,
        "NAMESPACE": run.where,
        "GO_ON": run.go_on or "the command that started it, with --resume",
    }
    if failure is not None:
        words |= {
            "POD": failure.process,
            "NODE": failure.node or "NODE",
            "ROLE": failure.role,
            "N": str(failure.attempt),
            "attempt_N": f"attempt_{failure.attempt:04d}",
        }
    else:
        text = text.replace(" --role ROLE", "")  # the logs of all roles
    host = f"{run.host} -n {run.where}" if run.host else "HOST"
    own = words | {"NAME": run.argument, "WHERE": run.argument, "HOST": host}

    def fill_span(span: re.Match[str]) -> str:
        given = own if span[0].startswith("`rlrun ") else words
        return _PLACES.sub(lambda found: given.get(found[0], found[0]), span[0])

    return re.sub(r"`[^`]*`|[^`]+", fill_span, text)
