"""In-memory Kubernetes with enough of its API and controllers to run `decide` through the life of a run. Time passes only in `tick`.
The operator's view may lag (`lag`), and a decision may stop after some requests (`do(..., stop_after)`), like an operator that is
killed between two requests."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

from rlrun.protocol.messages import lease_annotations as keys
from rlrun_operator.decide.engine_count import DELETION_COST
from rlrun_operator.decide.state_machine import decide
from rlrun_operator.kube.resources import PART_KINDS
from rlrun_operator.names import ATTEMPT_LABEL, ROLE_LABEL, SPOT_LABEL, Ref, attempt_of
from rlrun_operator.pods import remember_deletion
from rlrun_operator.runtime.cache_fields import Pulse, record_beat, slim_object
from rlrun_operator.settings import RenderSettings
from rlrun_operator.state import Admission, Annotate, Decision, Disown, Grow, Observed, Refusal, TeamDefaults
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decisions import TypedDecision, typed_decision

NAME, UID = "run", "uid-of-run"
EPOCH = 1_700_000_000.0
GRACE_SECONDS = 30
SMALLEST: dict[str, Any] = {"model": {"path": "/models/a"}, "environments": [{"id": "reverse-text"}]}
MAX_PASSES = 30
Object = dict[str, Any]


def copy_documents(documents: Any) -> Any:
    """Deep copy by pickle, several times as fast as `copy.deepcopy`, which dominates the time of a simulation."""
    return pickle.loads(pickle.dumps(documents, pickle.HIGHEST_PROTOCOL))


def container_state(pod: Object) -> Object:
    """State of a pod's first container."""
    found: Object = (pod["status"].get("containerStatuses") or [{}])[0].get("state", {})
    return found


