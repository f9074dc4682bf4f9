"""Model that all runs of a trainer share, loaded and sharded once, and the trained parameters of each run.

FSDP shards the parameters once, so a joining run cannot add parameters. Therefore the model has one set of adapters, and each run has its
own copy of this rank's shards: before a run computes, the values of the previous run are copied out and its own are copied in. Copies are
bitwise exact, and no parameter, gradient or optimizer state of one run affects another run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlrun.config.models.language_models import LoRAConfig
from rlrun.config.models.parallel import RouterConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.hub import fetch
from rlrun.hub.repository import keep_revisions, show_source
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.dequantize import make_plain_copy
from rlrun.trainer.modeling.flops import Cost, model_cost
from rlrun.trainer.modeling.load_weights import ArchitectureCheck, LoadOptions, Support, load_sharded
from rlrun.trainer.modeling.model_files import ModelFiles, model_files
from rlrun.trainer.modeling.router_replay import routing_of
from rlrun.trainer.modeling.shard import Memory, check_source, fsdp_modules, local_part
from rlrun.trainer.ranks.group import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Adapters:
    """Exchange of adapter values in a model, which has the values of one run at a time. With only one run nothing is copied.

    Args:
        model: sharded model, with adapters if the run has any.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._kept: dict[str, list[Tensor]] = {}
        self._held: str | None = None

    @torch.no_grad()
    def load_run(self, run: str, config: LoRAConfig | None) -> None:
        """Load the values of a run into the model. For a new run the values are undefined; the caller must initialize them."""
        if self._held == run:
            return
        shards = [local_part(parameter.detach()) for parameter in self._parameters]
        if self._held is not None:
            kept = self._kept.setdefault(self._held, [torch.empty_like(shard) for shard in shards])
            torch._foreach_copy_(kept, shards)
        if run in self._kept:
            torch._foreach_copy_(shards, self._kept[run])
        if config is not None:
            lora.configure_adapters(self._model, config)
        self._held = run

    def delete_run(self, run: str) -> None:
        """Delete the values of a run."""
        self._kept.pop(run, None)
        if self._held == run:
            self._held = None


@dataclass(frozen=True)
class Policy:
    """Sharded model, with the objects that do not depend on its trained values."""

    module: nn.Module
    group: Group
    source: str
    """Folder from which it was loaded."""
    files: ModelFiles
    cost: Cost
    adapters: Adapters

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.module.config.get_text_config().vocab_size)

    def reset(self) -> None:
        """Reset the model after an exception in a step, at the same place on all ranks: gathered parameters, gradients, train mode."""
        units = fsdp_modules(self.module)
        if units[0]._get_fsdp_state()._is_root:  # false before the first forward pass, when there is nothing to reset
            units[0].reset_iter_state()
        # torch does not reset the local sums of earlier micro-batches.
        for group in (group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups):
            for sharded in group.fsdp_params:
                sharded.unsharded_accumulated_grad = None
                if hasattr(sharded, "_unsharded_param"):
                    sharded._unsharded_param.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None
        self.module.train()


def model_source(config: TrainerConfig, paths: RunPaths, group: Group) -> str:
    """Return the folder of the model; download it from the hub, or create a tiny model at the first call. All ranks call it together.

    Raises:
        RoleError: the model does not exist.
    """
    keep_revisions(paths)
    if group.leads:
        make_plain_copy(
            config.model, paths
        )  # only for a trainer that was started by hand: pods and `rlrun local` have made it before
    group.barrier()
    source = fetch.model_source(config.model, paths.model, with_weights=True, trained=True)
    if group.leads:
        if config.model.tiny is not None and not (paths.model / "config.json").exists():
            if config.model.tiny.warmup_environment is not None and (pod := os.environ.get("RLRUN_POD_NAME")):
                # Code of the warm-up environment must not run in this process, which has the run's key.
                raise RoleError(
                    f"{paths.model} does not exist, but an init container must create it; delete the pod {pod}",
                    exit_codes.DATA,
                )
            from rlrun.trainer.modeling.tiny_model import make_tiny_model

            try:
                with storage_errors(paths.root, "make the tiny model"):
                    make_tiny_model(paths.model, config.model.tiny)
            except ValueError as error:
                raise RoleError(f"model.tiny: {error}", exit_codes.CONFIGURATION) from error
        check_source(config.model, source)
    group.barrier()
    return source


def _check_routers(
    check: ArchitectureCheck, router: RouterConfig, model: PreTrainedModel, source: str, group: Group, seq_len: int
) -> Support:
    """Check the architecture, and that its routers support the configuration."""
    support = check(model, source, group, seq_len)
    options = [
        (router.replay != "Off", f"replay ({router.replay})", "replay: Off"),
        (router.bias == "Update", "bias (Update)", "bias: Frozen"),
        (router.aux_loss > 0, f"auxLoss ({router.aux_loss})", "auxLoss: 0"),
        (router.freeze, "freeze (true)", "freeze: false"),
    ]
    for given, text, remedy in options:
        if given and support.routing_fault is not None:
            raise _router_error(text, model, source, support.routing_fault, remedy)
    return support


def _router_error(text: str, model: nn.Module, source: str, reason: str, remedy: str) -> RoleError:
    """Return the error for an option of `trainer.router` that a model does not support."""
    return RoleError(
        f"trainer.router.{text} is not supported for the model {show_source(source)} "
        f"({type(model).__name__.removeprefix('FSDP')}): {reason}; set {remedy}",
        exit_codes.CONFIGURATION,
    )


def load_policy(
    config: TrainerConfig, source: str, group: Group, *, with_weights: bool, check: ArchitectureCheck
) -> Policy:
    """Load and shard the model. Trained values are not set yet. All ranks call it together.

    Args:
        config: configuration of the trainer's own run.
        source: source of the model.
        group: all ranks.
        with_weights: read the weights; False leaves them undefined, to be loaded from a checkpoint.
        check: architecture check, see `load_sharded`.

    Raises:
        RoleError: the model cannot be loaded or divided, or does not support the adapters.
    """
    costs: list[Cost] = []

    def prepare(model: nn.Module) -> None:
        costs.append(model_cost(model))
        if config.lora is not None:
            lora.inject_adapters(model, config.lora)

    module = load_sharded(
        config.model,
        source,
        group,
        seq_len=config.seq_len,
        check=partial(_check_routers, check, config.router),
        options=LoadOptions(
            with_weights=with_weights,
            memory=Memory.from_config(config),
            kernel=config.attention,
            prepare=prepare,
            with_routing=True,
            freeze_routers=config.router.freeze,
        ),
    )
    routing = routing_of(module)
    if config.router.replay == "Rollout" and routing is not None and routing.shape.top_k == 1:
        raise _router_error(
            "replay (Rollout)", module, source, "its routers choose one expert per token", "replay: Off"
        )
    if config.router.bias == "Update" and routing is not None and routing.bias_fault is not None:
        raise _router_error("bias (Update)", module, source, routing.bias_fault, "bias: Frozen")
    files = model_files(module, config.model, source)
    return Policy(module, group, source, files, costs[-1], Adapters(module))
