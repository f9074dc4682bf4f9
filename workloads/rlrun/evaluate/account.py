"""Progress of an evaluation run: its steps are answers."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.evaluate import report
from rlrun.evaluate.plan import Plan
from rlrun.evaluate.play import Part
from rlrun.evaluate.policies import Policy
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.evaluation.evaluator import Answer
from rlrun.orchestrator.progress.server import Progress, StepClock, waiting_reason
from rlrun.orchestrator.trainer.waiting import Since
from rlrun.protocol.files.paths import Role
from rlrun.protocol.files.volume_faults import Volume


class Account:
    """Counter of answers.

    Args:
        plan: plan of the run.
        parts: questions with their stored answers.
        pool: pool of the engines.
        since: start time of the current wait.
        volume: volume of the run.
    """

    def __init__(self, plan: Plan, parts: Sequence[Part], pool: EnginePool, since: Since, volume: Volume) -> None:
        self._plan, self._parts, self._pool, self._since, self._volume = plan, parts, pool, since, volume
        self.total = sum(len(part.wanted) for part in parts)
        self.found = self.done = self.total - sum(len(part.left) for part in parts)
        self._failed = self._moves = 0
        self._rewards: list[float] = []
        self._version: int | None = None
        self._clock = StepClock()
        self._doing: tuple[Role, str] = ("inference", "starting")
        self._over = {part.policy for part in parts} - {part.policy for part in parts if part.left}
        self.results = self._measures()
        """Results of finished policies, one line per policy and environment."""

    def loads(self, policy: Policy) -> None:
        """Record that the engines load a policy."""
        self._doing = "inference", f"loading {policy.name}"
        self._rewards = []

    def loaded(self, policy: Policy) -> None:
        """Record that all engines have loaded the policy."""
        self._doing, self._version = ("inference", f"answering as {policy.name}"), policy.step or 0
        self._moves += 1

    def answered(self, answer: Answer) -> None:
        """Count an answer that is stored or has finally failed."""
        self._moves += 1
        if answer.rollout is None:
            self._failed += 1
            return
        self.done += 1
        self._clock.trained(self.done)
        self._rewards.append(answer.rollout.reward)

    def over(self, policy: Policy) -> None:
        """Record that a policy has no more questions."""
        self._over.add(policy)
        self.results = self._measures()

    def _measures(self) -> tuple[str, ...]:
        over = [part for part in self._parts if part.policy in self._over]
        return tuple(report.short_lines(report.results_document(self._plan, over)))

    def progress(self) -> Progress:
        """Return the current progress."""
        role, phase = self._doing
        problems = self._pool.problems() if self._pool.version is None else ""
        waiting, trouble = self._since.waiting(role, phase, problems), self._volume.trouble()
        return Progress(
            step=self.done,
            max_steps=self.total,
            policy_version=self._version,
            checkpoint_step=None,
            resumed_from_step=self.found or None,
            reward=sum(self._rewards) / len(self._rewards) if self._rewards else None,
            eval={},
            tokens_per_second=None,
            staleness_mean=None,
            waiting_on=waiting_reason(waiting, trouble),
            eta_seconds=self._clock.remaining_seconds(self.total),
            in_flight=self._pool.in_flight,
            errors=self._failed,
            waiting_role=waiting.role,
            waiting_phase=waiting.phase,
            waiting_since=waiting.since,
            activity=self._moves,
            storage=trouble,
            results=self.results,
        )
