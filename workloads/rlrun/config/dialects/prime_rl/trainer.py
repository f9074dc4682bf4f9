"""Keys of `[trainer]`, which are those of the whole file in supervised fine-tuning."""

from __future__ import annotations

from rlrun.config.dialects.conversions import (
    defer_value,
    if_set,
    map_choice,
    only_values,
    read_flag,
    read_place,
    table_as,
    targets_of_lora,
)
from rlrun.config.dialects.prime_rl.run import of_loss, of_role, of_tokenizer
from rlrun.config.dialects.rows import Row, ignored_key, mapped_key, refused_key, same_key

_IMPLEMENTATION = "any causal language model of transformers is trained by one implementation"
_HEAD = "log-probs and entropy never need the whole logits: the head is always computed in pieces"
_MASTERS = "masters and sums of gradients are float32"
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "fa4", "olmo3_sink")
_AC = "trainer.activation_checkpointing"
_SCHEDULE = "a schedule decays from the end of the warm-up to max_steps"


def _of_optimizer(table: str) -> tuple[Row, ...]:
    ours = "trainer.optimizer"
    return (
        mapped_key(
            f"{table}.type", f"{ours}.name", by=map_choice({"adamw": "adamw",
            "muon": "muon", "sgd": "sgd"}, "there is none here; known: adamw, muon, sgd"),
        ),
        mapped_key(f"{table}.lr", f"{ours}.lr"),
        mapped_key(f"{table}.weight_decay", f"{ours}.weight_decay"),
        mapped_key(f"{table}.max_norm", f"{ours}.max_grad_norm"),
        mapped_key(f"{table}.betas1", f"{ours}.beta1"),
        mapped_key(f"{table}.betas2", f"{ours}.beta2"),
        mapped_key(f"{table}.mu", f"{ours}.momentum"),
        mapped_key(f"{table}.momentum", f"{ours}.momentum"),
        ignored_key(
            f"{table}.nesterov", "momentum is as the optimizer has it",
            only_values((True, False), "momentum is as the optimizer has it", "write true"),
        ),
        ignored_key(
            f"{table}.cpu_offload.enabled", "false is the default", only_values((False,), "false is the default",
            "trainer.optimizer.offload has it"),
        ),
        *_of_scheduler(f"{table}.scheduler"),
    )  # fmt: skip


def _of_scheduler(table: str) -> tuple[Row, ...]:
    ours = "trainer.scheduler"
    return (
        mapped_key(f"{table}.type", f"{ours}.name"),
        mapped_key(f"{table}.warmup_steps", f"{ours}.warmup_steps"),
        mapped_key(
            f"{table}.min_lr", f"{ours}.min_lr_ratio", by=defer_value("min_lr"), text="divided by trainer.optimizer.lr"
        ),
        mapped_key(
            f"{table}.decay_steps",
            f"{ours}.name",
            by=defer_value("decay_steps"),
            text=f"only as max_steps - warmup_steps: {_SCHEDULE}",
        ),
    )


def _of_lora(table: str) -> tuple[Row, ...]:
    ours = "trainer.lora"
    return (
        mapped_key(table, ours, by=table_as({}), text="a table of no keys is enough"),
        mapped_key(f"{table}.rank", f"{ours}.rank"),
        mapped_key(f"{table}.alpha", f"{ours}.alpha"),
        mapped_key(f"{table}.dropout", f"{ours}.dropout"),
        mapped_key(f"{table}.target_modules", f"{ours}.targets", by=targets_of_lora),
        mapped_key(f"{table}.modules_to_save", f"{ours}.modules_to_save"),
        ignored_key(f"{table}.name", "the run's adapter has the run's name"),
    )


def _of_parallelism(table: str) -> tuple[Row, ...]:
    parallel = "trainer.parallelism"
    return (
        mapped_key(f"{table}.dp_replicate", f"{parallel}.dp_replicate"),
        mapped_key(f"{table}.dp_shard", f"{parallel}.dp_shard", by=if_set),
        mapped_key(f"{table}.tp", f"{parallel}.tp"),
        mapped_key(f"{table}.cp", f"{parallel}.cp"),
        mapped_key(f"{table}.ep", f"{parallel}.ep"),
        ignored_key(f"{table}.cp_style", "it changes memory and speed alone"),
        ignored_key(f"{table}.ep_comm_backend", "it changes speed alone"),
    )


def _of_recomputation(table: str) -> tuple[Row, ...]:
    """Rows of what the backward pass computes again, or keeps in host memory."""
    return (
        mapped_key(_name := f"{table}.ac", _AC, by=table_as("full"), text="true or a table: full"),
        mapped_key(f"{_name}.mode", _AC, by=map_choice({"full": "full", "selective": "selective"})),
        ignored_key(f"{_name}.freq", "every layer is recomputed: the result is the same"),
        ignored_key(f"{_name}.targets", "what is recomputed is chosen by activation_checkpointing: the result is the same"),
        mapped_key(f"{table}.ac_offloading", _AC, by=table_as("offload"), text="true or a table: offload"),
        ignored_key(f"{table}.ac_offloading.pin_memory", "host memory is pinned"),
        ignored_key(f"{table}.ac_offloading.max_inflight_activations", "the number in flight is chosen"),
    )  # fmt: skip


