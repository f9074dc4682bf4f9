"""Table of verl's keys: actor, rollout, reference, trainer. `verl_data_keys` contains data, critic and rewards."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.convert.tables.row import Row, dropped_row, dropped_rows, joined_row, read_rows, refused_row, value_row
from rlrun.convert.tables.verl_data_keys import ROWS as DATA_ROWS

ALIASES: Mapping[str, str] = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_model.": "reward_model.",
    "actor_rollout_ref.actor.optim.lr_min": "actor_rollout_ref.actor.optim.min_lr",
    "reward_model.model_path": "reward_model.model.path",
    "reward_model.inference.": "reward_model.rollout.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager": "reward_model.reward_manager",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "reward_model.overlong_buffer.",
    "custom_reward_function.overlong_buffer.": "reward_model.overlong_buffer.",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": (
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    ),
    "actor_rollout_ref.actor.fsdp_config.strategy": "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.optim.clip_grad": "actor_rollout_ref.actor.grad_clip",
    "rollout.test_freq": "trainer.test_freq",
    "rollout.total_epochs": "trainer.total_epochs",
    "actor_rollout_ref.model.lora.rank": "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora.alpha": "actor_rollout_ref.model.lora_alpha",
    "actor_rollout_ref.model.lora.target_modules": "actor_rollout_ref.model.target_modules",
    "actor_rollout_ref.model.lora.exclude_modules": "actor_rollout_ref.model.exclude_modules",
}
"""Renamed prefixes of keys of other releases."""

DEFAULTS: Mapping[str, object] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_penalty": "kl",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.entropy_coeff": 0.0,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.optim.betas": [0.9, 0.999],
    "actor_rollout_ref.actor.optim.eps": 1e-8,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.val_kwargs.n": 1,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0.0,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "reward_model.overlong_buffer.penalty_factor": 1.0,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.test_freq": -1,
    "trainer.val_max_samples": -1,
}
"""verl's defaults from which fields are derived even if the key is not set."""

ADVANTAGES: Mapping[str, tuple[str, str]] = {
    "gae": ("ppo", "gae"),
    "grpo": ("grpo", "grpo"),
    "grpo_vectorized": ("grpo", "grpo"),
    "rloo": ("rloo", "rloo"),
    "rloo_vectorized": ("rloo", "rloo"),
    "opo": ("opo", "opo"),
    "reinforce_plus_plus": ("reinforce_pp", "reinforce_pp"),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "reinforce_pp_baseline"),
}
"""verl's estimators -> preset and advantage."""
NO_ADVANTAGE: Mapping[str, str] = {
    "remax": "its baseline is the reward of one greedy answer per prompt, which RLRun does not sample; nearest: rloo",
    "grpo_passk": "only the best answer of a group learns, against the second best; nearest: grpo",
    "gpg": "rewards are weighted by the share of groups that differ; nearest: grpo",
    "gdpo": "several rewards are normalized one by one; nearest: grpo",
}
LOSSES: Mapping[str, tuple[str, str | None, str | None]] = {
    "vanilla": ("ppo", None, "recompute"),
    "gspo": ("gspo", "gspo", "recompute"),
    "cispo": ("cispo", "cispo", "recompute"),
    "sapo": ("sapo", "sapo", "recompute"),
    "dppo_tv": ("dppo", "dppo", None),
}
"""verl's loss modes -> loss, preset (None: of the advantage), proximal policy (None: of the loss)."""
NO_LOSS: Mapping[str, str] = {
    "geo_mean": "GMPO's geometric mean of clipped ratios; nearest: gspo",
    "clip_cov": "tokens are chosen by the covariance of log-prob and advantage; nearest: vanilla",
    "kl_cov": "tokens are chosen by the covariance of log-prob and advantage; nearest: vanilla",
    "gpg": "log-probs weighted by advantages without a ratio; nearest: vanilla",
    "dppo_kl": "a trust region on the KL divergence of each token; nearest: dppo_tv",
}
AGGREGATIONS: Mapping[str, str] = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "constant_length",
}
SCHEDULES: Mapping[str, str] = {name: name for name in ("constant", "cosine", "linear")}
OPTIMIZERS: Mapping[str, str] = {
    "adam": "adamw",
    "adamw": "adamw",
    "AdamW": "adamw",
    "sgd": "sgd",
    "SGD": "sgd",
    "muon": "muon",
}
DTYPES: Mapping[str, str] = {name: name for name in ("bfloat16", "float16", "float32")}
KL_KINDS: Mapping[str, str] = {
    "mse": "k2",
    "k2": "k2",
    "mse+": "k2",
    "k2+": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "kl+": "k1+",
    "k1+": "k1+",
    "low_var_kl+": "k3+",
    "k3+": "k3+",
}
"""verl's KL estimators in the loss. A `+` uses the gradient of k2, so it changes nothing for k2."""
_NO_GRADIENT = "its expected gradient is 0, so it does not constrain the policy; use mse, low_var_kl+ or algorithm.use_kl_in_reward"
NO_KL_KIND: Mapping[str, str] = {"kl": _NO_GRADIENT, "k1": _NO_GRADIENT}
KL_REWARD_KINDS: Mapping[str, str] = {
    name + suffix: kind
    for name, kind in {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}.items()
    for suffix in ("", "+")
}
"""verl's KL estimators in the reward, without a gradient."""
REJECTIONS: Mapping[str, tuple[str, str, str]] = {
    "token_k1": ("token", "k1", "mean"),
    "token_k2": ("token", "k2", "mean"),
    "token_k3": ("token", "k3", "mean"),
    "seq_sum_k1": ("sequence", "k1", "sum"),
    "seq_sum_k2": ("sequence", "k2", "sum"),
    "seq_sum_k3": ("sequence", "k3", "sum"),
    "seq_mean_k1": ("sequence", "k1", "mean"),
    "seq_mean_k2": ("sequence", "k2", "mean"),
    "seq_mean_k3": ("sequence", "k3", "mean"),
    "seq_max_k2": ("sequence", "k2", "max"),
    "seq_max_k3": ("sequence", "k3", "max"),
    "token": ("token", "ratio", "mean"),
    "sequence": ("sequence", "ratio", "sum"),
    "geometric": ("sequence", "ratio", "mean"),
}
"""verl's `rollout_rs` -> level, measure and reduction of a correction. The last three are from releases until 2025-11."""
NO_REJECTION: Mapping[str, str] = {
    "binary_kl": "KPop's divergence of two probabilities, which no correction of RLRun measures; nearest: token_k3",
}

