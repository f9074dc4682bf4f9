"""AReaL's keys that change how a step is computed or started, not what is learned: engines, launcher, storage. Release 1.0.4."""

from __future__ import annotations

from rlrun.convert.tables.row import Row, drop, drops, refuse, value

_NAMES = "each run has one name: metadata.name"
_FOLDER = "the run's folder is <storage.mountPath>/<name>"
_PODS = "pods have trainer.resources and inference.resources"
_PLACEMENT = "trainer and engines are placed by placement"
_TRACKER = "metrics are in metrics.jsonl of the run's folder; trackers are tracking"
_PACKED = "micro-batches are packed by tokens"
_MEMORY = "memory only"
_SPEED = "speed only; RLRun chooses its own kernels"
_MEGATRON = "of Megatron, which does not train here: FSDP2 with tensor, context, expert and pipeline parallelism does"
_CONTROLLER = "of AReaL's controllers"
_ENGINE = "vLLM's own default"
_SGLANG = "of SGLang; vLLM is the engine here"
_PROXY = "an agent in Python of AReaL's script; write an environment (docs/environments.md)"
_DISCOVERY = "roles find each other by Kubernetes, or on one machine"
_WIDTH = "RLRun keeps master weights and moments in float32"

_SCHEDULING = (
    *("cpu", "gpu", "mem", "port_count", "image", "task_type", "env_vars", "env_vars.*", "cmd", "srun_additional_args"),
    *(
        "exclusive",
        "reservation",
        "additional_bash_cmds",
        "container_type",
        "mount",
        "nodelist",
        "exclude",
        "ray_placement_strategy",
    ),
)
_EVERYWHERE = (
    *drops("*.", _NAMES, "experiment_name", "trial_name"),
    drop("*.fileroot", _FOLDER),
    drop("*.scheduling_spec", _PODS),
    *drops("*.scheduling_spec[*].", _PODS, *_SCHEDULING),
    *drops("*.scheduling_spec.", _PODS, *_SCHEDULING),
    drop("*.scheduling_strategy", _PLACEMENT),
    *drops("*.scheduling_strategy.", _PLACEMENT, "type", "target", "fork"),
)


