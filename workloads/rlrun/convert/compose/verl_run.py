"""Conversion of verl's settings for `main_ppo` and its asynchronous recipes into an RLRun.

The algorithms are GRPO, PPO, DAPO and related ones. The asynchronous recipes have engines on separate GPUs (`rollout.n_gpus_per_node`),
which sample during the training; `put_apart` replaces the fields of the hybrid engine for them.
"""

from __future__ import annotations

import math
import shlex
from pathlib import PurePath
from typing import Any

from rlrun.convert.compose.shared_parts import (
    ALL_TASKS,
    Context,
    at_home,
    compose_warmup,
    dataset_environments,
    file_list,
    put_betas,
    put_lora,
    put_model,
    put_muon,
    put_steps,
    put_trackers,
    verl_muon,
)
from rlrun.convert.compose.verl_objective import put_objective
from rlrun.convert.draft import Draft

_ENGINE_NODES, _ENGINE_GPUS = "rollout.nnodes", "rollout.n_gpus_per_node"
_SYNC, _BATCHES, _STALE = (
    f"async_training.{name}" for name in ("trigger_parameter_sync_step", "require_batches", "staleness_threshold")
)
_MINI, _N, _TP = (
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)


def is_apart(draft: Draft) -> bool:
    """Return whether trainer and engines use separate GPUs."""
    return draft.has_value(_ENGINE_GPUS)


