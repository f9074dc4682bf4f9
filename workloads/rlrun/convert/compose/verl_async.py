"""verl's asynchronous recipes: engines on separate GPUs (`rollout.n_gpus_per_node`), and training while they sample."""

from __future__ import annotations

import math

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
    return draft.has(_ENGINE_GPUS)


def put_apart(draft: Draft) -> None:
    """Replace the fields of the hybrid engine: GPUs, staleness, and the batch of a stream of minibatches."""
    _compose_engines(draft)
    for key in ("param_offload", "optimizer_offload"):
        draft.dropped[f"actor_rollout_ref.actor.fsdp_config.{key}"] = (
            "memory only; trainer.optimizer.offload keeps moments in host memory, trainer.cpuOffload also master weights"
        )
    if not draft.has(_SYNC):
        draft.put(
            "algorithm.maxAsyncLevel",
            1,
            _ENGINE_GPUS,
            note="one step off policy: the next batch is sampled during a training step",
        )
        draft.put("algorithm.maxOffPolicySteps", 1, _ENGINE_GPUS, note="one step off policy")
        return
    lag = math.ceil(draft.number(_STALE) or 0.0)
    draft.put("algorithm.maxAsyncLevel", lag, _STALE, note="share of stale samples, as whole versions")
    draft.put("algorithm.maxOffPolicySteps", lag, _STALE)
    updates = max(1, (draft.whole(_SYNC) or 1) * (draft.whole(_BATCHES) or 1))
    mini, n = draft.whole(_MINI) or 1, draft.whole(_N) or 1
    causes = [_MINI, _SYNC, *([_BATCHES] if draft.has(_BATCHES) else [])]
    draft.put("orchestrator.batchSize", mini * updates * n, *causes, _N, note="answers between two versions")
    draft.put("trainer.updatesPerStep", updates, *causes[1:], note="minibatches between two versions")
    prompts = draft.whole("rollout.total_rollout_steps")
    if prompts is not None and not draft.has("trainer.total_training_steps"):
        draft.put(
            "maxSteps", max(1, prompts // (mini * updates)), "rollout.total_rollout_steps", *causes, note="versions"
        )
        draft.missing[:] = [line for line in draft.missing if not line.startswith("spec.maxSteps")]


def _compose_engines(draft: Draft) -> None:
    for path in ("placement.colocate", "inference.dataParallel"):
        draft.fields.pop(path, None)
    size = draft.whole(_TP) or 1
    gpus = (draft.whole(_ENGINE_NODES) or 1) * (draft.whole(_ENGINE_GPUS) or 1)
    draft.put("inference.tensorParallel", size, _TP)
    draft.put("inference.gpusPerReplica", size, _TP)
    draft.put("inference.replicas", max(1, gpus // size), _ENGINE_NODES, _ENGINE_GPUS, _TP)
