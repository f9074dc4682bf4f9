"""Memory of GPUs by the node label `nvidia.com/gpu.product`, and sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
"""Memory as the driver reports it, in MiB. A product is one whose label has all parts of a name (`NVIDIA-A100-SXM4-80GB`)."""
_UNITS = {"Mi": MIB, "Gi": GIB, "M": 10**6, "G": 10**9, "MiB": MIB, "GiB": GIB, "MB": 10**6, "GB": 10**9}


def memory_of(product: str) -> int | None:
    """Bytes of a GPU's memory by its label, None when it is not in the table. A shared or divided GPU's label says so, and is not."""
    parts = product.upper().split("-")
    if any(part in ("SHARED", "MIG") for part in parts):
        return None
    fitting = [name for name in MEMORY_MIB if all(part in parts for part in name.upper().split("-"))]
    if not fitting:
        return None
    return MEMORY_MIB[max(fitting, key=lambda name: (name.count("-"), len(name)))] * MIB


def parse_size(text: str) -> int:
    """Bytes of a size such as `80Gi`, `81559Mi` or `80GB`.

    Raises:
        ValueError: it is none; says what it may be.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if found is None or found[2] not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is no size of memory; write a number and a unit, such as 80Gi or 24564Mi")
    return int(float(found[1]) * _UNITS[found[2]])


def gib(size: float) -> str:
    """A size for people."""
    return f"{size / GIB:.1f} GiB"