def put_apart(draft: Draft) -> None:
    """Replace the fields of the hybrid engine: GPUs, staleness, and the batch of a stream of minibatches."""
    _compose_engines(draft)
    for key in ("param_offload", "optimizer_offload"):
        draft.dropped[f"actor_rollout_ref.actor.fsdp_config.{key}"] = (
            "memory only; trainer.optimizer.offload keeps moments in host memory, trainer.cpuOffload also master weights"
        )
    if not draft.has_value(_SYNC):
        draft.set_field(
            "algorithm.maxAsyncLevel",
            1,
            _ENGINE_GPUS,
            note="one step off policy: the next batch is sampled during a training step",
        )
        draft.set_field("algorithm.maxOffPolicySteps", 1, _ENGINE_GPUS, note="one step off policy")
        return
    lag = math.ceil(draft.get_number(_STALE) or 0.0)
    draft.set_field("algorithm.maxAsyncLevel", lag, _STALE, note="share of stale samples, as whole versions")
    draft.set_field("algorithm.maxOffPolicySteps", lag, _STALE)
    updates = max(1, (draft.get_integer(_SYNC) or 1) * (draft.get_integer(_BATCHES) or 1))
    mini, n = draft.get_integer(_MINI) or 1, draft.get_integer(_N) or 1
    causes = [_MINI, _SYNC, *([_BATCHES] if draft.has_value(_BATCHES) else [])]
    draft.set_field("orchestrator.batchSize", mini * updates * n, *causes, _N, note="answers between two versions")
    draft.set_field("trainer.updatesPerStep", updates, *causes[1:], note="minibatches between two versions")
    prompts = draft.get_integer("rollout.total_rollout_steps")
    if prompts is not None and not draft.has_value("trainer.total_training_steps"):
        draft.set_field(
            "maxSteps", max(1, prompts // (mini * updates)), "rollout.total_rollout_steps", *causes, note="versions"
        )
        draft.missing[:] = [line for line in draft.missing if not line.startswith("spec.maxSteps")]


def _compose_engines(draft: Draft) -> None:
    for path in ("placement.colocate", "inference.dataParallel"):
        draft.fields.pop(path, None)
    size = draft.get_integer(_TP) or 1
    gpus = (draft.get_integer(_ENGINE_NODES) or 1) * (draft.get_integer(_ENGINE_GPUS) or 1)
    draft.set_field("inference.tensorParallel", size, _TP)
    draft.set_field("inference.gpusPerReplica", size, _TP)
    draft.set_field("inference.replicas", max(1, gpus // size), _ENGINE_NODES, _ENGINE_GPUS, _TP)


_A, _R, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_RM = "reward_model."
_RESPONSE, _PROMPT, _BATCH = "data.max_response_length", "data.max_prompt_length", "data.train_batch_size"
_TEMPLATE = "data.apply_chat_template_kwargs"
_NODES, _GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"


def compose_verl(draft: Draft, context: Context) -> None:
    """Set all fields that more than one key decides."""
    put_model(draft, _M + "path")
    _compose_lengths(draft)
    _template_arguments(draft)
    _compose_batch(draft)
    _compose_steps(draft, context)
    put_muon(draft, verl_muon(_A + "optim."))
    put_objective(draft)
    _compose_gpus(draft)
    if is_apart(draft):
        put_apart(draft)
    _micro_batches(draft)
    put_lora(draft, _M)
    _compose_environments(draft)
    _compose_evaluation(draft)
    put_trackers(draft)


def _compose_lengths(draft: Draft) -> None:
    answer = (
        _R + "response_length"
        if draft.has_value(_R + "response_length") and not draft.has_value(_RESPONSE)
        else _RESPONSE
    )
    prompt, response = draft.get_integer(_PROMPT) or 512, draft.get_integer(answer) or 512
    draft.set_field("seqLen", prompt + response, _PROMPT, answer)
    draft.set_field("sampling.maxTokens", response, answer)
    longest = draft.get_integer(_R + "max_model_len")
    if longest is not None and longest >= prompt + response:
        draft.set_field("inference.maxModelLen", longest, _R + "max_model_len")
    tokens = draft.get_integer(_R + "max_num_batched_tokens")
    if tokens is not None:
        draft.set_field("inference.extraArgs", [f"--max-num-batched-tokens={tokens}"], _R + "max_num_batched_tokens")


def _template_arguments(draft: Draft) -> None:
    """Set the arguments of the chat template, from single keys or a mapping."""
    causes = [key for key in draft.settings if key.startswith(_TEMPLATE) and draft.has_value(key)]
    arguments: dict[str, Any] = {}
    for key in causes:
        value = draft.get(key)
        for name in reversed(key.removeprefix(_TEMPLATE).split(".")[1:]):
            value = {name: value}
        arguments |= value if isinstance(value, dict) else {}
    if arguments:
        draft.set_field("sampling.chatTemplateArguments", arguments, *causes)


def _compose_batch(draft: Draft) -> None:
    prompts, n = draft.get_integer(_BATCH) or 1024, draft.get_integer(_R + "n") or 1
    draft.set_field("orchestrator.batchSize", prompts * n, _BATCH, _R + "n", note="prompts x answers")
    mini = draft.get_integer(_A + "ppo_mini_batch_size") or prompts
    draft.set_field("trainer.updatesPerStep", max(1, math.ceil(prompts / mini)), _BATCH, _A + "ppo_mini_batch_size")
    epochs = draft.get_integer(_A + "ppo_epochs") or 1
    if epochs != 1:
        draft.set_field("trainer.epochsPerStep", epochs, _A + "ppo_epochs", note="each pass divides the samples anew")


def _compose_steps(draft: Draft, context: Context) -> None:
    total = draft.get_integer("trainer.total_training_steps")
    if total is not None and total > 0:
        draft.set_field("maxSteps", total, "trainer.total_training_steps")
    else:
        files = file_list(draft.get("data.train_files"))
        put_steps(draft, context, epochs="trainer.total_epochs", batch=_BATCH, files=files)
    steps = draft.get_integer(_A + "optim.lr_warmup_steps")
    if steps is not None and steps > 0:
        draft.set_field("trainer.scheduler.warmupSteps", steps, _A + "optim.lr_warmup_steps")
    else:
        compose_warmup(draft, _A + "optim.lr_warmup_steps_ratio")
    put_betas(draft, _A + "optim.betas")
    lowest, rate = draft.get_number(_A + "optim.min_lr") or 0.0, draft.get_number(_A + "optim.lr") or 0.0
    if lowest > 0 and rate > 0:
        draft.set_field("trainer.scheduler.minLrRatio", lowest / rate, _A + "optim.min_lr", _A + "optim.lr")


def _compose_gpus(draft: Draft) -> None:
    """Set shared GPUs for trainer and engines, like verl's hybrid engine."""
    nodes, gpus = draft.get_integer(_NODES) or 1, draft.get_integer(_GPUS) or 8
    for key in (_NODES, _GPUS):
        setting = draft.settings.get(key)
        if setting is not None and setting.unset:
            draft.missing.append(f"{key}: {', '.join(setting.unset)} has no known value; add {key}=N")
    if (engine := draft.get(_R + "name")) not in (None, "vllm", "???"):
        draft.notices.append(f"{_R}name={engine}: replaced by vllm, the engine of RLRun")
    draft.set_field(
        "placement.colocate", True, note="verl's hybrid engine: trainer and engines use the GPUs alternately"
    )
    draft.set_field("trainer.replicas", nodes, _NODES)
    draft.set_field("trainer.gpusPerReplica", gpus, _GPUS)
    draft.set_field("inference.gpusPerReplica", gpus, _GPUS)
    wanted = draft.get_integer(_R + "tensor_model_parallel_size") or 1
    tp = wanted if gpus % wanted == 0 else math.gcd(gpus, wanted)
    note = "" if tp == wanted else f"{wanted} does not divide the {gpus} GPUs of a pod"
    draft.set_field("inference.tensorParallel", tp, _R + "tensor_model_parallel_size", note=note)
    draft.set_field("inference.dataParallel", gpus // tp, _GPUS, _R + "tensor_model_parallel_size")
    _compose_parallelism(draft, nodes * gpus)


def _compose_parallelism(draft: Draft, ranks: int) -> None:
    megatron = any(key.startswith(_A + "megatron.") for key in draft.settings)
    degrees = {"cp": _A + "ulysses_sequence_parallel_size"}
    if megatron:
        degrees = {
            "pp": _A + "megatron.pipeline_model_parallel_size",
            "tp": _A + "megatron.tensor_model_parallel_size",
            "cp": _A + "megatron.context_parallel_size",
            "ep": _A + "megatron.expert_model_parallel_size",
        }
    shared = 1
    for name, key in degrees.items():
        degree = draft.get_integer(key) or 1
        if name == "ep":
            _compose_experts(draft, degree, ranks // shared * _read_degree(draft, "cp"), key)
        elif degree > 1 and ranks % (shared * degree) == 0:
            draft.set_field(f"trainer.parallelism.{name}", degree, key)
            shared *= degree
        elif degree > 1:
            draft.missing.append(f"{key}: {degree} does not divide the {ranks} ranks; change it or the number of GPUs")
    size = draft.get_integer(_A + "fsdp_config.fsdp_size") or -1
    left = ranks // shared
    if not megatron and 0 < size < left and left % size == 0:
        draft.set_field("trainer.parallelism.dpShard", size, _A + "fsdp_config.fsdp_size")
        draft.set_field("trainer.parallelism.dpReplicate", left // size, _A + "fsdp_config.fsdp_size", _NODES, _GPUS)


def _compose_experts(draft: Draft, wanted: int, ranks: int, key: str) -> None:
    """Set expert parallelism. `ranks`: data-parallel and context ranks, among which experts are divided."""
    degree = math.gcd(wanted, ranks)
    if degree > 1:
        note = "" if degree == wanted else f"{wanted} does not divide the {ranks} ranks without tensor parallelism"
        draft.set_field("trainer.parallelism.ep", degree, key, note=note)


def _read_degree(draft: Draft, name: str) -> int:
    there = draft.fields.get(f"trainer.parallelism.{name}")
    return there.value if there is not None else 1


def _micro_batches(draft: Draft) -> None:
    longest = draft.fields["seqLen"].value
    cp = _read_degree(draft, "cp")
    dynamic, tokens = _A + "use_dynamic_bsz", _A + "ppo_max_token_len_per_gpu"
    if draft.get_flag(dynamic):
        size = (draft.get_integer(tokens) or longest) * cp
        draft.set_field(
            "trainer.microBatchTokens", max(size, longest), dynamic, tokens, note="of all ranks that share a row"
        )
        return
    for key in (_A + "ppo_micro_batch_size_per_gpu", _A + "ppo_micro_batch_size"):
        if (rows := draft.get_integer(key)) is not None and rows > 0:
            ranks = draft.fields["trainer.replicas"].value * draft.fields["trainer.gpusPerReplica"].value
            rows = rows if key.endswith("per_gpu") else max(1, rows // ranks)
            draft.set_field(
                "trainer.microBatchTokens",
                rows * longest,
                key,
                note=f"{rows} rows of at most {longest} tokens per rank",
            )
            return


def _compose_environments(draft: Draft) -> None:
    train, held_out = file_list(draft.get("data.train_files")), file_list(draft.get("data.val_files"))
    size = draft.get_integer(_R + "n") or 1
    if not train:
        draft.missing.append("spec.environments: the data is missing; add data.train_files=FILE")
        draft.set_field("environments", [{"id": "gsm8k", "groupSize": size}], _R + "n", note="a placeholder")
        return
    made, all_placed = dataset_environments(train, held_out)
    arguments, reward_causes, note = _reward_arguments(draft)
    shuffles = not draft.has_value("data.shuffle") or draft.get_flag("data.shuffle")
    for environment in made:
        environment["groupSize"] = size
        environment["args"] |= arguments
        if not shuffles:
            environment["curriculum"] = {"shuffle": False}
    causes = ["data.train_files", _R + "n", *reward_causes]
    causes += ["data.val_files"] if held_out and all_placed else []
    if held_out and not all_placed:
        draft.notices.append(
            "data.val_files: a file does not match a training file; without args.eval_split, one row in eight of the training data "
            "is held out: put both files into one folder, or write args.eval_split"
        )
    causes += [] if shuffles else ["data.shuffle"]
    draft.set_field("environments", made, *causes, note=f"verl's columns prompt and reward_model.ground_truth{note}")
    if (column := draft.get("data.prompt_key")) != "prompt":
        draft.missing.append(
            f"spec.environments: data.prompt_key={column}: the dataset environment reads the column prompt; rename the column"
        )


def _reward_arguments(draft: Draft) -> tuple[dict[str, Any], list[str], str]:
    """Return the environments' arguments for the reward, the keys that decided them, and a note."""
    keys = ["custom_reward_function.path", "custom_reward_function.name"]
    if (path := draft.get(keys[0])) is not None:
        reward = f"{PurePath(str(path)).stem}:{draft.get(keys[1]) or 'compute_score'}"
        draft.missing.append(
            f"spec.environments: args.reward={reward}: make {path} importable (PYTHONPATH, or the image; docs/environments.md)"
        )
        if draft.get_flag(_RM + "enable"):
            draft.dropped[_RM + "enable"] = f"the reward is only {path}, which can call the model's server itself"
        return {"reward": reward}, [key for key in keys if draft.has_value(key)], ""
    if not draft.get_flag(_RM + "enable"):
        return {"reward": "math"}, [], "; verl's own scores by data_source: math"
    model = at_home(str(draft.get(_RM + "model.path") or "ORG/REWARD-MODEL"))
    draft.missing.append(
        "spec.environments: args.reward_args.base_url: start the reward model's server "
        f"(vllm serve {shlex.quote(model)} --runner pooling), and replace http://reward-model:8000 by its address"
    )
    arguments = {"reward": "reward-model", "reward_args": {"base_url": "http://reward-model:8000", "model": model}}
    return (
        arguments,
        [key for key in (_RM + "enable", _RM + "model.path") if draft.has_value(key)],
        "; scores of the reward model",
    )


def _compose_evaluation(draft: Draft) -> None:
    every = draft.get_integer("trainer.test_freq") or -1
    if every <= 0:
        return
    draft.set_field("evaluation.interval", every, "trainer.test_freq")
    most = "data.val_max_samples" if draft.has_value("data.val_max_samples") else "trainer.val_max_samples"
    tasks = draft.get_integer(most) or -1
    draft.set_field(
        "evaluation.numTasks",
        tasks if tasks > 0 else ALL_TASKS,
        most,
        note="" if tasks > 0 else "all",
    )
    v = _R + "val_kwargs."
    draft.set_field("evaluation.samplesPerTask", draft.get_integer(v + "n") or 1, v + "n")
    greedy = draft.has_value(v + "do_sample") and not draft.get_flag(v + "do_sample")
    temperature = 0.0 if greedy else draft.get_number(v + "temperature") or 0.0
    draft.set_field(
        "evaluation.sampling.temperature",
        temperature,
        v + "temperature",
        *([v + "do_sample"] if draft.has_value(v + "do_sample") else []),
    )
    if temperature > 0:
        _whole_or_less(draft, v)


def _whole_or_less(draft: Draft, v: str) -> None:
    bounds: tuple[tuple[str, str, Any], ...] = (
        ("top_p", "topP", draft.get_number),
        ("top_k", "topK", draft.get_integer),
    )
    for theirs, ours, read in bounds:
        if draft.has_value(v + theirs) and (bound := read(v + theirs)) is not None:
            draft.set_field(f"evaluation.sampling.{ours}", max(0, bound), v + theirs)
