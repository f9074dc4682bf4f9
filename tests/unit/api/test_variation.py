"""Manifest overrides from command-line options and variables."""

from __future__ import annotations

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import Variation, parse_manifest, take_variation
from rlrun.config.loading.problems import ConfigError

MANIFEST = """apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: words}
spec:
  model: {path: m}
  maxSteps: 7
  environments: [{id: x}]
"""


def varied(*words: str, env: dict[str, str] | None = None) -> RLRunSpec:
    return parse_manifest(MANIFEST, "run.yaml", Variation(words, env or {}))[0].spec


def list_problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        varied(*words)
    return str(error.value).splitlines()


def test_options_win_over_the_manifest_and_it_over_variables() -> None:
    env = {"RLRUN_MAX_STEPS": "8", "RLRUN_SEED": "9", "PRIME_TRAINER__OPTIM__LR": "0.5"}
    spec = varied("--ckpt.interval=3", "--environments.0.group-size", "4", env=env)
    assert (spec.max_steps, spec.seed, spec.trainer.optimizer.lr) == (7, 9, 0.5)
    assert (spec.checkpoint.interval, spec.environments[0].group_size, spec.environments[0].id) == (3, 4, "x")
    assert varied("--max-steps", "5", "--trainer.model.ac", env=env).max_steps == 5


def test_override_errors_name_their_source() -> None:
    assert sorted(list_problems("--max-steps", "0", "--trainer.optimizr.lr", "1")) == [
        "command line: --max-steps: got 0, expected a whole number from 1 to 10000000",
        "command line: --trainer.optimizr.lr: unknown option (did you mean --trainer.optimizer.lr?)",
    ]
    [problem] = list_problems("--orchestrator.batch-size", "9")
    assert problem.startswith("command line: ")
    assert "must be divisible" in problem


def test_options_of_the_command_are_not_taken() -> None:
    words = [
        "a.yaml",
        "--resume",
        "--max-steps",
        "3",
        "--trainer-gpu-ids",
        "0",
        "--ckpt.keep",
        "2",
        "--no-suspend",
        "--plain",
    ]
    rest, taken = take_variation(words, ("--resume", "--plain", "--trainer-gpu-ids"))
    assert rest == ["a.yaml", "--resume", "--trainer-gpu-ids", "0", "--plain"]
    assert taken == ["--max-steps", "3", "--ckpt.keep", "2", "--no-suspend"]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("--sampling.stop a b run.yaml", 2),
        ("--sampling.stop a b --plain", 2),
        ("--trainer.model.lora.target-modules q k @ f.toml", 2),
        ("--max-steps 3 run.yaml", 1),
        ("--orchestrator.record-rollouts run.yaml", 0),
        ("--orchestrator.record-rollouts false run.yaml", 1),
        ("--no-suspend run.yaml", 0),
        ("--max-steps=3 run.yaml", 0),
        ("--max-steps 3 4 run.yaml", 2),
    ],
)
def test_option_takes_same_values_as_rl(words: str, count: int) -> None:
    option, *rest = words.split()
    left, taken = take_variation([option, *rest], ("--plain",))
    assert taken == [option, *rest[:count]]
    assert left == rest[count:]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--sampling.stop a b", ["a", "b"]),
        ("--sampling.stop a", ["a"]),
        ("--sampling.stop 3", ["3"]),
        ('--sampling.stop ["a","b"]', ["a", "b"]),
        ("--sampling.stop=a", ["a"]),
    ],
)
def test_list_option_accepts_one_or_several_values(words: str, found: list[str]) -> None:
    assert varied(*words.split()).sampling.stop == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--max-steps 3 4",
            '4: is not an option; options start with "--", and a file is written as "@ FILE"; --max-steps takes one value',
        ),
        ("--policies.steps 1,2", "--policies.from-run: required, but not set"),
        ("--sampling.stop", "--sampling.stop: needs a value"),
        ("--environments.0.args a b", "--environments.0.args takes one value"),
    ],
)
def test_wrong_number_of_option_values_is_refused(words: str, said: str) -> None:
    assert any(said in problem for problem in list_problems(*words.split()))
