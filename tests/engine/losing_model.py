"""Model whose code writes to one parameter directly instead of its loader, and omits another one if told.

`python -m tests.engine.losing_model` loads a second version like a worker and prints the resulting values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.reload import layerwise

from rlrun.inference.weights.loading import LostTensorsError, load_version

NAMES = ("loaded", "written", "forgotten")


class Layer(nn.Module):
    """Layer with one vector."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value), requires_grad=False)


class Model(nn.Module):
    """Three layers that receive their values in different ways."""

    def __init__(self, *, forgets: bool) -> None:
        super().__init__()
        self.forgets = forgets
        for name in NAMES:
            self.add_module(name, Layer(1.0))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            parameter = parameters[name]
            if name.startswith("written"):
                parameter.data.copy_(tensor)
            elif not (self.forgets and name.startswith("forgotten")):
                getattr(parameter, "weight_loader", lambda to, value: to.data.copy_(value))(parameter, tensor)


def second_version(*, forgets: bool) -> dict[str, object]:
    """Return the values after a second version, which is 2 everywhere, or the error of the load."""
    model = Model(forgets=forgets)
    layerwise.record_metadata_for_reloading(model)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    tensors = [(name, torch.full((3,), 2.0)) for name in places]
    loader = SimpleNamespace(get_all_weights=lambda config, model: iter(tensors))
    setattr(model_loader, "get_model_loader", lambda config: loader)  # noqa: B010  it is of another type
    resets = {f"reset_{part}": lambda: None for part in ("lora_state", "encoder_cache", "mm_cache")}
    runner = SimpleNamespace(get_model=lambda: model, **resets)
    config = SimpleNamespace(load_config=None, model_config=SimpleNamespace(quantization=None, dtype=torch.float32))
    try:
        load_version(runner, config, "v2")
    except LostTensorsError as error:
        return {"lost": str(error)}
    return {
        "values": {name: parameter.tolist() for name, parameter in model.named_parameters()},
        "same memory": {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places,
        "path": config.model_config.model,
    }


if __name__ == "__main__":
    print(json.dumps([second_version(forgets=forgets) for forgets in (False, True)]))
