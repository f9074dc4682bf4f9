"""Hybrid models over ranks: `python -m tests.trainer.hybrids FILE RANKS PORT SOURCE` trains a step and writes its gradients.

The program writes `{case: {"loss": ..., "gradients": {parameter: values}}}` from rank 0. Each case has another activation mode.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlrun.config.models.language_models import ModelConfig
from rlrun.protocol.files.batch import Sample
from rlrun.protocol.packing.micro_batches import plan_micro_batches
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.step_buffer import micro_batches
from rlrun.trainer.modeling.load_weights import LoadOptions
from rlrun.trainer.modeling.recurrent import packing_of
from rlrun.trainer.modeling.shard import Memory
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group, process_group
from tests.trainer import layouts

LENGTHS = (9, 4, 13, 6, 3, 11)
ROW_TOKENS = 16
MODES = ("none", "selective", "full")


def make_sample(length: int, seed: int) -> Sample:
    rng = np.random.default_rng(seed)
    mask = np.arange(length) >= 1
    return Sample(
        input_ids=rng.integers(3, 90, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.zeros(length, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=mask.astype(np.float32),
        temperature=1.0,
        environment="random",
        task_id=str(seed),
        group=0,
        rollout=seed,
        dispatch_version=0,
        reward=0.0,
    )


def compute_gradients(source: str, mode: Any, group: Group) -> dict[str, Any]:
    """Return the loss of all ranks and the whole gradient of each parameter. All rows run forward before the first backward pass."""
    options = LoadOptions(memory=Memory(activations=mode))
    model = load_checked(ModelConfig(path=source), source, group, seq_len=32, options=options)
    assert packing_of(model) == "mixer"
    samples = [make_sample(length, seed) for seed, length in enumerate(LENGTHS)]
    rows = plan_micro_batches(LENGTHS, row_tokens=ROW_TOKENS, ranks=group.data_size).ranks[group.data_rank]
    inputs = micro_batches([[samples[index] for index in row] for row in rows], group.device)
    loss = 0.0
    for row in inputs:
        value = token_statistics(model, row).logprobs.square().sum()
        value.backward()
        loss += float(value.detach())
    gradients = {}
    for name, parameter in model.named_parameters():
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        gradients[name] = [] if whole is None else whole.flatten().tolist()
    return {"loss": group.sums({"loss": loss})["loss"], "gradients": gradients}


def rank_main(file: Path, source: str) -> None:
    with process_group(0) as group:
        found = {mode: compute_gradients(source, mode, group) for mode in MODES}
        if group.leads:
            file.write_text(json.dumps(found))
        dist.barrier()


if __name__ == "__main__":
    sys.exit(layouts.fork_ranks(int(sys.argv[2]), int(sys.argv[3]), lambda: rank_main(Path(sys.argv[1]), sys.argv[4])))
