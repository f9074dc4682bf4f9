"""PRIME-RL's keys of a run, of every role's table, and of the engines.

`RUN_ROWS` has the keys at the top of a run's file, `INFERENCE_ROWS` those of `[inference]`. The functions for keys that every role's table
repeats are here too.
"""

from __future__ import annotations

from rlrun.config.dialects.conversions import (
    TEMPLATE_ARGUMENT,
    count_gpus,
    defer_value,
    gpu_ids,
    if_set,
    loss_option,
    map_choice,
    note_dropped,
    only_values,
    read_place,
    read_transport,
    run_name,
    samples_or_none,
    seconds_left,
    server_flag,
    step_to_resume,
    table_present,
    tool_parser,
)
from rlrun.config.dialects.rows import Row, ignored_key, mapped_key, refused_key, same_key

_MONITOR = "nothing is sent to it; tracking has the supported trackers"
_TRACKED = "one tracked run covers all roles and attempts; its name is the run's, or tracking.wandb.name"
_HISTOGRAMS = "histograms are sent with the samples"
_LOGS = "every role writes its log into logs/ in the run's folder, with one log level"
_FOUND = "the run connects its own processes"
_FORMAT = "weights are written as sharded safetensors; with LoRA, only the adapters"
_RENDERER = "the chat template comes with the model's tokenizer"
_TEXTS = "text models have no images"
_OF_REPLIES = {
    "thinking_retention": "the chat template determines which reasoning of earlier turns stays in a conversation; if it drops some, "
    "the next turn starts a new sample. Put another template into the model's folder",
    "drop_thinking": "the chat template determines which reasoning of earlier turns stays in a conversation; put another template into the "
    "model's folder",
    "reasoning_parser": "reasoning is part of a reply's text; inference.extra_args --reasoning-parser=<vLLM's name> separates it",
    "tool_parser": "the chat template defines the form of tool calls; inference.extra_args --enable-auto-tool-choice and "
    "--tool-call-parser=<vLLM's name> enable the engine's parser",
}
"""Settings of a renderer that change conversations and have no field here, each with the alternative."""
_WHOLE = (
    "a checkpoint is always resumed completely; checkpoint.resume.from_run starts a new run from another run's weights"
)
_SKIPPED = "only false is supported: a checkpoint is always resumed completely"
_TEACHER = "the reference model runs in the trainer with the policy, without a server"


def of_checkpoint(table: str) -> tuple[Row, ...]:
    """Build the rows of a table `ckpt`."""
    skips = ("skip_progress", "skip_scheduler", "skip_dataloader", "skip_optimizer", "skip_buffer")
    return (
        same_key(table, "checkpoint"),
        mapped_key(f"{table}.interval", "checkpoint.interval", by=if_set),
        mapped_key(f"{table}.keep_last", "checkpoint.keep_last", by=if_set),
        mapped_key(f"{table}.keep", "checkpoint.keep_last", by=if_set),
        mapped_key(f"{table}.keep_interval", "checkpoint.keep_interval", by=if_set),
        mapped_key(f"{table}.save_async", "checkpoint.save_async"),
        mapped_key(
            f"{table}.resume_step", "checkpoint.resume", "checkpoint.resume.policy", "checkpoint.resume.step",
            by=step_to_resume, text="-1: policy Latest; the folder is resumed, as with --resume",
        ),
        mapped_key(f"{table}.weights.interval", "checkpoint.export.interval", by=if_set),
        ignored_key(f"{table}.weights", _FORMAT),
        ignored_key(f"{table}.weights.save_sharded", _FORMAT),
        ignored_key(f"{table}.weights.save_format", _FORMAT),
        ignored_key(f"{table}.weights.save_adapter_separately", _FORMAT),
        ignored_key(f"{table}.weights.save_async", _FORMAT),
        ignored_key(f"{table}.wait_for_weights_timeout", "trainer and orchestrator complete a checkpoint together"),
        ignored_key(f"{table}.skip_gather_master_weights", "weights are written in shards, and exported at the run's end"),
        refused_key(f"{table}.weights_only", f"not supported: {_WHOLE}", "checkpoint.resume.from_run"),
        refused_key(
            f"{table}.output_dir", "not supported: checkpoints are in the run's folder; set output_dir instead", "output_dir"
        ),
        *(ignored_key(f"{table}.{name}", _SKIPPED, only_values((False,), _SKIPPED, _WHOLE)) for name in skips),
    )  # fmt: skip


