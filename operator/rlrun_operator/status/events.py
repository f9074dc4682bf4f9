"""Kubernetes events that follow from a change of the status."""

from __future__ import annotations

from collections.abc import Iterator

from rlrun.api.run_status import RLRunStatus
from rlrun.runtime.printable import shorten_text
from rlrun_operator.state import EventRecord
from rlrun_operator.status import failure_reasons, reasons
from rlrun_operator.status.conditions import find_condition, is_true
from rlrun_operator.status.wait_facts import QUEUE_LOOKS_SOON
from rlrun_operator.times import seconds_of
from rlrun_operator.validate_spec import count_noun

EVENT_MAX = 1000
"""Characters of an event's message; the API's limit is 1024."""


def list_events(old: RLRunStatus, new: RLRunStatus, *, is_training_run: bool = True) -> tuple[EventRecord, ...]:
    """Return the events between two statuses: at most three from creation to the first step of a healthy run.

    Args:
        old: previous status.
        new: status that is being written.
        is_training_run: whether the run trains; otherwise its steps are answers.
    """
    return tuple(
        EventRecord(e.type, e.reason, shorten_text(e.message, EVENT_MAX))
        for e in _new_events(old, new, is_training_run)
    )


def _new_events(old: RLRunStatus, new: RLRunStatus, is_training_run: bool) -> Iterator[EventRecord]:
    yield from _of_failure(old, new)
    yield from _of_beginning(old, new, is_training_run)
    yield from _of_nodes(old, new)
    yield from _of_configuration(old, new)
    yield from _of_trainer(old, new)
    yield from _of_inference(old, new)
    yield from _of_resumption(old, new, is_training_run)
    yield from _of_problems(old, new)
    if _has_place(new) and not _has_place(old):
        yield EventRecord("Normal", reasons.ENQUEUED, _reason_and_message(new, reasons.ADMITTED)[1])
    if is_true(new.conditions, reasons.ADMITTED) and old.phase == "Queued":
        yield EventRecord("Normal", reasons.ADMITTED, _reason_and_message(new, reasons.ADMITTED)[1])
    if new.phase in ("Suspending", "Suspended") and new.phase != old.phase:
        yield EventRecord("Normal", new.phase, _reason_and_message(new, reasons.SUSPENDED)[1])
    yield from _of_requests(old, new)
    if new.phase == "Complete" and old.phase != "Complete":
        steps = f"all {new.progress.total_steps} steps are trained"
        measured = f"{new.steps} answers: {'; '.join(new.results or ())}"
        yield EventRecord("Normal", reasons.COMPLETED, steps if is_training_run else measured)


def _has_place(status: RLRunStatus) -> bool:
    """Return whether the run is queued and the queue has already reported why."""
    return status.phase == "Queued" and _reason_and_message(status, reasons.ADMITTED)[1] != QUEUE_LOOKS_SOON


def _of_beginning(old: RLRunStatus, new: RLRunStatus, is_training_run: bool) -> Iterator[EventRecord]:
    if new.attempt <= old.attempt:
        return
    engines = f", {count_noun(new.inference.desired, 'engine')}" if new.inference.desired else ""
    what = f"{count_noun(new.trainer.desired, 'trainer pod')}{engines} and the orchestrator"
    if not is_training_run:
        what = f"{engines.removeprefix(', ')} and the orchestrator"
    if new.shared_with is not None:
        what = f"the orchestrator, with trainer and engines of run {new.shared_with.run}"
    yield EventRecord("Normal", reasons.ATTEMPT_STARTED, f"attempt {new.attempt}: {what}")


def _of_resumption(old: RLRunStatus, new: RLRunStatus, is_training_run: bool) -> Iterator[EventRecord]:
    """Yield events of a continued attempt: the step from which it resumes, and that it runs."""
    resumed, before = new.checkpoint.resumed_from_step, old.checkpoint.resumed_from_step
    if resumed and before is None:
        lost = new.checkpoint.steps_lost_total - old.checkpoint.steps_lost_total
        message = f"attempt {new.attempt} resumed from the checkpoint of step {resumed}; {count_noun(lost, 'step')} to train again"
        if not is_training_run:
            message = f"attempt {new.attempt} found {count_noun(resumed, 'answer')} and requests the rest"
        yield EventRecord("Normal", reasons.RESUMED, message)
    if new.phase == "Running" and old.phase != "Running":
        message = f"attempt {new.attempt} trains: step {new.progress.step} is done"
        if not is_training_run:
            message = f"attempt {new.attempt} is answering: {new.steps} answers are complete"
        yield EventRecord("Normal", reasons.TRAINING if is_training_run else reasons.ANSWERING, message)