_A, _R, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_SPEED = "speed only; RLRun chooses its own kernels"
_NO_REFERENCE = "only with a KL term in the loss, which this run does not have"
_TRACKER = "no tracker; metrics are in metrics.jsonl of the run's folder"
_PROFILE = "profiling is a separate command: trainer --bench"
_ENGINE = "vLLM's own default"

_ACTOR: tuple[Row, ...] = (
    dropped_row("*_target_", "a class of verl, not a setting"),
    dropped_row("*profiler*", _PROFILE),
    dropped_row("*nccl_timeout", "progress.deadlineSeconds is the limit in RLRun"),
    dropped_row(_A + "strategy", "FSDP2 trains, with tensor, context, expert and pipeline parallelism"),
    dropped_row(_A + "model_engine", "FSDP2 trains, with tensor, context, expert and pipeline parallelism"),
    dropped_row("model_engine", "FSDP2 trains, with tensor, context, expert and pipeline parallelism"),
    value_row(_A + "optim.lr", "trainer.optimizer.lr", "peak learning rate", convert="number"),
    value_row(_A + "optim.weight_decay", "trainer.optimizer.weightDecay", "decoupled weight decay", convert="number"),
    joined_row(_A + "optim.betas", "trainer.optimizer.beta1, trainer.optimizer.beta2"),
    joined_row(_A + "optim.lr_warmup_steps", "trainer.scheduler.warmupSteps", "no warm-up"),
    joined_row(
        _A + "optim.lr_warmup_steps_ratio",
        "trainer.scheduler.warmupSteps",
        "no warm-up, or lr_warmup_steps overrides it",
    ),
    value_row(
        _A + "optim.lr_scheduler_type",
        "trainer.scheduler.name",
        "shape after the warm-up",
        values=SCHEDULES,
    ),
    value_row(_A + "optim.lr_decay_style", "trainer.scheduler.name", "shape after the warm-up", values=SCHEDULES),
    value_row(_A + "optim.name", "trainer.optimizer.name", values=OPTIMIZERS),
    value_row(_A + "optim.optimizer", "trainer.optimizer.name", values=OPTIMIZERS),
    value_row(_A + "optim.eps", "trainer.optimizer.eps", convert="number"),
    *(
        value_row(
            f"{_A}{engine}.router_replay.mode",
            "trainer.router.replay",
            values={"disabled": "Off", "R2": "Step", "R3": "Rollout"},
            fine=("disabled",),
        )
        for engine in ("megatron", "veomni")
    ),
    value_row(
        "actor_rollout_ref.model.*moe_config.freeze_moe_router", "trainer.router.freeze", convert="flag", fine=(False,)
    ),
    joined_row(_A + "optim.muon_momentum", "trainer.optimizer.momentum", "only with the optimizer muon"),
    joined_row(_A + "optim.min_lr", "trainer.scheduler.minLrRatio", "0, the default"),
    value_row(_A + "optim.min_lr_ratio", "trainer.scheduler.minLrRatio", convert="number"),
    value_row(_A + "grad_clip", "trainer.optimizer.maxGradNorm", convert="number"),
    joined_row(_A + "ppo_mini_batch_size", "trainer.updatesPerStep"),
    joined_row(_A + "ppo_epochs", "trainer.epochsPerStep", "1, the default"),
    joined_row(_A + "ppo_micro_batch_size", "trainer.microBatchTokens", "microBatchTokens is set by tokens"),
    joined_row(_A + "ppo_micro_batch_size_per_gpu", "trainer.microBatchTokens", "microBatchTokens is set by tokens"),
    joined_row(_A + "use_dynamic_bsz", "trainer.microBatchTokens", "micro-batches are always packed by tokens"),
    joined_row(_A + "ppo_max_token_len_per_gpu", "trainer.microBatchTokens", "only with use_dynamic_bsz"),
    joined_row(_A + "clip_ratio", "algorithm.loss", "clip_ratio_low and clip_ratio_high override it"),
    joined_row(_A + "clip_ratio_low", "algorithm.loss", "this loss has no such limit"),
    joined_row(_A + "clip_ratio_high", "algorithm.loss", "this loss has no such limit"),
    joined_row(_A + "clip_ratio_c", "algorithm.loss", "this loss has no such limit"),
    joined_row(_A + "policy_loss.loss_mode", "algorithm.loss"),
    joined_row(_A + "tau_pos", "algorithm.loss", "only for the loss sapo"),
    joined_row(_A + "tau_neg", "algorithm.loss", "only for the loss sapo"),
    joined_row(_A + "loss_agg_mode", "algorithm.aggregation"),
    joined_row(_A + "use_token_level_loss", "algorithm.aggregation", "loss_agg_mode overrides it"),
    joined_row(_A + "loss_scale_factor", "algorithm.aggregationLength", "only with seq-mean-token-sum-norm"),
    joined_row(_A + "entropy_coeff", "algorithm.regularizers.entropy", "no entropy bonus"),
    joined_row(_A + "use_kl_loss", "algorithm.regularizers.kl", "no KL term in the loss"),
    joined_row(_A + "kl_loss_coef", "algorithm.regularizers.kl", _NO_REFERENCE),
    joined_row(_A + "kl_loss_type", "algorithm.regularizers.klKind", _NO_REFERENCE),
    joined_row(_A + "tis_imp_ratio_cap", "algorithm.correction", "no truncated importance weights"),
    joined_row(_A + "ulysses_sequence_parallel_size", "trainer.parallelism.cp", "one rank per row"),
    joined_row(_A + "fsdp_config.fsdp_size", "trainer.parallelism.dpShard", "all ranks share one copy"),
    value_row(
        _A + "fsdp_config.offload_policy", "trainer.cpuOffload", "masters and optimizer in host memory", convert="flag"
    ),
    joined_row(_A + "megatron.pipeline_model_parallel_size", "trainer.parallelism.pp", "one stage"),
    joined_row(_A + "megatron.tensor_model_parallel_size", "trainer.parallelism.tp", "one rank per matrix"),
    joined_row(_A + "megatron.context_parallel_size", "trainer.parallelism.cp", "one rank per row"),
    joined_row(_A + "megatron.expert_model_parallel_size", "trainer.parallelism.ep", "one rank per expert"),
    dropped_row(
        _A + "megatron.virtual_pipeline_model_parallel_size",
        "set schedule: Interleaved1F1B and stagesPerRank in trainer.parallelism",
        fine=(None, 1),
    ),
    dropped_row(_A + "megatron.expert_tensor_parallel_size", "experts are divided only by ep", fine=(None, 1)),
    value_row(_A + "use_torch_compile", "trainer.compile", "compile every decoder layer", convert="flag"),
    dropped_row(_A + "checkpoint.async_save", "checkpoint.saveAsync is on by default"),
    dropped_row(_A + "shuffle", "a step's batch is always divided at random"),
    dropped_row(_A + "use_remove_padding", "rows are always packed without padding"),
    dropped_row(_A + "use_fused_kernels", _SPEED),
    dropped_row(_A + "data_loader_seed", "the run's seed is used"),
)

