"""Table of AReaL's keys."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.convert.tables.areal_engine_keys import ROLLOUT, SCRIPT, UTILITIES, engine_rows
from rlrun.convert.tables.row import Row, dropped_row, dropped_rows, joined_row, refused_row, value_row

_FP8 = ("param", "recipe", "margin", "wgrad", "amax_history_len", "amax_compute_algo")
ALIASES: Mapping[str, str] = {
    "actor.behave_imp_weight_cap": "actor.behav_imp_weight_cap",
    "rollout.openai.": "rollout.agent.proxy.",
    **{f"{part}.megatron.fp8": f"{part}.megatron.fp8_config.mode" for part in ("actor", "critic", "ref")},
    **{
        f"{part}.megatron.fp8_{name}": f"{part}.megatron.fp8_config.{name}"
        for part in ("actor", "critic", "ref")
        for name in _FP8
    },
}
"""Renamed keys of other releases."""

DEFAULTS: Mapping[str, object] = {
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.weight_decay": 0.01,
    "actor.optimizer.beta1": 0.9,
    "actor.optimizer.beta2": 0.999,
    "actor.optimizer.eps": 1e-8,
    "actor.optimizer.gradient_clipping": 1.0,
    "actor.optimizer.lr_scheduler_type": "constant",
    "actor.optimizer.min_lr_ratio": 0.0,
    "actor.gradient_checkpointing": False,
    "actor.rejection_sampling.level": "token",
    "seed": 1,
    "actor.optimizer.warmup_steps_proportion": 0.001,
    "actor.ppo_n_minibatches": 4,
    "actor.eps_clip": 0.2,
    "actor.discount": 1.0,
    "actor.gae_lambda": 1.0,
    "actor.kl_ctl": 0.1,
    "actor.kl_estimator": "k1",
    "actor.importance_sampling_level": "token",
    "actor.overlong_penalty_factor": 1.0,
    "critic.eps_clip": 0.5,
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16384,
    "gconfig.temperature": 1.0,
    "cluster.n_gpus_per_node": 8,
    "rollout.max_head_offpolicyness": 0,
    "total_train_epochs": 1,
    "train_dataset.batch_size": 1,
    "vllm.gpu_memory_utilization": 0.9,
}
"""AReaL's defaults from which fields are derived even if the key is not set."""

DTYPES: Mapping[str, str] = {name: name for name in ("bfloat16", "float16", "float32")}

_PODS = "pods have trainer.resources and inference.resources"
_FOLDER = "the run's folder is <storage.mountPath>/<name>"
_TRACKER = "metrics are in metrics.jsonl of the run's folder"
_REFERENCE = "the reference is sharded and computed like the policy"
_CRITIC = "the critic uses the policy's optimizer and schedule, except for the learning rate"
_LOADER = "rows are read by index and processed in order"
_SCALE = "rewards or advantages are divided by their standard deviation, which cancels it"

