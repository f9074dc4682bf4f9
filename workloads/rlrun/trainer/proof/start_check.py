"""Architecture check of each start, and loading with this check."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedModel

from rlrun.config.models.model import ModelConfig
from rlrun.fit.kernel_table import Feature
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.load_weights import load_sharded, model_on_meta
from rlrun.trainer.proof.architecture_check import check_architecture, find_fault
from rlrun.trainer.proof.stage_check import check_stages
from rlrun.trainer.ranks.group import Group


def check_model(model: PreTrainedModel, source: str, group: Group, seq_len: int) -> frozenset[Feature]:
    """Raise an error for a model that the trainer would compute, divide into stages or publish wrongly. All ranks call it together.

    Args:
        model: model at full size, on meta.
        source: folder or hub name, for the message.
        group: all ranks.
        seq_len: longest sequence of the run, in tokens.

    Returns:
        Kernel features that the model's attention needs.

    Raises:
        RoleError: the model is not supported; raised on all ranks, with the architecture and the difference.
    """
    features = check_architecture(model, source, group, seq_len=seq_len)
    check_stages(model, group, seq_len=seq_len)
    return features


load_checked = partial(load_sharded, check=check_model)
"""`load_sharded` with `check_model`."""


def check_folder(path: str, *, trust_remote_code: bool, seq_len: int) -> None:
    """Check the architecture of a model folder like `load_checked`, without reading weights.

    Args:
        path: folder of the model.
        trust_remote_code: true if the model's own code may run.
        seq_len: longest sequence of the run, in tokens.

    Raises:
        RoleError: the trainer does not support the model.
    """
    model, _ = model_on_meta(ModelConfig(path=path, trust_remote_code=trust_remote_code), path)
    if (fault := find_fault(model, seq_len=seq_len)) is not None:
        raise RoleError(fault, exit_codes.CONFIGURATION)
