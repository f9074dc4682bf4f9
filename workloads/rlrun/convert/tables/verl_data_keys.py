"""verl's keys of data, algorithm, critic and rewards, and the supported programs of verl.

Only settings of the programs in `PROGRAMS` are converted. Other programs have the same keys, but also Python code that can change the
training.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlrun.convert.tables.row import Row, dropped_row, dropped_rows, joined_row, refused_row, value_row

_C = "critic."
_CRITIC = "the critic is trained like the policy"

_DATA: tuple[Row, ...] = (
    joined_row("data.train_files", "environments[].args"),
    joined_row("data.val_files", "environments[].args", "one row in eight of the training data is held out"),
    joined_row(
        "data.train_batch_size",
        "orchestrator.batchSize, trainer.updatesPerStep",
        "minibatches and async_training decide",
    ),
    dropped_row("data.gen_batch_size", "groups that are filtered out are replaced one by one (filters.zeroVariance)"),
    dropped_row("data.val_batch_size", "evaluation runs all its tasks at once"),
    joined_row("data.max_prompt_length", "seqLen"),
    joined_row("data.max_response_length", "sampling.maxTokens, seqLen"),
    joined_row("data.prompt_key", "environments[].args", "the dataset environment reads the column prompt"),
    joined_row("data.shuffle", "environments[].curriculum", "each epoch has a new order"),
    value_row("data.seed", "seed", convert="whole"),
    dropped_row(
        "data.filter_overlong_prompts*",
        "tasks whose prompt leaves no space for a reply below seqLen are skipped (metric unplayable/<environment>/too_long)",
    ),
    dropped_row(
        "data.truncation",
        "prompts are never truncated: one that leaves no space below seqLen is skipped; replies are truncated at seqLen",
    ),
    *(
        dropped_row(
            f"data.{name}_key",
            f"no {name} of a row is read: the dataset environment refuses rows with it",
            fine=(None,),
        )
        for name in ("image", "video", "audio")
    ),
    dropped_row("data.reward_fn_key", "one reward per environment: args.reward", fine=("data_source",)),
    joined_row("data.apply_chat_template_kwargs*", "sampling.chatTemplateArguments", "no arguments"),
    refused_row("data.custom_cls.path", "a Python class of verl; write an environment (docs/environments.md)"),
    refused_row("data.sampler.class_path", "a Python class of verl; environments[].curriculum chooses tasks"),
    refused_row("data.datagen.path", "a Python class of verl; write an environment (docs/environments.md)"),
)

_ALGORITHM: tuple[Row, ...] = (
    joined_row("algorithm.adv_estimator", "algorithm.preset, algorithm.advantage"),
    joined_row("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage", "only with grpo"),
    joined_row("algorithm.gamma", "algorithm.advantage", "only with gae and reinforce_plus_plus"),
    joined_row("algorithm.lam", "algorithm.advantage", "only with gae"),
    joined_row("algorithm.use_kl_in_reward", "algorithm.regularizers.klReward", "no KL in the reward"),
    joined_row("algorithm.kl_ctrl.kl_coef", "algorithm.regularizers.klReward", "only with use_kl_in_reward"),
    dropped_row("algorithm.kl_ctrl.type", "the weight of the KL term is fixed", fine=("fixed",)),
    joined_row("algorithm.kl_penalty", "algorithm.regularizers.klRewardKind", "only with use_kl_in_reward"),
    joined_row(
        "algorithm.filter_groups.enable", "algorithm.filters.zeroVariance", "groups of equal rewards are trained on"
    ),
    dropped_row("algorithm.filter_groups.metric", "groups are compared by their rewards"),
    joined_row("algorithm.rollout_correction.rollout_is", "algorithm.correction", "no importance weights"),
    joined_row("algorithm.rollout_correction.rollout_is_threshold", "algorithm.correction", "no importance weights"),
    joined_row(
        "algorithm.rollout_correction.bypass_mode",
        "algorithm.proximal",
        "log-probs are recomputed at the start of a step",
    ),
    joined_row("algorithm.rollout_correction.rollout_rs", "algorithm.correction", "no rejection"),
    joined_row("algorithm.rollout_correction.rollout_rs_threshold", "algorithm.correction", "no rejection"),
    joined_row("algorithm.rollout_correction.rollout_rs_threshold_lower", "algorithm.correction", "no rejection"),
    refused_row(
        "algorithm.rollout_correction.rollout_is_batch_normalize",
        "weights divided by their mean over the batch, which no correction of RLRun does",
    ),
    refused_row(
        "algorithm.rollout_correction.rollout_token_veto_threshold",
        "a second rejection in addition to rollout_rs; use one of the two: rollout_rs=seq_max_k2",
    ),
    refused_row(
        "algorithm.rollout_correction.loss_type",
        "REINFORCE with importance weights: algorithm.loss aipo, whose delta is rollout_is_threshold",
        fine=(None, "ppo_clip"),
    ),
    refused_row(
        "algorithm.rollout_is",
        "the correction of verl until 2025-10; write algorithm.rollout_correction.rollout_is and rollout_is_threshold",
        fine=(None, False),
    ),
    *dropped_rows("algorithm.kl_ctrl.", "the weight of the KL term is fixed", "horizon", "target_kl"),
    dropped_row(
        "algorithm.filter_groups.max_num_gen_batches",
        "sampling continues until the batch is full, and fails after 64 batches of filtered rollouts",
    ),
    *dropped_rows(
        "algorithm.", "only with rollout_is", "rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_level"
    ),
    *dropped_rows("algorithm.", "only with rollout_is", "rollout_is_mode", "rollout_is_veto_threshold"),
    *dropped_rows("algorithm.pf_ppo.", "only with use_pf_ppo", "reweight_method", "weight_pow"),
    *dropped_rows("algorithm.pf_ppo", "only with use_pf_ppo", ""),
    refused_row("algorithm.use_pf_ppo", "PF-PPO draws samples again by their rewards"),
)

_CRITIC_ROWS: tuple[Row, ...] = (
    joined_row(_C + "optim.lr", "algorithm.critic.lr", "no critic: the advantage is not gae"),
    joined_row(_C + "cliprange_value", "algorithm.critic.valueClip", "no critic: the advantage is not gae"),
    joined_row(_C + "model.path", "algorithm.critic", "the critic starts from the policy's weights"),
)

_REWARDS: tuple[Row, ...] = (
    joined_row("reward_model.enable", "environments[].args", "no reward model", fine=(None, False)),
    joined_row("reward_model.model.path", "environments[].args", "the reward model is not enabled"),
    joined_row(
        "reward_model.overlong_buffer.enable", "algorithm.filters.overlongPenalty", "no penalty of long answers"
    ),
    joined_row("reward_model.overlong_buffer.len", "algorithm.filters.overlongBuffer", "no penalty of long answers"),
    joined_row(
        "reward_model.overlong_buffer.penalty_factor", "algorithm.filters.overlongPenalty", "no penalty of long answers"
    ),
    dropped_row("reward_model.reward_kwargs.max_resp_len", "sampling.maxTokens"),
    refused_row(
        "reward_model.reward_loop_class_name", "a Python class of verl; write an environment (docs/environments.md)"
    ),
    refused_row(
        "reward_model.sandbox_fusion.url",
        "a server that runs programs: args.reward: code runs them in a sandbox of its own",
    ),
    refused_row(
        "reward_model.reward_manager",
        "the dataset environment scores one answer at a time: write the reward function for one answer, and name the manager naive",
        fine=(None, "naive", "dapo", "prime", "limited", "rate_limited", "remote"),
    ),
    joined_row("custom_reward_function.path", "environments[].args", "no custom function"),
    joined_row("custom_reward_function.name", "environments[].args", "no custom function"),
)

ROWS: tuple[Row, ...] = (*_DATA, *_ALGORITHM, *_CRITIC_ROWS, *_REWARDS)


PROGRAMS = frozenset(
    {
        "verl.trainer.main_ppo",
        "verl.trainer.main_ppo_sync",
        "verl.trainer.sft_trainer",
        "verl.trainer.sft_trainer_ray",
        "verl.trainer.fsdp_sft_trainer",
        "verl.experimental.fully_async_policy.fully_async_main",
        "verl.experimental.one_step_off_policy.main_ppo",
        "recipe.dapo.main_dapo",
        "recipe.dapo.src.main_dapo",
        "recipe.fully_async_policy.fully_async_main",
        "recipe.one_step_off_policy.main_ppo",
        "recipe.one_step_off_policy.async_main_ppo",
    }
)
CONFIGURATIONS = frozenset(
    {
        "ppo_trainer",
        "ppo_megatron_trainer",
        "dapo_trainer",
        "dapo_megatron_trainer",
        "sft_trainer",
        "sft_trainer_engine",
        "fully_async_ppo_trainer",
        "fully_async_ppo_megatron_trainer",
        "one_step_off_ppo_trainer",
        "one_step_off_ppo_megatron_trainer",
    }
)
"""Hydra files of these programs, which contain verl's defaults."""
_FILE = re.compile(r"(?:\./)?((?:verl|recipe)/[\w/.-]+)\.py")


def unknown_program(module: str, texts: Sequence[str]) -> str | None:
    """Return the program of verl that a command starts if it is not supported, otherwise None.

    Args:
        module: module of `python -m`, or the program.
        texts: all words of the command.
    """
    name = program_name(module, texts)
    return name if name.startswith(("verl.", "recipe.")) and name not in PROGRAMS else None


def program_name(module: str, texts: Sequence[str]) -> str:
    """Return the dotted name of the verl module that a command starts, or an empty text.

    Args:
        module: module of `python -m`, or the program.
        texts: all words of the command.
    """
    files = (_FILE.fullmatch(text) for text in texts)
    return module if "." in module else next((found[1].replace("/", ".") for found in files if found), "")
