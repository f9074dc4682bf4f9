"""Memory options of a forward pass: unchanged gradients, and float32 masters with bfloat16 computation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from loguru import logger
from torch import Tensor, nn

from rlrun.config.models.language_models import LoRAConfig
from rlrun.config.models.parallel import GPU_KERNELS
from rlrun.config.models.roles import TrainerSpec
from rlrun.protocol.files.batch import Sample
from rlrun.protocol.files.failures import RoleError
from rlrun.trainer.learning.forward import logprobs_without_gradient, token_statistics
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling import activation_checkpointing, gradient_accumulation, packed_attention
from rlrun.trainer.modeling import shard as model_module
from rlrun.trainer.modeling.activation_checkpointing import keep_activations
from rlrun.trainer.modeling.attention import flash
from rlrun.trainer.modeling.gradient_accumulation import check_memory
from rlrun.trainer.modeling.shard import Memory, decoder_layers, fsdp_modules, local_part, shard_model
from rlrun.trainer.ranks.group import Group, ParallelDims
from tests.tensors.attention import stand_ins

CPU = torch.device("cpu")


def gradients(model: nn.Module, samples: list[Sample]) -> dict[str, Tensor]:
    token_statistics(model, micro_batch(samples, CPU)).logprobs.sum().backward()
    return {name: local_part(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def saved_bytes(model: nn.Module, samples: list[Sample]) -> int:
    """Return the bytes that the graph of a forward pass holds, counting each storage once."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_statistics(model, micro_batch(samples, CPU))
    return sum(sizes.values())


@pytest.mark.parametrize("mode", ["full", "selective", "attention", "offload"])
def test_checkpointing_mode_changes_no_gradient(
    mode: Any, make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample], solo: Group
) -> None:
    samples = [make_sample(9), make_sample(13, seed=1)]
    expected = gradients(shard_model(make_model("qwen3"), solo), samples)
    found = gradients(shard_model(make_model("qwen3"), solo, memory=Memory(activations=mode)), samples)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_checkpointing_and_offload_reduce_saved_bytes(
    make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample]
) -> None:
    samples = [make_sample(60, seed=index) for index in range(4)]

    def kept(mode: Any) -> int:
        model = make_model("qwen3")
        for layer in decoder_layers(model):
            keep_activations(layer, mode)
        return saved_bytes(model, samples)

    everything, again = kept("none"), kept("full")
    assert again < 0.6 * everything
    assert kept("offload") < 0.6 * everything


def test_bfloat16_compute_keeps_float32_parameters(
    make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample], solo: Group
) -> None:
    samples = [make_sample(9), make_sample(13, seed=1)]
    seen: list[torch.dtype] = []
    model = shard_model(make_model("qwen3"), solo, memory=Memory(compute_dtype=torch.bfloat16))
    decoder_layers(model)[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    exact = token_statistics(make_model("qwen3"), micro_batch(samples, CPU)).logprobs
    rounded = token_statistics(model, micro_batch(samples, CPU)).logprobs
    assert seen == [torch.bfloat16]
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, atol=0.05, rtol=0.02)
    rounded.sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


