"""Objective of a run: the division of a batch into updates, the loss, and the advantages per token.

A step's batch is divided into its optimizer updates. The objective is created from the run's resolved configuration. Advantages per token
are computed before the first update of a step: KL penalty in the reward, normalization over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from loguru import logger
from torch import Tensor

from rlrun.advantages.estimators import Floats, level_means, level_stds
from rlrun.algorithms import KlReward, LossBatch, Mixture, Objective, Regularizers
from rlrun.algorithms.objective_mixture import KlAdvantage
from rlrun.algorithms.returns import Moments
from rlrun.config.algorithm.names import complete_options, is_import_path
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.packing.micro_batches import Row
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.step_buffer import MicroBatch
from rlrun.trainer.ranks.group import Group


@dataclass(frozen=True)
class Update:
    """Data of one optimizer update."""

    batch: Batch
    """Samples of this update on all ranks; the denominators count them."""
    rows: Sequence[Row]
    """Micro-batches of this rank as indices into `batch.samples`; every rank has the same number."""
    is_repeated: bool = False
    """The update belongs to a later pass over the samples of the step."""


def mini_batches(batch: Batch, count: int, *, seed: int, epoch: int = 0) -> list[Batch]:
    """Divide the samples with a loss token randomly into `count` parts of nearly equal size.

    The division depends only on `seed`, the batch's step and the number `epoch` of the pass over the batch, from 0, so it is the same on
    every rank and after a resume. For `count` 1 the result
    is the batch itself. With fewer samples than `count`, each sample is one part.
    """
    if count == 1:
        return [batch]
    trained = [index for index, sample in enumerate(batch.samples) if sample.loss_mask.any()]
    drawn_from = [seed, batch.step] if epoch == 0 else [seed, batch.step, epoch]
    order = np.random.default_rng(drawn_from).permutation(trained)
    parts = np.array_split(order, min(count, len(trained)))
    return [replace(batch, samples=tuple(batch.samples[i] for i in sorted(part))) for part in parts]


def bind_objective(config: TrainerConfig) -> Mixture:
    """Create the run's objective, with the objectives of environments and the options of a critic's advantages.

    Raises:
        RoleError: see `step_objective`.
    """
    algorithm, gae = config.algorithm, None
    if algorithm.critic is not None:
        advantage = algorithm.effective_advantage
        gae = complete_options("advantage", advantage.name, advantage.options)
    environments = {
        name: step_objective(own.merged_over(algorithm), config.seq_len, where=f"environmentAlgorithms.{name}")
        for name, own in config.environment_algorithms.items()
    }
    own = {name: one.merged_over(algorithm) for name, one in config.environment_algorithms.items()}
    kls = tuple(_rewarded_kl(one) for one in (algorithm, *own.values()))
    return Mixture(step_objective(algorithm, config.seq_len), environments, gae, kls if any(kls) else ())


def _rewarded_kl(algorithm: AlgorithmConfig) -> KlAdvantage | None:
    """Return the KL penalty in the reward of an objective and the advantage options to apply after it, or None."""
    terms, advantage = algorithm.regularizers, algorithm.effective_advantage
    if terms.kl_reward == 0:
        return None
    options = complete_options("advantage", advantage.name, advantage.options)
    if is_import_path(advantage.name):
        return KlAdvantage(KlReward(terms.kl_reward, terms.kl_reward_kind))
    return KlAdvantage(
        KlReward(terms.kl_reward, terms.kl_reward_kind, options.get("gamma", 1.0)),
        adv_mean=options["adv_mean"],
        adv_std=options["adv_std"],
        neg_clipped=options.get("neg_clipped", False),
        batch=advantage.model_dump_json(),
    )


def log_band_warnings(config: TrainerConfig) -> None:
    """Log a warning for each loss whose bounds are narrower than rounding errors; called on one rank of a run."""
    warnings = {"algorithm": config.algorithm.band_warning} | {
        f"environmentAlgorithms.{name}": own.merged_over(config.algorithm).band_warning
        for name, own in config.environment_algorithms.items()
    }
    for where, warning in warnings.items():
        if warning is not None:
            logger.warning(f"{where}: {warning}")


def step_objective(config: AlgorithmConfig, seq_len: int, *, where: str = "algorithm") -> Objective:
    """Create the objective of a step from a preset and the run's overrides.

    Args:
        config: resolved algorithm of the run or of an environment.
        seq_len: default of the number of tokens for `constant_length`.
        where: name of the configuration block in error messages.

    Raises:
        RoleError: the loss is unknown, does not accept an option, or cannot be imported.
    """
    aggregation = config.effective_aggregation
    terms, correction = config.regularizers, config.effective_correction
    try:
        result = Objective(
            loss=config.effective_loss.name,
            options=dict(config.effective_loss.options),
            aggregation=aggregation,
            aggregation_length=(config.aggregation_length or seq_len) if aggregation == "constant_length" else None,
            regularizers=Regularizers(entropy=terms.entropy, kl=terms.kl, kl_kind=terms.kl_kind),
            correction=correction.options if correction is not None else None,
            proximal=config.effective_proximal,
        )
        _try_function(result)
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        raise RoleError(f"{where}.loss: {error}", exit_codes.CONFIGURATION) from error
    return result


def _try_function(objective: Objective) -> None:
    """Call the loss with one token, to detect a user's function that fails before a model is loaded."""
    zeros = torch.zeros(2)
    batch = LossBatch(
        inference_logprobs=zeros,
        advantages=zeros,
        mask=torch.tensor([False, True]),
        sequence_lengths=[2],
        entropy=zeros.clone().requires_grad_(),
        reference_logprobs=zeros,
        versions=torch.tensor([0, 0]),
        policy_version=0,
    )
    objective(zeros.clone().requires_grad_(), batch)


