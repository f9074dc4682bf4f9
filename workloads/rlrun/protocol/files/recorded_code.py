"""Trust in code that a run's folder names: it runs only if its user started that run on this machine, or passes a flag.

`run.json`, the kept manifest and the recorded commits come from the author of a folder. Therefore a launcher records each run that it
starts in its user's cache, as an empty file whose name is a digest of the folder's path, the run's UID and all code that the run names. A
copy of the folder, another path or other code has another digest. File ownership proves nothing, because the user who unpacks an archive
owns its files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.run_config import RunConfig
from rlrun.config.named_code import NamedCode, code_of_run
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes

FLAG = "--trust-recorded-code"
"""Option of every command that can run code named by a run's folder."""


HELP = "run code that the run's folder names (import paths, interpreters, the model's own code); needed unless you started the run here"


def check_recorded_code(
    root: Path, code: Sequence[NamedCode], *, trusted: bool, variables: Mapping[str, str] = os.environ
) -> None:
    """Refuse to run code that only a run's folder names.

    Args:
        root: folder of the run.
        code: code that the folder names and the command would run.
        trusted: whether the caller trusts the folder.
        variables: environment variables, which name the user's cache.

    Raises:
        RoleError: the caller neither trusts the folder nor started the run; the message has fields, values, folder and flag.
    """
    if not code or trusted or is_own_run(root, variables):
        return
    named = ", ".join(one.text for one in code)
    raise RoleError(
        f"{root} names code that this command would run as you: {named}. Read that code first; if you trust it, add {FLAG}",
        exit_codes.USAGE,
    )


def note_started_run(root: Path, config: RunConfig, variables: Mapping[str, str] = os.environ) -> None:
    """Record in the user's cache that this user started a run in a folder of this machine; without a cache nothing is recorded."""
    with suppress(OSError, RuntimeError):
        folder = _notes_folder(variables)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _code_name(root, config)).touch()


def is_own_run(root: Path, variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether this user started the run in a folder on this machine, with the code that its configuration names now."""
    with suppress(OSError, RuntimeError, ConfigError):
        config = load_file(RunConfig, RunPaths(root).run_json)
        return (_notes_folder(variables) / _code_name(root, config)).is_file()
    return False


def _notes_folder(variables: Mapping[str, str]) -> Path:
    return Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlrun" / "started"


def _code_name(root: Path, config: RunConfig) -> str:
    code = [[one.field, one.value] for one in code_of_run(config)]
    parts = [str(root.resolve()), config.trainer.uid, code]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
