"""Repairs during an attempt: refused writes, edited or deleted parts, manual scaling, lost objects and leftover pods.

Conditions that wait for an object report that it cannot be created. ChildrenIntact reports all other refusals, such as those of scaling,
deletion, annotations and the check for a Secret. If Restarting, Suspended or Complete waits for the refused write, for example for the
removal of pods, this condition reports the refusal too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rlrun.runtime.printable import shorten_text
from rlrun_operator import render
from rlrun_operator.decide import engine_count, workload_edits
from rlrun_operator.decide.reading import desired_replicas, is_ending, uid_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.failures.detect import Cause
from rlrun_operator.managed_fields import unheld_fields
from rlrun_operator.names import ACCESS_ANNOTATION, CONFIG_ANNOTATION, Ref, is_made_for
from rlrun_operator.state import MADE, Apply, Create, Delete, Manifest, Refusal, Scale
from rlrun_operator.status import claim_messages, reasons
from rlrun_operator.status.conditions import ConditionUpdate, find_condition
from rlrun_operator.status.wait_facts import TEXT_MAX

SHOWN = 4
"""Most refusals that a message names."""
ALSO = ". Also: "
LET_IN = "everything that the operator writes of this run is let in again"
_WAITS = (
    (reasons.RESTARTING, reasons.PODS_ENDING),
    (reasons.SUSPENDED, reasons.SUSPENDING),
    (reasons.COMPLETE, reasons.COMPLETING),
)
"""Conditions that wait for removals, with their reasons."""


def with_refused_writes(
    run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None]
) -> Mapping[str, ConditionUpdate | None]:
    """Return `updates` with the refused writes; after the last refusal, ChildrenIntact reports the end."""
    # A refusal is reported once: by the condition that waits for the object, or else by ChildrenIntact.
    undone = _unreported_refusals(run, updates)
    if not undone:
        return _let_in(run, updates)
    kind, words = reasons.CHILDREN_INTACT, _describe_refusals(undone)
    return {**updates, kind: _append_refusals(updates.get(kind), words), **_waiting_conditions(updates, words)}


def _unreported_refusals(run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None]) -> list[Refusal]:
    """Return the refused writes that no other condition reports; spot engines, for example, have no such condition."""
    messages = [one.message for one in updates.values() if one is not None]

    def waited_for(each: Refusal) -> bool:
        return each.doing == MADE and any(shorten_text(each.text, TEXT_MAX) in message for message in messages)

    return [each for each in run.observed.refused if not waited_for(each)]


def _let_in(run: RunSnapshot, updates: Mapping[str, ConditionUpdate | None]) -> Mapping[str, ConditionUpdate | None]:
    kind = reasons.CHILDREN_INTACT
    past = find_condition(run.past.conditions, kind)
    stood = past is not None and (past.status, past.reason) == ("False", reasons.ADMISSION_REFUSED)
    return (
        {**updates, kind: ConditionUpdate("True", reasons.REPAIRED, LET_IN)}
        if stood and updates.get(kind) is None
        else updates
    )


def _append_refusals(now: ConditionUpdate | None, words: str) -> ConditionUpdate:
    """Return ChildrenIntact with the refused writes added to its message."""
    if now is None or now.status != "False" or now.reason == reasons.RUN_OVER:
        return ConditionUpdate("False", reasons.ADMISSION_REFUSED, words)
    return now._replace(message=f"{now.message}{ALSO}{words}")


def _waiting_conditions(updates: Mapping[str, ConditionUpdate | None], words: str) -> dict[str, ConditionUpdate | None]:
    """Return the conditions that wait for removals, with the reason of the refusal."""
    waits = {life: one for life, waits in _WAITS if (one := updates.get(life)) is not None and one.reason == waits}
    return {life: one._replace(message=f"{one.message}; {words}") for life, one in waits.items()}


def _describe_refusals(undone: list[Refusal]) -> str:
    found = [_describe_refusal(each) for each in undone[:SHOWN]]
    return ALSO.join(found) + (f" and {len(undone) - SHOWN} more" if len(undone) > SHOWN else "")


def _describe_refusal(refusal: Refusal) -> str:
    what = f"{refusal.ref.kind} {refusal.ref.name} cannot {refusal.doing}"
    return claim_messages.kept_out(what, shorten_text(refusal.text, TEXT_MAX), "the run").message


REPAIR_SECONDS = 5.0
"""Seconds between two repairs of a run: a user or a controller may keep deleting objects."""
_INDEPENDENT = ("ServiceAccount", "Role", "RoleBinding", "Service")
"""Kinds that do not depend on the specification."""
_UPDATED = ("NetworkPolicy", "PodDisruptionBudget")
"""Kinds of parts that change within an attempt."""
_NOW = "; it is being repaired"
_LATER = "; the next attempt recreates it from its own specification"
_BEHIND = "; it is repaired when {} is removed"


class Seen(NamedTuple):
    """State of a run's parts, and the repairs."""

    updates: dict[str, ConditionUpdate | None]
    """Update of ChildrenIntact, if any."""
    repair: tuple[Apply, ...] = ()
    wake_in: float | None = None
    """Seconds until a repair is allowed."""


