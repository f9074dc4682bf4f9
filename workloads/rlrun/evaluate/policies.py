"""Policies to evaluate: the base model, and policies that a run or another program has written to disk."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loguru import logger

from rlrun.config.models.language_models import ModelConfig
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints, newest_attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import ADAPTER_WEIGHTS, COMPLETE, Artifact, RunPaths, artifacts_in_steps
from rlrun.protocol.files.run_folder import recorded_run
from rlrun.runtime import exit_codes

Kind = Literal["base", "whole", "adapter", "checkpoint"]
_NAME = re.compile(r"^(?:v|step_|checkpoint-)(\d+)(?:\.a(\d+))?$")
"""Name of a policy's folder: a published version, an export, or a checkpoint of other programs."""
_OF_VERSION = re.compile(r"^v\d{8}\.a\d{4,}$")


@dataclass(frozen=True)
class Policy:
    """One policy to evaluate."""

    step: int | None
    """Number of training steps. None: the model in the manifest."""
    kind: Kind
    """Content of its folder: a complete model, an adapter, or a checkpoint of the trainer."""
    path: Path | None
    identity: str
    """Identity within the step. Answers are reused only while it stays the same."""
    served_name: str = ""
    """Name at an external server; empty if engines load the policy."""

    @property
    def name(self) -> str:
        """Name of the policy in tables and files."""
        return self.served_name or ("base" if self.step is None else f"step {self.step}")


def base_policy(model: ModelConfig, folder: Path | None) -> Policy:
    """Return the model in a manifest as a policy.

    Args:
        model: model of the manifest.
        folder: folder of the model. None: it is on the hub.
    """
    named = model.model_dump_json(exclude={"path"})
    return Policy(None, "base", None, named if folder is None else f"{named} {_weights_digest(folder)}")


def of_run(root: Path) -> dict[int, Policy]:
    """Return the policies in a run's folder by step: published, exported, or in a complete checkpoint; empty if it
    contains no run.

    Only policies of the newest attempt's lineage count, because a zombie process may have written others.

    Raises:
        RoleError: `run.json` is damaged.
    """
    paths, config = RunPaths(root), recorded_run(RunPaths(root))
    lineage = newest_attempt(paths, logger.warning) if config is not None else None
    if config is None or lineage is None:
        return {}
    exports = [found for found in artifacts_in_steps(paths.exports) if _has_weights(found.path)]
    found: dict[int, Policy] = {}
    # The cheapest first: a version is loaded directly, a checkpoint has to be exported.
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
    """Return the policies in a folder of weights by step: `v00000010.a0001`, `step_10`, `checkpoint-10`. For equal
    steps the later attempt counts.

    Raises:
        RoleError: the folder does not exist.
    """
    if not folder.is_dir():
        raise RoleError(f"--weights-dir: the folder {folder} does not exist", exit_codes.DATA)
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
    """Select the policies to evaluate, the base model first, then in order of step.

    Args:
        available: policies by step.
        base: the base model.
        steps: requested steps. None: all steps after 0, or only the base model if it is requested. Version 0 is the
            base model, except in a run that started from another run's checkpoint.
        with_base: whether the base model is requested. It is also included without any request.
        where: name of the searched place in messages.

    Raises:
        RoleError: a step does not exist; the message lists the existing ones.
    """
    if steps is None:
        return [base] if with_base else [base, *(policy for step, policy in available.items() if step > 0)]
    missing = [step for step in steps if step not in available]
    if missing:
        existing = ", ".join(map(str, available)) or "none"
        raise RoleError(
            f"no policy of step {', '.join(map(str, missing))}; the steps in {where} are: {existing}",
            exit_codes.USAGE,
        )
    return [*([base] if with_base else []), *(available[step] for step in sorted(set(steps)))]


def newest_policy(available: Mapping[int, Policy], where: str) -> Policy:
    """Return the policy of the highest step.

    Raises:
        RoleError: there are no policies.
    """
    if not available:
        raise RoleError(f"no policy in {where}; evaluate the base model with --base", exit_codes.USAGE)
    return available[max(available)]


def served_as(policies: Iterable[Policy]) -> Literal["whole", "adapter"]:
    """Return the kind of weights that engines must serve for all of these policies.

    Raises:
        RoleError: the policies contain both complete models and adapters.
    """
    asked = list(policies)
    adapters = [policy.name for policy in asked if policy.kind == "adapter"]
    whole = [policy.name for policy in asked if policy.kind in ("whole", "checkpoint")]
    if adapters and whole:
        raise RoleError(
            f"{', '.join(adapters)} are adapters and {', '.join(whole)} complete models, but an engine serves only one kind; "
            "evaluate them in separate commands with --steps",
            exit_codes.USAGE,
        )
    return "adapter" if adapters else "whole"


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*.safetensors"))


def _policy_kind(folder: Path) -> Kind:
    return "adapter" if (folder / ADAPTER_WEIGHTS).exists() else "whole"


def _weights_digest(folder: Path) -> str:
    """Return a digest of the weight files' names, sizes and times. Hashing the content would take as long as loading
    it.
    """
    files = sorted(folder.glob("*.safetensors"))
    entries = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:16]
