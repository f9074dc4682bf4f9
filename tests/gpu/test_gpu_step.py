"""Code paths that run only on CUDA, compared with float32 on the CPU."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlrun.algorithms import Mixture, Objective
from rlrun.config.models.learning import OptimizerConfig
from rlrun.fit.attention_kernels import BACKENDS, AttentionError, Needs, choose_kernel
from rlrun.protocol.files.batch import Batch
from rlrun.trainer.bench import fake_batch
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.lm_head import head_statistics
from rlrun.trainer.learning.optim.muon import orthogonalize
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.learning.train_step import train_step
from rlrun.trainer.modeling import packed_attention as attention
from rlrun.trainer.modeling.attention.compute import attend
from rlrun.trainer.modeling.attention.installed import read_machine
from rlrun.trainer.modeling.attention.packed_layout import Scores
from rlrun.trainer.modeling.attention.select import kernel_refusal
from rlrun.trainer.modeling.packed_attention import packed_attention, row_layout
from rlrun.trainer.modeling.shard import Memory, shard_model
from rlrun.trainer.ranks.group import Group

VOCABULARY, LENGTHS = 500, (70, 33, 128)
CPU = torch.device("cpu")
REFERENCE: Any = "sdpa"


@pytest.fixture
def model() -> nn.Module:
    attention.register_attention()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
    )
    return Qwen3ForCausalLM._from_config(config, attn_implementation=attention.NAME).train()


@pytest.fixture
def batch() -> Batch:
    return Batch(1, 1, tuple(fake_batch(length, 1, VOCABULARY).samples[0] for length in LENGTHS))


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to the expected norm."""
    return float((found.detach().float().cpu() - expected.detach().float()).norm() / expected.detach().float().norm())


