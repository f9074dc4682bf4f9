"""Rows for PRIME-RL's keys of the trainer and of the data of supervised fine-tuning.

`TRAINER_ROWS` has the keys of `[trainer]`, which are at the top of a file for `sft`. `DATA_ROWS` has the keys of `[data]`, `[val]` and
other keys of a file for `sft`, except the trainer's.

`defer_value(name)` keeps a value for `complete`, because it has a meaning only together with other values. `only_values` has the values
without effect, the reason, and the fix for all other values. `map_choice` refuses unknown choices with its second argument; without it,
the field refuses them.
"""

from __future__ import annotations

from rlrun.config.dialects.conversions import (
    defer_value,
    if_set,
    loss_roles,
    map_choice,
    only_values,
    read_flag,
    read_place,
    table_as,
    targets_of_lora,
)
from rlrun.config.dialects.prime_rl.run_keys import of_loss, of_role, of_tokenizer
from rlrun.config.dialects.rows import Row, ignored_key, mapped_key, refused_key, same_key

_IMPLEMENTATION = "one implementation trains every causal language model of transformers"
_HEAD = "the head is always computed in chunks, so the full logits never exist"
_MASTERS = "master weights and sums of gradients are float32"
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "fa4", "olmo3_sink")
_AC = "trainer.activation_checkpointing"
_SCHEDULE = "a schedule decays from the end of the warm-up to max_steps"


