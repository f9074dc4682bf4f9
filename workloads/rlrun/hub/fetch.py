"""Download of a repository to the hub's cache, and error messages for the hub's answers.

Messages contain the field, the value and the fix. One of the processes that share the cache downloads, and the others wait for it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rlrun.config.models.language_models import ModelConfig, ReferenceConfig
from rlrun.config.quantization import read_quantization
from rlrun.hub.refused_models import pickle_refusal, read_config, refuse_untrainable
from rlrun.hub.repository import QUICK_VARIABLE, Repository, kept_commit
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.failures import AbsentDataError, RoleError
from rlrun.runtime import exit_codes

TOKEN = "HF_TOKEN from a Secret in envFrom of trainer, inference and orchestrator, or exported in your shell"
_AGAIN = frozenset({408, 425, 429})


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the hub's answer, or None if it has not answered."""
    for cause in _error_causes(error):
        response = getattr(cause, "response", None)
        if isinstance(status := getattr(response, "status_code", None), int):
            return status
    return None


def is_temporary(error: BaseException) -> bool:
    """Return whether a retry may succeed: no network, an interrupted connection, or an overloaded hub."""
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in _AGAIN
    return not _is_offline(error) and any(_of_network(cause) for cause in _error_causes(error))


def explain_error(error: BaseException, repository: Repository) -> RoleError:
    """Return the error that ends a role.

    Args:
        error: error of the hub's client.
        repository: requested repository.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

    endpoint = constants.ENDPOINT
    status, name, field = status_of(error), repository.name, repository.name_field
    if isinstance(error, RevisionNotFoundError):
        return RoleError(
            f"{repository.revision_field}: {repository} has no revision {repository.requested_revision} (404); "
            "set an existing branch, tag or commit, "
            "or remove revision for the main branch",
            exit_codes.DATA,
        )
    if isinstance(error, GatedRepoError) or status == 403:
        return RoleError(
            f"{field}: the hub denies this token's account access to {name} (403): accept the conditions on the repository's page, or "
            f"use a token with access: {TOKEN}",
            exit_codes.CONFIGURATION,
        )
    if status == 401:
        token = "this token" if os.environ.get("HF_TOKEN") else "requests without a token"
        return RoleError(
            f"{field}: the hub does not show {name} to {token} (401): it is private or does not exist; check the "
            f"name, and set a token with access: {TOKEN}",
            exit_codes.CONFIGURATION,
        )
    if status == 404:
        return RoleError(
            f"{field}: {endpoint} has no {repository} (404); check the name, or set a token if it is private: {TOKEN}",
            exit_codes.DATA,
        )
    if constants.is_offline_mode():
        return AbsentDataError(
            f"{field}: {name} at {repository.requested_revision} is missing or incomplete in the hub's cache "
            f"({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE disables "
            "downloads; download it once without that variable, or use a folder with path",
            exit_codes.DATA,
        )
    if is_temporary(error):
        why = f"returned status {status}" if status is not None else f"cannot be reached ({_error_reason(error)})"
        return AbsentDataError(
            f"{field}: the hub {endpoint} {why}, so {name} cannot be downloaded; check the network (in a cluster "
            "spec.networkPolicy.extraEgress, for a mirror HF_ENDPOINT), or use a folder with path",
            exit_codes.FAILURE,
        )
    return RoleError(
        f"{field}: {name} cannot be downloaded from {endpoint}: {_error_reason(error)}", exit_codes.FAILURE
    )


def _error_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _of_network(error: BaseException) -> bool:
    """Return whether an error comes from sockets or the HTTP library, or a body is shorter than announced."""
    if isinstance(error, ConnectionError | TimeoutError) or "Consistency check failed" in str(error):
        return True
    return type(error).__module__.partition(".")[0] in (
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
        "requests",
        "urllib3",
    )


def _is_offline(error: BaseException) -> bool:
    return any(type(cause).__name__ == "OfflineModeIsEnabled" for cause in _error_causes(error))


def _error_reason(error: BaseException) -> str:
    last = list(_error_causes(error))[-1]
    lines = str(last).strip().splitlines() or [type(last).__name__]
    return lines[0]


TRIES = 5
PAUSE_SECONDS = 1.0
"""Pause after the first network failure. It doubles after each further failure."""
QUICK_SECONDS = 2.0
"""Timeout of the only request of a process with `QUICK_VARIABLE`; otherwise the timeout is the client's (10 s)."""
LOOK_SECONDS = 0.5
SAY_SECONDS = 60.0
"""Interval of log lines while a role waits for another role's download. The first line is logged immediately."""
SAFETENSORS = ("*.safetensors",)
_WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.npz",
    "*.onnx",
    "*.onnx_data",
)
_OTHER_WEIGHTS = ("*/*", "consolidated*")
"""Weights in other formats in the same repository: folders such as `onnx/` and `original/`."""
ResultT = TypeVar("ResultT")


