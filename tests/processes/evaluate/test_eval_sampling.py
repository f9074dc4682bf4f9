"""Sampling of evaluation: greedy or with any engine parameter; training accepts only parameters that keep log-probs exact."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support" / "orchestrator" / "simulation"))

from orch_simulation import make_config, simulate

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import read_manifest
from rlrun.cli.evaluation import eval_main, synthesize_main
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.rollout import EvaluationSamplingConfig, SamplingConfig
from rlrun.inference.client.engine_client import Completion, EngineClient, EngineError
from rlrun.inference.http.generate import Head
from rlrun.protocol.messages.endpoints import ENGINE_GENERATE_PACKED
from rlrun.protocol.messages.packed_columns import Reader
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from tests.processes.evaluate.test_eval_role import TASKS, Gated, attempt, make

ALL_OF_THEM: dict[str, Any] = {
    "temperature": 0.0,
    "min_tokens": 1,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.3,
    "seed": 5,
    "stop": ["zz"],
}


@dataclass
class RecordingEngine(Gated):
    """Engine that records the parameters of its requests."""

    asked: list[dict[str, Any]] = field(default_factory=list)

    async def generate(self, token_ids: Sequence[int], *, n: int, max_tokens: int, **more: Any) -> list[Completion]:  # type: ignore[override]
        self.asked.append({"n": n, "max_tokens": max_tokens} | more)
        return await super().generate(token_ids, n=n, max_tokens=max_tokens, **more)


async def test_task_eval_sends_all_parameters_and_seed_per_sample(tmp_path: Path) -> None:
    engine = RecordingEngine()
    evaluation = {"num_tasks": TASKS, "samples_per_task": 2, "sampling": ALL_OF_THEM}
    assert await attempt(make(tmp_path, evaluation=evaluation, policies=None), 1, engine) == exit_codes.OK
    assert len(engine.asked) == 2 * TASKS
    assert {asked["temperature"] for asked in engine.asked} == {0.0}
    parameters = [asked["parameters"] for asked in engine.asked]
    assert sorted(own["seed"] for own in parameters) == [5] * TASKS + [6] * TASKS
    rest = {k: v for k, v in ALL_OF_THEM.items() if k not in ("temperature", "seed")}
    assert all({k: v for k, v in own.items() if k != "seed"} == rest for own in parameters)


async def test_evaluation_between_steps_is_greedy_while_training_samples(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    engine = RecordingEngine()
    evaluation = {"interval": 1, "num_tasks": 3, "sampling": {"temperature": 0.0, "top_k": 7}}
    config = make_config(tmp_path, tmp_path / "model", max_steps=2, evaluation=evaluation)
    outcome = await simulate(config, engines=[engine])
    assert outcome.code == exit_codes.OK
    greedy = [asked for asked in engine.asked if asked["temperature"] == 0]
    assert [asked["parameters"] for asked in greedy] == [{"top_k": 7}] * 3 * 3
    assert all(not asked["parameters"] for asked in engine.asked if asked["temperature"] != 0)
    assert len(engine.asked) > len(greedy)


@pytest.mark.parametrize("packed", [True, False])
async def test_engine_gets_parameters_by_its_own_names(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    found: list[dict[str, Any]] = []

    async def refuse(
        self: EngineClient, method: str, path: str, timeout: float, body: bytes, limit: int
    ) -> tuple[int, bytes]:
        if path == ENGINE_GENERATE_PACKED and not packed:
            return 404, b""
        head = Reader(body).head if packed else json.loads(body)
        if packed:
            Head.model_validate(head)
        found.append(head["sampling_params"])
        return 500, b"{}"

    monkeypatch.setattr(EngineClient, "_send_request", refuse)
    complete = EvaluationSamplingConfig(**ALL_OF_THEM | {"min_tokens": 9}).merged_over(SamplingConfig())
    common: dict[str, Any] = {"n": 1, "temperature": 0.0, "top_p": 1.0, "stop_token_ids": [2], "cache_salt": "3"}
    async with EngineClient("http://engine", "key") as client:
        for parameters in (complete.engine_parameters(5), {"top_k": 3}):
            with pytest.raises(EngineError):
                await client.generate([1], max_tokens=4, parameters=parameters, **common)
    expected = {k: v for k, v in ALL_OF_THEM.items() if k != "min_tokens"}
    assert {k: found[0][k] for k in expected} == expected
    assert found[0]["min_tokens"] == 4, "a turn with less room than that would be refused"
    if not packed:
        assert [sampling["detokenize"] for sampling in found] == [True, False], "texts are found only in text"


def test_evaluation_inherits_stop_seed_and_template_arguments() -> None:
    thinks = {"enable_thinking": True}
    training = SamplingConfig(stop=["a"], seed=3, chat_template_arguments=thinks)
    same, other = (
        EvaluationSamplingConfig().merged_over(training),
        EvaluationSamplingConfig(stop=["b"], seed=4).merged_over(training),
    )
    assert (same.stop, same.seed, same.chat_template_arguments) == (["a"], 3, thinks)
    assert (other.stop, other.seed, other.chat_template_arguments) == (["b"], 4, thinks)
    assert [same.seed_of(sample) for sample in (0, 1)] == [3, 4]


def test_omitted_evaluation_sampling_equals_training() -> None:
    complete = EvaluationSamplingConfig(temperature=0.0).merged_over(SamplingConfig(temperature=0.7, max_tokens=99))
    assert (complete.temperature, complete.max_tokens) == (0.0, 99)
    assert complete.engine_parameters(complete.seed_of(3)) == {}
    assert complete.identity() == {"temperature": 0.0, "max_tokens": 99}, "answers of before are not asked again"


SPEC: dict[str, Any] = {"model": {"path": "m"}, "environments": [{"id": "reverse-text"}], "seqLen": 512}


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ({"maxTokens": 512}, r"evaluation.sampling, for environments\[0\]: maxTokens \(512\) must be less than seqLen"),
        ({"minTokens": 300}, r"minTokens \(300\) must be at most maxTokens \(256\)"),
        ({"topP": 0}, "greater than 0"),
        ({"topK": -1}, "greater than or equal to 0"),
        ({"temperature": -0.1}, "greater than or equal to 0"),
        ({"stop": [""]}, "at least 1 character"),
    ],
)
def test_contradictory_evaluation_sampling_is_refused(blocks: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RLRunSpec.model_validate(SPEC | {"evaluation": {"sampling": blocks}})


RESHAPING = {"topP": 0.9, "topK": 20, "minP": 0.1, "minTokens": 4} | {
    f"{kind}Penalty": 1.1 for kind in ("repetition", "presence", "frequency")
}


@pytest.mark.parametrize("name", RESHAPING)
@pytest.mark.parametrize("place", ["sampling", "environments[0].sampling"])
def test_training_refuses_sampling_that_changes_log_probs(tmp_path: Path, name: str, place: str) -> None:
    spec = json.loads(json.dumps(SPEC))
    (spec if place == "sampling" else spec["environments"][0])["sampling"] = {name: RESHAPING[name]}
    file = tmp_path / "run.yaml"
    document = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "a"}, "spec": spec}
    file.write_text(json.dumps(document))
    told = rf"{name} \({RESHAPING[name]}\) is not supported in training: .*; remove it or set it in evaluation.sampling"
    with pytest.raises(ConfigError, match=told):
        read_manifest(file)


@pytest.mark.parametrize("command", [eval_main, synthesize_main])
def test_option_outside_bounds_is_refused_by_name(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["run.yaml", "--base", "--output", "o.jsonl", "--temperature", "-1"])
    assert ended.value.code == exit_codes.USAGE
    assert "--temperature: got '-1', expected a number from 0 to 10" in capsys.readouterr().err


@pytest.mark.parametrize("command", [eval_main, synthesize_main])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--chat-template-arguments", '{"tools": []}'],
            "--chat-template-arguments: got {'tools': []}: chatTemplateArguments has tools",
        ),
        (["--max-tokens", "4096"], "sampling for reverse-text: maxTokens (4096) must be less than seqLen (512)"),
    ],
)
def test_sampling_options_are_checked_before_start(
    tmp_path: Path, command: Any, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, spec = tmp_path / "run.yaml", SPEC | {"model": {"tiny": {}}}
    document = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "a"}, "spec": spec}
    file.write_text(json.dumps(document))
    assert command([str(file), "--base", "--output", str(tmp_path / "o.jsonl"), *options]) == exit_codes.USAGE
    assert told in capsys.readouterr().err
