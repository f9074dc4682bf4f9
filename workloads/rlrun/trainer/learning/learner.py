"""A training step: passes without a gradient over the whole batch, then one or several updates of policy and critic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn

from rlrun.algorithms import Mixture
from rlrun.config.models.parallel import RouterConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Sample
from rlrun.trainer.learning.critic import Critic, Estimates, GaeOptions, critic_step, estimate_values, make_critic
from rlrun.trainer.learning.forward import ReferenceSource, Signals, logprobs_without_gradient, record_routes
from rlrun.trainer.learning.reference_model import FrozenReference
from rlrun.trainer.learning.repeated_passes import SampleSignals, row_samples
from rlrun.trainer.learning.run_objective import KlInputs, Update, kl_advantages, kl_token_rewards, token_moments
from rlrun.trainer.learning.step_buffer import MicroBatch, micro_batches
from rlrun.trainer.learning.train_step import Prepared, train_step
from rlrun.trainer.modeling.load_weights import ArchitectureCheck
from rlrun.trainer.modeling.recurrent import Packing, strictest_packing
from rlrun.trainer.modeling.router_balance import Balance, update_biases
from rlrun.trainer.modeling.router_replay import numbered_routers, routing_of
from rlrun.trainer.ranks.group import Group


@dataclass(frozen=True)
class Learner:
    """Policy, reference and critic with their optimizers and objective. Every rank runs the same code."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    group: Group
    loss: Mixture
    max_grad_norm: float | None = None
    reference: ReferenceSource | None = None
    critic: Critic | None = None
    router: RouterConfig = field(default_factory=RouterConfig)
    """Replay and balance of a mixture's experts."""

    @property
    def packing(self) -> Packing:
        """Packing of rows that all models in the trainer compute correctly."""
        models = [self.model]
        if isinstance(self.reference, FrozenReference):
            models.append(self.reference.model)
        if self.critic is not None:
            models.append(self.critic.module)
        return strictest_packing(models)

    def step(
        self,
        updates: Sequence[Update],
        *,
        lr: float,
        critic_lr: float = 0.0,
        check_stop: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Run all updates in order. The passes without a gradient use the parameters before the first update.

        Args:
            updates: data of one or more updates; those of later passes come last.
            lr: learning rate of the policy in this step.
            critic_lr: learning rate of the critic in this step.
            check_stop: stop point that all ranks call together until the first update; if it raises (on all ranks), the step is abandoned
                without an update. Later it is not called: a partly updated model is not a valid version.

        Returns:
            Metrics of the step, equal on all ranks, see `train_step`, `critic_step` and `RouteCounts`. Over several updates, `tokens`,
            `loss_tokens`, `sequences`, `skipped`, `critic_skipped` and times are sums, `*_max` are maxima, and all others are means. Tokens
            and sequences of later passes do not count again.
        """
        first = [update for update in updates if not update.is_repeated]
        samples = [row for update in first for row in row_samples(update)]
        rows: Sequence[MicroBatch] = micro_batches(
            samples, self.group.device, with_routes=self.router.replay == "Rollout"
        )
        signals, rows, metrics = self._run_passes(first, len(updates), samples, rows, check_stop)
        found = []
        routing = routing_of(self.model)
        for index, (update, (inputs, signal)) in enumerate(
            zip(updates, self._update_rows(updates, rows, signals), strict=True)
        ):
            if routing is not None and self.router.aux_loss > 0:
                routing.balance = Balance(self.router.aux_loss, len(update.batch.samples))
            one = train_step(
                self.model,
                self.optimizer,
                update,
                group=self.group,
                loss=self.loss,
                lr=lr,
                max_grad_norm=self.max_grad_norm,
                prepared=Prepared(signals=signal, inputs=inputs, check_stop=check_stop if index == 0 else lambda: None),
            )
            if self.critic is not None:
                one |= critic_step(self.critic, update.batch, inputs, signal, group=self.group, lr=critic_lr)
            if update.is_repeated:
                one = {name: value for name, value in one.items() if name.rpartition("/")[2] not in _DATA_COUNTS}
            found.append(one)
        combined = combine_updates(found)
        return combined | metrics | self._finish_routing(len(updates), skipped=combined["skipped"] > 0)

    def _finish_routing(self, updates: int, *, skipped: bool) -> dict[str, float]:
        """Update the correction biases after the last update of a step, and return the metrics of a mixture's routers.

        Args:
            updates: number of updates.
            skipped: true if the gradient of an update was not finite; the biases then do not change.

        Returns:
            Metrics of `RouteCounts` over all updates, and `routing/aux_loss`: mean of the updates' auxiliary losses without coefficient.
            Empty for models without routers.
        """
        routing = routing_of(self.model)
        if routing is None:
            return {}
        counts, balanced = routing.take_counts(self.group.device), self.router.aux_loss > 0
        counts.add_ranks(with_loss=balanced)
        if self.router.bias == "Update" and not skipped:
            update_biases(numbered_routers(self.model), counts.load, self.router.bias_rate)
        metrics = counts.metrics()
        return metrics | ({"routing/aux_loss": float(counts.aux_loss) / updates} if balanced else {})

    def _update_rows(
        self,
        updates: Sequence[Update],
        rows: Sequence[MicroBatch],
        signals: Sequence[Signals],
    ) -> Iterator[tuple[list[MicroBatch], list[Signals]]]:
        """Yield the rows of each update on the device, with their signals.

        Args:
            updates: all updates of the step.
            rows, signals: inputs and signals of each row of the first pass.
        """
        taken = iter(zip(rows, signals, strict=True))
        carried: SampleSignals | None = None
        for update in updates:
            if not update.is_repeated:
                pairs = list(islice(taken, len(update.rows)))
            elif update.batch is updates[0].batch:  # one update per pass, so the same rows
                pairs = list(zip(rows, signals, strict=True))
            else:
                if carried is None:
                    carried = SampleSignals([one for one in updates if not one.is_repeated], signals, self.group)
                members = row_samples(update)
                inputs = micro_batches(members, self.group.device, with_routes=self.router.replay == "Rollout")
                of_rows = [carried.of_row(own, len(row.mask)) for own, row in zip(members, inputs, strict=True)]
                pairs = list(zip(inputs, of_rows, strict=True))
            yield [row for row, _ in pairs], [signal for _, signal in pairs]

    def _run_passes(
        self,
        updates: Sequence[Update],
        count: int,
        samples: Sequence[Sequence[Sample]],
        rows: Sequence[MicroBatch],
        check_stop: Callable[[], None],
    ) -> tuple[list[Signals], Sequence[MicroBatch], dict[str, float]]:
        """Run the passes that the objective needs before the first of `count` updates, and return the signals of each row, the rows, and
        metrics.
        """
        if not self._needs_passes(count):
            return [Signals()] * len(rows), rows, {}
        # All ranks must use the same order of groups for the collective sums.
        signals: list[dict[str, object]] = [{} for _ in rows]
        metrics: dict[str, float] = {}
        groups = sorted({sample.group for update in updates for sample in update.batch.samples})
        start: list[Tensor] = []
        # Log-probs of the policy before the first update.
        if self._needs_proximal_pass(count):
            check_stop()
            began = time.perf_counter()
            # If this pass overflows, the update overflows too and is skipped, so the values do not matter.
            computed, rows = self._first_pass(rows)
            start = [torch.where(torch.isfinite(logprobs).all(), logprobs, 0) for logprobs in computed]
            metrics["time/proximal"] = time.perf_counter() - began
        if self._reads_proximal(count):
            for signal, logprobs in zip(signals, start, strict=True):
                signal["proximal_logprobs"] = logprobs
        # Log-probs of the reference.
        reference: list[Tensor] = []
        if self.reference is not None:
            check_stop()
            began = time.perf_counter()
            reference = self.reference.logprobs(rows)
            for signal, logprobs in zip(signals, reference, strict=True):
                signal["reference_logprobs"] = logprobs
            metrics["time/reference"] = time.perf_counter() - began
        # KL penalty in the reward: it changes the advantages, or with a critic the rewards of GAE.
        more_rewards = None
        if self.loss.rewards_kl:
            more_rewards = self._reward_kl(KlInputs(self.loss, rows, samples, start, reference), signals, groups)
            metrics["kl_reward"] = float(token_moments(more_rewards, [row.mask for row in rows], self.group).mean)
        # Values and advantages of the critic.
        if self.critic is not None and self.loss.gae is not None:
            check_stop()
            began = time.perf_counter()
            found = estimate_values(
                self.critic.module,
                rows,
                samples,
                GaeOptions(**self.loss.gae),
                groups=groups,
                group=self.group,
                more_rewards=more_rewards,
            )
            _add_metrics(signals, found)
            metrics |= found.metrics | {"time/values": time.perf_counter() - began}
        return [Signals(**signal) for signal in signals], rows, metrics

    def _first_pass(self, rows: Sequence[MicroBatch]) -> tuple[list[Tensor], Sequence[MicroBatch]]:
        """Return the log-probs before the first update, and the rows for the updates; with `Step` they have the experts of this pass."""
        if self.router.replay == "Step":
            return record_routes(self.model, rows)
        return logprobs_without_gradient(self.model, rows), rows

    def _reward_kl(self, inputs: KlInputs, signals: Sequence[dict[str, object]], groups: Sequence[int]) -> list[Tensor]:
        """Return the KL rewards of each row; without a critic also add them to the advantages of the signals."""
        more_rewards = kl_token_rewards(inputs)
        if self.loss.gae is None:
            changed = kl_advantages(inputs, groups=groups, group=self.group)
            for signal, advantages in zip(signals, changed, strict=True):
                signal["advantages"] = advantages
        return more_rewards

    def _needs_proximal_pass(self, updates: int) -> bool:
        """Return whether a policy pass is needed before the first update."""
        return self._reads_proximal(updates) or self.loss.rewards_kl

    def _reads_proximal(self, updates: int) -> bool:
        """Return whether the updates read the pass. A single update computes the log-probs at the start of the step itself."""
        return self.loss.needs_recompute and updates > 1

    def _needs_passes(self, updates: int) -> bool:
        return self.reference is not None or self.critic is not None or self._needs_proximal_pass(updates)


def make_learner(
    config: TrainerConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Mixture,
    *,
    source: str,
    group: Group,
    check: ArchitectureCheck,
) -> Learner:
    """Load the reference and the critic, and create the learner.

    The reference is loaded from its source in every attempt, because it never changes. The critic is loaded from the policy's source too;
    a checkpoint with a critic replaces its parameters later.

    Args:
        config: configuration of the trainer.
        model: sharded policy.
        optimizer: optimizer of the policy.
        loss: training objective, with the run's options bound.
        source: source of the policy's model.
        group: all ranks; all call this function together.
        check: architecture check, see `load_sharded`.

    Raises:
        RoleError: a model cannot be loaded, or the reference has a different vocabulary.
    """
    algorithm = config.algorithm
    reference = critic = None
    if algorithm.reference is not None:
        vocabulary = model.config.get_text_config().vocab_size
        reference = FrozenReference.load(
            algorithm.reference,
            config.model,
            initial=source,
            vocabulary=vocabulary,
            seq_len=config.seq_len,
            group=group,
            check=check,
        )
    if algorithm.critic is not None:
        critic = make_critic(algorithm.critic, config, source, group=group, check=check)
    return Learner(
        model,
        optimizer,
        group,
        loss,
        max_grad_norm=config.optimizer.max_grad_norm,
        reference=reference,
        critic=critic,
        router=config.router,
    )


def combine_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several updates of a step. An update without tokens of an environment lacks its metrics."""
    if len(updates) == 1:
        return dict(updates[0])
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: _combine_metric(name, [update[name] for update in updates if name in update]) for name in names}


def _combine_metric(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    total = sum(values)
    return total if name.rpartition("/")[2] in _COUNTS or name.startswith("time/") else total / len(values)


_DATA_COUNTS = ("tokens", "loss_tokens", "sequences")
"""Counts of the data of an update."""
_COUNTS = (*_DATA_COUNTS, "skipped", "critic_skipped")


def _add_metrics(signals: Sequence[dict[str, object]], found: Estimates) -> None:
    for signal, value, advantage, target in zip(signals, found.values, found.advantages, found.returns, strict=True):
        signal |= {"values": value, "advantages": advantage, "returns": target}
