"""Repair of a run's objects, where one of them is edited, or one beside its workloads deleted, during an attempt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rlrun.defaults.words import shorten
from rlrun_operator import render
from rlrun_operator.decide.objects import workload_edits
from rlrun_operator.decide.objects.refused import ALSO
from rlrun_operator.decide.reading.children import is_ending
from rlrun_operator.decide.snapshot import Case
from rlrun_operator.failures.detect import Cause
from rlrun_operator.managed_fields import unheld
from rlrun_operator.names import CONFIG_ANNOTATION, Ref, is_made_for
from rlrun_operator.state import MADE, Apply, Manifest
from rlrun_operator.status import admission_limits, reasons
from rlrun_operator.status.conditions import Say, find
from rlrun_operator.status.scene import TEXT_MAX

REPAIR_SECONDS = 5.0
"""Pause between two repairs of a run: a user, or a controller, may go on deleting."""
SHOWN = 4
"""Parts that a message names."""
_INDEPENDENT = ("ServiceAccount", "Role", "RoleBinding", "Service")
"""Kinds that are made the same of every specification that a run may have."""
_UPDATED = ("NetworkPolicy", "PodDisruptionBudget")
"""Kinds of parts that change within an attempt."""
_NOW = "; it is being put right"
_LATER = "; it is made again when the next attempt begins, of the specification that is there then"
_BEHIND = "; it is put right when {} is out of the way"


class Seen(NamedTuple):
    """The state of a run's parts."""

    said: dict[str, Say | None]
    """ChildrenIntact, where there is anything to say."""
    repair: tuple[Apply, ...] = ()
    wake_in: float | None = None
    """Seconds until what cannot be put right yet can."""


def applies(case: Case, made: Iterable[Manifest]) -> list[Apply]:
    """Applies of parts, over those that the cache knows."""
    return [Apply(part, known=_version(case, case.observed.parts.get(_ref(part)))) for part in made]


def see(case: Case, attempt: int) -> Seen:
    """Compare the parts of `attempt`, which has begun, with what was made for it.

    A specification that was edited since, or is not allowed any more, is not that of the attempt: what is made of it waits for the next.
    So does a configuration file that this release renders otherwise than the one which began the attempt.
    """
    if case.spec is None or case.past.launched_attempt != attempt:
        return Seen({})
    context = case.context(case.spec, attempt)
    workloads = workload_edits.see(case, context, as_begun=_as_begun(case))
    damaged = _damaged(case, context) | workloads.damage
    if not damaged:
        return Seen(_healed(case))
    if case.taken is not None:  # a repair would end at that object
        return Seen(_drifted(damaged, _BEHIND.format(case.taken)))
    at_once = {*workloads.restored, *workloads.scaled}
    now = [ref for ref in damaged if ref in at_once or _can_be_made(case, ref)]
    refused = _refused(case, damaged)
    said = _drifted(damaged, _NOW if now else _LATER, refused)
    left = REPAIR_SECONDS - case.observed.repaired_ago
    if not now or (left > 0 and not refused):
        return Seen(said, wake_in=left if now else None)
    made = [part for part in render.prerequisites(context).apply if _ref(part) in now]
    repair = [_over_what_was_seen(case, part) for part in made]
    repair += [Apply(made, replaces=_seen_version(case, ref)) for ref, made in workloads.restored.items()]
    return Seen(said, tuple(repair))


def _seen_version(case: Case, ref: Ref) -> str | None:
    version = case.observed.children[ref]["metadata"].get("resourceVersion")
    return None if version is None else str(version)


def _over_what_was_seen(case: Case, part: Manifest) -> Apply:
    """Repair of a part in the very state that was compared: what the cache has missed may be whole, and what is whole is not written to."""
    version = _version(case, case.observed.parts.get(_ref(part)))
    return Apply(part, expect_absent=version is None, replaces=version)


def outdated(case: Case, updates: Iterable[Apply]) -> dict[str, Say | None]:
    """ChildrenIntact of the first part whose update admission refuses; nothing where it refuses none."""
    for update in updates:
        ref = _ref(update.manifest)
        if ref.kind in _UPDATED and (refused := _refused(case, [ref])):
            return _drifted({ref: "is not yet as the run needs it now"}, _NOW, refused)
    return {}


def _damaged(case: Case, context: render.RunContext) -> dict[Ref, str]:
    """Parts that are not as they were made, and what has happened to each."""
    as_begun = _as_begun(case)
    return {
        _ref(part): what
        for part in render.parts(context)
        if (as_begun or part["kind"] in (*_INDEPENDENT, "ConfigMap")) and (what := _damage(case, part)) is not None
    }


