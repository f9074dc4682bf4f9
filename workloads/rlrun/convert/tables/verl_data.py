"""verl's keys: data, algorithm, critic, rewards."""

from __future__ import annotations

from rlrun.convert.tables.row import Row, drop, drops, joined, refuse, value

_C = "critic."
_CRITIC = "the critic is trained as the policy is"
_PARQUET = "of verl's loader; rows are read by number, tokenised as they are played"

_DATA: tuple[Row, ...] = (
    joined("data.train_files", "environments[].args"),
    joined("data.val_files", "environments[].args", "one row in eight of the training data is held out"),
    joined(
        "data.train_batch_size",
        "orchestrator.batchSize, trainer.updatesPerStep",
        "minibatches and async_training decide",
    ),
    drop("data.gen_batch_size", "groups that are filtered out are replaced one by one (filters.zeroVariance)"),
    drop("data.val_batch_size", "evaluation asks all its tasks at once"),
    joined("data.max_prompt_length", "seqLen"),
    joined("data.max_response_length", "sampling.maxTokens, seqLen"),
    joined("data.prompt_key", "environments[].args", "environment dataset reads the column prompt"),
    joined("data.shuffle", "environments[].curriculum", "each epoch has a new order"),
    value("data.seed", "seed", convert="whole"),
    drop(
        "data.filter_overlong_prompts*",
        "tasks whose prompt leaves no room for a reply below seqLen are left out (metric unplayable/<environment>/too_long)",
    ),
    drop(
        "data.truncation",
        "prompts are never cut: one that leaves no room below seqLen is left out; replies are cut at seqLen",
    ),
    *(
        drop(
            f"data.{name}_key", f"no {name} of a row is read: environment dataset refuses rows with some", fine=(None,)
        )
        for name in ("image", "video", "audio")
    ),
    drop("data.reward_fn_key", "one reward per environment: args.reward", fine=("data_source",)),
    joined("data.apply_chat_template_kwargs*", "sampling.chatTemplateArguments", "no arguments"),
    refuse("data.custom_cls.path", "a Python class of verl; write an environment (docs/environments.md)"),
    refuse("data.sampler.class_path", "a Python class of verl; environments[].curriculum chooses tasks"),
    refuse("data.datagen.path", "a Python class of verl; write an environment (docs/environments.md)"),
)

_ALGORITHM: tuple[Row, ...] = (
    joined("algorithm.adv_estimator", "algorithm.preset, algorithm.advantage"),
    joined("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage", "only with grpo"),
    joined("algorithm.gamma", "algorithm.advantage", "only with gae and reinforce_plus_plus"),
    joined("algorithm.lam", "algorithm.advantage", "only with gae"),
    joined("algorithm.use_kl_in_reward", "algorithm.regularizers.klReward", "no KL in the reward"),
    joined("algorithm.kl_ctrl.kl_coef", "algorithm.regularizers.klReward", "only with use_kl_in_reward"),
    drop("algorithm.kl_ctrl.type", "the weight of the KL term is fixed", fine=("fixed",)),
    joined("algorithm.kl_penalty", "algorithm.regularizers.klRewardKind", "only with use_kl_in_reward"),
    joined(
        "algorithm.filter_groups.enable", "algorithm.filters.zeroVariance", "groups of equal rewards are trained on"
    ),
    drop("algorithm.filter_groups.metric", "groups are compared by their rewards"),
    joined("algorithm.rollout_correction.rollout_is", "algorithm.correction", "no importance weights"),
    joined("algorithm.rollout_correction.rollout_is_threshold", "algorithm.correction", "no importance weights"),
    joined(
        "algorithm.rollout_correction.bypass_mode",
        "algorithm.proximal",
        "log-probs are recomputed at the start of a step",
    ),
    joined("algorithm.rollout_correction.rollout_rs", "algorithm.correction", "no rejection"),
    joined("algorithm.rollout_correction.rollout_rs_threshold", "algorithm.correction", "no rejection"),
    joined("algorithm.rollout_correction.rollout_rs_threshold_lower", "algorithm.correction", "no rejection"),
    refuse(
        "algorithm.rollout_correction.rollout_is_batch_normalize",
        "weights divided by their mean over the batch, which no correction here does",
    ),
    refuse(
        "algorithm.rollout_correction.rollout_token_veto_threshold",
        "a second rejection beside rollout_rs; one of the two: rollout_rs=seq_max_k2",
    ),
    refuse(
        "algorithm.rollout_correction.loss_type",
        "REINFORCE with importance weights: algorithm.loss aipo, whose delta is rollout_is_threshold",
        fine=(None, "ppo_clip"),
    ),
    refuse(
        "algorithm.rollout_is",
        "the correction of verl until 2025-10; write algorithm.rollout_correction.rollout_is and rollout_is_threshold",
        fine=(None, False),
    ),
    *drops("algorithm.kl_ctrl.", "the weight of the KL term is fixed", "horizon", "target_kl"),
    drop(
        "algorithm.filter_groups.max_num_gen_batches",
        "sampling goes on until the batch is full, and fails after 64 batches of filtered rollouts",
    ),
    *drops(
        "algorithm.", "only with rollout_is", "rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_level"
    ),
    *drops("algorithm.", "only with rollout_is", "rollout_is_mode", "rollout_is_veto_threshold"),
    *drops("algorithm.pf_ppo.", "only with use_pf_ppo", "reweight_method", "weight_pow"),
    *drops("algorithm.pf_ppo", "only with use_pf_ppo", ""),
    refuse("algorithm.use_pf_ppo", "PF-PPO draws samples again by their rewards"),
)

_CRITIC_ROWS: tuple[Row, ...] = (
    joined(_C + "optim.lr", "algorithm.critic.lr", "no critic: the advantage is not gae"),
    joined(_C + "cliprange_value", "algorithm.critic.valueClip", "no critic: the advantage is not gae"),
    joined(_C + "model.path", "algorithm.critic", "the critic's body begins as the policy's"),
)

_REWARDS: tuple[Row, ...] = (
    joined("reward_model.enable", "environments[].args", "no reward model", fine=(None, False)),
    joined("reward_model.model.path", "environments[].args", "of a reward model that is not enabled"),
    joined("reward_model.overlong_buffer.enable", "algorithm.filters.overlongPenalty", "no penalty of long answers"),
    joined("reward_model.overlong_buffer.len", "algorithm.filters.overlongBuffer", "no penalty of long answers"),
    joined(
        "reward_model.overlong_buffer.penalty_factor", "algorithm.filters.overlongPenalty", "no penalty of long answers"
    ),
    drop("reward_model.reward_kwargs.max_resp_len", "sampling.maxTokens"),
    refuse(
        "reward_model.reward_loop_class_name", "a Python class of verl; write an environment (docs/environments.md)"
    ),
    refuse(
        "reward_model.sandbox_fusion.url",
        "a server that runs programs: args.reward: code runs them in a sandbox of its own",
    ),
    refuse(
        "reward_model.reward_manager",
        "environment dataset scores one answer at a time: write the reward function for one answer, and name the manager naive",
        fine=(None, "naive", "dapo", "prime", "limited", "rate_limited", "remote"),
    ),
    joined("custom_reward_function.path", "environments[].args", "no function of one's own"),
    joined("custom_reward_function.name", "environments[].args", "no function of one's own"),
)

ROWS: tuple[Row, ...] = (*_DATA, *_ALGORITHM, *_CRITIC_ROWS, *_REWARDS)
