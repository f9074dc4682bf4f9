"""Policy losses: check values of the design, edge cases, numerics, refusals and metrics."""

import math

import pytest
import torch
from torch import Tensor

from rlrun.algorithms import (
    LOSSES,
    LossBatch,
    LossInputs,
    LossOutput,
    TokenLoss,
    add_metric_sums,
    denominator_count,
    kl_estimate,
    mismatch_kl,
    objective_means,
    policy_loss,
)

T = [-0.5, -1, -2, -0.1, -3, -0.7, -0.2, -1.5]
I = [-0.6, -0.5, -2.5, -0.1, -0.4, -0.7, -1.9, -1.4]  # noqa: E741
MASK = [False, True, True, True, True, False, True, True]
LENGTHS = [5, 3]


def run(name: str, t: list[float] | Tensor = T, **changes: object) -> tuple[LossOutput, Tensor]:
    """Return output and gradient on t of the design page's two sequences, with `changes` applied."""
    logprobs = torch.as_tensor(t, dtype=torch.float32).clone().requires_grad_()
    arguments: dict[str, object] = {
        "inference_logprobs": torch.tensor(I),
        "advantages": torch.tensor([0.5, -0.5]),
        "mask": torch.tensor(MASK),
        "sequence_lengths": LENGTHS,
    } | changes
    batch = {key: arguments.pop(key) for key in [*arguments] if key in LossBatch.__dataclass_fields__}
    output = policy_loss(name, logprobs, LossBatch(**batch), **arguments)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output, gradient


@pytest.mark.parametrize(
    ("name", "options", "loss", "gradient"),
    [
        ("dppo", {}, 0.255798, [0, -0.05071, -0.13723, -0.08333, -0.00706, 0, 0.45673, 0.07537]),
        (
            "dppo",
            {"mask_high": 0.05, "mask_low": 0.02},
            0.317789,
            [0, -0.05071, 0.00017, -0.08333, -0.00706, 0, 0.45673, -0.00003],
        ),
        ("masked_is", {}, 0.129327, [0, -0.05054, -0.13739, -0.08333, 0, 0, 0.45616, 0.07540]),
    ],
)
def test_policy_loss_matches_check_values(
    name: str, options: dict[str, float], loss: float, gradient: list[float]
) -> None:
    for denominator in (None, 6, 6.0, torch.tensor(6)):
        output, found = run(name, denominator=denominator, **options)
        assert output.loss.item() == pytest.approx(loss, abs=1e-5)
        assert found.tolist() == pytest.approx(gradient, abs=1e-5)


def test_aipo_per_token_matches_check_values() -> None:
    expected = [-0.55259, -0.30327, -0.82436, -0.5, -0.03714, 0.5, 2.73697, 0.45242]
    everything = torch.ones(8, dtype=torch.bool)
    for k, value in enumerate(expected):
        output, gradient = run("aipo", mask=torch.arange(8) == k, denominator=1)
        assert output.loss.item() == pytest.approx(value, abs=1e-5)
        assert gradient[k].item() == pytest.approx(value, abs=1e-5)
    assert run("aipo", mask=everything)[0].loss.item() == pytest.approx(sum(expected) / 8, abs=1e-5)


def test_aipo_keeps_gradient_of_truncated_token() -> None:
    output, gradient = run("aipo", delta=1.5, mask=torch.arange(8) == 6)
    assert output.loss.item() == pytest.approx(0.5 * 1.5)
    assert gradient[6].item() == pytest.approx(0.5 * 1.5)
    assert output.metrics["clip_fraction"].item() == 1


def test_gspo_sequence_ratios() -> None:
    t = torch.tensor([-1.0] * 4 + [-2.0] * 3)
    o = torch.tensor([-1.5] * 4 + [-3.0] * 3)
    output, gradient = run(
        "gspo",
        t,
        inference_logprobs=t,
        proximal_logprobs=o,
        advantages=torch.tensor([-1.0, -1.0]),
        mask=torch.ones(7),
        sequence_lengths=[4, 3],
        denominator=1,
    )
    assert gradient.tolist() == pytest.approx([math.exp(0.5)] * 4 + [math.e] * 3, abs=1e-5)
    assert output.loss.item() == pytest.approx(4 * math.exp(0.5) + 3 * math.e, abs=1e-4)
    assert output.metrics["ratio_max"].item() == pytest.approx(math.e)


