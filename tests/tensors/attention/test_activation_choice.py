"""`activationCheckpointing: auto` in the trainer, computed from GPU memory and model sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, PreTrainedConfig, Qwen3Config

from rlrun.config.models.roles import TrainerConfig, TrainerSpec
from rlrun.trainer.modeling import activation_checkpointing, packed_attention
from rlrun.trainer.modeling.activation_checkpointing import activation_mode, choose_for
from rlrun.trainer.modeling.shard import Memory, decoder_layers, shard_model
from rlrun.trainer.ranks.group import Group

GIB = 2**30


def qwen() -> PreTrainedConfig:
    """Return the configuration of Qwen3-0.6B."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )


def run(**fields: Any) -> TrainerConfig:
    common = {"name": "r", "uid": "r", "output_dir": "/r", "max_steps": 1, "seq_len": 65_536, "seed": 0}
    model = {"model": {"path": "/m"}, "algorithm": {}, "checkpoint": {}, "gpus_per_replica": 1}
    return TrainerConfig.model_validate(common | model | {"activation_checkpointing": "auto"} | fields)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [({}, "selective"), ({"micro_batch_tokens": 131_072}, "attention"), ({"seq_len": 16_384}, "none")],
)
def test_checkpointing_mode_follows_gpu_memory(fields: dict[str, Any], mode: str) -> None:
    assert choose_for(run(**fields), qwen(), 80 * GIB).mode == mode


def test_checkpointing_mode_counts_the_reference_model() -> None:
    own = {"algorithm": {"preset": "distill", "reference": {"model": "Qwen/Qwen3-8B"}}}
    assert choose_for(run(**own), qwen(), 80 * GIB).mode == "attention"
    unknown = {"algorithm": {"preset": "distill", "reference": {"model": "someone/unknown"}}}
    assert choose_for(run(**unknown), qwen(), 80 * GIB).mode == "selective"


def test_gpu_rank_logs_chosen_checkpointing_mode(
    solo: Group, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_checkpointing, "device_memory", lambda device: 80 * GIB)
    on_gpu = replace(solo, device=torch.device("cuda"))
    assert activation_mode("auto", run(), qwen(), on_gpu) == "selective"
    (line,) = log_lines
    assert line.startswith("activationCheckpointing auto is selective: none needs 87.5 GiB")
    assert activation_mode("full", run(), qwen(), on_gpu) == "full"
    assert activation_mode("auto", run(), MambaConfig(), on_gpu) == "none"
    assert log_lines[1].startswith("activationCheckpointing auto is none: cannot estimate the memory of this model: ")
    assert activation_mode("auto", None, qwen(), on_gpu) == "none"


def test_cpu_rank_uses_no_activation_checkpointing(solo: Group, log_lines: list[str]) -> None:
    memory = Memory.from_config(run())
    assert activation_mode(memory.activations, memory.run, qwen(), solo) == "none"
    assert log_lines == ["activationCheckpointing auto is none: the trainer computes on a CPU"]


def test_default_mode_adds_no_work_on_cpu(solo: Group) -> None:
    """Layers keep their own forward pass, as with `none`."""
    assert TrainerSpec().activation_checkpointing == "auto"
    memory = Memory.from_config(TrainerConfig.model_validate(run().model_dump(exclude={"activation_checkpointing"})))
    small = Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, head_dim=8)
    packed_attention.register_attention()
    model = AutoModelForCausalLM.from_config(small, attn_implementation=packed_attention.NAME)
    layers = list(decoder_layers(shard_model(model, solo, memory=memory)))
    assert ["forward" in vars(layer) for layer in layers] == [False] * len(layers)
