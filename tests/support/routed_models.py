"""Small mixtures whose engine chooses other experts than the trainer, with a reference that computes with given routes."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from rlrun.protocol.files.batch import Batch, Sample
from tests.support.route_recorder import RouteRecorder
from tests.trainer import architectures

KIND = "qwen3_moe"
LENGTHS = (24, 17, 9, 21, 5, 23, 13, 19)
ROW_TOKENS = 64


def save_model(folder: Path, kind: str = KIND) -> Path:
    """Save a small mixture with random weights and a tokenizer."""
    architectures.save_published(architectures.whole_model(kind), folder, windows=False)
    return folder


def make_sample(length: int, seed: int) -> Sample:
    """Build a random sample whose tokens all carry loss, without routes."""
    rng = np.random.default_rng(seed)
    mask = np.arange(length) >= 1
    return Sample(
        input_ids=rng.integers(3, 90, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -4, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
        temperature=1.0,
        environment="random",
        task_id=str(seed),
        group=0,
        rollout=seed,
        dispatch_version=0,
        reward=0.0,
    )


def make_batch(folder: Path, *, step: int = 1, with_routes: bool = True) -> Batch:
    """Build the batch of a step, with the routes of the recorder."""
    samples = [make_sample(length, 100 * step + seed) for seed, length in enumerate(LENGTHS)]
    if with_routes:
        recorder = RouteRecorder(folder)
        samples = [dataclasses.replace(one, routes=recorder.routes(one.input_ids)) for one in samples]
    return Batch(step, 1, tuple(samples))


class GivenRoutes:
    """Qwen3-MoE of transformers in float32, one sequence at a time, whose routers use given experts by an own formula."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._routes: Tensor | None = None
        routers = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        for number, router in enumerate(routers):
            router.forward = partial(self._route, router, number)

    def _route(self, router: Any, number: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
        assert self._routes is not None
        chosen = self._routes[:, number]
        weights = logits.softmax(-1).gather(1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    def logprobs(self, ids: NDArray[np.int32], routes: NDArray[np.uint8]) -> Tensor:
        """Return the log-probabilities of a sequence, `[T]`, 0 for the first token; routes of the last token do not matter."""
        self._routes = torch.from_numpy(routes.astype(np.int64))
        self._routes[-1] = torch.arange(self._routes.shape[2])
        tokens = torch.from_numpy(ids.astype(np.int64))
        logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        return torch.cat([chosen.new_zeros(1), chosen])


def expected_logprobs(folder: Path, batch: Batch) -> list[Tensor]:
    """Return the log-probabilities of each sample with its routes, computed by `GivenRoutes`."""
    reference = GivenRoutes(folder)
    with torch.no_grad():
        return [reference.logprobs(one.input_ids, one.routes) for one in batch.samples]  # type: ignore[arg-type]