def _of_requests(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    """Yield events of requests that a user made with an annotation."""
    if new.restart_requested_at != old.restart_requested_at and old.attempt and seconds_of(new.restart_requested_at):
        yield EventRecord(
            "Normal", reasons.RESTART_REQUESTED, f"requested at {new.restart_requested_at}; it does not count"
        )
    rotation = new.key_rotation_requested_at
    if rotation != old.key_rotation_requested_at and old.attempt and seconds_of(rotation):
        message = f"requested at {rotation}; the next attempt starts with another API key, and does not count"
        yield EventRecord("Normal", reasons.KEY_ROTATION_REQUESTED, message)


def _of_failure(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    failure, failed = new.last_failure, new.phase == "Failed" and old.phase != "Failed"
    if failed:
        reason, message = _reason_and_message(new, reasons.FAILED)
        yield EventRecord("Warning", reason, message)
    elif failure is not None and failure != old.last_failure:
        ended = f"attempt {failure.attempt}: {failure.role} pod {failure.pod_name}: {failure.reason}: {failure.message}"
        when = f"; next attempt not before {new.next_retry_time}" if new.next_retry_time else "; restarting at once"
        if failure.reason == failure_reasons.NUMBER_TAKEN:
            yield EventRecord("Normal", reasons.ATTEMPT_TAKEN, ended)
        elif failure.counted:
            count = f"; restart {new.restarts_counted_towards_max} that counts"
            yield EventRecord("Warning", reasons.ATTEMPT_FAILED, ended + count + when)
        else:
            yield EventRecord("Warning", reasons.DISRUPTED, f"{ended}; the restart does not count{when}")


def _of_nodes(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    known = {node.name for node in old.excluded_nodes or ()}
    for node in new.excluded_nodes or ():
        if node.name not in known:
            message = f"node {node.name} is excluded until {node.until}: {node.reason}"
            yield EventRecord("Warning", reasons.NODE_EXCLUDED, message)


def _of_configuration(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    was, _ = _reason_and_message(old, reasons.CONFIGURATION_VALID)
    reason, message = _reason_and_message(new, reasons.CONFIGURATION_VALID)
    if reason == was:
        return
    if reason == reasons.CHANGE_PENDING:
        yield EventRecord("Normal", reason, message)
    elif reason in (reasons.INVALID_CONFIGURATION, reasons.FORBIDDEN) and new.phase != "Failed":
        yield EventRecord("Warning", reason, message)


def _of_trainer(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    if new.trainer.changed is not None and new.trainer.changed != old.trainer.changed:
        ends = is_true(new.conditions, reasons.RESTARTING) and not is_true(old.conditions, reasons.RESTARTING)
        then = f"; attempt {new.attempt} saves a checkpoint and ends for this" if ends else ""
        yield EventRecord("Normal", reasons.TRAINER_RESIZED, f"{new.trainer.reason}{then}")


def _of_inference(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    if new.phase in ("Completing", "Complete", "Failed", "Suspending", "Suspended", "Queued"):
        return  # the events of the run itself report that its engines end
    was, now = (
        is_true(old.conditions, reasons.INFERENCE_AVAILABLE),
        is_true(new.conditions, reasons.INFERENCE_AVAILABLE),
    )
    if now and not was:
        yield EventRecord("Normal", reasons.ENGINES_AVAILABLE, _reason_and_message(new, reasons.INFERENCE_AVAILABLE)[1])
    elif was and not now:
        yield EventRecord(
            "Warning", reasons.ENGINES_UNAVAILABLE, _reason_and_message(new, reasons.INFERENCE_AVAILABLE)[1]
        )
    yield from _of_spot(old, new)
    before, after = old.inference.desired, new.inference.desired
    if before and after != before and new.shared_with is None:
        because = new.inference.reason if new.inference.reason != old.inference.reason else None
        count = f"{before} to {after} engines"
        message = f"{count}: {because}" if because else f"inference.replicas: {count}"
        yield EventRecord("Normal", reasons.INFERENCE_SCALED, message)


def _of_spot(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    """Yield events for lost engines on interruptible nodes, and for their return."""
    was, now = old.inference.spot, new.inference.spot
    if was is None or now is None:
        return
    if now.lost > was.lost:
        what = f"{count_noun(now.lost - was.lost, 'spot engine')} lost: {now.last_loss}"
        there = f"{new.inference.ready} of {new.inference.desired} engines are ready"
        message = f"{what}; {there}, their requests move to these engines, and the run continues"
        yield EventRecord("Normal", reasons.SPOT_ENGINES_LOST, message)
    elif now.lost and was.ready < was.desired and now.ready >= now.desired > 0:
        message = f"all {count_noun(now.desired, 'spot engine')} are ready"
        yield EventRecord("Normal", reasons.SPOT_ENGINES_READY, message)


def _of_problems(old: RLRunStatus, new: RLRunStatus) -> Iterator[EventRecord]:
    """Yield a Warning when the most important problem changes, and for each further problem that a running run can have."""
    if new.reason in reasons.PROBLEMS and new.reason != old.reason:
        yield EventRecord("Warning", str(new.reason), new.message or "")
    storage = (reasons.STORAGE_READY,) if is_true(new.conditions, reasons.STORAGE_READY) else ()
    for kind in (
        reasons.PROGRESSING,
        reasons.CHECKPOINT_HEALTHY,
        reasons.WITHIN_BUDGET,
        reasons.CHILDREN_INTACT,
        *storage,
    ):
        was, (reason, message) = _reason_and_message(old, kind)[0], _reason_and_message(new, kind)
        if reason in reasons.PROBLEMS and reason not in (was, new.reason):
            yield EventRecord("Warning", reason, message)
    if _reason_and_message(old, reasons.PROGRESSING)[0] == reasons.HEARTBEAT_LOST and is_true(
        new.conditions, reasons.PROGRESSING
    ):
        yield EventRecord("Normal", reasons.HEARTBEAT_RESUMED, "the orchestrator renews its Lease again")


def _reason_and_message(status: RLRunStatus, kind: str) -> tuple[str, str]:
    found = find_condition(status.conditions, kind)
    return (found.reason, found.message) if found is not None else ("", "")
