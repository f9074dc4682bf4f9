"""The model that all runs of a trainer compute with: loaded and sharded once."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import nn

from rlrun.config.models.roles import TrainerConfig
from rlrun.hub import fetch
from rlrun.hub.revisions import keep_revisions
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling import lora
from rlrun.trainer.modeling.adapter_sets import Adapters
from rlrun.trainer.modeling.flops import Cost, model_cost
from rlrun.trainer.modeling.load_weights import ArchitectureCheck, load_sharded
from rlrun.trainer.modeling.model_files import ModelFiles, model_files
from rlrun.trainer.modeling.shard import Memory, check_source, fsdp_modules
from rlrun.trainer.ranks.group import Group


@dataclass(frozen=True)
class Policy:
    """The sharded model, and what belongs to it whatever its trained values are."""

    module: nn.Module
    group: Group
    source: str
    """Folder that it was loaded from."""
    files: ModelFiles
    cost: Cost
    adapters: Adapters

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return int(self.module.config.get_text_config().vocab_size)

    def reset(self) -> None:
        """Forget a step that an exception cut off, on all ranks at the same place: gathered weights, gradients, modes."""
        units = fsdp_modules(self.module)
        if units[0]._get_fsdp_state()._is_root:  # set at the first forward pass; before it there is nothing to forget
            units[0].reset_iter_state()
        # torch leaves local sums of the micro-batches before.
        for group in (group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups):
            for sharded in group.fsdp_params:
                sharded.unsharded_accumulated_grad = None
                if hasattr(sharded, "_unsharded_param"):
                    sharded._unsharded_param.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None
        self.module.train()


def model_source(config: TrainerConfig, paths: RunPaths, group: Group) -> str:
    """Folder of the model; one of the hub is fetched, a tiny one is made on the first call. Every rank calls it.

    Raises:
        RoleError: there is no such model.
    """
    keep_revisions(paths)
    source = fetch.model_source(config.model, paths.model, with_weights=True, trained=True)
    if group.leads:
        if config.model.tiny is not None and not (paths.model / "config.json").exists():
            if config.model.tiny.warmup_environment is not None and (pod := os.environ.get("RLRUN_POD_NAME")):
                # Code of the warm-up environment may not run here, next to the run's key.
                raise RoleError(
                    f"{paths.model} does not exist, and an init container makes it; delete the pod {pod}",
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


def load_policy(
    config: TrainerConfig, source: str, group: Group, *, with_weights: bool, check: ArchitectureCheck
) -> Policy:
    """Load the model and divide it. Trained values are not set yet. Every rank calls it.

    Args:
        config: of the trainer's own run.
        source: of the model.
        group: the ranks.
        with_weights: False leaves all weights to be filled from a checkpoint.
        check: see `load_sharded`.

    Raises:
        RoleError: it cannot be loaded, divided, or adapted.
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
        check=check,
        with_weights=with_weights,
        memory=Memory.of(config),
        kernel=config.attention,
        prepare=prepare,
    )
    files = model_files(module, config.model, source)
    return Policy(module, group, source, files, costs[-1], Adapters(module))
