"""Refusal of models whose weights are pickles: RLRun reads safetensors only."""

from __future__ import annotations

import shlex
from pathlib import Path

from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
"""Files of weights that Python reads as a pickle, which is a program."""
_CONVERT = (
    "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; a, b = sys.argv[1:]; "
    "M.from_pretrained(a, dtype='auto', use_safetensors=False).save_pretrained(b); T.from_pretrained(a).save_pretrained(b)"
)
"""Program that converts: transformers reads only tensors of such a file (`weights_only`)."""


def convert_command(source: str, target: str) -> str:
    """Return the command that writes a model as safetensors.

    Args:
        source: folder, or name on the hub.
        target: new folder.
    """
    return shlex.join(["python", "-c", _CONVERT, source, target])


def refuse_pickles(folder: Path, field: str, source: str) -> None:
    """Refuse a model without safetensors whose weights are pickles.

    Args:
        folder: files of the model.
        field: field that names the model.
        source: its value.

    Raises:
        RoleError: with the file, and the command that converts the model.
    """
    if any(folder.glob("*.safetensors")):
        return
    found = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if found:
        raise RoleError(pickle_refusal(field, source, found[0]), exit_codes.DATA)


def pickle_refusal(field: str, source: str, file: str = "") -> str:
    """Return the message about a model without safetensors.

    Args:
        field: field that names the model.
        source: its value.
        file: a pickle of it; empty: unknown.
    """
    seen = f" ({file} is a pickle)" if file else ""
    target = f"{Path(source).name}-safetensors"
    return (
        f"{field}: {source} has no weights as safetensors{seen}, and RLRun reads no pickles: they can contain programs. "
        f"Convert the model in a sandbox, then set model.path to the new folder: {convert_command(source, target)}"
    )
