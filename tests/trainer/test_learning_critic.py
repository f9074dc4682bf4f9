"""PPO with a critic on a small task, with normal and with negated rewards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from rlrun.algorithms import Mixture, Objective
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.trainer.learning.critic import Critic, to_critic
from rlrun.trainer.learning.learner import Learner
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import Update, mini_batches
from rlrun.trainer.modeling import packed_attention
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group

pytestmark = pytest.mark.full

WORDS = 8
REPLY = 4
SAMPLES = 48
STEPS = 19


@pytest.fixture(scope="module")
def solo() -> Iterator[Group]:
    mine = not dist.is_initialized()  # other tests of this process may own a session-wide group
    if mine:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Group(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,)))
    if mine:
        dist.destroy_process_group()


def make_model() -> nn.Module:
    packed_attention.register_attention()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=packed_attention.NAME).train()


def rewards_of(tokens: Tensor) -> Tensor:
    """Return the share of reply tokens that repeat the prompt's token, `[N]`."""
    return (tokens[:, 1:] == tokens[:, :1]).float().mean(1)


def sample(model: nn.Module, step: int) -> tuple[Batch, float]:
    """Sample replies to one-token prompts with their log-probs and return their mean reward."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (SAMPLES, 1), generator=generator)
    logprobs = torch.zeros(SAMPLES, 1)
    for _ in range(REPLY):
        length = tokens.shape[1]
        with torch.no_grad():
            logits = model(
                input_ids=tokens.reshape(1, -1),
                position_ids=torch.arange(length).repeat(SAMPLES)[None],
                packed=packed_attention.row_layout([length] * SAMPLES, tokens.device),
                use_cache=False,
            ).logits.view(SAMPLES, length, WORDS)[:, -1]
        distribution = logits.float().log_softmax(-1)
        drawn = distribution.exp().multinomial(1, generator=generator)
        tokens = torch.cat([tokens, drawn], 1)
        logprobs = torch.cat([logprobs, distribution.gather(1, drawn)], 1)
    rewards = rewards_of(tokens)
    mask = np.arange(REPLY + 1) >= 1
    samples = tuple(
        Sample(
            input_ids=tokens[i].numpy().astype(np.int32),
            loss_mask=mask,
            logprobs=logprobs[i].numpy(),
            versions=np.where(mask, step - 1, -1).astype(np.int32),
            advantages=np.where(mask, float(rewards[i]), 0).astype(np.float32),
            temperature=1.0,
            environment="repeat",
            task_id=str(i),
            group=i,
            rollout=0,
            dispatch_version=step - 1,
            reward=float(rewards[i]),
        )
        for i in range(SAMPLES)
    )
    return Batch(step, 1, samples), float(rewards.mean())


def train(solo: Group, *, sign: float = 1.0) -> tuple[list[float], dict[str, float]]:
    """Return the mean reward of each step and the metrics of the last step."""
    model, critic = shard_model(make_model(), solo), shard_model(to_critic(make_model()), solo)
    learner = Learner(
        model,
        make_optimizer(model, OptimizerConfig(), solo.device),
        solo,
        Mixture(
            Objective("ppo", proximal="recompute"),
            gae={"gamma": 1.0, "lam": 0.95, "bootstrap": True, "adv_mean": "batch", "adv_std": "batch"},
        ),
        max_grad_norm=1.0,
        critic=Critic(critic, make_optimizer(critic, OptimizerConfig(), solo.device), 0.5, 1.0),
    )
    means = []
    metrics: dict[str, float] = {}
    for step in range(1, STEPS + 1):
        batch, mean = sample(model, step)
        means.append(mean)
        for one in batch.samples:
            one.advantages[:] *= sign
        parts = mini_batches(batch, 2, seed=0)
        updates = [Update(part, [tuple(range(len(part.samples)))]) for part in parts]
        metrics = learner.step(updates, lr=0.015, critic_lr=0.015)
    return means, metrics


def test_ppo_with_critic_learns_and_negated_reward_unlearns(solo: Group) -> None:
    means, metrics = train(solo)
    flipped, _ = train(solo, sign=-1.0)
    assert 0.05 < means[0] == flipped[0] < 0.25  # one in eight by chance
    assert np.mean(means[-3:]) > 0.5, means
    assert np.mean(flipped[-3:]) < 0.08, flipped
    assert metrics["explained_variance"] > 0.1
