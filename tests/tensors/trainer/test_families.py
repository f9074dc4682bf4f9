"""Measured support of architectures: wrong ones are refused by name, others are accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, logging

from rlrun.config.models.language_models import ModelConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning import forward
from rlrun.trainer.modeling import load_weights, packed_attention
from rlrun.trainer.modeling.model_files import model_files, published_tensors
from rlrun.trainer.modeling.shard import load_model
from rlrun.trainer.modeling.tensor_names import file_tensors, remember_names, tensor_parts
from rlrun.trainer.proof import architecture_check, routing_check, start_check
from rlrun.trainer.proof.architecture_check import examine_model, find_fault
from rlrun.trainer.proof.small_models import small_model
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group
from tests.support.sets import few_in_gate

_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
_AS_THEY_COME = (
    "llama qwen2 qwen3 qwen2_moe qwen3_moe mistral ministral3 mixtral gemma gemma2 vaultgemma gemma3_text gemma4_text "
    "gpt_oss granite_swa granitemoe_swa mimo_v2_flash phi phi3 olmo olmo2 olmo3 olmoe "
    "flex_olmo starcoder2 gpt2 gpt_bigcode gpt_neox opt biogpt granite granitemoe granitemoeshared cohere cohere2 "
    "glm glm4 glm4_moe deepseek_v3 minimax_m2 smollm3 exaone4 exaone_moe ernie4_5 ernie4_5_moe helium arcee apertus seed_oss nanochat "
    "diffllama persimmon bitnet jetmoe afmoe aria_text axk1 cohere2_moe cwm glm4_moe_lite hy_v3 hyperclovax jais2 laguna mellum "
    "minimax_m3_vl_text modernbert-decoder solar_open youtu"
)
RIGHT: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in _AS_THEY_COME.split()},
    "deepseek_v2": {"n_routed_experts": 64, "num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "ministral": {"head_dim": 128},
}
"""Changes to the default configuration by model type; the plain default matches no published model."""
OWN_ATTENTION = "cannot be trained: its code does not support other attention functions"
UNREAD = r"cannot be trained: its attention \(\w+\) has "
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v4": ({}, r"cannot be trained: log-probabilities differ by [\d.]+ "),
    "doge": ({}, UNREAD + "attention_mask"),
    "llama4_text": ({"attention_chunk_size": 256}, r"cannot be trained: log-probabilities differ by [\d.]+ "),
    "minimax_m3_vl_text": ({"layer_types": ["full_attention"] * 59 + ["minimax_m3_sparse"]}, UNREAD + "block_indices"),
    "minicpm3": ({}, r"cannot be trained: log-probabilities differ by [\d.]+ "),
    # Expert weights are a softmax over the experts within the router's jitter, in engines too; without jitter it
    # selects one expert.
    "phimoe": (
        {},
        r"cannot be trained: its code computes differently in training mode than in evaluation mode, so that ",
    ),
    # They are built with another attention function but do not call it.
    **{kind: ({}, OWN_ATTENTION) for kind in ("bloom", "codegen", "gpt_neox_japanese", "mpt", "rwkv", "xlnet")},
    "stablelm": ({}, "do not pass the row's layout to their attention"),
    "deepseek_v32": ({}, "does not support packed rows"),
    "zamba2": ({}, "a small model of it fails in the start check"),
    "xlstm": ({}, "a small model of it fails in the start check"),
}

GATE_RIGHT = ("llama", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "gpt_oss", "gpt2", "deepseek_v3")
"""One family for each kind of attention, experts and tensor names."""
GATE_WRONG = [
    "doge",
    "llama4_text",
    "phimoe",
    "bloom",
    "stablelm",
    "deepseek_v32",
    "zamba2",
]
"""One family for each refusal reason."""


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture_check, "_found", {})


def full_size(kind: str, **options: Any) -> Any:
    """Build the model on meta and store its names, like `load_sharded`."""
    packed_attention.register_attention()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[kind](**options), attn_implementation=packed_attention.NAME
        )
    remember_names(model)
    return model


@pytest.mark.parametrize("kind", few_in_gate(RIGHT, GATE_RIGHT))
def test_correct_family_is_accepted(kind: str, tmp_path: Path) -> None:
    model = full_size(kind, **RIGHT[kind])
    assert find_fault(model, seq_len=512) is None
    small = small_model(type(model), model.config, attention="eager", seq_len=512, seed=0)
    small.save_pretrained(tmp_path)
    remember_names(small)
    names = [name for part in tensor_parts(small, published_tensors(small)) for name in part.files]
    assert sorted(names) == sorted(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("kind", few_in_gate(WRONG, GATE_WRONG))
def test_incorrect_family_is_refused_by_name(kind: str) -> None:
    options, told = WRONG[kind]
    model = full_size(kind, **options)
    fault = find_fault(model, seq_len=512)
    assert fault is not None
    assert fault.startswith(f"{type(model).__name__} cannot be trained: ")
    assert re.search(told, fault), fault


@pytest.mark.parametrize(
    ("kind", "options", "seq_len"),
    [
        ("mistral", {}, 8192),  # the window is 4096
        ("gemma3_text", {}, 8192),
        pytest.param("gemma2", {}, 8192, marks=pytest.mark.full),
        ("gpt_oss", {}, 64),  # shorter than its windows
        pytest.param("cohere2", {}, 8192, marks=pytest.mark.full),
        ("llama4_text", {"attention_chunk_size": 512, "attn_temperature_tuning": False}, 512),
        ("phi3", {"rope_parameters": _LONG | {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48}}, 4096),
        ("gpt2", {"resid_pdrop": 0.5, "attn_pdrop": 0.5, "embd_pdrop": 0.5}, 512),
    ],
)
def test_supported_options_are_accepted(kind: str, options: dict[str, Any], seq_len: int) -> None:
    assert find_fault(full_size(kind, **options), seq_len=seq_len) is None


def test_seq_len_beyond_the_positions_of_a_model_is_refused() -> None:
    assert find_fault(full_size("gpt2"), seq_len=512) is None
    fault = find_fault(full_size("gpt2"), seq_len=2048) or "nothing"
    assert "seqLen is 2048, but the model supports 1024 positions; lower seqLen" in fault


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        # The longest sequence of a row selects the factors for all of its sequences.
        pytest.param(
            "phi3",
            {"rope_parameters": _LONG | {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48}},
            marks=pytest.mark.full,
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    ],
)
def test_length_dependent_model_gets_rows_of_one_sequence_for_a_long_seq_len(
    kind: str, options: dict[str, Any]
) -> None:
    assert examine_model(full_size(kind, **options), seq_len=512).packing == "row"
    verdict = examine_model(full_size(kind, **options), seq_len=8192)
    assert (verdict.fault, verdict.packing) == (None, "alone")
    assert "sequences in one row influence each other" in verdict.reason


def test_architecture_check_covers_every_layer_kind() -> None:
    """Only the sixth of 8 layers is of another kind."""
    kinds = ["full_attention"] * 8
    whole = examine_model(full_size("lfm2", num_hidden_layers=8, layer_types=kinds), seq_len=512)
    kinds[5] = "conv"
    mixed = examine_model(full_size("lfm2", num_hidden_layers=8, layer_types=kinds), seq_len=512)
    assert (whole.packing, mixed.packing) == ("row", "mixer")


@pytest.mark.parametrize("broken", ["values", "gradients", "files", "names"])
def test_architecture_check_finds_each_kind_of_fault(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = full_size("mixtral")
    if broken == "values":  # treats the row as one sequence
        whole = packed_attention.row_layout
        monkeypatch.setattr(architecture_check, "row_layout", lambda lengths, device: whole([sum(lengths)], device))
    if broken == "gradients":
        computed = forward.token_statistics

        def detached(model: Any, row: Any) -> Any:
            for parameter in model.model.layers[1].self_attn.v_proj.parameters():
                parameter.requires_grad_(False)
            return computed(model, row)

        monkeypatch.setattr(architecture_check, "token_statistics", detached)
    if broken == "files":  # swaps gate and up

        def swapped(model: Any, part: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            found = file_tensors(model, part, tensors)
            return {
                name.replace(".w1.", ".w?.").replace(".w3.", ".w1.").replace("w?", "w3"): t for name, t in found.items()
            }

        monkeypatch.setattr(architecture_check, "file_tensors", swapped)
    if broken == "names":  # uses names of another family
        monkeypatch.setattr(
            architecture_check,
            "file_tensors",
            lambda *options: {name.replace("w1", "gate_proj"): t for name, t in file_tensors(*options).items()},
        )
    told = {
        "values": "sequences in one row influence each other",
        "gradients": r"the gradient of model.layers.1.self_attn.v_proj.weight differs by 1 of its norm",
        "files": "transformers loads 2 of ",
        "names": "transformers cannot load the files that the trainer writes",
    }
    verdict = examine_model(model, seq_len=512)
    assert told[broken] in (verdict.fault or verdict.reason)
    assert (verdict.fault is None) == (broken == "values")  # rows of one sequence would be correct


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (architecture_check, "small_model"),
        (architecture_check, "token_statistics"),
        (architecture_check, "divide_mixers"),
        (architecture_check, "save_file"),
        (routing_check, "set_routing"),
        (start_check, "small_model"),
    ],
)
def test_deadline_of_the_caller_is_not_a_fault_of_the_architecture(
    module: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expire(*_: object, **__: object) -> None:
        raise TimeoutError("the caller's deadline")

    mixers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]}
    model = full_size("lfm2", **mixers) if function == "divide_mixers" else full_size("mixtral")
    check = start_check.fault_of_stages if module is start_check else find_fault
    if function == "divide_mixers":  # inside of the attempt with divided mixers
        monkeypatch.setattr(architecture_check, "pass_rows", lambda _, layers: layers[0].register_forward_hook(expire))
    else:
        monkeypatch.setattr(module, function, expire)
    with pytest.raises(TimeoutError, match="the caller's deadline"):
        check(model, seq_len=64)


def test_deadline_of_the_caller_is_not_a_fault_of_building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _kind("llama")[1].save_pretrained(tmp_path)

    def expire(*_: object, **__: object) -> None:
        raise TimeoutError("the caller's deadline")

    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
    monkeypatch.setattr(load_weights, "build_model", expire)
    with pytest.raises(RoleError, match=r"cannot load the model .*: the caller's deadline"):
        load_weights.model_on_meta(ModelConfig(path=str(tmp_path)), str(tmp_path))


def test_architecture_check_leaves_no_trace() -> None:
    model = full_size("llama")
    torch.manual_seed(7)
    state, verbosity = torch.get_rng_state(), logging.get_verbosity()
    with torch.no_grad():
        assert find_fault(model, seq_len=512) is None
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert logging.get_verbosity() == verbosity
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


def test_unsupported_model_is_refused_before_weights_are_read(
    tmp_path: Path, solo: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(*_kind("doge"), attention="eager", seq_len=512, seed=0)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(load_weights, "open_files", None)  # would download the weights
    with pytest.raises(
        RoleError, match=r"model .*: DogeForCausalLM cannot be trained: .* has attention_mask"
    ) as caught:
        load_checked(ModelConfig(path=str(tmp_path)), str(tmp_path), solo, seq_len=64)
    assert caught.value.code == exit_codes.CONFIGURATION


def test_router_noise_of_engines_is_refused(tmp_path: Path, solo: Group) -> None:
    small_model(*_kind("phimoe"), attention="eager", seq_len=512, seed=0).save_pretrained(tmp_path)
    config, file = ModelConfig(path=str(tmp_path)), tmp_path / "config.json"
    load_checked(config, str(tmp_path), solo, seq_len=16)  # without router noise
    file.write_text(json.dumps(json.loads(file.read_text()) | {"router_jitter_noise": 0.01}))
    with pytest.raises(
        RoleError, match="PhimoeForCausalLM cannot be trained: its code computes differently in training"
    ):
        load_checked(config, str(tmp_path), solo, seq_len=16)


@pytest.mark.parametrize("kind", few_in_gate(["falcon", "gptj", "gpt_neo"], ["falcon"]))
def test_family_with_fixed_attention_is_refused_by_name(kind: str, tmp_path: Path, solo: Group) -> None:
    model = small_model(*_kind(kind), attention="eager", seq_len=512, seed=0)
    model.save_pretrained(tmp_path)
    with pytest.raises(RoleError, match=rf"models of type {kind} {OWN_ATTENTION}"):
        load_checked(ModelConfig(path=str(tmp_path)), str(tmp_path), solo, seq_len=64)


def _kind(kind: str) -> tuple[type[Any], Any]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind]())
    return type(model), model.config


def test_dropout_is_off_in_training_but_published(tmp_path: Path, solo: Group, source: Path) -> None:
    small_model(*_kind("gpt2"), attention="eager", seq_len=512, seed=0).save_pretrained(source)
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"resid_pdrop": 0.25, "attn_pdrop": 0.25}))
    config = ModelConfig(path=str(source))
    for model in (load_model(config, str(source)), load_checked(config, str(source), solo, seq_len=16)):
        ids, positions = torch.arange(12)[None], torch.arange(12)[None]
        inputs = {"input_ids": ids, "position_ids": positions, "packed": packed_attention.row_layout([12], ids.device)}
        assert torch.equal(model.train()(**inputs).logits, model(**inputs).logits)
        published = json.loads(model_files(model, config, str(source)).contents["config.json"])
        assert (published["resid_pdrop"], published["attn_pdrop"]) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            {"model_type": "distilbert"},
            r"type distilbert \(model_type in config.json\) cannot be trained: transformers \S+ has no causal",
        ),
        ({"model_type": "chameleon"}, "has no causal language model of this type; use one, such as Qwen/Qwen3-8B"),
        ({"model_type": "qwen2_audio"}, "has no causal language model of this type"),
        (
            {"model_type": "quokka"},
            "model_type in config.json is 'quokka', which transformers .* does not support; use a model of a supported",
        ),
        ({"hidden_size": 8}, "model_type in config.json is missing"),
        (
            {"model_type": "quokka", "auto_map": {"AutoConfig": "configuration_own.Own"}},
            r"is defined by its own code \(auto_map in config.json\), .* set model.trustRemoteCode: true",
        ),
    ],
)
def test_type_without_causal_class_is_refused_with_field_and_fix(
    content: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(RoleError, match=told) as caught:
        load_weights.model_on_meta(ModelConfig(path=str(tmp_path)), str(tmp_path))
    assert caught.value.code == exit_codes.CONFIGURATION
    assert "\n" not in str(caught.value)
