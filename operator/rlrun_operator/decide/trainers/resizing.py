"""Change of an elastic trainer's size: the attempt saves and ends as for a restart by hand, and the next one has another size.

    size on record (`status.trainer.size`), with Restarting -> the attempt's pods save and end -> the next attempt is rendered with it

The size is absent while the trainer has all of `replicas`. It is read for the attempt that begins next, and for the one that has it. An
edit of the specification, a suspension and the end of the run forget it.
"""

from __future__ import annotations

from rlrun.api.status import TrainerStatus
from rlrun_operator.decide.attempt_end import restarting
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.decide.trainers.choice import Choice, Look, Rules, choose, grow_delay
from rlrun_operator.decide.trainers.look import look_at, rules_of
from rlrun_operator.state import AT_ONCE, Decision
from rlrun_operator.status import reasons
from rlrun_operator.status.change import StatusChange
from rlrun_operator.times import rfc3339


def resized(case: Case) -> Decision | None:
    """End the attempt for another size of its trainer; None: it goes on."""
    look, rules = look_at(case), rules_of(case)
    if look is None or rules is None:
        return None
    choice = choose(look, rules)
    if choice.size == look.size:
        return None
    attempt = case.past.attempt
    change = StatusChange(
        attempt=attempt,
        launched_attempt=attempt,
        restarts=case.past.restarts + 1,
        next_retry_time=None,
        trainer=_recorded(case, rules, look, choice),
    )
    message = f"attempt {attempt} ends for another size of the trainer: {choice.why}".replace("; ", ", ")
    return restarting(case, message, reasons.PODS_ENDING, change, AT_ONCE)


def _recorded(case: Case, rules: Rules, look: Look, choice: Choice) -> TrainerStatus:
    """`status.trainer` with the chosen size."""
    assert case.spec is not None
    past, grows = case.past.trainer, choice.size > look.size
    in_vain = past.grown_from is not None and not grows
    growths = (past.growths or 0) + in_vain
    return TrainerStatus(
        desired=choice.size,
        ready=0,
        size=choice.size if choice.size < case.spec.trainer.replicas else None,
        reason=choice.why,
        changed=rfc3339(case.now),
        grow_time=rfc3339(case.now + grow_delay(rules, growths)),
        grown_from=look.size if grows else None,
        growths=growths or None,
    )
