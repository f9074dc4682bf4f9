"""Refusal of models that cannot be trained, for roles: before their weights are fetched or read."""

from __future__ import annotations

import json
from pathlib import Path

from rlrun.config.trainable import training_refusal
from rlrun.hub.repository import show_source
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes


def read_refusal(folder: Path, name: str | None = None) -> str | None:
    """Reason why the trainer cannot train a model; None: nothing is known against it, or its configuration cannot be read.

    Args:
        folder: with its `config.json`.
        name: of the model in messages; default: the folder.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # its other checks report it
    return training_refusal(config, name or show_source(str(folder))) if isinstance(config, dict) else None


def refuse_untrainable(folder: Path, field: str, name: str | None = None) -> None:
    """Refuse a model that the trainer cannot train.

    Args:
        folder: with its `config.json`.
        field: that names the model.
        name: of the model on the hub; default: the folder.

    Raises:
        RoleError: names the field, the model, and what can be done.
    """
    if (fault := read_refusal(folder, name)) is not None:
        raise RoleError(f"{field}: {fault}", exit_codes.CONFIGURATION)
