"""Fused LM head, compared with full logits: values, gradients and the heads of each model kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from rlrun.protocol.files.batch import Sample
from rlrun.trainer.learning import lm_head
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.lm_head import KEPT_BYTES, LogitOptions, find_head, head_statistics
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling import packed_attention
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group

CPU = torch.device("cpu")


def written_out(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, bias: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute the definition, one token at a time."""
    logprobs, entropies = [], []
    for h, target, temperature in zip(hidden, targets, temperatures, strict=True):
        logits = weight @ h if bias is None else weight @ h + bias
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        p = torch.softmax(logits / temperature, 0)
        logprobs.append(p[target].log())
        entropies.append(-(p * p.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 17),
    chunk=st.integers(1, 10),
    kept=st.sampled_from([0, 150, 10**6]),
    with_bias=st.booleans(),
    softcap=st.sampled_from([None, 1.5]),
    weights=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (0.7, -0.4)]),
    seed=st.integers(0, 99),
)
def test_fused_head_equals_written_out_definition(
    tokens: int,
    vocabulary: int,
    chunk: int,
    kept: int,
    with_bias: bool,
    softcap: float | None,
    weights: tuple[float, float],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden, weight, bias = leaf(tokens, 5), leaf(vocabulary, 5), leaf(vocabulary) if with_bias else None
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    temperatures = 0.3 + torch.rand(tokens, generator=generator, dtype=torch.float64)
    coefficients = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    leaves = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    expected = written_out(hidden, weight, targets, temperatures, bias, softcap)
    single = [None if tensor is None else tensor.detach().float().requires_grad_() for tensor in (hidden, weight, bias)]
    assert single[0] is not None
    assert single[1] is not None
    with mock.patch.dict(KEPT_BYTES, cpu=kept):
        found = head_statistics(
            single[0],
            single[1],
            targets,
            temperatures.float(),
            options=LogitOptions(single[2], softcap),
            chunk_tokens=chunk,
            entropy="gradient" if weights[1] else "value",
        )
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference.float(), atol=1e-5, rtol=1e-5)

    def total(values: tuple[Tensor, Tensor]) -> Tensor:
        parts = [w * (c * v).sum() for w, c, v in zip(weights, coefficients.to(values[0]), values, strict=True) if w]
        return torch.stack(parts).sum()

    gradients = torch.autograd.grad(total(expected), leaves)
    for again in (True, False):  # the kept residuals are gone the second time
        own = torch.autograd.grad(total(found), [tensor for tensor in single if tensor is not None], retain_graph=again)
        for gradient, reference in zip(own, gradients, strict=True):
            torch.testing.assert_close(gradient, reference.float(), atol=1e-5, rtol=1e-5)


