"""Several objectives in one batch: a run's own, and those of environments that learn otherwise.

The loss of a token is that of its environment's objective, and what it weighs is what it would weigh if that objective were of the whole
batch. With `w` and `D` of the aggregation of environment `e` (`aggregation.py`), `D` counted over the *whole* batch:

    L = Σ_e 1/D_e(batch) · Σ_{tokens k of e} w_e(k)·l_e(k)  =  Σ_e share_e · L_e

`L_e` is the loss of e's samples alone, and `share_e = D_e(samples of e)/D_e(batch)` their share of the batch: of its loss tokens for
`token_mean`, else of its sequences that have one. So an environment changes nothing for the samples of the others, environments of equal
settings are one loss over all of them, and the sum is as independent of packing, order and ranks as each of its terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlrun.algorithms.kl_reward import KlReward
from rlrun.algorithms.metrics import joint_means, merge_metrics
from rlrun.algorithms.objective import LossOutput, Objective, TokenTerms
from rlrun.config.algorithm.names import Options

PREFIX = "objective"
"""Metrics of one environment are `objective/<environment>/<name>`."""


@dataclass(frozen=True)
class Divisors:
    """Divisors of each objective, in the order of `Mixture.objectives`."""

    batch: tuple[float, ...]
    """Divisor of its sum: the count over all samples of the batch, by its aggregation."""
    own: tuple[float, ...]
    """The count over the samples that it is for."""


@dataclass(frozen=True)
class RewardedKl:
    """KL in the reward of an objective, and what its advantages become after it."""

    reward: KlReward
    adv_mean: str = "none"
    """Level of the mean that is subtracted from the advantages afterwards: `none`, `group` or `batch`."""
    adv_std: str = "none"
    """Level of the standard deviation that they are divided by."""
    neg_clipped: bool = False
    """Negative advantages become 0, last of all."""
    batch: str = ""
    """Name of the advantage's settings: objectives of equal settings are normalized together."""


