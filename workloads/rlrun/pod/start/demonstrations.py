"""Init container that runs the code of a tiny model's warm-up environment, without secrets of the run.

It has neither the run's key nor its configuration. It writes a file with conversations for the training in the next container.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rlrun.config.models.model import TinyModelConfig
from rlrun.custom import SAFE_PATH_VARIABLE
from rlrun.environments.demonstrations import WARMUP_BATCH, collect_demonstrations, write_demonstrations
from rlrun.pod.signals import HANDLED, SIGNALLED
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.runtime.bootstrap import DEMONSTRATIONS_FILE

WARMUP_VARIABLE, MODEL_VARIABLE = "RLRUN_WARMUP", "RLRUN_MODEL_FOLDER"
"""Environment variables: fields of `TinyModelConfig` as JSON, and folder of the finished model."""
CANDIDATE = "RLRUN_CANDIDATE_"
"""Prefix of variables for a name that several Secrets define: `RLRUN_CANDIDATE_001_HF_TOKEN`. The last one wins."""


def make_demonstrations(folder: Path, env: MutableMapping[str, str]) -> None:
    """Write the demonstrations for the warm-up, if the model does not exist yet.

    Args:
        folder: empty folder for the file.
        env: environment of the container; candidate variables are replaced by the final variable.

    Raises:
        RoleError: the environment cannot be loaded or has no demonstrations, or the folder is not writable.
    """
    for number in HANDLED:
        # The kernel has no default action for the first process of a container, and code of the environment may never return.
        signal.signal(number, _end)
    if not _is_needed(env):
        return
    tiny = TinyModelConfig.model_validate_json(env[WARMUP_VARIABLE])
    _choose_candidates(env)
    env.setdefault(SAFE_PATH_VARIABLE, "1")  # never import from a folder that code in this container can write
    for part in ("home", "tmp"):
        (folder / part).mkdir(exist_ok=True)
    try:
        count = tiny.warmup_steps * WARMUP_BATCH
        found = collect_demonstrations(tiny.warmup_environment or "", tiny.warmup_args, count)
        write_demonstrations(folder / DEMONSTRATIONS_FILE, found)
    except ValueError as error:
        raise RoleError(f"model.tiny: {error}", exit_codes.CONFIGURATION) from error
    except OSError as error:
        raise RoleError(f"model.tiny: cannot write the demonstrations: {error}", exit_codes.STORAGE) from error


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(SIGNALLED + number)


def _is_needed(env: Mapping[str, str]) -> bool:
    """Return whether this pod creates the model: the trainer's first pod or the orchestrator's, once per run."""
    ordinal = re.search(r"-(\d+)$", env.get("RLRUN_POD_NAME", ""))
    if ordinal is not None and int(ordinal[1]):
        return False
    model = Path(env[MODEL_VARIABLE])
    try:
        # List the folder: a network file system answers a lookup of one name from a cache for a while.
        return model.name not in os.listdir(model.parent)  # noqa: PTH208
    except OSError:
        return True  # the next container waits for the volume, and reports an unusable folder


def _choose_candidates(env: MutableMapping[str, str]) -> None:
    for name in sorted(name for name in env if name.startswith(CANDIDATE)):
        env[name.removeprefix(CANDIDATE).partition("_")[2]] = env.pop(name)
