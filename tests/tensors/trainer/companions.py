"""Models, learners, critics and a smooth optimizer for tests of training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rlrun.algorithms import Mixture, Objective
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.batch import Batch
from rlrun.trainer.learning.critic import Critic, to_critic
from rlrun.trainer.learning.learner import Learner
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.modeling.shard import local_part, shard_model
from rlrun.trainer.ranks.group import Group

SMOOTH = OptimizerConfig(lr=1e-2, eps=1e-2)
"""AdamW for comparisons of two summation orders.

Near 0, the derivative of AdamW's update by a gradient is about lr / eps. The default eps makes it 1e6, which turns
rounding noise of a gradient near 0 into a full step. This eps makes it 1: parameters differ as little as their
gradients.
"""
LENGTHS = [9, 4, 13, 6, 3]
ROWS = [(0, 1), (2,), (3, 4)]
GAE = {"gamma": 0.95, "lam": 0.9, "bootstrap": True, "adv_mean": "batch", "adv_std": "batch"}
MakeModel = Callable[..., nn.Module]
MakeBatch = Callable[..., Batch]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([local_part(p.detach()).flatten() for p in model.parameters()])


def plain_logprobs(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """Return the log-probs of each sample's tokens after the first, computed by transformers' own forward pass."""
    found = []
    for sample in batch.samples:
        ids = torch.from_numpy(sample.input_ids).long()
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / sample.temperature
        found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return found


def make_learner(model: nn.Module, group: Group, *, lr: float = 0.01, **options: Any) -> Learner:
    optimizer = options.pop("optimizer", None) or make_optimizer(model, OptimizerConfig(lr=lr), group.device)
    loss = Mixture(options.pop("loss", Objective()), options.pop("environments", {}), options.pop("gae", None))
    return Learner(model, optimizer, group, loss, **options)


def critic_of(model: nn.Module, group: Group, *, lr: float = 0.01, clip: float | None = None) -> Critic:
    module = shard_model(to_critic(model), group)
    return Critic(module, make_optimizer(module, OptimizerConfig(lr=lr), group.device), clip, 1.0)


def with_head(module: nn.Module) -> nn.Module:
    """Set the value head to random values other than 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        module.get_output_embeddings().weight.normal_()
    return module