def _of_optimizer(table: str) -> tuple[Row, ...]:
    ours = "trainer.optimizer"
    return (
        mapped_key(
            f"{table}.type", f"{ours}.name", by=map_choice({"adamw": "adamw",
            "muon": "muon", "sgd": "sgd"}, "not supported here; known: adamw, muon, sgd"),
        ),
        mapped_key(f"{table}.lr", f"{ours}.lr"),
        mapped_key(f"{table}.weight_decay", f"{ours}.weight_decay"),
        mapped_key(f"{table}.max_norm", f"{ours}.max_grad_norm"),
        mapped_key(f"{table}.betas1", f"{ours}.beta1"),
        mapped_key(f"{table}.betas2", f"{ours}.beta2"),
        mapped_key(f"{table}.mu", f"{ours}.momentum"),
        mapped_key(f"{table}.momentum", f"{ours}.momentum"),
        ignored_key(
            f"{table}.nesterov", "the optimizer determines the form of its momentum",
            only_values((True, False), "the optimizer determines the form of its momentum", "write true"),
        ),
        ignored_key(
            f"{table}.cpu_offload.enabled", "false is the default", only_values((False,), "false is the default",
            "set trainer.optimizer.offload"),
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
        # The table itself enables adapters, with the defaults for missing keys.
        mapped_key(table, ours, by=table_as({}), text="an empty table is enough"),
        mapped_key(f"{table}.rank", f"{ours}.rank"),
        mapped_key(f"{table}.alpha", f"{ours}.alpha"),
        mapped_key(f"{table}.dropout", f"{ours}.dropout"),
        mapped_key(f"{table}.target_modules", f"{ours}.targets", by=targets_of_lora),
        mapped_key(f"{table}.modules_to_save", f"{ours}.modules_to_save"),
        ignored_key(f"{table}.name", "the adapter has the run's name"),
    )


def _of_parallelism(table: str) -> tuple[Row, ...]:
    parallel = "trainer.parallelism"
    return (
        mapped_key(f"{table}.dp_replicate", f"{parallel}.dp_replicate"),
        mapped_key(f"{table}.dp_shard", f"{parallel}.dp_shard", by=if_set),
        mapped_key(f"{table}.tp", f"{parallel}.tp"),
        mapped_key(f"{table}.cp", f"{parallel}.cp"),
        mapped_key(f"{table}.ep", f"{parallel}.ep"),
        ignored_key(f"{table}.cp_style", "it changes only memory and speed"),
        ignored_key(f"{table}.ep_comm_backend", "it changes only speed"),
    )


def _of_recomputation(table: str) -> tuple[Row, ...]:
    """Build the rows for recomputation and offloading of activations."""
    return (
        mapped_key(_name := f"{table}.ac", _AC, by=table_as("full"), text="true or a table: full"),
        mapped_key(f"{_name}.mode", _AC, by=map_choice({"full": "full", "selective": "selective"})),
        ignored_key(f"{_name}.freq", "every layer is recomputed, with the same result"),
        ignored_key(f"{_name}.targets", "activation_checkpointing selects the recomputed parts, with the same result"),
        mapped_key(f"{table}.ac_offloading", _AC, by=table_as("offload"), text="true or a table: offload"),
        ignored_key(f"{table}.ac_offloading.pin_memory", "host memory is pinned"),
        ignored_key(f"{table}.ac_offloading.max_inflight_activations", "the number in flight is chosen automatically"),
    )  # fmt: skip


def of_model(table: str) -> tuple[Row, ...]:
    """Build the rows of the trainer's model."""
    return (
        mapped_key(f"{table}.name", "model.name", "model.path", by=read_place, text="a path becomes model.path"),
        same_key(f"{table}.trust_remote_code", "model.trust_remote_code"),
        mapped_key(
            f"{table}.seq_len", "trainer.micro_batch_tokens", "seq_len",
            by=defer_value("packed_length"), text="seq_len if nothing else sets it",
        ),
        mapped_key(
            f"{table}.attn", "trainer.attention",
            by=map_choice(dict.fromkeys(_FLASH, "auto")),
            text="flash_attention_*: auto, which selects flash attention on GPUs",
        ),
        ignored_key(f"{table}.impl", _IMPLEMENTATION),
        ignored_key(f"{table}.load_using_meta", "weights are always loaded in shards, into meta tensors"),
        ignored_key(f"{table}.log_signature", "the shape of the model is in the trainer's log"),
        *_of_recomputation(table),
        mapped_key(f"{table}.compile", "trainer.compile", by=read_flag, text="true or a table"),
        ignored_key(f"{table}.compile.fullgraph", "every decoder layer is compiled, with the same result"),
        mapped_key(f"{table}.fsdp_cpu_offload", "trainer.cpu_offload"),
        mapped_key(f"{table}.optim_cpu_offload", "trainer.optimizer.offload"),
        ignored_key(f"{table}.reshard_after_forward", "it changes only memory and speed"),
        ignored_key(f"{table}.reshard", "it changes only memory and speed"),
        ignored_key(f"{table}.optimization_dtype", _MASTERS),
        ignored_key(f"{table}.reduce_dtype", _MASTERS),
        ignored_key(f"{table}.moe_use_grouped_mm", "it changes only speed"),
        ignored_key(f"{table}.moe_backend", "it changes only speed"),
        mapped_key(f"{table}.freeze_moe_router", "trainer.router.freeze"),
        ignored_key(f"{table}.fused_lm_head_chunk_size", _HEAD),
        ignored_key(f"{table}.fused_lm_head_token_chunk_size", _HEAD),
        ignored_key(f"{table}.liger_kernel", _IMPLEMENTATION),
        mapped_key(f"{table}.full_offload", "trainer.cpu_offload", by=table_as(True)),
        ignored_key(f"{table}.full_offload.*", "the trainer manages host memory"),
        ignored_key(f"{table}.moe", "it changes only speed"),
        ignored_key(f"{table}.deepep_num_sms", "it changes only speed"),
        ignored_key(f"{table}.deepep_token_chunk_size", "it changes only speed"),
        ignored_key(
            f"{table}.debug", "an empty table changes nothing",
            only_values(({},), "an empty table changes nothing", "not supported: model.tiny creates a small model"),
        ),
        ignored_key(
            f"{table}.fp8", "only false is supported", only_values((False,), "only false is supported",
            "not supported: trainer.compute_dtype is float32 or bfloat16"),
        ),
        refused_key(f"{table}.index_cache", "not supported: attention is dense"),
        refused_key(f"{table}.vlm", "not supported: models are trained on text, and encoders of images are frozen; remove it"),
        *_of_parallelism(table),
        *_of_lora(f"{table}.lora"),
        *_of_lora(f"{table}.experimental.lora"),
    )  # fmt: skip


TRAINER_ROWS: tuple[Row, ...] = (
    *of_role("trainer."),
    *of_model("trainer.model"),
    *of_tokenizer("trainer."),
    *_of_optimizer("trainer.optim"),
    *_of_scheduler("trainer.scheduler"),
    *of_loss("trainer.loss"),
    mapped_key("trainer.output_dir", "output_dir", by=defer_value("trainer_output_dir"), text="if nothing else sets it"),
    mapped_key("trainer.max_async_level", "algorithm.max_async_level", by=if_set),
    mapped_key("trainer.async_level", "algorithm.max_async_level", by=if_set),
    mapped_key("trainer.data.fake", "data.sources", by=defer_value("data_fake"), text="measures the step, like --bench"),
    mapped_key("trainer.data.fake.seq_len", "seq_len", by=defer_value("packed_length"), text="if nothing else sets it"),
    ignored_key("trainer.data.fake.batch_size", "--bench.rows sets the micro-batches per rank"),
    ignored_key("trainer.data.fake.micro_batch_size", "--bench.rows sets the micro-batches per rank"),
    ignored_key("trainer.data.fake.generate_samples", "--bench.seq-lens sets the lengths of samples"),
    ignored_key("trainer.data.small_batch_granularity", "a batch is complete before it is packed"),
    mapped_key("trainer.max_concurrent_runs", "trainer.lora.slots", text="runs that share the trainer"),
    ignored_key("trainer.broadcast_at_step_zero", "the engine loads the first weights before the first rollout"),
    # No value is allowed: every path is refused with the alternative.
    ignored_key(
        "trainer.memory_profiler_path", "nothing is profiled by default", only_values((), "",
            "not supported; the metrics include the peak memory"),
    ),
    ignored_key("trainer.trace_path", "nothing is profiled by default", only_values((), "",
        "not supported; the metrics time/... include each phase")),
    ignored_key("trainer.recompute_logprobs", "algorithm.proximal selects the policy that ratios are measured from"),
    mapped_key(
        "trainer.enable_router_replay", "trainer.router.replay", by=map_choice({True: "Rollout", False: "Off"}), text="true is Rollout",
    ),
    ignored_key("trainer.enable_token_export", "orchestrator.record_rollouts keeps packed batches"),
    refused_key("trainer.losses", "not supported: algorithm.loss and environments[].algorithm.loss are one loss each", "algorithm.loss"),
    mapped_key("trainer.weights.interval", "checkpoint.export.interval", by=if_set),
    ignored_key("trainer.weights.*", "weights are written as safetensors, in shards"),
    ignored_key("trainer.gc", "the trainer controls the garbage collector itself"),
    ignored_key("trainer.loss_impl", "the loss has one implementation, which computes in chunks"),
)  # fmt: skip


_ONE = "data.sources[0]"
_PACKED = "rows are packed into micro-batches of trainer.micro_batch_tokens, with the same result"
_STOPPING = "the run ends at max_steps; data.epochs ends it with the data"

DATA_ROWS: tuple[Row, ...] = (
    mapped_key("data.type", "data.sources", by=defer_value("data_type"), text="fake: only with --bench"),
    mapped_key("data.fake", "data.sources", by=defer_value("data_fake"), text="only with --bench"),
    mapped_key("data.length", "data.sources", by=defer_value("data_length"), text="only with --bench"),
    ignored_key("data.input_ids", "fake data are random tokens"),
    mapped_key("data.name", f"{_ONE}.name", f"{_ONE}.path", by=read_place, text="a path becomes path"),
    mapped_key("data.path", f"{_ONE}.path"),
    mapped_key("data.split", f"{_ONE}.split"),
    mapped_key("data.splits", f"{_ONE}.split", by=defer_value("splits"), text="one source per split"),
    mapped_key("data.probabilities", f"{_ONE}.weight", by=defer_value("probabilities"), text="weight of the source of each split"),
    mapped_key("data.subsets", f"{_ONE}.split", by=defer_value("subsets"),
        text="one source per subset: the files and folders of that name, in every split"),
    ignored_key("data.stopping_strategy", _STOPPING, only_values(("first_exhausted", "all_exhausted"), _STOPPING, _STOPPING)),
    same_key("data.shuffle"),
    same_key("data.batch_size"),
    mapped_key("data.seed", "seed"),
    mapped_key("data.seq_len", "seq_len"),
    ignored_key("data.micro_batch_size", _PACKED),
    ignored_key("data.pack_function", _PACKED),
    ignored_key("data.num_workers", "one process reads rows ahead of the trainer"),
    refused_key(
        "data.num_examples", "not supported: write the rows into a separate file, and set data.sources[].path to it", f"{_ONE}.path",
    ),
    mapped_key("data.loss_mask", "data.loss_roles", by=loss_roles),
    mapped_key("data.source[].dataset", "data.sources[].name", "data.sources[].path", by=read_place,
        text="a path becomes path"),
    mapped_key("data.source[].name", "data.sources[].name", "data.sources[].path", by=read_place, text="a path becomes path"),
    mapped_key("data.source[].split", "data.sources[].split", by=if_set),
    mapped_key("data.source[].weight", "data.sources[].weight", by=if_set),
    mapped_key("data.source[].probability", "data.sources[].weight", by=if_set),
    mapped_key("data.source[].type", "data.sources", by=defer_value("data_type"), text="fake: only with --bench"),
    refused_key(
        "data.source[].subset",
        "not supported: write it as data.sources[].split, which selects files and folders by their names",
        "data.sources[].split",
    ),
    mapped_key("val.interval", "data.validation.interval"),
    mapped_key("val.data.name", "data.validation.name", "data.validation.path", by=read_place, text="a path becomes path"),
    # No choice is known: every value is refused.
    mapped_key("val.data.splits", "data.validation.split", by=map_choice({}, "write one split")),
    ignored_key("val.data.*", "validation reads its rows in order, in micro-batches"),
    ignored_key("val.eval_on_start", "the loss is always measured before the first step"),
    ignored_key("loss_mask", "data.loss_mask selects the messages to train on", only_values(({},), "an empty table", "write it in [data]")),
    ignored_key("eval", "supervised fine-tuning has no engines; run eval to evaluate its checkpoints"),
)  # fmt: skip
