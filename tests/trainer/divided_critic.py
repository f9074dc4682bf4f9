"""Critic in a parallel layout, compared with unpacked transformers on one rank: values, returns, advantages and
update.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlrun.algorithms import gae
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.batch import Batch
from rlrun.protocol.packing.micro_batches import plan_micro_batches
from rlrun.trainer.learning.critic import Critic, GaeOptions, critic_step, estimate_values, to_critic, token_rewards
from rlrun.trainer.learning.forward import Signals
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.step_buffer import micro_batch, micro_batches
from rlrun.trainer.modeling.load_weights import LoadOptions
from rlrun.trainer.modeling.lora import fill_parameter
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group

GAE = {"gamma": 0.95, "lam": 0.9}
CLIP = 0.2
SHIFT = 0.5
"""Offset of the starting values that makes some changes exceed the clip range."""
_OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-2, weight_decay=0.0)


def _with_head(model: Any) -> Any:
    """Set the value head to values other than 0."""
    head = model.get_output_embeddings().weight
    fill_parameter(head, torch.randn(head.shape, generator=torch.Generator().manual_seed(3)))
    return model


def _with_cut_answers(batch: Batch) -> Batch:
    """Mark every second sample as truncated by a token limit."""
    samples = [replace(sample, truncated=number % 2 == 0) for number, sample in enumerate(batch.samples)]
    return replace(batch, samples=tuple(samples))


def reference(model: Any, batch: Batch) -> dict[str, Any]:
    """Return values and estimates of every token of the batch, and the loss, gradients and weights of one update."""
    batch = _with_cut_answers(batch)
    critic = _with_head(to_critic(model))
    critic.set_attn_implementation("eager")
    row = micro_batch(batch.samples, torch.device("cpu"))
    found, final = [], []
    for sample in batch.samples:
        ids = torch.from_numpy(sample.input_ids).long()
        after = critic(input_ids=ids[None], use_cache=False).logits[0, :, 0]
        values, last = after[:-1], sample.loss_mask.nonzero()[0][-1:]
        final.append(after[last].detach().sum() if sample.truncated else after.new_zeros(()))
        found.append(torch.where(torch.from_numpy(sample.loss_mask), torch.cat([values.new_zeros(1), values]), 0))
    values = torch.cat(found)
    lengths = row.packed.lengths
    estimated = gae(
        token_rewards(batch.samples, row),
        values.detach(),
        mask=row.mask,
        sequence_lengths=lengths,
        whitened=False,
        final_values=torch.stack(final),
        **GAE,
    )
    mask, returns, old = row.mask, estimated.returns, values.detach() + SHIFT
    near = old + (values - old).clamp(-CLIP, CLIP)
    loss = torch.maximum((values - returns) ** 2, (near - returns) ** 2)[mask].sum() / 2 / mask.sum()
    loss.backward()
    gradient = {
        name: parameter.grad.clone() for name, parameter in critic.named_parameters() if parameter.grad is not None
    }
    optimizer = make_optimizer(critic, _OPTIMIZER, torch.device("cpu"))
    optimizer.step()
    advantages = estimated.advantages[mask].double()
    white = torch.zeros(len(mask))
    white[mask] = ((advantages - advantages.mean()) / (advantages.std() + 1e-6)).float()
    return {
        "values": values.detach(),
        "returns": returns,
        "advantages": white,
        "value_loss": float(loss.detach()),
        "grad_norm": float(torch.cat([g.flatten() for g in gradient.values()]).norm()),
        "value_mean": float(values[mask].mean().detach()),
        "return_mean": float(returns[mask].mean()),
        "gradient": gradient,
        "parameters": {name: parameter.detach().clone() for name, parameter in critic.named_parameters()},
    }


def run(source: Path, batch: Batch, group: Group, want: dict[str, Any], row_tokens: int) -> dict[str, float]:
    """Compute the same on this rank of a layout and return the largest relative errors on rank 0."""
    batch = _with_cut_answers(batch)
    config = ModelConfig(path=str(source))
    module = _with_head(load_checked(config, str(source), group, seq_len=128, options=LoadOptions(prepare=to_critic)))
    critic = Critic(module, make_optimizer(module, _OPTIMIZER, group.device), CLIP)
    dealt = plan_micro_batches(
        [len(sample) for sample in batch.samples], row_tokens=row_tokens, ranks=group.data_size
    ).ranks[group.data_rank]
    samples = [[batch.samples[index] for index in row] for row in dealt]
    rows = micro_batches(samples, group.device)
    numbers = sorted({sample.group for sample in batch.samples})
    levels = {"adv_mean": "batch", "adv_std": "batch"}
    found = estimate_values(
        module, rows, samples, GaeOptions(**GAE, **levels, bootstrap=True), groups=numbers, group=group
    )  # type: ignore[arg-type]
    signals = [
        Signals(values=v + SHIFT, returns=r, advantages=a)
        for v, r, a in zip(found.values, found.returns, found.advantages, strict=True)
    ]
    seen: dict[str, Tensor] = {}
    hook = critic.optimizer.register_step_pre_hook(lambda *_: seen.update(_whole(module, gradient=True)))
    metrics = critic_step(critic, batch, rows, signals, group=group, lr=1e-2)
    hook.remove()
    after = _whole(module, gradient=False)
    if not group.leads:
        return {}
    starts = torch.tensor([0, *(len(sample) for sample in batch.samples)]).cumsum(0)
    errors = {
        "value_loss": abs(metrics["value_loss"] / want["value_loss"] - 1),
        "grad_norm": abs(metrics["critic_grad_norm"] / want["grad_norm"] - 1),
        "value_mean": abs(found.metrics["value_mean"] - want["value_mean"]),
        "return_mean": abs(found.metrics["return_mean"] - want["return_mean"]),
        "gradient": _error(seen, want["gradient"]),
        "parameters": _error(after, want["parameters"]),
    }
    for name in ("values", "returns", "advantages"):
        whole: Tensor = want[name]
        for members, ours in zip(dealt, getattr(found, name), strict=True):
            if members:
                theirs = torch.cat([whole[starts[i] : starts[i + 1]] for i in members])
                errors[name] = max(errors.get(name, 0.0), float((ours - theirs).abs().max()))
    return errors


def _whole(module: nn.Module, *, gradient: bool) -> dict[str, Tensor]:
    tensors = {
        name: parameter.grad if gradient else parameter.detach() for name, parameter in module.named_parameters()
    }
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(float((found[n] - e).abs().max() / e.abs().max().clamp(min=1e-3)) for n, e in expected.items())
