"""Independent computation of a mixture's balance: one sequence at a time in transformers, whose routers are read by hooks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlrun.config.models.language_models import ModelConfig
from rlrun.protocol.files.batch import Batch
from rlrun.trainer.modeling.router_balance import BIAS
from rlrun.trainer.weights.export import export_checkpoint


class RouterReader:
    """Published model in float32, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.seen: list[tuple[Tensor, Tensor]] = []
        """Logits `[T, E]` and chosen experts `[T, K]` of each layer with a router, in order."""
        self.routers = [
            module for module in self.model.modules() if type(module).__name__.lower().endswith("topkrouter")
        ]
        for router in self.routers:
            router.register_forward_hook(self._keep)

    def _keep(self, module: object, inputs: object, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        self.seen.append((outputs[0].float(), outputs[2]))

    def read(self, ids: Any) -> list[tuple[Tensor, Tensor]]:
        """Compute a sequence and return `seen`."""
        self.seen = []
        self.model(input_ids=torch.from_numpy(ids.astype("int64"))[None], use_cache=False)
        return self.seen

    def load_values(self, values: Mapping[str, Tensor]) -> None:
        """Replace parameters and buffers by name."""
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(values[name])


def balance_loss(reader: RouterReader, batch: Batch) -> Tensor:
    """Return the mean over sequences and layers of transformers' load-balancing loss; each call of it gets one of both."""
    losses = []
    for sample in batch.samples:
        for (logits, chosen), router in zip(reader.read(sample.input_ids), reader.routers, strict=True):
            losses.append(_layer_loss(logits, chosen, router))
    return torch.stack(losses).mean()


def _layer_loss(logits: Tensor, chosen: Tensor, router: Any) -> Tensor:
    experts, mask = logits.shape[1], torch.ones(1, len(logits))
    if not hasattr(router, "e_score_correction_bias"):
        found: Tensor = load_balancing_loss_func((logits,), experts, router.top_k, mask)
        return found
    scores = logits.sigmoid()
    means = [(scores[:, expert] / scores.sum(-1)).mean() for expert in range(experts)]
    shares = [float((chosen == expert).sum()) / len(logits) for expert in range(experts)]
    return experts * torch.stack([share * mean for share, mean in zip(shares, means, strict=True)]).sum()


@torch.no_grad()
def expert_loads(reader: RouterReader, batch: Batch) -> list[list[int]]:
    """Return the number of tokens of each expert, by layer, counted token by token."""
    loads = [[0] * router.num_experts for router in reader.routers]
    for sample in batch.samples:
        for load, (_, chosen) in zip(loads, reader.read(sample.input_ids), strict=True):
            for token in chosen.tolist():
                for expert in token:
                    load[expert] += 1
    return loads


def read_biases(folder: Path) -> dict[str, Tensor]:
    """Return the correction biases of a model folder, by name."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items() if name.endswith(BIAS)}


def exported_biases(checkpoint: Path, source: Path, *, step: int) -> dict[str, Tensor]:
    """Return the correction biases of a checkpoint of the model in `source`, by name."""
    with TemporaryDirectory() as folder:
        export_checkpoint(checkpoint, Path(folder) / "export", ModelConfig(path=str(source)), str(source), step=step)
        return read_biases(Path(folder) / "export")
