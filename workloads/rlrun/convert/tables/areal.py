"""AReaL's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlrun.convert.tables.row import Row, drop, joined, refuse, value

ALIASES: Mapping[str, str] = {"actor.behave_imp_weight_cap": "actor.behav_imp_weight_cap"}
"""Keys of other releases."""

DEFAULTS: Mapping[str, Any] = {
    "actor.optimizer.weight_decay": 0.01,
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
"""AReaL's defaults where a field follows from them, whether or not the key is written."""

DTYPES: Mapping[str, str] = {name: name for name in ("bfloat16", "float16", "float32")}
MEGATRON_MODULES: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's names of layers, and those of transformers."""

_NAMES = "each run has one name: metadata.name"
_ENGINE = "vLLM's own default"
_SGLANG = "of SGLang; vLLM is the engine here"
_TRACKER = "metrics are in metrics.jsonl of the run's folder"
_PODS = "pods have trainer.resources and inference.resources"
_FOLDER = "the run's folder is <storage.mountPath>/<name>"
_REFERENCE = "the reference is sharded and computed as the policy is"
_SCALE = "rewards or advantages are divided by their standard deviation, which undoes it"

_ACTOR: tuple[Row, ...] = (
    drop("*.experiment_name", _NAMES),
    drop("*.trial_name", _NAMES),
    drop("*.fileroot", _FOLDER),
    joined("actor.path", "model.name or model.path"),
    value("actor.dtype", "model.dtype", "of published weights and the engine", values=DTYPES),
    value("actor.gradient_checkpointing", "trainer.activationCheckpointing", convert="checkpointing"),
    joined("actor.mb_spec.max_tokens_per_mb", "trainer.microBatchTokens"),
    drop("actor.mb_spec.*", "micro-batches are packed by tokens"),
    value(
        "actor.optimizer.type", "trainer.optimizer.name", values={"adam": "adamw", "adam_bf16": "adamw", "sgd": "sgd"}
    ),
    value("actor.optimizer.lr", "trainer.optimizer.lr", "peak learning rate", convert="number"),
    value("actor.optimizer.weight_decay", "trainer.optimizer.weightDecay", convert="number"),
    value("actor.optimizer.beta1", "trainer.optimizer.beta1", convert="number"),
    value("actor.optimizer.beta2", "trainer.optimizer.beta2", convert="number"),
    value("actor.optimizer.eps", "trainer.optimizer.eps", convert="number"),
    value("actor.optimizer.gradient_clipping", "trainer.optimizer.maxGradNorm", convert="number"),
    value(
        "actor.optimizer.lr_scheduler_type",
        "trainer.scheduler.name",
        values={"constant": "constant", "cosine": "cosine", "linear": "linear"},
    ),
    value("actor.optimizer.min_lr_ratio", "trainer.scheduler.minLrRatio", convert="number"),
    joined("actor.optimizer.warmup_steps_proportion", "trainer.scheduler.warmupSteps", "no warm-up"),
    value("actor.optimizer.offload", "trainer.cpuOffload", convert="flag"),
    value("actor.fsdp.offload_params", "trainer.cpuOffload", convert="flag"),
    drop("actor.optimizer.*", "of loss scaling: bfloat16 needs none"),
    joined("actor.ppo_n_minibatches", "trainer.updatesPerStep"),
    joined("actor.eps_clip*", "algorithm.loss", "this loss has no such bound"),
    joined("actor.c_clip", "algorithm.loss", "no dual clip"),
    joined("actor.behav_imp_weight_cap", "algorithm.loss", "only with use_decoupled_loss"),
    joined("actor.behave_imp_weight_mode", "algorithm.loss", "only with use_decoupled_loss"),
    joined("actor.use_decoupled_loss", "algorithm.preset, algorithm.loss"),
    joined("actor.recompute_logprob", "algorithm.proximal", "use_decoupled_loss recomputes them anyway"),
    joined("actor.prox_logp_method", "algorithm.proximal", "only with use_decoupled_loss"),
    joined("actor.importance_sampling_level", "algorithm.loss", "one ratio per token, or per answer (gspo)"),
    joined("actor.use_sapo_loss", "algorithm.loss", "not SAPO's loss"),
    joined("actor.sapo_tau_*", "algorithm.loss", "only with use_sapo_loss"),
    refuse(
        "actor.m2_threshold", "M2PO masks tokens by the second moment of the batch's ratios, which no loss here does"
    ),
    refuse(
        "actor.self_distillation*",
        "distillation from the policy's own feedback, which no objective here does",
        fine=(None,),
    ),
    joined("actor.reward_norm", "algorithm.advantage", "rewards are not normalised"),
    joined("actor.reward_norm.*_level", "algorithm.advantage"),
    joined("actor.reward_norm.mean_leave1out", "algorithm.advantage", "the mean is the whole group's"),
    drop("actor.reward_norm.group_size", "the group is environments[].groupSize"),
    drop("actor.reward_norm.*", "standard deviations are unbiased, + 1e-6", fine=(True,)),
    joined("actor.adv_norm", "algorithm.advantage", "advantages are not normalised"),
    joined("actor.adv_norm.*_level", "algorithm.advantage"),
    drop("actor.adv_norm.group_size", "the group is environments[].groupSize"),
    drop("actor.adv_norm.*", "standard deviations are unbiased, + 1e-6", fine=(True,)),
    drop("actor.reward_scaling", _SCALE),
    drop("actor.reward_bias", "the mean of rewards or advantages is subtracted, which undoes it"),
    drop("actor.reward_clip", "rewards are not clipped"),
    joined("actor.overlong_reward_penalty", "algorithm.filters.overlongPenalty", "no penalty of long answers"),
    joined("actor.overlong_tokens", "algorithm.filters.overlongBuffer", "no penalty of long answers"),
    joined("actor.overlong_penalty_factor", "algorithm.filters.overlongPenalty", "no penalty of long answers"),
    joined("actor.mask_no_eos_with_zero", "algorithm.filters.overlongMask", "answers that were cut off are trained on"),
    joined("actor.dynamic_sampling", "algorithm.filters.zeroVariance", "groups of equal rewards are trained on"),
    joined("actor.discount", "algorithm.advantage", "only with a critic"),
    joined("actor.gae_lambda", "algorithm.advantage", "only with a critic"),
    joined("actor.kl_ctl", "algorithm.regularizers.kl", "no KL term"),
    joined("actor.kl_estimator", "algorithm.regularizers.klKind", "no KL term"),
    joined("actor.use_lora", "trainer.lora", "no LoRA"),
    joined("actor.lora_rank", "trainer.lora.rank", "no LoRA"),
    joined("actor.lora_alpha", "trainer.lora.alpha", "no LoRA"),
    joined("actor.target_modules", "trainer.lora.targets", "no LoRA, or all linear layers"),
    drop("actor.peft_type", "adapters are LoRA's", fine=("lora",)),
    value(
        "actor.weight_update_mode",
        "weightSync.transport",
        values={"disk": "Filesystem", "xccl": "NCCL", "nccl": "NCCL"},
    ),
    joined("actor.backend", "trainer.parallelism", "allocation_mode goes before"),
    drop("actor.megatron.*", "of Megatron, which does not train here"),
    drop("actor.fsdp.*", "layers are wrapped one by one"),
    drop("actor.max_new_tokens", "gconfig.max_new_tokens goes before"),
    drop("actor.temperature", "gconfig.temperature goes before"),
    drop("actor.group_size", "gconfig.n_samples goes before"),
    refuse("actor.init_from_scratch", "training begins with the model's weights"),
    drop("actor.disable_dropout", "dropout is off", fine=(True,)),
    drop("actor.attn_impl", "trainer.attention: auto takes flash attention on GPUs", fine=("flash_attention_2",)),
    drop("actor.scheduling_spec*", _PODS),
    drop("actor.scheduling_strategy*", "trainer and engines are placed by placement"),
    drop("actor.log_agent_stats*", _TRACKER),
    drop("actor.*", "of AReaL's engine"),
)

