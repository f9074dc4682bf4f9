"""Models with per-layer sizes or a separate text configuration, from their files to a step's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlrun.algorithms import Mixture, Objective
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.protocol.files.batch import Batch
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.train_step import train_step
from rlrun.trainer.modeling.flops import model_cost
from rlrun.trainer.modeling.model_files import ModelFiles
from rlrun.trainer.modeling.shard import load_model
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import hf_writer
from tests.trainer.family_models import make_model

_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}


def model_of(kind: str) -> Any:
    """Build a small model with random weights.

    Each layer of Gemma 4 has its own head size, Gemma 3 has a part for images, and ModernBERT's decoder names its head
    like other models name their decoder.
    """
    if kind == "gemma4_text":
        return make_model(
            kind, 0, head_dim=8, global_head_dim=16, vocab_size_per_layer_input=96, hidden_size_per_layer_input=8
        )
    if kind == "modernbert-decoder":
        return make_model(kind, 0)
    text = make_model("gemma3_text", 0).config
    config = CONFIG_MAPPING[kind](text_config=text.to_dict(), vision_config=_IMAGES, mm_tokens_per_image=4)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4_text", "modernbert-decoder"])
def test_uncommon_model_is_trained_and_published(
    kind: str, tmp_path: Path, solo: Group, make_batch: Callable[..., Batch]
) -> None:
    source = tmp_path / "source"
    model_of(kind).save_pretrained(source)
    config = ModelConfig(path=str(source))
    cost = model_cost(load_model(config, str(source)))
    assert cost.pair == 12 * 2 * 32, "of the text alone"
    model = load_checked(config, str(source), solo, seq_len=64)
    optimizer = make_optimizer(model, OptimizerConfig(), solo.device)
    trained = train_step(
        model,
        optimizer,
        Update(make_batch([5, 9]), [(0, 1)]),
        group=solo,
        loss=Mixture(Objective("sft")),
        lr=0.01,
        max_grad_norm=1.0,
    )
    assert trained["grad_norm"] > 0
    target = tmp_path / "version"
    hf_writer.publish_version(
        model,
        target,
        files=ModelFiles({"config.json": (source / "config.json").read_bytes()}),
        dtype="float32",
        group=solo,
    )
    before, after = (
        {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        for folder in (source, target)
    )
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        name for name in before if not any(part in name for part in ("vision", "multi_modal", "layer_scalar"))
    }
    AutoModelForCausalLM.from_pretrained(target)
