"""Snapshot of one run: the objects that belong to it, its valid specification, and its wanted pods. Each fact is read once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_status import RLRunStatus
from rlrun.runtime.printable import bound_message
from rlrun_operator.decide import host_run
from rlrun_operator.decide.reading import JudgedRun, is_ending
from rlrun_operator.failures import node_failures
from rlrun_operator.names import (
    HOST_ANNOTATION,
    RUN_LABEL,
    USE_NODES_ANNOTATION,
    Ref,
    attempt_of,
    is_made_for,
    key_attempt_of,
)
from rlrun_operator.pods import Pod, read_pods
from rlrun_operator.render import Host, RunContext
from rlrun_operator.restrictions import find_refusals, refused_claim
from rlrun_operator.settings import RenderSettings
from rlrun_operator.sharing import holds_slot
from rlrun_operator.state import Manifest
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import ConditionUpdate, is_true
from rlrun_operator.status.wait_facts import Wanted
from rlrun_operator.times import seconds_of


@dataclass(frozen=True)
class RunSnapshot(JudgedRun):
    """Run, observed objects and settings that a decision reads."""

    now: float
    """Seconds since the epoch."""
    settings: RenderSettings
    fresh_key: str
    random: float
    beginning: bool = False
    """Whether an attempt of the current specification starts in this pass."""

    def for_new_attempt(self) -> RunSnapshot:
        """Return the snapshot of a pass that starts an attempt of the current specification; facts that were read stay."""
        run = replace(self, beginning=True)
        run.__dict__.update({name: found for name, found in self.__dict__.items() if name in _OF_ANY_PASS})
        return run

    @cached_property
    def past(self) -> RLRunStatus:
        """Last written status, without exclusions of nodes that an annotation ends."""
        asked = (self.metadata.get("annotations") or {}).get(USE_NODES_ANNOTATION)
        return node_failures.lift_older_exclusions(super().past, None if asked is None else str(asked), self.now)

    @cached_property
    def forbidden_fields(self) -> str:
        """Fields of a valid specification that the installation's policy forbids; no attempt is rendered with them."""
        if self.spec is None:
            return ""
        installation = self.settings.installation
        found = find_refusals(
            installation, str(self.metadata.get("namespace", "")), self.names.run, self.observed.run.get("spec") or {}
        )
        found += [*self.applied.refusals, *filter(None, (self.unfit_defaults,))]
        if self.host is not None:  # a policy may have become stricter since the host began
            found += refused_claim(installation.policy, "trainer.sharedWith: its claim", self.host.claim)
        return bound_message(found)

    @cached_property
    def taken(self) -> str | None:
        """Foreign object that has the name of a child."""
        if self.wanted.own_claim and self.claim is not None and not self.is_made_for_run(self.claim):
            return f"PersistentVolumeClaim {self.wanted.claim}"
        refs = [self.trainer_ref, self.inference_ref, *((self.spot_ref,) if self.has_spot else ())]
        named = [(ref, self.observed.children.get(ref)) for ref in refs]
        named.append((Ref("Lease", self.names.progress), self.observed.lease))
        for ref, child in named:
            if child is not None and not self.is_made_for_run(child):
                return f"{ref.kind} {ref.name}"
        return self.observed.taken

    def is_made_for_run(self, child: Manifest) -> bool:
        """Return whether a run of this name made the object: this run or an earlier one."""
        if child["kind"] == "PersistentVolumeClaim":
            return (child["metadata"].get("labels") or {}).get(RUN_LABEL) == self.names.run
        return is_made_for(child["metadata"], self.names.run)

    def context(self, spec: RLRunSpec, attempt: int) -> RunContext:
        """Return the input of the builders of manifests."""
        known = self.judgement.spec_hash if spec is self.judgement.spec else None
        size = self.trainers_of(spec, attempt)
        if size != spec.trainer.replicas:  # every reader of `replicas` reads the attempt's
            spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"replicas": size})})
        return RunContext(
            name=self.names.run,
            namespace=str(self.metadata.get("namespace", "default")),
            uid=str(self.metadata["uid"]),
            spec=spec,
            attempt=attempt,
            settings=self.settings,
            host=self.host,
            key_attempt=self.key_attempt,
            known_hash=known,
            engine_count=self.wanted.engines if self.is_autoscaled else None,
            excluded=tuple(node.name for node in node_failures.active_exclusions(self.past, self.now)),
            placed=self.observed.admission.placed if self.observed.admission is not None else {},
        )

    @cached_property
    def host(self) -> Host | None:
        """Host from which a guest's children are rendered."""
        return host_run.known_host(self.observed.host) if self.host_name is not None else None

    @cached_property
    def host_available(self) -> ConditionUpdate | None:
        """HostAvailable; only guests have this condition."""
        if self.host_name is None or self.spec is None:
            return None
        return host_run.host_condition(self.observed.run, self.spec, self.observed.host, self.observed.guests)

    @cached_property
    def joined_guests(self) -> list[str]:
        """Guests that use this run's trainer and engines."""
        if self.host_name is not None:
            return []
        return sorted(str(guest["metadata"]["name"]) for guest in self.observed.guests if holds_slot(guest))

    def host_mark(self, attempt: int) -> str | None:
        """Attempt of the host for which the guest's `attempt` was created."""
        pod = self.orchestrator(attempt)
        found = (pod.manifest["metadata"].get("annotations") or {}).get(HOST_ANNOTATION) if pod is not None else None
        return str(found) if found is not None else None

    @cached_property
    def _own_and_foreign_pods(self) -> tuple[list[Pod], list[Pod]]:
        return self._read_pods(self.observed.pods)

    def _read_pods(self, pods: Iterable[Manifest]) -> tuple[list[Pod], list[Pod]]:
        born = seconds_of(self.metadata.get("creationTimestamp")) or 0.0
        return read_pods(pods, uid=str(self.metadata["uid"]), born_after=born)

    @property
    def pods(self) -> list[Pod]:
        """Pods of this run."""
        return self._own_and_foreign_pods[0]

    def pods_of_attempt(self, attempt: int) -> list[Pod]:
        """Return the pods of `attempt` that are not being deleted; engines outlive attempts."""
        return [p for p in self.pods if p.deleted_at is None and (p.role == "inference" or p.attempt == attempt)]

    def is_needed(self, pod: Pod) -> bool:
        """Return False for a spot engine if there are ordinary engines: its failure ends no attempt."""
        return not pod.spot or self.wanted.engines == self.wanted.spot

    def needed_pods(self, attempt: int) -> list[Pod]:
        """Return the pods of `attempt` that it needs to continue."""
        return [pod for pod in self.pods_of_attempt(attempt) if self.is_needed(pod)]

    @cached_property
    def gone(self) -> list[Pod]:
        """Trainer and orchestrator pods of this run that were observed and no longer exist."""
        return [pod for pod in self._read_pods(self.observed.gone)[0] if not pod.spot]

    @property
    def gone_spot(self) -> list[Pod]:
        """Latest spot engines that were observed and no longer exist."""
        return [pod for pod in self._read_pods(self.observed.gone)[0] if pod.spot]

    @cached_property
    def group(self) -> list[Pod]:
        """Trainer and orchestrator pods of all attempts, including terminating ones: they must be gone before the next attempt starts."""
        return [pod for pod in self.pods if pod.role != "inference"]

    def orchestrator(self, attempt: int) -> Pod | None:
        return next((pod for pod in self.pods if pod.name == self.names.orchestrator(attempt)), None)

    @cached_property
    def statefulset(self) -> Manifest | None:
        return self._own_child(self.trainer_ref)

    @cached_property
    def deployment(self) -> Manifest | None:
        return self._own_child(self.inference_ref)

    @cached_property
    def trainer_ref(self) -> Ref:
        return Ref("StatefulSet", self.names.trainer)

    @cached_property
    def inference_ref(self) -> Ref:
        return Ref("Deployment", self.names.inference)

    @cached_property
    def spot_deployment(self) -> Manifest | None:
        """Deployment of the engines on interruptible nodes."""
        return self._own_child(self.spot_ref)

    @cached_property
    def spot_ref(self) -> Ref:
        return Ref("Deployment", self.names.spot)

    @property
    def engine_deployments(self) -> list[tuple[Ref, Manifest]]:
        """Existing Deployments of engines."""
        found = ((self.inference_ref, self.deployment), (self.spot_ref, self.spot_deployment))
        return [(ref, child) for ref, child in found if child is not None]

    @property
    def has_spot(self) -> bool:
        """Whether the specification has engines on interruptible nodes."""
        return self.has_own_engines and self.spec is not None and self.spec.inference.spot is not None

    @cached_property
    def leftover_objects(self) -> list[str]:
        """Objects with names of this run that belong to a deleted run of the same name and are being deleted."""
        named = [(ref, self.observed.children.get(ref)) for ref in (self.trainer_ref, self.inference_ref)]
        named.append((Ref("Lease", self.names.progress), self.observed.lease))
        spot = self.observed.children.get(self.spot_ref)  # a foreign one concerns only a run that wants the name
        if spot is not None and self.is_made_for_run(spot):
            named.append((self.spot_ref, spot))
        found = [f"{ref.kind} {ref.name}" for ref, child in named if child is not None and not self._is_own(child)]
        if self.claim_is_ending and not self.attempt:
            found.append(f"PersistentVolumeClaim {self.wanted.claim}")
        return found + [f"Pod {pod.name}" for pod in self._own_and_foreign_pods[1]]

    @cached_property
    def attempt(self) -> int:
        """Number of the newest attempt with a child or a record: children are created before the status is written."""
        workloads = [child for child in (self.statefulset, self.deployment) if child is not None]
        labelled = [attempt_of(child["metadata"]) or 0 for child in workloads]
        return max([self.past.attempt, *labelled, *(pod.attempt for pod in self.group)])

    @cached_property
    def key_attempt(self) -> int:
        """Attempt that the run's API key was created for; 0: the first key. A number above `past.attempt`: the next attempt creates it.

        It never decreases, even after a loss of the status: an earlier key may have been rotated because it was leaked.
        """
        orchestrators = [pod.manifest for pod in self.group if pod.role == "orchestrator"]
        children = [child for child in (self.statefulset, self.deployment, *orchestrators) if child is not None]
        return max([0, self.past.key_attempt or 0, *(key_attempt_of(child["metadata"]) for child in children)])

    @cached_property
    def wanted(self) -> Wanted:
        """Wanted pods. Fields that only a new attempt changes, or of an invalid specification, are read from running objects."""
        spec = self.spec
        if self.host_name is not None:
            before = self.past.storage.claim_name if self.past.storage is not None else self.names.claim
            claim = self.host.claim if self.host is not None else before
            return Wanted(trainers=0, engines=0, engines_needed=0, claim=claim, own_claim=False)
        if spec is not None:
            engines = self._engine_count(spec) if self.has_own_engines else 0
            own = spec.storage.claim_name is None
            # An edited number of trainers applies to the next attempt. The number of engines applies at once,
            # because engines may come and go in an attempt.
            running = self.past.launched_attempt == self.past.attempt > 0 and not self.beginning
            edited = running and self.spec_hash != self.past.spec_hash
            return Wanted(
                trainers=((self.past.trainer.desired if edited else 0) or self._trainer_count(spec))
                if self.is_training_run
                else 0,
                engines=engines,
                spot=spec.inference.on_spot(engines) if self.has_own_engines else 0,
                engines_needed=min(spec.inference.min_available, spec.inference.min_replicas)
                if self.has_own_engines
                else 0,
                claim=spec.storage.claim_name or self.names.claim,
                own_claim=own,
            )
        storage = self.past.storage
        return Wanted(
            trainers=self.past.trainer.desired,
            engines=self.past.inference.desired,
            spot=self.past.inference.spot.desired if self.past.inference.spot is not None else 0,
            engines_needed=1,
            claim=storage.claim_name if storage else self.names.claim,
            own_claim=storage is None or storage.claim_name == self.names.claim,
        )

    def _trainer_count(self, spec: RLRunSpec) -> int:
        """Number of trainer pods of the current attempt, or of the next one."""
        past = self.past
        over = any(is_true(past.conditions, kind) for kind in (reasons.RESTARTING, reasons.SUSPENDED))
        under_way = not over and self.attempt == past.attempt
        return self.trainers_of(spec, past.attempt if under_way else past.attempt + 1)

    def trainers_of(self, spec: RLRunSpec, attempt: int) -> int:
        """Return the number of trainer pods of `attempt`: the recorded one while an elastic trainer has fewer than `replicas`."""
        size, whole = self.past.trainer.size, spec.trainer.replicas
        if size is None or attempt <= self.past.attempt:
            return size or whole
        found = spec.trainer.sizes  # the specification may have been edited
        return found.at_most(size) or min(found.allowed)

    def _engine_count(self, spec: RLRunSpec) -> int:
        """Return the number of engines: the specified one, or the choice of autoscaling within the current bounds."""
        block = spec.inference
        return (
            block.replicas
            if block.autoscale is None
            else min(max(self.past.inference.desired, block.min_replicas), block.max_replicas)
        )

    @property
    def is_autoscaled(self) -> bool:
        """Whether the operator chooses the number of engines."""
        return self.has_own_engines and self.spec is not None and self.spec.inference.autoscale is not None

    @property
    def claim_is_ending(self) -> bool:
        """Whether the run's own claim is being deleted. It exists until no scheduled pod uses it, and accepts no new pod."""
        return self.wanted.own_claim and self.claim is not None and is_ending(self.claim)

    @property
    def claim(self) -> Manifest | None:
        return self.observed.children.get(Ref("PersistentVolumeClaim", self.wanted.claim))

    def _own_child(self, ref: Ref) -> Manifest | None:
        child = self.observed.children.get(ref)
        return child if child is not None and self._is_own(child) else None

    def _is_own(self, child: Manifest) -> bool:
        owners = child["metadata"].get("ownerReferences") or ()
        return any(owner.get("uid") == self.metadata["uid"] for owner in owners)


_OF_ANY_PASS = frozenset(
    ("applied", "past", "judgement", "metadata", "names", "_pods", "group", "host", "host_available")
)
"""Expensive properties that do not depend on whether an attempt starts, as `wanted` and its derivatives do."""
