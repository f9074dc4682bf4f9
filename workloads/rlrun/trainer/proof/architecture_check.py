"""Check that the trainer computes an architecture correctly, on a small model of it, before weights are read.

The trainer packs sequences into rows, replaces the attention function, and writes weights under the names of files. Whether an
architecture supports this is tested, not listed: its layers may carry state across sequences, derive positions from the row, or use
unsupported attention options. The reference is transformers in evaluation mode, as in engines.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from loguru import logger
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from rlrun.config.families import explain_state, has_state
from rlrun.fit.attention_kernels import Feature
from rlrun.hub.repository import show_source
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.step_buffer import MicroBatch
from rlrun.trainer.modeling import packed_attention
from rlrun.trainer.modeling.load_weights import Support
from rlrun.trainer.modeling.model_files import published_tensors
from rlrun.trainer.modeling.noise import set_noise, source_noise
from rlrun.trainer.modeling.packed_attention import row_layout
from rlrun.trainer.modeling.recurrent import PACKINGS, Packing, divide_mixers, pass_rows
from rlrun.trainer.modeling.shard import decoder_layers
from rlrun.trainer.modeling.tensor_names import copy_names, file_tensors, tensor_parts
from rlrun.trainer.proof.routing_check import find_routing_fault
from rlrun.trainer.proof.small_models import LONGEST, quiet_transformers, small_model
from rlrun.trainer.ranks.group import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (LONGEST, 9, 17)
"""Lengths of the sequences in the test row."""
LOGPROB_LIMIT = 1e-3
"""Largest allowed difference of a log-probability, in nats. Supported architectures reach 3e-5, others 0.3 and more."""
GRADIENT_LIMIT = 1e-2
"""Largest allowed difference of a parameter's gradient, relative to its norm. Supported architectures reach 2e-4."""
SEEDS = (0, 1)
"""Seeds of weights and tokens. A router may choose another expert if two scores are equal up to rounding; such a tie does not repeat with
another seed.
"""
_SPECIAL_TOKENS = 3
"""Number of first token ids that may be padding, start or end tokens in a small model."""
_NO_GRADIENT = 1e-3
"""Fraction of the largest gradient below which a gradient counts as 0; the gradient of a key's bias is 0 except for rounding."""


@dataclass(frozen=True)
class Verdict:
    """Result of the check."""

    fault: str | None
    """Reason why the trainer cannot train such models, or None."""
    features: frozenset[Feature]
    """Kernel features that the model's attention needs."""
    packing: Packing = "row"
    """Rows with which the trainer computes such models correctly."""
    reason: str = ""
    """Reason why `packing` is not `row`."""
    routing_fault: str | None = None
    """Reason why routes cannot be replayed, or None; only meaningful without `fault`."""


_found: dict[str, Verdict] = {}


@dataclass(frozen=True)
class _Numbers:
    logprobs: Tensor
    """Log-probabilities, `[T]`; 0 for the first token of a sequence."""
    gradients: dict[str, Tensor]
    """Gradients of a weighted sum of the log-probabilities, by parameter."""


def check_architecture(model: PreTrainedModel, source: str, group: Group, *, seq_len: int) -> Support:
    """Raise an error for a model whose log-probabilities, gradients or files would be wrong. All ranks call it together; rank 0 computes.

    Args:
        model: model at full size with stored conversions (`tensor_names.remember_names`); only class and configuration are used, so it
            may be on meta.
        source: folder or hub name, for the message.
        group: all ranks.
        seq_len: longest sequence of the run, in tokens.

    Returns:
        Kernel features that the model's attention needs, the packing of its rows, which rank 0 logs if it is not `row`, and the fault of
        replayed routes.

    Raises:
        RoleError: the model is not supported; raised on all ranks, with the architecture and the difference.
    """
    own = examine_model(model, seq_len=seq_len) if group.leads else None
    fault, features, packing, routing_fault = group.broadcast(
        None if own is None else [own.fault, sorted(own.features), own.packing, own.routing_fault]
    )
    if fault is None:
        fault = _layout_fault(model, packing, group)
    if fault is not None:
        raise RoleError(f"model {show_source(source)}: {fault}", exit_codes.CONFIGURATION)
    if own is not None and own.packing != "row":
        logger.info(f"{type(model).__name__}: packing {own.packing}: {own.reason}; {_COSTS[own.packing]}")
    return Support(frozenset(features), packing, routing_fault)


_COSTS: Mapping[Packing, str] = {
    "mixer": "each of its recurrent mixers runs once per sequence of a row, everything else runs on the whole row",
    "alone": "each row has one sequence, so a step needs one forward and backward pass per sequence",
}


def _layout_fault(model: PreTrainedModel, packing: Packing, group: Group) -> str | None:
    """Return why ranks cannot share the rows or layers of a model that is not packed by `row`, or None."""
    if packing == "row":
        return None
    sizes = {"cp": group.dims.cp, "tp": group.dims.tp}
    if packing == "mixer" or has_state(model.config.to_dict()):
        sizes["pp"] = group.dims.pp
    for field, size in sizes.items():
        if size > 1:
            return f"trainer.parallelism.{field} ({size}) {explain_state(type(model).__name__, field)}"
    return None


