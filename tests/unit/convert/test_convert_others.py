"""Refusal of files of unsupported trainers, with the trainer's name and a table of counterparts."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.problems import ConfigError
from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import convert_settings, read_settings
from rlrun.convert.tables.other_trainers import OtherTrainer, other_trainers

SCHEMA = RLRunSpec.model_json_schema(by_alias=True)
FILES = {
    "EasyR1": ("run.sh", "python3 -m verl.trainer.main config=c.yaml data.seed=1\n"),
    "SkyRL": (
        "run.sh",
        "uv run --extra vllm -m skyrl_train.entrypoints.main_base trainer.policy.model.path=m trainer.epochs=2\n",
    ),
    "slime": ("run.sh", "A=(--eps-clip 0.2)\nray job submit -- python3 train.py --n-samples-per-prompt 8 ${A[@]}\n"),
    "OpenRLHF": ("run.sh", "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --pretrain m --temperature 1\n"),
    "NeMo-RL": (
        "grpo.yaml",
        "grpo: {num_prompts_per_step: 32}\nloss_fn: {ratio_clip_min: 0.2}\npolicy: {model_name: m}\n",
    ),
    "TRL": ("run.sh", "accelerate launch grpo.py --model_name_or_path m --num_generations 8 --learning_rate 1e-6\n"),
}
MORE = {
    "EasyR1": ("config.yaml", "data: {train_files: a.parquet}\nworker: {actor: {optim: {lr: 1.0e-6}}}\n"),
    "SkyRL": ("c.yaml", "trainer: {policy: {model: {path: m}}}\ngenerator: {n_samples_per_prompt: 5}\n"),
    "slime": ("run.sh", "python3 train_async.py --rollout-batch-size=32\n"),
    "OpenRLHF": ("run.sh", "deepspeed --module openrlhf.cli.train_sft --max_len 2048\n"),
    "NeMo-RL": ("run.sh", "uv run ./examples/run_grpo_math.py --config x.yaml policy.model_name=Qwen/Qwen3-0.6B\n"),
    "TRL": ("grpo.yaml", "model_name_or_path: Qwen/Qwen3-0.6B\nnum_generations: 8\nlearning_rate: 1.0e-6\n"),
}


@pytest.mark.parametrize("trainer", other_trainers(), ids=lambda one: one.name)
def test_twenty_keys_with_fields_that_exist(trainer: OtherTrainer) -> None:
    assert len(trainer.keys) == len({one.key for one in trainer.keys}) == 20
    for one in trainer.keys:
        shape: Any = SCHEMA
        for part in one.field.split("."):
            properties = dict(_properties(shape))
            assert part in properties, f"{trainer.name}: {one.key}: spec has no field {one.field}"
            shape = properties[part]


def _properties(shape: Any) -> Any:
    """Return the fields of a schema, through references, alternatives and lists."""
    if "$ref" in shape:
        yield from _properties(SCHEMA["$defs"][shape["$ref"].rpartition("/")[2]])
    for inner in (*shape.get("anyOf", ()), *shape.get("allOf", ()), *([shape["items"]] if "items" in shape else ())):
        yield from _properties(inner)
    yield from shape.get("properties", {}).items()


@pytest.mark.parametrize("files", [FILES, MORE], ids=["first", "second"])
@pytest.mark.parametrize("name", FILES)
def test_unsupported_trainer_file_is_refused_with_key_table(name: str, files: dict[str, tuple[str, str]]) -> None:
    source, text = files[name]
    with pytest.raises(ConfigError) as refused:
        convert_settings(read_settings(text, source, {}), Context("run"), [source])
    said = str(refused.value)
    trainer = next(one for one in other_trainers() if one.name == name)
    assert said.startswith(source)
    assert f"files of {name} are not supported" in said
    assert all(one.key in said and f"spec.{one.field}" in said for one in trainer.keys)
