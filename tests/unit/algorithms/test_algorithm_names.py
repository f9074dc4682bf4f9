"""The table of names against the functions behind it."""

import inspect
import subprocess
import sys

import pytest
import torch

from rlrun.advantages import ADVANTAGES, advantages
from rlrun.advantages.estimators import SHAPING
from rlrun.algorithms import DEFAULT_LOSS, LOSSES, PRESETS, Objective
from rlrun.config.algorithm_names import (
    ADVANTAGE_ENTRIES,
    DEFAULT_ADVANTAGE,
    LOSS_ENTRIES,
    Kind,
    complete_options,
    default_proximal,
    is_import_path,
    needs,
    preset,
)


def test_functions_take_exactly_the_options_of_the_table() -> None:
    for table, entries in ((ADVANTAGES, ADVANTAGE_ENTRIES), (LOSSES, LOSS_ENTRIES)):
        assert list(table) == list(entries)
        for name, algorithm in table.items():
            parameters = inspect.signature(algorithm.function).parameters.values()
            keywords = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
            if table is ADVANTAGES and algorithm.function.__name__ != "_per_token":
                keywords = [*keywords, *SHAPING]  # applied to the rewards before any estimator sees them
            if keywords:
                assert sorted(keywords) == sorted(entries[name].options), name


def test_defaults_are_within_their_own_bounds() -> None:
    tables: list[tuple[Kind, dict[str, dict[str, object]]]] = [
        ("advantage", {name: {o: s.default for o, s in e.options.items()} for name, e in ADVANTAGE_ENTRIES.items()}),
        ("loss", {name: {o: s.default for o, s in e.options.items()} for name, e in LOSS_ENTRIES.items()}),
    ]
    for kind, defaults in tables:
        for name, options in defaults.items():
            assert complete_options(kind, name, options) == options == complete_options(kind, name, {})


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_run(name: str) -> None:
    chosen = PRESETS[name]
    assert chosen.description
    values = torch.from_numpy(
        advantages(chosen.advantage, [1.0, 0.0], group_size=2, lengths=[2, 2], **chosen.advantage_options)
    )
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
        inference_logprobs=logprobs.detach(),
        advantages=values,
        mask=torch.ones(4, dtype=torch.bool),
        sequence_lengths=[2, 2],
        reference_logprobs=logprobs.detach() + torch.tensor([1.0, 1.0, -1.0, -1.0]),
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    # On-policy, every objective raises what did better than its group (or than the teacher says) and lowers what did worse.
    assert (gradient[:2] < 0).all()
    assert (gradient[2:] > 0).all() or (name == "sft" and not gradient[2:].any())


def test_what_an_objective_needs() -> None:
    assert needs("loss", "distill", {}) == {"reference": "loss distill"}
    assert needs("advantage", "gae", {}) == {"critic": "advantage gae"}
    assert needs("loss", "masked_is", {}) == {}
    assert needs("loss", "masked_is", {"teacher_tau": 0.5}) == {"reference": "teacher_tau (0.5) of loss masked_is"}
    assert needs("loss", "my.module:loss", {}) == {}


def test_defaults_are_the_preset_grpo() -> None:
    assert (PRESETS["grpo"].advantage, PRESETS["grpo"].loss) == (DEFAULT_ADVANTAGE, DEFAULT_LOSS) == ("grpo", "aipo")


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'gspoo' \(did you mean gspo\?\); known: aipo, cispo"):
        preset("gspoo")


def test_import_paths() -> None:
    assert is_import_path("package.module:function")
    assert not any(map(is_import_path, ["aipo", "module:", ":f", "a.b.c", "a b:c", "a:b:c", "a..b:c", "1a:b"]))
    assert complete_options("loss", "package.module:function", {"anything": [1]}) == {"anything": [1]}


def test_the_table_needs_no_torch() -> None:
    code = "import sys, rlrun.config.algorithm_names; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )
