"""AReaL's keys for the computation and start of a step, not its result: engines, launcher, storage. Release 1.0.4."""

from __future__ import annotations

from dataclasses import replace

from rlrun.convert.tables.row import Row, dropped_row, dropped_rows, read_rows, refused_row, value_row

_NAMES = "each run has one name: metadata.name"
_FOLDER = "the run's folder is <storage.mountPath>/<name>"
_PODS = "pods have trainer.resources and inference.resources"
_PLACEMENT = "trainer and engines are placed by placement"
_TRACKER = "metrics are in metrics.jsonl of the run's folder; trackers are tracking"
_CONTROLLER = "of AReaL's controllers"
_ENGINE = "vLLM's own default"
_SGLANG = "for SGLang; the engine of RLRun is vLLM"
_PROXY = "an agent in the Python of AReaL's script; write an environment (docs/environments.md)"
_DISCOVERY = "roles find each other by Kubernetes, or on one machine"

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
    return tuple(replace(row, key=f"{part}.{row.key}") for row in read_rows("areal_engine_keys.txt"))


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
    dropped_row("rollout.return_routed_experts", "engines return experts with trainer.router.replay: Rollout"),
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
    dropped_row("sglang.enable_return_routed_experts", "engines return experts with trainer.router.replay: Rollout"),
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
