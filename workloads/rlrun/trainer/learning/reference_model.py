"""Frozen reference model: the reference of a KL term, or the teacher of a distillation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlrun.config.models.language_models import ModelConfig, ReferenceConfig
from rlrun.hub.fetch import reference_source
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.forward import logprobs_without_gradient
from rlrun.trainer.learning.optim.update import all_finite
from rlrun.trainer.learning.step_buffer import MicroBatch
from rlrun.trainer.modeling.load_weights import ArchitectureCheck, LoadOptions, load_sharded
from rlrun.trainer.modeling.shard import check_source
from rlrun.trainer.ranks.group import Group


def freeze_reference(model: nn.Module, group: Group, *, vocabulary: int) -> None:
    """Turn a loaded model into a reference before sharding: disable gradients, and on CUDA convert parameters to bfloat16.

    Args:
        model: loaded model, changed in place.
        group: ranks; their device decides on the conversion.
        vocabulary: number of tokens in the policy's vocabulary.

    Raises:
        RoleError: the vocabulary has a different size.
    """
    found = int(model.config.get_text_config().vocab_size)
    if found != vocabulary:
        raise RoleError(
            f"model ({model.config.name_or_path}) has a vocabulary of {found} tokens, but the policy has {vocabulary}; "
            "choose a model of the same family",
            exit_codes.CONFIGURATION,
        )
    model.requires_grad_(False)
    if group.device.type == "cuda":
        round_parameters(model, torch.bfloat16)


class FrozenReference:
    """Reference model in the trainer's memory, sharded like the policy; in bfloat16 on CUDA."""

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
        """Load the model from its source in every attempt, because checkpoints do not contain it.

        Args:
            config: selected reference model.
            policy: configuration of the run's model.
            initial: source of the run's model.
            vocabulary: number of tokens in the policy's vocabulary.
            seq_len: longest sequence of the run, in tokens.
            group: all ranks; all call this function together.
            check: architecture check, see `load_sharded`.

        Raises:
            RoleError: the model cannot be loaded, or its vocabulary has a different size.
        """
        chosen = config.resolve_model(policy)

        def prepare(model: nn.Module) -> None:
            freeze_reference(model, group, vocabulary=vocabulary)

        source = initial if chosen is policy else reference_source(config, chosen)
        try:
            check_source(chosen, source)
            model = load_sharded(
                chosen, source, group, seq_len=seq_len, check=check, options=LoadOptions(prepare=prepare)
            )
        except RoleError as error:
            raise RoleError(f"algorithm.reference: {error}", error.code) from error
        return cls(model.eval())

    def logprobs(self, rows: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probs of the loss tokens, see `ReferenceSource.logprobs`.

        Raises:
            RoleError: a log-prob is not finite.
        """
        found = logprobs_without_gradient(self.model, rows)
        if not all_finite(found):
            raise RoleError(
                "algorithm.reference: the model's log-probabilities are not finite; its weights are damaged or overflow in "
                "bfloat16",
                exit_codes.DATA,
            )
        return found


def round_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters to `dtype` in place. Buffers keep their dtype, because rotary frequencies need full precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
