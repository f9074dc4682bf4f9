"""Conversion of supervised fine-tuning into an RLRun: verl's `sft_trainer`, AReaL's `type: sft`."""

from __future__ import annotations

from rlrun.config.layout_rules import parse_allocation
from rlrun.convert.compose.shared_parts import (
    AREAL_MUON,
    Context,
    compose_interval,
    compose_warmup,
    file_list,
    is_on_hub,
    put_areal_warmup,
    put_betas,
    put_lora,
    put_model,
    put_muon,
    put_steps,
    put_trackers,
    put_trainer,
    verl_muon,
)
from rlrun.convert.draft import Draft
from rlrun.convert.tables.sft_keys import VERL_SFT_DEFAULTS

_QUESTIONS = {"openai/gsm8k": ("question", "answer")}
"""Columns of prompt and completion of public data sets without chat columns."""


def compose_verl(draft: Draft, context: Context) -> None:
    """Set all fields that more than one key of verl decides."""
    draft.set_field("task", "SFT", note="supervised fine-tuning")
    put_model(draft, "model.path")
    length = draft.get_integer("data.max_length") or 1024
    draft.set_field("seqLen", length, "data.max_length")
    train = file_list(draft.get("data.train_files"))
    _compose_sources(draft, "data.train_files", [_compose_source(file) for file in train])
    _compose_columns(draft)
    _compose_steps(draft, context, batch="data.train_batch_size", epochs="trainer.total_epochs", files=train)
    total = draft.get_integer("trainer.total_training_steps")
    if total is not None and total > 0:
        draft.set_field("maxSteps", total, "trainer.total_training_steps")
    compose_warmup(draft, "optim.warmup_steps_ratio")
    if (steps := draft.get_integer("optim.lr_warmup_steps") or 0) > 0:
        draft.set_field("trainer.scheduler.warmupSteps", steps, "optim.lr_warmup_steps")
    lowest, rate = draft.get_number("optim.min_lr") or 0.0, draft.get_number("optim.lr") or 0.0
    if lowest > 0 and rate > 0:
        draft.set_field("trainer.scheduler.minLrRatio", lowest / rate, "optim.min_lr", "optim.lr")
    held_out = file_list(draft.get("data.val_files"))
    if held_out:
        steps = draft.get_integer("trainer.test_freq") or 0
        every = (steps, "trainer.test_freq") if steps > 0 else None
        _held_out(draft, _compose_source(held_out[0]), "data.val_files", every)
    put_betas(draft, "optim.betas")
    put_muon(draft, verl_muon("optim."))
    put_lora(draft, "model.")
    put_trackers(draft)
    _note_defaults(draft)
    _verl_gpus(draft, length)


def _note_defaults(draft: Draft) -> None:
    """Add a notice about an unset learning rate: verl's two supervised trainers have defaults that differ by a factor of 100."""
    if not draft.has_value("optim.lr"):
        draft.notices.append(
            f"optim.lr is not set: {draft.get('optim.lr')}, the default of verl's "
            f"{'sft_trainer' if draft.get('optim.lr') == VERL_SFT_DEFAULTS['optim.lr'] else 'fsdp_sft_trainer'}, is used; add optim.lr=1e-5"
        )


def compose_areal(draft: Draft, context: Context) -> None:
    """Set all fields that more than one key of AReaL decides."""
    draft.set_field("task", "SFT", "train_dataset.type")
    put_model(draft, "actor.path")
    longest, tokens = "train_dataset.max_length", "actor.mb_spec.max_tokens_per_mb"
    length = draft.get_integer(longest) or draft.get_integer(tokens) or 2048
    draft.set_field("seqLen", length, longest if draft.has_value(longest) else tokens)
    draft.set_field("trainer.microBatchTokens", max(length, draft.get_integer(tokens) or 0), tokens)
    path = str(draft.get("train_dataset.path") or "")
    named = draft.has_value("train_dataset.split")
    split = (
        {"split": str(draft.get("train_dataset.split"))} if named else {"split": "train"} if path in _QUESTIONS else {}
    )
    _compose_sources(draft, "train_dataset.path", [_compose_source(path) | split] if path else [])
    if path in _QUESTIONS:
        draft.set_field("data.promptField", _QUESTIONS[path][0], "train_dataset.path")
        draft.set_field("data.completionField", _QUESTIONS[path][1], "train_dataset.path")
    else:
        draft.notices.append(
            f"train_dataset.path={path}: rows must be chats in the column messages; see docs/sft.md for other formats"
        )
    if draft.has_value("train_dataset.shuffle"):
        draft.set_field("data.shuffle", draft.get_flag("train_dataset.shuffle"), "train_dataset.shuffle")
    per_epoch = _compose_steps(
        draft, context, batch="train_dataset.batch_size", epochs="total_train_epochs", files=[path]
    )
    if draft.has_value("total_train_steps"):
        draft.set_field("maxSteps", draft.get_integer("total_train_steps"), "total_train_steps")
    put_areal_warmup(draft)
    _areal_intervals(draft, path, per_epoch)
    put_muon(draft, AREAL_MUON)
    put_lora(draft, "actor.", use="actor.use_lora")
    _areal_gpus(draft)


