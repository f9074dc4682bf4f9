"""Arguments of vLLM by the results of its kernels: a kernel that this GPU refuses is replaced by one of Triton or torch.

The packs contain machine code of one architecture. If the driver refuses such a library, the run continues without it: the
attention of Triton needs no library of vLLM, and neither do torch's own normalization and rotary embedding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "engine_arguments.json"
RELEASED = ("--attention-backend=FLASH_ATTN",)
TRITON = ("--attention-backend=TRITON_ATTN",)
WITHOUT_LIBRARY = (
    '--compilation-config={"custom_ops":["none"],"mode":0,"cudagraph_mode":"NONE"}',
    '--kernel-config={"ir_op_priority":{"rms_norm":["native"],"fused_add_rms_norm":["native"]}}',
)
"""Arguments that replace the kernels of vLLM's main library by torch's, without its compiler and CUDA graphs."""


@dataclass(frozen=True)
class EngineChoice:
    """Arguments of the engine, and the reason of the choice."""

    arguments: Sequence[str] = RELEASED
    reason: str = "kernels as released"


SAFE = EngineChoice((*TRITON, *WITHOUT_LIBRARY), "no kernel of vLLM's libraries")


def choose_engine(kernels: Mapping[str, Mapping[str, Any]]) -> EngineChoice:
    """Return the arguments for a GPU.

    Args:
        kernels: rows of `check_pack.KERNELS` by name; a row without a result counts as wrong.
    """
    wrong = [name for name, row in kernels.items() if not row.get("right")]
    if not wrong:
        return EngineChoice()
    if all(name.startswith("FA3") for name in wrong):
        return EngineChoice(TRITON, f"wrong: {', '.join(wrong)}")
    return EngineChoice(SAFE.arguments, f"wrong: {', '.join(wrong)}")


def write_choice(folder: Path, choice: EngineChoice) -> None:
    """Write a choice for the second call."""
    (folder / FILE).write_text(json.dumps({"arguments": list(choice.arguments), "reason": choice.reason}))


def read_choice(folder: Path | None) -> EngineChoice:
    """Return the choice of the first call, or the released kernels if it made none."""
    if folder is None or not (folder / FILE).exists():
        return EngineChoice()
    found = json.loads((folder / FILE).read_text())
    return EngineChoice(tuple(found["arguments"]), found["reason"])
