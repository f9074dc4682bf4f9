"""Code that a specification names, and manifests in the folder of a run, which the author of the folder wrote."""

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
    """Code that a specification names."""
    return [
        *code_of_model(spec.model),
        *code_of_algorithm(spec.algorithm),
        *code_of_environments(spec.environments),
        *code_of_engine(spec.inference),
    ]


def code_of_folder(model: ModelConfig, paths: RunPaths) -> Iterator[NamedCode]:
    """Code that a folder chooses for a manifest that trusts the model's own code: a commit of the hub, or a tiny model's files.

    The hub serves commits of proposed changes, which anybody may write. A tiny model in the folder is used as it is.
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
    """Refuse code of a manifest that lies in the folder of a run, as `rlrun fork` and `rlrun why` recommend it.

    Checks of a manifest load the code that it names, so this check comes first. Code that the caller's own options name is trusted.

    Args:
        file: the manifest.
        text: its content.
        changes: options of the command line that change fields.
        trusted: True if the caller trusts the folder.

    Raises:
        ConfigError: the manifest has problems, which then have to be repaired before anything of it is loaded.
        RoleError: it names code, and the caller neither started the run here nor trusts the folder.
    """
    root = file.absolute().parent
    if not RunPaths(root).run_json.is_file():
        return
    after = code_of_spec(parse_manifest(text, str(file), Variation(changes, os.environ))[0].spec)
    before = code_of_spec(parse_manifest(text, str(file))[0].spec)
    check_recorded_code(root, [one for one in before if one in after], trusted=trusted)