_ACTOR: tuple[Row, ...] = (
    joined_row("actor.path", "model.name or model.path"),
    value_row("actor.dtype", "model.dtype", "dtype of published weights and of the engine", values=DTYPES),
    value_row("actor.gradient_checkpointing", "trainer.activationCheckpointing", convert="checkpointing"),
    joined_row("actor.mb_spec.max_tokens_per_mb", "trainer.microBatchTokens"),
    value_row(
        "actor.optimizer.type",
        "trainer.optimizer.name",
        values={"adam": "adamw", "adam_bf16": "adamw", "sgd": "sgd", "muon": "muon"},
    ),
    joined_row("actor.optimizer.muon_momentum", "trainer.optimizer.momentum", "only with type: muon"),
    *dropped_rows(
        "actor.optimizer.", "only with type: muon", "muon_use_nesterov", "muon_num_ns_steps", "muon_scale_mode"
    ),
    dropped_row("actor.optimizer.muon_backend_lr", "only with type: muon"),
    value_row("actor.optimizer.lr", "trainer.optimizer.lr", "peak learning rate", convert="number"),
    value_row("actor.optimizer.weight_decay", "trainer.optimizer.weightDecay", convert="number"),
    value_row("actor.optimizer.beta1", "trainer.optimizer.beta1", convert="number"),
    value_row("actor.optimizer.beta2", "trainer.optimizer.beta2", convert="number"),
    value_row("actor.optimizer.eps", "trainer.optimizer.eps", convert="number"),
    value_row("actor.optimizer.gradient_clipping", "trainer.optimizer.maxGradNorm", convert="number"),
    value_row(
        "actor.optimizer.lr_scheduler_type",
        "trainer.scheduler.name",
        values={"constant": "constant", "cosine": "cosine", "linear": "linear"},
    ),
    value_row("actor.optimizer.min_lr_ratio", "trainer.scheduler.minLrRatio", convert="number"),
    joined_row("actor.optimizer.warmup_steps_proportion", "trainer.scheduler.warmupSteps", "no warm-up"),
    joined_row("actor.optimizer.warmup_steps", "trainer.scheduler.warmupSteps", "warmup_steps_proportion decides"),
    dropped_row(
        "actor.optimizer.muon_tp_mode", "whole matrices are orthogonalized", fine=("duplicated", "distributed")
    ),
    value_row("actor.optimizer.offload", "trainer.optimizer.offload", convert="flag"),
    value_row("actor.fsdp.offload_params", "trainer.cpuOffload", convert="flag"),
    *dropped_rows(
        "actor.optimizer.", "for loss scaling, which bfloat16 does not need", "initial_loss_scale", "min_loss_scale"
    ),
    *dropped_rows(
        "actor.optimizer.", "for loss scaling, which bfloat16 does not need", "loss_scale_window", "hysteresis"
    ),
    value_row(
        "actor.*enable_router_replay",
        "trainer.router.replay",
        "true is Rollout: engines return the experts",
        convert="replay",
        fine=(False,),
    ),
    joined_row("actor.ppo_n_minibatches", "trainer.updatesPerStep"),
    joined_row("actor.eps_clip", "algorithm.loss", "this loss has no such limit"),
    joined_row("actor.eps_clip_higher", "algorithm.loss", "this loss has no such limit"),
    joined_row("actor.c_clip", "algorithm.loss", "no dual clip"),
    joined_row("actor.behav_imp_weight_cap", "algorithm.loss", "only with use_decoupled_loss"),
    joined_row("actor.behave_imp_weight_mode", "algorithm.loss", "only with use_decoupled_loss"),
    *(
        joined_row(
            f"actor.rejection_sampling{name}", "algorithm.loss, algorithm.correction", "only with use_decoupled_loss"
        )
        for name in ("", ".level", ".action", ".metric", ".agg", ".upper", ".lower")
    ),
    joined_row("actor.use_decoupled_loss", "algorithm.preset, algorithm.loss"),
    joined_row("actor.recompute_logprob", "algorithm.proximal", "use_decoupled_loss recomputes them anyway"),
    joined_row("actor.prox_logp_method", "algorithm.proximal", "only with use_decoupled_loss"),
    joined_row("actor.importance_sampling_level", "algorithm.loss", "one ratio per token, or per answer (gspo)"),
    *(
        refused_row(
            f"actor.{name}",
            "IcePop keeps ratios between icepop_alpha and icepop_beta: write them as rejection_sampling.lower and .upper",
            fine=(None, False),
        )
        for name in ("enable_icepop", "icepop_alpha", "icepop_beta")
    ),
    *(
        refused_row(f"actor.{name}", "KPop's divergence of two probabilities: nearest: rejection_sampling.metric=kl_k3")
        for name in ("enable_kpop", "kpop_phi")
    ),
    joined_row("actor.use_sapo_loss", "algorithm.loss", "not SAPO's loss"),
    joined_row("actor.sapo_tau_pos", "algorithm.loss", "only with use_sapo_loss"),
    joined_row("actor.sapo_tau_neg", "algorithm.loss", "only with use_sapo_loss"),
    refused_row(
        "actor.m2_threshold",
        "M2PO masks tokens by the second moment of the batch's ratios, which no loss of RLRun does",
    ),
    refused_row(
        "actor.self_distillation*",
        "distillation from the policy's own feedback, which no objective of RLRun does",
        fine=(None,),
    ),
    joined_row("actor.reward_norm", "algorithm.advantage", "rewards are not normalized"),
    joined_row("actor.reward_norm.mean_level", "algorithm.advantage"),
    joined_row("actor.reward_norm.std_level", "algorithm.advantage"),
    joined_row("actor.reward_norm.mean_leave1out", "algorithm.advantage", "the mean is over the whole group"),
    dropped_row("actor.reward_norm.group_size", "the group is environments[].groupSize"),
    dropped_row("actor.reward_norm.std_unbiased", "standard deviations are unbiased", fine=(True,)),
    dropped_row("actor.reward_norm.eps", "standard deviations are divided by + 1e-6"),
    joined_row("actor.adv_norm", "algorithm.advantage", "advantages are not normalized"),
    joined_row("actor.adv_norm.mean_level", "algorithm.advantage"),
    joined_row("actor.adv_norm.std_level", "algorithm.advantage"),
    refused_row("actor.adv_norm.mean_leave1out", "advantages are divided and shifted by all of the batch"),
    dropped_row("actor.adv_norm.group_size", "the group is environments[].groupSize"),
    dropped_row("actor.adv_norm.std_unbiased", "standard deviations are unbiased", fine=(True,)),
    dropped_row("actor.adv_norm.eps", "standard deviations are divided by + 1e-6"),
    dropped_row("actor.reward_scaling", _SCALE),
    dropped_row("actor.reward_bias", "the mean of rewards or advantages is subtracted, which cancels it"),
    dropped_row("actor.reward_clip", "rewards are not clipped"),
    joined_row("actor.overlong_reward_penalty", "algorithm.filters.overlongPenalty", "no penalty of long answers"),
    joined_row("actor.overlong_tokens", "algorithm.filters.overlongBuffer", "no penalty of long answers"),
    joined_row("actor.overlong_penalty_factor", "algorithm.filters.overlongPenalty", "no penalty of long answers"),
    joined_row(
        "actor.mask_no_eos_with_zero", "algorithm.filters.overlongMask", "answers that were cut off are trained on"
    ),
    joined_row("actor.dynamic_sampling", "algorithm.filters.zeroVariance", "groups of equal rewards are trained on"),
    joined_row("actor.discount", "algorithm.advantage", "only with a critic"),
    joined_row("actor.gae_lambda", "algorithm.advantage", "only with a critic"),
    joined_row("actor.kl_ctl", "algorithm.regularizers.klReward", "no KL in the reward"),
    joined_row("actor.kl_estimator", "algorithm.regularizers.klRewardKind", "no KL in the reward"),
    joined_row("actor.use_lora", "trainer.lora", "no LoRA"),
    joined_row("actor.lora_rank", "trainer.lora.rank", "no LoRA"),
    joined_row("actor.lora_alpha", "trainer.lora.alpha", "no LoRA"),
    joined_row("actor.target_modules", "trainer.lora.targets", "no LoRA, or all linear layers"),
    dropped_row("actor.peft_type", "adapters are always LoRA", fine=("lora",)),
    value_row(
        "actor.weight_update_mode",
        "weightSync.transport",
        values={"disk": "Filesystem", "xccl": "NCCL", "nccl": "NCCL"},
    ),
    joined_row("actor.backend", "trainer.parallelism", "allocation_mode overrides it"),
    dropped_row("actor.max_new_tokens", "gconfig.max_new_tokens overrides it"),
    dropped_row("actor.temperature", "gconfig.temperature overrides it"),
    dropped_row("actor.group_size", "gconfig.n_samples overrides it"),
    *dropped_rows("actor.", _TRACKER, "log_agent_stats", "log_agent_stats_keys"),
    *engine_rows("actor"),
)