def of_weight_broadcast(table: str) -> tuple[Row, ...]:
    """Build the rows of a table `weight_broadcast`."""
    return (
        mapped_key(f"{table}.type", "weight_sync.transport", by=read_transport),
        mapped_key(f"{table}.timeout", "weight_sync.timeout_seconds", by=seconds_left),
        *(ignored_key(f"{table}.{name}", _FOUND) for name in ("host", "port", "inference_world_size")),
        *(ignored_key(f"{table}.{name}", _FORMAT) for name in ("adapter_only", "save_sharded", "save_format")),
        ignored_key(
            f"{table}.quantize_in_weight_transfer", "weights are transferred in the model's own number format",
            only_values((False,), "weights are transferred in the model's own number format", "not supported: set model.dtype"),
        ),
    )  # fmt: skip


def of_wandb(table: str, *, run: bool) -> tuple[Row, ...]:
    """Build the rows of a table `wandb`; `run`: whether it belongs to the run itself and not to a role."""
    ours = "tracking.wandb"
    return (
        mapped_key(table, ours, by=table_present),
        mapped_key(f"{table}.name", f"{ours}.name", by=if_set) if run else ignored_key(f"{table}.name", _TRACKED),
        *(mapped_key(f"{table}.{name}", f"{ours}.{name}", by=if_set) for name in ("project", "entity", "group", "tags", "offline")),
        ignored_key(f"{table}.id", _TRACKED),
        ignored_key(f"{table}.shared", _TRACKED),
        mapped_key(f"{table}.log_extras.interval", "tracking.samples.interval"),
        mapped_key(f"{table}.log_extras.samples", "tracking.samples.count", by=samples_or_none),
        ignored_key(f"{table}.log_extras", _HISTOGRAMS),
        ignored_key(f"{table}.log_extras.distributions", _HISTOGRAMS),
        ignored_key(f"{table}.log_extras.sample_ratio", "tracking.samples.count is the number"),
    )  # fmt: skip


def of_role(table: str) -> tuple[Row, ...]:
    """Build the rows of keys that each role's table repeats; `table` ends with a dot, or is empty for the run itself."""
    return (
        same_key(f"{table}max_steps", "max_steps"),
        same_key(f"{table}seq_len", "seq_len"),
        *of_wandb(f"{table}wandb", run=not table),
        *of_wandb(f"{table}monitors.wandb", run=not table),
        ignored_key(f"{table}monitors", _MONITOR),
        ignored_key(f"{table}monitors.*", _MONITOR),
        ignored_key(f"{table}log", _LOGS),
        ignored_key(f"{table}env_vars", "set variables in the shell, or per role in a manifest (env)"),
        ignored_key(f"{table}prime_monitor", _MONITOR),
        ignored_key(f"{table}matmul_precision", "sums are float32; matrix products use compute_dtype"),
        ignored_key(f"{table}heartbeat", "the run renews a Lease and answers health checks automatically"),
        ignored_key(f"{table}metrics_server", "every role provides metrics for Prometheus"),
        ignored_key(f"{table}dist_timeout_seconds", "the run's own deadlines detect hangs (progress.deadline_seconds)"),
        ignored_key(f"{table}rollout_transport", "batches use the trainer's own channel"),
        *of_checkpoint(f"{table}ckpt"),
        *of_weight_broadcast(f"{table}weight_broadcast"),
        ignored_key(
            f"{table}experimental", "an empty table", only_values(({},), "an empty table", "not supported here")
        ),
        refused_key(f"{table}bench", "measure with the option --bench of trainer, sft and rl instead"),
    )


def of_tokenizer(table: str) -> tuple[Row, ...]:
    """Build the rows of the tables for tokenization and chat templates."""
    return (
        ignored_key(f"{table}renderer", _RENDERER),
        ignored_key(f"{table}renderer.name", _RENDERER),
        ignored_key(f"{table}renderer.image_cache_max", _TEXTS),
        ignored_key(f"{table}renderer.add_vision_id", _TEXTS),
        ignored_key(f"{table}renderer.pool_size", "the orchestrator tokenizes conversations"),
        *(ignored_key(f"{table}renderer.{name}", text, note_dropped(text)) for name, text in _OF_REPLIES.items()),
        _template_arguments(f"{table}renderer.*", table),
        refused_key(f"{table}tokenizer.name", "not supported: the tokenizer comes with the model; put it into the model's folder"),
        refused_key(
            f"{table}tokenizer.chat_template", "not supported: the template comes with the model's tokenizer; put it into its folder"
        ),
        mapped_key(f"{table}tokenizer.trust_remote_code", "model.trust_remote_code", by=if_set),
    )  # fmt: skip


