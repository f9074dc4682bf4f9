"""Attention kernels: a table of their features, devices and packages, and the choice of one for a model on a device.

The choice contains the reason. Pure, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlrun.config.models.parallel import AttentionKernel

Feature = Literal["window", "softcap", "sinks", "value heads", "float32", "context"]
Kernel = Literal["fa3", "fa4", "flash2", "cudnn", "varlen", "flex", "sdpa"]
"""A kernel: `AttentionKernel` without `auto`."""
FEATURES: Mapping[Feature, str] = {
    "window": "a sliding window",
    "softcap": "soft-capped scores",
    "sinks": "sinks",
    "value heads": "values of another head size than keys",
    "float32": "computeDtype float32",
    "context": "rows that ranks share (parallelism.cp)",
}
"""Requirements on a kernel, as text after "the model's attention has"."""


@dataclass(frozen=True)
class Package:
    """A package that provides a kernel."""

    module: str
    """Module to import."""
    functions: Mapping[str, tuple[str, ...]]
    """Functions to call, with their arguments."""
    distributions: tuple[str, ...]
    """Possible names of the distribution, which has the version."""
    install: str
    """Command or instruction to install it."""
    operations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Operations that the import registers with torch, with the arguments that are used."""
    locked: frozenset[Feature] | None = None
    """Features of the build that RLRun's lock files and GPU images contain; None: they do not contain the package."""
    faster: bool = True
    """Whether the kernel is faster than the kernels of torch that follow in `ORDER`, so that its absence is reported."""


@dataclass(frozen=True)
class Backend:
    """Capabilities of one kernel."""

    features: frozenset[Feature]
    head_dims: int | None
    """Largest head size; None: unlimited."""
    capabilities: tuple[int, int] | None
    """First and last major CUDA compute capability; None: any device."""
    package: Package | None = None
    head_step: int = 1
    """Divisor of supported head sizes. A package's kernel is also tested with the model's size."""


_VARLEN_FUNCTION = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal")
FLASH2 = Package(
    "flash_attn",
    {"flash_attn_varlen_func": (*_VARLEN_FUNCTION, "window_size", "softcap")},
    ("flash-attn", "flash_attn"),
    "pip install --no-build-isolation 'flash-attn>=2.8'",
    faster=False,
)
"""Called if it is installed. torch's `varlen` contains the same kernels without soft caps."""
_OPERATION3 = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal", "softcap")
FA3 = Package(
    "flash_attn_interface",
    {},
    ("flash-attn-3", "flash_attn_3"),
    "make flash-attention-3 in a checkout of RLRun",
    {
        "flash_attn_3::fwd": (*_OPERATION3, "window_size_left", "window_size_right", "num_splits"),
        "flash_attn_3::bwd": (*_OPERATION3, "window_size_left", "window_size_right", "dq", "dk", "dv", "deterministic"),
    },
    locked=frozenset({"window", "sinks", "context"}),
)
"""The two operations have the same arguments in all versions since April 2025; the Python functions around them have not. The build of
`tools.flash_attention_3` has no soft caps."""
_FLASH4_ARGUMENTS = ("cu_seqlens_q", "cu_seqlens_k", "softmax_scale", "causal", "window_size_left", "window_size_right")
FA4 = Package(
    "flash_attn.cute.interface",
    {
        "_flash_attn_fwd": (*_FLASH4_ARGUMENTS, "max_seqlen_q", "max_seqlen_k", "return_lse"),
        "_flash_attn_bwd": _FLASH4_ARGUMENTS,
    },
    ("flash-attn-4", "flash_attn_4"),
    "pip install 'flash-attn-4[cu13]==4.0.0b36'",
    locked=frozenset({"window", "sinks", "context"}),
)
"""The two functions that torch's own adapter to FlashAttention 4 calls, of one release, because each beta may change them. The public
function has no gradient of sinks. Soft caps, which both accept, have not been computed on a GPU."""