@dataclass(frozen=True)
class KlInputs:
    """Rows of all updates of a step on this rank, with the log-probs for their KL rewards."""

    loss: Mixture
    rows: Sequence[MicroBatch]
    samples: Sequence[Sequence[Sample]]
    """Samples of each row."""
    logprobs: Sequence[Tensor]
    """Log-probs of the policy at the start of the step, `[T]` per row."""
    reference: Sequence[Tensor]
    """Log-probs of the reference, `[T]` per row."""

    def row_penalties(self, index: int) -> list[tuple[KlAdvantage, Tensor]]:
        """Return the KL penalties of a row's environments, each with the loss mask `[T]` of its tokens."""
        row, kls = self.rows[index], self.loss.kl_rewards
        environments = [sample.environment for sample in self.samples[index]] or [""]
        masks = self.loss.masks(row.mask, row.packed.lengths, environments, row.sequence_ids)
        return [(kl, mask) for number, mask in masks.items() if (kl := kls[number]) is not None]


def kl_token_rewards(inputs: KlInputs) -> list[Tensor]:
    """Return the KL rewards of the tokens of each row, `[T]` fp32; 0 for environments without a KL penalty."""
    found = []
    for index, row in enumerate(inputs.rows):
        total = torch.zeros_like(row.advantages)
        for kl, mask in inputs.row_penalties(index):
            total = total + kl.reward.rewards(inputs.logprobs[index], inputs.reference[index], mask)
        found.append(total)
    return found


def kl_advantages(inputs: KlInputs, *, groups: Sequence[int], group: Group) -> list[Tensor]:
    """Return the batch's advantages plus the returns of the KL rewards, normalized and clipped by the advantage's options, `[T]` fp32 per
    row.

    With a KL penalty the batch contains advantages before normalization (`AlgorithmConfig.batch_advantage`). All ranks call it together.

    Args:
        inputs: rows and log-probs of this rank.
        groups: distinct group numbers of all samples of the step, in the same order on all ranks.
        group: all ranks.
    """
    rows = inputs.rows
    advantages = [row.advantages for row in rows]
    for index, row in enumerate(rows):
        for kl, mask in inputs.row_penalties(index):
            advantages[index] = advantages[index] + kl.reward.returns(
                inputs.logprobs[index], inputs.reference[index], mask=mask, sequence_lengths=row.packed.lengths
            )
    # Each normalization is a collective sum, so all ranks must use the same order: the order of the objectives.
    for settings in dict.fromkeys(kl.batch for kl in inputs.loss.kl_rewards if kl is not None):
        advantages = _finish_advantages(inputs, advantages, settings, groups, group)
    return advantages