def _template_arguments(path: str, table: str) -> Row:
    """Build the row of a renderer's other settings, which are arguments of the chat template."""
    if table != "orchestrator.":
        text = "supervised rows are tokenized without arguments of the chat template; put the template into the model's folder"
        return ignored_key(path, text, note_dropped(text))
    arguments = "sampling.chat_template_arguments"
    text = "an argument of the chat template, also in each other sampling that is set"
    return Row(path, "mapped", (arguments,), text, by_name=lambda name: defer_value(f"{TEMPLATE_ARGUMENT}{name}"))


def of_loss(table: str) -> tuple[Row, ...]:
    """Build the rows of the policy's loss: `masked_is` in v0.3, `dppo` in August 2026."""
    loss = "algorithm.loss"
    masked = {
        "ratio_type": "ratio",
        "token_mask_low": "mask_low",
        "token_mask_high": "mask_high",
        "geo_mask_low": "geo_mask_low",
        "geo_mask_high": "geo_mask_high",
        "sequence_mask_high": "sequence_mask_high",
        "sequence_clip_high": "sequence_clip",
        "teacher_tau": "teacher_tau",
    }
    today = {
        "ipo_mask_low": "mask_low",
        "ipo_mask_high": "mask_high",
        "dppo_mask_low": "mask_low",
        "dppo_mask_high": "mask_high",
    }
    return (
        mapped_key(f"{table}.type", loss, by=defer_value("loss_type"), text="default: the loss of the table's other keys"),
        *(mapped_key(f"{table}.{theirs}", loss, by=loss_option("masked_is", ours)) for theirs, ours in masked.items()),
        *(mapped_key(f"{table}.{theirs}", loss, by=loss_option("dppo", ours)) for theirs, ours in today.items()),
        mapped_key(f"{table}.adv_tau", loss, by=defer_value("adv_tau"), text="option adv_tau of loss masked_is; elsewhere only 1"),
        mapped_key(f"{table}.kl_tau", loss, by=defer_value("kl_tau"),
            text="option kl_tau of the loss of the table's other keys"),
        mapped_key(f"{table}.ipo_threshold", loss, by=loss_option("ipo", "thr")),
        ignored_key(
            f"{table}.sequence_mask_low", "0 masks nothing", only_values((0, 0.0), "0 masks nothing", "not supported by loss masked_is")
        ),
        refused_key(f"{table}.import_path", "not supported with this signature: algorithm.loss.name takes package.module:function", loss),
        ignored_key(f"{table}.kwargs", "they belong to import_path"),
    )  # fmt: skip