def model_source(model: ModelConfig, made: Path, *, with_weights: bool, trained: bool = False) -> str:
    """Return the folder of a run's model, and download a model of the hub if it is not in the cache.

    For training, the folder of a quantized model is the run's plain copy, if it exists (`needs_plain_copy`).

    Args:
        model: model to load.
        made: folder of the tiny model, or of the plain copy.
        with_weights: whether to load the weights. False: only files for tokenizer and configuration.
        trained: whether the run trains the model. A model that cannot be trained is rejected before its weights are downloaded.

    Raises:
        RoleError: the model cannot be downloaded, or cannot be trained.
    """
    if trained and made.is_dir():
        return str(made)
    if model.name is None:
        if trained and model.path is not None:
            refuse_untrainable(Path(model.path), "model.path", own_class=model.class_ is not None)
        return model.source(made)
    own_class = model.class_ is not None
    return str(fetch_model(_policy_repository(model), with_weights=with_weights, trained=trained, own_class=own_class))


def policy_source(model: ModelConfig, made: Path) -> str:
    """Return the folder or hub name of the policy of a run that has started: its plain copy if it has one, otherwise its source."""
    return str(made) if made.is_dir() else model.source(made)


def needs_plain_copy(model: ModelConfig) -> bool:
    """Return whether the files of a run's model are quantized, so that the engines of the run need a copy without quantization.

    Raises:
        RoleError: the configuration of the model cannot be downloaded, or the model cannot be trained.
    """
    if model.tiny is not None:
        return False
    own_class = model.class_ is not None
    if model.name is not None:
        folder = fetch_model(_policy_repository(model), with_weights=False, trained=True, own_class=own_class)
    else:
        folder = Path(model.path or "")
        refuse_untrainable(folder, "model.path", own_class=own_class)
    config = read_config(folder)
    return config is not None and read_quantization(config) is not None


def _policy_repository(model: ModelConfig) -> Repository:
    return Repository("model", model.name or "", model.revision, "model.name", "model.revision")


def reference_source(config: ReferenceConfig, chosen: ModelConfig) -> str:
    """Return the folder of a reference or teacher model that is not the run's own model; see `model_source`."""
    if chosen.name is None:
        if chosen.path is not None:
            refuse_untrainable(Path(chosen.path), "algorithm.reference.model")
        return chosen.path or ""
    field = "algorithm.reference"
    repository = Repository("model", chosen.name, config.revision, f"{field}.model", f"{field}.revision")
    return str(fetch_model(repository, with_weights=True, trained=True))


def fetch_model(repository: Repository, *, with_weights: bool, trained: bool = False, own_class: bool = False) -> Path:
    """Return the folder with a model of the hub.

    Args:
        repository: repository of the model.
        with_weights: whether to load the weights.
        trained: whether the run trains the model.
        own_class: whether the run has its own class for the model (`model.class`).

    Raises:
        RoleError: the model cannot be downloaded, or cannot be trained although it has to be. The message contains the field and a fix.
    """
    folder = _fetch_files(repository, "files", ignore=_WEIGHTS)
    if trained:
        refuse_untrainable(folder, repository.name_field, repository.name, own_class=own_class)
    if with_weights:
        folder = _fetch_files(repository, "weights", allow=SAFETENSORS, ignore=_OTHER_WEIGHTS)
        if not any(folder.glob("*.safetensors")):
            raise RoleError(pickle_refusal(repository.name_field, repository.name), exit_codes.DATA)
    return folder


def fetch_rows(repository: Repository, patterns: Sequence[str]) -> Path:
    """Return the folder with a data set's files that match the patterns. Raises like `fetch_model`."""
    return _fetch_files(repository, "rows", allow=patterns)


