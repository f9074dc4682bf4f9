"""Keys at the top of a run's file, and those that every role's table has."""

from __future__ import annotations

from rlrun.config.dialects.conversions import (
    TEMPLATE_ARGUMENT,
    count,
    gpu_ids,
    later,
    loss_option,
    noted,
    only,
    optional,
    place,
    run_name,
    samples_or_none,
    seconds_left,
    step_to_resume,
    table_present,
    transport,
)
from rlrun.config.dialects.rows import Row, ignored, refused, same, to

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
        same(table, "checkpoint"),
        to(f"{table}.interval", "checkpoint.interval", by=optional),
        to(f"{table}.keep_last", "checkpoint.keep_last", by=optional),
        to(f"{table}.keep", "checkpoint.keep_last", by=optional),
        to(f"{table}.keep_interval", "checkpoint.keep_interval", by=optional),
        to(f"{table}.save_async", "checkpoint.save_async"),
        to(
            f"{table}.resume_step", "checkpoint.resume", "checkpoint.resume.policy", "checkpoint.resume.step",
            by=step_to_resume, text="-1: policy Latest; the folder is resumed, as with --resume",
        ),
        to(f"{table}.weights.interval", "checkpoint.export.interval", by=optional),
        ignored(f"{table}.weights", _FORMAT),
        ignored(f"{table}.weights.save_sharded", _FORMAT),
        ignored(f"{table}.weights.save_format", _FORMAT),
        ignored(f"{table}.weights.save_adapter_separately", _FORMAT),
        ignored(f"{table}.weights.save_async", _FORMAT),
        ignored(f"{table}.wait_for_weights_timeout", "trainer and orchestrator complete a checkpoint together"),
        ignored(f"{table}.skip_gather_master_weights", "weights are written in shards, and exported at the run's end"),
        refused(f"{table}.weights_only", f"there is none: {_WHOLE}", "checkpoint.resume.from_run"),
        refused(
            f"{table}.output_dir", "there is none: checkpoints lie in the run's folder; set output_dir for all of it", "output_dir"
        ),
        *(ignored(f"{table}.{name}", _SKIPPED, only((False,), _SKIPPED, _WHOLE)) for name in skips),
    )  # fmt: skip


def of_weight_broadcast(table: str) -> tuple[Row, ...]:
    """Rows of a table `weight_broadcast`."""
    return (
        to(f"{table}.type", "weight_sync.transport", by=transport),
        to(f"{table}.timeout", "weight_sync.timeout_seconds", by=seconds_left),
        *(ignored(f"{table}.{name}", _FOUND) for name in ("host", "port", "inference_world_size")),
        *(ignored(f"{table}.{name}", _FORMAT) for name in ("adapter_only", "save_sharded", "save_format")),
        ignored(
            f"{table}.quantize_in_weight_transfer", "weights travel in the model's own number format",
            only((False,), "weights travel in the model's own number format", "there is none: weights travel in model.dtype"),
        ),
    )  # fmt: skip


def of_wandb(table: str, *, run: bool) -> tuple[Row, ...]:
    """Rows of a table `wandb`; `run`: of the run itself, not of a role."""
    ours = "tracking.wandb"
    return (
        to(table, ours, by=table_present),
        to(f"{table}.name", f"{ours}.name", by=optional) if run else ignored(f"{table}.name", _TRACKED),
        *(to(f"{table}.{name}", f"{ours}.{name}", by=optional) for name in ("project", "entity", "group", "tags", "offline")),
        ignored(f"{table}.id", _TRACKED),
        ignored(f"{table}.shared", _TRACKED),
        to(f"{table}.log_extras.interval", "tracking.samples.interval"),
        to(f"{table}.log_extras.samples", "tracking.samples.count", by=samples_or_none),
        ignored(f"{table}.log_extras", _HISTOGRAMS),
        ignored(f"{table}.log_extras.distributions", _HISTOGRAMS),
        ignored(f"{table}.log_extras.sample_ratio", "tracking.samples.count says how many"),
    )  # fmt: skip


