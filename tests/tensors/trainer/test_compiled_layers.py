"""Graphs of compiled layers for each activation mode, adapters and row lengths, and the conditions of compilation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from loguru import logger
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlrun.config.models.language_models import LoRAConfig
from rlrun.config.models.roles import TrainerSpec
from rlrun.protocol.files.batch import Sample
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling import activation_checkpointing, compile_fallback, lora, packed_attention
from rlrun.trainer.modeling import shard as model_module
from rlrun.trainer.modeling.activation_checkpointing import compiled_layers
from rlrun.trainer.modeling.attention import flash
from rlrun.trainer.modeling.shard import Memory, local_part, shard_model
from rlrun.trainer.ranks.group import Group, ParallelDims
from tests.tensors.attention import stand_ins

CPU = torch.device("cpu")
ROWS = ([9], [20, 5, 7], [2, 2, 30, 2, 2, 2])
SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[int, int]]]:
    """Return a function that counts graphs and graph breaks.

    Layers are traced but not lowered, which takes a minute; GPU kernels have stand-ins. A number of the model must not
    become a graph input, because an epsilon or a scale would be computed in float64, on a GPU too.
    """
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.extend(inputs)
        return graph.forward

    stand_ins.install(monkeypatch)
    flash.load_package("fa3")
    packed_attention.register_attention()
    monkeypatch.setattr(model_module.torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counters = torch._dynamo.utils.counters
    yield lambda: (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    torch._dynamo.reset()
    assert seen
    assert not [one for one in seen if isinstance(one, float | torch.SymFloat)]
    assert not [one for one in seen if isinstance(one, Tensor) and one.dtype == torch.float64]


def train(model: nn.Module, lengths: list[int], make_sample: Callable[..., Sample]) -> None:
    samples = [make_sample(length, seed=index) for index, length in enumerate(lengths)]
    token_statistics(model, micro_batch(samples, CPU)).logprobs.sum().backward()
    model.zero_grad()


def graphs_of_rows(model: nn.Module, make_sample: Callable[..., Sample], counted: Callable[[], tuple[int, int]]) -> int:
    """Return the number of graphs of the first row; later rows reuse them without graph breaks."""
    train(model, ROWS[0], make_sample)
    graphs, breaks = counted()
    assert not breaks
    for lengths in ROWS[1:]:
        train(model, lengths, make_sample)
    assert counted() == (graphs, 0), "rows of other lengths, or of more sequences, made a graph"
    return graphs


@pytest.mark.parametrize(
    "mode", ["none", pytest.param("full", marks=pytest.mark.full)]
)  # test_memory.py covers `selective`
def test_all_layers_share_one_graph(
    mode: Any,
    make_model: Callable[..., nn.Module],
    make_sample: Callable[..., Sample],
    solo: Group,
    counted: Callable[[], tuple[int, int]],
) -> None:
    """Passes without gradient add one more graph."""
    model = make_model("qwen3", attn=packed_attention.implementation_name("fa3"))
    shard_model(model, solo, memory=Memory(compile=True, activations=mode))
    assert graphs_of_rows(model, make_sample, counted) == 1
    with torch.no_grad():
        for length in (9, 13):
            token_statistics(model, micro_batch([make_sample(length)], CPU))
    assert counted() == (2, 0)


def test_first_layer_with_adapters_has_its_own_graph(
    make_model: Callable[..., nn.Module],
    make_sample: Callable[..., Sample],
    solo: Group,
    counted: Callable[[], tuple[int, int]],
) -> None:
    """The frozen embedding's output needs no gradient, so each adapter of the first layer computes one product less."""
    model = make_model("qwen3", attn=packed_attention.implementation_name("fa3"))
    lora.inject_adapters(model, LoRAConfig(rank=4, targets=["q_proj", "up_proj"]))
    shard_model(model, solo, memory=Memory(compile=True, activations="selective"))
    lora.initialize_adapters(model, 0)
    assert graphs_of_rows(model, make_sample, counted) == 2


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return one product."""
        found: Tensor = self.proj(hidden)
        return found


def test_adapters_with_different_scales_share_a_graph(counted: Callable[[], tuple[int, int]]) -> None:
    """A trainer holds up to 64 runs, but torch stops compiling a layer after 8 graphs and runs it uncompiled."""
    layer = _Layer()
    adapter = lora.LoRALinear.convert(layer.proj, LoRAConfig(rank=4))
    for half in (adapter.lora_A, adapter.lora_B):
        nn.init.normal_(half)
    plain = layer.forward
    compile_fallback.compile_layer(layer, asked=True)
    for tokens, alpha in ((3, 4), (5, 6), (7, 9)):
        adapter.configure(LoRAConfig(rank=4, alpha=alpha))
        hidden = torch.randn(tokens, 8)
        torch.testing.assert_close(layer(hidden), plain(hidden))
        assert counted() == (1, 0)


@pytest.mark.full
def test_windowed_and_full_layers_have_two_graphs(
    make_sample: Callable[..., Sample], solo: Group, counted: Callable[[], tuple[int, int]]
) -> None:
    """The row's sequences are shorter than the window, so the window has no effect."""
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SHAPE, sliding_window=18, layer_types=kinds)
    model = Gemma3ForCausalLM._from_config(
        config, attn_implementation=packed_attention.implementation_name("fa3")
    ).train()
    shard_model(model, solo, memory=Memory(compile=True, activations="selective"))
    assert graphs_of_rows(model, make_sample, counted) == 2