BACKENDS: Mapping[Kernel, Backend] = {
    "fa3": Backend(frozenset({"window", "softcap", "sinks", "context"}), 256, (9, 9), FA3, 8),
    "fa4": Backend(frozenset({"window", "sinks", "context"}), 128, (9, 11), FA4, 8),
    "flash2": Backend(frozenset({"window", "softcap", "context"}), 256, (8, 12), FLASH2),
    "cudnn": Backend(frozenset(), 128, (8, 12), head_step=8),
    "varlen": Backend(frozenset({"window", "sinks", "context"}), 256, (8, 12), head_step=8),
    "flex": Backend(frozenset({"window", "softcap", "sinks", "value heads", "float32", "context"}), 256, (8, 12)),
    "sdpa": Backend(frozenset({"window", "softcap", "sinks", "value heads", "float32", "context"}), None, None),
}
ORDER: tuple[tuple[range, tuple[Kernel, ...]], ...] = (
    (range(9, 10), ("fa3", "fa4", "flash2", "varlen", "flex", "sdpa")),
    (range(10, 12), ("fa4", "flash2", "varlen", "flex", "sdpa")),
    (range(8, 13), ("flash2", "varlen", "flex", "sdpa")),
)
"""Order of `auto` by major compute capability; the first matching range counts. Other devices use `sdpa`. cuDNN is used only by name,
because it creates a new plan for every shape, which would delay rows of changing lengths."""


FIELD = "trainer.attention"
NOT_INSTALLED = "is not installed"
"""End of the reason in `Machine.missing` for an absent package."""


class AttentionError(ValueError):
    """Error for a kernel that cannot compute a model's attention here. The message has the field, the requirement and the fix."""


@dataclass(frozen=True)
class Needs:
    """Requirements of a model and a run on the kernel."""

    features: frozenset[Feature] = frozenset()
    head_dim: int = 0
    """Largest size of a head of queries, keys or values; 0: unknown."""


@dataclass(frozen=True)
class Machine:
    """Properties of a device and an installation."""

    name: str
    """Name of the device for messages."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None: not a CUDA device."""
    versions: Mapping[Kernel, str] = field(default_factory=dict)
    """Versions of the kernels' packages that are installed and usable."""
    missing: Mapping[Kernel, str] = field(default_factory=dict)
    """Reasons why other kernels are not usable."""

    def without_kernel(self, kernel: Kernel, reason: str) -> Machine:
        """Return the same machine without a package, for a reason found later."""
        versions = {name: version for name, version in self.versions.items() if name != kernel}
        return Machine(self.name, self.capability, versions, {**self.missing, kernel: reason})


@dataclass(frozen=True)
class Choice:
    """A kernel, and the reason for its choice."""

    kernel: Kernel
    why: str

    def __str__(self) -> str:
        return f"attention {self.kernel}: {self.why}"


def choose_kernel(asked: AttentionKernel, needs: Needs, machine: Machine) -> Choice:
    """Return the requested kernel, or for `auto` the first kernel in order that the model and the machine support.

    Args:
        asked: value of `trainer.attention`.
        needs: requirements of the model.
        machine: device and installation.

    Raises:
        AttentionError: The requested kernel cannot be used. `auto` always finds a kernel.
    """
    if asked != "auto":
        problem = _kernel_problem(asked, needs, machine)
        if problem is None:
            return Choice(asked, f"{_kernel_title(asked, machine)} is set by {FIELD}")
        raise AttentionError(f"{FIELD} ({asked}): {problem}")
    passed: list[str] = []
    for kernel in kernel_order(machine):
        problem = _kernel_problem(kernel, needs, machine)
        if problem is None:
            before = f"; not {'; not '.join(passed)}" if passed else ""
            return Choice(
                kernel,
                f"{_kernel_title(kernel, machine)} is the first that {_where_installed(machine)} and the model allow{before}",
            )
        if (skipped := _explain_skipped(kernel, problem, machine)) is not None:
            passed.append(skipped)
    raise AssertionError("sdpa supports every model on every device")


