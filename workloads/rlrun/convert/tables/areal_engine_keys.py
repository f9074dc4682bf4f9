"""AReaL's keys for the computation and start of a step, not its result: engines, launcher, storage. Release 1.0.4."""

from __future__ import annotations

from rlrun.convert.tables.row import Row, dropped_row, dropped_rows, refused_row, value_row

_NAMES = "each run has one name: metadata.name"
_FOLDER = "the run's folder is <storage.mountPath>/<name>"
_PODS = "pods have trainer.resources and inference.resources"
_PLACEMENT = "trainer and engines are placed by placement"
_TRACKER = "metrics are in metrics.jsonl of the run's folder; trackers are tracking"
_PACKED = "micro-batches are packed by tokens"
_MEMORY = "memory only"
_SPEED = "speed only; RLRun chooses its own kernels"
_MEGATRON = "for Megatron; RLRun trains with FSDP2 with tensor, context, expert and pipeline parallelism"
_CONTROLLER = "of AReaL's controllers"
_ENGINE = "vLLM's own default"
_SGLANG = "for SGLang; the engine of RLRun is vLLM"
_PROXY = "an agent in the Python of AReaL's script; write an environment (docs/environments.md)"
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
    *dropped_rows("*.", _NAMES, "experiment_name", "trial_name"),
    dropped_row("*.fileroot", _FOLDER),
    dropped_row("*.scheduling_spec", _PODS),
    *dropped_rows("*.scheduling_spec[*].", _PODS, *_SCHEDULING),
    *dropped_rows("*.scheduling_spec.", _PODS, *_SCHEDULING),
    dropped_row("*.scheduling_strategy", _PLACEMENT),
    *dropped_rows("*.scheduling_strategy.", _PLACEMENT, "type", "target", "fork"),
)


