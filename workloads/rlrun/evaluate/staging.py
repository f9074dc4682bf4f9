"""Preparation of a policy as a folder for engines, below their trusted folder of weights.

Files are linked instead of copied. This takes neither time nor space, and the files survive if the run deletes the
version.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from rlrun.config.models.language_models import LoRAConfig, ModelConfig
from rlrun.evaluate.policies import Policy
from rlrun.protocol.files.durable import link_files, new_folder
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, COMPLETE
from rlrun.runtime import exit_codes

Export = Callable[[Policy, Path], None]
"""Function that exports a checkpoint to a new model folder."""
_LENGTH = struct.Struct("<Q")


class Staging:
    """Folders of policies for the engines.

    Args:
        folder: folder below the engines' folder of weights, created if needed.
        export: exporter of checkpoints.
        adapters: all policies that are adapters, if the engines serve adapters. The base model is then one of them
            with its update set to 0.
    """

    def __init__(self, folder: Path, export: Export, adapters: Sequence[Policy] = ()) -> None:
        self._folder, self._export, self._adapters = folder, export, adapters

    def put(self, policy: Policy, number: int) -> Path | None:
        """Return the folder to load, the same for the same number. None: the model with which the engines started.

        Args:
            policy: policy to prepare.
            number: unique number of the policy.

        Raises:
            RoleError: the volume refuses the write, or the policy's files are unreadable.
        """
        source = policy.path
        if source is None:
            if not self._adapters:
                return None
            template = self._adapters[0].path
            assert template is not None
            source = template
        target = self._folder / f"{number:04d}-{policy.name.replace(' ', '-')}"
        if target.is_dir():
            return target
        try:
            with storage_errors(self._folder, "prepare the weights"):
                if policy.kind == "checkpoint":
                    self._export(policy, target)
                    (target / COMPLETE).touch()
                    return target
                with new_folder(target) as folder:
                    if policy.path is None:
                        write_without_update(source, folder)
                    else:
                        link_files(source, folder, leave_out=(COMPLETE,))
                    (folder / COMPLETE).touch()
        except OSError as error:
            raise RoleError(f"{policy.name}: cannot read {source}: {error.strerror}", exit_codes.DATA) from error
        return target

    def remove(self, path: Path | None) -> None:
        """Delete a folder created by `put`."""
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Delete all folders."""
        shutil.rmtree(self._folder, ignore_errors=True)


def make_exporter(model: ModelConfig, source: str, adapters: LoRAConfig | None) -> Export:
    """Return an exporter of a run's checkpoints, equivalent to `rlrun export`.

    Args:
        model: model of the run.
        source: place of its configuration and tokenizer.
        adapters: adapter settings of the run, if any.
    """

    def export(policy: Policy, target: Path) -> None:
        from rlrun.trainer.weights.export import export_checkpoint

        assert policy.path is not None
        assert policy.step is not None
        export_checkpoint(policy.path, target, model, source, step=policy.step, adapters=adapters)

    return export


def write_without_update(adapter: Path, folder: Path) -> None:
    """Write an adapter without effect: a copy of another adapter with B set to 0, for any number format.

    Args:
        adapter: folder of the other adapter.
        folder: target folder of the two files.
    """
    content = bytearray((adapter / ADAPTER_WEIGHTS).read_bytes())
    (size,) = _LENGTH.unpack_from(content)
    begin = _LENGTH.size + size
    for name, tensor in json.loads(content[_LENGTH.size : begin]).items():
        if ".lora_B." in name:
            first, last = (begin + offset for offset in tensor["data_offsets"])
            content[first:last] = bytes(last - first)
    (folder / ADAPTER_WEIGHTS).write_bytes(content)
    shutil.copyfile(adapter / ADAPTER_CONFIG, folder / ADAPTER_CONFIG)


def highest_rank(adapters: Sequence[Policy]) -> int:
    """Return the adapter rank for which engines must be started.

    Raises:
        RoleError: an adapter has no rank.
    """
    ranks = []
    for policy in adapters:
        assert policy.path is not None
        file = policy.path / ADAPTER_CONFIG
        try:
            ranks.append(int(json.loads(file.read_text())["r"]))
        except (OSError, ValueError, KeyError, TypeError):
            raise RoleError(
                f"{policy.name}: {file} is missing or has no rank r; use an adapter in PEFT format",
                exit_codes.DATA,
            ) from None
    return max(ranks)
