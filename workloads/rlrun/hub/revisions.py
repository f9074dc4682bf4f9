"""The commit of each repository that a run reads: written into its folder by whoever asks first, and kept for all later attempts.

A branch may move while a run lives. Without the record a trainer that starts again would go on with other weights than its engines, and
another attempt with other data than the one before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from rlrun.config.models.model import ModelConfig
from rlrun.hub.repository import COMMIT, Repository
from rlrun.protocol.files.durable import create_json
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes

VARIABLE = "RLRUN_REVISIONS"
"""Environment variable of a role and of its environments' processes: the folders of records. The first is written, all are read."""


def keep_revisions(run: RunPaths, host: RunPaths | None = None) -> None:
    """Have this process, and those that it starts, keep the commits of a run.

    Args:
        run: whose folder gets the records.
        host: the run whose trainer it shares; it reads that one's model.
    """
    folders = [run.revisions] if host is None else [run.revisions, host.revisions]
    os.environ[VARIABLE] = os.pathsep.join(map(str, folders))


def kept_commit(repository: Repository, resolve: Callable[[], str]) -> str:
    """The commit of a repository for this process's run.

    Args:
        repository: what is read.
        resolve: asks the hub which commit the revision is now; called where no record says it.

    Raises:
        OSError: the record cannot be written.
        RoleError: a record is damaged, or contradicts a full commit of the configuration; names the file.
    """
    files = [folder / _file_name(repository) for folder in _revision_folders()]
    for file in files:
        if (commit := _read_commit(file, repository)) is not None:
            return commit
    commit = repository.asked if COMMIT.fullmatch(repository.asked) else resolve()
    if files:
        document = {"kind": repository.kind, "name": repository.name, "revision": repository.asked, "commit": commit}
        with suppress(FileExistsError):  # another role was first; its answer counts
            create_json(files[0], document)
        return _read_commit(files[0], repository) or commit
    return commit


def recorded_commit(run: RunPaths, repository: Repository) -> str | None:
    """The commit that a run has kept; None: it has asked for none yet.

    Raises:
        RoleError: the record is damaged, or contradicts a full commit of the configuration; names the file.
    """
    return _read_commit(run.revisions / _file_name(repository), repository)


def as_recorded(model: ModelConfig, run: RunPaths) -> ModelConfig:
    """A model of the hub at the commit that a run has kept; any other, and one that the run has not asked for, as it is."""
    if model.name is None:
        return model
    commit = recorded_commit(run, Repository("model", model.name, model.revision, "model.name", "model.revision"))
    return model if commit is None else model.model_copy(update={"revision": commit})


def _revision_folders() -> Iterator[Path]:
    for folder in os.environ.get(VARIABLE, "").split(os.pathsep):
        if folder:
            yield Path(folder)


def _file_name(repository: Repository) -> str:
    return f"{repository.folder_name}@{quote(repository.asked, safe='')}.json"


def _read_commit(file: Path, repository: Repository) -> str | None:
    """The recorded commit, or None if there is no record. No record replaces a commit that the configuration names in full."""
    try:
        commit = json.loads(file.read_text())["commit"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        commit = None
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        message = f"{file} does not hold a commit; delete it, and the next attempt asks the hub again"
        raise RoleError(message, exit_codes.DATA)
    if COMMIT.fullmatch(repository.asked) and commit != repository.asked:
        message = f"{file} holds commit {commit}, but {repository.revision_field} is commit {repository.asked}; delete the file"
        raise RoleError(message, exit_codes.DATA)
    return commit
