"""Rejection of models: pickled weights, and architectures that cannot be trained.

RLRun reads weights only from safetensors. An untrainable model is rejected before a role downloads or reads its weights.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rlrun.config.families import training_refusal
from rlrun.hub.repository import show_source
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
"""Weights files that Python reads as a pickle, which can contain a program."""
_CONVERT = (
    "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; a, b = sys.argv[1:]; "
    "M.from_pretrained(a, dtype='auto', use_safetensors=False).save_pretrained(b); T.from_pretrained(a).save_pretrained(b)"
)
"""Conversion program. transformers reads only tensors from such a file (`weights_only`); the sandbox that the message recommends
is an additional protection."""


def convert_command(source: str, target: str) -> str:
    """Return the command that converts a model to safetensors.

    Args:
        source: folder, or name on the hub.
        target: new folder.
    """
    return shlex.join(["python", "-c", _CONVERT, source, target])


def refuse_pickles(folder: Path, field: str, source: str) -> None:
    """Reject a model that has pickled weights and no safetensors.

    Args:
        folder: folder of the model.
        field: manifest field of the model.
        source: value of the field.

    Raises:
        RoleError: contains the file, and the command that converts the model.
    """
    if any(folder.glob("*.safetensors")):
        return
    found = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if found:
        raise RoleError(pickle_refusal(field, source, found[0]), exit_codes.DATA)


def pickle_refusal(field: str, source: str, file: str = "") -> str:
    """Return the message about a model without safetensors.

    Args:
        field: manifest field of the model.
        source: value of the field.
        file: name of one of its pickles, or an empty text if unknown.
    """
    seen = f" ({file} is a pickle)" if file else ""
    target = f"{Path(source).name}-safetensors"
    return (
        f"{field}: {source} has no safetensors weights{seen}, and RLRun reads no pickles: they can contain programs. "
        f"Convert the model in a sandbox, then set model.path to the new folder: {convert_command(source, target)}"
    )


def untrainable_reason(folder: Path, name: str | None = None) -> str | None:
    """Return why the trainer cannot train a model, by the configuration in its folder.

    Returns None if no reason is known. It also returns None if the configuration cannot be read, which other checks report.

    Args:
        folder: folder with `config.json`.
        name: name of the model in messages. Default: the folder.
    """
    config = read_config(folder)
    return None if config is None else training_refusal(config, name or show_source(str(folder)))


def read_config(folder: Path) -> dict[str, object] | None:
    """Return the content of a model's `config.json`, or None if it cannot be read, which other checks report."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def refuse_untrainable(folder: Path, field: str, name: str | None = None) -> None:
    """Reject a model that the trainer cannot train.

    Args:
        folder: folder with `config.json`.
        field: manifest field of the model.
        name: name of the model on the hub. Default: the folder.

    Raises:
        RoleError: contains the field, the model and the fix.
    """
    if (fault := untrainable_reason(folder, name)) is not None:
        raise RoleError(f"{field}: {fault}", exit_codes.CONFIGURATION)
