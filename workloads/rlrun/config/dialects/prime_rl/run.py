"""Keys at the top of a run's file, and those that every role's table has."""

from __future__ import annotations

from rlrun.config.dialects.conversions import (
    TEMPLATE_ARGUMENT,
    count_gpus,
    defer_value,
    gpu_ids,
    if_set,
    loss_option,
    note_dropped,
    only_values,
    read_place,
    read_transport,
    run_name,
    samples_or_none,
    seconds_left,
    step_to_resume,
    table_present,
)
from rlrun.config.dialects.rows import Row, ignored_key, mapped_key, refused_key, same_key

_MONITOR = "nothing is sent to it; tracking names the trackers there are"
_TRACKED = "one tracked run shows all roles in all attempts; its name is that of the run, or tracking.wandb.name"
_HISTOGRAMS = "histograms are sent with the samples"
_LOGS = "every role writes its log into logs/ of the run's folder, at one level"
_FOUND = "the run finds and connects its own processes"
_FORMAT = "weights are written as safetensors, in shards, and adapters alone where LoRA is trained"
_RENDERER = "the chat template is that of the model's tokenizer"
_TEXTS = "models of texts have no images"
_OF_REPLIES = {
    "thinking_retention": "the chat template decides which thoughts of earlier turns stay in a conversation; where it drops some, "
    "the next turn starts a new sample. Put another template into the model's folder",
    "drop_thinking": "the chat template decides which thoughts of earlier turns stay in a conversation; put another template into the "
    "model's folder",
    "reasoning_parser": "thoughts are a part of a reply's text; inference.extra_args --reasoning-parser=<vLLM's name> keeps them apart",
    "tool_parser": "the chat template tells how calls are written; inference.extra_args --enable-auto-tool-choice and "
    "--tool-call-parser=<vLLM's name> give replies to the engine's parser",
}
"""Settings of a renderer that change conversations and have no field here, each with the counterpart."""
_WHOLE = "a checkpoint is resumed as a whole; checkpoint.resume.from_run starts a new run from another one's weights"
_SKIPPED = "false is the only way here: a checkpoint is resumed as a whole"
_TEACHER = "the reference model lies beside the policy in the trainer, without a server"


def of_checkpoint(table: str) -> tuple[Row, ...]:
    """Rows of a table `ckpt`."""
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
        refused_key(f"{table}.weights_only", f"there is none: {_WHOLE}", "checkpoint.resume.from_run"),
        refused_key(
            f"{table}.output_dir", "there is none: checkpoints lie in the run's folder; set output_dir for all of it", "output_dir"
        ),
        *(ignored_key(f"{table}.{name}", _SKIPPED, only_values((False,), _SKIPPED, _WHOLE)) for name in skips),
    )  # fmt: skip


def of_weight_broadcast(table: str) -> tuple[Row, ...]:
    """Rows of a table `weight_broadcast`."""
    return (
        mapped_key(f"{table}.type", "weight_sync.transport", by=read_transport),
        mapped_key(f"{table}.timeout", "weight_sync.timeout_seconds", by=seconds_left),
        *(ignored_key(f"{table}.{name}", _FOUND) for name in ("host", "port", "inference_world_size")),
        *(ignored_key(f"{table}.{name}", _FORMAT) for name in ("adapter_only", "save_sharded", "save_format")),
        ignored_key(
            f"{table}.quantize_in_weight_transfer", "weights travel in the model's own number format",
            only_values((False,), "weights travel in the model's own number format", "there is none: weights travel in model.dtype"),
        ),
    )  # fmt: skip


def of_wandb(table: str, *, run: bool) -> tuple[Row, ...]:
    """Rows of a table `wandb`; `run`: of the run itself, not of a role."""
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
        ignored_key(f"{table}.log_extras.sample_ratio", "tracking.samples.count says how many"),
    )  # fmt: skip


def of_role(table: str) -> tuple[Row, ...]:
    """Rows of what each role's table repeats; `table` ends with a dot, or is empty for the run itself."""
    return (
        same_key(f"{table}max_steps", "max_steps"),
        same_key(f"{table}seq_len", "seq_len"),
        *of_wandb(f"{table}wandb", run=not table),
        *of_wandb(f"{table}monitors.wandb", run=not table),
        ignored_key(f"{table}monitors", _MONITOR),
        ignored_key(f"{table}monitors.*", _MONITOR),
        ignored_key(f"{table}log", _LOGS),
        ignored_key(f"{table}env_vars", "variables are set in the shell, or per role in a manifest (env)"),
        ignored_key(f"{table}prime_monitor", _MONITOR),
        ignored_key(f"{table}matmul_precision", "sums are float32: matrix products are as compute_dtype says"),
        ignored_key(f"{table}heartbeat", "the run renews a Lease and answers health checks by itself"),
        ignored_key(f"{table}metrics_server", "every role has its metrics for Prometheus"),
        ignored_key(
            f"{table}dist_timeout_seconds", "the run's own deadlines find what hangs (progress.deadline_seconds)"
        ),
        ignored_key(f"{table}rollout_transport", "batches go over the trainer's own channel"),
        *of_checkpoint(f"{table}ckpt"),
        *of_weight_broadcast(f"{table}weight_broadcast"),
        ignored_key(
            f"{table}experimental", "an empty table", only_values(({},), "an empty table", "there is none here")
        ),
        refused_key(f"{table}bench", "measure with the option --bench of trainer, sft and rl instead"),
    )


