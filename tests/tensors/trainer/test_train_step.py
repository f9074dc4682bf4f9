"""One optimizer step: independent of the rows of a batch, and skipped if the gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loguru import logger
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlrun.algorithms import LossBatch, Mixture, Objective, Regularizers
from rlrun.config.models.learning import AlgorithmConfig, LossConfig, OptimizerConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch, Sample
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.packing.micro_batches import Row
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.optim.update import apply_gradient, squared_norm
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import Update, log_band_warnings, step_objective
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.learning.train_step import parameter_checksum, train_step
from rlrun.trainer.modeling.shard import local_part, shard_model
from rlrun.trainer.ranks.group import Group
from tests.tensors.trainer.companions import SMOOTH

AIPO = Objective("aipo")
LENGTHS = [9, 4, 13, 6, 3]
Step = Callable[..., tuple[dict[str, float], nn.Module]]


@pytest.fixture
def step(solo: Group, make_model: Callable[..., nn.Module]) -> Step:
    """Return a function that runs one step on a fresh model."""

    def run(
        batch: Batch,
        rows: list[Row],
        *,
        max_grad_norm: float | None = 1.0,
        loss: Objective = AIPO,
        damage: bool = False,
    ) -> tuple[dict[str, float], nn.Module]:
        model = shard_model(make_model(), solo)
        if damage:
            with torch.no_grad():
                local_part(model.lm_head.weight)[0, 0] = float("inf")
        optimizer = make_optimizer(model, SMOOTH, solo.device)
        metrics = train_step(
            model,
            optimizer,
            Update(batch, rows),
            group=solo,
            loss=Mixture(loss),
            lr=SMOOTH.lr,
            max_grad_norm=max_grad_norm,
        )
        return metrics, model

    return run


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([local_part(p.detach()).flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "loss",
    [
        AIPO,
        Objective("gspo", aggregation="seq_mean_token_mean"),
        Objective("masked_is", {"ratio": "sequence"}),
        Objective(
            "decoupled_ppo",
            aggregation="constant_length",
            aggregation_length=5,
            regularizers=Regularizers(entropy=0.1),
            correction={"action": "mask", "level": "sequence", "reduce": "max", "high": 9.0},
            proximal="log_linear",
        ),
    ],
    ids=lambda objective: objective.loss,
)
def test_loss_does_not_depend_on_rows(step: Step, make_batch: Callable[..., Batch], loss: Objective) -> None:
    batch = make_batch(LENGTHS)
    whole, together = step(batch, [(0, 1, 2, 3, 4)], loss=loss)
    cut, apart = step(batch, [(3,), (), (0, 2), (4, 1)], loss=loss)
    torch.testing.assert_close(weights(apart), weights(together), atol=1e-5, rtol=1e-5)
    for name in ("loss", "grad_norm", "entropy", "mismatch_kl", "mismatch_kl_max", "loss_tokens"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_gradient_is_mean_over_all_loss_tokens(
    step: Step, make_batch: Callable[..., Batch], make_model: Callable[..., nn.Module]
) -> None:
    batch = make_batch(LENGTHS)
    metrics, _ = step(batch, [(0, 1), (2, 3, 4)], max_grad_norm=None)
    model = make_model(attn="eager")
    total = torch.zeros(())
    for sample in batch.samples:
        ids = torch.from_numpy(sample.input_ids).long()
        mask = torch.from_numpy(sample.loss_mask)[1:]
        t = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        ratio = (t - torch.from_numpy(sample.logprobs)[1:]).exp().detach().clamp(max=8.0)
        total = total - (ratio * torch.from_numpy(sample.advantages)[1:] * t)[mask].sum()
    (total / batch.loss_tokens).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["tokens"] == sum(LENGTHS)
    assert metrics["loss_tokens"] == batch.loss_tokens


def test_log_linear_policy_interpolates_between_versions(
    step: Step, make_batch: Callable[..., Batch], make_model: Callable[..., nn.Module], solo: Group
) -> None:
    batch = make_batch(LENGTHS, step=3)  # sampled by version 0 and trained by version 2, so alpha is one half
    row = micro_batch(batch.samples, solo.device)
    with torch.no_grad():
        t = token_statistics(shard_model(make_model(), solo), row).logprobs
    half = ((t - row.inference_logprobs) / 2).exp()[row.mask]
    loss = Objective("decoupled_ppo", {"cap": 1e6}, proximal="log_linear")
    assert step(batch, [(0, 1), (2, 3, 4)], loss=loss)[0]["weight"] == pytest.approx(float(half.mean()), rel=1e-4)


def test_entropy_bonus_increases_entropy(step: Step, make_batch: Callable[..., Batch]) -> None:
    still = make_batch(LENGTHS)
    for sample in still.samples:
        sample.advantages[:] = 0
    rows = [(0, 1, 2, 3, 4)]
    without, _ = step(still, rows)
    bonus, model = step(still, rows, loss=Objective("aipo", regularizers=Regularizers(entropy=0.1)))
    assert without["grad_norm"] == 0.0
    assert bonus["grad_norm"] > 0.0
    assert bonus["entropy_bonus"] == pytest.approx(0.1 * bonus["entropy"], rel=1e-5)
    row = micro_batch(still.samples, torch.device("cpu"))
    with torch.no_grad():
        after = token_statistics(model, row).entropy.sum() / row.mask.sum()
    assert float(after) > bonus["entropy"]


def test_step_counts_and_skips_gradient_not_finite(step: Step, make_batch: Callable[..., Batch]) -> None:
    batch = make_batch(LENGTHS)
    metrics, model = step(batch, [(0, 1, 2), (3, 4)], damage=True)
    assert metrics["skipped"] == 1.0
    untouched = weights(step(batch, [(0, 1, 2, 3, 4)], damage=True)[1])
    assert torch.equal(weights(model), untouched)
    assert torch.isfinite(weights(model)).sum() == untouched.numel() - 1
    assert step(batch, [(0, 1, 2, 3, 4)])[0]["skipped"] == 0.0


def test_clipping_bounds_the_update(
    solo: Group, make_model: Callable[..., nn.Module], make_batch: Callable[..., Batch]
) -> None:
    moved = []
    for limit in (None, 1e-3):
        model = shard_model(make_model(), solo)
        before = weights(model).clone()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        train_step(
            model,
            sgd,
            Update(make_batch(LENGTHS), [(0, 1, 2, 3, 4)]),
            group=solo,
            loss=Mixture(Objective("aipo")),
            lr=1.0,
            max_grad_norm=limit,
        )
        moved.append(float((weights(model) - before).norm()))
    assert moved[1] == pytest.approx(1e-3, rel=1e-2)
    assert moved[0] > 10 * moved[1]


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_never_enlarges_a_gradient(fused: bool) -> None:
    """AdamW ignores a common factor of all gradients, so their sizes differ: 0.9, 0.09 and 5 with a limit of 1."""
    limit = 1.0

    def trained(ours: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=fused)
        for seed, size in enumerate((0.9, 0.09, 5.0)):
            direction = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
            model.weight.grad = direction / direction.norm() * size
            if ours:
                apply_gradient(model, optimizer, lr=1e-2, max_grad_norm=limit)
                continue
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
        return model.weight.detach()

    torch.testing.assert_close(trained(ours=True), trained(ours=False), rtol=1e-5, atol=1e-7)


def test_checksum_detects_a_single_bit(solo: Group, make_model: Callable[..., nn.Module]) -> None:
    model, same, other = make_model(), shard_model(make_model(), solo), make_model()
    with torch.no_grad():
        weight = other.model.norm.weight
        weight[0] = torch.nextafter(weight[0], torch.tensor(2.0))
    assert parameter_checksum(model) == parameter_checksum(same)
    assert parameter_checksum(model) != parameter_checksum(other)


def test_checksum_detects_changes_that_cancel(make_model: Callable[..., nn.Module]) -> None:
    model = make_model()
    words = model.model.embed_tokens.weight.detach().view(torch.int32)
    # Fixed instead of random, because two flipped sign bits cancel if the terms of their words have different signs.
    words[0, :2] = torch.tensor([0x3F000001, 0x3E800003])
    before = parameter_checksum(model)
    for first, second in ((1, -1), (2**20, -(2**20)), (-(2**31), -(2**31))):
        changed = words[0, :2].clone()
        words[0, 0], words[0, 1] = words[0, 0] + first, words[0, 1] + second
        assert parameter_checksum(model) != before
        words[0, :2] = changed
    assert parameter_checksum(model) == before


def test_checksum_copies_no_parameter(make_model: Callable[..., nn.Module]) -> None:
    class Largest(TorchDispatchMode):  # type: ignore[misc]
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != held:
                self.made = max(self.made, result.nbytes)
            return result

    model = nn.Linear(1024, 1024, bias=False)
    held = model.weight.untyped_storage().data_ptr()
    with Largest() as largest:
        parameter_checksum(model)
    assert 0 < largest.made <= 4 * 2**16 < 4 * model.weight.numel()


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_update_uses_the_learning_rate_of_its_step(
    solo: Group, make_model: Callable[..., nn.Module], make_batch: Callable[..., Batch], name: Any
) -> None:
    moved = []
    for lr in (0.0, 1e-3, 2e-3):
        model = shard_model(make_model(), solo)
        before = weights(model)
        optimizer = make_optimizer(model, OptimizerConfig(name=name, lr=0.7), solo.device)
        metrics = train_step(
            model,
            optimizer,
            Update(make_batch(LENGTHS), [(0, 1, 2, 3, 4)]),
            group=solo,
            loss=Mixture(AIPO),
            lr=lr,
            max_grad_norm=None,
        )
        assert metrics["lr"] == lr
        moved.append((weights(model) - before).double())
    assert not moved[0].any()
    assert moved[1].abs().max() > 0
    torch.testing.assert_close(moved[2], 2 * moved[1], atol=2e-6, rtol=1e-3)


def test_objective_comes_from_preset_unless_loss_is_set() -> None:
    assert step_objective(AlgorithmConfig(preset="dppo"), 64).loss == "dppo"
    chosen = AlgorithmConfig(preset="dppo", loss=LossConfig(name="cispo", options={"eps_high": 3.0}))
    assert step_objective(chosen, 64) == Objective("cispo", {"eps_high": 3.0})
    by_length = AlgorithmConfig(preset="dr_grpo")
    assert step_objective(by_length, 64).aggregation_length == 64
    assert step_objective(by_length.model_copy(update={"aggregation_length": 9}), 64).aggregation_length == 9
    assert step_objective(AlgorithmConfig(preset="gspo"), 64).aggregation == "seq_mean_token_mean"
    assert step_objective(AlgorithmConfig(preset="decoupled_ppo"), 64).proximal == "recompute"


@pytest.mark.parametrize("tokens", [200, 1000])
def test_gspo_preset_tolerates_rounding_noise(tokens: int) -> None:
    """Exactly on-policy answers with the noise of vLLM against a bfloat16 trainer (huggingface/trl#6789): -0.0015 ±
    0.05 per token.
    """
    answers = 64
    draw = np.random.default_rng(0)
    inference = torch.tensor(-np.abs(draw.normal(0.3, 0.3, answers * tokens)) - 0.01)
    noisy = inference + torch.tensor(draw.normal(-0.0015, 0.05, answers * tokens))

    def cut(config: AlgorithmConfig, sign: float) -> float:
        logprobs = noisy.clone().requires_grad_()
        found = step_objective(config, 4096)(
            logprobs,
            LossBatch(
                inference_logprobs=inference,
                advantages=torch.full((answers,), sign, dtype=torch.float64),
                mask=torch.ones(answers * tokens, dtype=torch.bool),
                sequence_lengths=[tokens] * answers,
            ),
        )
        (gradient,) = torch.autograd.grad(found.loss, logprobs)
        return float((gradient == 0).double().mean())

    for sign in (1.0, -1.0):
        assert cut(AlgorithmConfig(preset="gspo"), sign) == 0
    assert cut(AlgorithmConfig(preset="gspo", proximal="inference"), -1.0) > 0.5


def test_narrow_clip_range_is_logged() -> None:
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    try:
        trainer = {
            "name": "test",
            "uid": "uid",
            "output_dir": "/out",
            "model": {"tiny": {}},
            "max_steps": 1,
            "seq_len": 32,
        }
        own = {"maths": {"loss": {"name": "ipo", "options": {"thr": 1e-4}}}}
        for algorithm in ({"preset": "gspo"}, {"preset": "gspo", "proximal": "inference"}):
            config = {**trainer, "seed": 0, "algorithm": algorithm, "checkpoint": {}, "environment_algorithms": own}
            log_band_warnings(TrainerConfig.model_validate(config))
    finally:
        logger.remove(handler)
    assert [line.partition(" measures ")[0] for line in lines] == [
        "environmentAlgorithms.maths: loss ipo",
        "algorithm: loss gspo",
        "environmentAlgorithms.maths: loss ipo",
    ]


def test_loss_that_fails_to_import_is_refused_early() -> None:
    with pytest.raises(RoleError, match=r"algorithm\.loss.*no_such_module") as caught:
        step_objective(AlgorithmConfig(loss=LossConfig(name="no_such_module:loss")), 64)
    assert caught.value.code == 78


def test_sample_without_loss_tokens_does_not_count(
    step: Step, make_batch: Callable[..., Batch], make_sample: Callable[..., Sample]
) -> None:
    batch = make_batch(LENGTHS)
    silent = make_sample(8, prompt=8)
    assert not np.any(silent.loss_mask)
    wider = Batch(1, 1, (*batch.samples, silent))
    _, expected = step(batch, [(0, 1, 2, 3, 4)])
    _, found = step(wider, [(0, 1, 2, 3, 4), (5,)])
    torch.testing.assert_close(weights(found), weights(expected), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_linear_loss_gives_the_same_gradient_early(
    step: Step, make_batch: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch, aggregation: str
) -> None:
    loss, batch, rows = Objective("sft", aggregation=aggregation), make_batch(LENGTHS), [(3,), (), (0, 2), (4, 1)]
    assert Mixture(loss).is_linear
    found, early = step(batch, rows, loss=loss)
    monkeypatch.setattr(Mixture, "is_linear", False)
    expected, late = step(batch, rows, loss=loss)
    torch.testing.assert_close(weights(early), weights(late), atol=1e-6, rtol=1e-6)
    assert found["grad_norm"] > 0
    for name in ("loss", "grad_norm", "entropy", "nll", "loss_tokens"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def test_nonlinear_objectives_are_not_marked_linear() -> None:
    assert not Mixture(AIPO).is_linear
    assert not Mixture(Objective("sft", regularizers=Regularizers(kl=0.1))).is_linear
    assert not Mixture(Objective("sft", regularizers=Regularizers(entropy=0.1))).is_linear
    assert not Mixture(Objective("sft", correction={"action": "mask", "high": 9.0})).is_linear
    assert not Mixture(Objective("sft"), {"other": AIPO}).is_linear


def test_linear_loss_skips_an_overflow(step: Step, make_batch: Callable[..., Batch]) -> None:
    metrics, model = step(make_batch(LENGTHS), [(0, 1, 2, 3, 4)], loss=Objective("sft"), damage=True)
    assert metrics["skipped"] == 1
    assert torch.isfinite(weights(model)).sum() == weights(model).numel() - 1


def test_squared_norm_is_exact_for_many_elements() -> None:
    """A sequential sum of 2^24 elements per lane exceeds the precision of float32."""
    model = nn.Linear(6000, 6000, bias=False)
    model.weight.grad = torch.full_like(model.weight, 0.1)
    exact = model.weight.numel() * float(model.weight.grad[0, 0].double()) ** 2
    assert float(squared_norm(model)) == pytest.approx(exact, rel=3e-5)


def test_future_versions_are_refused_by_losses_reading_them(step: Step, make_sample: Callable[..., Sample]) -> None:
    batch = Batch(1, 1, (make_sample(9, version=1),))
    step(batch, [(0,)])
    with pytest.raises(ValueError, match=r"versions must be at most policy_version \(0\), got 1"):
        step(batch, [(0,)], loss=Objective("decoupled_ppo", proximal="log_linear"))
