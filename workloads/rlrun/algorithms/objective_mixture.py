"""Several objectives in one batch, of the run and of single environments, and the exact aggregation of their metrics.

`policy_loss` returns sums over its loss tokens, the number of these tokens (`tokens`) and the number of sequences that contain one
(`sequences`); metrics with a name in `_max` are maxima. The sums of micro-batches and ranks are added first and divided once, so the result
does not depend on the division into micro-batches.

The loss of a token comes from the objective of its environment; its weight is the weight that it would have if the whole batch had this
objective. Let `w_e` be the weights and `D_e` the divisor of the aggregation of environment `e` (`aggregation.py`), with `D_e` counted over
the *whole* batch:

    L = Σ_e 1/D_e(batch) · Σ_{tokens k of e} w_e(k)·l_e(k)  =  Σ_e share_e · L_e

`L_e` is the loss of only the samples of e, and `share_e = D_e(samples of e)/D_e(batch)` is their share of the batch: of its loss tokens for
`token_mean`, otherwise of its sequences with a loss token. Therefore the objective of one environment does not change the loss of other
samples, environments with equal settings have one common loss, and the sum does not depend on packing, order and ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlrun.algorithms.kl import KlReward
from rlrun.algorithms.loss_inputs import LossBatch
from rlrun.algorithms.objective import QUARTERS, LossOutput, Objective, TokenTerms
from rlrun.config.algorithm.names import Options

COUNTS = ("tokens", "sequences")
"""Metrics that are numbers of loss tokens and sequences. They are added and never divided."""


def add_metric_sums(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merge metrics of several micro-batches or ranks that are still sums: add sums and counts, take the maximum of `*_max`."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = torch.maximum(merged[name], value) if name.endswith("_max") else merged[name] + value
    return merged


def objective_means(merged: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the reported means of one objective from its merged metrics: sums divided by `tokens`, unchanged counts and `*_max`.

    Without tokens, all means are 0, and means over a quarter of the answers are absent.
    """
    return means_of_objectives([{name: float(value) for name, value in merged.items()}])