def test_losses_use_inference_logprobs_as_default_proximal() -> None:
    for name in ("ppo", "gspo", "cispo", "sapo"):
        alone, _ = run(name)
        given, _ = run(name, proximal_logprobs=torch.tensor(I))
        other, _ = run(name, proximal_logprobs=torch.tensor(I) - 0.5)
        assert alone.loss.item() == given.loss.item() != other.loss.item()


def test_masked_is_sequence_ratio_matches_hand_calculation() -> None:
    output, gradient = run("masked_is", ratio="sequence")
    first, second = math.exp(-0.5 + 0.5 + 0 - 2.6), math.exp(1.7 - 0.1)
    # The last token of the first sequence is dropped (ρ < 1/8), but the mean still counts all four loss tokens.
    expected = (-first * 0.5 * (-1 - 2 - 0.1) / 4 + second * 0.5 * (-0.2 - 1.5) / 2) / 2
    assert output.loss.item() == pytest.approx(expected, abs=1e-6)
    one, two = -first * 0.5 / 4 / 2, second * 0.5 / 2 / 2
    assert gradient.tolist() == pytest.approx([0, one, one, one, 0, 0, two, two], abs=1e-6)


def test_masked_is_drops_whole_sequences() -> None:
    for i in ([-0.1] * 3 + [-9.0], [-0.1, -0.1, -6.2, -0.1], [-3.0, -3.0, -3.0, -3.0]):
        t = [-0.5, -0.5, -0.5, -0.5]
        changes = {
            "inference_logprobs": torch.tensor(i),
            "advantages": torch.ones(4),
            "mask": torch.ones(4),
            "sequence_lengths": [4],
            "mask_high": 1e6,
        }
        dropped = max(math.exp(a - b) for a, b in zip(t, i, strict=True)) > 100 or sum(t) - sum(i) > 4 * math.log(10)
        assert run("masked_is", t, **changes)[1].any().item() is not dropped


@pytest.mark.parametrize(("gap", "dropped"), [(math.log(20), True), (math.log(9), False), (-math.log(20), True)])
def test_masked_is_geometric_mean_excludes_prompt(gap: float, dropped: bool) -> None:
    """A mean over all 14 tokens of prompt and answer would keep all three ratios inside [0.1, 10]."""
    t = torch.full((14,), -4.0)
    answer = torch.arange(14) >= 12
    _, gradient = run(
        "masked_is",
        t,
        inference_logprobs=t - gap * answer,
        advantages=torch.ones(1),
        mask=answer,
        sequence_lengths=[14],
        mask_low=0.0,
        mask_high=1e6,
    )
    assert gradient.any().item() is not dropped
    assert not gradient[:12].any()


def test_teacher_pull_requires_reference() -> None:
    with pytest.raises(ValueError, match="reference_logprobs must be given if teacher_tau > 0"):
        run("masked_is", teacher_tau=0.5)
    reference = torch.tensor(T) + 1.0
    _, gradient = run("masked_is", teacher_tau=0.5, adv_tau=0.0, reference_logprobs=reference)
    ratio = torch.exp(torch.tensor(T) - torch.tensor(I))
    expected = torch.where(torch.tensor(MASK) & (ratio > 0.125), -ratio * 0.5 / 6, 0)
    assert gradient.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def inputs_of(name: str, values: Tensor) -> dict[str, Tensor]:
    """Return the optional inputs that a loss requires."""
    wanted = {"decoupled_ppo": "proximal_logprobs", "ref_kl": "reference_logprobs", "distill": "reference_logprobs"}
    return {wanted[name]: values} if name in wanted else {}


