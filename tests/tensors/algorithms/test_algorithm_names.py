"""Agreement of the algorithm name tables with their functions, options and presets."""

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

from rlrun.advantages import ADVANTAGES, advantages
from rlrun.advantages.estimate import SHARED_OPTIONS
from rlrun.algorithms import DEFAULT_LOSS, LOSSES, PRESETS, LossBatch, Objective, Preset, gae, losses
from rlrun.algorithms import objective as objectives
from rlrun.config.algorithm.names import (
    ADVANTAGE_ENTRIES,
    DEFAULT_ADVANTAGE,
    DEFAULT_PRESET,
    LOSS_ENTRIES,
    Kind,
    algorithm_inputs,
    complete_options,
    default_aggregation,
    default_proximal,
    find_preset,
    is_import_path,
)
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.trainer.learning.run_objective import step_objective


def test_algorithm_functions_accept_exactly_the_table_options() -> None:
    for table, entries in ((ADVANTAGES, ADVANTAGE_ENTRIES), (LOSSES, LOSS_ENTRIES)):
        assert list(table) == list(entries)
        for name, algorithm in table.items():
            parameters = inspect.signature(algorithm.function).parameters.values()
            keywords = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
            if algorithm.function is losses.masked_is:  # its keywords are a TypedDict
                keywords = list(losses.MaskedISOptions.__annotations__)
            if table is ADVANTAGES and algorithm.function.__name__ != "_per_token":
                # The shared options are applied outside of the estimator, to every entry whose table row lists them.
                assert not set(keywords) & set(SHARED_OPTIONS)
                keywords += [option for option in SHARED_OPTIONS if option in entries[name].options]
            if keywords:
                assert sorted(keywords) == sorted(entries[name].options), name


def test_loss_table_lists_every_loss_function() -> None:
    functions = {
        function
        for function in vars(losses).values()
        if inspect.isfunction(function) and function.__module__ == losses.__name__ and function.__name__[0] != "_"
    }
    assert {algorithm.function for algorithm in LOSSES.values()} == functions