def find_fault(model: PreTrainedModel, *, seq_len: int) -> str | None:
    """Return the reason why the trainer cannot train such models, or None; for the arguments see `examine_model`."""
    return examine_model(model, seq_len=seq_len).fault


def examine_model(model: PreTrainedModel, *, seq_len: int) -> Verdict:
    """Compare a small model with transformers, and collect the kernel features it needs. The result is cached in the process.

    Args:
        model: model, see `check_architecture`.
        seq_len: longest sequence of the run, in tokens.
    """
    key = (
        f"{type(model)} {seq_len} {model.config!r} {source_noise(model)} {getattr(model, '_weight_conversions', None)}"
    )
    if key not in _found:
        with _keep_state(), packed_attention.observed_features() as features:
            found = _compare_levels(model, seq_len)
        told = None if found.fault is None else f"{type(model).__name__} cannot be trained: {found.fault}"
        _found[key] = replace(found, fault=told, features=frozenset(features))
    return _found[key]


def _compare_levels(model: PreTrainedModel, seq_len: int) -> Verdict:
    """Return the cheapest packing whose numbers equal those of transformers, or the fault; without features."""
    trials: list[Verdict] = []
    for seed in SEEDS:
        try:
            small = small_model(type(model), model.config, attention="eager", seq_len=seq_len, seed=seed)
            ids, weights = _draw_inputs(len(small.get_input_embeddings().weight), seed)
            evaluated = _as_engines_compute(copy.deepcopy(small), source_noise(model))
            expected = _compute_eager(evaluated, ids, weights)
        except TimeoutError:  # a deadline of the caller
            raise
        except Exception as error:  # the architecture's code may raise any error
            fault = f"a small model of it fails in the start check: {_error_reason(error)}{_too_long(model, seq_len)}"
            return Verdict(fault, frozenset())
        try:
            trials.append(_try_levels(small, ids, weights, expected))
        except RoleError as error:
            return Verdict(str(error), frozenset())
        except TimeoutError:
            raise
        except Exception as error:
            fault = f"its code does not support packed rows, which the trainer uses: {_error_reason(error)}"
            return Verdict(fault, frozenset())
        if trials[-1].fault is None and trials[-1].packing != "alone":
            break
    found = min(trials, key=lambda trial: (trial.fault is not None, PACKINGS.index(trial.packing)))
    if found.fault is not None:
        return replace(found, fault=f"{trials[-1].fault} (on a small model of it with random weights)")
    copy_names(model, small)
    routing_fault = find_routing_fault(*_packed_rows(copy.deepcopy(small), ids, found.packing), found.packing)
    return replace(found, fault=_file_fault(small), routing_fault=routing_fault)


def _packed_rows(model: PreTrainedModel, ids: Tensor, packing: Packing) -> tuple[PreTrainedModel, list[MicroBatch]]:
    """Set packed attention in the model, and return its rows."""
    model.set_attn_implementation(packed_attention.NAME)
    rows = [(length,) for length in LENGTHS] if packing == "alone" else [LENGTHS]
    parts = ids.split([sum(lengths) for lengths in rows])
    return model, [_make_row(tokens, lengths) for tokens, lengths in zip(parts, rows, strict=True)]


def _try_levels(small: PreTrainedModel, ids: Tensor, weights: Tensor, expected: _Numbers) -> Verdict:
    """Compare packed rows of a small model with the expected numbers, for one packing after the other."""
    fault = _describe_difference(_compute_packed(copy.deepcopy(small), ids, weights, [LENGTHS]), expected)
    if fault is None:
        return Verdict(None, frozenset())
    rows = [(length,) for length in LENGTHS]
    if _describe_difference(_compute_packed(copy.deepcopy(small), ids, weights, rows), expected) is not None:
        if _describe_difference(_compute_eager(copy.deepcopy(small), ids, weights), expected) is not None:
            fault = f"its code computes differently in training mode than in evaluation mode, so that {fault}"
        return Verdict(fault, frozenset())
    reason = f"sequences in one row influence each other, so that {fault}"
    mixer_fault = _try_mixers(copy.deepcopy(small), ids, weights, expected)
    if mixer_fault is None:
        return Verdict(None, frozenset(), "mixer", reason)
    return Verdict(None, frozenset(), "alone", f"{reason}, and {mixer_fault}")