def _can_be_made(case: Case, ref: Ref) -> bool:
    """True if a part can be made now as the attempt began with it."""
    if ref.kind in workload_edits.KINDS:
        return False
    return ref.kind in _INDEPENDENT or (_as_begun(case) and (ref.kind != "ConfigMap" or _same_file(case)))


def _healed(case: Case) -> dict[str, Say | None]:
    """ChildrenIntact of parts that are all as they were made; nothing where none was damaged before."""
    before = find(case.past.conditions, reasons.CHILDREN_INTACT)
    if before is None or before.status == "True" or before.reason == reasons.ADMISSION_REFUSED:  # see `refused`
        return {}
    message = f"{_happened(before.message)}; it is put right"
    return {reasons.CHILDREN_INTACT: Say("True", reasons.REPAIRED, message)}


def _drifted(damaged: Mapping[Ref, str], then: str, refused: str = "") -> dict[str, Say | None]:
    """ChildrenIntact of damaged parts. `then`: when they are put right; `refused`: words of the admission."""
    message = _shown(damaged) + then + (f", and refused: {refused}" if refused else "")
    return {reasons.CHILDREN_INTACT: Say("False", reasons.DRIFTED, message)}


def withheld(case: Case) -> Cause | None:
    """Cause of an attempt's end: a pod waits for its configuration, which can be made of the edited specification alone."""
    attempt, name = case.past.attempt, case.names.account
    if case.spec is None or case.forbidden or case.past.launched_attempt != attempt:
        return None
    if Ref("ConfigMap", name) in case.observed.parts or (_as_begun(case) and _same_file(case)):
        return None
    pods = case.pods_of_attempt(attempt)
    waiting = next((p for p in pods if p.phase == "Pending" and p.node is not None and not p.mounted), None)
    if waiting is None:
        return None
    since = "another release of the operator has come" if _as_begun(case) else "the specification was edited"
    what = f"ConfigMap {name} was deleted, and {since} since the attempt began"
    return Cause("disruption", None, waiting.role, waiting.name, None, None, reasons.DRIFTED, what)


def _as_begun(case: Case) -> bool:
    """True if the specification is the one that the attempt began with, and may be rendered."""
    return case.spec_hash == case.past.spec_hash and not case.forbidden


def _same_file(case: Case) -> bool:
    """True if the attempt's configuration file would be rendered as when it began: its pods take no other one."""
    assert case.spec is not None
    attempt = case.past.attempt
    context, pod = case.context(case.spec, attempt), case.orchestrator(attempt)
    found = (pod.manifest["metadata"].get("annotations") or {}).get(CONFIG_ANNOTATION) if pod is not None else None
    if found is None:  # of an earlier release, which left a fingerprint in the status alone
        return case.past.config_hash == context.config.hash()
    return bool(found == context.file_mark("orchestrator"))


def _damage(case: Case, part: Manifest) -> str | None:
    """Damage to a part, in words; None: there is none, or the part is on its way out and cannot be made again yet."""
    found = case.observed.parts.get(_ref(part))
    if found is None:
        return "was deleted"
    if is_ending(found) or found.get("held") == found.get("accepted"):
        return None
    lost = unheld(str(found.get("held")), part)
    return f"was edited ({', '.join(lost[:SHOWN])})" if lost else None


def _shown(damaged: Mapping[Ref, str]) -> str:
    found = [f"{ref.kind} {ref.name} {what}" for ref, what in damaged.items()]
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def _refused(case: Case, damaged: Iterable[Ref]) -> str:
    """Words of the admission that does not let a repair in, with the fix. Events of others about a part say nothing of that."""
    about = set(damaged)
    text = next((each.text for each in case.observed.refused if each.doing == MADE and each.ref in about), "")
    return f"{shorten(text, TEXT_MAX)}; {admission_limits.fix(text)}" if text else ""


def _happened(message: str) -> str:
    for ending in (ALSO, _NOW, _LATER, _BEHIND.partition("{")[0]):
        message = message.partition(ending)[0]
    return message


def _ref(part: Manifest) -> Ref:
    return Ref(part["kind"], part["metadata"]["name"])


def _version(case: Case, part: Manifest | None) -> str | None:
    """resourceVersion of a part that may be applied over without a look at it: not of a foreign one with a copied label."""
    if part is None or not (is_made_for(part["metadata"], case.names.run) or part.get("held") not in (None, "null")):
        return None
    return str(part["metadata"]["resourceVersion"])