def of_role(table: str) -> tuple[Row, ...]:
    """Rows of what each role's table repeats; `table` ends with a dot, or is empty for the run itself."""
    return (
        same(f"{table}max_steps", "max_steps"),
        same(f"{table}seq_len", "seq_len"),
        *of_wandb(f"{table}wandb", run=not table),
        *of_wandb(f"{table}monitors.wandb", run=not table),
        ignored(f"{table}monitors", _MONITOR),
        ignored(f"{table}monitors.*", _MONITOR),
        ignored(f"{table}log", _LOGS),
        ignored(f"{table}env_vars", "variables are set in the shell, or per role in a manifest (env)"),
        ignored(f"{table}prime_monitor", _MONITOR),
        ignored(f"{table}matmul_precision", "sums are float32: matrix products are as compute_dtype says"),
        ignored(f"{table}heartbeat", "the run renews a Lease and answers health checks by itself"),
        ignored(f"{table}metrics_server", "every role has its metrics for Prometheus"),
        ignored(f"{table}dist_timeout_seconds", "the run's own deadlines find what hangs (progress.deadline_seconds)"),
        ignored(f"{table}rollout_transport", "batches go over the trainer's own channel"),
        *of_checkpoint(f"{table}ckpt"),
        *of_weight_broadcast(f"{table}weight_broadcast"),
        ignored(f"{table}experimental", "an empty table", only(({},), "an empty table", "there is none here")),
        refused(f"{table}bench", "measure with the option --bench of trainer, sft and rl instead"),
    )


def of_tokenizer(table: str) -> tuple[Row, ...]:
    """Rows of the tables that say how chats become tokens."""
    return (
        ignored(f"{table}renderer", _RENDERER),
        ignored(f"{table}renderer.name", _RENDERER),
        ignored(f"{table}renderer.image_cache_max", _TEXTS),
        ignored(f"{table}renderer.add_vision_id", _TEXTS),
        ignored(f"{table}renderer.pool_size", "chats are made into tokens beside the orchestrator"),
        *(ignored(f"{table}renderer.{name}", text, noted(text)) for name, text in _OF_REPLIES.items()),
        _template_arguments(f"{table}renderer.*", table),
        refused(f"{table}tokenizer.name", "there is none: the tokenizer is that of the model; put it into the model's folder"),
        refused(
            f"{table}tokenizer.chat_template", "there is none: the template is that of the model's tokenizer; put it into its folder"
        ),
        to(f"{table}tokenizer.trust_remote_code", "model.trust_remote_code", by=optional),
    )  # fmt: skip


def _template_arguments(path: str, table: str) -> Row:
    """Row of a renderer's other settings, which are arguments of the chat template."""
    if table != "orchestrator.":
        text = "supervised rows are made into tokens without arguments of the chat template; put the template into the model's folder"
        return ignored(path, text, noted(text))
    arguments = "sampling.chat_template_arguments"
    text = "an argument of the chat template, there and in each other sampling that is set"
    return Row(path, "mapped", (arguments,), text, by_name=lambda name: later(f"{TEMPLATE_ARGUMENT}{name}"))


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
        to(f"{table}.type", loss, by=later("loss_type"), text="default: the loss that the table's other keys belong to"),
        *(to(f"{table}.{theirs}", loss, by=loss_option("masked_is", ours)) for theirs, ours in masked.items()),
        *(to(f"{table}.{theirs}", loss, by=loss_option("dppo", ours)) for theirs, ours in today.items()),
        to(f"{table}.adv_tau", loss, by=later("adv_tau"), text="the option adv_tau of loss masked_is; 1 elsewhere"),
        to(f"{table}.kl_tau", loss, by=later("kl_tau"), text="the option kl_tau of the loss that the table's other keys belong to"),
        to(f"{table}.ipo_threshold", loss, by=loss_option("ipo", "thr")),
        ignored(
            f"{table}.sequence_mask_low", "0 masks nothing", only((0, 0.0), "0 masks nothing", "there is none in loss masked_is")
        ),
        refused(f"{table}.import_path", "there is none of that signature: algorithm.loss.name takes package.module:function", loss),
        ignored(f"{table}.kwargs", "they belong to import_path"),
    )  # fmt: skip


