"""The critic of PPO: the policy's body with a value head, trained on the returns of the policy's batches.

The value at position `j` is the value of the text before token `j`, just as the log-prob of token `j` is conditional on that text. Tokens
outside the loss mask have no value. For advantage `gae` the batch's column `advantages` contains rewards, shaped by the run's filters;
the reward of a sample is at its last loss token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlrun.algorithms import explained_variance, gae, value_loss
from rlrun.config.layout_rules import CRITIC_PROBLEM
from rlrun.config.models.language_models import CriticConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.forward import Signals, release_gathered
from rlrun.trainer.learning.optim.update import Stopwatch, all_finite, apply_gradient
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import group_places, normalize_tokens, token_moments
from rlrun.trainer.learning.step_buffer import MicroBatch
from rlrun.trainer.modeling.gradient_accumulation import prepare_backward
from rlrun.trainer.modeling.load_weights import ArchitectureCheck, LoadOptions, load_sharded
from rlrun.trainer.modeling.lora import fill_parameter
from rlrun.trainer.modeling.parallel.sharded_rows import join_rows, row_part
from rlrun.trainer.modeling.shard import Memory
from rlrun.trainer.ranks.group import Group

CRITIC = "critic"
"""Name of the critic in a checkpoint."""


@dataclass(frozen=True)
class Critic:
    """Value model with its optimizer and clipping limits."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    value_clip: float | None = None
    max_grad_norm: float | None = None


@dataclass(frozen=True)
class Estimates:
    """Values, advantages and returns of all rows of a step, in their order."""

    values: list[Tensor]
    advantages: list[Tensor]
    returns: list[Tensor]
    metrics: dict[str, float]
    """`explained_variance`, `value_mean` and `return_mean` over the loss tokens of all ranks."""


def make_critic(
    config: CriticConfig, trainer: TrainerConfig, source: str, *, group: Group, check: ArchitectureCheck
) -> Critic:
    """Load the policy's body from `source`, add a value head and shard the model like the policy.

    Args:
        config: options of the critic.
        trainer: options shared with the policy.
        source: source of the policy's model.
        group: all ranks; all call this function together.
        check: architecture check, see `load_sharded`.

    Raises:
        RoleError: the model cannot be loaded or divided.
    """
    check_layout(trainer)
    module = load_sharded(
        trainer.model,
        source,
        group,
        seq_len=trainer.seq_len,
        check=check,
        options=LoadOptions(memory=Memory.from_config(trainer), kernel=trainer.attention, prepare=to_critic),
    )
    return critic_around(module, config, trainer, group=group)


def critic_around(module: Any, config: CriticConfig, trainer: TrainerConfig, *, group: Group) -> Critic:
    """Create a new critic from a sharded module of `to_critic`; for the arguments see `make_critic`."""
    head = module.get_output_embeddings().weight
    fill_parameter(head, torch.zeros(head.shape))  # the head was created without memory
    optimizer = make_optimizer(module, trainer.optimizer.model_copy(update={"lr": config.lr}), group.device)
    return Critic(module, optimizer, config.value_clip, trainer.optimizer.max_grad_norm)


def check_layout(trainer: TrainerConfig) -> None:
    """Raise `RoleError` if the run divides the model into pipeline stages."""
    if trainer.parallelism.pp > 1:
        raise RoleError(f"trainer.parallelism.pp ({trainer.parallelism.pp}) {CRITIC_PROBLEM}", exit_codes.CONFIGURATION)


def to_critic(model: nn.Module) -> nn.Module:
    """Replace the LM head with a value head, in place. Its weights are 0, so that a new critic assigns value 0 to every text."""
    config: Any = model.config
    config.tie_word_embeddings = False  # the embedding must not become the value head
    if getattr(config, "final_logit_softcapping", None) is not None:
        config.final_logit_softcapping = None  # the soft cap applies to logits only
    embedding = model.get_input_embeddings().weight
    head = nn.Linear(
        config.get_text_config().hidden_size, 1, bias=False, dtype=embedding.dtype, device=embedding.device
    )
    nn.init.zeros_(head.weight)
    model.set_output_embeddings(head)
    return model


