"""Device reads of the host in one step: once, for the metrics and the norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from rlrun.algorithms import Mixture, Objective, Regularizers
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.trainer.learning import learner as learner_module
from rlrun.trainer.learning import train_step as step_module
from rlrun.trainer.learning.critic import Critic, critic_step, to_critic
from rlrun.trainer.learning.forward import Signals
from rlrun.trainer.learning.optim import update
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.reference_model import FrozenReference
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.step_buffer import micro_batches
from rlrun.trainer.learning.train_step import train_step
from rlrun.trainer.modeling import packed_attention
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group
from tests.support.host_reads import HostReadError, NoHostReads
from tests.tensors.trainer.companions import make_learner

LENGTHS = [9, 4, 13, 6, 3]
ROWS = [(3,), (), (0, 2), (4, 1)]
LOSSES = {
    "aipo": Objective("aipo"),
    "sft": Objective("sft"),
    "gspo by sequence": Objective("gspo", aggregation="seq_mean_token_mean"),
    "masked_is": Objective("masked_is", {"ratio": "sequence"}),
    "everything": Objective(
        "decoupled_ppo",
        aggregation="constant_length",
        aggregation_length=5,
        regularizers=Regularizers(entropy=0.1),
        correction={"action": "mask", "level": "sequence", "reduce": "max", "high": 9.0},
        proximal="log_linear",
    ),
}


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> NoHostReads:
    """Guard that allows the single read, the collectives of its values, and numbers on the host."""
    guard = NoHostReads()

    def allowing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with guard.allowed():
                return function(*arguments, **options)

        return call

    monkeypatch.setattr(update, "read_scalars", allowing(update.read_scalars))
    for name in ("data_sums", "max_over_ranks", "sum_over_ranks"):
        monkeypatch.setattr(Group, name, uncounted(guard, getattr(Group, name)))
    monkeypatch.setattr(packed_attention, "packed_attention", by_sequence)
    for name in ("_loss_divisors", "micro_batches"):  # these work on numbers of the host
        monkeypatch.setattr(step_module, name, uncounted(guard, getattr(step_module, name)))
    return guard


def uncounted(guard: NoHostReads, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with guard.allowed():
            guard.reads -= 1
            return function(*arguments, **options)

    return call


def by_sequence(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, packed: Any, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention by slices, like a GPU kernel: no mask selects tokens."""
    parts = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scaling"], enable_gqa=True)
        for q, k, v in zip(*(tensor.split(packed.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def samples_of(batch: Batch) -> list[list[Sample]]:
    return [[batch.samples[i] for i in row] for row in ROWS]


@pytest.mark.parametrize(
    ("loss", "optimizer"), [*((loss, "adamw") for loss in LOSSES), ("aipo", "muon"), ("aipo", "sgd")]
)
def test_training_step_reads_the_device_once(
    guard: NoHostReads,
    solo: Group,
    make_model: Callable[..., nn.Module],
    make_batch: Callable[..., Batch],
    loss: str,
    optimizer: Any,
) -> None:
    batch = make_batch(LENGTHS)
    model = shard_model(make_model(), solo)
    made = make_optimizer(model, OptimizerConfig(name=optimizer, lr=0.01), solo.device)
    mixture = Mixture(LOSSES[loss], {"nowhere": Objective("cispo")})
    run = partial(train_step, model, made, Update(batch, ROWS), group=solo, loss=mixture, lr=0.01, max_grad_norm=0.1)
    run()  # the first run reads the model's head once
    guard.reads = 0
    with guard:
        metrics = run()
    assert guard.reads == 1
    assert metrics["skipped"] == 0


def test_critic_step_reads_the_device_once(
    guard: NoHostReads, solo: Group, make_model: Callable[..., nn.Module], rewarded: Callable[..., Batch]
) -> None:
    batch = rewarded(LENGTHS)
    module = shard_model(to_critic(make_model()), solo)
    critic = Critic(module, make_optimizer(module, OptimizerConfig(), solo.device), value_clip=0.2, max_grad_norm=1.0)
    inputs = micro_batches(samples_of(batch), solo.device)
    zeros = [Signals(returns=row.advantages, values=torch.zeros_like(row.advantages)) for row in inputs]
    with guard:
        critic_step(critic, batch, inputs, zeros, group=solo, lr=0.01)
    assert guard.reads == 1


def test_reference_pass_reads_the_device_once(
    guard: NoHostReads,
    solo: Group,
    make_model: Callable[..., nn.Module],
    make_batch: Callable[..., Batch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One read of the reference's values and one in each update; the proximal policy needs none."""
    monkeypatch.setattr(learner_module, "micro_batches", uncounted(guard, micro_batches))
    learner = make_learner(
        shard_model(make_model(), solo),
        solo,
        loss=Objective("decoupled_ppo", proximal="recompute"),
        reference=FrozenReference(shard_model(make_model(), solo).eval()),
    )
    updates = [Update(part, [(0, 1), (2,)]) for part in (make_batch([9, 4, 13]), make_batch([6, 3, 8]))]
    learner.step(updates, lr=0.01)
    guard.reads = 0
    with guard:
        metrics = learner.step(updates, lr=0.01)
    assert guard.reads == 3
    assert {"time/proximal", "time/reference"} <= metrics.keys()


def test_all_rows_of_step_are_copied_at_once(make_batch: Callable[..., Batch]) -> None:
    class Copies(TorchDispatchMode):  # type: ignore[misc]
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.made += (kwargs or {}).get("device") == torch.device("meta")
            return func(*args, **(kwargs or {}))

    with Copies() as copies:
        rows = micro_batches(samples_of(make_batch(LENGTHS)), torch.device("meta"))
    assert copies.made == 1
    assert [len(row.input_ids) for row in rows] == [6, 2, 22, 7]


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: float(x.sum()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.long)),
    ],
)
def test_host_read_raises_outside_allowed_sections(look: Callable[[Tensor], object]) -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    guard = NoHostReads()
    with guard, pytest.raises(HostReadError):
        look(values)
    with guard, guard.allowed():
        look(values)
    assert guard.reads == 1
