"""Proof at start that the trainer computes an architecture's numbers, on a small model of it, before weights are read.

The trainer packs sequences into rows, with an attention function of its own, and writes weights under names that others read. Whether an
architecture's code bears that is measured, not listed: its layers may carry state past the end of a sequence, take positions from the row,
or have options in their attention that ours does not read. The other side is transformers in evaluation mode, as engines compute.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from loguru import logger
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from rlrun.fit.kernel_table import Feature
from rlrun.hub.repository import show_source
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.step_buffer import MicroBatch
from rlrun.trainer.modeling import packed_attention
from rlrun.trainer.modeling.model_files import published_tensors
from rlrun.trainer.modeling.noise import set_noise, source_noise
from rlrun.trainer.modeling.packed_attention import row_layout
from rlrun.trainer.modeling.tensor_names import copy_names, file_tensors, tensor_parts
from rlrun.trainer.proof.small_config import LONGEST
from rlrun.trainer.proof.small_model import quiet_transformers, small_model
from rlrun.trainer.ranks.group import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (LONGEST, 9, 17)
"""Tokens of the sequences in the row."""
LOGPROB_LIMIT = 1e-3
"""Largest difference of a log-probability, in nats. Architectures that are computed rightly reach 3e-5, others 0.3 and more."""
GRADIENT_LIMIT = 1e-2
"""Largest difference of a parameter's gradient, as a share of its norm. Architectures that are computed rightly reach 2e-4."""
SEEDS = (0, 1)
"""Seeds of weights and tokens. A router may choose another expert where two are equal up to rounding; such a tie does not come twice."""
_SPECIAL_TOKENS = 3
"""Token ids below this may be padding, begin or end in a small model."""
_NO_GRADIENT = 1e-3
"""Share of the largest gradient below which one counts as none: that of a key's bias is 0 but for rounding."""


@dataclass(frozen=True)
class Verdict:
    """Result of the check."""

    fault: str | None
    """Reason why the trainer cannot train such models, for a person; None: it can."""
    features: frozenset[Feature]
    """Demands of its attention on the kernel."""


_found: dict[str, Verdict] = {}


@dataclass(frozen=True)
class _Numbers:
    logprobs: Tensor
    """`[T]`; 0 for the first token of a sequence."""
    gradients: dict[str, Tensor]
    """Gradients of a weighted sum of the log-probabilities, by parameter."""


def check_architecture(model: PreTrainedModel, source: str, group: Group, *, seq_len: int) -> frozenset[Feature]:
    """Refuse a model whose log-probabilities, gradients or files would be wrong. Every rank takes part; rank 0 computes.

    Args:
        model: at full size, its names remembered (`tensor_names.remember_names`); only class and configuration count, it may be on meta.
        source: folder or hub name, for the message.
        group: the ranks.
        seq_len: longest sequence of the run, in tokens.

    Returns:
        Demands of its attention on the kernel.

    Raises:
        RoleError: on every rank; names the architecture and the difference.
    """
    own = examine_model(model, seq_len=seq_len) if group.leads else None
    fault, features = group.broadcast(None if own is None else [own.fault, sorted(own.features)])
    if fault is not None:
        raise RoleError(f"model {show_source(source)}: {fault}", exit_codes.CONFIGURATION)
    return frozenset(features)


def find_fault(model: PreTrainedModel, *, seq_len: int) -> str | None:
    """Reason why the trainer cannot train models like this one, for a person; None: it can. Arguments as of `examine_model`."""
    return examine_model(model, seq_len=seq_len).fault


def examine_model(model: PreTrainedModel, *, seq_len: int) -> Verdict:
    """Compare a small model with transformers, and note what its attention asks for. The answer is kept for the process.

    Args:
        model: see `check_architecture`.
        seq_len: longest sequence of the run, in tokens.
    """
    key = (
        f"{type(model)} {seq_len} {model.config!r} {source_noise(model)} {getattr(model, '_weight_conversions', None)}"
    )
    if key not in _found:
        with _keep_state(), packed_attention.observed_features() as features:
            fault = _find_difference(model, seq_len)
        told = None if fault is None else f"{type(model).__name__} cannot be trained: {fault}"
        _found[key] = Verdict(told, frozenset(features))
    return _found[key]


def _find_difference(model: PreTrainedModel, seq_len: int) -> str | None:
    fault = None
    for seed in SEEDS:
        try:
            small = small_model(type(model), model.config, attention="eager", seq_len=seq_len, seed=seed)
            ours, alone, in_training = (copy.deepcopy(small) for _ in range(3))
            ids, weights = _draw_inputs(len(small.get_input_embeddings().weight), seed)
            expected = _compute_eager(_as_engines_compute(small, source_noise(model)), ids, weights)
        except Exception as error:
            return f"a small model of it, made to check it, fails: {_error_reason(error)}{_too_long(model, seq_len)}"
        try:
            fault = _describe_difference(_compute_packed(ours, ids, weights, [LENGTHS]), expected)
            if fault is None:
                break
            rows = [(length,) for length in LENGTHS]
            apart = _describe_difference(_compute_packed(alone, ids, weights, rows), expected)
            trained = _describe_difference(_compute_eager(in_training, ids, weights), expected)
        except RoleError as error:
            return str(error)
        except Exception as error:
            return f"its code does not take sequences packed into rows, which the trainer computes with: {_error_reason(error)}"
        if apart is None:
            fault = f"sequences in one row change each other's results, so that {fault}"
        elif trained is not None:
            fault = f"its code computes other numbers in training than engines do, so that {fault}"
    if fault is not None:
        return f"{fault} (on a small model of it with random weights)"
    copy_names(model, ours)
    return _file_fault(ours)