def of_model(table: str) -> tuple[Row, ...]:
    """Rows of the trainer's model."""
    return (
        mapped_key(f"{table}.name", "model.name", "model.path", by=read_place, text="a name with a path's form is model.path"),
        same_key(f"{table}.trust_remote_code", "model.trust_remote_code"),
        mapped_key(
            f"{table}.seq_len", "trainer.micro_batch_tokens", "seq_len",
            by=defer_value("packed_length"), text="seq_len where nothing else sets it",
        ),
        mapped_key(
            f"{table}.attn", "trainer.attention",
            by=map_choice(dict.fromkeys(_FLASH, "auto")),
            text="flash_attention_*: auto, which is flash attention on GPUs",
        ),
        ignored_key(f"{table}.impl", _IMPLEMENTATION),
        ignored_key(f"{table}.load_using_meta", "weights are always loaded in shards, onto meta tensors"),
        ignored_key(f"{table}.log_signature", "the shape of the model is in the trainer's log"),
        *_of_recomputation(table),
        mapped_key(f"{table}.compile", "trainer.compile", by=read_flag, text="true or a table"),
        ignored_key(f"{table}.compile.fullgraph", "every decoder layer is compiled: the result is the same"),
        mapped_key(f"{table}.fsdp_cpu_offload", "trainer.cpu_offload"),
        mapped_key(f"{table}.optim_cpu_offload", "trainer.optimizer.offload"),
        ignored_key(f"{table}.reshard_after_forward", "it changes memory and speed alone"),
        ignored_key(f"{table}.reshard", "it changes memory and speed alone"),
        ignored_key(f"{table}.optimization_dtype", _MASTERS),
        ignored_key(f"{table}.reduce_dtype", _MASTERS),
        ignored_key(f"{table}.moe_use_grouped_mm", "it changes speed alone"),
        ignored_key(f"{table}.moe_backend", "it changes speed alone"),
        ignored_key(
            f"{table}.freeze_moe_router", "false trains the router, as here",
            only_values(
                (False,), "false trains the router, as here", "there is none: trainer.lora trains adapters and leaves the router as it is",
            ),
        ),
        ignored_key(f"{table}.fused_lm_head_chunk_size", _HEAD),
        ignored_key(f"{table}.fused_lm_head_token_chunk_size", _HEAD),
        ignored_key(f"{table}.liger_kernel", _IMPLEMENTATION),
        mapped_key(f"{table}.full_offload", "trainer.cpu_offload", by=table_as(True)),
        ignored_key(f"{table}.full_offload.*", "host memory is laid out by the trainer"),
        ignored_key(f"{table}.moe", "it changes speed alone"),
        ignored_key(f"{table}.deepep_num_sms", "it changes speed alone"),
        ignored_key(f"{table}.deepep_token_chunk_size", "it changes speed alone"),
        ignored_key(
            f"{table}.debug", "an empty table changes nothing",
            only_values(({},), "an empty table changes nothing", "there is none: model.tiny makes a small model"),
        ),
        ignored_key(
            f"{table}.fp8", "false is the only way here", only_values((False,), "false is the only way here",
            "there is none: trainer.compute_dtype is float32 or bfloat16"),
        ),
        refused_key(f"{table}.index_cache", "there is none: attention is dense"),
        refused_key(f"{table}.vlm", "there is none: models of text alone are trained"),
        *_of_parallelism(table),
        *_of_lora(f"{table}.lora"),
        *_of_lora(f"{table}.experimental.lora"),
    )  # fmt: skip


ROWS: tuple[Row, ...] = (
    *of_role("trainer."),
    *of_model("trainer.model"),
    *of_tokenizer("trainer."),
    *_of_optimizer("trainer.optim"),
    *_of_scheduler("trainer.scheduler"),
    *of_loss("trainer.loss"),
    mapped_key("trainer.output_dir", "output_dir", by=defer_value("trainer_output_dir"), text="where nothing else sets it"),
    mapped_key("trainer.max_async_level", "algorithm.max_async_level", by=if_set),
    mapped_key("trainer.async_level", "algorithm.max_async_level", by=if_set),
    mapped_key("trainer.data.fake", "data.sources", by=defer_value("data_fake"), text="the step is measured, as with --bench"),
    mapped_key("trainer.data.fake.seq_len", "seq_len", by=defer_value("packed_length"), text="where nothing else sets it"),
    ignored_key("trainer.data.fake.batch_size", "--bench.rows has the micro-batches per rank"),
    ignored_key("trainer.data.fake.micro_batch_size", "--bench.rows has the micro-batches per rank"),
    ignored_key("trainer.data.fake.generate_samples", "--bench.seq-lens has the lengths of samples"),
    ignored_key("trainer.data.small_batch_granularity", "a batch is whole before it is packed"),
    mapped_key("trainer.max_concurrent_runs", "trainer.lora.slots", text="runs that share the trainer by their adapters"),
    ignored_key("trainer.broadcast_at_step_zero", "the engine has the first weights before the first rollout"),
    ignored_key(
        "trainer.memory_profiler_path", "nothing is profiled by default", only_values((), "",
            "there is none; the metrics have the peak memory"),
    ),
    ignored_key("trainer.trace_path", "nothing is profiled by default", only_values((), "",
        "there is none; time/... in the metrics has each phase")),
    ignored_key("trainer.recompute_logprobs", "algorithm.proximal says which policy ratios are measured from"),
    ignored_key(
        "trainer.enable_router_replay", "false is the default here",
        only_values((False,), "false is the default here", "there is none: experts are chosen anew in the trainer"),
    ),
    ignored_key("trainer.enable_token_export", "packed batches are kept by orchestrator.record_rollouts"),
    refused_key("trainer.losses", "there is none: algorithm.loss and environments[].algorithm.loss are one each", "algorithm.loss"),
    mapped_key("trainer.weights.interval", "checkpoint.export.interval", by=if_set),
    ignored_key("trainer.weights.*", "weights are written as safetensors, in shards"),
    ignored_key("trainer.gc", "the garbage collector is the trainer's own affair"),
    ignored_key("trainer.loss_impl", "the loss has one implementation, which computes in pieces"),
)  # fmt: skip