_WHOLE_DISTRIBUTION: Mapping[str, tuple[object, ...]] = {
    "top_k": (-1, 100_000_000),
    "min_new_tokens": (0,),
    "frequency_penalty": (0,),
    "stop": ([], None),
    "stop_token_ids": ([], None),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
}
"""Values of sampling options that change nothing."""
_ENGINE_KEYS = {row.key for row in engine_rows("actor")} | {"actor.backend"}

_OTHERS: tuple[Row, ...] = (
    joined_row("critic.optimizer", "algorithm.critic.lr", _CRITIC),
    joined_row("critic.optimizer.lr", "algorithm.critic.lr", _CRITIC),
    *dropped_rows(
        "critic.optimizer.", _CRITIC, "type", "weight_decay", "beta1", "beta2", "eps", "min_lr_ratio", "offload"
    ),
    *dropped_rows("critic.optimizer.", _CRITIC, "lr_scheduler_type", "warmup_steps_proportion", "gradient_clipping"),
    *dropped_rows("critic.optimizer.", _CRITIC, "warmup_steps", "muon_tp_mode"),
    *dropped_rows(
        "critic.optimizer.", _CRITIC, "muon_momentum", "muon_use_nesterov", "muon_num_ns_steps", "muon_scale_mode"
    ),
    dropped_row("critic.optimizer.muon_backend_lr", _CRITIC),
    *dropped_rows(
        "critic.optimizer.", _CRITIC, "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"
    ),
    joined_row("critic.eps_clip", "algorithm.critic.valueClip"),
    joined_row("critic", "algorithm.critic", "no critic"),
    *dropped_rows(
        "critic.", _CRITIC, "path", "dtype", "gradient_checkpointing", "ppo_n_minibatches", "weight_update_mode"
    ),
    *dropped_rows("critic.", _CRITIC, "mask_no_eos_with_zero", "backend", "temperature", "mb_spec.max_tokens_per_mb"),
    *dropped_rows("critic.", _CRITIC, "fsdp.offload_params", "use_lora", "lora_rank", "lora_alpha", "target_modules"),
    dropped_row("critic.peft_type", _CRITIC),
    dropped_row("critic.is_critic", "the critic is algorithm.critic", fine=(True,)),
    *(row for row in engine_rows("critic") if row.key != "critic.is_critic"),
    *dropped_rows("ref", _REFERENCE, "", ".backend", ".optimizer"),
    *(
        dropped_row("ref." + row.key.removeprefix("actor."), _REFERENCE)
        for row in _ACTOR
        if row.key not in _ENGINE_KEYS
    ),
    *engine_rows("ref"),
    *(
        refused_row(
            key,
            "distillation from a teacher next to rewards; without rewards: preset distill with algorithm.reference.model",
            fine=(None,),
        )
        for key in ("teacher*", "mopd.*")
    ),
    *(
        refused_row(
            f"{data}_dataset.{key}",
            "several data sets: write one of environments[] with its ratio for each",
            fine=(None,),
        )
        for data in ("train", "valid")
        for key in ("sources*", "datasets*", "mixture_sampling_policy", "upsample_to_largest")
    ),
    joined_row("gconfig.n_samples", "environments[].groupSize, orchestrator.batchSize"),
    joined_row("gconfig.max_new_tokens", "sampling.maxTokens, seqLen"),
    joined_row("gconfig.max_tokens", "seqLen"),
    value_row("gconfig.temperature", "sampling.temperature", convert="number"),
    dropped_row("gconfig.greedy", "training always samples", fine=(False,)),
    dropped_row("gconfig.top_p", "training samples from the full distribution", fine=(1,)),
    dropped_row("gconfig.top_k", "training samples from the full distribution", fine=(-1, 100_000_000)),
    dropped_row("gconfig.min_new_tokens", "training samples from the full distribution", fine=(0,)),
    dropped_row("gconfig.frequency_penalty", "training samples from the full distribution", fine=(0,)),
    dropped_row("gconfig.stop", "a reply ends with the model's end token", fine=([], None)),
    dropped_row("gconfig.stop_token_ids", "a reply ends with the model's end token", fine=([], None)),
    dropped_row("gconfig.lora_name", "versions of an adapter get their own names"),
    dropped_row("gconfig.skip_special_tokens", "answers are tokens"),
    refused_row("gconfig.ignore_eos", "an answer ends with the model's end token"),
    refused_row("gconfig.use_beam_search", "training samples"),
    value_row("eval_gconfig.temperature", "evaluation.sampling.temperature", convert="number"),
    value_row("eval_gconfig.top_p", "evaluation.sampling.topP", convert="number"),
    value_row("eval_gconfig.n_samples", "evaluation.samplesPerTask", convert="whole"),
    value_row("eval_gconfig.max_new_tokens", "evaluation.sampling.maxTokens", convert="whole"),
    joined_row("eval_gconfig", "evaluation.sampling", "evaluation samples like training"),
    dropped_row("eval_gconfig.greedy", "evaluation.sampling.temperature: 0 is greedy", fine=(False,)),
    *(
        dropped_row(f"eval_gconfig.{name}", "evaluation samples from the full distribution", fine=fine)
        for name, fine in _WHOLE_DISTRIBUTION.items()
    ),
    *dropped_rows("eval_gconfig.", "seqLen is the bound", "max_tokens", "skip_special_tokens", "lora_name"),
    joined_row("rollout.max_concurrent_rollouts", "orchestrator.maxConcurrency"),
    joined_row("rollout.max_head_offpolicyness", "algorithm.maxAsyncLevel, algorithm.maxOffPolicySteps"),
    joined_row("rollout.backend", "inference.tensorParallel, inference.replicas", "allocation_mode overrides it"),
    *ROLLOUT,
    joined_row("train_dataset.path", "environments[]"),
    joined_row("train_dataset.batch_size", "orchestrator.batchSize"),
    joined_row("train_dataset.max_length", "seqLen", "the longest prompt"),
    joined_row("train_dataset.shuffle", "environments[].curriculum", "each epoch has a new order"),
    refused_row(
        "train_dataset.type",
        "only RL is supported: for supervised runs see docs/sft.md; reward models are not supported",
        fine=("rl",),
    ),
    *dropped_rows(
        "train_dataset.", _LOADER, "pin_memory", "num_workers", "num_dataset_workers", "drop_last", "setup_timeout"
    ),
    dropped_row("train_dataset.split", "environments read the split train", fine=("train",)),
    refused_row("train_dataset.dataset_kwargs*", "arguments for Python of AReaL's script", fine=({}, None)),
    dropped_row("valid_dataset", "held-out tasks come from the environment", fine=(None,)),
    joined_row(
        "valid_dataset.path", "evaluation", "no evaluation between steps, or the environment's own held-out tasks"
    ),
    *dropped_rows(
        "valid_dataset.",
        "held-out tasks come from the environment",
        "batch_size",
        "shuffle",
        "pin_memory",
        "num_workers",
    ),
    *dropped_rows(
        "valid_dataset.",
        "held-out tasks come from the environment",
        "num_dataset_workers",
        "drop_last",
        "setup_timeout",
    ),
    *dropped_rows("valid_dataset.", "held-out tasks come from the environment", "max_length", "split", "type"),
    refused_row("valid_dataset.dataset_kwargs*", "arguments for Python of AReaL's script", fine=({}, None)),
    joined_row("allocation_mode", "trainer, inference, placement.colocate"),
    joined_row("cluster.n_gpus_per_node", "trainer.replicas, trainer.gpusPerReplica"),
    joined_row("cluster.n_nodes", "placement.colocate", "the number of pods follows from the allocation"),
    joined_row("rollout.scheduling_strategy.type", "placement.colocate", "engines use separate GPUs"),
    joined_row("rollout.scheduling_strategy.target", "placement.colocate", "engines use separate GPUs"),
    dropped_row("sglang.quantization", "engines compute in model.dtype", fine=(None,)),
    joined_row("total_train_epochs", "maxSteps", "total_train_steps overrides it"),
    joined_row("total_train_steps", "maxSteps", "total_train_epochs decides"),
    dropped_row("total_train_n_seqs", "maxSteps bounds a run", fine=(None,)),
    value_row("seed", "seed", convert="whole"),
    joined_row("experiment_name", "metadata.name"),
    dropped_row("trial_name", "each start of a run is an attempt"),
    dropped_row("tokenizer_path", "the tokenizer comes from the model"),
    dropped_row("async_training", "rollout.max_head_offpolicyness decides", fine=(True,)),
    dropped_row("enable_offload", "placement.colocate offloads sleeping roles"),
    dropped_row("dynamic_bs", "a batch is always filled: groups that are dropped are replaced"),
    value_row("vllm.max_model_len", "inference.maxModelLen", convert="whole"),
    joined_row("vllm.gpu_memory_utilization", "inference.gpuMemoryUtilization"),
    value_row("vllm.max_num_seqs", "inference.maxNumSeqs", convert="whole"),
    joined_row(
        "sglang.mem_fraction_static", "inference.gpuMemoryUtilization", "vllm.gpu_memory_utilization overrides it"
    ),
    joined_row("saver.freq_steps", "checkpoint.export.interval", "no exports during the run"),
    joined_row("saver.freq_epochs", "checkpoint.export.interval", "no exports during the run"),
    joined_row("saver.freq_secs", "checkpoint.export.interval", "no exports during the run"),
    joined_row("recover.freq_steps", "checkpoint.interval", "checkpoints every 20 steps"),
    joined_row("recover.freq_epochs", "checkpoint.interval", "checkpoints every 20 steps"),
    joined_row("recover.freq_secs", "checkpoint.interval", "checkpoints every 20 steps"),
    value_row("recover.retries", "failurePolicy.maxRestarts", convert="whole"),
    joined_row("evaluator.freq_steps", "evaluation.interval", "no evaluation between steps"),
    joined_row("evaluator.freq_epochs", "evaluation.interval", "no evaluation between steps"),
    joined_row("evaluator.freq_secs", "evaluation.interval", "no evaluation between steps"),
    *UTILITIES,
    dropped_row("defaults*", "Hydra's list of files"),
    dropped_row("--config", "not read: also name that file on the command line", fine=(None,)),
    dropped_row("--*", "an option of AReaL's launcher"),
    *SCRIPT,
    dropped_row("batch_size", "train_dataset.batch_size overrides it"),
    *dropped_rows("", "gconfig and train_dataset set the limits", "max_prompt_len", "max_answer_len", "max_seq_len"),
)

ROWS: tuple[Row, ...] = (*_ACTOR, *_OTHERS)

INDIFFERENT = (
    *("cluster.", "launcher.", "scheduler.", "stats_logger.", "perf_tracer.", "memory_profiler.", "saver.", "recover."),
    *("evaluator.", "vllm.", "sglang.", "-"),
)
"""Prefixes of keys that never change the training result."""
