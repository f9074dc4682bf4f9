"""Construction of a run's objective from its resolved configuration."""

from __future__ import annotations

import torch
from loguru import logger

from rlrun.algorithms import KlReward, LossBatch, Mixture, Objective, Regularizers
from rlrun.algorithms.mixture import RewardedKl
from rlrun.config.algorithm.names import complete_options, is_import_path
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes


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
        name: step_objective(own.over(algorithm), config.seq_len, where=f"environmentAlgorithms.{name}")
        for name, own in config.environment_algorithms.items()
    }
    own = {name: one.over(algorithm) for name, one in config.environment_algorithms.items()}
    kls = tuple(_rewarded_kl(one) for one in (algorithm, *own.values()))
    return Mixture(step_objective(algorithm, config.seq_len), environments, gae, kls if any(kls) else ())


def _rewarded_kl(algorithm: AlgorithmConfig) -> RewardedKl | None:
    """Return the KL penalty in the reward of an objective and the advantage options to apply after it, or None."""
    terms, advantage = algorithm.regularizers, algorithm.effective_advantage
    if terms.kl_reward == 0:
        return None
    options = complete_options("advantage", advantage.name, advantage.options)
    if is_import_path(advantage.name):
        return RewardedKl(KlReward(terms.kl_reward, terms.kl_reward_kind))
    return RewardedKl(
        KlReward(terms.kl_reward, terms.kl_reward_kind, options.get("gamma", 1.0)),
        adv_mean=options["adv_mean"],
        adv_std=options["adv_std"],
        neg_clipped=options.get("neg_clipped", False),
        batch=advantage.model_dump_json(),
    )


def log_band_warnings(config: TrainerConfig) -> None:
    """Log a warning for each loss whose bounds are narrower than rounding errors; called on one rank of a run."""
    warnings = {"algorithm": config.algorithm.band_warning} | {
        f"environmentAlgorithms.{name}": own.over(config.algorithm).band_warning
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
