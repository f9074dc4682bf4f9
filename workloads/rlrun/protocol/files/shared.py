"""Several runs in one trainer: how a run (the guest) gets a slot in another run's trainer (the host's).

    <mount>/<host>/shared/<guest>/join.json    Join         the guest's orchestrator: it wants a slot, as long as the file is there
    <mount>/<host>/shared/<guest>/state.json   SharedState  the shared trainer's rank 0: what became of it

In a cluster no other guest can write to that folder, so a request is of the run that it names.

Everything else of a guest is in its own folder, under its own attempt, by the file protocol of any run; its orchestrator's launcher has
claimed the folder and written `run.json` before, as there is no trainer to do so. News travel over the host's channel (`channel`), below
`channel_of(guest)`, and with the guest's own key, which the answer to its request confirms (`api_key`); it opens the guest's part of the
engines too. The answer has the request's attempt: a state of an older one says nothing.

A guest that wants to leave takes its join file away, and still brings its part of the last checkpoint. When the trainer's process ends, all
attempts in it end: a request that was begun before is answered with `Left`, and the guest asks again under a higher attempt. A guest whose
own work ended the process (an exception that some ranks alone met) is refused once: its user has to look.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from rlrun.config.base import Config
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.paths import RunPaths

SlotState = Literal["Waiting", "Joined", "Refused", "Left", "Failed"]
_JOIN, _STATE = "join.json", "state.json"


class Join(Config):
    """A run asks for a slot."""

    run: Annotated[str, Field(min_length=1, max_length=40)]
    """The guest's name."""
    attempt: Annotated[int, Field(ge=1)]
    """The guest's attempt, new in its folder."""
    folder: Annotated[str, Field(min_length=1)]
    """The guest's folder, as the trainer sees it."""
    key_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Digest of the guest's key (`api_key.key_digest`)."""


class SharedState(Config):
    """Result of a request."""

    run: Annotated[str, Field(min_length=1, max_length=40)]
    """The guest's name."""
    attempt: Annotated[int, Field(ge=1)]
    """The attempt that asked."""
    slot: Annotated[int, Field(ge=0)] | None = None
    """Its slot, while it has one; the host's own run has slot 0."""
    state: SlotState
    """Waiting: all slots are taken. Joined: it is trained. Refused: it cannot be. Left: it is over, or has to ask again. Failed: its
    attempt ended with an error. All but Waiting and Joined are final for this attempt."""
    step: Annotated[int, Field(ge=0)] | None = None
    """Its last trained step."""
    proof: str = ""
    """Proof of Joined: `api_key.guest_proof`."""
    reason: str = ""
    """Reason of the state, for a person."""
    exit_code: Annotated[int, Field(ge=0)] = 0
    """Code of `exit_codes` that the guest's orchestrator ends with, where the state is Refused or Failed."""
    ended_trainer: bool = False
    """True if the failure took the trainer with it, and with that the attempts of all runs in it: the next attempt is refused."""


def host_paths(folder: Path, host: str) -> RunPaths:
    """The host's paths, from the guest's folder: they lie beside each other."""
    return RunPaths(folder.parent / host)


def model_folder(folder: Path, host: str | None) -> Path:
    """Folder of a run's tiny model, if its manifest asks for one: the trainer that loads it makes it, in its own run's folder.

    Args:
        folder: of the run.
        host: whose trainer it shares; None: it has its own.
    """
    return (RunPaths(folder) if host is None else host_paths(folder, host)).model


def channel_of(run: str) -> str:
    """Path of a guest's channel, below the address of the host's."""
    return f"/rlrun/shared/{run}"


def join_file(host: RunPaths, guest: str) -> Path:
    """`shared/<guest>/join.json` in the host's folder."""
    return host.shared / guest / _JOIN


def state_file(host: RunPaths, guest: str) -> Path:
    """`shared/<guest>/state.json` in the host's folder."""
    return host.shared / guest / _STATE


def write_request(host: RunPaths, join: Join) -> None:
    """Write the request, in one step; an older one of this guest is replaced."""
    write_bytes(join_file(host, join.run), (join.model_dump_json(indent=1) + "\n").encode())


def take_back(host: RunPaths, guest: str) -> None:
    """Remove the request, if it is there: the guest leaves."""
    join_file(host, guest).unlink(missing_ok=True)


def read_requests(host: RunPaths) -> list[Join]:
    """The requests that are there, by name; a file that is none, or names another run, is left out.

    Raises:
        OSError: the volume does not say what is there.
    """
    if not host.shared.is_dir():
        return []
    found = []
    for path in sorted(host.shared.glob(f"*/{_JOIN}")):
        with suppress(FileNotFoundError, ValidationError):
            join = Join.model_validate_json(path.read_bytes())
            if path == join_file(host, join.run):
                found.append(join)
    return found


def write_answer(host: RunPaths, state: SharedState) -> None:
    """Write the state, in one step."""
    write_bytes(state_file(host, state.run), (state.model_dump_json(indent=1) + "\n").encode())


def last_state(host: RunPaths, guest: str) -> SharedState | None:
    """The newest answer to any request of the guest; None when there is none."""
    try:
        state = SharedState.model_validate_json(state_file(host, guest).read_bytes())
    except (OSError, ValidationError):
        return None
    return state if state.run == guest else None


def read_state(host: RunPaths, guest: str, attempt: int) -> SharedState | None:
    """The answer to the request of this attempt; None when there is none yet."""
    state = last_state(host, guest)
    return state if state is not None and state.attempt == attempt else None
