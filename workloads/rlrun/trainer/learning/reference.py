"""A frozen model beside the policy: the reference of a KL term, or the teacher of a distillation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlrun.config.models.companions import ReferenceConfig
from rlrun.config.models.model import ModelConfig
from rlrun.hub.fetch import reference_source
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.auxiliary_logprobs import logprobs_without_gradient
from rlrun.trainer.learning.optim.update import all_finite
from rlrun.trainer.learning.step_buffer import MicroBatch
from rlrun.trainer.modeling.load_weights import ArchitectureCheck, load_sharded
from rlrun.trainer.modeling.shard import check_source
from rlrun.trainer.ranks.group import Group


def freeze_reference(model: nn.Module, group: Group, *, vocabulary: int) -> None:
    """Make a loaded model a reference, before it is divided: nothing is trained, and parameters are rounded where that saves memory.

    Args:
        model: changed in place.
        group: whose device it will be on.
        vocabulary: size of the policy's.

    Raises:
        RoleError: its vocabulary has another size.
    """
    found = int(model.config.get_text_config().vocab_size)
    if found != vocabulary:
        raise RoleError(
            f"model ({model.config.name_or_path}) has a vocabulary of {found} tokens, the policy one of {vocabulary}: "
            "they must be the same; choose a model of the same family",
            exit_codes.CONFIGURATION,
        )
    model.requires_grad_(False)
    if group.device.type == "cuda":
        round_parameters(model, torch.bfloat16)


class FrozenReference:
    """Log-probs of a model that the trainer holds itself, sharded like the policy; on CUDA in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @classmethod
    def load(
        cls,
        config: ReferenceConfig,
        policy: ModelConfig,
        *,
        initial: str,
        vocabulary: int,
        seq_len: int,
        group: Group,
        check: ArchitectureCheck,
    ) -> FrozenReference:
        """Load it from its source, again in every attempt: no checkpoint holds it.

        Args:
            config: which model.
            policy: the run's model, which `initial` means.
            initial: where the run's model is loaded from.
            vocabulary: size of the policy's.
            seq_len: longest sequence of the run, in tokens.
            group: every rank takes part.
            check: see `load_sharded`.

        Raises:
            RoleError: it cannot be loaded, or its vocabulary has another size.
        """
        chosen = config.resolved(policy)

        def prepare(model: nn.Module) -> None:
            freeze_reference(model, group, vocabulary=vocabulary)

        source = initial if chosen is policy else reference_source(config, chosen)
        try:
            check_source(chosen, source)
            model = load_sharded(chosen, source, group, seq_len=seq_len, check=check, prepare=prepare)
        except RoleError as error:
            raise RoleError(f"algorithm.reference: {error}", error.code) from error
        return cls(model.eval())

    def logprobs(self, rows: Sequence[MicroBatch]) -> list[Tensor]:
        """See `ReferenceSource.logprobs`.

        Raises:
            RoleError: the model overflows.
        """
        found = logprobs_without_gradient(self.model, rows)
        if not all_finite(found):
            raise RoleError(
                "algorithm.reference: the model gives log-probabilities that are not finite; its weights are damaged, or "
                "do not fit bfloat16",
                exit_codes.DATA,
            )
        return found


def round_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the parameters in `dtype`, in place. Buffers stay as they are: rotary frequencies bear no rounding."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
