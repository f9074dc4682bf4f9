"""Tiny warmed-up policy that learns `reverse-text` with a preset, using the product's advantages and losses."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlrun.algorithms import LossBatch
from rlrun.config.models.language_models import TinyModelConfig
from rlrun.config.models.learning import AdvantageConfig, AlgorithmConfig
from rlrun.environments.bundled.small_tasks import ReverseText, ReverseTextArgs
from rlrun.environments.protocol import Episode, Task
from rlrun.orchestrator.batches.assemble import assemble_batch
from rlrun.orchestrator.groups.filters import Rules, reason_to_drop
from rlrun.orchestrator.types import FinishedGroup, Recorded, Rollout
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.run_objective import step_objective
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling import packed_attention
from rlrun.trainer.modeling.tiny_model import make_tiny_model, make_tokenizer, render_template

TASK = {"length": 3, "letters": "ab"}
GROUPS, GROUP_SIZE, REPLY = 8, 8, 4
UPDATES = 2
"""Optimizer updates on the same rollouts: ratios differ from 1 from the second update on."""
STEPS, FLIPPED_STEPS = 20, 5
LR, WARMUP_STEPS = 2e-3, 6
START, REACHED, LOST = 0.5, 0.6, 0.3
"""Mean reward limits: the policy starts below the first and must exceed the second, averaged over `MEAN_OF` steps;
with a flipped sign it must fall below the third.
"""
MEAN_OF = 5
MAX_TOKENS = 2 * REPLY
"""Length from which an overlong penalty applies; correct answers are much shorter."""
EOS = 2


def make_policy(folder: Path, accuracy: float) -> nn.Module:
    tiny = TinyModelConfig(
        hidden_size=64,
        layers=2,
        max_length=32,
        warmup_environment="reverse-text",
        warmup_args=dict(TASK),
        warmup_steps=300,
        warmup_accuracy=accuracy,
    )
    make_tiny_model(folder, tiny)
    packed_attention.register_attention()
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=packed_attention.NAME)


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample replies `[N, REPLY]` to prompts of equal length `[N, P]` at temperature 1 and return them with their
    log-probs; replies end at `<eos>`.
    """
    ids, logprobs = prompts, []
    for _ in range(REPLY):
        row = packed_attention.row_layout([ids.shape[1]] * len(ids), ids.device)
        positions = torch.arange(ids.shape[1]).repeat(len(ids))[None]
        last = torch.arange(1, len(ids) + 1) * ids.shape[1] - 1
        output = model(
            input_ids=ids.reshape(1, -1), position_ids=positions, packed=row, logits_to_keep=last, use_cache=False
        )
        distribution = output.logits[0].log_softmax(-1)
        chosen = distribution.exp().multinomial(1, generator=generator)
        logprobs.append(distribution.gather(1, chosen))
        ids = torch.cat([ids, chosen], 1)
    return ids[:, prompts.shape[1] :], torch.cat(logprobs, 1)


