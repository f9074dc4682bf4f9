"""The stub's policy: one number that a step moves, kept in safetensors like any model's weights."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.durable import new_folder
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, COMPLETE
from rlrun.runtime import exit_codes
from tests.support.stub.script import PolicyScript

WEIGHTS = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
ACCURACY = "stub.accuracy"
STEP = "stub.step"
ADAPTER_A, ADAPTER_B = "base_model.model.stub.lora_A.weight", "base_model.model.stub.lora_B.weight"


@dataclass(frozen=True)
class Policy:
    """The policy after `step` steps; `accuracy` is the probability that it writes the right character."""

    step: int
    accuracy: float

    def trained(self, script: PolicyScript) -> Policy:
        """The policy one step later."""
        kept = 0.5 ** (1 / script.half_life_steps)
        return Policy(self.step + 1, float(np.float32(script.last + (self.accuracy - script.last) * kept)))

    @property
    def checksum(self) -> float:
        """Checksum that is equal for equal policies."""
        return float(zlib.crc32(np.float32(self.accuracy).tobytes() + np.int32(self.step).tobytes()))


def write_policy(file: Path, policy: Policy) -> None:
    """Write the tensors to one file."""
    tensors = {ACCURACY: np.array([policy.accuracy], np.float32), STEP: np.array([policy.step], np.int32)}
    save_file(tensors, file, metadata={"format": "pt"})


def read_policy(file: Path) -> Policy:
    """Read one file.

    Raises:
        RoleError: it is not there, or holds the weights of a real model.
    """
    try:
        tensors = load_file(file)
        return Policy(int(tensors[STEP][0]), float(tensors[ACCURACY][0]))
    except (OSError, SafetensorError, KeyError) as error:
        raise RoleError(
            f"{file} holds no weights of the stub ({error}): the stub image runs model.tiny, or what tests.support.stub.model made",
            exit_codes.DATA,
        ) from None


def write_adapter(path: Path, policy: Policy, rank: int) -> None:
    """Write a published version that is an adapter of this rank: its A contains the accuracy, its B the step."""
    with new_folder(path, before_rename="weights.before_rename") as folder:
        tensors = {
            ADAPTER_A: np.full((rank, 1), policy.accuracy, np.float32),
            ADAPTER_B: np.full((1, rank), policy.step, np.float32),
        }
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank}))
        reach("weights.before_complete")
        (folder / COMPLETE).touch()
    reach("weights.written")


def read_adapter(folder: Path) -> Policy:
    """Read an adapter of `write_adapter`.

    Raises:
        RoleError: it does not exist, or is a real adapter.
    """
    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        return Policy(int(tensors[ADAPTER_B][0, 0]), float(tensors[ADAPTER_A][0, 0]))
    except (OSError, SafetensorError, KeyError) as error:
        raise RoleError(f"{folder} holds no adapter of the stub ({error})", exit_codes.DATA) from None


def small_files(source: Path) -> dict[str, bytes]:
    """Return the files that are equal in every version's folder: configuration and tokenizer."""
    return {
        p.name: p.read_bytes() for p in sorted(source.iterdir()) if p.suffix in (".json", ".jinja") and p.name != INDEX
    }


def write_model(path: Path, policy: Policy, files: dict[str, bytes], *, complete: bool) -> None:
    """Write a model folder that appears durably and completely.

    Args:
        path: the folder.
        policy: the weights.
        files: result of `small_files`.
        complete: whether to write `COMPLETE`, as in a published version.
    """
    with new_folder(path, before_rename="weights.before_rename" if complete else None) as folder:
        write_policy(folder / WEIGHTS, policy)
        size = (folder / WEIGHTS).stat().st_size
        index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys((ACCURACY, STEP), WEIGHTS)}
        (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))
        for name, content in files.items():
            (folder / name).write_bytes(content)
        if complete:
            reach("weights.before_complete")
            (folder / COMPLETE).touch()
    if complete:
        reach("weights.written")
