"""The upgrade trial: both directions, with the changes that each one must not make."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.api import Cluster
from tests.cluster.deploy import RELEASE, SYSTEM
from tests.cluster.progress import Say
from tests.e2e.cluster.kube_run import KubeRun
from tests.e2e.upgrade.lives import NAMESPACES, NO_POD, NO_STATEFULSET, RUNS, TRAINING, Lives, quickstart
from tests.e2e.upgrade.release import Release, make_namespaces
from tests.e2e.upgrade.watch import EVENTS_EACH, QUIET, Between, differences, snapshot

VALUES = {"clusterWide": "false"}
NEW_STEPS = 6
"""Steps of progress of each training run that complete an exchange: the operator has then written its status several
times."""
MORE_STEPS = 15
MADE_AGAIN = (f"{NO_POD}/podless", "podless Warning QuotaExceeded")
"""Conditions of an attempt without pods: another release creates it again completely, which `_one_image` checks."""
NOT_BEGUN = (
    f"{NO_STATEFULSET}/no-trainer: status.phase is Pending, was Starting",
    f"{NO_STATEFULSET}/no-trainer: was Pending for a moment, from Starting",
)
"""A correction: a refused attempt that was not yet recorded had the phase Starting until decision 6."""
WITHOUT_PODS = (
    f"{RUNS}/suspended: Scheduled is ('False', 'Suspended'), was ('True', 'AllScheduled')",
    f"{RUNS}/suspending: Scheduled is ('False', 'Suspending'), was ('True', 'AllScheduled')",
)
"""A correction: a suspended run has no pod that could have a node."""
BACK = (
    f"{RUNS}/sized: ConfigurationValid is ('True', 'ChangePending'), was ('True', 'Valid')",
    f"{RUNS}/sized: ConfigurationValid=True ChangePending",
)
"""Changes of the rollback only: in the earlier release a claim's size is part of the specification's mark, and the new
release has written its own mark."""


class Play:
    """One trial.

    Args:
        cluster: two nodes with the images of both releases.
        old: the earlier release.
        new: the release after the upgrade.
        folder: folder for the recorded states.
        say: function that receives progress lines.
    """

    def __init__(self, cluster: Cluster, old: Release, new: Release, folder: Path, say: Say) -> None:
        self._cluster, self._old, self._new, self._folder, self._say = cluster, old, new, folder, say
        self._lives = Lives(cluster)
        self.problems: list[str] = []

    def all(self) -> None:
        """Run the trial in order."""
        make_namespaces(self._cluster, NAMESPACES)
        self._old.install_crds(self._cluster)
        self._operator(self._old)
        self._say(f"release {self._old.name} is installed")
        self._lives.begin()
        self._say("all runs are in their phases")
        self._exchange("crds", lambda: self._new.install_crds(self._cluster))
        self._exchange("upgrade", lambda: self._operator(self._new))
        self._go_on()
        self._exchange("downgrade", lambda: self._operator(self._old))
        self._exchange("crds-back", lambda: self._old.install_crds(self._cluster))
        self._end()

    def _operator(self, release: Release) -> None:
        release.install_operator(self._cluster, NAMESPACES, VALUES)

    def _exchange(self, name: str, act: Callable[[], None]) -> None:
        """Exchange the releases, wait for progress of all training runs, and check the changes."""
        before = snapshot(self._cluster, NAMESPACES)
        training = [
            run for run in self._lives.runs.values() if run.name in TRAINING and self._is_running(before.runs, run)
        ]
        with Between(self._cluster, self._folder, name) as between:
            act()
            goals = {run.name: run.step() + NEW_STEPS for run in training}
            for run in training:
                run.wait(
                    f"its status tells of step {goals[run.name]}",
                    lambda run=run: _read_step(run) >= goals[run.name],
                    steps=True,
                )
            events = between.events()
        after = snapshot(self._cluster, NAMESPACES)
        found = differences(before, after)
        for state in between.states():
            run, status = state["metadata"]["name"], state.get("status") or {}
            key = f"{state['metadata']['namespace']}/{run}"
            was = before.runs[key]["status"]["phase"]
            if status.get("phase") != was:
                found.append(f"{key}: was {status.get('phase')} for a moment, from {was}")
            found += [
                f"{key}: {c['type']}={c['status']} {c['reason']}: {c['message']}"
                for c in status.get("conditions", ())
                if c["reason"] in QUIET and c["reason"] not in _reasons(before.runs[key])
            ]
        found += [
            f"{what}: {times} events" for what, times in events.items() if times > EVENTS_EACH or " Warning " in what
        ]
        log = self._cluster.kubectl("logs", "-n", SYSTEM, f"deploy/{RELEASE}", "--tail=-1", check=False)
        found += [
            f"log: {line}" for line in log.splitlines() if "Traceback" in line or "unexpected" in line or " 403" in line
        ]
        known = (*MADE_AGAIN, *NOT_BEGUN, *WITHOUT_PODS, *(BACK if name == "downgrade" else ()))
        found = [problem for problem in found if not any(begins in problem for begins in known)]
        self.problems += [f"{name}: {problem}" for problem in dict.fromkeys(found)]
        self._say(f"{name}: {len(set(found))} problems; events {dict(events)}")
        for problem in dict.fromkeys(found):
            self._say(f"    {problem}")

    def _is_running(self, runs: Any, run: KubeRun) -> bool:
        return bool(runs[f"{run.namespace}/{run.name}"]["status"]["phase"] == "Running")

    def _check(self, name: str, holds: bool, told: object) -> None:
        if not holds:
            self.problems.append(f"{name}: {told}")
            self._say(f"    {name}: {told}")

    def _go_on(self) -> None:
        """Under the new release: next attempts, suspended runs, waiting runs, and a new run."""
        lives, new = self._lives, self._new
        lives.let_go("suspending")
        lives["suspending"].wait_phase("Suspended")
        for name in ("suspended", "suspending"):
            lives.suspend(name, False)
        lives.make_room()
        for name in ("trains", "templated"):
            _restart(lives[name])
        newborn = KubeRun(self._cluster, quickstart("newborn"), RUNS)
        lives.runs["newborn"] = newborn
        newborn.apply()
        for name in ("suspended", "suspending", "newborn", "no-trainer", "podless"):
            lives[name].wait_phase("Running")
            lives[name].wait_step(1)
            self._one_image(name, new)
        for name in ("trains", "templated"):
            run = lives[name]
            run.wait(
                "its second attempt trains",
                lambda run=run: run.attempt() == 2 and run.status()["phase"] == "Running",
            )
            self._one_image(name, new)
            self._check(
                name, bool(run.status()["checkpoint"].get("resumedFromStep")), "does not go on from its checkpoint"
            )
        lives["ends"].wait_phase("Complete")
        self._goes_on_to_its_end("complete")
        newborn.wait_checkpoint(5)
        self._say("under the new release: resumed, restarted, begun and ended")

    def _one_image(self, name: str, release: Release) -> None:
        """Check that all pods of a run have images of one release."""
        run = self._lives[name]
        found = {
            pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"]
            for pod in run.pods()
            if "deletionTimestamp" not in pod["metadata"]
        }
        self._check(
            name, set(found.values()) == {release.stub}, f"images {found}, not all {release.name}'s {release.stub}"
        )

    def _goes_on_to_its_end(self, name: str) -> None:
        """Add steps to a Complete run: the other release continues from its checkpoint and completes it."""
        run = self._lives[name]
        attempt, steps = run.attempt(), run.step() + MORE_STEPS
        run.kubectl("patch", "rlr", name, "--type=merge", "-p", json.dumps({"spec": {"maxSteps": steps}}))
        run.wait(
            f"all {steps} steps are trained",
            lambda: run.attempt() > attempt and run.status()["phase"] == "Complete" and _read_step(run) == steps,
            steps=True,
        )

    def _end(self) -> None:
        """Finish the trial under the old release."""
        lives = self._lives
        for name in ("newborn", "trains"):
            run = lives[name]
            attempt = run.attempt()
            _restart(run)
            run.wait(
                "its next attempt trains",
                lambda run=run, attempt=attempt: run.attempt() > attempt and run.status()["phase"] == "Running",
            )
            self._one_image(name, self._old)
        for name in ("complete", "ends"):
            self._goes_on_to_its_end(name)
        self._say("under the old release again: restarted and ended")


def _reasons(run: dict[str, Any]) -> set[str]:
    return {c["reason"] for c in run["status"].get("conditions", ())}


def _read_step(run: KubeRun) -> int:
    return int(run.status().get("progress", {}).get("step", 0))


def _restart(run: KubeRun) -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    run.kubectl("annotate", "rlr", run.name, f"rlrun.io/restart-requested-at={now}", "--overwrite")