@pytest.mark.parametrize("name", list(LOSSES))
def test_empty_batch_gives_differentiable_zero(name: str) -> None:
    for denominator in (None, 0, 128.0):
        own = inputs_of(name, torch.tensor(I))
        output, gradient = run(name, mask=torch.zeros(8, dtype=torch.bool), denominator=denominator, **own)
        assert output.loss.item() == 0
        assert gradient.tolist() == [0] * 8
        assert set(objective_means(output.metrics).values()) == {0.0}
        nothing = torch.empty(0)
        output, gradient = run(
            name,
            nothing,
            inference_logprobs=nothing,
            advantages=nothing,
            mask=nothing.bool(),
            sequence_lengths=[],
            denominator=denominator,
            **inputs_of(name, nothing),
        )
        assert output.loss.item() == 0
        assert gradient.shape == (0,)
    assert denominator_count(name, torch.zeros(0, dtype=torch.bool), []).item() == 0


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_extreme_ratios_keep_loss_and_gradient_finite(name: str, gap: float) -> None:
    i = torch.full((8,), -300.0)
    for advantage in (1.0, -1.0):
        own = inputs_of(name, i / 2)
        output, gradient = run(name, i + gap, inference_logprobs=i, advantages=torch.full((8,), advantage), **own)
        assert torch.isfinite(output.loss)
        assert torch.isfinite(gradient).all()
        assert all(torch.isfinite(value) for value in output.metrics.values())


def test_extreme_ratios_follow_the_limit_of_the_definition() -> None:
    t, i = [-100.0], [-300.0]
    one = {"mask": torch.ones(1), "sequence_lengths": [1], "inference_logprobs": torch.tensor(i)}
    up, down = {"advantages": torch.ones(1), **one}, {"advantages": -torch.ones(1), **one}
    assert run("ppo", t, **up)[0].loss.item() == pytest.approx(-1.2)
    assert run("ppo", t, **up)[1].item() == 0
    assert run("ppo", t, **down)[0].loss.item() == pytest.approx(3)
    assert run("ppo", t, **down)[1].item() == 0
    assert run("aipo", t, **up)[1].item() == pytest.approx(-8)
    assert run("cispo", t, **up)[1].item() == pytest.approx(-6)
    assert run("masked_is", t, **up)[1].item() == 0


def test_bf16_log_probs_are_computed_in_fp32() -> None:
    output = policy_loss(
        "aipo",
        torch.tensor(T).bfloat16().requires_grad_(),
        LossBatch(
            inference_logprobs=torch.tensor(I),
            advantages=torch.tensor([0.5, -0.5]),
            mask=torch.tensor(MASK),
            sequence_lengths=LENGTHS,
        ),
    )
    assert output.loss.dtype == torch.float32


def test_policy_loss_differentiates_logprobs_only() -> None:
    for name in LOSSES:
        constants = {
            "inference_logprobs": torch.tensor(I, requires_grad=True),
            "proximal_logprobs": torch.tensor(I, requires_grad=True),
            "reference_logprobs": torch.tensor(I, requires_grad=True),
            "advantages": torch.tensor([0.5, -0.5], requires_grad=True),
        }
        logprobs = torch.tensor(T, requires_grad=True)
        output = policy_loss(name, logprobs, LossBatch(mask=torch.tensor(MASK), sequence_lengths=LENGTHS, **constants))
        output.loss.backward()
        assert logprobs.grad is not None
        assert all(tensor.grad is None for tensor in constants.values())
        assert not any(value.requires_grad for value in output.metrics.values())


def test_policy_loss_metrics_match_design_batch() -> None:
    output, _ = run("dppo", mask_high=0.05, mask_low=0.02, reference_logprobs=torch.tensor(T) - 1.0)
    kept = [k for k, on in enumerate(MASK) if on]
    gaps = [T[k] - I[k] for k in kept]
    found = objective_means(output.metrics)
    assert found["tokens"] == 6
    assert found["sequences"] == 2
    assert found["mismatch_kl"] == pytest.approx(sum(math.exp(g) - g - 1 for g in gaps) / 6, abs=1e-5)
    assert found["mismatch_kl_max"] == pytest.approx(math.exp(1.7) - 2.7, abs=1e-5)
    assert found["ratio"] == pytest.approx(sum(math.exp(g) for g in gaps) / 6, abs=1e-5)
    assert found["ratio_max"] == pytest.approx(math.exp(1.7), abs=1e-5)
    assert found["dropped_fraction"] == pytest.approx(2 / 6)
    assert found["reference_kl"] == pytest.approx(math.exp(-1.0), abs=1e-5)
    assert output.metrics["dropped_fraction"].item() == 2