def _log_line(text: str, level: str = "INFO") -> None:
    """Log a line. An environment's own Python has no loguru, so there the line is printed to the environment's log."""
    try:
        from loguru import logger
    except ModuleNotFoundError:
        print(text, file=sys.stderr)
    else:
        logger.log(level, text)


def _fetch_files(
    repository: Repository, part: str, *, allow: Sequence[str] | None = None, ignore: Sequence[str] | None = None
) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    commit = _call_explained(repository, lambda: _current_commit(repository))
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / "rlrun" / f"{repository.folder_name}.{commit}.{part}"

    def download() -> str:
        # With an exact commit, cached files cause no request, and a cache with missing files is never taken as complete.
        return snapshot_download(
            repository.name, repo_type=repository.kind, revision=commit,
            allow_patterns=list(allow) if allow else None, ignore_patterns=list(ignore) if ignore else None,
        )  # fmt: skip

    with _lock_download(lock, repository):
        return Path(_call_explained(repository, lambda: _call_with_retries(download, repository)))


def _current_commit(repository: Repository) -> str:
    """Return the current commit of the requested revision. Without a network, the cached one is used."""
    from huggingface_hub import HfApi, constants

    def ask() -> str:
        info = HfApi().repo_info(
            repository.name,
            repo_type=repository.kind,
            revision=repository.requested_revision,
            timeout=QUICK_SECONDS if QUICK_VARIABLE in os.environ else None,
        )
        return str(info.sha)

    known = Path(constants.HF_HUB_CACHE) / repository.folder_name / "refs" / repository.requested_revision

    def now() -> str:
        try:
            commit = _call_with_retries(ask, repository)
        except Exception as error:
            if not (is_temporary(error) or constants.is_offline_mode()) or not known.is_file():
                raise
            commit = known.read_text().strip()
            _log_line(
                f"the hub cannot be asked for {repository}: using commit {commit} of {repository.requested_revision} from its cache",
                "WARNING",
            )
            return commit
        _log_line(f"{repository}: {repository.requested_revision} is commit {commit}")
        with suppress(OSError):  # for later runs without a network; a read-only cache cannot store it
            write_bytes(known, commit.encode())
        return commit

    return kept_commit(repository, now)


def _call_explained(repository: Repository, ask: Callable[[], ResultT]) -> ResultT:
    """Return the result of a request, or raise an error with a message for users."""
    try:
        return ask()
    except RoleError:
        raise
    except OSError as error:
        if error.errno is not None and error.filename is not None:  # an error of the cache's volume, not of the hub
            raise RoleError(
                f"cannot write the hub's cache: {error.filename}: {error.strerror}", exit_codes.STORAGE
            ) from error
        raise explain_error(error, repository) from error
    except Exception as error:
        raise explain_error(error, repository) from error


def _call_with_retries(ask: Callable[[], ResultT], repository: Repository) -> ResultT:
    """Retry after network failures. Complete files are kept, and the client resumes an interrupted file."""
    tries = 1 if QUICK_VARIABLE in os.environ else TRIES
    for tried in range(1, tries + 1):
        try:
            return ask()
        except Exception as error:
            if tried == tries or not is_temporary(error):
                raise
            pause = PAUSE_SECONDS * 2 ** (tried - 1)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            _log_line(f"the connection to the hub failed ({reason}); retrying {repository} in {pause:.0f} s", "WARNING")
            time.sleep(pause)
    raise AssertionError("unreachable")


@contextmanager
def _lock_download(path: Path, repository: Repository) -> Iterator[None]:
    """Prevent other processes with this cache from downloading the same files. A cache without lock support is used without a lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError:
        yield
        return
    with file:
        if _take_lock(file.fileno(), path, repository):
            file.truncate(0)
            file.write(f"{socket.gethostname()}, process {os.getpid()}")
            file.flush()
        yield


def _take_lock(descriptor: int, path: Path, repository: Repository) -> bool:
    """Wait for the lock. Returns False if the volume does not support locks."""
    logged_at = float("-inf")
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            now = time.monotonic()
            if now - logged_at >= SAY_SECONDS:
                logged_at = now
                _log_line(f"{path.read_text() or 'another process'} downloads {repository}; waiting for it")
            time.sleep(LOOK_SECONDS)
        except OSError:
            return False
