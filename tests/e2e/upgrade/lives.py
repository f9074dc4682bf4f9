"""Runs of the trial, each held in one phase."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.cluster.api import Cluster
from tests.e2e.cluster.kube_run import KubeRun, example

RUNS = "team-a"
NO_STATEFULSET, NO_POD = "team-b", "team-c"
"""Namespaces with a quota: of StatefulSets, and of pods."""
NAMESPACES = (RUNS, NO_STATEFULSET, NO_POD)
STEP_SECONDS = 0.5
ENDLESS = 100_000
LIVES_THROUGH = 600
"""Steps of a run that starts under one release and ends under the other: more than it trains before the exchange."""
HELD = "example.com/held"
"""Finalizer that keeps a pod from being deleted."""
NOWHERE = {"upgrade-trial": "nowhere"}
"""Labels that no node has."""
_CHATS = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}]


def quickstart(
    name: str, script: Mapping[str, Any] | None = None, *, steps: int = ENDLESS, **spec: Any
) -> dict[str, Any]:
    """Return a run whose roles use the operator's default images, which are stubs here."""
    document = example("quickstart", maxSteps=steps, checkpoint={"interval": 5, "keepLast": 3}, **spec)
    document["metadata"]["name"] = name
    document["spec"].pop("evaluation", None)
    document["spec"]["orchestrator"] |= {"batchSize": 32}
    _scripted(document, script)
    return document


def _scripted(document: dict[str, Any], script: Mapping[str, Any] | None) -> None:
    pace = {"trainer": {"stepSeconds": STEP_SECONDS}} | dict(script or {})
    roles = (
        ("trainer", "orchestrator")
        if document["spec"].get("task") == "SFT"
        else ("trainer", "inference", "orchestrator")
    )
    for role in roles:
        block = document["spec"].setdefault(role, {})
        block.setdefault("env", []).append({"name": "STUB_SCRIPT", "value": json.dumps(pace)})


def _taught() -> dict[str, Any]:
    mounted = {
        "volumes": [{"name": "chats", "configMap": {"name": "chats"}}],
        "containers": [{"name": "orchestrator", "volumeMounts": [{"name": "chats", "mountPath": "/chats"}]}],
    }
    data = {"sources": [{"path": "/chats/rows.jsonl"}], "batchSize": 4}
    document = example("sft", data=data, maxSteps=ENDLESS, orchestrator={"podTemplate": {"spec": mounted}})
    document["metadata"]["name"] = "taught"
    document["spec"]["data"].pop("validation", None)
    _scripted(document, None)
    return document


def _guest(name: str, shared: str, host: dict[str, Any]) -> dict[str, Any]:
    spec = {key: value for key, value in host["spec"].items() if key != "inference"}
    spec |= {"seed": 2, "trainer": {"sharedWith": shared, "lora": {"rank": 8}}}
    return host | {"metadata": {"name": name}, "spec": spec}


def _fails(code: int) -> dict[str, Any]:
    fault = {"step": 3, "action": "exit", "code": code}
    return {"trainer": {"stepSeconds": 0.1, "faults": [fault]}}


class Lives:
    """All runs, by name.

    Args:
        cluster: cluster with the product.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        host = quickstart("host", trainer={"lora": {"rank": 16, "slots": 2}, "guests": ["*"]})
        patient = {"backoff": {"initialSeconds": 7200, "maxSeconds": 7200}}
        labelled = {"metadata": {"labels": {"example.com/cost": "42"}}, "spec": {"terminationGracePeriodSeconds": 77}}
        documents = {
            "no-claim": quickstart("no-claim", storage={"claimName": "later"}),
            "nowhere": quickstart("nowhere", trainer={"nodeSelector": NOWHERE}),
            "trains": quickstart("trains", inference={"replicas": 2}),
            "taught": _taught(),
            "host": host,
            "guest": _guest("guest", "host", host),
            "orphan": _guest("orphan", "nobody", host),
            "backs-off": quickstart("backs-off", _fails(1), failurePolicy=patient),
            "suspended": quickstart("suspended"),
            "suspending": quickstart("suspending"),
            "complete": quickstart("complete", {"trainer": {"stepSeconds": 0.1}}, steps=10),
            "failed": quickstart("failed", _fails(65)),
            "sized": quickstart("sized", storage={"claimTemplate": {"size": "3Gi"}}),
            "templated": quickstart(
                "templated", trainer={"podTemplate": labelled}, inference={"podTemplate": labelled}
            ),
            "ends": quickstart("ends", steps=LIVES_THROUGH),
        }
        self.runs = {name: KubeRun(cluster, document, RUNS) for name, document in documents.items()}
        self.runs["no-trainer"] = KubeRun(cluster, quickstart("no-trainer"), NO_STATEFULSET)
        self.runs["podless"] = KubeRun(cluster, quickstart("podless"), NO_POD)

    def __getitem__(self, name: str) -> KubeRun:
        return self.runs[name]

    def begin(self) -> None:
        """Apply all runs, and wait until each has reached its phase."""
        _quota(self.cluster, NO_STATEFULSET, {"count/statefulsets.apps": "0"})
        _quota(self.cluster, NO_POD, {"pods": "0"})
        rows = f"{json.dumps({'messages': _CHATS})}\n" * 24
        chats = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "chats"}, "data": {"rows.jsonl": rows}}
        self.cluster.kubectl("apply", "-n", RUNS, "-f", "-", stdin=json.dumps(chats))
        for run in self.runs.values():
            run.apply()
        for name in ("suspended", "suspending"):
            self[name].wait_checkpoint(5)
        self._hold(self["suspending"])
        for name in ("suspended", "suspending"):
            self.suspend(name, True)
        for name, phase in PHASES.items():
            self[name].wait_phase(phase)
        self["backs-off"].wait("its backoff", lambda: self["backs-off"].status().get("reason") == "BackOff")
        self["guest"].wait_step(2)

    def suspend(self, name: str, value: bool) -> None:
        """Set `spec.suspend`."""
        self[name].kubectl("patch", "rlr", name, "--type=merge", "-p", json.dumps({"spec": {"suspend": value}}))

    def _hold(self, run: KubeRun) -> None:
        """Keep its first trainer pod from being deleted."""
        patch = json.dumps({"metadata": {"finalizers": [HELD]}})
        run.kubectl("patch", "pod", f"{run.name}-trainer-0", "--type=merge", "-p", patch)

    def let_go(self, name: str) -> None:
        """Allow the deletion again, after `_hold`."""
        patch = json.dumps({"metadata": {"finalizers": None}})
        self[name].kubectl("patch", "pod", f"{name}-trainer-0", "--type=merge", "-p", patch)

    def make_room(self) -> None:
        """Delete the quotas."""
        for namespace in (NO_STATEFULSET, NO_POD):
            self.cluster.kubectl("delete", "quota", "--all", "-n", namespace)


PHASES = {
    "orphan": "Pending",
    "no-trainer": "Starting",
    "podless": "Starting",
    "no-claim": "Starting",
    "nowhere": "Starting",
    "trains": "Running",
    "taught": "Running",
    "host": "Running",
    "guest": "Running",
    "backs-off": "Restarting",
    "suspended": "Suspended",
    "suspending": "Suspending",
    "complete": "Complete",
    "failed": "Failed",
    "sized": "Running",
    "templated": "Running",
    "ends": "Running",
}
"""Phase of each run during the exchange of releases."""
TRAINING = tuple(name for name, phase in PHASES.items() if phase == "Running")


def _quota(cluster: Cluster, namespace: str, hard: Mapping[str, str]) -> None:
    document = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": dict(hard)}}
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(document))