def test_expert_layers_share_one_graph(
    make_sample: Callable[..., Sample], solo: Group, counted: Callable[[], tuple[int, int]]
) -> None:
    config = Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    model = Qwen3MoeForCausalLM._from_config(
        config, attn_implementation=packed_attention.implementation_name("fa3")
    ).train()
    shard_model(model, solo, memory=Memory(compile=True, activations="full"))
    assert graphs_of_rows(model, make_sample, counted) == 1


def somewhere(device: str, tp: int = 1) -> Any:
    """Return a group of one rank that reports this device."""
    dims = ParallelDims(tp=tp)
    return SimpleNamespace(leads=True, device=torch.device(device), dims=dims, broadcast=lambda value: value)


@pytest.mark.parametrize(
    ("group", "kernel", "mode", "compiler", "line"),
    [
        (somewhere("cuda"), "fa3", "selective", True, "on: one graph of every kind of layer, with attention in it"),
        (somewhere("cuda"), "sdpa", "none", True, "on: one graph .*, with attention sdpa between compiled parts"),
        (somewhere("cuda"), "sdpa", "selective", True, "off: attention sdpa .* would hide the products"),
        (somewhere("cuda", tp=2), "fa3", "none", True, r"off: parallelism\.tp \(2\) divides every layer"),
        (somewhere("cuda"), "fa3", "none", False, "off: this machine has neither"),
        (somewhere("cpu"), "fa3", "none", True, "off: the trainer computes on a CPU"),
    ],
)
def test_compile_decision_is_logged_with_its_reason(
    group: Group,
    kernel: Any,
    mode: Any,
    compiler: bool,
    line: str,
    make_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation_checkpointing, "has_compiler", lambda: compiler)
    model = make_model(attn=packed_attention.implementation_name(kernel))
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    found = compiled_layers(None, mode, model, group)
    assert not compiled_layers(False, mode, model, group)
    assert compiled_layers(True, mode, model, group)
    logger.remove(handler)
    assert len(lines) == 1
    assert re.fullmatch(f"compile is {line}.*", lines[0]), lines
    assert found == line.startswith("on")