def kernel_order(machine: Machine) -> tuple[Kernel, ...]:
    """Return the kernels that `auto` tries on a device, in order."""
    if machine.capability is not None:
        for majors, kernels in ORDER:
            if machine.capability[0] in majors:
                return kernels
    return ("sdpa",)


def _kernel_problem(kernel: Kernel, needs: Needs, machine: Machine) -> str | None:
    """Return why a kernel cannot be used, with the fix after a semicolon, or None if it can."""
    backend = BACKENDS[kernel]
    return _explain_unfit(kernel, backend, needs, machine) or _explain_absent(kernel, backend, machine)


def _explain_unfit(kernel: Kernel, backend: Backend, needs: Needs, machine: Machine) -> str | None:
    if backend.capabilities is not None and not _supports_features(backend.capabilities, machine):
        first, last = backend.capabilities
        majors = f"{first}.x" if first == last else f"{first}.x to {last}.x"
        here, others = _where_installed(machine), _able_kernels(needs, machine)
        return f"it needs a GPU of compute capability {majors}, but this is {here}; set attention: auto{others}"
    lacking = [FEATURES[feature] for feature in FEATURES if feature in needs.features - backend.features]
    if lacking:
        return (
            f"the model's attention has {' and '.join(lacking)}, which {kernel} does not support; "
            f"set attention: auto{_able_kernels(needs, machine)}"
        )
    if backend.head_dims is not None and needs.head_dim > backend.head_dims:
        return (
            f"the model's heads have {needs.head_dim} elements, but {kernel} supports at most {backend.head_dims}; "
            f"set attention: auto{_able_kernels(needs, machine)}"
        )
    if needs.head_dim % backend.head_step:
        return (
            f"the model's heads have {needs.head_dim} elements, but {kernel} supports only multiples of {backend.head_step}; "
            f"set attention: auto{_able_kernels(needs, machine)}"
        )
    return None


def _explain_absent(kernel: Kernel, backend: Backend, machine: Machine) -> str | None:
    if backend.package is None or kernel in machine.versions:
        return None
    reason = machine.missing.get(kernel, f"{backend.package.module} {NOT_INSTALLED}")
    return f"{reason}; install it where the trainer runs ({backend.package.install}), or set attention: auto"


def _explain_skipped(kernel: Kernel, problem: str, machine: Machine) -> str | None:
    """Return why `auto` skipped a kernel, with the command that installs it, or None for a missing package without an advantage."""
    package = BACKENDS[kernel].package
    reason = problem.partition("; ")[0]
    if package is not None and kernel not in machine.versions:
        if not package.faster:
            return None
        if reason.endswith(NOT_INSTALLED):
            return f"{kernel}: {reason} ({package.install})"
    return f"{kernel}: {reason}"


def _able_kernels(needs: Needs, machine: Machine) -> str:
    """List the usable kernels, as the end of a sentence."""
    able = [
        kernel
        for kernel, backend in BACKENDS.items()
        if (backend.capabilities is None or _supports_features(backend.capabilities, machine))
        and needs.features <= backend.features
        and (backend.head_dims is None or needs.head_dim <= backend.head_dims)
        and not needs.head_dim % backend.head_step
        and (backend.package is None or kernel in machine.versions)
    ]
    return f", or one of {', '.join(able)}"


def _supports_features(capabilities: tuple[int, int], machine: Machine) -> bool:
    return machine.capability is not None and capabilities[0] <= machine.capability[0] <= capabilities[1]


def _kernel_title(kernel: Kernel, machine: Machine) -> str:
    package = BACKENDS[kernel].package
    return kernel if package is None else f"{kernel} ({package.distributions[0]} {machine.versions[kernel]})"


def _where_installed(machine: Machine) -> str:
    if machine.capability is None:
        return machine.name
    return f"{machine.name} (compute capability {machine.capability[0]}.{machine.capability[1]})"