def _as_engines_compute(small: PreTrainedModel, values: Mapping[str, float]) -> PreTrainedModel:
    """The small model in evaluation mode, with the noise of the source: what is none then must not be taken away either."""
    if not values:
        return small.eval()
    config = copy.deepcopy(small.config)
    set_noise(config, values)
    model = type(small)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(small.state_dict())
    return model.eval()


def _draw_inputs(vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids `[T]`, and weights `[T]` of their log-probabilities in a sum."""
    generator = torch.Generator().manual_seed(seed)
    first = min(_SPECIAL_TOKENS, vocabulary - 1)
    ids = torch.randint(first, vocabulary, (sum(LENGTHS),), generator=generator)
    return ids, torch.randn(len(ids), generator=generator)


def _compute_eager(model: PreTrainedModel, ids: Tensor, weights: Tensor) -> _Numbers:
    """Each sequence alone, by transformers."""
    found = []
    for sequence in ids.split(LENGTHS):
        logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1]
        chosen = logits.float().log_softmax(-1).gather(1, sequence[1:, None])[:, 0]
        found += [chosen.new_zeros(1), chosen]
    return _read_numbers(model, torch.cat(found), weights)


def _compute_packed(model: PreTrainedModel, ids: Tensor, weights: Tensor, rows: Sequence[tuple[int, ...]]) -> _Numbers:
    """Rows of these lengths, by the trainer."""
    model.set_attn_implementation(packed_attention.NAME)
    if model.config.get_text_config()._attn_implementation != packed_attention.NAME:
        raise RoleError("its code takes no attention function but its own", exit_codes.CONFIGURATION)
    found = [
        token_statistics(model, _make_row(tokens, lengths)).logprobs
        for tokens, lengths in zip(ids.split([sum(lengths) for lengths in rows]), rows, strict=True)
    ]
    return _read_numbers(model, torch.cat(found), weights)


def _make_row(ids: Tensor, lengths: tuple[int, ...]) -> MicroBatch:
    positions = torch.cat([torch.arange(length) for length in lengths])
    zeros = torch.zeros(len(ids))
    packed = row_layout(lengths, ids.device)
    mask = positions > 0
    sequences = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return MicroBatch(
        ids, positions, mask, zeros, zeros, zeros.long(), zeros + 1, packed, mask.nonzero()[:, 0], sequences
    )


def _read_numbers(model: PreTrainedModel, logprobs: Tensor, weights: Tensor) -> _Numbers:
    (logprobs * weights).sum().backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return _Numbers(logprobs.detach(), gradients)


def _describe_difference(found: _Numbers, expected: _Numbers) -> str | None:
    """First difference beyond rounding, as a message; None: there is none."""
    error = float((found.logprobs - expected.logprobs).abs().max())
    if not error <= LOGPROB_LIMIT:
        return f"log-probabilities differ by {error:.2g} from those of transformers (allowed: {LOGPROB_LIMIT:g})"
    least = _NO_GRADIENT * max(float(gradient.norm()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        error = float((found.gradients[name] - gradient).norm()) / max(float(gradient.norm()), least)
        if not error <= GRADIENT_LIMIT:
            return f"the gradient of {name} differs by {error:.2g} of its norm from that of transformers (allowed: {GRADIENT_LIMIT:g})"
    return None


def _file_fault(model: PreTrainedModel) -> str | None:
    """Write the small model as versions are written, and have transformers read it."""
    tensors = published_tensors(model)
    with tempfile.TemporaryDirectory() as folder:
        try:
            files: dict[str, Tensor] = {}
            for part in tensor_parts(model, tensors):
                files |= {name: tensor.detach().clone() for name, tensor in file_tensors(model, part, tensors).items()}
            save_file(files, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            GenerationConfig().save_pretrained(folder)
            again = type(model).from_pretrained(folder, config=copy.deepcopy(model.config), dtype=torch.float32)
        except Exception as error:
            return f"transformers does not read the files that the trainer writes: {_error_reason(error)}"
    found = dict([*again.state_dict().items(), *again.named_buffers()])
    written = dict([*model.state_dict().items(), *model.named_buffers()])
    wrong = [name for name, tensor in written.items() if name not in found or not torch.equal(found[name], tensor)]
    if not wrong:
        return None
    return f"transformers reads {len(wrong)} of {len(written)} tensors otherwise than the trainer writes them, such as {wrong[0]}"


def _too_long(model: PreTrainedModel, seq_len: int) -> str:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int) or seq_len <= longest:
        return ""
    return f" (seqLen is {seq_len}, and the model is made for {longest} positions; lower seqLen)"


def _error_reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


@contextmanager
def _keep_state() -> Iterator[None]:
    """Leave random state, threads and the log as they are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices: to wait for other threads costs more than they save
    logger.disable("rlrun.trainer.learning.forward")  # it logs about the real model what it logs about the small one
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), quiet_transformers():
            yield
    finally:
        logger.enable("rlrun.trainer.learning.forward")
        torch.set_num_threads(threads)
