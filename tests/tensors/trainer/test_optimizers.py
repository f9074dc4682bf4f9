"""Optimizers, compared with their written-out updates, and their parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from rlrun.algorithms import Mixture, Objective
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.batch import Batch
from rlrun.trainer.learning.optim import muon as muon_module
from rlrun.trainer.learning.optim.muon import Muon, orthogonalize, orthogonalized_all
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.train_step import train_step
from rlrun.trainer.modeling.shard import local_part, shard_model
from rlrun.trainer.ranks.group import Group

CPU = torch.device("cpu")
LR, DECAY = 0.02, 0.1
STEPS = 3


def adamw(weight: Tensor, gradients: list[Tensor], *, beta1: float, beta2: float, eps: float) -> Tensor:
    """Apply Loshchilov & Hutter (2019), algorithm 2."""
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        corrected = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + eps)
        weight = weight - LR * DECAY * weight - LR * corrected
    return weight


def sgd(weight: Tensor, gradients: list[Tensor], *, momentum: float) -> Tensor:
    buffer = None
    for gradient in gradients:
        gradient = gradient + DECAY * weight
        buffer = gradient if buffer is None else momentum * buffer + gradient
        weight = weight - LR * buffer
    return weight


def muon(weight: Tensor, gradients: list[Tensor], *, momentum: float) -> Tensor:
    buffer = torch.zeros_like(weight)
    for gradient in gradients:
        buffer = momentum * buffer + (1 - momentum) * gradient
        x = (1 - momentum) * gradient + momentum * buffer
        x = x / x.square().sum().sqrt()
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        weight = weight - LR * DECAY * weight - LR * 0.2 * math.sqrt(max(weight.shape)) * x
    return weight


EXPECTED: dict[str, Callable[[str, Tensor, list[Tensor]], Tensor]] = {
    "adamw": lambda _, w, g: adamw(w, g, beta1=0.8, beta2=0.95, eps=1e-6),
    "sgd": lambda _, w, g: sgd(w, g, momentum=0.7),
    "muon": lambda name, w, g: (
        muon(w, g, momentum=0.7) if "layers" in name and w.ndim == 2 else adamw(w, g, beta1=0.8, beta2=0.95, eps=1e-6)
    ),
}
CONFIGS = {
    "adamw": OptimizerConfig(lr=LR, weight_decay=DECAY, beta1=0.8, beta2=0.95, eps=1e-6),
    "sgd": OptimizerConfig(name="sgd", lr=LR, weight_decay=DECAY, momentum=0.7),
    "muon": OptimizerConfig(name="muon", lr=LR, weight_decay=DECAY, momentum=0.7, beta1=0.8, beta2=0.95, eps=1e-6),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sharded", [False, True])
def test_optimizer_updates_equal_the_definition(
    name: str, sharded: bool, solo: Group, make_model: Callable[..., nn.Module]
) -> None:
    model = make_model("qwen3", tied=True)
    start = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    if sharded:
        shard_model(model, solo)
    optimizer = make_optimizer(model, CONFIGS[name], CPU)
    generator = torch.Generator().manual_seed(1)
    gradients: dict[str, list[Tensor]] = {key: [] for key in start}
    for _ in range(STEPS):
        for key, parameter in model.named_parameters():
            gradients[key].append(torch.randn(start[key].shape, generator=generator))
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(gradients[key][-1])
        optimizer.step()
        optimizer.zero_grad()
    for key, parameter in model.named_parameters():
        expected = EXPECTED[name](key, start[key], gradients[key])
        torch.testing.assert_close(local_part(parameter.detach()), expected, atol=2e-6, rtol=2e-5, msg=key)


def test_muon_orthogonalizes_only_layer_matrices(make_model: Callable[..., nn.Module]) -> None:
    model = make_model()
    optimizer = make_optimizer(model, OptimizerConfig(name="muon"), CPU)
    assert isinstance(optimizer, Muon)
    matrices = {id(p) for group in optimizer.param_groups if group["matrices"] for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in matrices}
    assert all(".layers." in name and "norm" not in name for name in names)
    assert len(names) == 2 * 7
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("name", CONFIGS)
def test_frozen_parameters_are_not_optimized(name: str, make_model: Callable[..., nn.Module]) -> None:
    model: Any = make_model()
    model.lm_head.weight.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    optimizer = make_optimizer(model, CONFIGS[name], CPU)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    seed=st.integers(0, 50),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_orthogonalize_brings_singular_values_near_one(rows: int, columns: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(rows, columns, generator=generator), full_matrices=False)
    values = torch.linspace(0.3, 1, min(rows, columns))
    found = orthogonalize(scale * (u * values) @ vh)
    assert found.shape == (rows, columns)
    after = torch.linalg.svdvals(found)
    assert 0.6 < float(after.min()) <= float(after.max()) < 1.3
    # equal singular vectors: u' found v is diagonal
    inner = u.T @ found @ vh.T
    torch.testing.assert_close(inner, torch.diag(inner.diagonal()), atol=1e-4, rtol=0)


def test_experts_are_orthogonalized_separately() -> None:
    torch.manual_seed(0)
    experts = torch.randn(3, 6, 4)
    apart = torch.stack([orthogonalize(expert) for expert in experts])
    torch.testing.assert_close(orthogonalize(experts), apart)
    assert not orthogonalize(torch.zeros(2, 3)).any()


@pytest.mark.parametrize("name", CONFIGS)
def test_optimizer_skips_gradient_that_is_not_finite(
    name: str, solo: Group, make_model: Callable[..., nn.Module], make_batch: Callable[..., Batch]
) -> None:
    model = shard_model(make_model(), solo)
    optimizer = make_optimizer(model, CONFIGS[name], CPU)

    def run(loss: str = "aipo") -> dict[str, float]:
        rows = [(0, 1), (2,)]
        return train_step(
            model,
            optimizer,
            Update(make_batch([9, 4, 13]), rows),
            group=solo,
            loss=Mixture(Objective(loss)),
            lr=LR,
            max_grad_norm=1.0,
        )

    def bits() -> list[Tensor]:
        moments = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return [local_part(tensor).detach().clone() for tensor in [*model.parameters(), *moments]]

    assert run()["skipped"] == 0
    before = bits()
    handle = model.model.norm.register_forward_hook(lambda module, inputs, output: output * float("inf"))
    assert run()["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, bits(), strict=True))
    handle.remove()
    assert run()["skipped"] == 0
    assert not all(torch.equal(a, b) for a, b in zip(before, bits(), strict=True))


def test_optimizer_options_without_effect_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"momentum \(0.5\) has no meaning for optimizer adamw; remove it"):
        OptimizerConfig(momentum=0.5)
    for option in ({"beta1": 0.5}, {"beta2": 0.5}, {"eps": 1e-3}):
        with pytest.raises(ValidationError, match="beta1, beta2 and eps have no meaning for optimizer sgd"):
            OptimizerConfig(name="sgd", **option)
    for config in CONFIGS.values():
        assert OptimizerConfig.model_validate_json(config.model_dump_json()) == config
    assert [OptimizerConfig(name=name).effective_momentum for name in ("muon", "sgd")] == [0.95, 0.9]


def test_equal_shapes_are_orthogonalized_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tall matrices count as wide ones, and a batch is bounded in bytes."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (4, 6), (6, 4), (5, 5), (3, 4, 6), (6, 4)]
    matrices = [torch.randn(shape, generator=generator) for shape in shapes]
    expected = [orthogonalize(matrix) for matrix in matrices]
    calls: list[int] = []

    def spy(matrix: Tensor) -> Tensor:
        calls.append(len(matrix))
        return orthogonalize(matrix)

    monkeypatch.setattr(muon_module, "orthogonalize", spy)
    for limit, batches in ((2**30, [7, 1]), (2 * 4 * 24, [2, 1, 3, 1, 1])):
        calls.clear()
        monkeypatch.setattr(muon_module, "BATCH_BYTES", limit)
        for found, exact in zip(orthogonalized_all(matrices), expected, strict=True):
            torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-5)
        assert calls == batches


def test_muon_differs_from_torch_only_by_its_bfloat16_iteration() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(48, 96, generator=generator), torch.randn(3, 48, 96, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    other = nn.Parameter(torch.zeros(1))
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    mine = Muon([ours], [other], momentum=0.95, adamw=options)
    torchs = torch.optim.Muon([theirs], momentum=0.95, adjust_lr_fn="match_rms_adamw", **options)
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        torchs.step()
    change = (ours - start).norm()
    assert change > 0.1
    assert (ours - theirs).norm() / change < 0.02
