"""A manifest under options and over variables."""

from __future__ import annotations

import pytest

from rlrun.api.manifest import parse_manifest
from rlrun.api.resource import RLRunSpec
from rlrun.api.variation import Variation, take_variation
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


def refused(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        varied(*words)
    return str(error.value).splitlines()


def test_options_win_over_the_manifest_and_it_over_variables() -> None:
    env = {"RLRUN_MAX_STEPS": "8", "RLRUN_SEED": "9", "PRIME_TRAINER__OPTIM__LR": "0.5"}
    spec = varied("--ckpt.interval=3", "--environments.0.group-size", "4", env=env)
    assert (spec.max_steps, spec.seed, spec.trainer.optimizer.lr) == (7, 9, 0.5)
    assert (spec.checkpoint.interval, spec.environments[0].group_size, spec.environments[0].id) == (3, 4, "x")
    assert varied("--max-steps", "5", "--trainer.model.ac", env=env).max_steps == 5


def test_mistakes_are_told_at_their_source() -> None:
    assert sorted(refused("--max-steps", "0", "--trainer.optimizr.lr", "1")) == [
        "command line: --max-steps: got 0, expected a whole number from 1 to 10000000",
        "command line: --trainer.optimizr.lr: unknown option (did you mean --trainer.optimizer.lr?)",
    ]
    [problem] = refused("--orchestrator.batch-size", "9")
    assert problem.startswith("command line: ")
    assert "must be divisible" in problem


def test_what_is_the_commands_own_is_left_to_it() -> None:
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
