"""Choice of the kernel that computes a model's attention on a device, with the reason. Pure, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlrun.config.models.parallel import AttentionKernel
from rlrun.fit.kernel_table import BACKENDS, FEATURES, ORDER, Backend, Feature, Kernel

FIELD = "trainer.attention"


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

    def without(self, kernel: Kernel, reason: str) -> Machine:
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
    for kernel in _kernel_order(machine):
        problem = _kernel_problem(kernel, needs, machine)
        if problem is None:
            before = f"; not {'; not '.join(passed)}" if passed else ""
            return Choice(
                kernel,
                f"{_kernel_title(kernel, machine)} is the first that {_where_installed(machine)} and the model allow{before}",
            )
        passed.append(f"{kernel}: {problem.partition('; ')[0]}")
    raise AssertionError("sdpa supports every model on every device")


def _kernel_order(machine: Machine) -> tuple[Kernel, ...]:
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
    reason = machine.missing.get(kernel, f"{backend.package.module} is not installed")
    return f"{reason}; install it in the trainer's image ({backend.package.install}), or set attention: auto"


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