def of_tokenizer(table: str) -> tuple[Row, ...]:
    """Rows of the tables that say how chats become tokens."""
    return (
        ignored_key(f"{table}renderer", _RENDERER),
        ignored_key(f"{table}renderer.name", _RENDERER),
        ignored_key(f"{table}renderer.image_cache_max", _TEXTS),
        ignored_key(f"{table}renderer.add_vision_id", _TEXTS),
        ignored_key(f"{table}renderer.pool_size", "chats are made into tokens beside the orchestrator"),
        *(ignored_key(f"{table}renderer.{name}", text, note_dropped(text)) for name, text in _OF_REPLIES.items()),
        _template_arguments(f"{table}renderer.*", table),
        refused_key(f"{table}tokenizer.name", "there is none: the tokenizer is that of the model; put it into the model's folder"),
        refused_key(
            f"{table}tokenizer.chat_template", "there is none: the template is that of the model's tokenizer; put it into its folder"
        ),
        mapped_key(f"{table}tokenizer.trust_remote_code", "model.trust_remote_code", by=if_set),
    )  # fmt: skip


def _template_arguments(path: str, table: str) -> Row:
    """Row of a renderer's other settings, which are arguments of the chat template."""
    if table != "orchestrator.":
        text = "supervised rows are made into tokens without arguments of the chat template; put the template into the model's folder"
        return ignored_key(path, text, note_dropped(text))
    arguments = "sampling.chat_template_arguments"
    text = "an argument of the chat template, there and in each other sampling that is set"
    return Row(path, "mapped", (arguments,), text, by_name=lambda name: defer_value(f"{TEMPLATE_ARGUMENT}{name}"))


def of_loss(table: str) -> tuple[Row, ...]:
    """Rows of the policy's loss: that of v0.3 (`masked_is`), and today's (`dppo`)."""
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
        mapped_key(f"{table}.type", loss, by=defer_value("loss_type"), text="default: the loss that the table's other keys belong to"),
        *(mapped_key(f"{table}.{theirs}", loss, by=loss_option("masked_is", ours)) for theirs, ours in masked.items()),
        *(mapped_key(f"{table}.{theirs}", loss, by=loss_option("dppo", ours)) for theirs, ours in today.items()),
        mapped_key(f"{table}.adv_tau", loss, by=defer_value("adv_tau"), text="the option adv_tau of loss masked_is; 1 elsewhere"),
        mapped_key(f"{table}.kl_tau", loss, by=defer_value("kl_tau"),
            text="the option kl_tau of the loss that the table's other keys belong to"),
        mapped_key(f"{table}.ipo_threshold", loss, by=loss_option("ipo", "thr")),
        ignored_key(
            f"{table}.sequence_mask_low", "0 masks nothing", only_values((0, 0.0), "0 masks nothing", "there is none in loss masked_is")
        ),
        refused_key(f"{table}.import_path", "there is none of that signature: algorithm.loss.name takes package.module:function", loss),
        ignored_key(f"{table}.kwargs", "they belong to import_path"),
    )  # fmt: skip


ROWS: tuple[Row, ...] = (
    refused_key(
        "client",
        "eval and synthesize take it: training needs token ids, log-probs and weights that can be changed, which other servers do not have",
    ),
    *of_role(""),
    mapped_key("model.name", "model.name", "model.path", by=read_place, text="a name with a path's form is model.path"),
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
    ignored_key("deployment.type", "the counts beside it say it"),
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
    ignored_key("slurm", "the run is started here, or by Kubernetes"),
    ignored_key("image_tag", "images are set per role in a manifest"),
    ignored_key(
        "clean", "a folder that holds a run is refused, never deleted",
        only_values((True, False), "a folder that holds a run is refused, never deleted", "write true or false"),
    ),
    ignored_key(
        "clean_output_dir", "a folder that holds a run is refused, never deleted",
        only_values((True, False), "a folder that holds a run is refused, never deleted", "write true or false"),
    ),
    refused_key("dump_config", "the option --dry-run prints the resolved configuration of all roles"),
    ignored_key("dry_run", "the option --dry-run does it", only_values((False,), "false", "write the option --dry-run")),
    mapped_key("teacher_inference.model.name", "algorithm.reference.model"),
    ignored_key("teacher_inference", _TEACHER),
    ignored_key("teacher_inference.*", _TEACHER),
    ignored_key("teacher_inference.model.*", _TEACHER),
    ignored_key("dashboard", "the local view, and Grafana's dashboard, show the run"),
    mapped_key("run.name", "name", by=run_name, text="letters and digits in lower case, with '-' between them"),
    ignored_key("run", "the run is known by its name and its folder"),
    ignored_key("run.*", "the run is known by its name and its folder"),
    mapped_key("resume", "checkpoint.resume", by=defer_value("resume"), text="as the option --resume"),
    ignored_key("resume.skip_checks", "a folder of another run is never resumed"),
    mapped_key("resume.step", "checkpoint.resume", "checkpoint.resume.policy", "checkpoint.resume.step", by=step_to_resume),
    refused_key("model.vlm", "there is none: models of text alone are trained"),
    *of_tokenizer(""),
)  # fmt: skip