def _finish_advantages(
    inputs: KlInputs, advantages: Sequence[Tensor], settings: str, groups: Sequence[int], group: Group
) -> list[Tensor]:
    """Normalize and clip the advantages of environments with the given settings."""
    chosen = next(kl for kl in inputs.loss.kl_rewards if kl is not None and kl.batch == settings)
    masks = []
    for index, row in enumerate(inputs.rows):
        mask = torch.zeros_like(row.mask)
        for kl, own in inputs.row_penalties(index):
            mask = mask | own if kl.batch == settings else mask
        masks.append(mask)
    found = list(advantages)
    if (chosen.adv_mean, chosen.adv_std) != ("none", "none"):
        places = [group_places(members, groups, row) for row, members in zip(inputs.rows, inputs.samples, strict=True)]
        found = normalize_tokens(
            found, masks, places, len(groups), mean=chosen.adv_mean, std=chosen.adv_std, group=group
        )
    if chosen.neg_clipped:
        found = [values.clamp(min=0) for values in found]
    return [torch.where(mask, new, old) for mask, new, old in zip(masks, found, advantages, strict=True)]


def group_places(samples: Sequence[Sample], groups: Sequence[int], row: MicroBatch) -> Tensor:
    """Return the index in `groups` of each token's group, `[T]`."""
    places = {number: place for place, number in enumerate(groups)}
    found = torch.zeros(row.mask.shape, dtype=torch.long)
    start = 0
    for sample in samples:
        found[start : start + len(sample)] = places[sample.group]
        start += len(sample)
    return found.to(row.mask.device)


def normalize_tokens(
    values: Sequence[Tensor],
    masks: Sequence[Tensor],
    ids: Sequence[Tensor],
    num_groups: int,
    *,
    mean: str,
    std: str,
    group: Group,
) -> list[Tensor]:
    """Subtract the mean and divide by the standard deviation of the masked tokens of all ranks, each at its level."""

    def sums(terms: Sequence[Tensor]) -> Floats:
        """Sum the terms of each group over all ranks, `[num_groups]`."""
        mine = np.zeros(num_groups)
        for term, mask, which in zip(terms, masks, ids, strict=True):
            # On the host, where the order of the sum is fixed.
            kept, groups = term[mask].double().cpu().numpy(), which[mask].cpu().numpy()
            mine += np.bincount(groups, weights=kept, minlength=num_groups)
        summed = group.data_sums({str(place): value for place, value in enumerate(mine.tolist())})
        return np.array([summed[str(place)] for place in range(num_groups)])

    def of_tokens(per_group: Floats) -> list[Tensor]:
        found = torch.from_numpy(per_group)
        return [found.to(which.device)[which] for which in ids]

    counts = sums([torch.ones_like(value) for value in values])
    means = of_tokens(level_means(mean, counts, sums(values)))
    centred = [value.double() - own for value, own in zip(values, means, strict=True)]
    stds = of_tokens(level_stds(std, counts, sums([value.square() for value in centred])))
    return [
        torch.where(mask, value / own, 0).to(before.dtype)
        for value, own, mask, before in zip(centred, stds, masks, values, strict=True)
    ]


def token_moments(values: Sequence[Tensor], masks: Sequence[Tensor], group: Group) -> Moments:
    """Compute the moments of the masked tokens of all rows of all ranks, on the CPU."""
    parts = [Moments.from_values(value, mask) for value, mask in zip(values, masks, strict=True)]
    names = ("count", "total", "squares")
    mine = {name: float(sum(float(getattr(part, name)) for part in parts)) for name in names}
    summed = group.data_sums(mine)
    return Moments(*(torch.tensor(summed[name], dtype=torch.float64) for name in names))