def row_values(critic: nn.Module, row: MicroBatch) -> Tensor:
    """Return the value before each loss token, `[T]` fp32, differentiable, 0 elsewhere; complete on all ranks that share the row.

    For a row without loss tokens the first position is computed, so that every rank runs the same collectives.
    """
    return _values_before(critic, row, row.predicted, len(row.input_ids))


def row_values_and_ends(critic: nn.Module, row: MicroBatch, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return `row_values`, and the values after the positions `ends` (`[N]` int64) as `[N]` fp32, from one pass.

    Each position must be the last loss token of its sequence, because value `j + 1` belongs to the next position.
    """
    tokens = len(row.input_ids)
    found = _values_before(critic, row, torch.cat([row.predicted, ends + 1]), tokens + 1)
    return torch.where(row.mask, found[:-1], 0), found[ends + 1]


def _values_before(critic: nn.Module, row: MicroBatch, positions: Tensor, length: int) -> Tensor:
    """Return the value of the text before each of the positions, `[length]` fp32; 0 elsewhere."""
    part = row_part(critic, row.input_ids, row.position_ids, row.packed, positions)
    output = critic(
        input_ids=part.input_ids[None],
        position_ids=part.position_ids[None],
        packed=part.packed,
        logits_to_keep=part.before,
        use_cache=False,
    )
    return join_rows(critic, part, output.logits[0, :, 0].float(), length)


def token_rewards(samples: Sequence[Sample], row: MicroBatch) -> Tensor:
    """Return a row of rewards, `[T]` fp32: each sample's reward at its last loss token, 0 elsewhere."""
    rewards = torch.zeros(row.mask.shape)
    start = 0
    for sample in samples:
        trained = sample.loss_mask.nonzero()[0]
        if len(trained):
            rewards[start + int(trained[-1])] = float(sample.advantages[trained[-1]])
        start += len(sample)
    return rewards.to(row.mask.device)


def last_tokens(samples: Sequence[Sample]) -> dict[int, int]:
    """Return the position in the row of the last loss token of each truncated sample, by index of the sample."""
    found, start = {}, 0
    for place, sample in enumerate(samples):
        trained = sample.loss_mask.nonzero()[0]
        if sample.truncated and len(trained):
            found[place] = start + int(trained[-1])
        start += len(sample)
    return found


@dataclass(frozen=True)
class GaeOptions:
    """Options of advantage `gae`."""

    gamma: float
    """Discount per loss token, see `rlrun.algorithms.gae`."""
    lam: float
    """λ of the estimator, see `rlrun.algorithms.gae`."""
    bootstrap: bool
    """Use the value after the last loss token of a truncated sample as the value of the missing continuation."""
    adv_mean: str
    """Level of the mean that is subtracted from the advantages, over the loss tokens of all ranks."""
    adv_std: str
    """Level of the standard deviation that divides the advantages."""


def estimate_values(
    critic: nn.Module,
    rows: Sequence[MicroBatch],
    samples: Sequence[Sequence[Sample]],
    options: GaeOptions,
    *,
    groups: Sequence[int],
    group: Group,
    more_rewards: Sequence[Tensor] | None = None,
) -> Estimates:
    """Compute values, advantages (GAE) and returns of all rows before the first update of a step. All ranks call it together.

    Args:
        critic: value model.
        rows: rows of this rank, of all updates of the step.
        samples: samples of each row.
        options: options of the estimator.
        groups: distinct group numbers of all samples of the step, in the same order on all ranks.
        group: all ranks.
        more_rewards: rewards of each row's tokens, `[T]`, added to the batch's rewards.

    Raises:
        RoleError: a value of the critic is not finite.
    """
    with torch.no_grad():
        found_values = [
            _row_estimates(critic, row, members, options.bootstrap) for row, members in zip(rows, samples, strict=True)
        ]
    values, finals = [one for one, _ in found_values], [final for _, final in found_values]
    release_gathered(critic)
    _check_finite([*values, *finals])
    advantages, returns = [], []
    for index, (row, members, value) in enumerate(zip(rows, samples, values, strict=True)):
        rewards = token_rewards(members, row)
        found = gae(
            rewards if more_rewards is None else rewards + more_rewards[index],
            value,
            mask=row.mask,
            sequence_lengths=row.packed.lengths,
            gamma=options.gamma,
            lam=options.lam,
            whitened=False,
            final_values=finals[index],
        )
        advantages.append(found.advantages)
        returns.append(found.returns)
    masks = [row.mask for row in rows]
    metrics = _value_metrics(values, returns, masks, group)
    mean, std = options.adv_mean, options.adv_std
    if (mean, std) != ("none", "none"):
        ids = [group_places(members, groups, row) for row, members in zip(rows, samples, strict=True)]
        advantages = normalize_tokens(advantages, masks, ids, len(groups), mean=mean, std=std, group=group)
    return Estimates(values, advantages, returns, metrics)


def _check_finite(values: Sequence[Tensor]) -> None:
    """Raise `RoleError` if a value is infinite or not a number."""
    if not all_finite(values):
        raise RoleError(
            "algorithm.critic: the values are not finite; lower algorithm.critic.lr, and resume from a checkpoint before",
            exit_codes.FAILURE,
        )


def _value_metrics(
    values: Sequence[Tensor], returns: Sequence[Tensor], masks: Sequence[Tensor], group: Group
) -> dict[str, float]:
    """Explained variance and means over the loss tokens of all rows of all ranks."""
    residuals = [r - v for r, v in zip(returns, values, strict=True)]
    of_returns = token_moments(returns, masks, group)
    return {
        "explained_variance": explained_variance(of_returns, token_moments(residuals, masks, group)),
        "return_mean": float(of_returns.mean),
        "value_mean": float(token_moments(values, masks, group).mean),
    }


def _row_estimates(
    critic: nn.Module, row: MicroBatch, samples: Sequence[Sample], bootstrap: bool
) -> tuple[Tensor, Tensor]:
    """Values of a row `[T]`, and after each of its sequences `[S]`: 0 but for truncated samples."""
    final = row.advantages.new_zeros(len(row.packed.lengths))
    if not bootstrap or not (ends := last_tokens(samples)):
        return row_values(critic, row), final
    positions = torch.tensor(list(ends.values()), device=row.mask.device)
    values, after = row_values_and_ends(critic, row, positions)
    final[torch.tensor(list(ends), device=row.mask.device)] = after
    return values, final


def critic_step(
    critic: Critic, batch: Batch, rows: Sequence[MicroBatch], signals: Sequence[Signals], *, group: Group, lr: float
) -> dict[str, float]:
    """Update the critic on `rows`, this rank's micro-batches of `batch`; every rank has the same number of rows.

    The host waits for the device once, at the end.

    Returns:
        `value_loss` and `value_clip_fraction`, exact over the loss tokens of all ranks, `critic_grad_norm` (before clipping),
        `critic_lr`, `critic_skipped` (1 if the gradient was not finite and the update was skipped) and `time/critic` in seconds.
    """
    watch = Stopwatch(group.device)
    denominator = max(batch.loss_tokens, 1)
    losses: list[Tensor] = []
    clipped: list[Tensor] = []
    for index, (inputs, signal) in enumerate(zip(rows, signals, strict=True)):
        prepare_backward(critic.module, last=index == len(rows) - 1)
        assert signal.returns is not None
        assert signal.values is not None
        found = value_loss(
            row_values(critic.module, inputs),
            returns=signal.returns,
            old_values=signal.values,
            mask=inputs.mask,
            clip=critic.value_clip,
            denominator=denominator,
        )
        found.loss.backward()
        losses.append(found.loss.detach())
        clipped.append(found.clipped)
    values = {}
    if losses:
        values = {"value_loss": torch.stack(losses).sum(), "value_clip_fraction": torch.stack(clipped).sum()}
    applied = apply_gradient(critic.module, critic.optimizer, lr=lr, max_grad_norm=critic.max_grad_norm, values=values)
    watch.record_mark()
    sums = {
        "value_loss": applied.values.get("value_loss", 0.0),
        "value_clip_fraction": applied.values.get("value_clip_fraction", 0.0) / denominator,
    }
    return group.data_sums(sums) | {
        "critic_grad_norm": applied.grad_norm,
        "critic_lr": lr,
        "critic_skipped": float(not applied.updated),
        "time/critic": watch.lap_seconds()[0],
    }