def apply_parts(run: RunSnapshot, made: Iterable[Manifest]) -> list[Apply]:
    """Return the applies of parts, with the cached versions."""
    return [Apply(part, known=_trusted_version(run, run.observed.parts.get(_ref_of_part(part)))) for part in made]


def compare_parts(run: RunSnapshot, attempt: int) -> Seen:
    """Compare the parts of a running attempt with those that were created for it.

    If the specification was edited or forbidden since the start of the attempt, parts that depend on it are recreated only by the next
    attempt. The same holds for a configuration file that this release renders differently.
    """
    if run.spec is None or run.past.launched_attempt != attempt:
        return Seen({})
    context = run.context(run.spec, attempt)
    # Parts and workloads are compared together, so that one message and one pause cover all damage.
    workloads = workload_edits.find_edits(run, context, as_begun=_as_begun(run))
    damaged = _find_damaged(run, context) | workloads.damage
    if not damaged:
        return Seen(_report_repaired(run))
    if run.taken is not None:  # a foreign object has a child's name, and a repair would stop at it
        return Seen(_report_drift(damaged, _BEHIND.format(run.taken)))
    at_once = {*workloads.restored, *workloads.scaled}
    now = [ref for ref in damaged if ref in at_once or _can_be_made(run, ref)]
    refused = _explain_refused_repair(run, damaged)
    updates = _report_drift(damaged, _NOW if now else _LATER, refused)
    # One repair in REPAIR_SECONDS: the operator must not send requests as fast as another controller deletes.
    # A refused repair has its own pause (`Reconciler`).
    left = REPAIR_SECONDS - run.observed.repaired_ago
    if not now or (left > 0 and not refused):
        return Seen(updates, wake_in=left if now else None)
    # The compared version is a precondition of each repair, because the cache may lag behind an object that
    # is intact.
    made = [part for part in render.render_prerequisites(context).apply if _ref_of_part(part) in now]
    repair = [_over_what_was_seen(run, part) for part in made]
    repair += [Apply(made, replaces=_seen_version(run, ref), repairs=True) for ref, made in workloads.restored.items()]
    return Seen(updates, tuple(repair))


def _seen_version(run: RunSnapshot, ref: Ref) -> str | None:
    version = run.observed.children[ref]["metadata"].get("resourceVersion")
    return None if version is None else str(version)


def _over_what_was_seen(run: RunSnapshot, part: Manifest) -> Apply:
    """Return the repair of a part with the compared version as a precondition: the cache may lag behind a part that is intact."""
    version = _trusted_version(run, run.observed.parts.get(_ref_of_part(part)))
    return Apply(part, expect_absent=version is None, replaces=version, repairs=True)


def report_refused_update(run: RunSnapshot, updates: Iterable[Apply]) -> dict[str, ConditionUpdate | None]:
    """Return ChildrenIntact for the first part whose update admission refuses, or nothing."""
    for update in updates:
        ref = _ref_of_part(update.manifest)
        if ref.kind in _UPDATED and (refused := _explain_refused_repair(run, [ref])):
            return _report_drift({ref: "is not yet as the run needs it now"}, _NOW, refused)
    return {}


def _find_damaged(run: RunSnapshot, context: render.RunContext) -> dict[Ref, str]:
    """Return the damaged parts with a description of the damage."""
    as_begun = _as_begun(run)
    return {
        _ref_of_part(part): what
        for part in render.render_parts(context)
        if (as_begun or part["kind"] in (*_INDEPENDENT, "ConfigMap"))
        and (what := _describe_damage(run, part)) is not None
    }


