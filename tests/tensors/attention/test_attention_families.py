"""Attention options of model families, by each kernel: packed rows compared with single sequences in transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlrun.config.models.language_models import ModelConfig
from rlrun.fit.attention_kernels import BACKENDS, Feature, Kernel, Machine, Needs
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.step_buffer import MicroBatch
from rlrun.trainer.modeling import load_weights, packed_attention
from rlrun.trainer.modeling.attention.select import needs_of, select_kernel
from rlrun.trainer.modeling.load_weights import LoadOptions
from rlrun.trainer.proof.small_models import small_model
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group
from tests.support.sets import few_in_gate
from tests.tensors.attention import stand_ins

LENGTHS = (24, 9, 17)
LOGPROB_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4
NO_GRADIENT = 1e-3
"""Share of the largest gradient below which a gradient counts as rounding noise."""
FAMILIES: dict[str, tuple[int, frozenset[Feature]]] = {
    "qwen3": (512, frozenset()),
    "mistral": (8192, frozenset({"window"})),
    "gemma3_text": (8192, frozenset({"window"})),
    "gemma2": (8192, frozenset({"window", "softcap"})),
    "gpt_oss": (512, frozenset({"window", "sinks"})),
}
"""By model type: longest sequence of the run, and required attention features."""


def cases() -> Iterator[tuple[str, Kernel]]:
    for family, (_, features) in FAMILIES.items():
        for kernel, backend in BACKENDS.items():
            if features <= backend.features and kernel not in (
                "flex",
                "cudnn",
            ):  # these have no backward pass or do not run on a CPU
                yield family, kernel


GATE = [case for case in cases() if case[0] in ("mistral", "gemma2", "gpt_oss")]
"""Windows, caps and sinks, by each kernel that supports them."""


def small(family: str) -> Any:
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family]())
    return small_model(type(whole), whole.config, attention="eager", seq_len=FAMILIES[family][0], seed=0)


def numbers(model: Any, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))
    (logprobs * weights).sum().backward()
    return logprobs.detach(), {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()
    }


def compute_separately(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    found = []
    for sequence in ids.split(LENGTHS):
        logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, sequence[1:, None])[:, 0]
        found += [chosen.new_zeros(1), chosen]
    return numbers(model, torch.cat(found))


def packed(model: Any, ids: Tensor, kernel: Kernel) -> tuple[Tensor, dict[str, Tensor]]:
    packed_attention.register_attention()
    model.set_attn_implementation(packed_attention.implementation_name(kernel))
    positions, zeros = torch.cat([torch.arange(length) for length in LENGTHS]), torch.zeros(len(ids))
    row = packed_attention.row_layout(LENGTHS, ids.device)
    mask = positions > 0
    batch = MicroBatch(
        input_ids=ids,
        position_ids=positions,
        mask=mask,
        inference_logprobs=zeros,
        advantages=zeros,
        versions=zeros.long(),
        temperatures=zeros + 1,
        packed=row,
        predicted=mask.nonzero()[:, 0],
        sequence_ids=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
    )
    return numbers(model, token_statistics(model, batch).logprobs)


@pytest.mark.parametrize(("family", "kernel"), few_in_gate(cases(), GATE))
def test_packed_row_equals_single_sequences(family: str, kernel: Kernel, kernels: None) -> None:
    model = small(family)
    ids = torch.randint(3, 90, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    expected, gradients = compute_separately(copy.deepcopy(model), ids)
    found, own = packed(model, ids, kernel)
    assert float((found - expected).abs().max()) <= LOGPROB_LIMIT
    least = NO_GRADIENT * max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert float((own[name] - gradient).norm()) <= GRADIENT_LIMIT * max(float(gradient.norm()), least), name
    if family == "gpt_oss":
        assert all(float(own[name].norm()) > least for name in own if name.endswith("sinks"))
    if kernel != "sdpa":
        assert list(stand_ins.CALLS.items()) == [(kernel, model.config.num_hidden_layers)]


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_features_of_family_are_observed(family: str) -> None:
    model = small(family)
    ids = torch.randint(3, 90, (sum(LENGTHS),))
    with packed_attention.observed_features() as features:
        packed(model, ids, "sdpa")
    assert features == FAMILIES[family][1]


def test_head_size_is_read_from_model_config() -> None:
    sizes = {kind: needs_of(CONFIG_MAPPING[kind](), ()).head_dim for kind in ("gemma2", "gpt2", "deepseek_v3")}
    assert sizes == {"gemma2": 256, "gpt2": 64, "deepseek_v3": 192}


def test_rank_0_logs_selected_attention_kernel(solo: Group, log_lines: list[str]) -> None:
    needs = Needs(frozenset({"sinks"}), 64)
    assert select_kernel("auto", "GptOssForCausalLM", needs, solo, compute_dtype=None) == "sdpa"
    assert log_lines == ["GptOssForCausalLM: attention sdpa: sdpa is the first that a CPU and the model allow"]
    with pytest.raises(
        RoleError, match=r"trainer\.attention \(varlen\): it needs a GPU .* set attention: auto, or one of sdpa"
    ):
        select_kernel("varlen", "GptOssForCausalLM", needs, solo, compute_dtype=None)


def test_unsupported_kernel_ends_run_before_weights_are_read(
    tmp_path: Any, solo: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = Machine("NVIDIA H100", (9, 0), {"flash2": "2.8.3"})
    monkeypatch.setattr("rlrun.trainer.modeling.attention.select.read_machine", lambda device: hopper)
    monkeypatch.setattr(load_weights, "open_files", None)  # would fail if the weights were read
    small("gpt_oss").save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    with pytest.raises(
        RoleError, match=r"trainer\.attention \(flash2\): the model's attention has sinks, which flash2 does"
    ) as caught:
        load_checked(config, str(tmp_path), solo, seq_len=8, options=LoadOptions(kernel="flash2"))
    assert caught.value.code == exit_codes.CONFIGURATION


def test_build_without_required_feature_is_skipped(
    kernels: None, solo: Group, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """Some builds of FlashAttention 3 have no soft caps, although their functions accept the argument."""
    whole = stand_ins.forward

    def pruned(*arguments: Any) -> Any:
        if arguments[-1]:
            raise RuntimeError(
                "mha_fwd, flash_api.cpp:1219, This flash attention build does not support tanh softcapping.\nmore"
            )
        return whole(*arguments)

    hopper = Machine("NVIDIA H100", (9, 0), {"fa3": "3.0.0"})
    monkeypatch.setattr("rlrun.trainer.modeling.attention.select.read_machine", lambda device: hopper)
    assert (
        select_kernel(
            "fa3", "Gemma2ForCausalLM", Needs(frozenset({"window", "softcap"}), 256), solo, compute_dtype=None
        )
        == "fa3"
    )
    monkeypatch.setattr(stand_ins, "forward", pruned)
    log_lines.clear()
    assert (
        select_kernel("auto", "Gemma2ForCausalLM", Needs(frozenset({"softcap"}), 256), solo, compute_dtype=None)
        == "flex"
    )
    assert (
        "not fa3: the installed flash_attn_interface does not support this model's attention (RuntimeError: mha_fwd"
        in log_lines[0]
    )
    assert (
        select_kernel("auto", "Qwen3ForCausalLM", Needs(frozenset({"window"}), 128), solo, compute_dtype=None) == "fa3"
    )
    with pytest.raises(RoleError, match=r"\(fa3\): the installed flash_attn_interface does not support .* softcapping"):
        select_kernel("fa3", "Gemma2ForCausalLM", Needs(frozenset({"softcap"}), 256), solo, compute_dtype=None)