def test_objective_binds_its_loss_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and options are resolved when an objective is constructed, not in each micro-batch."""
    objective = Objective("ppo", {"eps_high": 0.3}, correction={"action": "mask"}, proximal="recompute")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("looked up in a step")

    for name in ("bind", "default_aggregation", "complete_correction", "correction_problem"):
        monkeypatch.setattr(objectives, name, refuse)
    zeros = torch.zeros(2)
    mask = torch.ones(2, dtype=torch.bool)
    assert objective.denominator(mask, [2]) == 2.0
    objective(
        zeros.clone().requires_grad_(),
        LossBatch(inference_logprobs=zeros, advantages=zeros, mask=mask, sequence_lengths=[2]),
    )


def test_objective_validates_options_at_construction() -> None:
    with pytest.raises(ValueError, match=r"loss ppo: eps_low must be"):
        Objective("ppo", {"eps_low": 2.0})
    with pytest.raises(ValueError, match="aggregation_length must be given"):
        Objective(aggregation="constant_length")
    with pytest.raises(ValueError, match="would apply the ratio of trainer and engine twice"):
        Objective("aipo", correction={"action": "clamp"})


def test_default_options_pass_their_own_validation() -> None:
    tables: list[tuple[Kind, dict[str, dict[str, object]]]] = [
        ("advantage", {name: {o: s.default for o, s in e.options.items()} for name, e in ADVANTAGE_ENTRIES.items()}),
        ("loss", {name: {o: s.default for o, s in e.options.items()} for name, e in LOSS_ENTRIES.items()}),
    ]
    for kind, defaults in tables:
        for name, options in defaults.items():
            assert complete_options(kind, name, options) == options == complete_options(kind, name, {})


@pytest.mark.parametrize("name", list(PRESETS))
def test_preset_gradient_follows_the_advantage_sign(name: str) -> None:
    chosen = PRESETS[name]
    assert chosen.description
    if chosen.advantage == "gae":
        mask, lengths = torch.ones(4, dtype=torch.bool), [2, 2]
        values = gae(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.zeros(4), mask=mask, sequence_lengths=lengths).advantages
    else:
        options: dict[str, Any] = dict(chosen.advantage_options)
        values = torch.from_numpy(advantages(chosen.advantage, [1.0, 0.0], group_size=2, lengths=[2, 2], **options))
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -0.1], requires_grad=True)
    objective = Objective(
        chosen.loss,
        chosen.loss_options,
        aggregation=chosen.aggregation,
        aggregation_length=8 if chosen.aggregation == "constant_length" else None,
        proximal=default_proximal(chosen.loss),
    )
    output = objective(
        logprobs,
        LossBatch(
            inference_logprobs=logprobs.detach(),
            advantages=values,
            mask=torch.ones(4, dtype=torch.bool),
            sequence_lengths=[2, 2],
            reference_logprobs=logprobs.detach() + torch.tensor([1.0, 1.0, -1.0, -1.0]),
        ),
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    # On-policy, every objective raises the log-probabilities of answers that beat their group (or the teacher) and
    # lowers the others.
    assert (gradient[:2] < 0).all()
    assert (gradient[2:] > 0).all() or (name == "sft" and not gradient[2:].any())


def test_algorithm_inputs_list_reference_and_critic() -> None:
    assert algorithm_inputs("loss", "distill", {}) == {"reference": "loss distill"}
    assert algorithm_inputs("advantage", "gae", {}) == {"critic": "advantage gae"}
    assert algorithm_inputs("loss", "masked_is", {}) == {}
    assert algorithm_inputs("loss", "masked_is", {"teacher_tau": 0.5}) == {
        "reference": "teacher_tau (0.5) of loss masked_is"
    }
    assert algorithm_inputs("loss", "my.module:loss", {}) == {}


def test_default_preset_is_aipo_with_group_mean_baseline() -> None:
    assert DEFAULT_PRESET == AlgorithmConfig().preset == "aipo"
    assert PRESETS["aipo"] == Preset(PRESETS["aipo"].description, advantage="grpo", loss="aipo")
    assert (DEFAULT_ADVANTAGE, DEFAULT_LOSS) == ("grpo", "aipo")
    assert complete_options("advantage", "grpo", {}) | {"mean": "group", "std": "none"} == complete_options(
        "advantage", "grpo", {}
    )


NO_DUAL_CLIP = {"dual_clip": None}
GROUP_STD = {"std": "group"}
PAPERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], str]] = {
    "grpo": ("grpo", GROUP_STD, "ppo", NO_DUAL_CLIP, "seq_mean_token_mean"),  # 2402.03300, eq. 3 and section 4.1.2
    "dr_grpo": ("dr_grpo", {}, "ppo", NO_DUAL_CLIP, "constant_length"),  # 2503.20783, figure 1 and listing 1
    "dapo": ("grpo", GROUP_STD, "ppo", NO_DUAL_CLIP | {"eps_high": 0.28}, "token_mean"),  # 2503.14476, eq. 8 and 9
    "gspo": ("grpo", GROUP_STD, "gspo", {}, "seq_mean_token_mean"),  # 2507.18071, eq. 5 and 6
    "cispo": ("grpo", GROUP_STD, "cispo", {}, "token_mean"),  # 2506.13585, eq. 4 and 5
    "sapo": ("grpo", GROUP_STD, "sapo", {}, "seq_mean_token_mean"),  # 2511.20347, eq. 5
    "rloo": ("rloo", {}, "aipo", {}, "seq_mean_token_sum"),  # 2402.14740, eq. 10
    "reinforce_pp": ("reinforce_pp", {}, "ppo", NO_DUAL_CLIP, "token_mean"),  # 2501.03262
    "reinforce_pp_baseline": ("reinforce_pp_baseline", {}, "ppo", NO_DUAL_CLIP, "token_mean"),
    "ppo": ("gae", {}, "ppo", NO_DUAL_CLIP, "token_mean"),  # 1707.06347, eq. 7 and 11
}


@pytest.mark.parametrize("name", list(PAPERS))
def test_preset_matches_its_paper(name: str) -> None:
    found = PRESETS[name]
    aggregation = found.aggregation or default_aggregation(found.loss, found.loss_options)
    assert (found.advantage, found.advantage_options, found.loss, found.loss_options, aggregation) == PAPERS[name]


VERL = {
    "seq_mean_token_mean": (0.0065425, [-0.2064634, 0.0, 0.1466701, 0.0889599, 0.0, 0.1303871]),
    "token_mean": (0.0947480, [-0.2064634, 0.0, 0.2200051, 0.1334399, 0.0, 0.0651935]),
}
TRL = {
    "seq_mean_token_mean": (0.0065413, [-0.2064242, 0.0, 0.1466422, 0.0889430, 0.0, 0.1303623]),
    "token_mean": (0.0947300, [-0.2064242, 0.0, 0.2199633, 0.1334145, 0.0, 0.0651811]),
}
"""Check values per aggregation: TRL's `loss_type` grpo and dapo, verl's `loss_agg_mode` of the same names."""


def test_grpo_matches_trl_and_verl_end_to_end() -> None:
    """Compare loss and gradient of one group of ragged answers, off-policy, with clipping on both sides.

    The check values come from verl 0.9.1's functions without a dual clip, and from TRL 1.16.0's formulas with TRL's
    epsilon of 1e-4 added to the std instead of 1e-6.
    """
    rewards, lengths = [1.0, 0.0, 0.25], [2, 3, 1]
    new = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -0.7], requires_grad=True)
    old = torch.tensor([-0.6, -1.5, -2.5, -0.1, -0.4, -0.9])
    for chosen in (None, "token_mean"):
        config = AlgorithmConfig.model_validate({"preset": "grpo", "aggregation": chosen})
        advantage = config.effective_advantage
        options: dict[str, Any] = dict(advantage.options)
        values = torch.from_numpy(advantages(advantage.name, rewards, group_size=3, lengths=lengths, **options))
        output = step_objective(config, seq_len=16)(
            new,
            LossBatch(
                inference_logprobs=old,
                advantages=values,
                mask=torch.ones(6, dtype=torch.bool),
                sequence_lengths=lengths,
            ),
        )
        (found,) = torch.autograd.grad(output.loss, new)
        for theirs, near in ((VERL, 1e-6), (TRL, 5e-5)):
            loss, gradient = theirs[chosen or "seq_mean_token_mean"]
            assert float(output.loss) == pytest.approx(loss, abs=near)
            assert found.tolist() == pytest.approx(gradient, abs=near)


def test_unknown_preset_is_refused_with_closest_name() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'gspoo' \(did you mean gspo\?\); known: aipo, cispo"):
        find_preset("gspoo")


def test_import_paths_are_recognized() -> None:
    assert is_import_path("package.module:function")
    assert not any(map(is_import_path, ["aipo", "module:", ":f", "a.b.c", "a b:c", "a:b:c", "a..b:c", "1a:b"]))
    assert complete_options("loss", "package.module:function", {"anything": [1]}) == {"anything": [1]}


def test_algorithm_table_does_not_import_torch() -> None:
    code = "import sys, rlrun.config.algorithm.names; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )
