"""Pipeline stages of a model: kept parameters, and refused architectures and runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import CriticConfig, LoRAConfig, ModelConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.parallel import ParallelismConfig, PipelineSchedule
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Sample
from rlrun.protocol.files.failures import RoleError
from rlrun.trainer.learning.critic import check_layout
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.parallel.pipeline_stages import keep_stage, second_copy, stage_of
from rlrun.trainer.modeling.shard import decoder_layers
from rlrun.trainer.proof.start_check import fault_of_stages

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def on_meta(kind: str, **options: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, **options))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen2", {}), ("mistral", {"sliding_window": 8}), ("gemma2", {"head_dim": 8}), ("qwen3", {"head_dim": 8})],
)
def test_supported_architecture_can_be_staged(kind: str, options: dict[str, Any]) -> None:
    assert fault_of_stages(on_meta(kind, **options), seq_len=64) is None


def test_architecture_with_scaled_embeddings_is_refused() -> None:
    found = fault_of_stages(on_meta("granite", embedding_multiplier=3.0), seq_len=64)
    assert found is not None
    assert found.startswith("the output of the last layer differs by")


def test_unknown_head_is_refused_for_stages() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](n_layer=2, n_embd=32, n_head=2))
    assert fault_of_stages(model, seq_len=64) is not None


@pytest.mark.parametrize("tied", [False, True])
def test_stages_contain_every_parameter_name_once(make_model: Callable[..., nn.Module], tied: bool) -> None:
    whole = make_model("qwen3", tied=tied)
    found: list[str] = []
    for index in range(2):
        stage = copy.deepcopy(whole)
        keep_stage(stage, decoder_layers(stage), index, 2)
        copied = second_copy(stage)
        found += [name for name, parameter in stage.named_parameters() if parameter is not copied]
        kept = stage_of(stage)
        assert kept is not None
        assert (kept.first, kept.last, kept.layers) == (index == 0, index == 1, {index: range(index, index + 1)})
        assert kept.shapes == {name: tensor.shape for name, tensor in whole.state_dict().items()}
    assert sorted(found) == sorted(name for name, _ in whole.named_parameters())


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_with_several_stages_contain_names_once(schedule: PipelineSchedule, tied: bool) -> None:
    whole = on_meta("qwen2", tie_word_embeddings=tied)
    found: list[str] = []
    numbers = []
    for index in range(2):
        rank = copy.deepcopy(whole)
        keep_stage(rank, decoder_layers(rank), index, 2, per_rank=2, schedule=schedule)
        copied = second_copy(rank)
        found += [name for name, parameter in rank.named_parameters() if parameter is not copied]
        kept = stage_of(rank)
        assert kept is not None
        numbers.append([*kept.layers])
        assert (copied is not None) == (tied and schedule == "Interleaved1F1B" and index == 1)
    assert sorted(found) == sorted(name for name, _ in whole.named_parameters())
    assert numbers == ([[0, 2], [1, 3]] if schedule == "Interleaved1F1B" else [[0, 3], [1, 2]])


def test_head_waits_only_in_a_pipeline(
    make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample]
) -> None:
    """The head's residuals count as activations: a pipeline needs the memory for activations of the next row."""
    whole: Any = make_model("qwen3")
    stage = copy.deepcopy(whole)
    keep_stage(stage, decoder_layers(stage), 1, 2)
    row = micro_batch([make_sample(9)], torch.device("cpu"))
    hidden = whole.model.embed_tokens(row.input_ids).detach()
    token_statistics(whole, row)
    token_statistics(stage, row, received=hidden)
    assert not whole._head.waits
    assert stage._head.waits


def test_every_stage_requires_an_adapter(make_model: Callable[..., nn.Module]) -> None:
    model = make_model("qwen3")
    lora.inject_adapters(model, LoRAConfig(rank=4, targets=["layers.1.*"]))
    with pytest.raises(
        RoleError, match=r"pp \(2\) creates a stage of the layers 0 to 0, which have no layer of lora\.targets"
    ):
        keep_stage(model, decoder_layers(model), 1, 2)


def test_critic_refuses_pipeline_parallelism(tmp_path: Path) -> None:
    config = TrainerConfig(
        name="x",
        uid="u",
        output_dir=str(tmp_path),
        model=ModelConfig(path="m"),
        max_steps=1,
        seq_len=32,
        seed=0,
        checkpoint=CheckpointConfig(),
        processes_per_replica=2,
        parallelism=ParallelismConfig(pp=2),
        algorithm=AlgorithmConfig(preset="ppo", critic=CriticConfig()),
    )
    with pytest.raises(RoleError, match=r"trainer\.parallelism\.pp \(2\) does not work with algorithm\.critic"):
        check_layout(config)
