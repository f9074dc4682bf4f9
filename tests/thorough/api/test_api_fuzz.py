"""Fuzzing of manifests: reading returns a run or a list of problems with one line each, and never raises another
error.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlrun.api.resource import RLRun
from rlrun.api.run_manifest import parse_manifest
from rlrun.config.loading.loader import load_model
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import OrchestratorConfig

EXAMPLES = Path(__file__).parents[3] / "examples"
_BUILT_IN = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: all-fields, labels: {team: a}}
spec:
  model: {tiny: {hiddenSize: 64, warmupEnvironment: reverse-text, warmupArgs: {length: 4}}}
  maxSteps: 10
  seqLen: 256
  seed: 1
  algorithm:
    preset: aipo
    loss: {name: aipo, options: {delta: 4.0}}
    advantage: {name: grpo, options: {neg_clipped: true}}
    filters: {zeroVariance: true}
  environments:
  - {id: reverse-text, groupSize: 8, args: {length: 4}, sampling: {temperature: 0.7, maxTokens: 32}}
  - {id: arithmetic, ratio: 0.5}
  sampling: {maxTokens: 64}
  evaluation: {interval: 5, sampling: {temperature: 0.1}}
  trainer: {optimizer: {lr: 1e-3, maxGradNorm: null}, scheduler: {name: cosine}}
  inference: {extraArgs: [--foo]}
  checkpoint: {interval: 5, resume: {policy: Step, step: 3}}
"""
TEXTS = [_BUILT_IN, *(path.read_text() for path in sorted(EXAMPLES.glob("*.yaml")))]
_FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(2**70) | st.just("\ud800")
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def read(text: str) -> None:
    problems = None
    try:
        run, _ = parse_manifest(text, "run.yaml")
    except ConfigError as error:
        problems = error
    if problems is None:
        assert isinstance(run, RLRun)
        return
    lines = str(problems).splitlines()
    assert len(lines) == len(problems.problems) > 0
    assert all(line.startswith("run.yaml") for line in lines)
    assert not any("pydantic" in line or "Traceback" in line for line in lines)
    str(problems).encode()


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(len(text)))
def test_example_manifests_are_valid(text: str) -> None:
    parse_manifest(text, "run.yaml")


@_FUZZ
@given(data=st.data(), text=st.sampled_from(TEXTS), changes=st.integers(1, 3))
def test_changed_values_and_keys_raise_no_traceback(data: st.DataObject, text: str, changes: int) -> None:
    tree = json.loads(json.dumps(parse_yaml(text)))
    for _ in range(changes):
        *parents, last = data.draw(st.sampled_from(places(tree)[1:]))
        place = tree
        for key in parents:
            place = place[key]
        match data.draw(st.sampled_from(["value", "remove", "rename", "add"])):
            case "value":
                place[last] = data.draw(values)
            case "remove":
                del place[last]
            case "rename" if isinstance(place, dict):
                place[data.draw(st.text(max_size=10))] = place.pop(last)
            case _ if isinstance(place, dict):
                place[data.draw(st.text(max_size=10))] = copy.deepcopy(place[last])
    read(json.dumps(tree))


def parse_yaml(text: str) -> Any:
    return yaml.safe_load(text)


@_FUZZ
@given(data=st.data(), text=st.sampled_from(TEXTS))
def test_changed_characters_raise_no_traceback(data: st.DataObject, text: str) -> None:
    characters = list(text)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(characters) - 1))
        characters[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.text(st.sampled_from("{}[]:,-#&*!|>'\"%@` \n\t0e~<?\\xU\x00\ufeff") | st.characters(), max_size=3)
        )
    read("".join(characters))


@_FUZZ
@given(st.text(max_size=200))
def test_any_text_raises_no_traceback(text: str) -> None:
    read(text)


@_FUZZ
@given(
    st.lists(
        st.sampled_from(
            ["--model.path", "--model", "--environments.0.id", "--environments", "--no-model", "--seed", "@"]
        )
        | st.text(max_size=8).map("--{}".format)
        | st.text(max_size=8)
        | values.map(lambda value: json.dumps(value)),
        max_size=8,
    ),
    st.dictionaries(
        st.sampled_from(["RLRUN_MODEL", "RLRUN_MODEL__PATH", "RLRUN_SEED", "RLRUN_ENVIRONMENTS__0"]),
        st.text(max_size=8),
    ),
)
def test_any_command_line_reports_one_line_per_problem(argv: list[str], env: dict[str, str]) -> None:
    argv = [word for word in argv if word not in ("-h", "--help", "--dry-run")]
    with pytest.raises(ConfigError) as error:  # required fields such as uid are never set
        load_model(OrchestratorConfig, argv, env=env, prog="test")
    assert len(str(error.value).splitlines()) == len(error.value.problems)