ROWS: tuple[Row, ...] = (
    refused(
        "client",
        "eval and synthesize take it: training needs token ids, log-probs and weights that can be changed, which other servers do not have",
    ),
    *of_role(""),
    to("model.name", "model.name", "model.path", by=place, text="a name with a path's form is model.path"),
    same("output_dir"),
    to("max_async_level", "algorithm.max_async_level", by=optional),
    to("async_level", "algorithm.max_async_level", by=optional),
    to("max_off_policy_steps", "algorithm.max_off_policy_steps", by=optional),
    to("max_model_len", "inference.max_model_len", by=later("max_model_len")),
    to("broadcast_backend", "weight_sync.transport", by=transport),
    to(
        "inference_gpu_ids", "inference.gpus_per_replica", by=gpu_ids("inference_gpu_ids"), text="and the option --inference-gpu-ids"
    ),
    to("trainer_gpu_ids", "trainer.gpus_per_replica", by=gpu_ids("trainer_gpu_ids"), text="and the option --trainer-gpu-ids"),
    ignored("teacher_gpu_ids", _TEACHER),
    ignored("deployment.type", "the counts beside it say it"),
    to("deployment.num_train_gpus", "trainer.gpus_per_replica", by=count("trainer_gpus")),
    to("deployment.num_gpus", "trainer.gpus_per_replica", by=count("trainer_gpus")),
    to("deployment.num_infer_gpus", "inference.gpus_per_replica", by=count("inference_gpus")),
    to("deployment.num_train_nodes", "trainer.replicas", by=count("trainer_nodes")),
    to("deployment.num_nodes", "trainer.replicas", by=count("trainer_nodes")),
    to("deployment.num_infer_nodes", "inference.replicas", by=count("inference_nodes")),
    to("deployment.num_infer_replicas", "inference.replicas", by=count("inference_groups")),
    to("deployment.gpus_per_node", "trainer.gpus_per_replica", "inference.gpus_per_replica", by=count("gpus_per_node")),
    to("deployment.nodes_per_fsdp_group", "trainer.parallelism.dp_replicate", by=count("nodes_per_group")),
    ignored("deployment.num_teacher_gpus", _TEACHER),
    ignored("deployment.num_teacher_nodes", _TEACHER),
    ignored("slurm", "the run is started here, or by Kubernetes"),
    ignored("image_tag", "images are set per role in a manifest"),
    ignored(
        "clean", "a folder that holds a run is refused, never deleted",
        only((True, False), "a folder that holds a run is refused, never deleted", "write true or false"),
    ),
    ignored(
        "clean_output_dir", "a folder that holds a run is refused, never deleted",
        only((True, False), "a folder that holds a run is refused, never deleted", "write true or false"),
    ),
    refused("dump_config", "the option --dry-run prints the resolved configuration of all roles"),
    ignored("dry_run", "the option --dry-run does it", only((False,), "false", "write the option --dry-run")),
    to("teacher_inference.model.name", "algorithm.reference.model"),
    ignored("teacher_inference", _TEACHER),
    ignored("teacher_inference.*", _TEACHER),
    ignored("teacher_inference.model.*", _TEACHER),
    ignored("dashboard", "the local view, and Grafana's dashboard, show the run"),
    to("run.name", "name", by=run_name, text="letters and digits in lower case, with '-' between them"),
    ignored("run", "the run is known by its name and its folder"),
    ignored("run.*", "the run is known by its name and its folder"),
    to("resume", "checkpoint.resume", by=later("resume"), text="as the option --resume"),
    ignored("resume.skip_checks", "a folder of another run is never resumed"),
    to("resume.step", "checkpoint.resume", "checkpoint.resume.policy", "checkpoint.resume.step", by=step_to_resume),
    refused("model.vlm", "there is none: models of text alone are trained"),
    *of_tokenizer(""),
)  # fmt: skip