def _compose_source(path: str) -> dict[str, object]:
    return {"name" if is_on_hub(path) else "path": path}


def _compose_sources(draft: Draft, key: str, sources: list[dict[str, object]]) -> None:
    if not sources:
        draft.missing.append(f"spec.data.sources: the data is missing; add {key}=FILE")
        sources = [{"path": "data"}]
    draft.set_field("data.sources", sources, key)


def _compose_columns(draft: Draft) -> None:
    prompt, answer, chat = "data.prompt_key", "data.response_key", "data.messages_key"
    is_pair = draft.get(prompt) is not None and not draft.get_flag("data.multiturn.enable")
    if is_pair and not draft.has_value(chat):
        draft.set_field("data.promptField", draft.get(prompt), prompt)
        draft.set_field("data.completionField", draft.get(answer) or "completion", answer)
    else:
        draft.set_field("data.messagesField", draft.get(chat), chat)
    for key in ("data.prompt_dict_keys", "data.response_dict_keys"):
        if draft.has_value(key):
            draft.missing.append(
                f"spec.data: {key}={draft.get(key)}: nested columns are not supported; write them as top-level columns"
            )


def _compose_steps(draft: Draft, context: Context, *, batch: str, epochs: str, files: list[str]) -> int | None:
    draft.set_field("data.batchSize", draft.get_integer(batch) or 1, batch)
    draft.set_field("data.epochs", draft.get_integer(epochs) or 1, epochs)
    return put_steps(draft, context, epochs=epochs, batch=batch, files=files)


def _held_out(draft: Draft, source: dict[str, object], key: str, every: tuple[int, str] | None) -> None:
    for name, value in source.items():
        draft.set_field(f"data.validation.{name}", value, key)
    if every is not None:
        draft.set_field("data.validation.interval", every[0], every[1])


def _verl_gpus(draft: Draft, length: int) -> None:
    nodes = "trainer.nnodes" if draft.has_value("trainer.nnodes") or not draft.has_value("--nnodes") else "--nnodes"
    gpus = "--nproc_per_node" if draft.has_value("--nproc_per_node") else "trainer.n_gpus_per_node"
    asked = draft.settings.get("--nproc_per_node")
    if asked is not None and asked.unset and not draft.has_value("trainer.n_gpus_per_node"):
        draft.missing.append(f"{asked.key}: {', '.join(asked.unset)} has no known value; add trainer.n_gpus_per_node=N")
    draft.set_field("trainer.replicas", draft.get_integer(nodes) or 1, nodes)
    draft.set_field("trainer.gpusPerReplica", draft.get_integer(gpus) or 8, gpus)
    degree = draft.get_integer("ulysses_sequence_parallel_size") or 1
    if degree > 1:
        draft.set_field("trainer.parallelism.cp", degree, "ulysses_sequence_parallel_size")
    rows, tokens = draft.get_integer("data.micro_batch_size_per_gpu"), draft.get_integer("data.max_token_len_per_gpu")
    if tokens is not None:
        draft.set_field("trainer.microBatchTokens", max(tokens, length), "data.max_token_len_per_gpu")
    elif rows is not None:
        draft.set_field(
            "trainer.microBatchTokens",
            rows * length,
            "data.micro_batch_size_per_gpu",
            note=f"rows of at most {length} tokens",
        )


def _areal_intervals(draft: Draft, path: str, per_epoch: int | None) -> None:
    for part, field in (("saver", "checkpoint.export.interval"), ("recover", "checkpoint.interval")):
        draft.dropped[f"{part}.freq_secs"] = "intervals are in steps"
        if (found := compose_interval(draft, part, per_epoch)) is not None:
            draft.set_field(field, found[0], found[1])
    if draft.has_value("valid_dataset.path"):
        held_out = str(draft.get("valid_dataset.path"))
        every = compose_interval(draft, "evaluator", per_epoch)
        named = draft.has_value("valid_dataset.split")
        split = draft.get("valid_dataset.split") if named else "test" if held_out in _QUESTIONS else None
        source = _compose_source(held_out) | ({"split": split} if split else {})
        _held_out(draft, source, "valid_dataset.path", every)


def _areal_gpus(draft: Draft) -> None:
    key = next((key for key in ("allocation_mode", "actor.backend") if ":" in str(draft.get(key) or "")), None)
    node = draft.get_integer("cluster.n_gpus_per_node") or 8
    if key is None:
        draft.set_field("trainer.replicas", draft.get_integer("cluster.n_nodes") or 1, "cluster.n_nodes")
        draft.set_field("trainer.gpusPerReplica", node, "cluster.n_gpus_per_node")
        return
    try:
        trainer = parse_allocation(str(draft.get(key))).trainer
    except ValueError as error:
        draft.refused[key] = str(error)
        return
    if trainer is not None:
        put_trainer(draft, trainer, node, key, "cluster.n_gpus_per_node")