def test_clip_fractions() -> None:
    # Loss tokens: ρ = .61, 1.65, 1, .07 with A > 0, and 5.47, .90 with A < 0.
    assert run("ppo")[0].metrics["clip_fraction"].item() == 2
    assert run("ppo", dual_clip=6.0)[0].metrics["clip_fraction"].item() == 1
    assert run("cispo", eps_low=0.2, eps_high=0.2)[0].metrics["clip_fraction"].item() == 4
    assert run("cispo")[0].metrics["clip_fraction"].item() == 0
    # Sequence ratios: e^-.65 with A > 0, e^.8 with A < 0: neither moved with its advantage.
    assert run("gspo")[0].metrics["clip_fraction"].item() == 0
    assert run("gspo", advantages=torch.tensor([-0.5, 0.5]))[0].metrics["clip_fraction"].item() == 6


def test_dual_clip_none_disables_dual_clip() -> None:
    """The loss is max(-A·r, -A·clip(r)) if A < 0: the ratio of 5.47 keeps its loss and gradient, which the default of
    3 cuts off.
    """
    options: dict[str, object] = {"mask": torch.ones(8, dtype=torch.bool), "denominator": 1.0}
    capped, flat = run("ppo", **options)
    output, gradient = run("ppo", dual_clip=None, **options)
    ratio = math.exp(-0.2 + 1.9)
    assert float(output.loss - capped.loss) == pytest.approx(0.5 * (ratio - 3.0), rel=1e-5)
    assert (float(flat[6]), float(gradient[6])) == (0.0, pytest.approx(0.5 * ratio, rel=1e-5))
    assert torch.equal(flat[[0, 1, 2, 3, 4, 5, 7]], gradient[[0, 1, 2, 3, 4, 5, 7]])
    assert output.metrics["clip_fraction"] == capped.metrics["clip_fraction"] - 1
    decoupled = {name: torch.tensor(T) for name in ("proximal_logprobs",)}
    bounded, weighed = (run("decoupled_ppo", cap=cap, dual_clip=None, **options, **decoupled)[0] for cap in (5.0, None))
    assert bounded.metrics["cap_fraction"] == 1
    assert weighed.metrics["cap_fraction"] == 0
    assert float(weighed.metrics["weight"] - bounded.metrics["weight"]) == pytest.approx(ratio - 5.0, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "aip"}, r"unknown loss 'aip' \(did you mean aipo\?\); known: aipo, cispo, decoupled_ppo"),
        ({"detla": 2.0}, r"unknown option of loss aipo 'detla' \(did you mean delta\?\); known: delta"),
        ({"delta": 0.0}, r"delta must be greater than 0, got 0.0"),
        ({"delta": math.inf}, "delta must be a finite number, got inf"),
        ({"delta": "8"}, "delta must be a finite number, got '8'"),
        ({"delta": True}, "delta must be a finite number, got True"),
        ({"name": "ppo", "eps_low": 1.5}, "eps_low must be at least 0 and at most 1, got 1.5"),
        ({"name": "ppo", "dual_clip": 1.0}, "dual_clip must be greater than 1"),
        ({"name": "masked_is", "ratio": "group"}, "ratio must be one of 'token', 'sequence'"),
        ({"name": "masked_is", "mask_low": 9.0}, r"mask_low \(9.0\) must not exceed mask_high \(8.0\)"),
        ({"sequence_lengths": [5, 2]}, "sequence_lengths add up to 7, but there are 8 tokens"),
        ({"sequence_lengths": [8, 0]}, "sequence_lengths must be positive, got 0"),
        ({"inference_logprobs": torch.zeros(7)}, r"inference_logprobs must have shape \[8\], got \[7\]"),
        ({"advantages": torch.zeros(3)}, r"advantages must have shape \[8\] or \[2\], got \[3\]"),
        ({"mask": torch.ones(2, 4)}, r"mask must have shape \[8\]"),
        ({"mask": torch.full((8,), 0.5)}, "mask must be boolean, or contain only 0 and 1"),
        ({"proximal_logprobs": torch.zeros(1)}, r"proximal_logprobs must have shape \[8\]"),
        ({"reference_logprobs": torch.zeros(1)}, r"reference_logprobs must have shape \[8\]"),
        ({"t": [[-1.0]]}, r"logprobs must be packed, of shape \[T\]"),
        ({"t": [*T[:-1], math.nan]}, "logprobs is not finite: nan at token 7"),
        (
            {"inference_logprobs": torch.tensor([*I[:-1], -math.inf])},
            "inference_logprobs is not finite: -inf at token 7",
        ),
        ({"advantages": torch.tensor([math.inf, 0.0])}, "advantages is not finite: inf at token 0"),
        ({"proximal_logprobs": torch.full((8,), math.nan)}, "proximal_logprobs is not finite"),
        ({"reference_logprobs": torch.full((8,), math.nan)}, "reference_logprobs is not finite"),
        ({"denominator": 0}, "denominator must be a positive number, got 0.0 for 6 loss tokens"),
        ({"denominator": torch.tensor(-1.0)}, "denominator must be a positive number"),
        ({"denominator": math.nan}, "denominator must be a positive number"),
        ({"denominator": torch.ones(2)}, "denominator must be one number"),
    ],
)
def test_invalid_argument_is_named_in_error(changes: dict[str, object], message: str) -> None:
    call = {"name": "aipo"} | changes
    with pytest.raises(ValueError, match=message):
        run(**call)  # type: ignore[arg-type]


