"""Rejection of models that cannot be trained, before a role downloads or reads their weights."""

from __future__ import annotations

import json
from pathlib import Path

from rlrun.config.trainable import training_refusal
from rlrun.hub.repository import show_source
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes


def read_refusal(folder: Path, name: str | None = None) -> str | None:
    """Return why the trainer cannot train a model, or None if no reason is known or the configuration cannot be read.

    Args:
        folder: folder with `config.json`.
        name: name of the model in messages. Default: the folder.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # other checks report it
    return training_refusal(config, name or show_source(str(folder))) if isinstance(config, dict) else None


def refuse_untrainable(folder: Path, field: str, name: str | None = None) -> None:
    """Reject a model that the trainer cannot train.

    Args:
        folder: folder with `config.json`.
        field: manifest field of the model.
        name: name of the model on the hub. Default: the folder.

    Raises:
        RoleError: contains the field, the model and the fix.
    """
    if (fault := read_refusal(folder, name)) is not None:
        raise RoleError(f"{field}: {fault}", exit_codes.CONFIGURATION)