def engine_rows(part: str) -> tuple[Row, ...]:
    """Rows of the training engine of a part: `actor`, `critic`, `ref`."""
    at, meg, archon, fsdp = f"{part}.", f"{part}.megatron.", f"{part}.archon.", f"{part}.fsdp."
    return (
        drop(at + "mb_spec", _PACKED),
        *drops(at + "mb_spec.", _PACKED, "n_mbs", "granularity", "n_mbs_divisor", "packing_algorithm"),
        drop(at + "pad_to_maximum", _PACKED),
        drop(at + "attn_impl", "trainer.attention: auto takes flash attention on GPUs", fine=("flash_attention_2",)),
        drop(at + "use_kernels", _SPEED),
        refuse(at + "init_from_scratch", "training starts with the model's weights"),
        refuse(at + "is_critic", "a reward model or critic alone is not trained here"),
        drop(at + "disable_dropout", "dropout is off", fine=(True,)),
        drop(at + "grad_reduce_dtype", "gradients are reduced in float32", fine=("float32",)),
        drop(at + "optimizer_dtype", _WIDTH, fine=("float32",)),
        drop(at + "offload", "placement.colocate moves what sleeps to host memory"),
        *drops(at, _SPEED, "enable_tree_training", "tree_training_mode", "packing_algorithm"),
        drop(at + "lora_delta_sync", "engines load the adapter only"),
        *drops(at, "placement.colocate shares GPUs", "colocated", "colocated_weight_path"),
        drop(at + "_version", _CONTROLLER),
        *drops(at, _CONTROLLER, "admin_api_key", "log_level", "request_timeout", "setup_timeout"),
        refuse(
            at + "*mtp*", "losses of multi-token prediction heads, which are not trained here", fine=(None, False, 0)
        ),
        refuse(
            at + "*router_replay",
            "replayed experts: experts are chosen again while training; without it the run has other gradients",
        ),
        refuse(
            meg + "moe_router_bias_update_rate",
            "a bias of the router that learns, which is not trained",
            fine=(None, 0),
        ),
        *drops(meg, _SPEED, "enable_chunked_logits", "lm_head_loss_chunk_size", "cross_entropy_loss_fusion"),
        drop(meg + "enable_fp32_lm_head", "log-probs are computed in float32"),
        *drops(at + "mindspeed", "options of another accelerator", ""),
        *drops(at + "mindspeed.", "options of another accelerator", "swap_optimizer", "use_fused_swiglu"),
        drop(at + "mindspeed.position_embedding_type", "options of another accelerator", fine=("rope",)),
        *drops(at + "dte.", "the transport of weights is weightSync.transport", "enabled", "transfer", "delta_method"),
        *drops(at + "dte.", "the transport of weights is weightSync.transport", "anchor_interval", "verify_snapshot"),
        *drops(
            at + "dte.",
            "the transport of weights is weightSync.transport",
            *("release_train_weights_after_update", "release_initial_rollout_weights"),
            "sync_model_params_before_payload",
        ),
        drop(fsdp + "wrap_policy", "layers are wrapped one by one"),
        drop(fsdp + "wrap_policy.transformer_layer_cls_to_wrap", "layers are wrapped one by one"),
        *drops(fsdp, _MEMORY, "memory_efficient_load", "per_layer_optim_step", "optim_step_prefetch_layers"),
        drop(fsdp + "shard_vision_across_sp", "models of texts have no vision encoder"),
        *drops(archon, _SPEED, "attn_type", "enable_compile", "ac_mode", "selective_ac_option", "ac_memory_budget"),
        *drops(archon, _SPEED, "ac_preserve_rng_state", "ac_debug", "pp_schedule", "pp_layers_per_stage"),
        *drops(archon, _SPEED, "pp_first_stage_less_layers", "pp_last_stage_less_layers"),
        *drops(archon, _SPEED, "reshard_after_forward_policy", "use_deterministic_algorithms", "moe_router_dtype"),
        drop(archon + "offload_params", "use fsdp.offload_params, which is trainer.cpuOffload"),
        drop(archon + "fp8_config", "training is in model.dtype", fine=(None,)),
        drop(archon + "fp8_config.mode", "training is in model.dtype", fine=("disabled",)),
        *drops(archon + "fp8_config.", "only with mode: blockwise", "exclude_modules", "include_experts", "use_triton"),
        *drops(meg, _MEGATRON, "wrap_with_ddp", "use_torch_fsdp2", "use_custom_fsdp", "ddp"),
        *drops(meg + "ddp.", _MEGATRON, "grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather"),
        *drops(meg + "ddp.", _MEGATRON, "align_param_gather", "use_distributed_optimizer", "check_for_nan_in_grad"),
        *drops(meg + "ddp.", _MEGATRON, "bucket_size", "average_in_collective", "fp8_param_gather"),
        drop(
            meg + "virtual_pipeline_parallel_size",
            "set schedule: Interleaved1F1B and stagesPerRank in trainer.parallelism",
            fine=(None, 1),
        ),
        *drops(meg, _MEGATRON, "overlap_param_gather_with_optimizer_step", "use_precision_aware_optimizer"),
        *(
            drop(meg + name, _WIDTH, fine=("float32",))
            for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        ),
        *drops(meg, _MEGATRON, "async_save", "use_checkpoint_opt_param_scheduler", "use_deterministic_algorithms"),
        *drops(meg, _MEGATRON, "recompute_granularity", "recompute_method", "recompute_num_layers"),
        *drops(meg, _MEGATRON, "distribute_saved_activations", "recompute_modules", "moe_router_dtype"),
        *drops(meg, _MEGATRON, "moe_shared_expert_overlap", "moe_enable_deepep", "moe_token_dispatcher_type"),
        *drops(
            meg, _MEGATRON, "moe_permute_fusion", "bridge_type", "use_mbridge_save", "use_bridge_for_update_weights"
        ),
        drop(meg + "fp8_config", "training is in model.dtype", fine=(None,)),
        drop(meg + "fp8_config.mode", "training is in model.dtype", fine=(None,)),
        *drops(meg + "fp8_config.", _MEGATRON, "recipe", "param", "margin", "amax_history_len", "amax_compute_algo"),
        *drops(meg + "fp8_config.", _MEGATRON, "wgrad", "dot_product_attention", "multi_head_attention"),
        *drops(meg + "fp8_config.", _MEGATRON, "tp_only_amax_red", "first_last_layers_bf16", "direct_convert"),
        *drops(meg + "fp8_config.", _MEGATRON, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    )


ROLLOUT: tuple[Row, ...] = (
    drop("rollout.queue_size", "orchestrator.maxConcurrency bounds what is in flight", fine=(None,)),
    drop("rollout.consumer_batch_size", "train_dataset.batch_size goes before"),
    *drops("rollout.", "actor.use_lora goes before", "use_lora", "lora_name"),
    *drops("rollout.", "traces of rollouts are in the run's folder", "enable_rollout_tracing", "dump_to_file"),
    drop("rollout.check_trajectory_format", "environments are checked at their start"),
    drop("rollout.tokenizer_path", "the tokenizer is the model's"),
    *drops("rollout.", _CONTROLLER, "setup_timeout", "request_timeout", "request_retries", "pause_grace_period"),
    *drops("rollout.", _CONTROLLER, "_version", "model", "routing_strategy", "poll_interval", "admin_api_key"),
    refuse("rollout.api_url", "answers of a server elsewhere, which no version of the policy gives", fine=(None, "")),
    drop("rollout.provider_api_key", "only with rollout.api_url", fine=(None, "")),
    drop("rollout.workers_ready_timeout", _CONTROLLER),
    *(
        refuse(f"rollout.agent.{name}", _PROXY, fine=(None, default))
        for name, default in (
            *(("mode", "inline"), ("export_style", "individual"), ("turn_discount", 1), ("tool_call_parser", "qwen")),
            *(("reasoning_parser", "qwen3"), ("chat_template_type", "hf"), ("set_reward_finish_timeout", 0)),
        )
    ),
    *drops("rollout.agent.", _CONTROLLER, "admin_api_key", "subproc_max_workers", "session_timeout_seconds"),
    refuse(
        "rollout.agent*",
        "an agent in Python of AReaL's script; write an environment (docs/environments.md)",
        fine=(None,),
    ),
    drop("rollout.return_routed_experts", "experts are chosen again while training", fine=(False,)),
)

UTILITIES: tuple[Row, ...] = (
    *_EVERYWHERE,
    *drops("cluster.", _DISCOVERY, "cluster_name", "name_resolve"),
    *drops("cluster.name_resolve.", _DISCOVERY, "type", "nfs_record_root", "etcd3_addr", "ray_actor_name"),
    *drops("scheduler.", "Kubernetes, or rlrun local, starts the roles", "type", "endpoint", "deploy_mode"),
    refuse(
        "scheduler.reward_*",
        "a server of rewards of AReaL's launcher; set args.reward of an environment (docs/environments.md)",
        fine=(None, {}, "", "http://localhost:30000/classify"),
    ),
    drop("scheduler.functioncall_service_domain", "args.reward: code runs programs in a sandbox of its own"),
    *drops("stats_logger.", _TRACKER, "wandb", "swanlab", "tensorboard", "trackio"),
    *drops("stats_logger.wandb.", _TRACKER, "mode", "wandb_base_url", "wandb_api_key", "entity", "project", "name"),
    *drops("stats_logger.wandb.", _TRACKER, "job_type", "group", "notes", "tags", "config", "config.*", "id_suffix"),
    *drops("stats_logger.swanlab.", _TRACKER, "project", "name", "config", "config.*", "logdir", "mode", "api_key"),
    drop("stats_logger.tensorboard.path", _TRACKER),
    *drops("stats_logger.trackio.", _TRACKER, "mode", "project", "name", "space_id"),
    *drops("perf_tracer.", "times of phases are in metrics.jsonl", "enabled", "save_interval", "profile_steps"),
    *drops("perf_tracer.session_tracer.", "traces of rollouts are in the run's folder", "enabled", "flush_threshold"),
    *drops("", "times of phases are in metrics.jsonl", "perf_tracer", "perf_tracer.session_tracer"),
    *drops(
        "memory_profiler", "profiling is another command here: trainer --bench", "", ".profile_steps", ".max_entries"
    ),
    drop("saver.mode", "checkpoint.saveAsync is on by itself"),
    drop("recover.mode", "a run always resumes from its newest checkpoint"),
    *drops("recover.", "a checkpoint always holds model, optimizer and progress", "no_save_optim", "no_load_optim"),
    drop("evaluator.eval_before_train", "the first version is always evaluated, if there is evaluation"),
    drop("vllm.model", "the engine's model is the run's"),
    *drops("vllm.", _ENGINE, "seed", "skip_tokenizer_init", "enforce_eager", "dtype", "distributed_executor_backend"),
    *drops("vllm.", _ENGINE, "block_size", "cpu_offload_gb", "disable_sliding_window", "no_enable_chunked_prefill"),
    *drops("vllm.", _ENGINE, "no_enable_prefix_caching", "worker_extension_cls", "enable_sleep_mode"),
    *drops("vllm.", _ENGINE, "uvicorn_log_level", "gdn_prefill_backend", "enable_lora", "max_lora_rank", "max_loras"),
    *drops("vllm.", _ENGINE, "lora_modules", "swap_space", "enable_metrics"),
    *drops("sglang.", _SGLANG, "model_path", "random_seed", "skip_tokenizer_init", "disable_cuda_graph"),
    *drops("sglang.", _SGLANG, "disable_radix_cache", "disable_cuda_graph_padding", "enable_nccl_nvls"),
    *drops("sglang.", _SGLANG, "disable_outlines_disk_cache", "disable_custom_all_reduce", "disable_overlap_schedule"),
    *drops("sglang.", _SGLANG, "enable_mixed_chunk", "enable_dp_attention", "enable_ep_moe", "enable_torch_compile"),
    *drops("sglang.", _SGLANG, "torch_compile_max_bs", "cuda_graph_max_bs", "cuda_graph_bs", "torchao_config"),
    *drops("sglang.", _SGLANG, "enable_nan_detection", "enable_p2p_check", "triton_attention_reduce_in_fp32"),
    *drops("sglang.", _SGLANG, "triton_attention_num_kv_splits", "num_continuous_decode_steps", "enable_memory_saver"),
    *drops("sglang.", _SGLANG, "allow_auto_truncate", "attention_backend", "enable_multimodal", "sampling_backend"),
    *drops("sglang.", _SGLANG, "context_length", "chunked_prefill_size", "max_prefill_tokens"),
    *drops("sglang.", _SGLANG, "schedule_policy", "schedule_conservativeness", "cpu_offload_gb", "dtype"),
    *drops("sglang.", _SGLANG, "kv_cache_dtype", "dp_size", "ep_size", "enable_lora", "max_lora_rank"),
    *drops("sglang.", _SGLANG, "max_loaded_loras", "lora_paths", "lora_backend", "log_level", "log_level_http"),
    *drops("sglang.", _SGLANG, "log_requests", "log_requests_level", "show_time_cost", "enable_metrics"),
    *drops("sglang.", _SGLANG, "decode_log_interval", "enable_multithread_load", "max_loras_per_batch"),
    drop("sglang.enable_return_routed_experts", "experts are chosen again while training", fine=(False,)),
    value("sglang.max_running_requests", "inference.maxNumSeqs", convert="positive"),
    *drops(
        "launcher.", _PODS, "inference_server_cpus_per_gpu", "inference_server_mem_per_gpu", "inference_server_env_vars"
    ),
    *drops("launcher.", _PODS, "trainer_cpus_per_gpu", "trainer_mem_per_gpu", "trainer_env_vars", "trainer_port"),
    *drops("launcher.slurm.", _PODS, "mount", "trainer_image", "inference_server_image", "container_type"),
    *drops("launcher.slurm.", _PODS, "inference_server_srun_additional_args", "trainer_srun_additional_args"),
    *drops("launcher.slurm.", _PODS, "additional_bash_cmds", "inference_server_additional_bash_cmds"),
    drop("launcher.slurm.trainer_additional_bash_cmds", _PODS),
)
"""Keys of parts other than the training engine."""

_AGENT = "turns are Python of AReaL's script; write an environment (docs/environments.md)"
_ROWS = "rows are made by Python of AReaL's script; write them as chats first (docs/sft.md)"
_ONE_TURN = "areal.workflow.rlvr.RLVRWorkflow"
"""The workflow of one answer per prompt, which environments `gsm8k` and `dataset` have."""

SCRIPT: tuple[Row, ...] = (
    refuse("max_turns", _AGENT, fine=(None, 1)),
    refuse("n_trajs", f"trajectories per answer of gconfig.n_samples: {_AGENT}", fine=(None, 1)),
    *(refuse(name, _AGENT, fine=(None, _ONE_TURN)) for name in ("workflow", "eval_workflow")),
    *(
        refuse(name, _AGENT, fine=(None, {}, False))
        for name in (
            *("econfig", "econfig.*", "agent_run_args", "agent_run_args.*", "task_timeouts", "task_timeouts.*"),
            *("export_style", "max_tokens_per_trajectory", "max_iteration", "max_workers", "max_llm_calls_per_run"),
            *("non_think_mode", "filter_uniform_reward", "encourage_completion_reward", "observation_max_chars"),
            *("turn_discount", "agent_type", "judge_engine", "judge_engine.*"),
        )
    ),
    *(refuse(name, _ROWS, fine=(None, {})) for name in ("swe", "swe.*")),
    drop("post_exit_hook", "no command follows a run", fine=(None, "")),
)
"""Keys of the classes that AReaL's example scripts add to its configuration: agents, and data of supervised runs."""