RUN_ROWS: tuple[Row, ...] = (
    refused_key(
        "client",
        "only for eval and synthesize: training needs token ids, log-probs and changeable weights, which other servers do not provide",
    ),
    *of_role(""),
    mapped_key("model.name", "model.name", "model.path", by=read_place, text="a path becomes model.path"),
    same_key("output_dir"),
    mapped_key("max_async_level", "algorithm.max_async_level", by=if_set),
    mapped_key("async_level", "algorithm.max_async_level", by=if_set),
    mapped_key("max_off_policy_steps", "algorithm.max_off_policy_steps", by=if_set),
    mapped_key("max_model_len", "inference.max_model_len", by=defer_value("max_model_len")),
    mapped_key("broadcast_backend", "weight_sync.transport", by=read_transport),
    mapped_key(
        "inference_gpu_ids", "inference.gpus_per_replica", by=gpu_ids("inference_gpu_ids"), text="and the option --inference-gpu-ids"
    ),
    mapped_key("trainer_gpu_ids", "trainer.gpus_per_replica", by=gpu_ids("trainer_gpu_ids"), text="and the option --trainer-gpu-ids"),
    ignored_key("teacher_gpu_ids", _TEACHER),
    ignored_key("deployment.type", "the counts next to it determine it"),
    mapped_key("deployment.num_train_gpus", "trainer.gpus_per_replica", by=count_gpus("trainer_gpus")),
    mapped_key("deployment.num_gpus", "trainer.gpus_per_replica", by=count_gpus("trainer_gpus")),
    mapped_key("deployment.num_infer_gpus", "inference.gpus_per_replica", by=count_gpus("inference_gpus")),
    mapped_key("deployment.num_train_nodes", "trainer.replicas", by=count_gpus("trainer_nodes")),
    mapped_key("deployment.num_nodes", "trainer.replicas", by=count_gpus("trainer_nodes")),
    mapped_key("deployment.num_infer_nodes", "inference.replicas", by=count_gpus("inference_nodes")),
    mapped_key("deployment.num_infer_replicas", "inference.replicas", by=count_gpus("inference_groups")),
    mapped_key("deployment.gpus_per_node", "trainer.gpus_per_replica", "inference.gpus_per_replica", by=count_gpus("gpus_per_node")),
    mapped_key("deployment.nodes_per_fsdp_group", "trainer.parallelism.dp_replicate", by=count_gpus("nodes_per_group")),
    ignored_key("deployment.num_teacher_gpus", _TEACHER),
    ignored_key("deployment.num_teacher_nodes", _TEACHER),
    ignored_key("slurm", "the run starts on this machine or in Kubernetes"),
    ignored_key("image_tag", "a manifest sets images per role"),
    ignored_key(
        "clean", "a folder that contains a run is refused, never deleted",
        only_values((True, False), "a folder that contains a run is refused, never deleted", "write true or false"),
    ),
    ignored_key(
        "clean_output_dir", "a folder that contains a run is refused, never deleted",
        only_values((True, False), "a folder that contains a run is refused, never deleted", "write true or false"),
    ),
    refused_key("dump_config", "the option --dry-run prints the resolved configuration of all roles"),
    ignored_key("dry_run", "use the option --dry-run", only_values((False,), "false", "write the option --dry-run")),
    mapped_key("teacher_inference.model.name", "algorithm.reference.model"),
    ignored_key("teacher_inference", _TEACHER),
    ignored_key("teacher_inference.*", _TEACHER),
    ignored_key("teacher_inference.model.*", _TEACHER),
    ignored_key("dashboard", "the local page and the Grafana dashboard show the run"),
    mapped_key("run.name", "name", by=run_name, text="lower-case letters and digits, with '-' between them"),
    ignored_key("run", "the run is identified by its name and its folder"),
    ignored_key("run.*", "the run is identified by its name and its folder"),
    mapped_key("resume", "checkpoint.resume", by=defer_value("resume"), text="like the option --resume"),
    ignored_key("resume.skip_checks", "a folder of another run is never resumed"),
    mapped_key("resume.step", "checkpoint.resume", "checkpoint.resume.policy", "checkpoint.resume.step", by=step_to_resume),
    refused_key("model.vlm", "not supported: models are trained on text, and encoders of images are frozen; remove it"),
    *of_tokenizer(""),
)  # fmt: skip


_ARGS = "inference.extra_args"
_ADAPTERS = "the engine's adapters are derived from trainer.lora"
_ADDRESS = "ports are chosen automatically; the option --inference-port sets them"
_NODES = "not supported: inference.replicas are engines on one node each; start one engine on each machine"
_GRAPHS = "graphs are captured on GPUs, with the same result"


def _kebab_name(name: str) -> str:
    return name.replace("_", "-")


