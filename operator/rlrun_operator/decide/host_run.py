"""Check whether a guest's host can train it, and the reason with a fix if it cannot. Pure; the first match wins."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.api.run_fields import DEFAULT_STORAGE
from rlrun.api.run_status import ATTEMPT_MAX
from rlrun.config.models.run_config import sharing_refusal
from rlrun.runtime.printable import shorten_text
from rlrun_operator.failures.detect import Cause
from rlrun_operator.names import Names, host_mark
from rlrun_operator.render import Host
from rlrun_operator.sharing import holds_slot, host_name, is_ending
from rlrun_operator.state import Manifest
from rlrun_operator.status import failure_reasons, reasons
from rlrun_operator.status.conditions import ConditionUpdate
from rlrun_operator.validate_spec import judge_spec

_TEXT_MAX = 300


def known_host(host: Manifest | None) -> Host | None:
    """Return the host that a guest's children are rendered with, or None without a host with a valid specification."""
    if host is None or is_ending(host) or host_name(host) is not None:
        return None
    metadata, spec = host["metadata"], judge_spec(host).spec
    return Host(str(metadata["name"]), str(metadata["uid"]), spec, _host_attempt(host)) if spec is not None else None


def host_condition(
    guest: Manifest, spec: RLRunSpec, host: Manifest | None, guests: Sequence[Manifest]
) -> ConditionUpdate:
    """Return HostAvailable of a guest.

    Args:
        guest: RLRun of the guest.
        spec: specification of the guest.
        host: RLRun in `trainer.sharedWith`, or None if it does not exist.
        guests: RLRuns of all guests of this host.
    """
    name, field = host_name(guest), f"trainer.sharedWith ({host_name(guest)})"
    # The order is that of repairs by the user: the host exists, is not a guest, is valid, is shared, names
    # this guest, fits. Its state comes last, because it changes by itself.
    if host is None or is_ending(host):
        state = "there is no RLRun of this name in the namespace" if host is None else "that run is being deleted"
        return _host_unavailable(
            reasons.HOST_NOT_FOUND, f"{field}: {state}; create it, or delete this run and name another host"
        )
    if (of := host_name(host)) is not None:
        fix = "name a run with a trainer of its own" if of in (name, _run_name(guest)) else f"name {of}"
        return _host_unavailable(reasons.HOST_IS_GUEST, f"{field}: that run is itself a guest, of {of}; {fix}")
    known = known_host(host)
    if known is None:
        what = shorten_text(judge_spec(host).problems, _TEXT_MAX)
        return _host_unavailable(
            reasons.HOST_NOT_READY, f"{field}: that run's specification is invalid ({what}); correct it"
        )
    if known.spec.trainer.lora is None or known.spec.trainer.lora.slots < 2:
        has = "no trainer.lora" if known.spec.trainer.lora is None else "trainer.lora.slots 1"
        fix = f"give {name} trainer.lora with slots of 2 or more, or name another host"
        return _host_unavailable(
            reasons.HOST_NOT_SHARED, f"{field}: that run has {has}, so its trainer accepts no guests; {fix}"
        )
    if not _is_named(known.spec.trainer.guests, _run_name(guest)):
        listed = ", ".join(known.spec.trainer.guests) or "none"
        fix = f"add {_run_name(guest)} to trainer.guests of {name}, at any time, or name another host"
        return _host_unavailable(
            reasons.HOST_NOT_NAMED, f"{field}: that run takes no guest of this name (trainer.guests: {listed}); {fix}"
        )
    problem = storage_problem(spec, known) or _explain_mismatch(spec, guest, known)
    if problem is not None:
        return _host_unavailable(reasons.HOST_INCOMPATIBLE, problem)
    return _host_state(guest, host, known, guests)


def storage_problem(spec: RLRunSpec, host: Host) -> str | None:
    """Return the difference between the storage of guest and host, or None: a guest uses its host's volume at the host's mount path."""
    own, there = spec.storage, host.spec.storage
    if own == DEFAULT_STORAGE:
        return None
    whose = f"of run {host.name}, whose trainer this run uses; remove storage, or"
    if own.claim_name != host.claim:
        given = f"claimName ({own.claim_name})" if own.claim_name else "claimTemplate"
        return f"storage.{given} is not the claim {whose} set storage.claimName to {host.claim}"
    if own.mount_path not in (DEFAULT_STORAGE.mount_path, there.mount_path):
        return f"storage.mountPath ({own.mount_path}) is not that {whose} set it to {there.mount_path}"
    if own.sub_path not in (None, there.sub_path):
        return f"storage.subPath ({own.sub_path}) is not that {whose} " + (
            f"set it to {there.sub_path}" if there.sub_path else "remove it"
        )
    if own.hub_cache not in (DEFAULT_STORAGE.hub_cache, there.hub_cache):
        return f"storage.hubCache ({own.hub_cache}) is not that {whose} set it to {there.hub_cache}"
    return None


