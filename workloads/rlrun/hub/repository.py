"""Repository of the hub that a manifest field names, and the record of its commit in the run's folder.

The first role that resolves a commit writes the record. A branch may move during a run: without the record, a restarted trainer would
continue with other weights than its engines, and a later attempt would use other data than the attempt before.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from rlrun.config.models.language_models import ModelConfig
from rlrun.protocol.files.durable import create_json
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes

Kind = Literal["model", "dataset"]
MAIN = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r".*/models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?")


@dataclass(frozen=True)
class Repository:
    """Repository to download."""

    kind: Kind
    name: str
    """Name such as `Qwen/Qwen3-8B`."""
    revision: str | None
    """Branch, tag or commit. None: the main branch."""
    name_field: str
    """Manifest field with the name, for messages."""
    revision_field: str
    """Manifest field with the revision, for messages."""

    @property
    def requested_revision(self) -> str:
        """Requested revision."""
        return self.revision or MAIN

    @property
    def folder_name(self) -> str:
        """Name of the repository's folder in the hub's cache."""
        return "--".join([f"{self.kind}s", *self.name.split("/")])

    def __str__(self) -> str:
        return f"{'data set' if self.kind == 'dataset' else 'model'} {self.name}"


def show_source(source: str) -> str:
    """Return a model's folder for messages: `org/name@commit` if the folder is in the hub's cache."""
    match = _SNAPSHOT.fullmatch(source)
    return source if match is None else f"{match['name'].replace('--', '/')}@{match['commit'][:7]}"


VARIABLE = "RLRUN_REVISIONS"
"""Environment variable of roles and their environments' processes with the folders of records. The first one is written, all are read."""
QUICK_VARIABLE = "RLRUN_HUB_QUICK"
"""Environment variable of processes that only check a run: they send one request to an unreachable hub and do not retry."""


def keep_revisions(run: RunPaths, host: RunPaths | None = None) -> None:
    """Make this process and its future children use and store the commits of a run.

    Args:
        run: run whose folder gets the records.
        host: run whose trainer it shares and whose model it reads.
    """
    folders = [run.revisions] if host is None else [run.revisions, host.revisions]
    os.environ[VARIABLE] = os.pathsep.join(map(str, folders))


def kept_commit(repository: Repository, resolve: Callable[[], str]) -> str:
    """Return the commit of a repository for this process's run.

    Args:
        repository: repository to read.
        resolve: function that requests the current commit of the revision from the hub. It is called only without a record.

    Raises:
        OSError: the record cannot be written.
        RoleError: a record is damaged, or contradicts a full commit of the configuration. The message contains the file.
    """
    files = [folder / _file_name(repository) for folder in _revision_folders()]
    for file in files:
        if (commit := _read_commit(file, repository)) is not None:
            return commit
    commit = repository.requested_revision if COMMIT.fullmatch(repository.requested_revision) else resolve()
    if files:
        document = {
            "kind": repository.kind,
            "name": repository.name,
            "revision": repository.requested_revision,
            "commit": commit,
        }
        with suppress(FileExistsError):  # another role was first; its commit is used
            create_json(files[0], document)
        return _read_commit(files[0], repository) or commit
    return commit


def recorded_commit(run: RunPaths, repository: Repository) -> str | None:
    """Return the commit that a run has stored, or None if there is no record.

    Raises:
        RoleError: the record is damaged, or contradicts a full commit of the configuration. The message contains the file.
    """
    return _read_commit(run.revisions / _file_name(repository), repository)


def as_recorded(model: ModelConfig, run: RunPaths) -> ModelConfig:
    """Return a model of the hub with the commit that a run has stored. Other models, and models without a record, are unchanged."""
    if model.name is None:
        return model
    commit = recorded_commit(run, Repository("model", model.name, model.revision, "model.name", "model.revision"))
    return model if commit is None else model.model_copy(update={"revision": commit})


def _revision_folders() -> Iterator[Path]:
    for folder in os.environ.get(VARIABLE, "").split(os.pathsep):
        if folder:
            yield Path(folder)


def _file_name(repository: Repository) -> str:
    return f"{repository.folder_name}@{quote(repository.requested_revision, safe='')}.json"


def _read_commit(file: Path, repository: Repository) -> str | None:
    """Return the recorded commit, or None. A record must not differ from a full commit of the configuration."""
    try:
        commit = json.loads(file.read_text())["commit"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        commit = None
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        message = f"{file} does not contain a commit; delete it, and the next attempt requests it from the hub again"
        raise RoleError(message, exit_codes.DATA)
    if COMMIT.fullmatch(repository.requested_revision) and commit != repository.requested_revision:
        wanted = f"{repository.revision_field} is commit {repository.requested_revision}"
        message = f"{file} contains commit {commit}, but {wanted}; delete the file"
        raise RoleError(message, exit_codes.DATA)
    return commit