def _can_be_made(run: RunSnapshot, ref: Ref) -> bool:
    """Return whether a part can be recreated as it was at the start of the attempt."""
    if ref.kind in workload_edits.KINDS:
        return False
    return ref.kind in _INDEPENDENT or (_as_begun(run) and (ref.kind != "ConfigMap" or _same_file(run)))


def _report_repaired(run: RunSnapshot) -> dict[str, ConditionUpdate | None]:
    """Return ChildrenIntact after all parts were repaired; nothing if no part was damaged before."""
    before = find_condition(run.past.conditions, reasons.CHILDREN_INTACT)
    # `with_refused_writes` reports the end of ADMISSION_REFUSED.
    if before is None or before.status == "True" or before.reason == reasons.ADMISSION_REFUSED:
        return {}
    message = f"{_without_ending(before.message)}; it is repaired"
    return {reasons.CHILDREN_INTACT: ConditionUpdate("True", reasons.REPAIRED, message)}


def _report_drift(damaged: Mapping[Ref, str], then: str, refused: str = "") -> dict[str, ConditionUpdate | None]:
    """Return ChildrenIntact for damaged parts. `then`: time of the repair; `refused`: message of the admission."""
    message = _show_damaged(damaged) + then + (f", and refused: {refused}" if refused else "")
    return {reasons.CHILDREN_INTACT: ConditionUpdate("False", reasons.DRIFTED, message)}


def missing_configuration_cause(run: RunSnapshot) -> Cause | None:
    """Return the cause that ends an attempt whose pod waits for a deleted configuration, if the specification was edited since."""
    attempt, name = run.past.attempt, run.names.account
    if run.spec is None or run.forbidden_fields or run.past.launched_attempt != attempt:
        return None
    if Ref("ConfigMap", name) in run.observed.parts or (_as_begun(run) and _same_file(run)):
        return None
    pods = run.pods_of_attempt(attempt)
    # A pod that has mounted its configuration no longer needs it.
    waiting = next((p for p in pods if p.phase == "Pending" and p.node is not None and not p.mounted), None)
    if waiting is None:
        return None
    since = "another release of the operator has come" if _as_begun(run) else "the specification was edited"
    what = f"ConfigMap {name} was deleted, and {since} since the start of the attempt"
    return Cause("disruption", None, waiting.role, waiting.name, None, None, reasons.DRIFTED, what)


def _as_begun(run: RunSnapshot) -> bool:
    """Return whether the specification is the attempt's and may be rendered."""
    return run.spec_hash == run.past.spec_hash and not run.forbidden_fields


def _same_file(run: RunSnapshot) -> bool:
    """Return whether the configuration file is rendered as at the start of the attempt: its pods accept no other one."""
    assert run.spec is not None
    attempt = run.past.attempt
    context, pod = run.context(run.spec, attempt), run.orchestrator(attempt)
    found = (pod.manifest["metadata"].get("annotations") or {}).get(CONFIG_ANNOTATION) if pod is not None else None
    if found is None:  # pod of an earlier release, which stored the hash only in the status
        return run.past.config_hash == context.config.config_hash()
    return bool(found == context.file_mark("orchestrator"))


def _describe_damage(run: RunSnapshot, part: Manifest) -> str | None:
    """Describe the damage to a part; None if it is intact, or is being deleted and cannot be recreated yet."""
    found = run.observed.parts.get(_ref_of_part(part))
    if found is None:
        return "was deleted"
    if is_ending(found) or found.get("held") == found.get("accepted"):
        return None
    lost = unheld_fields(str(found.get("held")), part)
    return f"was edited ({', '.join(lost[:SHOWN])})" if lost else None


def _show_damaged(damaged: Mapping[Ref, str]) -> str:
    found = [f"{ref.kind} {ref.name} {what}" for ref, what in damaged.items()]
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def _explain_refused_repair(run: RunSnapshot, damaged: Iterable[Ref]) -> str:
    """Return the message of the admission that refuses a repair, with the fix. Events of other components do not count."""
    about = set(damaged)
    text = next((each.text for each in run.observed.refused if each.doing == MADE and each.ref in about), "")
    return f"{shorten_text(text, TEXT_MAX)}; {claim_messages.refusal_fix(text)}" if text else ""


def _without_ending(message: str) -> str:
    for ending in (ALSO, _NOW, _LATER, _BEHIND.partition("{")[0]):
        message = message.partition(ending)[0]
    return message


def _ref_of_part(part: Manifest) -> Ref:
    return Ref(part["kind"], part["metadata"]["name"])


