"""AdamW with 8-bit moments: accuracy, memory and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rlrun.config.models.learning import OptimizerConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.config.models.roles import TrainerSpec
from rlrun.fit import trainer_memory as fit_trainer
from rlrun.trainer.learning import optimizers
from rlrun.trainer.learning.optimizers import AdamW8bit, dequantize, make_codebook, make_optimizer, quantize
from rlrun.trainer.modeling.shard import local_part, shard_model
from rlrun.trainer.ranks.group import Group

CPU = torch.device("cpu")
CODED = OptimizerConfig(moments="int8", lr=1e-3, weight_decay=0.1)


@pytest.mark.parametrize("signed", [True, False])
def test_codebook_has_256_ascending_numbers(signed: bool) -> None:
    values = make_codebook(signed=signed, device=CPU)
    assert len(values) == 256
    assert (values.diff() > 0).all()
    assert values[-1] == 1
    assert (values == 0).sum() == 1
    assert (values[0] < -0.99) == signed


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", [1, 255, 256, 700])
def test_quantization_error_is_half_a_step_of_its_decade(signed: bool, columns: int) -> None:
    """In a decade d below the block's largest number the codes are 0.9 * 10^-d / 2^(6-d) apart, and half of that
    without a sign.
    """
    generator = torch.Generator().manual_seed(columns)
    values = torch.randn(5, columns, generator=generator) * 10 ** (-4 * torch.rand(5, columns, generator=generator))
    values = values if signed else values.square()
    codes, scales = quantize(values, signed=signed)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, values.shape, (5, -(-columns // 256)))
    found = dequantize(codes, scales, signed=signed)
    own = scales.repeat_interleave(256, dim=1)[:, :columns]
    share = (values / own).abs()
    decade = (-share.log10()).floor().clamp(0, 6)
    step = 0.9 * 10**-decade / 2 ** (6 - decade + (not signed))
    # Between two decades the gap is that of the coarser one; below the last decade the error is at most the smallest
    # number.
    assert ((found - values).abs() <= own * (0.55 * step + 4e-7)).all()


def test_small_second_moment_is_not_rounded_to_zero() -> None:
    codes, scales = quantize(torch.tensor([[1.0, 1e-12, 0.0]]), signed=False)
    found = dequantize(codes, scales, signed=False)
    assert found[0, 1] > 0
    assert found[0, 2] == 0
    nothing = dequantize(*quantize(torch.zeros(2, 3), signed=False), signed=False)
    assert not nothing.any()


def regression(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int) -> list[float]:
    """Return the losses of a regression with a matrix of 64 x 128."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 128))
    truth, inputs = torch.randn(64, 128, generator=generator), torch.randn(256, 128, generator=generator)
    made, losses = optimizer([weight]), []
    for _ in range(steps):
        loss = (inputs @ (weight - truth).T).square().mean()
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_adamw8bit_trains_like_float32() -> None:
    options = {"lr": 0.02, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}
    exact = regression(lambda p: torch.optim.AdamW(p, **options), 150)
    coded = regression(lambda p: AdamW8bit(p, **options), 150)
    assert coded[0] == exact[0]
    assert coded[1] == pytest.approx(exact[1], rel=1e-5)  # the first update uses moments that are not rounded yet
    assert exact[-1] < exact[0] / 50
    assert coded[-1] < 1.1 * exact[-1] + 1e-3 * exact[0]
    assert max(abs(a - b) for a, b in zip(coded, exact, strict=True)) < 0.02 * exact[0]


def run_steps(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            part = local_part(parameter.detach())
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(torch.randn(part.shape, generator=generator))
        optimizer.step()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [local_part(tensor).detach().clone() for tensor in [*model.parameters(), *states]]


@pytest.mark.parametrize("sharded", [False, True])
def test_adamw8bit_state_is_restored_bit_for_bit(
    sharded: bool, solo: Group, make_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "SMALLEST", 1500)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = shard_model(make_model(), solo) if sharded else make_model()
        return model, make_optimizer(model, CODED, CPU)

    model, optimizer = made()
    run_steps(optimizer, model, range(3))
    parameters, state = copy.deepcopy(get_state_dict(model, optimizer))  # the copies would share memory with the model
    run_steps(optimizer, model, range(3, 5))
    again, fresh = made()
    set_state_dict(again, fresh, model_state_dict=parameters, optim_state_dict=state)
    codes = [value for one in fresh.state.values() for name, value in one.items() if name.endswith("_codes")]
    assert codes
    assert {value.dtype for value in codes} == {torch.uint8}
    assert {one["step"].item() for one in fresh.state.values()} == {3.0}
    run_steps(fresh, again, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(bits(again, fresh), bits(model, optimizer), strict=True))


def test_adamw8bit_memory_equals_fit_estimate() -> None:
    weight = nn.Parameter(torch.zeros(64, 512))
    optimizer = AdamW8bit([weight], lr=0.1, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = sum(value.nbytes for name, value in optimizer.state[weight].items() if name != "step")
    assert held == 2 * fit_trainer.MASTER_BYTES * fit_trainer._CODED_SHARE * weight.numel()


def test_unsupported_8bit_moments_are_refused() -> None:
    options: dict[str, Any] = {"moments": "int8"}
    for name in ("muon", "sgd"):
        with pytest.raises(ValidationError, match=rf"moments \(int8\) has no meaning for optimizer {name}; remove it"):
            OptimizerConfig(name=name, **options)
    with pytest.raises(ValidationError, match=r"optimizer\.moments \(int8\) keeps blocks of rows.*tp \(2\)"):
        TrainerSpec(replicas=2, optimizer=CODED, parallelism=ParallelismConfig(tp=2))
