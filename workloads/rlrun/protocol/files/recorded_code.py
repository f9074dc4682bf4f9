"""Code that a run's folder names runs only if its user started that run here, or trusts the folder with a flag.

`run.json`, the kept manifest and the recorded commits of a folder come from the author of the folder. A launcher of this machine notes each
run that it starts in its user's cache, as the name of an empty file: the digest of the folder's path, the run's uid and all code that the
run names. A copy of the folder, another path and other code have another digest. The owner of the files proves nothing: whoever unpacks
an archive owns its files.
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
from rlrun.config.models.run import RunConfig
from rlrun.config.named_code import NamedCode, code_of_run
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes

FLAG = "--trust-recorded-code"
"""Option of every command that can run code which a run's folder names."""
HELP = "run code that the run's folder names (import paths, interpreters, the model's own code); needed unless you started the run here"


def check_recorded_code(
    root: Path, code: Sequence[NamedCode], *, trusted: bool, variables: Mapping[str, str] = os.environ
) -> None:
    """Refuse to run code that only a run's folder names.

    Args:
        root: folder of the run.
        code: code that the folder names and the command would run.
        trusted: True if the caller trusts the folder.
        variables: environment variables, which name the user's cache.

    Raises:
        RoleError: the caller does not trust the folder, and did not start the run; names fields, values, folder and flag.
    """
    if not code or trusted or is_own_run(root, variables):
        return
    named = ", ".join(one.text for one in code)
    raise RoleError(
        f"{root} names code that this command would run as you: {named}. Read that code first; if you trust it, add {FLAG}",
        exit_codes.USAGE,
    )


def note_started_run(root: Path, config: RunConfig, variables: Mapping[str, str] = os.environ) -> None:
    """Note in the user's cache that this user has started a run in a folder of this machine; without a cache nothing is noted."""
    with suppress(OSError, RuntimeError):
        folder = _notes_folder(variables)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _code_name(root, config)).touch()


def is_own_run(root: Path, variables: Mapping[str, str] = os.environ) -> bool:
    """True if this user has started the run in a folder on this machine, with the code that its configuration names now."""
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