def _try_mixers(model: PreTrainedModel, ids: Tensor, weights: Tensor, expected: _Numbers) -> str | None:
    """Return why a model with divided mixers differs from the expected numbers, or None."""
    layers, called = decoder_layers(model), set[nn.Module]()
    mixers = divide_mixers(layers)
    pass_rows(model, layers)
    if not mixers:
        return "its layers have no recurrent mixer of a known kind"
    for mixer in mixers:
        mixer.register_forward_hook(lambda module, *_: called.add(module))
    try:
        fault = _describe_difference(_compute_packed(model, ids, weights, [LENGTHS]), expected)
    except TimeoutError:
        raise
    except Exception as error:  # the architecture's code may raise any error
        return f"its mixers ({_class_names(mixers)}) fail per sequence: {_error_reason(error)}"
    if fault is None and len(called) < len(mixers):
        fault = f"{len(mixers) - len(called)} of its {len(mixers)} mixers were not called"
    return (
        None if fault is None else f"with mixers ({_class_names(mixers)}) that compute each sequence separately {fault}"
    )


def _class_names(modules: Sequence[nn.Module]) -> str:
    return ", ".join(sorted({type(module).__name__ for module in modules}))


def _as_engines_compute(small: PreTrainedModel, values: Mapping[str, float]) -> PreTrainedModel:
    """Return the small model in evaluation mode with the source's noise, because options that look like noise may act in evaluation too."""
    if not values:
        return small.eval()
    config = copy.deepcopy(small.config)
    set_noise(config, values)
    model = type(small)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(small.state_dict())
    return model.eval()


def _draw_inputs(vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw token ids `[T]`, and weights `[T]` of their log-probabilities in a sum."""
    generator = torch.Generator().manual_seed(seed)
    first = min(_SPECIAL_TOKENS, vocabulary - 1)
    ids = torch.randint(first, vocabulary, (sum(LENGTHS),), generator=generator)
    return ids, torch.randn(len(ids), generator=generator)


def _compute_eager(model: PreTrainedModel, ids: Tensor, weights: Tensor) -> _Numbers:
    """Compute each sequence separately with transformers."""
    found = []
    for sequence in ids.split(LENGTHS):
        logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1]
        chosen = logits.float().log_softmax(-1).gather(1, sequence[1:, None])[:, 0]
        found += [chosen.new_zeros(1), chosen]
    return _read_numbers(model, torch.cat(found), weights)


def _compute_packed(model: PreTrainedModel, ids: Tensor, weights: Tensor, rows: Sequence[tuple[int, ...]]) -> _Numbers:
    """Compute packed rows with the trainer's functions."""
    model.set_attn_implementation(packed_attention.NAME)
    if model.config.get_text_config()._attn_implementation != packed_attention.NAME:
        raise RoleError("its code does not support other attention functions", exit_codes.CONFIGURATION)
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
    """Describe the first difference that exceeds rounding errors, or return None."""
    error = float((found.logprobs - expected.logprobs).abs().max())
    if not error <= LOGPROB_LIMIT:
        return f"log-probabilities differ by {error:.2g} from transformers (allowed: {LOGPROB_LIMIT:g})"
    least = _NO_GRADIENT * max(float(gradient.norm()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        error = float((found.gradients[name] - gradient).norm()) / max(float(gradient.norm()), least)
        if not error <= GRADIENT_LIMIT:
            return f"the gradient of {name} differs by {error:.2g} of its norm from transformers (allowed: {GRADIENT_LIMIT:g})"
    return None


def _file_fault(model: PreTrainedModel) -> str | None:
    """Write the small model like a published version, load it with transformers and compare."""
    tensors = published_tensors(model)
    with tempfile.TemporaryDirectory() as folder:
        try:
            files: dict[str, Tensor] = {}
            for part in tensor_parts(model, tensors):
                files |= {name: tensor.detach().clone() for name, tensor in file_tensors(model, part, tensors).items()}
            save_file(files, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            GenerationConfig().save_pretrained(folder)
            again = type(model).from_pretrained(folder, config=copy.deepcopy(model.config), dtype=torch.float32)
        except TimeoutError:
            raise
        except Exception as error:
            return f"transformers cannot load the files that the trainer writes: {_error_reason(error)}"
    found, written = (
        # Parameters too, because a class's own `state_dict` may lack some.
        dict([*one.state_dict().items(), *one.named_parameters(), *one.named_buffers()])
        for one in (again, model)
    )
    wrong = [
        name
        for name, tensor in written.items()
        if name not in found or found[name].is_meta or not torch.equal(found[name], tensor)
    ]
    if not wrong:
        return None
    return f"transformers loads {len(wrong)} of {len(written)} tensors differently from the trainer's files, such as {wrong[0]}"


def _too_long(model: PreTrainedModel, seq_len: int) -> str:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int) or seq_len <= longest:
        return ""
    return f" (seqLen is {seq_len}, but the model supports {longest} positions; lower seqLen)"


def _error_reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


@contextmanager
def _keep_state() -> Iterator[None]:
    """Restore random state, threads and log after the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # synchronizing threads costs more than they save on small matrices
    logger.disable("rlrun.trainer.learning.forward")  # its messages would be repeated for the real model
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), quiet_transformers():
            yield
    finally:
        logger.enable("rlrun.trainer.learning.forward")
        torch.set_num_threads(threads)