def _trusted_version(run: RunSnapshot, part: Manifest | None) -> str | None:
    """Return the resourceVersion of a part that is certainly the run's own, not a foreign object with a copied label."""
    if part is None or not (is_made_for(part["metadata"], run.names.run) or part.get("held") not in (None, "null")):
        return None
    return str(part["metadata"]["resourceVersion"])


def correct_objects(run: RunSnapshot, attempt: int, begins: bool, in_hand: bool) -> list[Apply]:
    """Return the applies that repair a running attempt. A foreign object with a child's name does not stop the other repairs."""
    if run.taken is not None:
        return []
    lost = _lost_deployment(run, begins or in_hand)
    return [*lost, *_edited_budget(run, begins), *_moved_access(run, attempt, begins)]


def restore_trainer_size(run: RunSnapshot) -> list[Scale]:
    """Scale a manually scaled trainer back to its size."""
    if run.spec is None or run.statefulset is None or is_ending(run.statefulset):
        return []
    trainers = run.wanted.trainers
    if run.past.launched_attempt != run.past.attempt or desired_replicas(run.statefulset) == trainers:
        return []
    return [Scale(run.trainer_ref, uid_of(run.statefulset), trainers)]


def restore_engines_for_guests(run: RunSnapshot) -> tuple[list[Scale], list[Apply]]:
    """Return the writes that keep engines serving the guests of a run whose attempt has ended."""
    return engine_count.scale_pools(run, None)[1], _lost_deployment(run, False)


def lost_claim(run: RunSnapshot, attempt: int) -> list[Create]:
    """Recreate a claim that was deleted before a pod used it."""
    gone = run.wanted.own_claim and run.claim is None
    return [Create(claim) for claim in _missing_prerequisite(run, attempt, "PersistentVolumeClaim")] if gone else []


def lost_lease(run: RunSnapshot, attempt: int) -> list[Apply]:
    """Recreate the Lease, which the orchestrator may renew but not create. A refusal does not stop the other writes."""
    made = _missing_prerequisite(run, attempt, "Lease") if run.observed.lease is None else []
    return [Apply(lease, expect_absent=True, repairs=True) for lease in made]


def delete_stale_pods(run: RunSnapshot, attempt: int) -> list[Delete]:
    """Delete pods of an older attempt that appeared late: a controller may act on an outdated cache."""
    return [Delete(pod.ref, pod.uid) for pod in run.group if pod.attempt < attempt and pod.deleted_at is None]


def _lost_deployment(run: RunSnapshot, in_hand: bool) -> list[Apply]:
    """Recreate a deleted Deployment within the attempt: engines never fail a run."""
    if in_hand or run.spec is None or run.forbidden_fields or not run.has_own_engines or run.deployment is not None:
        return []
    made = render.render_workloads(run.context(run.spec, run.past.attempt)).inference
    return [] if made is None else [Apply(made, expect_absent=True)]


def _edited_budget(run: RunSnapshot, begins: bool) -> list[Apply]:
    """Apply the eviction budget after an edit of `inference`, until the edit is recorded."""
    if begins or run.spec is None or not run.has_own_engines or run.generation == run.past.observed_generation:
        return []
    context = run.context(run.spec, run.past.attempt)
    if not render.has_engines_to_keep(context):
        return []
    return apply_parts(run, [render.eviction_budget(context)])


def _moved_access(run: RunSnapshot, attempt: int, begins: bool) -> list[Apply]:
    """Apply the network policy for the API server's new addresses, so that the orchestrator can renew its Lease."""
    spec, network = run.spec, run.settings.network
    if begins or not network.discovered or spec is None or spec.network_policy.mode == "None":
        return []
    # A pod has the mark of the addresses with which it was made. No write is needed if this pass, or an
    # earlier one, applied the current addresses.
    asking = [pod for pod in run.group if pod.role == "orchestrator" and pod.attempt == attempt]
    known = {(pod.manifest["metadata"].get("annotations") or {}).get(ACCESS_ANNOTATION) for pod in asking}
    if not asking or network.mark in (*known, run.observed.access):
        return []
    return apply_parts(run, [render.orchestrator_policy(run.context(spec, attempt))])


def _missing_prerequisite(run: RunSnapshot, attempt: int, kind: str) -> list[Manifest]:
    if run.past.launched_attempt != attempt or run.spec is None or run.taken is not None:
        return []
    made = render.render_prerequisites(run.context(run.spec, attempt)).create
    return [child for child in made if child["kind"] == kind]