_REFERENCE: tuple[Row, ...] = (
    refused_row(
        "actor_rollout_ref.ref.model*",
        "a different reference model; set algorithm.reference.model",
    ),
    dropped_row("actor_rollout_ref.hybrid_engine", "placement.colocate lets trainer and engines share GPUs"),
)

_ROLLOUT: tuple[Row, ...] = (
    joined_row(_R + "n", "environments[].groupSize, orchestrator.batchSize"),
    value_row(_R + "temperature", "sampling.temperature", convert="number"),
    dropped_row(_R + "top_p", "training samples from the full distribution", fine=(1,)),
    dropped_row(_R + "top_k", "training samples from the full distribution", fine=(-1, 0)),
    dropped_row(_R + "min_p", "training samples from the full distribution", fine=(0,)),
    dropped_row(_R + "repetition_penalty", "training samples from the full distribution", fine=(1,)),
    dropped_row(_R + "do_sample", "training always samples", fine=(True,)),
    joined_row(_R + "response_length", "sampling.maxTokens", "data.max_response_length overrides it"),
    dropped_row(_R + "prompt_length", "data.max_prompt_length overrides it"),
    dropped_row(_R + "name", "vLLM is the engine; it reads the same models"),
    dropped_row(_R + "mode", "engines are separate servers"),
    joined_row(_R + "tensor_model_parallel_size", "inference.tensorParallel, inference.dataParallel"),
    dropped_row(_R + "data_parallel_size", "inference.dataParallel follows from the GPUs of a pod"),
    dropped_row(_R + "expert_parallel_size", _ENGINE, fine=(1,)),
    dropped_row(_R + "pipeline_model_parallel_size", "engines have no pipeline here", fine=(1,)),
    value_row(_R + "gpu_memory_utilization", "inference.gpuMemoryUtilization", convert="number"),
    value_row(_R + "max_num_seqs", "inference.maxNumSeqs", convert="whole"),
    joined_row(_R + "max_model_len", "inference.maxModelLen", "seqLen is enough"),
    joined_row(_R + "max_num_batched_tokens", "inference.extraArgs", _ENGINE),
    value_row(_R + "dtype", "model.dtype", "dtype of published weights and of the engine", values=DTYPES),
    value_row(_R + "seed", "seed", convert="whole"),
    joined_row(_R + "val_kwargs.temperature", "evaluation.sampling.temperature", "no evaluation"),
    joined_row(_R + "val_kwargs.top_p", "evaluation.sampling.topP", "no evaluation, or greedy"),
    joined_row(_R + "val_kwargs.top_k", "evaluation.sampling.topK", "no evaluation, or greedy"),
    joined_row(_R + "val_kwargs.n", "evaluation.samplesPerTask", "no evaluation"),
    joined_row(_R + "val_kwargs.do_sample", "evaluation.sampling.temperature", "no evaluation"),
    refused_row(
        _R + "multi_turn.enable",
        "tools and interactions are Python classes of verl; write an environment (docs/environments.md)",
    ),
    dropped_row(_R + "calculate_log_probs", "every token always has the engine's log-prob"),
    dropped_row(_R + "enforce_eager", "set by RLRun"),
    dropped_row(_R + "free_cache_engine", "engines sleep while a step is trained (placement.colocate)"),
    dropped_row(_R + "load_format", "engines load the published version"),
    dropped_row(_R + "quantization", _ENGINE, fine=(None,)),
)

