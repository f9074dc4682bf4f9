"""Repositories with an encoder of images, trained on text: class, frozen encoder, names in files, and a checkpoint's export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from rlrun.algorithms import Mixture, Objective
from rlrun.config.models.language_models import LoRAConfig, ModelConfig
from rlrun.config.models.learning import OptimizerConfig
from rlrun.fit.model_sources import auto_class
from rlrun.protocol.files.batch import Batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.messages.buckets import plan_buckets
from rlrun.trainer.checkpoints.async_saver import Saver
from rlrun.trainer.checkpoints.dcp import POLICY, Part, Progress
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.train_step import train_step
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.encoders import encoder_parts
from rlrun.trainer.modeling.load_weights import LoadOptions
from rlrun.trainer.modeling.model_files import model_files, published_tensors
from rlrun.trainer.modeling.parallel.pipeline_stages import keep_stage
from rlrun.trainer.modeling.shard import decoder_layers, load_model, local_part
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from rlrun.trainer.proof.architecture_check import _make_row
from rlrun.trainer.proof.small_models import small_model
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import bucketing
from rlrun.trainer.weights.bucketing import bucket_layout, gather_buckets
from rlrun.trainer.weights.delta_writer import compare_buckets
from rlrun.trainer.weights.export import export_checkpoint
from rlrun.trainer.weights.hf_writer import gather_tensor, publish_version
from tests.support.sets import few_in_gate
from tests.trainer.architectures import ROW, compute_separately, files_of

_TYPES = ["gemma3", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl"]
PROVED = few_in_gate(_TYPES, ["gemma3", "qwen3_5", "qwen3_vl"])
TRAINED = few_in_gate(_TYPES, ["qwen3_vl"])
ENCODERS = ("visual", "vision_tower", "multi_modal_projector")
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4}


def of_encoder(name: str) -> bool:
    return any(part in name.split(".") for part in ENCODERS)


def make_source(kind: str, folder: Path) -> Path:
    """Write a small model of a type with its encoder, tokenizer and processor, as its authors publish it."""
    config: Any = CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)
    model = small_model(type(whole), config, attention="eager", seq_len=512, seed=3)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def train(model: Any, group: Group, batch: Batch, steps: int = 3) -> Any:
    optimizer = make_optimizer(model, OptimizerConfig(), group.device)
    for _ in range(steps):
        update = Update(batch, [tuple(range(len(batch.samples)))])
        found = train_step(
            model, optimizer, update, group=group, loss=Mixture(Objective("sft")), lr=0.01, max_grad_norm=1.0
        )
        assert found["grad_norm"] > 0
    return optimizer


@pytest.mark.parametrize("kind", PROVED)
def test_packed_text_of_vision_repository_equals_transformers(kind: str, tmp_path: Path, solo: Group) -> None:
    source = make_source(kind, tmp_path / "source")
    model = load_checked(ModelConfig(path=str(source)), str(source), solo, seq_len=64)
    ids = torch.randint(3, 90, (sum(ROW),), generator=torch.Generator().manual_seed(1))
    read = AutoModelForImageTextToText.from_pretrained(source, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        found = token_statistics(model, _make_row(ids, ROW)).logprobs
        expected = compute_separately(read.eval(), ids)
    assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("kind", TRAINED)
def test_trained_vision_repository_keeps_encoder_and_names(
    kind: str, tmp_path: Path, solo: Group, make_batch: Callable[..., Batch]
) -> None:
    source = make_source(kind, tmp_path / "source")
    config = ModelConfig(path=str(source), dtype="float32")
    model = load_checked(config, str(source), solo, seq_len=64)
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if of_encoder(name)}
    assert frozen
    optimizer = train(model, solo, make_batch([5, 9]))
    assert {id(one) for group in optimizer.param_groups for one in group["params"]} == {
        id(one) for name, one in model.named_parameters() if name not in frozen
    }
    files = model_files(model, config, str(source))
    publish_version(model, tmp_path / "version", files=files, dtype="float32", group=solo)
    before, after = files_of(source), files_of(tmp_path / "version")
    assert before.keys() == after.keys()
    equal = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert equal == {name for name in before if of_encoder(name)}
    assert any(of_encoder(name) for name in equal)
    assert json.loads((tmp_path / "version" / "preprocessor_config.json").read_text()) == PROCESSOR
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "version", output_loading_info=True)
    assert (report["missing_keys"], report["unexpected_keys"]) == (set(), set())


@pytest.mark.parametrize("kind", TRAINED)
def test_resumed_and_exported_vision_checkpoint_reads_encoder_from_source(
    kind: str, tmp_path: Path, solo: Group, make_batch: Callable[..., Batch]
) -> None:
    source = make_source(kind, tmp_path / "source")
    config = ModelConfig(path=str(source), dtype="float32")
    model = load_checked(config, str(source), solo, seq_len=64)
    optimizer = train(model, solo, make_batch([5, 9]), steps=1)
    saver = Saver({POLICY: Part(model, optimizer)}, solo, background=False)
    saver.save(Progress(1), tmp_path / "checkpoint")
    files = model_files(model, config, str(source))
    publish_version(model, tmp_path / "version", files=files, dtype="float32", group=solo)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", config, str(source), step=1)
    expected, found = files_of(tmp_path / "version"), files_of(tmp_path / "out")
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    resumed = load_checked(config, str(source), solo, seq_len=64, options=LoadOptions(with_weights=False))
    current = dict(model.named_parameters())
    encoder = {name: one for name, one in resumed.named_parameters() if of_encoder(name)}
    assert encoder
    assert all(torch.equal(local_part(one), local_part(current[name])) for name, one in encoder.items())


def test_difference_of_vision_versions_neither_gathers_nor_has_bytes_of_the_encoder(
    tmp_path: Path, solo: Group, make_batch: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source("qwen3_vl", tmp_path / "source")
    config = ModelConfig(path=str(source), dtype="bfloat16")
    model = load_checked(config, str(source), solo, seq_len=64)
    buckets = plan_buckets(bucket_layout(model, "bfloat16"), bucket_bytes=1)
    old = gather_buckets(model, buckets, dtype="bfloat16", root=0, pinned=False)
    train(model, solo, make_batch([5, 9]), steps=1)
    every = gather_buckets(model, buckets, dtype="bfloat16", root=0, pinned=False)
    gathered: list[int] = []

    def recorded(tensor: torch.Tensor, *options: Any) -> torch.Tensor:
        gathered.append(local_part(tensor).data_ptr())
        return gather_tensor(tensor, *options)

    monkeypatch.setattr(bucketing, "gather_tensor", recorded)
    new = gather_buckets(model, buckets, dtype="bfloat16", root=0, pinned=False, earlier=old)
    assert new.keys() == every.keys()
    assert all(torch.equal(values, every[index]) for index, values in new.items())
    decoder = {
        local_part(tensor).data_ptr() for name, tensor in published_tensors(model).items() if not of_encoder(name)
    }
    assert {*gathered} == decoder
    sizes = compare_buckets(new, old).sizes
    by_name = {slot.tensor.name: sizes[bucket.index] for bucket in buckets for slot in bucket.slots}
    assert sum(size for name, size in by_name.items() if of_encoder(name)) == 0
    assert sum(size for name, size in by_name.items() if not of_encoder(name)) > 0
    assert any(of_encoder(name) for name in by_name)


def test_adapters_of_vision_repository_are_only_in_the_decoder(tmp_path: Path) -> None:
    source = make_source("qwen3_vl", tmp_path / "source")
    model: Any = load_model(ModelConfig(path=str(source)), str(source))
    assert len(model.model.visual.blocks) == len(model.model.language_model.layers), "the encoder has as many layers"
    assert decoder_layers(model) is model.model.language_model.layers
    lora.inject_adapters(model, LoRAConfig(rank=2, modules_to_save=["lm_head"]))
    adapted = lora.layers_with_adapter(model)
    assert adapted
    assert all(name.startswith("model.language_model.layers.") for name in adapted)
    names = set(lora.adapter_tensors(model))
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    assert not any(one.requires_grad for name, one in model.named_parameters() if of_encoder(name))


@pytest.mark.parametrize("pattern", ["visual", "model", "visual.merger"])
def test_encoder_cannot_be_trained_next_to_adapters(pattern: str, tmp_path: Path) -> None:
    source = make_source("qwen3_vl", tmp_path / "source")
    model = load_model(ModelConfig(path=str(source)), str(source))
    with pytest.raises(RoleError, match=f"lora.modulesToSave: '{pattern}' matches no modules"):
        lora.inject_adapters(model, LoRAConfig(rank=2, modules_to_save=[pattern]))


def test_encoder_is_only_on_the_first_stage(tmp_path: Path) -> None:
    source = make_source("qwen3_vl", tmp_path / "source")
    for index, expected in ((0, ["model.visual"]), (1, [])):
        model: Any = load_model(ModelConfig(path=str(source)), str(source))
        keep_stage(model, decoder_layers(model), index, 2)
        assert list(encoder_parts(model)) == expected
        assert any(of_encoder(name) for name, _ in model.named_parameters()) == bool(expected)


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl"])
def test_small_model_has_a_small_encoder(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    config.get_text_config().num_hidden_layers = 4
    with torch.device("meta"):
        whole = auto_class(config).from_config(config)
    model: Any = small_model(type(whole), config, attention="eager", seq_len=512, seed=0)
    assert 0 < sum(one.numel() for part in encoder_parts(model).values() for one in part.parameters()) < 200_000
    text = model.config.get_text_config()
    section = (text.rope_parameters or {}).get("mrope_section")
    if kind.startswith("qwen"):
        half = text.head_dim if getattr(text, "head_dim", None) else text.hidden_size // text.num_attention_heads
        assert sum(section) == int(half * text.rope_parameters.get("partial_rotary_factor", 1.0)) // 2


@pytest.mark.parametrize("section", [[16, 24, 24], [24, 20, 20], [11, 11, 10]])
def test_sections_of_axes_keep_their_sum(section: list[int]) -> None:
    config: Any = CONFIG_MAPPING["qwen3_vl"]()
    text = config.get_text_config()
    text.head_dim = 2 * sum(section)
    text.rope_parameters["mrope_section"] = section
    model: Any = small_model(_class_of(config), config, attention="eager", seq_len=512, seed=0)
    small = model.config.get_text_config()
    assert sum(small.rope_parameters["mrope_section"]) == small.head_dim // 2


def _class_of(config: Any) -> Any:
    with torch.device("meta"):
        return type(auto_class(config).from_config(config))


def test_model_without_images_keeps_the_causal_class(tmp_path: Path) -> None:
    assert auto_class(CONFIG_MAPPING["qwen3"]()).__name__ == "AutoModelForCausalLM"
    own = CONFIG_MAPPING["qwen3_vl"]()
    own.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    assert auto_class(own).__name__ == "AutoModelForCausalLM"
    make_source("qwen3_vl", tmp_path)
    assert auto_class(AutoConfig.from_pretrained(tmp_path)).__name__ == "AutoModelForImageTextToText"
