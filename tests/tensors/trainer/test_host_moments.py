"""Optimizer moments in host memory: equal numbers, counted bytes and interchangeable checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from rlrun.config.models.learning import OptimizerConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.config.models.roles import TrainerSpec
from rlrun.trainer.checkpoints.dcp import POLICY, Part, Progress, load_parts, snapshot_shards, write_shards
from rlrun.trainer.learning.optim import muon, update
from rlrun.trainer.learning.optim.host_moments import HostMoments
from rlrun.trainer.learning.optim.update import apply_gradient
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.modeling.activation_offload import SMALLEST, HostLink
from rlrun.trainer.modeling.shard import local_part, shard_model
from rlrun.trainer.ranks.group import Group
from tests.support.host_reads import NoHostReads
from tests.support.sets import few_in_gate

CPU = torch.device("cpu")
BUCKET = 40_000
OPTIMIZERS = {
    "adamw": OptimizerConfig(lr=1e-2, weight_decay=0.1),
    "int8": OptimizerConfig(lr=1e-2, weight_decay=0.1, moments="int8"),
    "muon": OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1),
    "sgd": OptimizerConfig(name="sgd", lr=1e-2),
}


class Counting(HostLink):
    """Link that copies immediately and records bytes, marks and waits in order."""

    def __init__(self) -> None:
        self.to_host = self.to_device = self.marks = self.settled = 0
        self.asked: list[str] = []

    def copy_to_host(self, tensor: Tensor, host: Tensor) -> None:
        self.to_host += tensor.nbytes
        self.asked.append("out")
        super().copy_to_host(tensor, host)

    def copy_to_device(self, host: Tensor, tensor: Tensor) -> None:
        self.to_device += tensor.nbytes
        self.asked.append("back")
        super().copy_to_device(host, tensor)

    def wait_for_copies(self) -> None:
        self.settled += 1


def offloaded(model: nn.Module, name: str, link: HostLink | None = None) -> HostMoments:
    return HostMoments(make_optimizer(model, OPTIMIZERS[name], CPU), CPU, link=link, bucket_bytes=BUCKET)


def set_gradients(model: nn.Module, seed: int, *, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        local_part(parameter.grad).copy_(scale * torch.randn(parameter.shape, generator=generator))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        set_gradients(model, seed)
        apply_gradient(model, optimizer, lr=1e-2 / (seed + 1), max_grad_norm=1.0)


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local_part(found.detach()), local_part(expected.detach())), name


def moved_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(local_part(value).nbytes for value in values if local_part(value).nbytes >= SMALLEST)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_offloaded_moments_equal_device_moments(make_model: Callable[..., nn.Module], solo: Group, name: str) -> None:
    plain, moved = shard_model(make_model(), solo), shard_model(make_model(), solo)
    resident, host = make_optimizer(plain, OPTIMIZERS[name], CPU), offloaded(moved, name)
    for seed in range(4):
        for model, optimizer in ((plain, resident), (moved, host)):
            steps(model, optimizer, range(seed, seed + 1))
        assert_same(moved, plain)
    for found, expected in zip(host.state.values(), resident.state.values(), strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(local_part(found[key]), local_part(expected[key])) for key in found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_copies_each_moment_once_through_two_buffers(
    make_model: Callable[..., nn.Module], solo: Group, name: str
) -> None:
    model, link = shard_model(make_model(), solo), Counting()
    optimizer = offloaded(model, name, link)
    steps(model, optimizer, range(1))
    assert (link.to_device, link.to_host) == (0, moved_bytes(optimizer)), "the first step makes them"
    link.to_host = 0
    link.asked.clear()
    steps(model, optimizer, range(1, 2))
    assert link.to_device == link.to_host == moved_bytes(optimizer) > 0
    assert optimizer.buffer_bytes <= 2 * BUCKET
    runs = [direction for at, direction in enumerate(link.asked) if at == 0 or link.asked[at - 1] != direction]
    if name in ("adamw", "sgd"):
        assert len(runs) >= 4, "there are several buckets"
        assert link.asked.index("out") > len(link.asked) / (len(runs) * 2), (
            "the second comes while the first is stepped"
        )
    assert link.settled == 0, "the host waited for no copy"


def test_next_bucket_is_fetched_during_the_current_update() -> None:
    """Two buckets are on the device before the first update, and never three, because a buffer is free only after its
    update.
    """
    parameters = [nn.Parameter(torch.randn(100, 100)) for _ in range(5)]
    link = Counting()
    optimizer = HostMoments(torch.optim.AdamW(parameters, fused=True), CPU, link=link, bucket_bytes=80_000)
    for _ in range(2):
        link.asked.clear()
        for parameter in parameters:
            parameter.grad = torch.randn(100, 100)
        optimizer.step()
    assert link.asked == ["back"] * 4 + (["out"] * 2 + ["back"] * 2) * 3 + ["out"] * 4
    assert optimizer.buffer_bytes == 2 * 80_384


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_offloaded_step_reads_the_device_only_once(
    make_model: Callable[..., nn.Module], solo: Group, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, guard = shard_model(make_model(), solo), NoHostReads()
    optimizer = offloaded(model, name)
    steps(model, optimizer, range(1))
    read = update.read_scalars

    def allowed(values: Any) -> dict[str, float]:
        with guard.allowed():
            return read(values)

    monkeypatch.setattr(update, "read_scalars", allowed)
    set_gradients(model, 1)
    with guard:
        apply_gradient(model, optimizer, lr=1e-2, max_grad_norm=1.0)
    assert guard.reads == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_offloaded_step_skips_gradient_that_is_not_finite(
    make_model: Callable[..., nn.Module], solo: Group, name: str
) -> None:
    model = shard_model(make_model(), solo)
    optimizer = offloaded(model, name)
    steps(model, optimizer, range(2))
    before = [local_part(parameter.detach()).clone() for parameter in model.parameters()]
    kept = [local_part(v).clone() for state in optimizer.state.values() for v in state.values()]
    set_gradients(model, 3, scale=float("inf"))
    assert not apply_gradient(model, optimizer, lr=1e-2, max_grad_norm=1.0).updated
    assert all(map(torch.equal, before, [local_part(parameter.detach()) for parameter in model.parameters()]))
    assert all(map(torch.equal, kept, [local_part(v) for s in optimizer.state.values() for v in s.values()]))


@pytest.mark.parametrize(
    ("there", "name"),
    few_in_gate(product((True, False), OPTIMIZERS), [*product([True], OPTIMIZERS), (False, "adamw")]),
)
def test_checkpoint_resumes_with_and_without_offloaded_moments(
    make_model: Callable[..., nn.Module], solo: Group, tmp_path: Path, name: str, there: bool
) -> None:
    """Two steps, a checkpoint and two more steps give the same numbers, with offloaded moments before or after the
    checkpoint.
    """

    def made(model: nn.Module, moved: bool) -> torch.optim.Optimizer:
        return offloaded(model, name) if moved else make_optimizer(model, OPTIMIZERS[name], CPU)

    first, second, whole = (shard_model(make_model(), solo) for _ in range(3))
    one, two, through = made(first, there), made(second, not there), made(whole, False)
    steps(first, one, range(2))
    peers = torch.distributed.group.WORLD
    assert peers is not None
    write_shards(snapshot_shards({POLICY: Part(first, one)}, Progress(2, 0)), tmp_path, solo, peers)
    steps(first, one, range(2, 3))  # the saved copy must not change
    load_parts({POLICY: Part(second, two)}, tmp_path)
    steps(second, two, range(2, 4))
    steps(whole, through, range(4))
    assert_same(second, whole)


def test_state_dict_waits_for_the_last_copy(make_model: Callable[..., nn.Module], solo: Group) -> None:
    model, link = shard_model(make_model(), solo), Counting()
    optimizer = offloaded(model, "adamw", link)
    steps(model, optimizer, range(1))
    optimizer.state_dict()
    assert link.settled == 1


def test_state_of_other_parameters_is_refused() -> None:
    one, other = (
        HostMoments(torch.optim.AdamW([nn.Parameter(torch.ones(n)) for n in shape]), CPU) for shape in ((2,), (2, 3))
    )
    with pytest.raises(ValueError, match=r"has groups of \[2\] parameters, but the optimizer has \[1\]"):
        one.load_state_dict(other.state_dict())


def test_offload_option_creates_host_moments(make_model: Callable[..., nn.Module]) -> None:
    made = make_optimizer(make_model(), OptimizerConfig(name="muon", offload=True), CPU)
    assert isinstance(made, HostMoments)
    assert isinstance(made.inner, muon.Muon)
    assert not isinstance(make_optimizer(make_model(), OptimizerConfig(), CPU), HostMoments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"optimizer\.offload \(true\) needs GPUs, but gpusPerReplica is 0; remove optimizer\.offload"),
        (
            {"gpusPerReplica": 1, "cpuOffload": True},
            r"optimizer\.offload \(true\) has no effect with cpuOffload \(true\), .*; remove one of them",
        ),
    ],
)
def test_offload_refuses_incompatible_options(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerSpec.model_validate({"optimizer": {"offload": True}} | fields)
    TrainerSpec(gpus_per_replica=4, optimizer=OptimizerConfig(offload=True), parallelism=ParallelismConfig(pp=2))
