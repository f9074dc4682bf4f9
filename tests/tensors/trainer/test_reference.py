"""Frozen reference model: exact values, no training, and its effect on the policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rlrun.algorithms import Objective, Regularizers
from rlrun.config.models.language_models import ModelConfig, ReferenceConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.forward import logprobs_without_gradient
from rlrun.trainer.learning.reference_model import FrozenReference, round_parameters
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.learning.train_step import parameter_checksum
from rlrun.trainer.modeling.shard import local_part, shard_model
from rlrun.trainer.proof.start_check import check_model
from rlrun.trainer.ranks.group import Group
from tests.tensors.trainer.companions import (
    LENGTHS,
    ROWS,
    MakeBatch,
    MakeModel,
    make_learner,
    plain_logprobs,
    weights,
)


def test_reference_logprobs_equal_the_models_own(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    batch = rewarded()
    rows = [micro_batch([batch.samples[i] for i in row], solo.device) for row in [*ROWS, ()]]
    source = FrozenReference(shard_model(make_model("qwen3", tied=True).requires_grad_(False), solo).eval())
    found = source.logprobs(rows)
    assert [len(row) for row in found] == [13, 13, 9, 2]
    expected = plain_logprobs(make_model("qwen3", tied=True, attn="eager"), batch)
    for row, logprobs in zip(ROWS, found, strict=False):
        start = 0
        for i in row:
            length, mask = LENGTHS[i], torch.from_numpy(batch.samples[i].loss_mask)
            ours = logprobs[start : start + length]
            torch.testing.assert_close(ours[mask], expected[i].detach()[mask[1:]], atol=1e-5, rtol=1e-5)
            assert not ours[~mask].any()
            start += length
    assert not found[-1].any()


def test_kl_term_uses_unchanged_reference(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    batch = rewarded()
    torch.manual_seed(3)
    other = make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    reference = shard_model(other.requires_grad_(False), solo).eval()
    before = parameter_checksum(reference)
    learner = make_learner(
        shard_model(make_model(), solo),
        solo,
        loss=Objective(regularizers=Regularizers(kl=0.5, kl_kind="k2")),
        reference=FrozenReference(reference),
    )
    metrics = learner.step([Update(batch, ROWS)], lr=0.01)
    assert parameter_checksum(reference) == before
    assert metrics["time/reference"] > 0

    with torch.no_grad():
        ours = plain_logprobs(make_model(attn="eager"), batch)
        plain = make_model(attn="eager")
        plain.load_state_dict({name: local_part(t) for name, t in reference.state_dict().items()})
        theirs = plain_logprobs(plain, batch)
    masks = [torch.from_numpy(sample.loss_mask)[1:] for sample in batch.samples]
    k2 = sum(float(((t - r)[m] ** 2 / 2).sum()) for t, r, m in zip(ours, theirs, masks, strict=True))
    policy = make_learner(shard_model(make_model(), solo), solo).step([Update(batch, ROWS)], lr=0.01)
    assert metrics["loss"] == pytest.approx(policy["loss"] + 0.5 * k2 / batch.loss_tokens, abs=1e-5)


def test_kl_term_keeps_policy_near_reference(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    last = []
    for weight in (0.0, 10.0):
        learner = make_learner(
            shard_model(make_model(), solo),
            solo,
            loss=Objective(regularizers=Regularizers(kl=weight)),
            reference=FrozenReference(shard_model(make_model().requires_grad_(False), solo).eval()),
        )
        found = [learner.step([Update(rewarded(step=step), ROWS)], lr=3e-3) for step in range(1, 6)]
        assert found[0]["reference_kl"] == pytest.approx(0.0, abs=1e-6)
        last.append(found[-1]["reference_kl"])
    assert last[1] < last[0] / 2


def test_distillation_moves_student_to_teacher_despite_rewards(
    solo: Group, make_model: MakeModel, rewarded: MakeBatch
) -> None:
    torch.manual_seed(5)
    teacher = make_model().requires_grad_(False)
    teacher.lm_head.weight.normal_(std=0.3)
    student = shard_model(make_model(), solo)
    learner = make_learner(
        student, solo, loss=Objective("distill"), reference=FrozenReference(shard_model(teacher, solo))
    )
    found = []
    for step in range(1, 9):
        batch = rewarded([9, 8, 13, 6], step=step)
        with torch.no_grad():  # sampled by the student itself, so no token is dropped
            row = micro_batch(batch.samples, solo.device)
            own = logprobs_without_gradient(student, [row])[0].split([9, 8, 13, 6])
        samples = [
            dataclasses.replace(s, logprobs=t.numpy(), advantages=s.advantages - step)
            for s, t in zip(batch.samples, own, strict=True)
        ]
        found.append(
            learner.step([Update(dataclasses.replace(batch, samples=tuple(samples)), [(0, 1, 2, 3)])], lr=0.03)
        )
    assert found[-1]["reference_kl"] < found[0]["reference_kl"] / 2


def test_teacher_loads_from_its_folder_with_equal_vocabulary(
    solo: Group, source: Path, tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = ModelConfig(path=str(source))
    options = {"initial": str(source), "group": solo, "check": check_model}
    found = FrozenReference.load(ReferenceConfig(), policy, vocabulary=50, seq_len=64, **options)
    assert torch.equal(weights(found.model), weights(make_model()))
    assert not found.model.training
    assert not any(p.requires_grad for p in found.model.parameters())
    with pytest.raises(RoleError, match=r"algorithm\.reference: model .*source.* 50 tokens.*has 51") as caught:
        FrozenReference.load(ReferenceConfig(model=str(source)), policy, vocabulary=51, seq_len=64, **options)
    assert caught.value.code == exit_codes.CONFIGURATION
    with pytest.raises(RoleError, match=r"algorithm\.reference.*is not a folder"):
        FrozenReference.load(
            ReferenceConfig(model=str(tmp_path / "none")), policy, vocabulary=50, seq_len=64, **options
        )


def test_rounded_reference_keeps_exact_rotary_frequencies(make_model: MakeModel) -> None:
    exact, rounded = make_model("qwen3", tied=True), make_model("qwen3", tied=True)
    round_parameters(rounded, torch.bfloat16)
    for ours, theirs in zip(rounded.parameters(), exact.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    frequencies = dict(exact.named_buffers())
    assert frequencies
    assert all(torch.equal(tensor, frequencies[name]) for name, tensor in rounded.named_buffers())


def test_reference_with_nan_logprobs_is_refused(solo: Group, make_model: MakeModel, rewarded: MakeBatch) -> None:
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    learner = make_learner(
        shard_model(make_model(), solo), solo, reference=FrozenReference(shard_model(model.requires_grad_(False), solo))
    )
    with pytest.raises(RoleError, match=r"algorithm\.reference: .* not finite"):
        learner.step([Update(rewarded(), ROWS)], lr=0.01)