def test_huge_finite_advantages_keep_metrics_finite() -> None:
    output, _ = run("aipo", advantages=torch.full((8,), 3e38), denominator=1e30)
    assert torch.isfinite(output.metrics["tokens"])


def test_kl_estimates() -> None:
    t = torch.tensor([-1.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.5, -1.0])
    expected = {"k1": [0.5, -1.0], "k2": [0.125, 0.5], "k3": [math.exp(-0.5) - 0.5, math.e - 2]}
    slopes = {"k1": [1, 1], "k2": [0.5, -1.0], "k3": [1 - math.exp(-0.5), 1 - math.e]}
    for kind, values in expected.items():
        estimate = kl_estimate(kind, t, reference)
        assert estimate.tolist() == pytest.approx(values, abs=1e-6)
        (slope,) = torch.autograd.grad(estimate.sum(), t)
        assert slope.tolist() == pytest.approx(slopes[kind], abs=1e-6)
    far = torch.tensor([-500.0], requires_grad=True)
    (slope,) = torch.autograd.grad(kl_estimate("k3", far, torch.tensor([-1.0])).sum(), far)
    assert slope.item() < 0
    assert math.isfinite(slope.item())
    with pytest.raises(ValueError, match="unknown KL estimate 'k4'; known: k1, k1\\+, k2, k3"):
        kl_estimate("k4", t, reference)
    with pytest.raises(ValueError, match="reference_logprobs has shape"):
        kl_estimate("k1", t, reference[:1])


def test_mismatch_kl_equals_its_equation() -> None:
    found = mismatch_kl(torch.tensor(T), torch.tensor(I))
    assert found.tolist() == pytest.approx([math.exp(t - i) - (t - i) - 1 for t, i in zip(T, I, strict=True)], abs=1e-5)
    with pytest.raises(ValueError, match="inference_logprobs has shape"):
        mismatch_kl(torch.tensor(T), torch.tensor(I)[:3])


def squared(inputs: LossInputs, *, weight: float) -> TokenLoss:
    return TokenLoss(weight * inputs.log_ratio.square(), {"gap_max": inputs.log_ratio.abs()})