def failing(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Replace torch's compiler by one that fails in the forward or the backward pass."""

    def compiler(graph: Any, inputs: Any, *, is_backward: bool = False, **_: object) -> Any:
        if is_backward == (fails == "backward"):
            raise RuntimeError("ptxas is of another release")
        return make_boxed_func(graph.forward)

    passes = {"fw_compiler": compiler, "bw_compiler": partial(compiler, is_backward=True)}
    monkeypatch.setattr(compile_fallback, "compile_operations", compiler)
    monkeypatch.setattr(compile_fallback, "_said", set())
    monkeypatch.setattr(compile_fallback.torch, "compile", partial(torch.compile, backend=aot_autograd(**passes)))
    torch._dynamo.reset()


@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("asked", [False, True])
def test_failed_compilation_falls_back_unless_compile_is_set(
    asked: bool, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, fails)
    layer, hidden = _Layer(), torch.randn(3, 8, requires_grad=True)
    layer(hidden).sum().backward()
    wanted, hidden.grad = hidden.grad, None
    with torch._dynamo.config.patch(suppress_errors=False):
        compile_fallback.compile_layer(layer, asked=asked)
        if asked:
            with pytest.raises((torch._dynamo.exc.BackendCompilerFailed, RuntimeError), match="ptxas"):
                layer(hidden).sum().backward()
        else:
            layer(hidden).sum().backward()
            torch.testing.assert_close(hidden.grad, wanted)
    torch._dynamo.reset()


@pytest.mark.parametrize("asked", [None, True])
def test_compile_option_decides_whether_layers_may_fail(
    asked: bool | None, solo: Group, make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(model_module, "compiled_layers", lambda *_: True)
    monkeypatch.setattr(model_module, "check_compiler", lambda _: None)
    monkeypatch.setattr(model_module, "compile_layer", lambda layer, *, asked: seen.append(asked))
    shard_model(make_model(), solo, memory=Memory(compile=asked))
    assert seen == [bool(asked)] * 2


@pytest.mark.full
@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("asked", [None, True])
def test_failing_compiler_ends_only_runs_with_compile_set(
    asked: bool | None,
    fails: str,
    solo: Group,
    make_model: Callable[..., Any],
    make_sample: Callable[..., Sample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(monkeypatch, fails)
    packed_attention.register_attention()
    monkeypatch.setattr(model_module, "compiled_layers", lambda *_: True)
    monkeypatch.setattr(model_module, "check_compiler", lambda _: None)
    row = micro_batch([make_sample(9, seed=0)], CPU)
    model = make_model("qwen3", attn=packed_attention.NAME)

    def gradients(model: Any) -> list[Any]:
        model.zero_grad()
        token_statistics(model, row).logprobs.sum().backward()
        return [local_part(parameter.grad).clone() for parameter in model.parameters()]

    wanted = gradients(model)
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    with torch._dynamo.config.patch(suppress_errors=False):
        shard_model(model, solo, memory=Memory(compile=asked))
        if asked:
            with pytest.raises((torch._dynamo.exc.BackendCompilerFailed, RuntimeError), match="ptxas"):
                gradients(model)
        else:
            for found, one in zip(gradients(model), wanted, strict=True):
                torch.testing.assert_close(found, one, atol=1e-6, rtol=1e-5)
    logger.remove(handler)
    said = [line for line in lines if "cannot compile the backward pass of a layer (RuntimeError: ptxas is of" in line]
    assert len(said) == (asked is None and fails == "backward")
    torch._dynamo.reset()


def test_compile_default_depends_on_devices() -> None:
    assert not TrainerSpec().compiles
    assert TrainerSpec(gpus_per_replica=1).compiles
    assert not TrainerSpec(gpus_per_replica=1, compile=False).compiles
    assert not TrainerSpec.model_validate({"gpusPerReplica": 2, "parallelism": {"tp": 2}}).compiles
    zero_bubble = {
        "gpusPerReplica": 2,
        "gradientAccumulation": "local",
        "parallelism": {"pp": 2, "schedule": "ZBVZeroBubble"},
    }
    assert not TrainerSpec.model_validate(zero_bubble).compiles
    assert Memory.from_config(TrainerSpec()).compile is None