@dataclass(frozen=True)
class Mixture:
    """A run's whole objective: its own, and those of the environments that have another, by the environment's name."""

    own: Objective
    environments: Mapping[str, Objective] = field(default_factory=dict)
    gae: Options | None = None
    """`gamma`, `lam`, `adv_mean` and `adv_std`, where a critic makes the advantages of all samples."""
    kl_rewards: tuple[RewardedKl | None, ...] = ()
    """KL in the reward of each objective, in the order of `objectives`; empty: of none."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The run's own first."""
        return (self.own, *self.environments.values())

    @property
    def needs_entropy(self) -> bool:
        """True if the entropy must be given with its gradient."""
        return any(objective.needs_entropy for objective in self.objectives)

    @property
    def is_linear(self) -> bool:
        """True if the gradient on every log-prob is known before the forward pass."""
        return all(objective.is_linear for objective in self.objectives)

    @property
    def recomputes(self) -> bool:
        """True if a trust region is measured from the policy at the start of the step."""
        return any(objective.proximal == "recompute" for objective in self.objectives)

    @property
    def rewards_kl(self) -> bool:
        """True if a KL to the reference is in the reward of an environment."""
        return any(one is not None for one in self.kl_rewards)

    def divisors(self, mask: Tensor, sequence_lengths: Sequence[int], environments: Sequence[str]) -> Divisors:
        """Divisors for a whole batch, before its first micro-batch is trained.

        Args:
            mask: `[T]` bool, the loss mask of all sequences of the batch, on all ranks.
            sequence_lengths: their S lengths.
            environments: their S environments.
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
        self,
        logprobs: Tensor,
        *,
        mask: Tensor,
        sequence_lengths: Sequence[int],
        environments: Sequence[str],
        divisors: Divisors,
        entropy: Tensor,
        proximal_logprobs: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        **inputs: Any,
    ) -> LossOutput:
        """The loss of one micro-batch.

        Args:
            logprobs, mask, sequence_lengths, sequence_ids, entropy: as `Objective` takes them.
            environments: of each sequence; a name that has no objective of its own has the run's.
            divisors: of the whole batch.
            proximal_logprobs: `[T]` at the start of the step, for the objectives that recompute them.
            inputs: the others of `Objective`, for all alike.

        Returns:
            The loss, and sums as `policy_loss` returns them, with `entropy` and `loss`, each as `<number of the objective>/<name>`.
        """
        masks = self.masks(mask, sequence_lengths, environments, sequence_ids)
        losses: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        for index, kept in masks.items():
            objective = self.objectives[index]
            output = objective(
                logprobs,
                mask=kept,
                sequence_lengths=sequence_lengths,
                denominator=divisors.batch[index],
                entropy=entropy,
                proximal_logprobs=proximal_logprobs if objective.proximal == "recompute" else None,
                sequence_ids=sequence_ids,
                **inputs,
            )
            losses.append(output.loss)
            sums = {"entropy": torch.where(kept, entropy.detach(), 0).sum(), "loss": output.loss.detach()}
            metrics |= {f"{index}/{name}": value for name, value in (output.metrics | sums).items()}
        return LossOutput(losses[0] if len(losses) == 1 else torch.stack(losses).sum(), metrics)

    def token_terms(
        self,
        logprobs: Tensor,
        *,
        mask: Tensor,
        sequence_lengths: Sequence[int],
        environments: Sequence[str],
        divisors: Divisors,
        sequence_ids: Tensor | None = None,
        **inputs: Any,
    ) -> dict[int, TokenTerms]:
        """Terms of each token of one micro-batch, by the number of the objective; arguments as of a call."""
        proximal = inputs.pop("proximal_logprobs", None)
        return {
            index: self.objectives[index].terms(
                logprobs,
                mask=kept,
                sequence_lengths=sequence_lengths,
                denominator=divisors.batch[index],
                proximal_logprobs=proximal if self.objectives[index].proximal == "recompute" else None,
                sequence_ids=sequence_ids,
                **inputs,
            )
            for index, kept in self.masks(mask, sequence_lengths, environments, sequence_ids).items()
        }

    def merged(self, parts: Sequence[Mapping[str, Tensor]], *, reference: bool) -> dict[str, Tensor]:
        """The metrics of several micro-batches as one, with the same names in the same order whatever environments they hold.

        Args:
            parts: what calls returned, of this rank.
            reference: whether the calls were given reference log-probs.
        """
        if not self.environments:
            return merge_metrics(parts)
        device = next(iter(parts[0].values())).device
        return merge_metrics([self._nothing(reference, device), *parts])

    def means(self, merged: Mapping[str, float], divisors: Divisors) -> dict[str, float]:
        """Reported means of the sums over all micro-batches and ranks.

        A metric that only some objectives have is a mean over the tokens of these. `loss` is that of the batch.

        Returns:
            The metrics of the batch; and as `objective/<environment>/<name>` those of each environment that has an objective of its own
            and tokens in the batch. There `loss` is the one of its samples alone.
        """
        parts = [_numbered(merged, index) for index in range(len(self.objectives))]
        found = _means([part for part in parts if part])
        for index, name in enumerate(self.environments, start=1):
            mine = parts[index]
            if mine["tokens"] > 0:
                loss = mine["loss"] * divisors.batch[index] / divisors.own[index]
                found |= {f"{PREFIX}/{name}/{key}": value for key, value in (_means([mine]) | {"loss": loss}).items()}
        return found

    def masks(
        self,
        mask: Tensor,
        sequence_lengths: Sequence[int],
        environments: Sequence[str],
        sequence_ids: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """The loss mask of each objective that has a sequence here, `[T]` bool, by its number."""
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

    def _nothing(self, reference: bool, device: torch.device) -> dict[str, Tensor]:
        """The metrics of no token at all, of every objective."""
        zeros = torch.zeros(1, device=device)
        nothing = Divisors((1.0,) * len(self.objectives), (1.0,) * len(self.objectives))
        found: dict[str, Tensor] = {}
        for name in ("", *self.environments):
            found |= self(
                zeros.clone().requires_grad_(),
                mask=zeros.bool(),
                sequence_lengths=[1],
                environments=[name],
                divisors=nothing,
                entropy=zeros.clone().requires_grad_(),
                inference_logprobs=zeros,
                advantages=zeros,
                reference_logprobs=zeros if reference else None,
                versions=zeros.long(),
                policy_version=0,
                sequence_ids=zeros.long(),
                checked=True,
            ).metrics
        return found


def _numbered(merged: Mapping[str, float], index: int) -> dict[str, float]:
    """The metrics of one objective, by their own names."""
    start = f"{index}/"
    return {name.removeprefix(start): value for name, value in merged.items() if name.startswith(start)}


def _means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found = joint_means(parts)
    return {"loss_tokens" if name == "tokens" else name: value for name, value in found.items()}