def explain_lost_host(guest: Manifest, host: Manifest | None, mark: str | None) -> Cause | None:
    """Return the cause that ends a guest's attempt because the host's trainer ends or has ended, or None. It does not count.

    Args:
        guest: RLRun of the guest.
        host: RLRun of the host.
        mark: UID and attempt of the host that the attempt was created for (`HOST_ANNOTATION`); None: unknown.
    """
    name = host_name(guest) or ""

    def cause(reason: str, message: str) -> Cause:
        return Cause("disruption", None, "trainer", Names(name).trainer_pod(0), None, None, reason, message)

    if host is None or is_ending(host):
        return cause(failure_reasons.HOST_GONE, f"run {name}, whose trainer this run uses, was deleted")
    phase = _host_status(host).get("phase")
    if phase in ("Complete", "Failed") or _is_freeing_trainer(host):
        return cause(failure_reasons.HOST_GONE, f"run {name}, whose trainer this run uses, is {phase}")
    # The mark shows a restart that began and ended between two passes.
    now = host_mark(str(host["metadata"]["uid"]), _host_attempt(host))
    if phase in ("Suspending", "Suspended", "Queued"):  # the last: its queue has taken its room back
        return cause(reasons.HOST_SUSPENDED, f"run {name}, whose trainer this run uses, was suspended")
    if phase == "Restarting" or (mark is not None and mark != now):
        return cause(failure_reasons.HOST_RESTARTED, f"the trainer of run {name} was restarted")
    return None


def trainer_ready(host: Manifest | None) -> bool:
    """Return whether all pods of the host's trainer are ready, so that it accepts guests."""
    trainer = _host_status(host).get("trainer") or {}
    return 0 < int(trainer.get("desired", 0)) <= int(trainer.get("ready", 0))


def _host_state(guest: Manifest, host: Manifest, known: Host, guests: Sequence[Manifest]) -> ConditionUpdate:
    name, status = known.name, _host_status(host)
    field, phase, joined = f"trainer.sharedWith ({name})", status.get("phase"), holds_slot(guest)
    if phase == "Failed":
        told = shorten_text(str(status.get("message") or ""), _TEXT_MAX)
        fix = f"correct {name}, delete it and create it again; this run then continues from its checkpoint"
        return _host_unavailable(reasons.HOST_FAILED, f"{field}: that run has failed: {told}; {fix}")
    if phase == "Complete" or (phase == "Completing" and (not joined or _is_freeing_trainer(host))):
        fix = f"delete this run and name another host, or give {name} more steps: raise its maxSteps"
        left = {"Complete": "is Complete, its trainer is gone"}
        what = left.get(phase, "has trained all its steps and takes no more runs")
        return _host_unavailable(reasons.HOST_COMPLETE, f"{field}: that run {what}; {fix}")
    if not joined and (full := _slots_taken(guest, known, guests)) is not None:
        return _host_unavailable(
            reasons.HOST_SLOTS_TAKEN, f"{field}: {full}; this run starts when one of them has ended"
        )
    if phase in ("Suspending", "Suspended"):
        return _host_unavailable(
            reasons.HOST_SUSPENDED, f"{field}: that run is suspended; this run continues when it is resumed"
        )
    if phase == "Restarting":
        return _host_unavailable(
            reasons.HOST_RESTARTING, f"{field}: that run restarts; this run continues with its next attempt"
        )
    if not trainer_ready(host):
        trainer = status.get("trainer") or {}
        ready = f"{trainer.get('ready', 0)} of {trainer.get('desired') or known.spec.trainer.replicas}"
        told = shorten_text(str(status.get("message") or "not looked at yet"), _TEXT_MAX)
        what = f"{ready} pods of its trainer are ready; that run is {phase or 'Pending'}: {told}"
        return _host_unavailable(reasons.HOST_NOT_READY, f"{field}: {what}")
    return ConditionUpdate("True", reasons.HOST_READY, f"the trainer of run {name} is ready")


def _slots_taken(guest: Manifest, known: Host, guests: Sequence[Manifest]) -> str | None:
    """Return a message with the holders of the host's slots if all are taken, or None if one is free."""
    others = sorted(
        g["metadata"]["name"] for g in guests if holds_slot(g) and g["metadata"]["name"] != _run_name(guest)
    )
    slots = known.spec.trainer.lora.slots if known.spec.trainer.lora is not None else 1
    if len(others) < slots - 1:
        return None
    return f"all slots are taken (trainer.lora.slots: {slots}): by itself and by {', '.join(others)}"


def _is_named(patterns: Sequence[str], name: str) -> bool:
    return any(name.startswith(p[:-1]) if p.endswith("*") else name == p for p in patterns)


def _explain_mismatch(spec: RLRunSpec, guest: Manifest, host: Host) -> str | None:
    """Return a difference of guest and host that one trainer or one engine cannot support, or None."""
    of, theirs = f"of run {host.name}, whose trainer this run uses", host.spec
    if spec.task != theirs.task:
        return f"task ({spec.task}) must be that {of} ({theirs.task}); name another host"
    longest = theirs.inference.max_model_len or theirs.seq_len
    if spec.task == "RL" and spec.seq_len > longest:
        return f"seqLen ({spec.seq_len}) is more than the engines {of} take ({longest}); lower it, or raise the host's"
    own = resolve_spec(spec, name=_run_name(guest), uid="-", output_dir="-").trainer
    return sharing_refusal(resolve_spec(theirs, name=host.name, uid=host.uid, output_dir="-").trainer, own)


def _is_freeing_trainer(host: Manifest) -> bool:
    """Return whether the host's trainer is being removed, so that no guest can continue."""
    return (_host_status(host).get("phase"), _host_status(host).get("reason")) == ("Completing", reasons.COMPLETING)


def _host_status(run: Manifest | None) -> Manifest:
    return (run or {}).get("status") or {}


def _host_attempt(host: Manifest) -> int:
    found = _host_status(host).get("attempt")
    return found if isinstance(found, int) and 0 < found <= ATTEMPT_MAX else 0


def _run_name(run: Manifest) -> str:
    return str(run["metadata"]["name"])


def _host_unavailable(reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate("False", reason, message)
