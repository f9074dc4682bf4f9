"""Log-probabilities and entropies of packed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlrun.protocol.files.batch import Sample
from rlrun.trainer.learning import lm_head
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.lm_head import head_statistics
from rlrun.trainer.learning.step_buffer import micro_batch

CPU = torch.device("cpu")


def test_token_statistics_equal_single_samples_with_temperature(
    make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample]
) -> None:
    model, reference = make_model(), make_model(attn="eager")
    samples = [make_sample(9, temperature=0.7), make_sample(4, prompt=1), make_sample(6, prompt=5, temperature=1.3)]
    found = token_statistics(model, micro_batch(samples, CPU))
    expected, entropies = [], []
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long()
        logits = reference(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / sample.temperature
        distribution = logits.log_softmax(-1)
        mask = torch.from_numpy(sample.loss_mask)[1:]
        chosen = distribution.gather(1, ids[1:, None])[:, 0]
        expected.append(torch.cat([torch.zeros(1), torch.where(mask, chosen, 0)]))
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        entropies.append(torch.cat([torch.zeros(1), torch.where(mask, entropy, 0)]))
    torch.testing.assert_close(found.logprobs, torch.cat(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.entropy, torch.cat(entropies), atol=1e-5, rtol=1e-5)
    assert found.logprobs.requires_grad
    assert not found.entropy.requires_grad


def test_only_predicted_positions_reach_the_head(
    make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = make_model(), []

    def spy(hidden: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(hidden.shape[0])
        return head_statistics(hidden, *arguments, **options)

    monkeypatch.setattr(lm_head, "head_statistics", spy)
    token_statistics(model, micro_batch([make_sample(9, prompt=7), make_sample(12, prompt=2)], CPU))
    assert seen == [2 + 10]


def test_empty_row_gives_zero_gradient_for_every_parameter(make_model: Callable[..., nn.Module]) -> None:
    model = make_model()
    found = token_statistics(model, micro_batch([], CPU))
    assert not found.logprobs.any()
    found.logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