class Play:
    """Groups of rollouts of one policy."""

    def __init__(self, seed: int) -> None:
        self.environment = ReverseText(ReverseTextArgs(**TASK))
        self.tasks = self.environment.tasks("train")
        self.tokenizer = make_tokenizer()
        self.generator = torch.Generator().manual_seed(seed)

    def groups(self, model: nn.Module, step: int) -> list[FinishedGroup]:
        chosen = [self.tasks[step * GROUPS + k] for k in range(GROUPS)]
        texts = [render_template(task.prompt) + "<assistant>" for task in chosen for _ in range(GROUP_SIZE)]
        prompts = torch.tensor([self.tokenizer(text, add_special_tokens=False).input_ids for text in texts])
        replies, logprobs = sample(model, prompts, self.generator)
        counts = [int((reply == EOS).int().argmax()) + 1 if EOS in reply else len(reply) for reply in replies]
        rewards = asyncio.run(self.scores(chosen, [r[:n].tolist() for r, n in zip(replies, counts, strict=True)]))
        rollouts = [
            Rollout((recorded(prompt, reply, probs, count, step - 1),), reward)
            for prompt, reply, probs, count, reward in zip(prompts, replies, logprobs, counts, rewards, strict=True)
        ]
        return [
            FinishedGroup(
                step * GROUPS + k,
                "reverse-text",
                task.id,
                step - 1,
                1.0,
                tuple(rollouts[k * GROUP_SIZE :][:GROUP_SIZE]),
            )
            for k, task in enumerate(chosen)
        ]

    async def scores(self, tasks: list[Task], replies: list[list[int]]) -> list[float]:
        found = []
        for k, reply in enumerate(replies):
            task = tasks[k // GROUP_SIZE]
            text = self.tokenizer.decode([token for token in reply if token != EOS])
            episode = Episode(messages=[*task.prompt, {"role": "assistant", "content": text}], replies=1)
            found.append((await self.environment.score(task, episode)).reward)
        return found


def recorded(prompt: Tensor, reply: Tensor, logprobs: Tensor, count: int, version: int) -> Recorded:
    mask = np.arange(len(prompt) + count) >= len(prompt)
    return Recorded(
        torch.cat([prompt, reply[:count]]).numpy().astype(np.int32),
        mask,
        np.concatenate([np.zeros(len(prompt), np.float32), logprobs[:count].numpy()]),
        np.where(mask, version, -1).astype(np.int32),
    )


def rewards_of(groups: list[FinishedGroup]) -> float:
    return float(np.mean([rollout.reward for group in groups for rollout in group.rollouts]))


def train(
    preset: str, student: nn.Module, teacher: nn.Module, *, sign: float, steps: int, whole: bool = False, seed: int = 0
) -> list[float]:
    """Train a copy of the student and return the mean reward of each step's rollouts.

    Args:
        preset: value of `spec.algorithm.preset`.
        student: starting policy, which is copied.
        teacher: policy of a distillation.
        sign: factor of the advantage; for a distillation, factor of the pull to the teacher.
        steps: maximum number of updates.
        whole: whether training continues after the reward is reached.
        seed: seed of the sampling.
    """
    config = AlgorithmConfig.model_construct(preset=preset)  # skips the validation of the preset's requirements
    if config.effective_advantage.name == "gae":  # test_learning_critic.py covers the advantages of a critic
        config = config.model_copy(update={"advantage": AdvantageConfig(name="grpo")})
    rules = {"reverse-text": Rules(config.effective_advantage, config.effective_filters, MAX_TOKENS, 104)}
    loss = step_objective(config, seq_len=16)
    model, play = copy.deepcopy(student), Play(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    rewards = []
    for step in range(1, steps + 2):
        groups = play.groups(model, step)
        rewards.append(rewards_of(groups))
        if not whole and ((rewards[-1] < LOST) if sign < 0 else (reached(rewards) > REACHED)):
            break
        kept = [group for group in groups if reason_to_drop(group, rules["reverse-text"]) is None]
        if not kept:
            continue
        batch = assemble_batch(kept, step=step, attempt=1, rules=rules)
        lengths = [len(s) for s in batch.samples]
        row = micro_batch(batch.samples, torch.device("cpu"))
        with torch.no_grad():
            reference = token_statistics(teacher, row).logprobs if preset == "distill" else None
            start = token_statistics(model, row).logprobs
        if reference is not None and sign < 0:
            reference = 2 * start - reference
        optimizer.param_groups[0]["lr"] = LR * min(1.0, step / WARMUP_STEPS)
        for _ in range(UPDATES):
            output = loss(
                token_statistics(model, row).logprobs,
                LossBatch(
                    inference_logprobs=row.inference_logprobs,
                    advantages=sign * row.advantages,
                    mask=row.mask,
                    sequence_lengths=lengths,
                    denominator=loss.denominator(row.mask, lengths),
                    reference_logprobs=reference,
                    proximal_logprobs=start if loss.proximal == "recompute" else None,
                ),
            )
            output.loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return rewards


def reached(rewards: list[float]) -> float:
    """Return the recent mean reward of the policy, or 0 before enough steps."""
    return float(np.mean(rewards[-MEAN_OF:])) if len(rewards) >= MEAN_OF else 0.0
