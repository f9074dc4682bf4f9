"""Error messages for the hub's answers, with the field, the value and the fix."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rlrun.hub.repository import Repository
from rlrun.protocol.files.failures import RoleError
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
            f"{repository.revision_field}: {repository} has no revision {repository.asked} (404); set an existing branch, tag or commit, "
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
        return RoleError(
            f"{field}: {name} at {repository.asked} is missing or incomplete in the hub's cache "
            f"({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE disables "
            "downloads; download it once without that variable, or use a folder with path",
            exit_codes.DATA,
        )
    if is_temporary(error):
        why = f"returned status {status}" if status is not None else f"cannot be reached ({_error_reason(error)})"
        return RoleError(
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