_OTHERS: tuple[Row, ...] = (
    joined(
        "critic.optimizer*",
        "algorithm.critic.lr",
        "the critic's optimizer and schedule are the policy's, but for its rate",
    ),
    joined("critic.eps_clip", "algorithm.critic.valueClip"),
    drop("critic.*", "the critic is trained as the policy is"),
    drop("ref", _REFERENCE),
    drop("ref.*", _REFERENCE),
    drop("teacher.*", "a teacher is algorithm.reference.model with preset distill"),
    joined("gconfig.n_samples", "environments[].groupSize, orchestrator.batchSize"),
    joined("gconfig.max_new_tokens", "sampling.maxTokens, seqLen"),
    joined("gconfig.max_tokens", "seqLen"),
    value("gconfig.temperature", "sampling.temperature", convert="number"),
    drop("gconfig.greedy", "training always samples", fine=(False,)),
    drop("gconfig.top_p", "training samples from the whole distribution", fine=(1,)),
    drop("gconfig.top_k", "training samples from the whole distribution", fine=(-1, 100_000_000)),
    drop("gconfig.min_new_tokens", "training samples from the whole distribution", fine=(0,)),
    drop("gconfig.frequency_penalty", "training samples from the whole distribution", fine=(0,)),
    drop("gconfig.stop*", "a reply ends with the model's end token", fine=([], None)),
    drop("gconfig.lora_name", "versions of an adapter have names of their own"),
    drop("gconfig.*", "not a field of sampling"),
    drop("eval_gconfig.*", "evaluation samples as training does, but for evaluation.sampling"),
    joined("rollout.max_concurrent_rollouts", "orchestrator.maxConcurrency"),
    joined("rollout.max_head_offpolicyness", "algorithm.maxAsyncLevel, algorithm.maxOffPolicySteps"),
    joined("rollout.backend", "inference.tensorParallel, inference.replicas", "allocation_mode goes before"),
    drop("rollout.queue_size", "orchestrator.maxConcurrency bounds what is in flight", fine=(None,)),
    drop("rollout.consumer_batch_size", "train_dataset.batch_size goes before"),
    drop("rollout.use_lora", "actor.use_lora goes before"),
    drop("rollout.scheduling_spec*", _PODS),
    drop("rollout.enable_rollout_tracing", "traces of rollouts are in the run's folder"),
    drop("rollout.dump_to_file", "traces of rollouts are in the run's folder"),
    drop("rollout.*", "of AReaL's client"),
    joined("train_dataset.path", "environments[]"),
    joined("train_dataset.batch_size", "orchestrator.batchSize"),
    joined("train_dataset.max_length", "seqLen", "the longest prompt"),
    joined("train_dataset.shuffle", "environments[].curriculum", "each epoch has a new order"),
    refuse(
        "train_dataset.type",
        "only RL is converted: supervised runs are docs/sft.md, reward models are not trained here",
        fine=("rl",),
    ),
    drop("train_dataset.*", "rows are read by number, played as they come"),
    joined("valid_dataset.path", "evaluation", "no evaluation between steps, or the environment's own held-out tasks"),
    drop("valid_dataset.*", "held-out tasks are the environment's"),
    joined("allocation_mode", "trainer, inference, placement.colocate"),
    joined("cluster.n_gpus_per_node", "trainer.replicas, trainer.gpusPerReplica"),
    drop("cluster.n_nodes", "pods are as many as the allocation needs"),
    drop("cluster.name_resolve.*", "roles find each other by Kubernetes, or on one machine"),
    drop("cluster.*", "of AReaL's launcher"),
    joined("total_train_epochs", "maxSteps", "total_train_steps goes before"),
    joined("total_train_steps", "maxSteps", "total_train_epochs decides"),
    drop("total_train_n_seqs", "maxSteps bounds a run", fine=(None,)),
    value("seed", "seed", convert="whole"),
    joined("experiment_name", "metadata.name"),
    drop("trial_name", "each start of a run is an attempt"),
    drop("tokenizer_path", "the tokenizer is the model's"),
    drop("async_training", "rollout.max_head_offpolicyness decides", fine=(True,)),
    drop("enable_offload", "placement.colocate moves what sleeps"),
    drop("dynamic_bs", "a batch is always filled: groups that are dropped are replaced"),
    value("vllm.max_model_len", "inference.maxModelLen", convert="whole"),
    joined("vllm.gpu_memory_utilization", "inference.gpuMemoryUtilization"),
    value("vllm.max_num_seqs", "inference.maxNumSeqs", convert="whole"),
    drop("vllm.model", "the engine's model is the run's"),
    drop("vllm.*", _ENGINE),
    joined("sglang.mem_fraction_static", "inference.gpuMemoryUtilization", "vllm.gpu_memory_utilization goes before"),
    drop("sglang.*", _SGLANG),
    joined("saver.freq_*", "checkpoint.export.interval", "no exports on the way"),
    joined("recover.freq_*", "checkpoint.interval", "checkpoints every 20 steps"),
    value("recover.retries", "failurePolicy.maxRestarts", convert="whole"),
    drop("recover.mode", "a run always resumes from its newest checkpoint"),
    joined("evaluator.freq_*", "evaluation.interval", "no evaluation between steps"),
    drop("stats_logger.*", _TRACKER),
    drop("perf_tracer.*", "times of phases are in metrics.jsonl"),
    drop("launcher.*", _PODS),
    drop("scheduler.*", "Kubernetes, or rlrun local, starts the roles"),
    drop("saver.*", _FOLDER),
    drop("recover.*", _FOLDER),
    drop("evaluator.*", _FOLDER),
    drop("model.*", "of a supervised run"),
    drop("defaults*", "Hydra's list of files"),
    drop("--config", "not followed: name that file on the command line too", fine=(None,)),
    drop("--*", "an option of AReaL's launcher"),
    refuse(
        "max_turns", "turns are Python of AReaL's script; write an environment (docs/environments.md)", fine=(None, 1)
    ),
    drop("n_trajs", "gconfig.n_samples is the size of a group", fine=(1,)),
    drop("max_tokens_per_trajectory", "seqLen is the bound"),
    drop("batch_size", "train_dataset.batch_size goes before"),
    drop("max_*_len", "gconfig and train_dataset have the bounds"),
)

ROWS: tuple[Row, ...] = (*_ACTOR, *_OTHERS)
