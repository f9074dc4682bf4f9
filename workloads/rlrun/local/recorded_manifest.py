"""Code that a specification names, and protection against manifests from the folder of another author's run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlrun.api.manifest import parse_manifest
from rlrun.api.resource import RLRunSpec
from rlrun.api.variation import Variation
from rlrun.config.models.model import ModelConfig
from rlrun.config.named_code import (
    NamedCode,
    code_of_algorithm,
    code_of_engine,
    code_of_environments,
    code_of_model,
)
from rlrun.hub.revisions import as_recorded
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.recorded_code import check_recorded_code


def code_of_spec(spec: RLRunSpec) -> list[NamedCode]:
    """Return the code that a specification names."""
    return [
        *code_of_model(spec.model),
        *code_of_algorithm(spec.algorithm),
        *code_of_environments(spec.environments),
        *code_of_engine(spec.inference),
    ]


def code_of_folder(model: ModelConfig, paths: RunPaths) -> Iterator[NamedCode]:
    """Yield the code that a run's folder selects for a manifest with `trustRemoteCode`: a commit of the hub, or a tiny model's files.

    The hub also serves commits of proposed changes, which anyone can create. A tiny model in the folder is used unchanged.
    """
    if not model.trust_remote_code:
        return
    if (recorded := as_recorded(model, paths)) != model:
        yield NamedCode(
            "revisions", f"commit {recorded.revision} of {model.name}, whose code model.trustRemoteCode runs"
        )
    if model.tiny is not None and paths.model.exists():
        yield NamedCode("model", f"files of {paths.model}, whose code model.trustRemoteCode runs")


def check_recorded_manifest(file: Path, text: str, changes: Sequence[str], *, trusted: bool) -> None:
    """Reject code of a manifest inside of a run's folder, as `rlrun fork` and `rlrun why` recommend to use it.

    Checks of a manifest load its code, so this check comes first. Code from the caller's own options is trusted.

    Args:
        file: manifest file.
        text: content of the file.
        changes: options of the command line that change fields.
        trusted: whether the caller trusts the folder.

    Raises:
        ConfigError: the manifest has problems, which must be fixed before its code is loaded.
        RoleError: the manifest names code, and the caller neither started the run here nor trusts the folder.
    """
    root = file.absolute().parent
    if not RunPaths(root).run_json.is_file():
        return
    after = code_of_spec(parse_manifest(text, str(file), Variation(changes, os.environ))[0].spec)
    before = code_of_spec(parse_manifest(text, str(file))[0].spec)
    check_recorded_code(root, [one for one in before if one in after], trusted=trusted)