def _of_engine(table: str, *, vllm: bool) -> tuple[Row, ...]:
    """Build the rows of vLLM's options; `table` ends with a dot. Options without a field here are passed to vLLM's server unchanged."""
    flags = (
        "enable_prefix_caching", "enable_expert_parallel", "all2all_backend", "enable_eplb", "calculate_kv_scales",
        "quantization", "kv_cache_dtype", "reasoning_parser", "max_num_batched_tokens", "enable_chunked_prefill", "enable_dbo",
    )  # fmt: skip
    rest = (
        Row(f"{table}*", "mapped", (_ARGS,), "--<name>=<value>", by_name=lambda name: server_flag(_kebab_name(name))),
    )
    return (
        mapped_key(f"{table}gpu_memory_utilization", "inference.gpu_memory_utilization"),
        *(mapped_key(f"{table}{name}", _ARGS, by=server_flag(_kebab_name(name)), text=f"--{_kebab_name(name)}") for name in flags),
        *(ignored_key(f"{table}{name}", _ADAPTERS) for name in ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank")),
        ignored_key(f"{table}api_server_count", "one server serves all copies of an engine"),
        ignored_key(f"{table}enforce_eager", _GRAPHS),
        mapped_key(f"{table}seed", "seed", by=defer_value("inference_seed"), text="if nothing else sets it"),
        ignored_key(f"{table}enable_auto_tool_choice", "tool_call_parser implies it"),
        mapped_key(f"{table}tool_call_parser", _ARGS, by=tool_parser, text="--enable-auto-tool-choice --tool-call-parser"),
        mapped_key(f"{table}max_model_len", "inference.max_model_len", by=defer_value("max_model_len"), text="at least seq_len"),
        mapped_key(f"{table}dtype", "model.dtype", by=map_choice({"auto": "bfloat16"})),
        mapped_key(f"{table}trust_remote_code", "model.trust_remote_code"),
        ignored_key(
            f"{table}enable_return_routed_experts", "engines return experts with trainer.router.replay Rollout",
        ),
        refused_key(f"{table}chat_template", "not supported: the template comes with the model's tokenizer; put it into its folder"),
        refused_key(
            f"{table}rope_scaling", "not supported: trainer and engine read it from config.json in the model's folder",
        ),
        *(rest if vllm else ()),
    )  # fmt: skip


INFERENCE_ROWS: tuple[Row, ...] = (
    *of_role("inference."),
    *_of_engine("inference.", vllm=False),
    *_of_engine("inference.model.", vllm=False),
    mapped_key("inference.model.name", "model.name", "model.path", by=read_place, text="a path becomes model.path"),
    *_of_engine("inference.vllm.", vllm=True),
    mapped_key("inference.vllm.model", "model.name", "model.path", by=read_place, text="a path becomes model.path"),
    mapped_key("inference.vllm.max_num_seqs", "inference.max_num_seqs"),
    mapped_key("inference.vllm.tensor_parallel_size", "inference.tensor_parallel"),
    mapped_key("inference.vllm.data_parallel_size", "inference.data_parallel"),
    mapped_key("inference.tensor_parallel_size", "inference.tensor_parallel"),
    mapped_key("inference.data_parallel_size", "inference.data_parallel"),
    *(refused_key(f"inference.{name}", _NODES, "inference.replicas")
      for name in ("data_parallel_address", "data_parallel_start_rank", "headless")),
    refused_key("inference.api_key", "all roles use the key in the variable RLRUN_API_KEY; set it for each role"),
    mapped_key("inference.parallel.tp", "inference.tensor_parallel"),
    mapped_key("inference.parallel.dp", "inference.data_parallel"),
    *(mapped_key(f"inference.vllm_extra.{name}", ours) for name, ours in (("max_num_seqs", "inference.max_num_seqs"),)),
    Row("inference.vllm_extra.*", "mapped", (_ARGS,), "--<name>=<value>", by_name=lambda name: server_flag(_kebab_name(name))),
    refused_key("inference.kv_cache_offload", "not supported: the engine keeps its cache on its GPUs"),
    ignored_key("inference.router", "the orchestrator itself selects the engine of each request"),
    ignored_key("inference.enable_fp32_lm_head", "log-probs are computed in float32"),
    ignored_key("inference.lora_target_modules", _ADAPTERS),
    ignored_key("inference.data_parallel_rpc_port", "ports are chosen automatically"),
    ignored_key("inference.server", _ADDRESS),
    ignored_key("inference.renderer", "the chat template comes with the model's tokenizer"),
    ignored_key("inference.slurm", "the run starts on this machine or in Kubernetes"),
    ignored_key("inference.deployment.type", "inference.replicas and gpus_per_replica determine where engines run",
            only_values(("single_node", "multi_node"), "the counts next to it determine it",
                "set inference.replicas and inference.gpus_per_replica")),
    mapped_key("inference.deployment.gpus_per_node", "inference.gpus_per_replica", by=count_gpus("gpus_per_node")),
    refused_key("inference.deployment.*", "not supported: inference.replicas are engines on one node each", "inference.replicas"),
    mapped_key("inference.deployment.num_nodes", "inference.replicas", by=count_gpus("engine_nodes"), text="one engine per node"),
    mapped_key("inference.output_dir", "output_dir", by=defer_value("inference_output_dir"), text="if nothing else sets it"),
    ignored_key("inference.use_deep_gemm", "it changes only speed"),
    mapped_key("inference.data_parallel_size_local", "inference.data_parallel", by=if_set),
)  # fmt: skip
