"""Change of an elastic trainer's size: the attempt saves and ends as for a manual restart, and the next one has another size.

    size recorded (`status.trainer.size`), with Restarting -> the attempt's pods save and end -> the next attempt is rendered with it

The size is absent while the trainer has all of `replicas`. It applies to the next attempt, and to the attempt that has it. An edit of the
specification, a suspension and the end of the run remove it.
"""

from __future__ import annotations

from rlrun.api.status import TrainerStatus
from rlrun_operator.decide.attempt_end import report_restart
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.decide.trainers.choice import Choice, Look, Rules, choose_size, grow_delay
from rlrun_operator.decide.trainers.look import look_at, rules_of
from rlrun_operator.state import AT_ONCE, Decision
from rlrun_operator.status import reasons
from rlrun_operator.status.change import StatusChange
from rlrun_operator.times import rfc3339


def resize_trainer(run: RunSnapshot) -> Decision | None:
    """End the attempt for another size of its trainer; None if it continues."""
    look, rules = look_at(run), rules_of(run)
    if look is None or rules is None:
        return None
    choice = choose_size(look, rules)
    if choice.size == look.size:
        return None
    attempt = run.past.attempt
    change = StatusChange(
        attempt=attempt,
        launched_attempt=attempt,
        restarts=run.past.restarts + 1,
        next_retry_time=None,
        trainer=_record_size(run, rules, look, choice),
    )
    message = f"attempt {attempt} ends for another size of the trainer: {choice.why}".replace("; ", ", ")
    return report_restart(run, message, reasons.PODS_ENDING, change, AT_ONCE)


def _record_size(run: RunSnapshot, rules: Rules, look: Look, choice: Choice) -> TrainerStatus:
    """Return `status.trainer` with the chosen size."""
    assert run.spec is not None
    past, grows = run.past.trainer, choice.size > look.size
    in_vain = past.grown_from is not None and not grows
    growths = (past.growths or 0) + in_vain
    return TrainerStatus(
        desired=choice.size,
        ready=0,
        size=choice.size if choice.size < run.spec.trainer.replicas else None,
        reason=choice.why,
        changed=rfc3339(run.now),
        grow_time=rfc3339(run.now + grow_delay(rules, growths)),
        grown_from=look.size if grows else None,
        growths=growths or None,
    )