class Kube:
    """One RLRun in its namespace.

    Args:
        spec: blocks added to the minimal specification, camelCase.
        name: name of the run.
        uid: UID of the run.
    """

    def __init__(self, spec: dict[str, Any] | None = None, *, name: str = NAME, uid: str = UID) -> None:
        self.now = EPOCH
        self._uids = 0
        self.run: Object = {
            "apiVersion": "rlrun.io/v1alpha1",
            "kind": "RLRun",
            "metadata": {
                "name": name,
                "namespace": "team-a",
                "uid": uid,
                "generation": 1,
                "creationTimestamp": format_rfc3339(EPOCH),
            },
            "spec": SMALLEST | (spec or {}),
        }
        self.objects: dict[Ref, Object] = {}
        self._seen: dict[str, dict[Ref, Object]] = {"workloads": {}, "pods": {}, "lease": {}}
        self._met: dict[str, Object] = {}
        """Pods that the operator has seen since it started, by UID."""
        self._views: dict[Ref, Object] = {}
        """Objects that the controllers saw in their last round."""
        self.lease_changed_at: float | None = None
        self.lease_moved_at: float | None = None
        self.watching_since: float | None = EPOCH
        self.events: list[Object] = []
        self.nodes: list[Object] | None = None
        self.rejection: str | None = None
        self.refused: tuple[Refusal, ...] = ()
        """Refused writes."""
        self.admission: Admission | None = None
        """Answer of the queue, or None without a queue."""
        self.defaults: TeamDefaults | None = None
        """Defaults of the namespace."""
        self.taken: str | None = None
        self.edited: set[Ref] = set()
        """Parts that a user has edited."""
        self.repaired_at = float("-inf")
        self.ungrown: Refusal | None = None
        self.refuses_growth = ""
        """Message with which the API server refuses to grow claims."""
        self.lost_key: str | None = None
        """Secret that the operator has found deleted."""
        self.asked: list[str] = []
        """Secrets whose existence the operator has checked."""
        self.host: Kube | None = None
        """Host in `trainer.sharedWith`, or None."""
        self.guests: list[Kube] = []
        """Guests of this run, or of the host of a guest."""
        self.told: list[tuple[str, str]] = []
        """Type and reason of every posted event."""
        self.messages: list[str] = []
        self.writes: list[str] = []
        """Requests that changed an object."""
        self.applied: list[tuple[str, int]] = []
        """Kind and attempt of every applied StatefulSet and Pod."""
        self.rendered_again: list[Ref] = []
        """Applied objects that existed already in the same attempt."""
        self.bind_claims = self.schedule = self.make_ready = True
        self.place: Callable[[Object], str | None] = lambda pod: "node-1"
        """Scheduler: node of a pod, or None."""
        self.lingering: set[str] = set()
        """Roles whose deleted pods do not end, because of a dead node or during a grace period."""
        self.random = 0.5
        self.settings = RenderSettings()

    # ---- requests and view of the operator

    def edit(self, **blocks: Any) -> None:
        """Edit the specification as a user would."""
        self.run["spec"] = copy_documents(self.run["spec"]) | blocks
        self.run["metadata"]["generation"] += 1

    @property
    def status(self) -> Object:
        return self.run.get("status") or {}

    def condition(self, kind: str) -> Object:
        found: Object = next((c for c in self.status.get("conditions", ()) if c["type"] == kind), {})
        return found

    def look(self, lag: frozenset[str] = frozenset()) -> Observed:
        """Return the operator's view; the parts in `lag` (workloads, pods, lease) are those of the previous look."""
        fresh = copy_documents(self.objects)
        kinds = {
            "workloads": ("StatefulSet", "Deployment", "PersistentVolumeClaim"),
            "pods": ("Pod",),
            "lease": ("Lease",),
        }
        for part, names in kinds.items():
            if part not in lag:
                self._seen[part] = {ref: o for ref, o in fresh.items() if ref.kind in names}
                if part == "pods":
                    self._seen[part] = {ref: self._met_again(pod) for ref, pod in self._seen[part].items()}
        return Observed(
            run=copy_documents(self.run),
            children=self._seen["workloads"] | self._claims_of_host(),
            pods=tuple(self._seen["pods"].values()),
            gone=self._gone(),
            lease=next(iter(self._seen["lease"].values()), None),
            lease_changed_at=self.lease_changed_at,
            lease_moved_at=self.lease_moved_at,
            watching_since=self.watching_since,
            events=tuple(self.events),
            nodes=tuple(self.nodes) if self.nodes is not None else None,
            refusals=self._refusals(),
            defaults=self.defaults,
            parts={ref: self._held(o) for ref, o in fresh.items() if ref.kind in PART_KINDS},
            repaired_ago=self.now - self.repaired_at,
            admission=self.admission,
            host=copy_documents(self.host.run) if self.host is not None else None,
            guests=tuple(copy_documents(guest.run) for guest in self.guests),
        )

    def _refusals(self) -> tuple[Refusal, ...]:
        found = [*self.refused, *([] if self.ungrown is None else [self.ungrown])]
        if self.rejection is not None:
            found.append(Refusal(Ref("Pod", "run-orchestrator-1"), self.rejection, kind="invalid"))
        if self.taken is not None:
            found.append(Refusal(Ref(*self.taken.split(" ")), "", kind="name-taken"))
        if self.lost_key is not None:
            found.append(Refusal(Ref("Secret", self.lost_key), "", kind="key-lost"))
        return tuple(found)

    def _held(self, part: Object) -> Object:
        """Part as the store keeps it: its metadata, and whether the operator still holds the applied fields."""
        edited = Ref(part["kind"], part["metadata"]["name"]) in self.edited
        metadata = {"resourceVersion": "1", **part["metadata"]}
        return {"kind": part["kind"], "metadata": metadata, "held": "{}" if edited else "all", "accepted": "all"}

    def _met_again(self, pod: Object) -> Object:
        """Pod as the store keeps it."""
        uid = str(pod["metadata"]["uid"])
        self._met[uid] = dict(remember_deletion(slim_object(pod), self._met.get(uid)))
        return self._met[uid]

    def _gone(self) -> tuple[Object, ...]:
        there = {pod["metadata"]["uid"] for pod in self._seen["pods"].values()}
        lost = [
            pod
            for uid, pod in self._met.items()
            if uid not in there and pod["metadata"]["labels"][ROLE_LABEL] != "inference"
        ]
        newest = max((attempt_of(pod["metadata"]) or 0 for pod in lost), default=0)
        spot = [pod for uid, pod in self._met.items() if uid not in there and SPOT_LABEL in pod["metadata"]["labels"]]
        return (*(pod for pod in lost if attempt_of(pod["metadata"]) == newest), *spot)

    def new_operator(self) -> None:
        """Replace the operator process; the new one fills its caches before it acts."""
        self._met.clear()
        self.look()

    def _claims_of_host(self) -> dict[Ref, Object]:
        objects = self.host.objects if self.host is not None else {}
        return {ref: copy_documents(found) for ref, found in objects.items() if ref.kind == "PersistentVolumeClaim"}

    def decide(self, lag: frozenset[str] = frozenset()) -> TypedDecision:
        decision = decide(self.look(lag), self.now, settings=self.settings, fresh_key="k" * 32, random=self.random)
        return typed_decision(decision)

    def do(self, plan: Decision, stop_after: int | None = None) -> bool:
        """Execute a decision, at most `stop_after` requests. Returns whether anything changed."""
        decision = typed_decision(plan)
        if decision.ask is not None and self._is_lost(decision.ask):
            return True
        before = len(self.writes)
        for count, request in enumerate(self._requests(decision)):
            if stop_after is not None and count >= stop_after:
                break
            try:
                request()
            except KeyError:  # 404: the rest of the decision is dropped, and the queue retries the run
                break
        return len(self.writes) > before

    def _requests(self, decision: TypedDecision) -> Iterator[Any]:
        if decision.grow is not None:
            yield lambda grow=decision.grow: self._grow(grow)
        for child in decision.create:
            yield lambda child=child: self._create(child)
        for apply in decision.apply:
            yield lambda apply=apply: self._apply(apply.manifest, apply.expect_absent)
        for annotate in decision.annotate:
            yield lambda annotate=annotate: self._annotate(annotate)
        for scale in decision.scale:
            yield lambda scale=scale: self._scale(scale.ref, scale.uid, scale.replicas)
        for delete in decision.delete:
            yield lambda delete=delete: self._delete(delete.ref, delete.uid, delete.grace_seconds)
        if decision.disown is not None:
            yield lambda disown=decision.disown: self._disown(disown)
        for part in decision.repair:
            yield lambda part=part: self._repair(part.manifest)
        yield lambda: self._write_status(decision)

    def _is_lost(self, secret: Any) -> bool:
        """Return whether a dry-run create of the Secret succeeds, which means that it is lost. The operator then decides again and
        writes nothing else."""
        name = secret["metadata"]["name"]
        self.asked.append(name)
        if Ref("Secret", name) in self.objects:
            return False
        self.lost_key = name
        return True

    def settle(self) -> None:
        """Decide, act and run the controllers until nothing changes, without passing time."""
        for _ in range(MAX_PASSES):
            acted = self.do(self.decide())
            moved = self.controllers()
            if not acted and not moved:
                return
        raise AssertionError(f"no rest after {MAX_PASSES} passes; last writes: {self.writes[-10:]}")

    def tick(self, seconds: float = 1.0) -> None:
        """Pass time, then settle."""
        self.now += seconds
        self.settle()

    # ---- requests

    def _create(self, child: Any) -> None:
        ref = Ref(child["kind"], child["metadata"]["name"])
        if ref not in self.objects:
            self._put(ref, child)

    def _apply(self, child: Any, expect_absent: bool) -> None:
        ref = Ref(child["kind"], child["metadata"]["name"])
        old = self.objects.get(ref)
        if old is not None and expect_absent:
            return
        if (
            old is not None
            and ref.kind in ("StatefulSet", "Pod")
            and attempt_of(old["metadata"]) == attempt_of(child["metadata"])
        ):
            self.rendered_again.append(ref)
        if ref.kind in ("StatefulSet", "Pod"):
            self.applied.append((ref.kind, attempt_of(child["metadata"]) or 0))
        if old is None:
            self._put(ref, child)
        elif any(old.get(k) != child[k] for k in child if k != "metadata") or any(
            old["metadata"].get(k) != v for k, v in child["metadata"].items()
        ):
            old["metadata"] |= copy_documents(dict(child["metadata"]))
            old |= copy_documents({k: v for k, v in child.items() if k not in ("metadata", "status")})
            old["metadata"]["generation"] += 1
            self.writes.append(f"apply {ref.kind} {ref.name}")

    def _repair(self, part: Any) -> None:
        self.repaired_at = self.now
        self.edited.discard(Ref(part["kind"], part["metadata"]["name"]))
        self._apply(part, False)

    def _put(self, ref: Ref, child: Any) -> None:
        self._uids += 1
        new = {"kind": ref.kind, **copy_documents(dict(child))}
        new["metadata"] |= {"uid": f"uid-{self._uids}", "generation": 1, "creationTimestamp": format_rfc3339(self.now)}
        if ref.kind in ("Pod", "PersistentVolumeClaim"):
            new["status"] = {"phase": "Pending"}
        if ref.kind == "Lease":  # as the store converts it
            self.lease_changed_at = self.lease_moved_at = self.now
        self.objects[ref] = new
        self.writes.append(f"create {ref.kind} {ref.name}")

    def _grow(self, grow: Grow) -> None:
        claim = self.objects[Ref("PersistentVolumeClaim", grow.claim)]
        if claim["metadata"]["uid"] != grow.uid:
            raise KeyError(grow)
        if self.refuses_growth:
            ref = Ref("PersistentVolumeClaim", grow.claim)
            self.ungrown = Refusal(ref, self.refuses_growth, kind="not-grown", grow=grow)
            return
        claim["spec"]["resources"]["requests"]["storage"] = grow.size
        self.writes.append(f"grow {grow.claim} {grow.size}")

    def _annotate(self, annotate: Annotate) -> None:
        found = self.objects.get(annotate.ref)
        if found is not None and found["metadata"]["uid"] == annotate.uid:
            found["metadata"].setdefault("annotations", {}).update(annotate.annotations)
            self.writes.append(f"annotate {annotate.ref.kind} {annotate.ref.name}")

    def _scale(self, ref: Ref, uid: str, replicas: int) -> None:
        if self.objects[ref]["metadata"]["uid"] != uid:
            raise KeyError(ref)  # 422, which also leads to another pass
        self.objects[ref]["spec"]["replicas"] = replicas
        self.objects[ref]["metadata"]["generation"] += 1
        self.writes.append(f"scale {ref.kind} {ref.name} {replicas}")

    def _delete(self, ref: Ref, uid: str, grace_seconds: int | None = None) -> None:
        found = self.objects.get(ref)
        meta = found["metadata"] if found is not None else {}
        if found is not None and meta["uid"] == uid and grace_seconds == 0:
            del self.objects[ref]
            self.writes.append(f"force {ref.kind} {ref.name}")
        elif grace_seconds is not None and grace_seconds < meta.get("deletionGracePeriodSeconds", 0):
            self.shorten(meta, grace_seconds)
            self.writes.append(f"delete {ref.kind} {ref.name} within {grace_seconds} s")
        elif found is not None and found["metadata"]["uid"] == uid and "deletionTimestamp" not in found["metadata"]:
            self.delete(ref)
            self.writes.append(f"delete {ref.kind} {ref.name}")

    def shorten(self, meta: Object, grace_seconds: int) -> None:
        """Overwrite the deletion time, as a later request with a shorter grace period does."""
        ends = format_rfc3339(self.now + grace_seconds)
        meta |= {"deletionTimestamp": ends, "deletionGracePeriodSeconds": grace_seconds}

    def last_words(self, role: str, index: int = 0, code: int = 143) -> None:
        """End a pod that is being deleted; it remains visible while its kubelet requests the final removal."""
        pod = self.pod(role, index)
        self.exit(role, code, index)
        self.now += 1
        self.shorten(pod["metadata"], 0)

    def _disown(self, disown: Disown) -> None:
        claim = self.objects[Ref("PersistentVolumeClaim", disown.claim)]
        if claim["metadata"]["uid"] != disown.uid:
            raise KeyError(disown)
        claim["metadata"]["ownerReferences"] = list(disown.owners)
        self.writes.append(f"disown {disown.claim}")

    def _write_status(self, decision: Decision) -> None:
        if dict(decision.status) != self.status:
            self.run["status"] = copy_documents(dict(decision.status))
            self.writes.append("status")
            self.told += [(e.type, e.reason) for e in decision.events]
            self.messages += [e.message for e in decision.events]

    # ---- other clients and controllers

    def delete(self, ref: Ref) -> None:
        """Delete an object as a user would: workloads vanish with their pods, pods after a grace period."""
        if ref.kind == "Pod":
            meta = self.objects[ref]["metadata"]
            meta.setdefault("deletionTimestamp", format_rfc3339(self.now + GRACE_SECONDS))
            meta.setdefault("deletionGracePeriodSeconds", GRACE_SECONDS)
            return
        uid = self.objects.pop(ref)["metadata"]["uid"]
        for child, found in list(self.objects.items()):
            if any(o["uid"] == uid for o in found["metadata"].get("ownerReferences", ())):
                self.delete(child)

    def pods(self, role: str) -> list[Object]:
        found = [
            o for r, o in self.objects.items() if r.kind == "Pod" and o["metadata"]["labels"].get(ROLE_LABEL) == role
        ]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def pod(self, role: str, index: int = 0) -> Object:
        return self.pods(role)[index]

    def uid(self, ref: Ref) -> str:
        return str(self.objects[ref]["metadata"]["uid"])

    def ref(self, role: str, index: int = 0) -> Ref:
        return Ref("Pod", self.pod(role, index)["metadata"]["name"])

    def controllers(self, stale: bool = False) -> bool:
        """Run StatefulSet and Deployment controllers, binder, scheduler and kubelet for one round. Returns whether anything changed.
        `stale`: the first two act on their view of the previous round."""
        before = copy_documents(self.objects)
        for ref, child in list(self.objects.items()):
            if ref.kind in ("StatefulSet", "Deployment"):
                known = self._views.get(ref)
                view = (
                    known
                    if stale and known is not None and known["metadata"]["uid"] == child["metadata"]["uid"]
                    else child
                )
                self._views[ref] = copy_documents(view)
                child["status"] = self._reconcile(ref, view)
            elif ref.kind == "PersistentVolumeClaim" and self.bind_claims:
                capacity = dict(child["spec"].get("resources", {}).get("requests", {}))
                child["status"] = {"capacity": capacity} | child.get("status", {}) | {"phase": "Bound"}
                child["spec"]["volumeName"] = "pv-1"
        for ref, pod in list(self.objects.items()):
            if ref.kind == "Pod":
                self._kubelet(ref, pod)
        return self.objects != before

    def _cheapest_gone(self, pods: list[Ref], names: list[str]) -> list[str]:
        """Names of the remaining pods: the Deployment controller removes pods with the lowest deletion cost first."""
        costs = {p: (self.objects[p]["metadata"].get("annotations") or {}).get(DELETION_COST) for p in pods}
        if len(pods) != len(names) and not any(costs.values()):
            return names
        kept = [pod.name for pod in sorted(pods, key=lambda pod: -int(costs[pod] or 0))[: len(names)]]
        return kept + [name for name in names if name not in kept][: len(names) - len(kept)]

    def _reconcile(self, ref: Ref, owner: Object) -> Object:
        names = [f"{ref.name}-{i}" for i in range(owner["spec"]["replicas"])]
        mine = [
            r
            for r, o in self.objects.items()
            if r.kind == "Pod"
            and any(x["uid"] == owner["metadata"]["uid"] for x in o["metadata"].get("ownerReferences", ()))
        ]
        names = self._cheapest_gone(mine, names) if ref.kind == "Deployment" else names
        parts = ("containers", "nodeSelector", "tolerations")
        rendered = [owner["spec"]["template"]["spec"].get(part) for part in parts]
        for pod in mine:
            old = ref.kind == "Deployment" and [self.objects[pod]["spec"].get(part) for part in parts] != rendered
            if pod.name not in names or old:
                self.delete(pod)
        for name in names:
            if Ref("Pod", name) not in self.objects:
                made = copy_documents(owner["spec"]["template"])
                made["metadata"] |= {
                    "name": name,
                    "ownerReferences": [{"kind": ref.kind, "uid": owner["metadata"]["uid"]}],
                }
                self._put(Ref("Pod", name), made)
                self.writes.pop()
        return {"observedGeneration": owner["metadata"]["generation"], "replicas": len(mine)}

    def _kubelet(self, ref: Ref, pod: Object) -> None:
        status = pod["status"]
        if "deletionTimestamp" in pod["metadata"]:
            if pod["metadata"]["labels"][ROLE_LABEL] not in self.lingering:
                del self.objects[ref]
        elif status["phase"] in ("Failed", "Succeeded") or not self.schedule:
            return
        elif "nodeName" not in pod["spec"]:
            if (node := self.place(pod)) is not None:
                pod["spec"]["nodeName"] = node
            else:
                said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
                status["conditions"] = [said]
        elif "running" not in container_state(pod) and not container_state(pod).get("terminated") and self.make_ready:
            role = pod["metadata"]["labels"][ROLE_LABEL]
            if (lacks := self._lost_secret(pod)) is not None:
                waits = {"reason": "CreateContainerConfigError", "message": f'secret "{lacks}" not found'}
                status["containerStatuses"] = [
                    {"name": role, "ready": False, "restartCount": 0, "state": {"waiting": waits}}
                ]
                return
            status |= {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            status["containerStatuses"] = [{"name": role, "ready": True, "restartCount": 0, "state": {"running": {}}}]

    def _lost_secret(self, pod: Object) -> str | None:
        """Return the name of a missing Secret whose key a container needs."""
        sources = [env.get("valueFrom", {}).get("secretKeyRef") for c in pod["spec"]["containers"] for env in c["env"]]
        names = [source["name"] for source in sources if source is not None]
        return next((name for name in names if Ref("Secret", name) not in self.objects), None)

    def report(self, step: int | None, attempt: int | None = None, resumed: int | None = None, **more: object) -> None:
        """Renew the Lease as the orchestrator does."""
        said = {keys.ATTEMPT: attempt or self.status["attempt"], keys.STEP: step, keys.RESUMED_FROM_STEP: resumed}
        said |= {f"rlrun.io/{k.replace('_', '-')}": v for k, v in more.items()}
        lease = self.objects[Ref("Lease", f"{self.run['metadata']['name']}-progress")]
        known = copy_documents(lease)
        asked = (keys.ENGINES_WANTED, keys.ENGINES_WINDOW, keys.ENGINES_SPOT)  # a merge patch keeps these keys
        said |= {key: (lease["metadata"].get("annotations") or {}).get(key) for key in asked}
        lease["metadata"]["annotations"] = {k: str(v) for k, v in said.items() if v is not None}
        lease["spec"] = {"renewTime": format_rfc3339(self.now), "holderIdentity": str(len(self.writes))}
        before = None
        if self.lease_changed_at is not None and self.lease_moved_at is not None:
            before = Pulse(self.lease_changed_at, self.lease_moved_at)
        pulse = record_beat(before, known, lease, self.now)
        self.lease_changed_at, self.lease_moved_at = pulse.renewed_at, pulse.moved_at

    def answers(self, role: str, *, ready: bool) -> None:
        """Mark the role's container as ready, as its kubelet does after a probe."""
        status = self.pod(role)["status"]
        status["containerStatuses"][0]["ready"] = ready
        status["conditions"] = [{"type": "Ready", "status": str(ready)}]

    def hang(self, seconds: int, step: int, resumed: int | None = None, **more: object) -> None:
        """Pass time in which the orchestrator renews its Lease without a new step."""
        for _ in range(0, seconds, 20):
            self.tick(20)
            self.report(step, resumed=resumed, **more)

    def exit(
        self, role: str, code: int, index: int = 0, message: str = "", reason: str = "", init: bool = False
    ) -> None:
        """End the role's process. The containers of trainer and engine restart (the trainer's then holds), the orchestrator's does
        not."""
        pod = self.pod(role, index)
        end = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "message": message}
        ended = {"terminated": end | {"finishedAt": format_rfc3339(self.now)}}
        status = pod["status"]
        if role == "orchestrator":
            status["phase"] = "Failed" if code else "Succeeded"
            status["containerStatuses"] = [{"name": role, "ready": False, "restartCount": 0, "state": ended}]
            status["conditions"] = [{"type": "Ready", "status": "False"}]
        else:
            name = "model" if init else role
            entry = {"name": name, "ready": False, "restartCount": 1, "state": {"running": {}}, "lastState": ended}
            status["initContainerStatuses" if init else "containerStatuses"] = [entry]
            status["conditions"] = [{"type": "Ready", "status": "False"}]

    def disrupt(self, role: str, index: int = 0, reason: str = "EvictionByEvictionAPI") -> None:
        """Take the pod away by a drain, a preemption or a node loss."""
        self.pod(role, index)["status"]["conditions"] = [
            {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "bye"}
        ]
        self.delete(self.ref(role, index))

    # ---- shortcuts

    def start(self, step: int = 3, resumed: int | None = None) -> Kube:
        """Start an attempt and train it up to `step`."""
        self.settle()
        self.tick()
        self.report(step, resumed=resumed)
        self.tick()
        assert self.status["phase"] == "Running", self.status
        return self

    def attempts_of_trainers(self) -> set[str]:
        return {pod["metadata"]["labels"][ATTEMPT_LABEL] for pod in self.pods("trainer")}
