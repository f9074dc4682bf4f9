"""Memory of GPUs by the node label `nvidia.com/gpu.product`, and sizes in common notations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MIB, GIB = 2**20, 2**30
MEMORY_MIB: Mapping[str, int] = {
    "B200": 183_359,
    "H200": 143_771,
    "GH200": 97_871,
    "H100-NVL": 95_830,
    "H100": 81_559,
    "A100-40GB": 40_960,
    "A100-80GB": 81_920,
    "L40S": 46_068,
    "L4": 23_034,
    "A10G": 23_028,
    "A10": 23_028,
    "RTX-6000-Ada": 49_140,
    "RTX-5090": 32_607,
    "RTX-4090": 24_564,
    "RTX-3090": 24_576,
    "V100-16GB": 16_160,
    "V100-32GB": 32_510,
    "T4": 15_360,
}
"""Memory as the driver reports it, in MiB. A label matches a name if it contains all parts of the name (`NVIDIA-A100-SXM4-80GB`)."""
CAPABILITIES: Mapping[str, tuple[int, int]] = {
    "B200": (10, 0),
    "H200": (9, 0),
    "GH200": (9, 0),
    "H100": (9, 0),
    "A100": (8, 0),
    "L40S": (8, 9),
    "L4": (8, 9),
    "A10G": (8, 6),
    "A10": (8, 6),
    "RTX-6000-Ada": (8, 9),
    "RTX-5090": (12, 0),
    "RTX-4090": (8, 9),
    "RTX-3090": (8, 6),
    "V100": (7, 0),
    "T4": (7, 5),
}
"""CUDA compute capabilities by product, matched like the memory."""
_UNITS = {"Mi": MIB, "Gi": GIB, "M": 10**6, "G": 10**9, "MiB": MIB, "GiB": GIB, "MB": 10**6, "GB": 10**9}


def memory_of(product: str) -> int | None:
    """Return the bytes of a GPU's memory by its label, or None for unknown labels and labels of shared or partitioned GPUs."""
    if any(part in ("SHARED", "MIG") for part in product.upper().split("-")):
        return None
    name = _match_product(product, MEMORY_MIB)
    return None if name is None else MEMORY_MIB[name] * MIB


def capability_of(product: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU by its label, or None for unknown labels."""
    name = _match_product(product, CAPABILITIES)
    return None if name is None else CAPABILITIES[name]


def _match_product(product: str, names: Iterable[str]) -> str | None:
    """Return the name with the most parts among the names that match a label."""
    parts = product.upper().split("-")
    fitting = [name for name in names if all(part in parts for part in name.upper().split("-"))]
    return max(fitting, key=lambda name: (name.count("-"), len(name)), default=None)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `80Gi`, `81559Mi` or `80GB`.

    Raises:
        ValueError: The text is not a size; the message has the expected form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if found is None or found[2] not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not a size of memory; write a number and a unit, such as 80Gi or 24564Mi")
    return int(float(found[1]) * _UNITS[found[2]])


def show_gib(size: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / GIB:.1f} GiB"
