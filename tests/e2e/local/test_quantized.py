"""Runs from quantized repositories: the trainer and the engines start from the same plain copy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from rlrun.config.models.language_models import TinyModelConfig
from rlrun.trainer.modeling.tiny_model import make_tiny_model, make_tokenizer
from tests.e2e.local.local_run import LocalRun, small_quickstart
from tests.support.quantized_models import quantize_files

pytestmark = pytest.mark.full


def llama_in_fp8(folder: Path) -> None:
    tiny: dict[str, Any] = small_quickstart()["spec"]["model"]["tiny"]
    make_tiny_model(folder, TinyModelConfig.model_validate(tiny))
    quantize_files(folder, "fp8", ("proj.weight",), (64, 48))


def gpt_oss_in_mxfp4(folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    quantize_files(folder, "mxfp4", ("experts.gate_up_proj", "experts.down_proj"))


@pytest.mark.parametrize("make", [llama_in_fp8, gpt_oss_in_mxfp4])
def test_quantized_model_is_trained_and_served_from_one_plain_copy(
    make: Callable[[Path], None], new_run: Callable[..., LocalRun], tmp_path: Path
) -> None:
    make(tmp_path / "source")
    document = small_quickstart(maxSteps=3, evaluation={"interval": 100}, checkpoint={"interval": 3})
    document["spec"]["model"] = {"path": str(tmp_path / "source"), "dtype": "float32"}
    document["spec"]["algorithm"] |= {"filters": {"zeroVariance": False}}
    run = new_run(document)
    run.run()
    folders = [run.folder / "model", *sorted((run.folder / "weights").glob("v*"))]
    assert len(folders) > 1
    for folder in folders:
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    # Both roles start from equal weights, so the first batch has only the rounding difference of two implementations.
    assert run.steps()[0]["mismatch_kl"] < 1e-6


def test_fp8_model_learns(new_run: Callable[..., LocalRun], tmp_path: Path) -> None:
    llama_in_fp8(tmp_path / "source")
    document = small_quickstart(evaluation={"interval": 30})
    document["spec"]["model"] = {"path": str(tmp_path / "source"), "dtype": "float32"}
    run = new_run(document)
    run.run()
    (_, first), *_, (_, last) = run.held_out()
    assert last > first + 0.2
