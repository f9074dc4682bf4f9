"""Recorder of routes: a published model in transformers that answers like an engine with `--enable-return-routed-experts`.

vLLM's build for CPUs cannot return routes. The recorder computes in bfloat16, as engines do, so that some of its routers choose other
experts than the trainer in float32. It reads the outputs of routers with hooks and uses no code of the product.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


class RouteRecorder:
    """Model that returns the experts of each token.

    Args:
        folder: folder of the published model.
        dtype: number format of the model.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self._layers = self._model.get_decoder().layers
        self._seen: dict[int, Tensor] = {}
        self.mixed: list[int] = []
        """Numbers of the layers with a router."""
        for number, layer in enumerate(self._layers):
            routers = [module for module in layer.modules() if type(module).__name__.endswith("Router")]
            if routers:
                (router,) = routers
                self.mixed.append(number)
                router.register_forward_hook(self._hook(number))

    def _hook(self, number: int) -> Any:
        def keep(module: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
            (self._seen[number],) = [one for one in outputs if not one.is_floating_point()]

        return keep

    @torch.no_grad()
    def routed_experts(self, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return the experts of one sequence, `[tokens - 1, decoder layers, top_k]`, with zeros in dense layers, as vLLM does."""
        self._seen.clear()
        self._model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
        first = self._seen[self.mixed[0]]
        found = np.zeros((len(ids) - 1, len(self._layers), first.shape[1]), np.uint8)
        for number, chosen in self._seen.items():
            found[:, number] = chosen[:-1].numpy()
        return found

    def routes(self, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return the column of a sample, `[tokens, layers with a router, top_k]`, in which the last token has no route."""
        found = self.routed_experts(ids)[:, self.mixed]
        missing = np.full((1, *found.shape[1:]), 255, np.uint8)
        return np.concatenate([found, missing])
