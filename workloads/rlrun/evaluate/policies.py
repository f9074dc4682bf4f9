"""The policies that can be asked: the model itself, and what a run or another program has left on the disk."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loguru import logger

from rlrun.config.models.model import ModelConfig
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints, newest_attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import ADAPTER_WEIGHTS, COMPLETE, Artifact, RunPaths, artifacts_in_steps
from rlrun.protocol.files.run_folder import recorded_run
from rlrun.runtime import exit_codes

Kind = Literal["base", "whole", "adapter", "checkpoint"]
_NAME = re.compile(r"^(?:v|step_|checkpoint-)(\d+)(?:\.a(\d+))?$")
"""A policy's folder: a published version, an export, or what other programs call them."""
_OF_VERSION = re.compile(r"^v\d{8}\.a\d{4,}$")


@dataclass(frozen=True)
class Policy:
    """One policy that can be asked."""

    step: int | None
    """Number of training steps; None: the model that the manifest names."""
    kind: Kind
    """Content of its folder: the whole model, an adapter of it, or a checkpoint of the trainer."""
    path: Path | None
    identity: str
    """Distinguishes it from another policy of the same step: answers are only kept for as long as this stays."""
    served_name: str = ""
    """Name at a server that is no engine of ours; empty: engines load it."""

    @property
    def name(self) -> str:
        """Name of the policy in tables and files."""
        return self.served_name or ("base" if self.step is None else f"step {self.step}")


def base_policy(model: ModelConfig, folder: Path | None) -> Policy:
    """The model that a manifest names.

    Args:
        model: the manifest's.
        folder: where it is; None: on the hub.
    """
    named = model.model_dump_json(exclude={"path"})
    return Policy(None, "base", None, named if folder is None else f"{named} {_weights_digest(folder)}")


def of_run(root: Path) -> dict[int, Policy]:
    """The policies in a run's folder by step: published, exported, or in a complete checkpoint; none when it holds no run.

    Only those of the newest attempt's lineage: what a zombie wrote is no policy of the run.

    Raises:
        RoleError: `run.json` is damaged.
    """
    paths, config = RunPaths(root), recorded_run(RunPaths(root))
    lineage = newest_attempt(paths, logger.warning) if config is not None else None
    if config is None or lineage is None:
        return {}
    exports = [found for found in artifacts_in_steps(paths.exports) if _has_weights(found.path)]
    found: dict[int, Policy] = {}
    # The cheapest first: a version is loaded as it is, a checkpoint has to be made into a model.
    for artifacts, checkpoint in (
        (paths.versions_on_disk(), False),
        (exports, False),
        (complete_checkpoints(paths), True),
    ):
        newest = {artifact.step: artifact for artifact in lineage.owned(artifacts)}
        for step, artifact in newest.items():
            kind: Kind = "checkpoint" if checkpoint else _policy_kind(artifact.path)
            found.setdefault(step, Policy(step, kind, artifact.path, f"{config.uid} attempt {artifact.attempt}"))
    return dict(sorted(found.items()))


def in_folder(folder: Path) -> dict[int, Policy]:
    """The policies in a folder of weights by step: `v00000010.a0001`, `step_10`, `checkpoint-10`; of two with one step the later attempt's.

    Raises:
        RoleError: there is no such folder.
    """
    if not folder.is_dir():
        raise RoleError(f"--weights-dir: there is no folder {folder}", exit_codes.DATA)
    run = RunPaths(folder.parent)
    if run.weights == folder and run.run_json.is_file():
        return {
            s: policy for s, policy in of_run(folder.parent).items() if policy.path and policy.path.parent == folder
        }
    found = []
    for path in folder.iterdir():
        match = _NAME.match(path.name)
        whole = not _OF_VERSION.match(path.name) or (path / COMPLETE).exists()
        if match is not None and whole and _has_weights(path):
            found.append(Artifact(int(match[1]), int(match[2] or 0), path))
    return {a.step: Policy(a.step, _policy_kind(a.path), a.path, _weights_digest(a.path)) for a in sorted(found)}


def choose_policies(
    available: Mapping[int, Policy], base: Policy, *, steps: Sequence[int] | None, with_base: bool, where: str
) -> list[Policy]:
    """The policies to ask, the base model first, then in order of step.

    Args:
        available: by step.
        base: the model itself.
        steps: those that are wanted; None: all, unless the base model alone is. All are those after the first step: version 0 is the
            base model, but in a run that began with another run's checkpoint.
        with_base: whether the base model is wanted; it is too when nothing is said.
        where: how messages call the place that was searched.

    Raises:
        RoleError: a step is not there; says which are.
    """
    if steps is None:
        return [base] if with_base else [base, *(policy for step, policy in available.items() if step > 0)]
    missing = [step for step in steps if step not in available]
    if missing:
        there = ", ".join(map(str, available)) or "none"
        raise RoleError(
            f"there is no policy of step {', '.join(map(str, missing))}: the steps in {where} are: {there}",
            exit_codes.USAGE,
        )
    return [*([base] if with_base else []), *(available[step] for step in sorted(set(steps)))]


def newest_policy(available: Mapping[int, Policy], where: str) -> Policy:
    """The policy of the highest step.

    Raises:
        RoleError: there is none.
    """
    if not available:
        raise RoleError(f"there is no policy in {where}; --base asks the model itself", exit_codes.USAGE)
    return available[max(available)]


def served_as(policies: Iterable[Policy]) -> Literal["whole", "adapter"]:
    """Capabilities that an engine needs to serve all of them.

    Raises:
        RoleError: some are whole models and some adapters.
    """
    asked = list(policies)
    adapters = [policy.name for policy in asked if policy.kind == "adapter"]
    whole = [policy.name for policy in asked if policy.kind in ("whole", "checkpoint")]
    if adapters and whole:
        raise RoleError(
            f"{', '.join(adapters)} are adapters and {', '.join(whole)} whole models; one engine serves only one of both: "
            "ask them one after the other, by their steps",
            exit_codes.USAGE,
        )
    return "adapter" if adapters else "whole"


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*.safetensors"))


def _policy_kind(folder: Path) -> Kind:
    return "adapter" if (folder / ADAPTER_WEIGHTS).exists() else "whole"


def _weights_digest(folder: Path) -> str:
    """Digest of the weights' files by names, sizes and times; reading them whole would take as long as loading them."""
    files = sorted(folder.glob("*.safetensors"))
    told = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
