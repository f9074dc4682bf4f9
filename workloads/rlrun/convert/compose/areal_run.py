"""Conversion of AReaL's settings into an RLRun: asynchronous GRPO, PPO and related algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from rlrun.config.layout_rules import Allocation, Part, parse_allocation
from rlrun.convert.compose.areal_objective import put_objective
from rlrun.convert.compose.shared_parts import (
    ALL_TASKS,
    AREAL_MUON,
    Context,
    at_home,
    compose_interval,
    is_on_hub,
    put_areal_warmup,
    put_lora,
    put_model,
    put_muon,
    put_steps,
    put_trainer,
)
from rlrun.convert.draft import Draft

# Keys of AReaL's configuration. `_NEW`: maximum number of sampled tokens; `_N`: samples per prompt.
_BATCH, _NEW, _N = "train_dataset.batch_size", "gconfig.max_new_tokens", "gconfig.n_samples"
_GPUS, _MODE = "cluster.n_gpus_per_node", "allocation_mode"
_ENGINES, _TRAINER = "rollout.backend", "actor.backend"
_ASSUMED_PROMPT_TOKENS = 1024
"""Assumed maximum length of prompts in tokens, if the configuration has no limit."""
_CONCURRENCY_MAX = 65_536
"""Maximum of `orchestrator.maxConcurrency` in a manifest."""


def compose_areal(draft: Draft, context: Context) -> None:
    """Set the fields that the table of keys cannot set: they depend on several keys, on defaults, or on other fields.

    The order of the calls matters, because later functions read and change fields of earlier ones: `_compose_memory` reads `seqLen`,
    `_compose_gpus` may replace `algorithm.maxAsyncLevel` and remove `weightSync.transport`, and `_compose_lora` may remove it, too.
    """
    put_model(draft, "actor.path")
    _compose_lengths(draft)
    prompts, n = draft.get_integer(_BATCH) or 1, draft.get_integer(_N) or 1
    draft.set_field("orchestrator.batchSize", prompts * n, _BATCH, _N, note="prompts x answers")
    draft.set_field(
        "trainer.updatesPerStep", draft.get_integer("actor.ppo_n_minibatches") or 1, "actor.ppo_n_minibatches"
    )
    per_epoch = _compose_steps(draft, context)
    _compose_flow(draft, n)
    put_muon(draft, AREAL_MUON)
    put_objective(draft)
    _compose_gpus(draft)
    _compose_memory(draft)
    _compose_lora(draft)
    _compose_environment(draft, n)
    if any(key.startswith("rollout.agent.") for key in draft.settings):
        draft.notices.append(
            "rollout.agent: in AReaL the script selects an agent or one answer per prompt; this run uses one answer per prompt"
        )
    _compose_intervals(draft, per_epoch)


def _compose_lengths(draft: Draft) -> None:
    """Set `sampling.maxTokens` and `seqLen`, and drop a context length of the engines that is less than `seqLen`.

    A sequence needs at least one token in addition to the answer.
    """
    answer = draft.get_integer(_NEW) or 16384  # AReaL's default
    draft.set_field("sampling.maxTokens", answer, _NEW)
    if draft.has_value("gconfig.max_tokens"):
        draft.set_field("seqLen", max(draft.get_integer("gconfig.max_tokens") or 0, answer + 1), "gconfig.max_tokens")
    else:
        longest = "train_dataset.max_length"
        prompt = draft.get_integer(longest)
        note = "" if prompt else f"prompts of at most {_ASSUMED_PROMPT_TOKENS} tokens: AReaL has no limit"
        draft.set_field(
            "seqLen", (prompt or _ASSUMED_PROMPT_TOKENS) + answer, *([longest] if prompt else []), _NEW, note=note
        )
    engine = draft.fields.get("inference.maxModelLen")
    if engine is not None and engine.value < draft.fields["seqLen"].value:
        draft.fields.pop("inference.maxModelLen")
        draft.dropped["vllm.max_model_len"] = "less than seqLen, which the engine must support"


def _compose_steps(draft: Draft, context: Context) -> int | None:
    """Set `maxSteps` and the warm-up; return the number of steps per epoch, or None if it is unknown or not needed."""
    total = "total_train_steps"
    files = [str(draft.get("train_dataset.path") or "")]
    if draft.has_value(total):
        draft.set_field("maxSteps", draft.get_integer(total), total)
        per_epoch = None
    else:
        per_epoch = put_steps(draft, context, epochs="total_train_epochs", batch=_BATCH, files=files)
    put_areal_warmup(draft)
    return per_epoch


def _compose_flow(draft: Draft, n: int) -> None:
    # AReaL has one limit of the policy's lag for both purposes: how far sampling may be ahead, and from which lag groups are dropped.
    lag = draft.get_integer("rollout.max_head_offpolicyness") or 0
    draft.set_field("algorithm.maxAsyncLevel", lag, "rollout.max_head_offpolicyness")
    draft.set_field(
        "algorithm.maxOffPolicySteps", lag, "rollout.max_head_offpolicyness", note="older groups are dropped"
    )
    key = "rollout.max_concurrent_rollouts"
    if (groups := draft.get_integer(key)) is not None:
        draft.set_field(
            "orchestrator.maxConcurrency", min(_CONCURRENCY_MAX, groups * n), key, _N, note="groups x answers"
        )


class _AllocationError(ValueError):
    """Invalid allocation.

    Args:
        keys: keys whose values are invalid, alone or together.
        reason: message about the value.
    """

    def __init__(self, keys: Sequence[str], reason: str) -> None:
        super().__init__(reason)
        self.keys = tuple(keys)


def _compose_gpus(draft: Draft) -> None:
    try:
        allocation, causes = _read_allocation(draft)
    except _AllocationError as error:
        draft.refused.update(dict.fromkeys(error.keys, str(error)))
        return
    engines, trainer = allocation.engines, allocation.trainer
    if trainer is None:
        draft.missing.append(
            "spec.trainer.gpusPerReplica: the number of GPUs is missing; add allocation_mode=vllm:d4+fsdp:d4"
        )
        return
    node = draft.get_integer(_GPUS) or 8
    # The first cause is the key that a message about the part names.
    pods = put_trainer(draft, trainer, node, *sorted(causes, key=lambda key: key != _TRAINER), _GPUS)
    if engines is not None:
        _compose_engines(draft, engines, causes, pods if allocation.colocated else None)


def _read_allocation(draft: Draft) -> tuple[Allocation, list[str]]:
    """Return the allocation and its keys: `allocation_mode`, or `rollout.backend` and `actor.backend`.

    In an allocation such as `vllm:d4t2+fsdp:d8`, `+` separates parts with their own GPUs and `|` separates parts that share GPUs. Each
    part is `<backend>:<degrees>` (see `parse_allocation`). Backends without degrees do not define an allocation; the message
    about the missing number of GPUs then recommends `allocation_mode`.

    Raises:
        _AllocationError: a part is invalid, or the parts of two keys do not match.
    """
    if draft.has_value(_MODE):
        return _parse_keys(str(draft.get(_MODE)), [_MODE]), [_MODE]
    parts = {key: str(draft.get(key)) for key in (_ENGINES, _TRAINER) if draft.has_value(key)}
    for key, part in parts.items():
        if ":" in part:
            _parse_keys(part, [key])
    if not all(":" in part for part in parts.values()) or not parts:
        return Allocation(None, None, colocated=False), [_MODE]
    apart = _parse_keys("+".join(parts.values()), list(parts))
    if len(parts) < len((_ENGINES, _TRAINER)):  # only one of the two backends is set, so nothing can be shared
        return apart, list(parts)
    strategy = ("rollout.scheduling_strategy.type", "rollout.scheduling_strategy.target")
    if [draft.get(key) for key in strategy] == ["colocation", "actor"]:
        return _parse_keys("|".join(parts.values()), list(parts)), [*parts, *strategy]
    if _detect_gpu_sharing(draft, apart):
        return _parse_keys("|".join(parts.values()), list(parts)), [*parts, "cluster.n_nodes"]
    return apart, list(parts)


def _parse_keys(text: str, keys: Sequence[str]) -> Allocation:
    """Parse an allocation, and raise `_AllocationError` with the keys of its text if it is invalid."""
    try:
        return parse_allocation(text)
    except ValueError as error:
        raise _AllocationError(keys, str(error)) from None


def _detect_gpu_sharing(draft: Draft, apart: Allocation) -> bool:
    """Return whether trainer and engines fit into the cluster only alternately. If they do, add a notice to the draft."""
    nodes = draft.get_integer("cluster.n_nodes")
    if nodes is None or apart.engines is None or apart.trainer is None:
        return False
    gpus = nodes * (draft.get_integer(_GPUS) or 8)
    sizes = (apart.engines.gpus, apart.trainer.gpus)
    shares = sum(sizes) > gpus >= max(sizes)
    if shares:
        draft.notices.append(
            f"cluster.n_nodes={nodes}: {sizes[0]} GPUs of engines and {sizes[1]} of the trainer exceed the {gpus} GPUs of the cluster, "
            "so they share the same GPUs alternately (placement.colocate)"
        )
    return shares


def _compose_engines(draft: Draft, engines: Part, causes: list[str], pods: int | None) -> None:
    """Set the engines' fields.

    Args:
        draft: draft of the manifest.
        engines: parallelism of the engines: `t` (tensor), `p` (pipeline) and `d` (data, the number of engines).
        causes: keys of the allocation.
        pods: number of the trainer's pods if the engines share its GPUs, otherwise None.
    """
    size = engines.t * engines.p
    if engines.backend == "sglang":
        draft.notices.append(f"{causes[0]}: sglang is replaced by vllm, the engine of RLRun")
    if engines.p > 1:
        draft.notices.append(
            f"{causes[0]}: p{engines.p} of the engines: RLRun's engines have no pipeline parallelism; tensorParallel is {size}"
        )
    draft.set_field("inference.tensorParallel", size, *causes)
    if pods is None:
        draft.set_field("inference.gpusPerReplica", size, *causes)
        draft.set_field("inference.replicas", engines.d, *causes)
        return
    gpus = draft.fields["trainer.gpusPerReplica"].value
    draft.set_field("placement.colocate", True, *causes)
    draft.set_field("inference.gpusPerReplica", gpus, *causes)
    draft.set_field("inference.dataParallel", max(1, gpus // size), *causes)
    draft.set_field("algorithm.maxAsyncLevel", 0, *causes, note="engines sleep during a training step")
    # `api.field_rules` refuses a transport between two GPUs with placement.colocate, which uses one GPU for both.
    draft.fields.pop("weightSync.transport", None)


def _compose_memory(draft: Draft) -> None:
    tokens = "actor.mb_spec.max_tokens_per_mb"
    if (size := draft.get_integer(tokens)) is not None:
        longest = draft.fields["seqLen"].value
        note = "" if size >= longest else "one sample must fit"
        draft.set_field("trainer.microBatchTokens", max(size, longest), tokens, note=note)
    for key in ("vllm.gpu_memory_utilization", "sglang.mem_fraction_static"):
        if draft.has_value(key):
            draft.set_field("inference.gpuMemoryUtilization", draft.get_number(key), key)
            break


def _compose_lora(draft: Draft) -> None:
    put_lora(draft, "actor.", use="actor.use_lora")
    if "trainer.lora.rank" in draft.fields and draft.fields.pop("weightSync.transport", None) is not None:
        draft.dropped["actor.weight_update_mode"] = (
            "adapters are sent through the volume (weightSync.transport: Filesystem)"
        )


def _compose_environment(draft: Draft, n: int) -> None:
    key = "train_dataset.path"
    path = at_home(str(draft.get(key) or ""))
    if not path:
        draft.missing.append(f"spec.environments: the data is missing; add {key}=ORG/NAME or a folder")
        path = "openai/gsm8k"
    local = not is_on_hub(path)
    is_gsm8k = PurePosixPath(path).name == "gsm8k"
    args: dict[str, object] = {"path" if local else "name": path}
    environment: dict[str, object] = {"id": "gsm8k" if is_gsm8k else "dataset", "groupSize": n, "args": args}
    if not is_gsm8k:
        environment["args"] = args | {"reward": "math"}
        draft.notices.append(
            f"{key}={path}: AReaL computes rewards in Python of its script; the dataset environment needs the columns prompt and "
            "reward_model.ground_truth, and compares answers as mathematics"
        )
    causes = [key, _N]
    if draft.has_value("train_dataset.shuffle") and not draft.get_flag("train_dataset.shuffle"):
        environment["curriculum"] = {"shuffle": False}
        causes.append("train_dataset.shuffle")
    draft.set_field("environments", [environment], *causes)


def _compose_intervals(draft: Draft, per_epoch: int | None) -> None:
    fields = {"saver": "checkpoint.export.interval", "recover": "checkpoint.interval"}
    if draft.has_value("valid_dataset.path"):
        fields["evaluator"] = "evaluation.interval"
    for part, path in fields.items():
        # `dropped` is only a table of reasons: an entry for a key that is not set has no effect.
        draft.dropped[f"{part}.freq_secs"] = "intervals are in steps"
        if (found := compose_interval(draft, part, per_epoch)) is not None:
            draft.set_field(path, found[0], found[1])
    if "evaluation.interval" in draft.fields:
        draft.set_field("evaluation.numTasks", ALL_TASKS, "valid_dataset.path", note="all held-out tasks")
