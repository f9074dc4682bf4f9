"""Rows of the family table, compared with the layers that transformers builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlrun.config.families import FAMILIES
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling import packed_attention
from rlrun.trainer.modeling.parallel.tensor_parallel import check_family
from rlrun.trainer.modeling.shard import decoder_layers
from rlrun.trainer.modeling.tensor_names import remember_names
from rlrun.trainer.proof.architecture_check import examine_model
from tests.trainer.family_models import make_model


@pytest.mark.parametrize("kind", FAMILIES)
def test_family_row_names_every_layer_parameter(kind: str) -> None:
    with torch.device("meta"):
        model = make_model(kind, 0)
    layers = decoder_layers(model)
    row = FAMILIES[kind]
    for by in sorted(row.by):
        assert check_family(model, layers, by, 2) is row


@pytest.mark.parametrize("by", ["tp", "cp"])
@pytest.mark.parametrize("place", ["layer", "decoder"])
def test_unknown_variant_of_family_is_refused(by: Any, place: str) -> None:
    with torch.device("meta"):
        model = make_model("llama", 0)
        layers = decoder_layers(model)
        owner: nn.Module = layers[1] if place == "layer" else model.get_decoder()
        owner.conv = nn.Linear(2, 2, bias=False)
    with pytest.raises(
        RoleError,
        match=rf"parallelism\.{by} \(2\): the model's type is llama, but it has .*(conv\.weight), .*; set {by}: 1",
    ) as caught:
        check_family(model, layers, by, 2)
    assert caught.value.code == exit_codes.CONFIGURATION


def test_unsupported_family_is_refused_with_supported_ones() -> None:
    with torch.device("meta"):
        model = make_model("gpt_oss", 0)
    layers = decoder_layers(model)
    with pytest.raises(
        RoleError,
        match=r"trainer\.parallelism\.tp \(2\) is supported for .* arcee, .*: its experts .* or cp",
    ):
        check_family(model, layers, "tp", 2)
    model.config.model_type = "mamba"
    with pytest.raises(
        RoleError, match=r"trainer\.parallelism\.cp \(2\) is supported for .* of type mamba: its layers .*; set cp: 1"
    ):
        check_family(model, layers, "cp", 2)


@pytest.mark.parametrize(
    ("kind", "features"),
    [
        ("qwen2", {"window"}),
        ("gemma2", {"window", "softcap"}),
        ("gpt_oss", {"window", "sinks"}),
        ("phi3", {"window"}),
        ("glm4", set()),
    ],
)
def test_matrix_models_have_their_stated_attention_features(kind: str, features: set[str]) -> None:
    packed_attention.register_attention()
    model = make_model(kind, 0)
    remember_names(model)
    verdict = examine_model(model, seq_len=512)
    assert verdict.fault is None
    assert verdict.features == features