def test_fused_head_in_bfloat16_is_close_to_float32(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 256).bfloat16() / 8, torch.randn(5000, 256).bfloat16()
    targets, temperatures = torch.randint(5000, (300,)), 0.5 + torch.rand(300)
    results = []
    for where, kind in ((CPU, torch.float32), (device, dtype)):
        leaves = [tensor.to(where, kind).requires_grad_() for tensor in (hidden, weight)]
        logprobs, entropy = head_statistics(
            leaves[0], leaves[1], targets.to(where), temperatures.to(where), chunk_tokens=64, entropy="gradient"
        )
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        results.append((logprobs, entropy, leaves[0].grad, leaves[1].grad))
    (logprobs, entropy, d_hidden, d_weight), found = results
    # The products are summed and kept in float32, so the values are exact for the rounded inputs.
    torch.testing.assert_close(found[0].detach().cpu(), logprobs.detach(), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(found[1].detach().cpu(), entropy.detach(), atol=1e-3, rtol=1e-4)
    for own, exact in ((found[2], d_hidden), (found[3], d_weight)):
        assert own is not None
        assert exact is not None
        assert distance(own, exact) < 0.01


@pytest.mark.measures_gpu_memory
def test_fused_head_does_not_store_full_logits() -> None:
    tokens, vocabulary = 8192, 150_000
    hidden = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    targets = torch.zeros(tokens, dtype=torch.long, device="cuda")
    logprobs, _ = head_statistics(hidden, weight, targets, torch.ones(tokens, device="cuda"), chunk_tokens=512)
    logprobs.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < tokens * vocabulary * 4 / 2


def test_varlen_attention_is_close_to_cpu_reference(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    query, key, value = (torch.randn(1, heads, total, 64).bfloat16() for heads in (4, 2, 2))
    results = []
    for where, kind in ((CPU, torch.float32), (device, dtype)):
        leaves = [tensor.to(where, kind).requires_grad_() for tensor in (query, key, value)]
        q, k, v = leaves
        output, _ = packed_attention(nn.Identity(), q, k, v, None, packed=row_layout(LENGTHS, where))
        output.float().square().sum().backward()
        results.append((output, *(leaf.grad for leaf in leaves)))
    for own, exact in zip(results[1], results[0], strict=True):
        assert own is not None
        assert exact is not None
        assert distance(own, exact) < 0.02


@pytest.mark.parametrize("name", BACKENDS)
def test_attention_kernel_is_close_to_sdpa_reference(name: Any, device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    total, backend = sum(LENGTHS), BACKENDS[name]
    try:
        choose_kernel(name, Needs(head_dim=64), read_machine(device))
    except AttentionError as error:
        pytest.skip(str(error))
    tensors = [torch.randn(total, heads, 64).bfloat16() for heads in (4, 2, 2)]
    able = {
        feature: feature in backend.features and kernel_refusal(name, Needs(frozenset({feature}), 64), device) is None
        for feature in ("window", "softcap", "sinks")
    }
    plain = Scores(0.3, window=20 if able["window"] else None, softcap=5.0 if able["softcap"] else None)
    sinks = torch.randn(4) if able["sinks"] else None
    results = []
    for kernel, where, kind in ((REFERENCE, CPU, torch.float32), (name, device, dtype)):
        leaves = [tensor.to(where, kind).requires_grad_() for tensor in tensors]
        if sinks is not None:
            leaves.append(sinks.detach().to(where).requires_grad_())
        scores = replace(plain, sinks=leaves[3] if sinks is not None else None)
        q, k, v = leaves[:3]
        output = attend(kernel, q, k, v, row_layout(LENGTHS, where).segments, scores)
        output.float().square().sum().backward()
        results.append((output, *(leaf.grad for leaf in leaves)))
    for own, exact in zip(results[1], results[0], strict=True):
        assert own is not None
        assert exact is not None
        assert distance(own, exact) < 0.03


def test_offloaded_activations_keep_gradients(alone: Group, model: Any, batch: Batch) -> None:
    results = []
    for mode in ("none", "offload"):
        sharded = shard_model(copy.deepcopy(model), alone, memory=Memory(activations=mode))
        for _ in range(2):  # the second step reuses the first one's buffers
            sharded.zero_grad()
            token_statistics(sharded, micro_batch(batch.samples, alone.device)).logprobs.sum().backward()
        results.append({name: p.grad.full_tensor().cpu() for name, p in sharded.named_parameters()})
    for name, expected in results[0].items():
        assert distance(results[1][name], expected) < 0.01, name


def test_sharded_model_in_bfloat16_is_close_to_float32(alone: Group, model: Any, batch: Batch) -> None:
    reference = copy.deepcopy(model)
    expected = token_statistics(reference, micro_batch(batch.samples, CPU))
    expected.logprobs.sum().backward()
    shard_model(model, alone)
    found = token_statistics(model, micro_batch(batch.samples, alone.device))
    found.logprobs.sum().backward()
    torch.testing.assert_close(found.logprobs.detach().cpu(), expected.logprobs.detach(), atol=0.05, rtol=0.02)
    torch.testing.assert_close(found.entropy.cpu(), expected.entropy, atol=0.05, rtol=0.02)
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.dtype == torch.float32, name
        assert distance(parameter.grad.full_tensor(), other.grad) < 0.05, name


def cosine(found: Tensor, expected: Tensor) -> float:
    pair = found.detach().double().cpu().flatten(), expected.detach().double().flatten()
    return float(torch.nn.functional.cosine_similarity(*pair, dim=0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU it compiles for a minute what tests/tensors traces")
@pytest.mark.parametrize("mode", ["selective", "attention"])
def test_compiled_layers_are_close_and_compile_once(mode: Any, alone: Group, model: Any) -> None:
    reference = copy.deepcopy(model)
    torch._dynamo.reset()
    shard_model(model, alone, memory=Memory(compile=True, activations=mode))
    graphs = []
    for lengths in (LENGTHS, (40, 90), (200, 11, 3), LENGTHS[::-1]):
        samples = [fake_batch(length, 1, VOCABULARY).samples[0] for length in lengths]
        for one, where in ((reference, CPU), (model, alone.device)):
            one.zero_grad()
            token_statistics(one, micro_batch(samples, where)).logprobs.sum().backward()
        for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            found = parameter.grad.full_tensor()
            assert cosine(found, other.grad) >= 0.9995, (lengths, name, cosine(found, other.grad))
            assert distance(found, other.grad) < 0.05, (lengths, name)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] > 0, graphs


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_optimizer_steps_lower_loss(name: str, alone: Group, model: Any, batch: Batch) -> None:
    config = OptimizerConfig(name=name, lr=1e-3 if name != "sgd" else 0.1)
    shard_model(model, alone)
    optimizer = make_optimizer(model, config, alone.device)
    losses = [
        train_step(
            model,
            optimizer,
            Update(batch, [(0, 1), (2,)]),
            group=alone,
            loss=Mixture(Objective("aipo")),
            lr=config.lr,
            max_grad_norm=1.0,
        )
        for _ in range(10)
    ]
    assert all(metrics["skipped"] == 0 for metrics in losses)
    assert losses[-1]["loss"] < losses[0]["loss"]


def test_orthogonalize_gives_singular_values_near_one(device: torch.device) -> None:
    torch.manual_seed(0)
    found = orthogonalize(torch.randn(64, 256, device=device))
    assert found.dtype == torch.float32
    values = torch.linalg.svdvals(found)
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.4