_MODEL: tuple[Row, ...] = (
    joined_row(_M + "path", "model.name or model.path"),
    value_row(_M + "trust_remote_code", "model.trustRemoteCode", convert="flag"),
    value_row(_M + "enable_gradient_checkpointing", "trainer.activationCheckpointing", convert="checkpointing"),
    dropped_row(
        _M + "enable_activation_offload",
        "activationCheckpointing: offload fetches activations from host memory",
        fine=(False,),
    ),
    joined_row(_M + "lora_rank", "trainer.lora.rank", "no LoRA"),
    joined_row(_M + "lora_alpha", "trainer.lora.alpha", "no LoRA"),
    joined_row(_M + "target_modules", "trainer.lora.targets", "no LoRA, or all linear layers"),
    dropped_row(_M + "exclude_modules", "targets names what has an adapter", fine=(None,)),
    refused_row(_M + "custom_chat_template", "the chat template is the model's; change it in the model's folder"),
    refused_row(
        _M + "external_lib", "a module that is imported for side effects; RLRun uses the models of transformers"
    ),
    dropped_row(_M + "use_remove_padding", "rows are always packed without padding"),
    dropped_row(_M + "use_rmpad", "rows are always packed without padding"),
)

_TRAINER: tuple[Row, ...] = (
    joined_row("trainer.total_training_steps", "maxSteps", "total_epochs decides"),
    joined_row("trainer.total_epochs", "maxSteps", "total_training_steps overrides it"),
    joined_row("trainer.nnodes", "trainer.replicas"),
    joined_row("trainer.n_gpus_per_node", "trainer.gpusPerReplica, inference.gpusPerReplica"),
    joined_row("rollout.nnodes", "inference.replicas", "engines have the trainer's GPUs"),
    joined_row("rollout.n_gpus_per_node", "inference.replicas", "engines have the trainer's GPUs"),
    joined_row("rollout.total_rollout_steps", "maxSteps", "total_training_steps overrides it"),
    joined_row("async_training.trigger_parameter_sync_step", "orchestrator.batchSize, trainer.updatesPerStep"),
    joined_row("async_training.require_batches", "orchestrator.batchSize, trainer.updatesPerStep", "one minibatch"),
    joined_row("async_training.staleness_threshold", "algorithm.maxAsyncLevel, algorithm.maxOffPolicySteps"),
    dropped_row(
        "async_training.partial_rollout", "rollouts continue during a weight update; each token has its version"
    ),
    value_row("trainer.save_freq", "checkpoint.interval", convert="positive"),
    value_row("trainer.max_actor_ckpt_to_keep", "checkpoint.keepLast", convert="positive"),
    joined_row("trainer.test_freq", "evaluation.interval", "no evaluation between steps"),
    joined_row("data.val_max_samples", "evaluation.numTasks", "all held-out tasks, or no evaluation"),
    joined_row("trainer.val_max_samples", "evaluation.numTasks", "all held-out tasks, or no evaluation"),
    dropped_row("trainer.val_before_train", "the first version is always evaluated, if there is evaluation"),
    refused_row("trainer.val_only", "a run that only evaluates is task: Eval; see docs/evaluation.md"),
    value_row(
        "trainer.resume_mode",
        "checkpoint.resume.policy",
        "starting point of an attempt",
        values={"auto": "Latest", "disable": "Latest"},
        fine=("disable",),
    ),
    dropped_row(
        "trainer.resume_from_path",
        "checkpoint.resume.fromRun names a run of RLRun; verl's checkpoints have another format",
    ),
    joined_row("trainer.experiment_name", "metadata.name"),
    joined_row("trainer.project_name", "tracking", _TRACKER),
    joined_row("trainer.logger", "tracking", _TRACKER),
    dropped_row("trainer.log_val_generations", "answers are in traces of the run's folder"),
    *dropped_rows(
        "trainer.", "the run's folder is <storage.mountPath>/<name>", "default_local_dir", "default_hdfs_dir"
    ),
    dropped_row("trainer.critic_warmup", "critic and policy train from the first step", fine=(0,)),
    dropped_row("trainer.balance_batch", "batches are always balanced"),
    dropped_row("trainer.device", "GPUs are used if gpusPerReplica is above 0", fine=("cuda",)),
    dropped_row("defaults*", "Hydra's list of files; verl's defaults are assumed"),
    *dropped_rows("hydra.", "for Hydra itself", "run.dir", "searchpath", "job.chdir", "output_subdir", "sweep.dir"),
    dropped_row("--*", "an option of Hydra; verl's defaults are assumed"),
)

ROWS: tuple[Row, ...] = (*_ACTOR, *_REFERENCE, *_ROLLOUT, *_MODEL, *DATA_ROWS, *_TRAINER, *read_rows("verl_keys.txt"))

INDIFFERENT = ("ray_kwargs.", "ray_init.", "transfer_queue.", "global_profiler.", "hydra.", "-", _R + "engine_kwargs.")
"""Prefixes of keys that never change the training result."""
