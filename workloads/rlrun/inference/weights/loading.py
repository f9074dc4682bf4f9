"""A worker's part of a hand-over: load a version into the served model, and check that every parameter got values.

vLLM reloads in place, layer by layer: a layer's parameters have no memory (meta tensors) while vLLM collects the calls of their loaders.
When all of them have arrived, the layer is filled and copied over the old one. Model code that writes to a parameter directly, without its
loader, writes to nothing: the parameter keeps the old values or uninitialized memory, without an error (GPT-OSS: experts and sinks). Such
layers get host memory before loading. They are detected at the first load, which is then repeated.

Needs vLLM and depends on private names of the pinned release.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn


class LostTensorsError(RuntimeError):
    """Error for parameters that got no values from a version."""


class Loading:
    """Methods that vLLM adds to its worker (`--worker-extension-cls`)."""

    def load_version(self, weights_path: str) -> None:
        """Load the folder's tensors into the served model.

        Raises:
            LostTensorsError: a parameter got no values; the model is then a mixture of versions.
        """
        from vllm.config import set_current_vllm_config

        worker: Any = self
        with set_current_vllm_config(worker.vllm_config):
            load_version(worker.model_runner, worker.vllm_config, weights_path)


def load_version(runner: Any, vllm_config: Any, weights_path: str) -> None:
    """Load a version, see `Loading.load_version`.

    Args:
        runner: vLLM's model runner.
        vllm_config: configuration of the worker. Afterwards its model is the folder, as after vLLM's own reload.
        weights_path: folder of the version.
    """
    model, config = runner.get_model(), vllm_config.model_config
    config.model, config.model_weights, config.revision = weights_path, "", None
    lost = _load_once(model, vllm_config)
    # The first load detects layers that are written without loaders; with memory for them, the second load is complete.
    if lost:
        written = {name.rpartition(".")[0] for name in lost}
        logger.info(
            "{} layers are written without their loaders; they get memory before a version is loaded", len(written)
        )
        model._rlrun_written = getattr(model, "_rlrun_written", frozenset()) | written
        lost = _load_once(model, vllm_config)
    for part in ("lora_state", "encoder_cache", "mm_cache"):
        getattr(runner, f"reset_{part}")()
    if lost:
        names = ", ".join(lost[:3])
        raise LostTensorsError(f"{len(lost)} parameters of vLLM's {type(model).__name__} got no values: {names}")


def _load_once(model: Any, vllm_config: Any) -> list[str]:
    """Load once; returns the names of parameters that got no values."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload import layerwise

    config, loader = vllm_config.model_config, get_model_loader(vllm_config.load_config)
    _forget_kernels(model)
    layerwise.initialize_layerwise_reload(model)
    written = {name: model.get_submodule(name) for name in sorted(getattr(model, "_rlrun_written", ()))}
    for layer in written.values():
        _give_memory(layer)
    model.load_weights(loader.get_all_weights(config, model))
    # Parameters that an online quantization creates have no counterpart in the checkpoint, so they cannot be checked.
    lost = [] if config.quantization is not None else sorted(_lost_parameters(model, written))
    for layer in written.values():
        _finish_layer(layer)
    layerwise.finalize_layerwise_reload(model, config)
    _pack_heads(model)
    return lost


def _forget_kernels(model: nn.Module) -> None:
    """Repack mixtures of experts after the load: on CPU vLLM packs them only once and would read the new values as packed."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_heads(model: nn.Module) -> None:
    """Repack heads that are tied to the embedding: on CPU vLLM computes with a packed copy, which a reload does not update."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _give_memory(layer: nn.Module) -> None:
    """Give parameters real memory and their original loaders, as at the start, filled with NaN to detect missing values.

    The memory is on the host, because a GPU in use has no space for a second model.
    """
    from vllm.model_executor.model_loader.reload import layerwise, meta

    with torch.device("cpu"):
        for name, tensor in layerwise.get_layer_tensors(layer).items():
            if tensor.is_meta and name not in meta.SKIP_TENSORS:
                setattr(layer, name, meta.materialize_meta_tensor(tensor))
    for tensor in layerwise.get_layer_tensors(layer).values():
        tensor.weight_loader = layerwise._get_original_loader(tensor)
    for parameter in _loading_parameters(layer).values():
        parameter.data.fill_(torch.nan)


def _finish_layer(layer: nn.Module) -> None:
    """Process a layer that was written directly into its compute format, in the memory of the served layer."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import layerwise

    info, method = layerwise.get_layerwise_info(layer), getattr(layer, "quant_method", None)
    for tensor in layerwise.get_layer_tensors(layer).values():
        tensor.data = tensor.data.to(info.restore_device)
    for parameter in _loading_parameters(layer).values():
        parameter.data.nan_to_num_(0.0)  # padding
    if isinstance(method, QuantizeMethodBase):
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        method.process_weights_after_loading(layer)
    layerwise._copy_and_restore_kernel_tensors(layer, info)
    info.reset()


def _loading_parameters(layer: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point parameters (with a NaN value) whose memory vLLM removes while it loads."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    return {
        name: one
        for name, one in layer._parameters.items()
        if one is not None and name not in SKIP_TENSORS and one.is_floating_point() and one.element_size() > 1
    }


def _lost_parameters(model: nn.Module, written: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the names of parameters without values, after all tensors are loaded and before layers are finished."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    # Layers with memory of their own: NaN that is still there marks a parameter without values.
    for prefix, layer in written.items():
        yield from (
            f"{prefix}.{name}"
            for name, one in _loading_parameters(layer).items()
            if one.numel() and bool(one.isnan().all())
        )
    # Other layers: compare vLLM's collected loader calls with the served parameters.
    pending = {}
    loaded = {_storage_address(one) for one in model.parameters() if not one.is_meta}
    for prefix, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if (
            prefix in written
            or not info.can_load()
            or info.kernel_tensors is None
            or is_deferred_attention_layer(layer)
        ):
            continue
        came = {name for name, _ in info.loaded_weights}
        for name, served in info.kernel_tensors[0].items():
            if name in came:
                loaded.add(_storage_address(served))
            elif name not in SKIP_TENSORS:
                pending[f"{prefix}.{name}"] = served
    # A head that is tied to the embedding is loaded with it.
    yield from (name for name, served in pending.items() if _storage_address(served) not in loaded)


def _storage_address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address
