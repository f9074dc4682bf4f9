"""Checks of a model's architecture at each start, and of its division into pipeline stages.

Two stages of a small model must equal the whole model. The code of an architecture may transform the input of the first layer, or share
state between layers, which a later stage would repeat or lack.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlrun.config.layout_rules import stages_problem
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.lm_head import find_head
from rlrun.trainer.modeling.load_weights import (
    ArchitectureCheck,
    Support,
    load_sharded,
    model_on_meta,
    plan_complete,
)
from rlrun.trainer.modeling.parallel.pipeline_stages import keep_stage
from rlrun.trainer.modeling.shard import decoder_layers, loading_errors
from rlrun.trainer.modeling.stored.weight_files import open_files
from rlrun.trainer.proof.architecture_check import check_architecture, find_fault
from rlrun.trainer.proof.small_models import quiet_transformers, small_model
from rlrun.trainer.ranks.group import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_TOKENS = 11
_LIMIT = 1e-4
"""Largest allowed difference of hidden states, whose size is about 1. Supported architectures reach 0."""


def check_stages(model: PreTrainedModel, group: Group, *, seq_len: int) -> None:
    """Raise an error if a model cannot be divided into stages, before its weights are read. All ranks call it together; rank 0 computes.

    Args:
        model: model at full size; only class and configuration are used.
        group: all ranks, with their layout.
        seq_len: longest sequence of the run, in tokens.

    Raises:
        RoleError: the architecture does not support stages; raised on all ranks.
    """
    count, layers = group.dims.pp, len(decoder_layers(model))
    if count == 1:
        return
    if (problem := stages_problem(count, layers, per_rank=group.dims.local_stages)) is not None:
        raise RoleError(f"trainer.parallelism.pp ({count}) {problem}", exit_codes.CONFIGURATION)
    fault = group.broadcast(fault_of_stages(model, seq_len=seq_len) if group.leads else None)
    if fault is not None:
        raise RoleError(
            f"trainer.parallelism.pp ({count}): {type(model).__name__} cannot be divided into stages: {fault}; set pp: 1",
            exit_codes.CONFIGURATION,
        )


def fault_of_stages(model: PreTrainedModel, *, seq_len: int) -> str | None:
    """Return the reason why such models cannot be divided into stages, or None; for the arguments see `check_stages`."""
    try:
        with torch.no_grad(), quiet_transformers():
            whole = small_model(type(model), model.config, attention="eager", seq_len=seq_len, seed=0).eval()
            ids = torch.arange(3, 3 + _TOKENS)[None] % len(whole.get_input_embeddings().weight)
            expected, found = _hidden_states(whole, ids, None), None
            for index in range(2):
                stage = copy.deepcopy(whole)
                keep_stage(stage, decoder_layers(stage), index, 2)
                found = _hidden_states(stage, ids, found)
            if find_head(stage) is None:
                return "it transforms its logits in an unknown way"
            error = float((found - expected).abs().max())
    except TimeoutError:  # a deadline of the caller
        raise
    except Exception as caught:  # the architecture's code may raise any error
        lines = str(caught).strip().splitlines() or ["no message"]
        return f"{type(caught).__name__}: {lines[0]}"
    return None if error < _LIMIT else f"the output of the last layer differs by {error:.1g}"


def _hidden_states(model: PreTrainedModel, ids: Tensor, received: Tensor | None) -> Tensor:
    start = {"input_ids": ids} if received is None else {"inputs_embeds": received}
    hidden: Tensor = model.get_decoder()(
        **start, position_ids=torch.arange(ids.shape[1])[None], use_cache=False
    ).last_hidden_state
    return hidden


def check_model(model: PreTrainedModel, source: str, group: Group, seq_len: int) -> Support:
    """Raise an error for a model that the trainer would compute, divide into stages or publish wrongly. All ranks call it together.

    Args:
        model: model at full size, on meta.
        source: folder or hub name, for the message.
        group: all ranks.
        seq_len: longest sequence of the run, in tokens.

    Returns:
        Kernel features that the model's attention needs, and the packing of its rows.

    Raises:
        RoleError: the model is not supported; raised on all ranks, with the architecture and the difference.
    """
    support = check_architecture(model, source, group, seq_len=seq_len)
    check_stages(model, group, seq_len=seq_len)
    return support


def policy_check(config: TrainerConfig) -> ArchitectureCheck:
    """Return the check of a run's policy: `check_model`; for an own class that engines serve, also of its logits.

    vLLM runs the decoder of such a class, and computes the logits itself from the weight of its head.
    """
    if config.model.class_ is None or config.task == "SFT":
        return check_model

    def check(model: PreTrainedModel, source: str, group: Group, seq_len: int) -> Support:
        support, head = check_model(model, source, group, seq_len), find_head(model)
        scale = float(getattr(model.config.get_text_config(), "logit_scale", None) or 1.0)
        if head is None or (head.softcap is None and not math.isclose(head.scale, scale, rel_tol=1e-4)):
            raise RoleError(
                f"model.class {config.model.class_}: {type(model).__name__} transforms its logits, which engines would not; return "
                "the output of its head unchanged, or set logit_scale or final_logit_softcapping in config.json and apply only these",
                exit_codes.CONFIGURATION,
            )
        return support

    return check


load_checked = partial(load_sharded, check=check_model)
"""`load_sharded` with `check_model`."""


def check_folder(path: str, *, trust_remote_code: bool, seq_len: int, model_class: str | None = None) -> None:
    """Check the architecture and the tensors of a model folder like `load_checked`, without reading values of weights.

    Args:
        path: folder of the model.
        trust_remote_code: true if the model's own code may run.
        seq_len: longest sequence of the run, in tokens.
        model_class: import path of the run's own class, or None.

    Raises:
        RoleError: the trainer does not support the model, or its files are incomplete.
    """
    config = ModelConfig(path=path, trust_remote_code=trust_remote_code, class_=model_class)
    model = model_on_meta(config, path)
    if (fault := find_fault(model, seq_len=seq_len)) is not None:
        raise RoleError(fault, exit_codes.CONFIGURATION)
    with loading_errors(path):
        files = open_files(path, {})
    plan_complete(model, files, path)