def test_bfloat16_head_is_as_accurate_as_its_inputs() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 64) / 8, torch.randn(500, 64)
    targets, temperatures = torch.randint(500, (40,)), torch.full((40,), 0.9)
    leaves = [tensor.bfloat16().requires_grad_() for tensor in (hidden, weight)]
    logprobs, entropy = head_statistics(leaves[0], leaves[1], targets, temperatures, chunk_tokens=7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    logprobs.sum().backward()
    exact = [tensor.detach().float().requires_grad_() for tensor in leaves]
    reference, _ = head_statistics(exact[0], exact[1], targets, temperatures)
    reference.sum().backward()
    torch.testing.assert_close(logprobs, reference, atol=0.03, rtol=0.01)
    for leaf, full in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        assert full.grad is not None
        assert leaf.grad.dtype == torch.bfloat16
        assert float((leaf.grad.float() - full.grad).norm() / full.grad.norm()) < 0.01


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    head_statistics(hidden, weight, torch.tensor([1, 2, 3]), torch.ones(3))[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def gemma2() -> nn.Module:
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    config = Gemma2Config(
        **shape, num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=0.3, attn_logit_softcapping=None
    )
    return Gemma2ForCausalLM._from_config(config, attn_implementation=packed_attention.NAME)


def granite() -> nn.Module:
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = GraniteConfig(**shape, num_attention_heads=4, num_key_value_heads=2, logits_scaling=0.25)
    return GraniteForCausalLM._from_config(config, attn_implementation=packed_attention.NAME)


class Shifted(nn.Module):
    """Head that adds a shift to the matrix product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.weight = linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden).sin()


def unknown(make_model: Callable[..., nn.Module]) -> nn.Module:
    model: Any = make_model()
    model.lm_head = Shifted(model.lm_head)
    return model


def test_tensor_parallel_head_uses_its_own_hooks(
    solo: Group, make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample]
) -> None:
    model: Any = make_model()
    row = micro_batch([make_sample(9, temperature=0.7)], CPU)
    expected = token_statistics(make_model(), row)
    plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, solo.mesh, plan)
    assert find_head(model) is not None
    calls: list[object] = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    found = token_statistics(model, row)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.entropy, expected.entropy, atol=1e-6, rtol=1e-6)
    assert calls == [1]


@pytest.mark.parametrize("kind", ["tied", "gemma2", "granite", "unknown"])
@pytest.mark.parametrize("sharded", [False, True])
def test_head_matches_forward_of_every_model_kind(
    kind: str,
    sharded: bool,
    solo: Group,
    make_model: Callable[..., nn.Module],
    make_sample: Callable[..., Sample],
) -> None:
    packed_attention.register_attention()
    torch.manual_seed(0)
    makers: dict[str, Callable[[], nn.Module]] = {
        "tied": lambda: make_model("qwen3", tied=True),
        "gemma2": gemma2,
        "granite": granite,
        "unknown": lambda: unknown(make_model),
    }
    model: Any = makers[kind]()
    reference: Any = copy.deepcopy(model)
    assert (find_head(model) is None) == (kind == "unknown")
    if sharded:
        shard_model(model, solo)
    row = micro_batch([make_sample(9, temperature=0.7), make_sample(6, temperature=1.3)], CPU)
    found = token_statistics(model, row, entropy_gradient=True)
    logits = reference(
        input_ids=row.input_ids[None], position_ids=row.position_ids[None], packed=row.packed, use_cache=False
    ).logits[0]
    distribution = torch.cat([logits[:1] * 0, logits[:-1] / row.temperatures[1:, None]]).log_softmax(-1)
    expected = torch.where(row.mask, distribution.gather(1, row.input_ids[:, None])[:, 0], 0)
    entropy = torch.where(row.mask, -(distribution.exp() * distribution).sum(-1), 0)
    torch.testing.assert_close(found.logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.entropy, entropy, atol=1e-5, rtol=1e-5)
    (found.logprobs.sum() + 0.3 * found.entropy.sum()).backward()
    (expected.sum() + 0.3 * entropy.sum()).backward()
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() if sharded else parameter.grad
        torch.testing.assert_close(gradient, other.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_packed_samples_keep_their_own_temperatures(
    make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample]
) -> None:
    model = make_model()
    samples = [make_sample(5, temperature=0.5), make_sample(7, temperature=1.5), make_sample(4, temperature=1.0)]
    together = token_statistics(model, micro_batch(samples, CPU)).logprobs
    alone = [token_statistics(model, micro_batch([sample], CPU)).logprobs for sample in samples]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=1e-6)
    hotter = token_statistics(model, micro_batch([make_sample(5, temperature=5.0)], CPU)).logprobs
    assert not np.allclose(hotter.detach(), alone[0].detach())


def test_copied_model_uses_its_own_parameters(
    make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample]
) -> None:
    model: Any = make_model()
    row = micro_batch([make_sample(9)], CPU)
    before = token_statistics(model, row).logprobs
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    torch.testing.assert_close(token_statistics(model, row).logprobs, before)
    flat = token_statistics(other, row).logprobs[row.mask]
    torch.testing.assert_close(flat, torch.full_like(flat, -float(np.log(50))))


def test_residuals_use_free_memory_minus_a_sixth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch's allocator holds without a tensor counts as free; activations that fill the GPU leave none."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * gib, 78 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50 * gib)
    for allocated, kept in ((40, 17), (49, 8), (50, 7)):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device, own=allocated: own * gib)
        assert lm_head._kept_bytes(torch.device("cuda", 0)) == kept * gib
        assert lm_head._kept_bytes(torch.device("cuda", 0), waits=True) == 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * gib, 78 * gib))
    assert lm_head._kept_bytes(torch.device("cuda", 0)) == 0
    assert lm_head._kept_bytes(torch.device("cpu")) == KEPT_BYTES["cpu"]