def means_of_objectives(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the reported means over the tokens of several objectives.

    A metric of only some objectives is a mean over their tokens. The losses of the objectives are already divided by the divisor of the
    whole batch, so they are added.

    Args:
        parts: merged metrics of each objective, with its own `tokens`.
    """
    found: dict[str, float] = {}
    names = dict.fromkeys(name for part in parts for name in part)
    for name in (name for name in names if name not in QUARTERS.values()):
        having = [part for part in parts if name in part]
        values = [part[name] for part in having]
        if name.endswith("_max"):
            found[name] = max(values)
        elif name == "loss" or name in COUNTS:
            found[name] = sum(values)
        elif name in QUARTERS:
            # Answers of one to three tokens have no token in some quarters, and a mean of 0 would mean equal probabilities.
            if tokens := sum(part[QUARTERS[name]] for part in having):
                found[name] = sum(values) / tokens
        else:
            found[name] = sum(values) / max(sum(part["tokens"] for part in having), 1.0)
    return found


PREFIX = "objective"
"""Prefix of metrics of one environment: `objective/<environment>/<name>`."""


@dataclass(frozen=True)
class Divisors:
    """Divisors of the objectives, in the order of `Mixture.objectives`. Each counts tokens or sequences, as its aggregation requires."""

    batch: tuple[float, ...]
    """Count over all samples of the batch. It divides the sum of the objective, `D_e(batch)` in the module's formula."""
    samples: tuple[float, ...]
    """Count over only the samples of the objective, `D_e(samples of e)` in the module's formula."""


@dataclass(frozen=True)
class KlAdvantage:
    """KL penalty in the reward of an objective, and the normalization of the advantages after the penalty is added.

    The penalty changes the advantages, so the normalization cannot be applied before.
    """

    reward: KlReward
    adv_mean: str = "none"
    """Level of the mean that is subtracted from the advantages: `none`, `group` or `batch`."""
    adv_std: str = "none"
    """Level of the standard deviation that divides the advantages."""
    neg_clipped: bool = False
    """Set negative advantages to 0 after the normalization."""
    batch: str = ""
    """Text of the advantage's settings. Objectives with equal texts are normalized together."""


@dataclass(frozen=True)
class Mixture:
    """Objective of a run, and objectives of single environments by their names."""

    run_objective: Objective
    """Objective of the run, for samples of all environments without their own objective."""
    environments: Mapping[str, Objective] = field(default_factory=dict)
    gae: Options | None = None
    """`gamma`, `lam`, `adv_mean` and `adv_std` if a critic computes the advantages, else None."""
    kl_rewards: tuple[KlAdvantage | None, ...] = ()
    """KL penalty in the reward of each objective, in the order of `objectives`; empty if no objective has one."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """All objectives, the run's first."""
        return (self.run_objective, *self.environments.values())

    @property
    def needs_entropy(self) -> bool:
        """Whether an objective needs the entropy with its gradient."""
        return any(objective.needs_entropy for objective in self.objectives)

    @property
    def is_linear(self) -> bool:
        """Whether the gradient on every log-prob is known before the forward pass. One pass over the logits is then sufficient."""
        return all(objective.is_linear for objective in self.objectives)

    @property
    def needs_recompute(self) -> bool:
        """Whether a trust region is relative to the policy at the start of the step."""
        return any(objective.proximal == "recompute" for objective in self.objectives)

    @property
    def rewards_kl(self) -> bool:
        """Whether the reward of an environment contains a KL penalty."""
        return any(one is not None for one in self.kl_rewards)

    def divisors(self, mask: Tensor, sequence_lengths: Sequence[int], environments: Sequence[str]) -> Divisors:
        """Return the divisors of a whole batch. They are needed before its first micro-batch is trained.

        Args:
            mask: loss mask of all sequences of the batch on all ranks, `[T]` bool.
            sequence_lengths: S lengths of the sequences.
            environments: S names of the sequences' environments.
        """
        whole = tuple(objective.denominator(mask, sequence_lengths) for objective in self.objectives)
        masks = self.masks(mask, sequence_lengths, environments)
        return Divisors(
            whole,
            tuple(
                objective.denominator(masks[index], sequence_lengths) if index in masks else 0.0
                for index, objective in enumerate(self.objectives)
            ),
        )

    def __call__(
        self, logprobs: Tensor, batch: LossBatch, *, environments: Sequence[str], divisors: Divisors
    ) -> LossOutput:
        """Return the loss of one micro-batch.

        Args:
            logprobs: log-probs of the packed tokens under the current policy, `[T]`.
            batch: all other inputs; `entropy` is required, `denominator` is ignored. Only objectives that recompute proximal log-probs
                read `proximal_logprobs`.
            environments: environment of each sequence; an environment without its own objective uses the run's.
            divisors: divisors of the whole batch.

        Returns:
            Loss, and the metrics of each objective in the micro-batch plus the sums `entropy` and `loss`. Their names are
            `<index of the objective in Mixture.objectives>/<name>`.
        """
        assert batch.entropy is not None
        entropy = batch.entropy.detach()
        losses: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        for index, part in self._objective_batches(batch, environments, divisors).items():
            output = self.objectives[index](logprobs, part)
            losses.append(output.loss)
            sums = {"entropy": torch.where(part.mask, entropy, 0).sum(), "loss": output.loss.detach()}
            metrics |= {f"{index}/{name}": value for name, value in (output.metrics | sums).items()}
        return LossOutput(losses[0] if len(losses) == 1 else torch.stack(losses).sum(), metrics)

    def token_terms(
        self, logprobs: Tensor, batch: LossBatch, *, environments: Sequence[str], divisors: Divisors
    ) -> dict[int, TokenTerms]:
        """Return the terms of each token of one micro-batch, by the index of the objective. The arguments are those of `__call__`."""
        parts = self._objective_batches(batch, environments, divisors)
        return {index: self.objectives[index].token_terms(logprobs, part) for index, part in parts.items()}

    def _objective_batches(
        self, batch: LossBatch, environments: Sequence[str], divisors: Divisors
    ) -> dict[int, LossBatch]:
        """Return the inputs of each objective with a sequence in the micro-batch, by the index of the objective."""
        masks = self.masks(batch.mask, batch.sequence_lengths, environments, batch.sequence_ids)
        return {
            index: replace(
                batch,
                mask=kept,
                denominator=divisors.batch[index],
                proximal_logprobs=batch.proximal_logprobs if self.objectives[index].proximal == "recompute" else None,
            )
            for index, kept in masks.items()
        }

    def add_metrics(self, parts: Sequence[Mapping[str, Tensor]], *, reference: bool) -> dict[str, Tensor]:
        """Merge the metrics of several micro-batches.

        All ranks add their metrics as equal lists of numbers. Therefore the names and their order must not depend on the environments
        in a rank's micro-batches: metrics of all objectives for zero tokens are merged first.

        Args:
            parts: metrics returned by the calls on this rank.
            reference: true if the calls had reference log-probs.
        """
        if not self.environments:
            return add_metric_sums(parts)
        device = next(iter(parts[0].values())).device
        return add_metric_sums([self._zero_metrics(reference, device), *parts])

    def reported_means(self, merged: Mapping[str, float], divisors: Divisors) -> dict[str, float]:
        """Return the reported means of sums over all micro-batches and ranks.

        A metric of only some objectives is a mean over their tokens. `loss` is the loss of the batch.

        Returns:
            Metrics of the batch, and metrics `objective/<environment>/<name>` of each environment with its own objective and with tokens
            in the batch. Their `loss` is the loss of only the environment's samples.
        """
        parts = [_objective_metrics(merged, index) for index in range(len(self.objectives))]
        found = _reported_means([part for part in parts if part])
        for index, name in enumerate(self.environments, start=1):
            mine = parts[index]
            if mine["tokens"] > 0:
                loss = mine["loss"] * divisors.batch[index] / divisors.samples[index]
                found |= {
                    f"{PREFIX}/{name}/{key}": value for key, value in (_reported_means([mine]) | {"loss": loss}).items()
                }
        return found

    def masks(
        self,
        mask: Tensor,
        sequence_lengths: Sequence[int],
        environments: Sequence[str],
        sequence_ids: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """Return the loss masks, `[T]` bool, by the index of the objective, for objectives with a sequence in the micro-batch."""
        number = {name: index for index, name in enumerate(self.environments, start=1)}
        numbers = [number.get(name, 0) for name in environments]
        if len(set(numbers)) == 1:
            return {numbers[0]: mask}
        own = torch.tensor(numbers)
        if sequence_ids is None:
            which = own.repeat_interleave(torch.tensor(sequence_lengths)).to(mask.device)
        else:
            which = own.to(mask.device, non_blocking=True)[sequence_ids]
        return {index: mask.bool() & (which == index) for index in sorted(set(numbers))}

    def _zero_metrics(self, reference: bool, device: torch.device) -> dict[str, Tensor]:
        """Return the metrics of all objectives for zero tokens: all names in a fixed order.

        The environment "" has no objective of its own, so it stands for the run's objective.
        """
        zeros = torch.zeros(1, device=device)
        nothing = Divisors((1.0,) * len(self.objectives), (1.0,) * len(self.objectives))
        found: dict[str, Tensor] = {}
        for name in ("", *self.environments):
            batch = LossBatch(
                inference_logprobs=zeros,
                advantages=zeros,
                mask=zeros.bool(),
                sequence_lengths=[1],
                entropy=zeros.clone().requires_grad_(),
                reference_logprobs=zeros if reference else None,
                versions=zeros.long(),
                policy_version=0,
                sequence_ids=zeros.long(),
                checked=True,  # zeros are valid, so the host does not wait for the device
            )
            logprobs = zeros.clone().requires_grad_()
            found |= self(logprobs, batch, environments=[name], divisors=nothing).metrics
        return found


def _objective_metrics(merged: Mapping[str, float], index: int) -> dict[str, float]:
    """Select the metrics of one objective and remove their prefix."""
    start = f"{index}/"
    return {name.removeprefix(start): value for name, value in merged.items() if name.startswith(start)}


def _reported_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return `means_of_objectives` with the reported name of the number of tokens, `loss_tokens`."""
    found = means_of_objectives(parts)
    return {"loss_tokens" if name == "tokens" else name: value for name, value in found.items()}
