"""Facts that decisions read from manifests: of each child, of an earlier status, and of the RLRun itself.

The facts of a child come from its manifest only. The status may have been written by another release of the operator. The specification is
validated with the namespace's defaults.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_status import RLRunStatus
from rlrun.config.models.roles import ASKING_TASKS
from rlrun.defaults.team_defaults import Applied, apply_defaults
from rlrun_operator.names import RENDERING_ANNOTATION, REPLICA_FAILURE, SPEC_HASH_ANNOTATION, Names
from rlrun_operator.sharing import host_name
from rlrun_operator.state import Manifest, Observed
from rlrun_operator.status.conditions import StatusChange
from rlrun_operator.status.wait_facts import ASKING, TRAINING, ProgressTexts
from rlrun_operator.validate_spec import Judgement, judge_spec


def is_ending(child: Manifest) -> bool:
    """Return whether an object is being deleted."""
    return "deletionTimestamp" in child["metadata"]


def uid_of(child: Manifest) -> str:
    """Return the UID, which distinguishes an object from later objects of the same name."""
    return str(child["metadata"]["uid"])


def desired_replicas(child: Manifest | None) -> int:
    """Return the number of pods that a workload requests."""
    return int(((child or {}).get("spec") or {}).get("replicas") or 0)


def rendering_of(child: Manifest) -> str | None:
    """Return the hash of a workload's rendered pods, or None for a single pod and for workloads of releases without this hash."""
    found = (child["metadata"].get("annotations") or {}).get(RENDERING_ANNOTATION)
    return str(found) if found is not None else None


def is_refused(deployment: Manifest | None) -> bool:
    """Return whether the API server refuses the pods of a Deployment now."""
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or ()
    return any(c["type"] == REPLICA_FAILURE and c["status"] == "True" for c in conditions)


def has_let_go(statefulset: Manifest | None) -> bool:
    """Return whether the StatefulSet's controller has observed the scale to zero, so that it creates no more pods."""
    if statefulset is None:
        return True
    status = statefulset.get("status") or {}
    generation = statefulset["metadata"].get("generation", 0)
    seen = status.get("observedGeneration", 0) >= generation
    return not is_ending(statefulset) and desired_replicas(statefulset) == 0 and seen and not status.get("replicas")


def read_status(raw: Manifest) -> RLRunStatus:
    """Parse a written status, without unknown and unreadable fields."""
    document: object = raw
    for _ in range(100):
        try:
            return RLRunStatus.model_validate(document)
        except ValidationError as error:
            document = copy.deepcopy(document) if document is raw else document
            for detail in sorted(error.errors(), key=lambda d: str(d["loc"]), reverse=True):
                _drop_invalid(document, detail["loc"])
    return RLRunStatus()


def _drop_invalid(document: Any, loc: tuple[int | str, ...]) -> None:
    """Remove the value at `loc`, or the innermost existing value around it."""
    place = document
    for i, part in enumerate(loc):
        try:
            inner = place[part]
        except (KeyError, IndexError, TypeError):
            return _drop_invalid(document, loc[:i]) if i else None
        if i == len(loc) - 1:
            del place[part]
            return None
        place = inner
    return None


@dataclass(frozen=True)
class JudgedRun:
    """Facts that depend only on the RLRun, its namespace's defaults and earlier refusals."""

    observed: Observed

    @cached_property
    def metadata(self) -> Manifest:
        """Metadata of the RLRun."""
        found: Manifest = self.observed.run["metadata"]
        return found

    @cached_property
    def names(self) -> Names:
        return Names(str(self.metadata["name"]))

    @cached_property
    def generation(self) -> int | None:
        found = self.metadata.get("generation")
        return int(found) if found is not None else None

    @cached_property
    def past(self) -> RLRunStatus:
        """Last written status. A hash of the specification by an earlier release is replaced by that of this release."""
        status = read_status(self.observed.run.get("status") or {})
        return StatusChange(spec_hash=self._current_spec_hash(status.spec_hash)).applied_to(status)

    def hash_of(self, child: Manifest) -> str | None:
        """Return the hash of the specification that a workload was rendered from."""
        found = (child["metadata"].get("annotations") or {}).get(SPEC_HASH_ANNOTATION)
        return self._current_spec_hash(str(found)) if found is not None else None

    def _current_spec_hash(self, mark: str | None) -> str | None:
        if mark in (
            None,
            self.judgement.spec_hash,
        ):  # computing the hashes of earlier releases takes as long as the rest of a pass
            return mark
        return self.judgement.spec_hash if mark in self.judgement.former_spec_hashes else mark

    @cached_property
    def applied(self) -> Applied:
        """RLRun with its namespace's defaults."""
        return apply_defaults(self.observed.run, self.observed.defaults)

    @cached_property
    def judgement(self) -> Judgement:
        """Validation of the run with its defaults, or without them if only the defaults make it invalid (`unfit_defaults`)."""
        return judge_spec(self.observed.run) if self.unfit_defaults else judge_spec(self.applied.run)

    @cached_property
    def unfit_defaults(self) -> str:
        """Reason why the namespace's defaults make a valid specification invalid; empty if they do not."""
        defaults = self.observed.defaults
        if defaults is None or not self.applied.taken or not (problems := judge_spec(self.applied.run).problems):
            return ""
        if judge_spec(self.observed.run).spec is None:
            return ""
        return (
            f"with the defaults of ConfigMap {defaults.config_map} ({', '.join(self.applied.taken)}): {problems}; give the run "
            "values of its own there, or change the defaults"
        )

    @property
    def spec(self) -> RLRunSpec | None:
        """Valid specification; None if the operator or the API server refuses it."""
        return None if self.observed.rejection else self.judgement.spec

    @cached_property
    def problems(self) -> str:
        """Reasons why the specification is invalid; empty if it is valid."""
        return self.judgement.problems or self.observed.rejection or ""

    @cached_property
    def spec_hash(self) -> str | None:
        return self.judgement.spec_hash if self.spec is not None else None

    @cached_property
    def host_name(self) -> str | None:
        """Name of the host whose trainer and engines this run uses; None: it uses its own."""
        return host_name(self.observed.run)

    @property
    def _task_name(self) -> object:
        """`spec.task` as written, because the rest of the specification may be invalid. It is immutable."""
        return (self.observed.run.get("spec") or {}).get("task", "RL")

    @property
    def _is_colocated(self) -> bool:
        """Whether engines run in the trainer's pods, from the specification as written."""
        placement = (self.observed.run.get("spec") or {}).get("placement")
        return isinstance(placement, dict) and placement.get("colocate") is True

    @property
    def has_own_engines(self) -> bool:
        """Whether the run has engines in separate pods: supervised fine-tuning has none, a guest uses its host's."""
        return self.host_name is None and self._task_name != "SFT" and not self._is_colocated

    @property
    def is_training_run(self) -> bool:
        """Whether the run trains, with its own trainer or with its host's."""
        return self._task_name not in ASKING_TASKS

    @property
    def progress_texts(self) -> ProgressTexts:
        """Words for messages about this kind of run."""
        return TRAINING if self.is_training_run else ASKING

    @cached_property
    def total_steps(self) -> int:
        """Number of steps; 0 for an evaluation, because only its orchestrator can count the answers."""
        if not self.is_training_run:
            return 0
        return self.spec.max_steps if self.spec is not None else self.past.progress.total_steps
