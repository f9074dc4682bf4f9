"""Attention kernel that the trainer would choose on a GPU product, by the trainer's own rule (`attention_kernels`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlrun.config.models.roles import TrainerSpec
from rlrun.fit.architecture import Architecture
from rlrun.fit.attention_kernels import (
    BACKENDS,
    FEATURES,
    AttentionError,
    Feature,
    Kernel,
    Machine,
    Needs,
    choose_kernel,
)
from rlrun.fit.memory_parts import capability_of

_EVERY_PACKAGE: Mapping[Kernel, str] = {
    kernel: "of the image" for kernel, backend in BACKENDS.items() if backend.package is not None
}
_LOCKED: Mapping[Kernel, frozenset[Feature]] = {
    kernel: backend.package.locked
    for kernel, backend in BACKENDS.items()
    if backend.package is not None and backend.package.locked is not None
}
"""Features of the packages that RLRun's GPU images contain."""


_RATES: Mapping[Kernel, tuple[float, float]] = {
    "varlen": (300e12, 290e12),
    "flash2": (300e12, 290e12),
    "cudnn": (480e12, 480e12),
    "fa3": (700e12, 555e12),
}
"""FLOP/s on Hopper, forward and backward, causal, head size 128, measured for rows of 16,384 tokens (benchmarks/results/gpu/kernels.md).
The values of torch's FlashAttention 2 are used for both variants of that version. At 65,536 tokens the rates differ by -6 % to +18 %.
`fa4` was not measured, and its authors publish no backward rate for Hopper: its time is not estimated."""
_HOPPER, _MEASURED_HEAD = 9, 128


@dataclass(frozen=True)
class Expected:
    """Kernel that the trainer is expected to use."""

    kernel: Kernel
    """Kernel in RLRun's GPU images, or the requested one."""
    without_packages: Kernel
    """Kernel in an image without the packages of kernels."""

    @property
    def padded(self) -> bool:
        """Whether the kernel copies the row into padded blocks."""
        return self.kernel in ("sdpa", "cudnn")

    def __str__(self) -> str:
        """Both kernels, as text after "attention: auto is"."""
        package = BACKENDS[self.kernel].package
        if self.without_packages == self.kernel or package is None:
            return self.kernel
        return f"{self.kernel}, or {self.without_packages} in an image without {package.module}"


def attention_seconds(
    kernel: Kernel,
    trainer: TrainerSpec,
    model: Architecture,
    product: str | None,
    *,
    tokens: int,
    longest: int,
    again: bool,
) -> float | None:
    """Return the seconds of attention over a row, forward and backward, on one GPU, or None without a known rate.

    The row contains as few sequences as possible, which is the most expensive case.

    Args:
        kernel: kernel that computes it.
        trainer: configuration of the trainer, whose ranks share heads, tokens and layers.
        model: shape of the policy.
        product: product name of the GPU.
        tokens: tokens of the row.
        longest: largest number of tokens of a sequence.
        again: whether the forward pass is repeated in the backward pass.
    """
    rates = _RATES.get(kernel)
    if rates is None or not _is_measured(model, product):
        return None
    layout = trainer.parallelism
    full, rest = divmod(tokens, longest)
    squares = model.queries * model.layers * (full * longest**2 + rest**2) / (layout.tp * layout.cp * layout.pp)
    return (2 * squares / rates[0]) * (1 + again) + 5 * squares / rates[1]


def lacks_rate(kernel: Kernel, model: Architecture, product: str | None) -> bool:
    """Return whether a package's kernel has no rate, while other kernels have one for this model and GPU."""
    return BACKENDS[kernel].package is not None and kernel not in _RATES and _is_measured(model, product)


def _is_measured(model: Architecture, product: str | None) -> bool:
    """Return whether the rates apply to a model and a GPU product."""
    capability = capability_of(product) if product else None
    if capability is None or capability[0] != _HOPPER:
        return False
    return model.head_dim == _MEASURED_HEAD and "window" not in model.attention


def needs_of_attention(trainer: TrainerSpec, model: Architecture) -> Needs:
    """Return the requirements of a model and a run on the kernel."""
    features: set[Feature] = set(model.attention)
    if trainer.compute_dtype == "float32":
        features.add("float32")
    if trainer.parallelism.cp > 1:
        features.add("context")
    return Needs(frozenset(features), model.head_dim)


def kernel_problem(trainer: TrainerSpec, model: Architecture, product: str | None) -> str | None:
    """Return why the requested kernel cannot compute the model, as text after the field, or None if it can or nothing is known.

    Args:
        trainer: configuration of the trainer.
        model: shape of the policy.
        product: product name of its GPUs; None: unknown, so that only the model is checked.
    """
    asked = trainer.attention
    if asked == "auto" or not trainer.gpus_per_replica:
        return None
    capability = capability_of(product) if product else None
    if capability is None:  # assume a GPU that supports the kernel
        first = BACKENDS[asked].capabilities
        capability = (first[0] if first else 9, 0)
    machine = Machine(product or "this GPU", capability, _EVERY_PACKAGE)
    try:
        choose_kernel(asked, needs_of_attention(trainer, model), machine)
    except AttentionError as error:
        return f"{asked}: {str(error).partition(': ')[2]}"
    return None


def absent_from_images(trainer: TrainerSpec, model: Architecture | None) -> str | None:
    """Return the lack of RLRun's GPU images for the requested kernel, as text after the field with the fix, or None.

    Args:
        trainer: configuration of the trainer.
        model: shape of the policy; None: unknown, so that only the package is checked.
    """
    asked = trainer.attention
    if asked == "auto" or not trainer.gpus_per_replica or (package := BACKENDS[asked].package) is None:
        return None
    if asked not in _LOCKED:
        return (
            f"{asked}: RLRun's GPU images do not contain {package.module}; set attention: auto, or a trainer.image that contains it "
            f"({package.install})"
        )
    needs = needs_of_attention(trainer, model) if model is not None else Needs()
    lacking = [FEATURES[feature] for feature in FEATURES if feature in needs.features - _LOCKED[asked]]
    if not lacking:
        return None
    return (
        f"{asked}: {package.module} of RLRun's GPU images does not support {' and '.join(lacking)}; set attention: auto, or a "
        "trainer.image with another build"
    )


def expected_kernel(trainer: TrainerSpec, model: Architecture, product: str | None) -> Expected | None:
    """Return the kernel with and without the packages of RLRun's images, or None for an unknown GPU.

    Args:
        trainer: configuration of the trainer; a kernel that cannot compute the model counts as `auto`.
        model: shape of the policy.
        product: product name of its GPUs.
    """
    capability = capability_of(product) if product else None
    if product is None or capability is None or not trainer.gpus_per_replica:
        return None
    needs = needs_of_attention(trainer, model)
    if trainer.attention != "auto" and kernel_problem(trainer, model, product) is None:
        return Expected(trainer.attention, trainer.attention)
    # A build of a package may lack features that the table allows for its kernel.
    locked = {kernel: "of the image" for kernel, features in _LOCKED.items() if needs.features <= features}
    image, plain = (choose_kernel("auto", needs, Machine(product, capability, packages)) for packages in (locked, {}))
    return Expected(image.kernel, plain.kernel)