@pytest.mark.full
def test_compiled_layer_serves_rows_of_all_lengths(
    make_model: Callable[..., nn.Module],
    make_sample: Callable[..., Sample],
    solo: Group,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = partial(torch.compile, backend="eager")  # lowering after tracing takes a minute
    monkeypatch.setattr(model_module.torch, "compile", compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected_model, model = (
        shard_model(make_model("qwen3"), solo, memory=Memory(compile=compile, activations="full"))
        for compile in (False, True)
    )
    for lengths in ([9], [4, 13], [20, 5, 7]):
        samples = [make_sample(length, seed=index) for index, length in enumerate(lengths)]
        expected, found = gradients(expected_model, samples), gradients(model, samples)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 4


@pytest.mark.parametrize("kernel", ["varlen", pytest.param("fa3", marks=pytest.mark.full)])
def test_layer_with_checkpoint_and_attention_is_one_graph(
    kernel: Any,
    make_model: Callable[..., nn.Module],
    make_sample: Callable[..., Sample],
    solo: Group,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All layers and rows share the graph without breaks, and attention is computed once."""
    stand_ins.install(monkeypatch)
    flash.load_package(kernel)
    monkeypatch.setattr(model_module.torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    attn = packed_attention.implementation_name(kernel)
    expected_model, model = (
        shard_model(make_model("qwen3", attn=attn), solo, memory=Memory(compile=compile, activations="selective"))
        for compile in (False, True)
    )
    for lengths in ([9], [4, 13], [20, 5, 7], [3, 3]):
        samples = [make_sample(length, seed=index) for index, length in enumerate(lengths)]
        expected = gradients(expected_model, samples)
        stand_ins.CALLS.clear()
        found = gradients(model, samples)
        assert stand_ins.CALLS[kernel] == len(decoder_layers(model))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-6)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_compile_is_refused_for_sharded_layers() -> None:
    model_module.check_compiler(ParallelDims())
    with pytest.raises(
        RoleError,
        match=r"compile \(true\) does not work with .*\.tp \(2\), because .*; set compile: false or tp: 1",
    ):
        model_module.check_compiler(ParallelDims(tp=2))
    with pytest.raises(RoleError, match=r"compile \(true\) compiles both gradients .*; set compile: false"):
        model_module.check_compiler(ParallelDims(pp=2, schedule="ZBVZeroBubble", local_stages=2))


def test_compile_that_hides_products_is_logged(
    make_model: Callable[..., nn.Module], solo: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module.torch, "compile", lambda forward, **options: forward)
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    for attn, activations in (("sdpa", "selective"), ("sdpa", "attention"), ("varlen", "selective")):
        model = make_model(attn=packed_attention.implementation_name(attn))
        shard_model(model, solo, memory=Memory(compile=True, activations=activations))
    logger.remove(handler)
    (line,) = lines
    assert line.startswith(
        "trainer.compile (true) hides the products from activationCheckpointing (selective) with attention sdpa"
    )


def test_compile_requires_a_cpp_compiler(
    make_model: Callable[..., nn.Module], solo: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(activation_checkpointing.shutil, "which", lambda name: None)
    with pytest.raises(RoleError, match=r"trainer\.compile \(true\) needs a C\+\+ compiler"):
        shard_model(make_model(), solo, memory=Memory(compile=True))


def test_memory_options_refuse_cpu_combinations() -> None:
    with pytest.raises(ValueError, match=r"cpuOffload \(true\) needs GPUs"):
        TrainerSpec(cpu_offload=True)
    for kernel in GPU_KERNELS:
        with pytest.raises(ValueError, match=rf"attention \({kernel}\) needs GPUs"):
            TrainerSpec(attention=kernel)
    chosen = Memory.from_config(TrainerSpec(compute_dtype="bfloat16", activation_checkpointing="full", compile=True))
    assert chosen == Memory(torch.bfloat16, "full", compile=True)


def test_local_gradient_sums_must_fit_the_device(make_model: Callable[..., nn.Module]) -> None:
    model = make_model()
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    check = partial(check_memory, model, shards=4, offloaded=False)
    check("local", available=size + size // 4)
    check("reduce", available=0)
    with pytest.raises(
        RoleError,
        match=r"trainer\.gradientAccumulation \(local\) needs .* for the complete gradient .* set gradientAcc.*: reduce",
    ):
        check("local", available=size + size // 4 - 1)
    check_memory(model, "local", shards=4, offloaded=True, available=size)
    model.requires_grad_(False)
    check("local", available=size // 4)


def test_oversized_model_is_refused_before_sharding(
    make_model: Callable[..., nn.Module], solo: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_accumulation, "device_memory", lambda device: 1000)
    shard_model(make_model(), solo)
    with pytest.raises(RoleError, match=r"the device has 0\.0 GiB"):
        shard_model(make_model(), solo, memory=Memory.from_config(TrainerSpec(gradient_accumulation="local")))


def test_cpu_device_memory_is_reported() -> None:
    assert 2**28 < gradient_accumulation.device_memory(CPU) < 2**50
    with pytest.raises(ValueError, match=r"remove .* and gradientAccumulation"):
        TrainerSpec(shared_with="host", lora=LoRAConfig(), gradient_accumulation="local")


def test_gathered_copies_are_refreshed_in_the_next_step(
    make_model: Callable[..., nn.Module],
    make_sample: Callable[..., Sample],
    solo: Group,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes without gradient in between refresh them too; the second micro-batch of a step reuses them."""
    samples = [make_sample(9), make_sample(13, seed=1)]
    found: dict[bool, list[Tensor]] = {}
    for stays in (False, True):
        monkeypatch.setattr(model_module, "_stays_gathered", lambda *_, stays=stays: stays)
        model = shard_model(make_model("qwen3"), solo, memory=Memory(compute_dtype=torch.bfloat16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found[stays] = []
        for _ in range(3):
            found[stays] += logprobs_without_gradient(model, [micro_batch(samples, CPU)])
            assert not any(unit._get_fsdp_state()._fsdp_param_group.is_unsharded for unit in fsdp_modules(model))
            for last, sample in zip((False, True), samples, strict=True):
                gradient_accumulation.prepare_backward(model, last=last)
                (-token_statistics(model, micro_batch([sample], CPU)).logprobs.sum()).backward()
                layers = decoder_layers(model)
                gathered = [layer._get_fsdp_state()._fsdp_param_group.is_unsharded for layer in layers]
                assert gathered == [stays and not last] * len(layers)
            optimizer.step()
            optimizer.zero_grad()
        found[stays] += [local_part(parameter.detach()) for parameter in model.parameters()]
    assert not torch.equal(found[True][0], found[True][1]), "the update is seen"
    assert all(map(torch.equal, found[True], found[False]))