def total_only(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(inputs.logprobs.sum())


def constant(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(inputs.advantages)


def bare_tensor(inputs: LossInputs) -> Tensor:
    return inputs.logprobs


NOT_A_FUNCTION = 3


def test_custom_loss_is_loaded_by_import_path() -> None:
    output, gradient = run(f"{__name__}:squared", weight=0.5)
    gaps = [(t - i) if on else 0.0 for t, i, on in zip(T, I, MASK, strict=True)]
    assert output.loss.item() == pytest.approx(sum(g * g for g in gaps) / 2 / 6, abs=1e-5)
    assert gradient.tolist() == pytest.approx([g / 6 for g in gaps], abs=1e-5)
    assert output.metrics["gap_max"].item() == pytest.approx(2.6)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("squared", {"wieght": 1.0}, r"unknown option of loss .*:squared 'wieght' \(did you mean weight\?\)"),
        ("squared", {}, "option weight must be given"),
        ("absent", {}, r"loss .*:absent: module .*test_policy_loss has no absent"),
        ("NOT_A_FUNCTION", {}, "NOT_A_FUNCTION is a int, not a function"),
        ("total_only", {}, r"loss must be per token, \[8\]; got \[\]"),
        ("constant", {}, "does not depend on logprobs"),
        ("bare_tensor", {}, "must return a TokenLoss, got Tensor"),
    ],
)
def test_custom_loss_must_follow_the_contract(path: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(f"{__name__}:{path}", **options)


def test_failing_import_path_reports_import_error() -> None:
    with pytest.raises(ValueError, match=r"cannot import no_such_package\.rl \(ModuleNotFoundError.*PYTHONPATH"):
        run("no_such_package.rl:loss")


def test_merged_metrics_keep_maxima_and_add_sums() -> None:
    first, _ = run("ppo", mask=torch.arange(8) == 6)
    second, _ = run("ppo", mask=torch.arange(8) == 1)
    merged = add_metric_sums([first.metrics, second.metrics])
    assert merged["tokens"].item() == 2
    assert merged["ratio_max"].item() == pytest.approx(math.exp(1.7))
    assert objective_means(merged)["ratio"] == pytest.approx((math.exp(1.7) + math.exp(-0.5)) / 2)


def test_mismatch_by_quarters_of_answers_equals_a_loop() -> None:
    """Sequences of 7, 1, 10 and 0 loss tokens, with prompts and a tool's answer between them."""
    masks = [[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], [0, 1], [1] * 10, [0, 0, 0]]
    generator = torch.Generator().manual_seed(0)
    lengths = [len(mask) for mask in masks]
    mask = torch.tensor([bool(one) for sequence in masks for one in sequence])
    trainer, engine = (-torch.rand(sum(lengths), generator=generator) for _ in range(2))
    batch = LossBatch(
        inference_logprobs=engine, advantages=torch.ones(sum(lengths)), mask=mask, sequence_lengths=lengths
    )
    found = objective_means(policy_loss("aipo", trainer, batch).metrics)
    quarters: list[list[float]] = [[], [], [], []]
    for gaps, kept in zip((trainer - engine).split(lengths), mask.split(lengths), strict=True):
        answer = gaps[kept].tolist()
        for index, gap in enumerate(answer):
            quarters[4 * index // len(answer)].append(math.exp(gap) - 1 - gap)
    assert [len(one) for one in quarters] == [6, 4, 5, 3]
    for number, values in enumerate(quarters, start=1):
        assert found[f"mismatch_kl/q{number}"] == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert not [name for name in found if name.startswith("tokens/")]


def test_quarter_without_tokens_has_no_mismatch() -> None:
    batch = LossBatch(
        inference_logprobs=torch.zeros(3),
        advantages=torch.ones(3),
        mask=torch.tensor([False, True, False]),
        sequence_lengths=[2, 1],
    )
    found = objective_means(policy_loss("aipo", torch.zeros(3), batch).metrics)
    assert {name for name in found if name.startswith("mismatch_kl/")} == {"mismatch_kl/q1"}
