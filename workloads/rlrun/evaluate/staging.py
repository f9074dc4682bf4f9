"""Staging of a policy as a folder that an engine loads, below the folder of weights that the engine trusts.

The files are linked, not copied: that takes neither time nor space, and a run that deletes the version meanwhile takes nothing away.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from rlrun.config.models.lora import LoRAConfig
from rlrun.config.models.model import ModelConfig
from rlrun.evaluate.policies import Policy
from rlrun.protocol.files.durable import link_files, new_folder
from rlrun.protocol.files.failures import RoleError, storage_errors
from rlrun.protocol.files.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, COMPLETE
from rlrun.runtime import exit_codes

Export = Callable[[Policy, Path], None]
"""Makes a model folder of a checkpoint; the folder does not exist yet."""
_LENGTH = struct.Struct("<Q")


class Staging:
    """Folders in which policies are put for the engines.

    Args:
        folder: below the engines' folder of weights; made when needed.
        export: for checkpoints.
        adapters: all policies that are adapters, if the engines serve such: the base model is one of them without its update.
    """

    def __init__(self, folder: Path, export: Export, adapters: Sequence[Policy] = ()) -> None:
        self._folder, self._export, self._adapters = folder, export, adapters

    def put(self, policy: Policy, number: int) -> Path | None:
        """The folder to load, the same one for the same number; None: the model that the engines have started with.

        Args:
            policy: which.
            number: no two policies have the same.

        Raises:
            RoleError: the volume refuses, or the policy's files cannot be read.
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
        """Take away what `put` has made."""
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Take away everything."""
        shutil.rmtree(self._folder, ignore_errors=True)


def make_exporter(model: ModelConfig, source: str, adapters: LoRAConfig | None) -> Export:
    """Makes models of a run's checkpoints, as `rlrun export` does.

    Args:
        model: of the run.
        source: where its configuration and tokenizer are.
        adapters: of the run.
    """

    def export(policy: Policy, target: Path) -> None:
        from rlrun.trainer.weights.export import export_checkpoint

        assert policy.path is not None
        assert policy.step is not None
        export_checkpoint(policy.path, target, model, source, step=policy.step, adapters=adapters)

    return export


def write_without_update(adapter: Path, folder: Path) -> None:
    """Write the adapter that changes nothing: another one with its B set to 0, whatever their number format.

    Args:
        adapter: folder of the other one.
        folder: gets the two files.
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
    """The rank that engines have to be started for.

    Raises:
        RoleError: one of them does not say its rank.
    """
    ranks = []
    for policy in adapters:
        assert policy.path is not None
        file = policy.path / ADAPTER_CONFIG
        try:
            ranks.append(int(json.loads(file.read_text())["r"]))
        except (OSError, ValueError, KeyError, TypeError):
            raise RoleError(
                f"{policy.name}: {file} is missing or names no rank r; it has to be an adapter in PEFT's format",
                exit_codes.DATA,
            ) from None
    return max(ranks)