def engine_rows(part: str) -> tuple[Row, ...]:
    """Return the rows of the training engine of a part: `actor`, `critic`, `ref`."""
    at, meg, archon, fsdp = f"{part}.", f"{part}.megatron.", f"{part}.archon.", f"{part}.fsdp."
    return (
        dropped_row(at + "mb_spec", _PACKED),
        *dropped_rows(at + "mb_spec.", _PACKED, "n_mbs", "granularity", "n_mbs_divisor", "packing_algorithm"),
        dropped_row(at + "pad_to_maximum", _PACKED),
        dropped_row(
            at + "attn_impl", "trainer.attention: auto takes flash attention on GPUs", fine=("flash_attention_2",)
        ),
        dropped_row(at + "use_kernels", _SPEED),
        refused_row(at + "init_from_scratch", "training starts with the model's weights"),
        refused_row(at + "is_critic", "training only a reward model or a critic is not supported"),
        dropped_row(at + "disable_dropout", "dropout is off", fine=(True,)),
        dropped_row(at + "grad_reduce_dtype", "gradients are reduced in float32", fine=("float32",)),
        dropped_row(at + "optimizer_dtype", _WIDTH, fine=("float32",)),
        dropped_row(at + "offload", "placement.colocate offloads sleeping roles to host memory"),
        *dropped_rows(at, _SPEED, "enable_tree_training", "tree_training_mode", "packing_algorithm"),
        dropped_row(at + "lora_delta_sync", "engines load the adapter only"),
        *dropped_rows(at, "placement.colocate shares GPUs", "colocated", "colocated_weight_path"),
        dropped_row(at + "_version", _CONTROLLER),
        *dropped_rows(at, _CONTROLLER, "admin_api_key", "log_level", "request_timeout", "setup_timeout"),
        refused_row(
            at + "*mtp*", "losses of multi-token prediction heads, which are not supported", fine=(None, False, 0)
        ),
        refused_row(
            at + "*router_replay",
            "replayed experts: experts are chosen again while training; without it the run has other gradients",
        ),
        refused_row(
            meg + "moe_router_bias_update_rate",
            "a bias of the router that learns, which is not trained",
            fine=(None, 0),
        ),
        *dropped_rows(meg, _SPEED, "enable_chunked_logits", "lm_head_loss_chunk_size", "cross_entropy_loss_fusion"),
        dropped_row(meg + "enable_fp32_lm_head", "log-probs are computed in float32"),
        *dropped_rows(at + "mindspeed", "options of another accelerator", ""),
        *dropped_rows(at + "mindspeed.", "options of another accelerator", "swap_optimizer", "use_fused_swiglu"),
        dropped_row(at + "mindspeed.position_embedding_type", "options of another accelerator", fine=("rope",)),
        *dropped_rows(
            at + "dte.", "the transport of weights is weightSync.transport", "enabled", "transfer", "delta_method"
        ),
        *dropped_rows(
            at + "dte.", "the transport of weights is weightSync.transport", "anchor_interval", "verify_snapshot"
        ),
        *dropped_rows(
            at + "dte.",
            "the transport of weights is weightSync.transport",
            *("release_train_weights_after_update", "release_initial_rollout_weights"),
            "sync_model_params_before_payload",
        ),
        dropped_row(fsdp + "wrap_policy", "layers are wrapped one by one"),
        dropped_row(fsdp + "wrap_policy.transformer_layer_cls_to_wrap", "layers are wrapped one by one"),
        *dropped_rows(fsdp, _MEMORY, "memory_efficient_load", "per_layer_optim_step", "optim_step_prefetch_layers"),
        dropped_row(fsdp + "shard_vision_across_sp", "text models have no vision encoder"),
        *dropped_rows(
            archon, _SPEED, "attn_type", "enable_compile", "ac_mode", "selective_ac_option", "ac_memory_budget"
        ),
        *dropped_rows(archon, _SPEED, "ac_preserve_rng_state", "ac_debug", "pp_schedule", "pp_layers_per_stage"),
        *dropped_rows(archon, _SPEED, "pp_first_stage_less_layers", "pp_last_stage_less_layers"),
        *dropped_rows(
            archon, _SPEED, "reshard_after_forward_policy", "use_deterministic_algorithms", "moe_router_dtype"
        ),
        dropped_row(archon + "offload_params", "use fsdp.offload_params, which is trainer.cpuOffload"),
        dropped_row(archon + "fp8_config", "training is in model.dtype", fine=(None,)),
        dropped_row(archon + "fp8_config.mode", "training is in model.dtype", fine=("disabled",)),
        *dropped_rows(
            archon + "fp8_config.", "only with mode: blockwise", "exclude_modules", "include_experts", "use_triton"
        ),
        *dropped_rows(meg, _MEGATRON, "wrap_with_ddp", "use_torch_fsdp2", "use_custom_fsdp", "ddp"),
        *dropped_rows(meg + "ddp.", _MEGATRON, "grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather"),
        *dropped_rows(
            meg + "ddp.", _MEGATRON, "align_param_gather", "use_distributed_optimizer", "check_for_nan_in_grad"
        ),
        *dropped_rows(meg + "ddp.", _MEGATRON, "bucket_size", "average_in_collective", "fp8_param_gather"),
        dropped_row(
            meg + "virtual_pipeline_parallel_size",
            "set schedule: Interleaved1F1B and stagesPerRank in trainer.parallelism",
            fine=(None, 1),
        ),
        *dropped_rows(meg, _MEGATRON, "overlap_param_gather_with_optimizer_step", "use_precision_aware_optimizer"),
        *(
            dropped_row(meg + name, _WIDTH, fine=("float32",))
            for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        ),
        *dropped_rows(
            meg, _MEGATRON, "async_save", "use_checkpoint_opt_param_scheduler", "use_deterministic_algorithms"
        ),
        *dropped_rows(meg, _MEGATRON, "recompute_granularity", "recompute_method", "recompute_num_layers"),
        *dropped_rows(meg, _MEGATRON, "distribute_saved_activations", "recompute_modules", "moe_router_dtype"),
        *dropped_rows(meg, _MEGATRON, "moe_shared_expert_overlap", "moe_enable_deepep", "moe_token_dispatcher_type"),
        *dropped_rows(
            meg, _MEGATRON, "moe_permute_fusion", "bridge_type", "use_mbridge_save", "use_bridge_for_update_weights"
        ),
        dropped_row(meg + "fp8_config", "training is in model.dtype", fine=(None,)),
        dropped_row(meg + "fp8_config.mode", "training is in model.dtype", fine=(None,)),
        *dropped_rows(
            meg + "fp8_config.", _MEGATRON, "recipe", "param", "margin", "amax_history_len", "amax_compute_algo"
        ),
        *dropped_rows(meg + "fp8_config.", _MEGATRON, "wgrad", "dot_product_attention", "multi_head_attention"),
        *dropped_rows(meg + "fp8_config.", _MEGATRON, "tp_only_amax_red", "first_last_layers_bf16", "direct_convert"),
        *dropped_rows(meg + "fp8_config.", _MEGATRON, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    )


ROLLOUT: tuple[Row, ...] = (
    dropped_row("rollout.queue_size", "orchestrator.maxConcurrency bounds what is in flight", fine=(None,)),
    dropped_row("rollout.consumer_batch_size", "train_dataset.batch_size overrides it"),
    *dropped_rows("rollout.", "actor.use_lora overrides it", "use_lora", "lora_name"),
    *dropped_rows("rollout.", "traces of rollouts are in the run's folder", "enable_rollout_tracing", "dump_to_file"),
    dropped_row("rollout.check_trajectory_format", "environments are checked at their start"),
    dropped_row("rollout.tokenizer_path", "the tokenizer comes from the model"),
    *dropped_rows("rollout.", _CONTROLLER, "setup_timeout", "request_timeout", "request_retries", "pause_grace_period"),
    *dropped_rows("rollout.", _CONTROLLER, "_version", "model", "routing_strategy", "poll_interval", "admin_api_key"),
    refused_row(
        "rollout.api_url", "responses of an external server, which are not from a policy version", fine=(None, "")
    ),
    dropped_row("rollout.provider_api_key", "only with rollout.api_url", fine=(None, "")),
    dropped_row("rollout.workers_ready_timeout", _CONTROLLER),
    *(
        refused_row(f"rollout.agent.{name}", _PROXY, fine=(None, default))
        for name, default in (
            *(("mode", "inline"), ("export_style", "individual"), ("turn_discount", 1), ("tool_call_parser", "qwen")),
            *(("reasoning_parser", "qwen3"), ("chat_template_type", "hf"), ("set_reward_finish_timeout", 0)),
        )
    ),
    *dropped_rows("rollout.agent.", _CONTROLLER, "admin_api_key", "subproc_max_workers", "session_timeout_seconds"),
    refused_row(
        "rollout.agent*",
        "an agent in the Python of AReaL's script; write an environment (docs/environments.md)",
        fine=(None,),
    ),
    dropped_row("rollout.return_routed_experts", "experts are chosen again while training", fine=(False,)),
)

UTILITIES: tuple[Row, ...] = (
    *_EVERYWHERE,
    *dropped_rows("cluster.", _DISCOVERY, "cluster_name", "name_resolve"),
    *dropped_rows("cluster.name_resolve.", _DISCOVERY, "type", "nfs_record_root", "etcd3_addr", "ray_actor_name"),
    *dropped_rows("scheduler.", "Kubernetes, or rlrun local, starts the roles", "type", "endpoint", "deploy_mode"),
    refused_row(
        "scheduler.reward_*",
        "a reward server of AReaL's launcher; set args.reward of an environment (docs/environments.md)",
        fine=(None, {}, "", "http://localhost:30000/classify"),
    ),
    dropped_row("scheduler.functioncall_service_domain", "args.reward: code runs programs in a separate sandbox"),
    *dropped_rows("stats_logger.", _TRACKER, "wandb", "swanlab", "tensorboard", "trackio"),
    *dropped_rows(
        "stats_logger.wandb.", _TRACKER, "mode", "wandb_base_url", "wandb_api_key", "entity", "project", "name"
    ),
    *dropped_rows(
        "stats_logger.wandb.", _TRACKER, "job_type", "group", "notes", "tags", "config", "config.*", "id_suffix"
    ),
    *dropped_rows(
        "stats_logger.swanlab.", _TRACKER, "project", "name", "config", "config.*", "logdir", "mode", "api_key"
    ),
    dropped_row("stats_logger.tensorboard.path", _TRACKER),
    *dropped_rows("stats_logger.trackio.", _TRACKER, "mode", "project", "name", "space_id"),
    *dropped_rows("perf_tracer.", "times of phases are in metrics.jsonl", "enabled", "save_interval", "profile_steps"),
    *dropped_rows(
        "perf_tracer.session_tracer.", "traces of rollouts are in the run's folder", "enabled", "flush_threshold"
    ),
    *dropped_rows("", "times of phases are in metrics.jsonl", "perf_tracer", "perf_tracer.session_tracer"),
    *dropped_rows(
        "memory_profiler", "profiling is a separate command: trainer --bench", "", ".profile_steps", ".max_entries"
    ),
    dropped_row("saver.mode", "checkpoint.saveAsync is on by default"),
    dropped_row("recover.mode", "a run always resumes from its newest checkpoint"),
    *dropped_rows(
        "recover.", "a checkpoint always holds model, optimizer and progress", "no_save_optim", "no_load_optim"
    ),
    dropped_row("evaluator.eval_before_train", "the first version is always evaluated, if there is evaluation"),
    dropped_row("vllm.model", "the engine uses the run's model"),
    *dropped_rows(
        "vllm.", _ENGINE, "seed", "skip_tokenizer_init", "enforce_eager", "dtype", "distributed_executor_backend"
    ),
    *dropped_rows(
        "vllm.", _ENGINE, "block_size", "cpu_offload_gb", "disable_sliding_window", "no_enable_chunked_prefill"
    ),
    *dropped_rows("vllm.", _ENGINE, "no_enable_prefix_caching", "worker_extension_cls", "enable_sleep_mode"),
    *dropped_rows(
        "vllm.", _ENGINE, "uvicorn_log_level", "gdn_prefill_backend", "enable_lora", "max_lora_rank", "max_loras"
    ),
    *dropped_rows("vllm.", _ENGINE, "lora_modules", "swap_space", "enable_metrics"),
    *dropped_rows("sglang.", _SGLANG, "model_path", "random_seed", "skip_tokenizer_init", "disable_cuda_graph"),
    *dropped_rows("sglang.", _SGLANG, "disable_radix_cache", "disable_cuda_graph_padding", "enable_nccl_nvls"),
    *dropped_rows(
        "sglang.", _SGLANG, "disable_outlines_disk_cache", "disable_custom_all_reduce", "disable_overlap_schedule"
    ),
    *dropped_rows(
        "sglang.", _SGLANG, "enable_mixed_chunk", "enable_dp_attention", "enable_ep_moe", "enable_torch_compile"
    ),
    *dropped_rows("sglang.", _SGLANG, "torch_compile_max_bs", "cuda_graph_max_bs", "cuda_graph_bs", "torchao_config"),
    *dropped_rows("sglang.", _SGLANG, "enable_nan_detection", "enable_p2p_check", "triton_attention_reduce_in_fp32"),
    *dropped_rows(
        "sglang.", _SGLANG, "triton_attention_num_kv_splits", "num_continuous_decode_steps", "enable_memory_saver"
    ),
    *dropped_rows(
        "sglang.", _SGLANG, "allow_auto_truncate", "attention_backend", "enable_multimodal", "sampling_backend"
    ),
    *dropped_rows("sglang.", _SGLANG, "context_length", "chunked_prefill_size", "max_prefill_tokens"),
    *dropped_rows("sglang.", _SGLANG, "schedule_policy", "schedule_conservativeness", "cpu_offload_gb", "dtype"),
    *dropped_rows("sglang.", _SGLANG, "kv_cache_dtype", "dp_size", "ep_size", "enable_lora", "max_lora_rank"),
    *dropped_rows("sglang.", _SGLANG, "max_loaded_loras", "lora_paths", "lora_backend", "log_level", "log_level_http"),
    *dropped_rows("sglang.", _SGLANG, "log_requests", "log_requests_level", "show_time_cost", "enable_metrics"),
    *dropped_rows("sglang.", _SGLANG, "decode_log_interval", "enable_multithread_load", "max_loras_per_batch"),
    dropped_row("sglang.enable_return_routed_experts", "experts are chosen again while training", fine=(False,)),
    value_row("sglang.max_running_requests", "inference.maxNumSeqs", convert="positive"),
    *dropped_rows(
        "launcher.", _PODS, "inference_server_cpus_per_gpu", "inference_server_mem_per_gpu", "inference_server_env_vars"
    ),
    *dropped_rows(
        "launcher.", _PODS, "trainer_cpus_per_gpu", "trainer_mem_per_gpu", "trainer_env_vars", "trainer_port"
    ),
    *dropped_rows("launcher.slurm.", _PODS, "mount", "trainer_image", "inference_server_image", "container_type"),
    *dropped_rows("launcher.slurm.", _PODS, "inference_server_srun_additional_args", "trainer_srun_additional_args"),
    *dropped_rows("launcher.slurm.", _PODS, "additional_bash_cmds", "inference_server_additional_bash_cmds"),
    dropped_row("launcher.slurm.trainer_additional_bash_cmds", _PODS),
)
"""Rows of parts other than the training engine."""

_AGENT = "turns are computed in Python of AReaL's script; write an environment (docs/environments.md)"
_ROWS = "rows are created in Python of AReaL's script; first write them as chats (docs/sft.md)"
_ONE_TURN = "areal.workflow.rlvr.RLVRWorkflow"
"""Value for the workflow with one answer per prompt, like the environments `gsm8k` and `dataset`."""

SCRIPT: tuple[Row, ...] = (
    refused_row("max_turns", _AGENT, fine=(None, 1)),
    refused_row("n_trajs", f"trajectories per answer of gconfig.n_samples: {_AGENT}", fine=(None, 1)),
    *(refused_row(name, _AGENT, fine=(None, _ONE_TURN)) for name in ("workflow", "eval_workflow")),
    *(
        refused_row(name, _AGENT, fine=(None, {}, False))
        for name in (
            *("econfig", "econfig.*", "agent_run_args", "agent_run_args.*", "task_timeouts", "task_timeouts.*"),
            *("export_style", "max_tokens_per_trajectory", "max_iteration", "max_workers", "max_llm_calls_per_run"),
            *("non_think_mode", "filter_uniform_reward", "encourage_completion_reward", "observation_max_chars"),
            *("turn_discount", "agent_type", "judge_engine", "judge_engine.*"),
        )
    ),
    *(refused_row(name, _ROWS, fine=(None, {})) for name in ("swe", "swe.*")),
    dropped_row("post_exit_hook", "no command follows a run", fine=(None, "")),
)
"""Keys that AReaL's example scripts add to its configuration: agents, and data of supervised runs."""
