"""The RLRun of an observation: its validated specification with the namespace's defaults, and its status."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlrun.api.resource import RLRunSpec
from rlrun.api.status import RLRunStatus
from rlrun.config.models.roles import ASKING_TASKS
from rlrun.defaults.team import Applied, apply_defaults
from rlrun_operator.decide.reading.written_status import read_status
from rlrun_operator.names import SPEC_HASH_ANNOTATION, Names
from rlrun_operator.sharing import host_name
from rlrun_operator.state import Manifest, Observed
from rlrun_operator.status.change import StatusChange
from rlrun_operator.status.words import ASKING, TRAINING, Words
from rlrun_operator.validate_spec import Judgement, judge_spec


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
        return StatusChange(spec_hash=self._present(status.spec_hash)).applied_to(status)

    def hash_of(self, child: Manifest) -> str | None:
        """Return the hash of the specification that a workload was rendered from."""
        found = (child["metadata"].get("annotations") or {}).get(SPEC_HASH_ANNOTATION)
        return self._present(str(found)) if found is not None else None

    def _present(self, mark: str | None) -> str | None:
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
    def _task(self) -> object:
        """`spec.task` as written, because the rest of the specification may be invalid. It is immutable."""
        return (self.observed.run.get("spec") or {}).get("task", "RL")

    @property
    def _colocates(self) -> bool:
        """Whether engines run in the trainer's pods, from the specification as written."""
        placement = (self.observed.run.get("spec") or {}).get("placement")
        return isinstance(placement, dict) and placement.get("colocate") is True

    @property
    def serves(self) -> bool:
        """Whether the run has engines in separate pods: supervised fine-tuning has none, a guest uses its host's."""
        return self.host_name is None and self._task != "SFT" and not self._colocates

    @property
    def trains(self) -> bool:
        """Whether the run trains, with its own trainer or with its host's."""
        return self._task not in ASKING_TASKS

    @property
    def words(self) -> Words:
        """Words for messages about this kind of run."""
        return TRAINING if self.trains else ASKING

    @cached_property
    def total_steps(self) -> int:
        """Number of steps; 0 for an evaluation, because only its orchestrator knows the number of answers."""
        if not self.trains:
            return 0
        return self.spec.max_steps if self.spec is not None else self.past.progress.total_steps
