"""`resolve_spec`: shared values reach every role, and the hash covers everything that changes the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.algorithm.names import complete_options
from rlrun.config.models.run_config import RunConfig
from rlrun.inference.engine_settings import settings_from_config


def resolved(output_dir: str = "/data/a", uid: str = "u", **changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "environments": [{"id": "x"}],
        "seq_len": 1024,
        "max_steps": 7,
        "seed": 3,
    }
    return resolve_spec(RLRunSpec(**base | changes), name="a", uid=uid, output_dir=output_dir)


def test_shared_values_are_in_every_role() -> None:
    config = resolved()
    for role in (config.trainer, config.inference, config.orchestrator):
        assert (role.name, role.uid, role.output_dir) == ("a", "u", "/data/a")
        assert (role.model.path, role.max_steps, role.seq_len, role.seed) == ("m", 7, 1024, 3)
    assert config.trainer.algorithm == config.orchestrator.algorithm
    assert config.trainer.checkpoint == config.orchestrator.checkpoint


def test_lengths_follow_seq_len_unless_set() -> None:
    assert resolved().inference.max_model_len == 1024
    assert resolved().trainer.micro_batch_tokens == 4096
    assert resolved(seq_len=8192).trainer.micro_batch_tokens == 8192
    config = resolved(trainer={"micro_batch_tokens": 4096}, inference={"max_model_len": 2048})
    assert (config.trainer.micro_batch_tokens, config.inference.max_model_len) == (4096, 2048)


def test_environments_inherit_sampling_of_run() -> None:
    own = {"id": "y", "sampling": {"temperature": 0.5, "max_tokens": 8}}
    config = resolved(environments=[{"id": "x"}, own], sampling={"max_tokens": 16})
    samplings = [e.sampling for e in config.orchestrator.environments]
    assert [s.max_tokens for s in samplings if s] == [16, 8]
    assert config.orchestrator.sampling.max_tokens == 16


def test_trainer_receives_environment_specific_algorithms() -> None:
    own = {"loss": {"name": "ppo", "options": {"eps_high": 0.3}}, "filters": {"overlong_mask": True}}
    config = resolved(
        environments=[
            {"id": "x", "name": "maths", "algorithm": own},
            {"id": "y", "algorithm": {"advantage": {"name": "rloo"}}},
            {"id": "z"},
        ],
        algorithm={"regularizers": {"entropy": 0.1}},
    )
    (name,) = config.trainer.environment_algorithms
    chosen = config.trainer.environment_algorithms[name].merged_over(config.trainer.algorithm)
    assert (name, chosen.effective_loss.options, chosen.regularizers.entropy) == ("maths", {"eps_high": 0.3}, 0.1)
    assert config.trainer.environment_algorithms[name].filters is None
    assert RunConfig.model_validate_json(config.model_dump_json(by_alias=True)) == config


def test_trainer_receives_advantage_of_environment_with_kl_reward() -> None:
    environments = [
        {"id": "x", "algorithm": {"advantage": {"name": "rloo"}}},
        {"id": "y", "algorithm": {"advantage": {"name": "opo"}, "regularizers": {"kl": 0.1}}},
    ]
    algorithm = {"reference": {}, "regularizers": {"kl_reward": 0.1}}
    found = resolved(environments=environments, algorithm=algorithm).trainer.environment_algorithms
    assert found["x"].advantage is not None
    assert (found["x"].advantage.name, found["y"].advantage) == ("rloo", None)


def test_orchestrator_receives_tool_parsing_flag_of_engines() -> None:
    for flag, parses in {
        "--enable-auto-tool-choice": True,
        "--enable_auto_tool_choice": True,
        "--max-logprobs=2": False,
    }.items():
        config = resolved(inference={"extra_args": [flag, "--tool-call-parser=hermes"]})
        assert config.orchestrator.engine_parses_tools == parses


def test_orchestrator_receives_parser_arguments_of_engines() -> None:
    arguments = [
        "--max-num-batched-tokens",
        "4",
        "--tool_call_parser",
        "hermes",
        "--enable-chunked-prefill",
        "--reasoning_parser=qwen3",
    ]
    config = resolved(inference={"extra_args": arguments})
    assert config.orchestrator.engine_parsers == ["--tool-call-parser", "hermes", "--reasoning-parser=qwen3"]


def test_run_json_can_be_read_again() -> None:
    config = resolved(algorithm={"preset": "grpo", "loss": {"name": "ppo", "options": {"eps_low": 0.1}}})
    again = RunConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert again.config_hash() == config.config_hash()


def test_null_option_is_kept_in_all_representations() -> None:
    """In a file, in `run.json` and in the trainer's objective, for the run and for one environment."""
    loss = {"name": "ppo", "options": {"dual_clip": None}}
    config = resolved(
        algorithm={"loss": loss},
        environments=[
            {"id": "reverse-text", "algorithm": {"loss": {"name": "decoupled_ppo", "options": {"cap": None}}}}
        ],
    )
    again = RunConfig.model_validate_json(config.model_dump_json(by_alias=True))
    assert again == config
    chosen = again.trainer.algorithm.effective_loss
    assert complete_options("loss", chosen.name, chosen.options)["dual_clip"] is None
    (own,) = again.trainer.environment_algorithms.values()
    assert own.loss is not None
    assert complete_options("loss", own.loss.name, own.loss.options) | {
        "dual_clip": 3.0,
        "cap": None,
    } == complete_options("loss", "decoupled_ppo", {"cap": None})
    assert config.config_hash() != resolved(algorithm={"loss": loss | {"options": {}}}).config_hash()


def test_configuration_hash_covers_results_but_not_location() -> None:
    base = resolved().config_hash()
    assert resolved(output_dir="/elsewhere", uid="v").config_hash() == base
    moved = resolved()
    trainer = moved.trainer.model_copy(update={"port": 1234})
    assert moved.model_copy(update={"trainer": trainer}).config_hash() == base
    assert resolved(inference={"replicas": 3}).config_hash() == base, "it may change while the run goes on"
    assert resolved(seed=4).config_hash() != base
    assert resolved(trainer={"optimizer": {"lr": 1e-3}}).config_hash() != base
    assert len(base) == 16


def test_engine_of_vision_repository_leaves_out_the_encoder(tmp_path: Path) -> None:
    for content, expected in (({"vision_config": {"depth": 27}}, True), ({"model_type": "qwen3"}, False)):
        (tmp_path / "config.json").write_text(json.dumps(content))
        config = resolved(model={"path": str(tmp_path)}).inference
        assert settings_from_config(config, api_key="12345678").language_model_only is expected
    assert settings_from_config(resolved().inference, api_key="12345678").language_model_only is False


def test_engine_receives_lora_rank_of_trainer() -> None:
    assert resolved().inference.lora is None
    config = resolved(trainer={"lora": {"rank": 6}})
    assert config.trainer.lora is not None
    assert config.inference.lora == config.trainer.lora
    assert settings_from_config(config.inference, api_key="12345678").max_lora_rank == 6
    assert settings_from_config(config.inference, api_key="12345678").weights_dir.endswith("/weights")
    several = resolved(trainer={"lora": {"slots": 3}}).inference
    engine = settings_from_config(several, api_key="12345678")
    assert (engine.lora_runs, engine.weights_dir) == (3, str(Path(several.output_dir).parent))
    full = resolved(trainer={"lora": {"rank": 6, "modules_to_save": ["lm_head"]}})
    assert settings_from_config(full.inference, api_key="12345678").max_lora_rank is None, "whole weights are served"
    assert settings_from_config(resolved().inference, api_key="12345678").max_lora_rank is None
