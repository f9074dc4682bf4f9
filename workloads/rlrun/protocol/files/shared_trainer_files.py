"""Protocol of several runs in one trainer: how a run (the guest) gets a slot in another run's trainer (the host's).

    <mount>/<host>/shared/<guest>/join.json    SlotRequest  the guest's orchestrator: request for a slot, while the file exists
    <mount>/<host>/shared/<guest>/state.json   SlotAnswer   rank 0 of the shared trainer: result of the request

In a cluster no other guest can write to that folder, so a request really comes from the run that it names.

All other files of a guest are in its own folder, under its own attempt, by the file protocol of any run. Because the guest has no trainer,
its orchestrator's launcher claims the folder and writes `run.json` before. Messages use the host's channel (`channel`), below
`channel_of(guest)`, with the guest's own key, which the answer to its request confirms (`api_key`); the key is also valid for the guest's
part of the engines. The answer contains the attempt of the request: a state of an older attempt has no meaning.

A guest that leaves removes its join file, and still contributes its part of the last checkpoint. If the trainer's process ends, all of its
attempts end: earlier requests are answered with `Left`, and the guest sends a new request with a higher attempt. If a guest's own work
ended the process (an exception on only some ranks), its next request is refused once, because its user has to fix the cause.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from rlrun.config.base import Config
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.paths import RunPaths

# A slot is the place of one run in a shared trainer, with its own adapter. `trainer.lora.slots` is their number.
SlotState = Literal["Waiting", "Joined", "Refused", "Left", "Failed"]
_JOIN, _STATE = "join.json", "state.json"


class SlotRequest(Config):
    """Request of a run for a slot."""

    run: Annotated[str, Field(min_length=1, max_length=40)]
    """Name of the guest."""
    attempt: Annotated[int, Field(ge=1)]
    """Attempt of the guest, new in its folder."""
    folder: Annotated[str, Field(min_length=1)]
    """Folder of the guest, as a path of the trainer."""
    key_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Digest of the guest's key (`endpoints.key_digest`)."""


class SlotAnswer(Config):
    """Result of a request."""

    run: Annotated[str, Field(min_length=1, max_length=40)]
    """Name of the guest."""
    attempt: Annotated[int, Field(ge=1)]
    """Attempt of the request."""
    slot: Annotated[int, Field(ge=0)] | None = None
    """Slot of the guest, while it has one; the host's own run has slot 0."""
    state: SlotState
    """Waiting: all slots are in use. Joined: the trainer trains it. Refused: the trainer cannot train it. Left: it has ended, or must send
    a new request. Failed: its attempt ended with an error. All states except Waiting and Joined are final for this attempt."""
    step: Annotated[int, Field(ge=0)] | None = None
    """Last trained step."""
    proof: str = ""
    """Proof of Joined: `endpoints.guest_proof`."""
    reason: str = ""
    """Message about the state."""
    exit_code: Annotated[int, Field(ge=0)] = 0
    """Exit code (`exit_codes`) for the guest's orchestrator if the state is Refused or Failed."""
    ended_trainer: bool = False
    """Whether the failure ended the trainer, and thereby the attempts of all runs in it: the next attempt is refused."""


def host_paths(folder: Path, host: str) -> RunPaths:
    """Return the host's paths; the folders of host and guest have the same parent."""
    return RunPaths(folder.parent / host)


def model_folder(folder: Path, host: str | None) -> Path:
    """Return the folder of a run's tiny model (`model.tiny`, which is created at the start of a run).

    The trainer creates the model in the folder of its own run. A guest has no trainer, so its model is in the host's folder.

    Args:
        folder: folder of the run.
        host: run whose trainer it shares, or None for its own trainer.
    """
    return (RunPaths(folder) if host is None else host_paths(folder, host)).model


def channel_of(run: str) -> str:
    """Return the path of a guest's channel, relative to the host's address."""
    return f"/rlrun/shared/{run}"


def join_file(host: RunPaths, guest: str) -> Path:
    """Return `shared/<guest>/join.json` in the host's folder."""
    return host.shared / guest / _JOIN


def state_file(host: RunPaths, guest: str) -> Path:
    """Return `shared/<guest>/state.json` in the host's folder."""
    return host.shared / guest / _STATE


def write_request(host: RunPaths, join: SlotRequest) -> None:
    """Write the request atomically; it replaces an older one of this guest."""
    write_bytes(join_file(host, join.run), (join.model_dump_json(indent=1) + "\n").encode())


def delete_request(host: RunPaths, guest: str) -> None:
    """Remove the request of a guest that leaves, if it exists."""
    join_file(host, guest).unlink(missing_ok=True)


def read_requests(host: RunPaths) -> list[SlotRequest]:
    """Return the existing requests by name; invalid files, and files that name another run, are skipped.

    Raises:
        OSError: the volume fails to list or read them.
    """
    if not host.shared.is_dir():
        return []
    found = []
    for path in sorted(host.shared.glob(f"*/{_JOIN}")):
        with suppress(FileNotFoundError, ValidationError):
            join = SlotRequest.model_validate_json(path.read_bytes())
            if path == join_file(host, join.run):
                found.append(join)
    return found


def write_answer(host: RunPaths, state: SlotAnswer) -> None:
    """Write the state atomically."""
    write_bytes(state_file(host, state.run), (state.model_dump_json(indent=1) + "\n").encode())


def last_state(host: RunPaths, guest: str) -> SlotAnswer | None:
    """Return the newest answer to any request of the guest, or None if it is missing or cannot be read."""
    try:
        state = SlotAnswer.model_validate_json(state_file(host, guest).read_bytes())
    except (OSError, ValidationError):
        return None
    return state if state.run == guest else None


def read_state(host: RunPaths, guest: str, attempt: int) -> SlotAnswer | None:
    """Return the answer to the request of this attempt, or None until the trainer has written it. Answers to older attempts are ignored."""
    state = last_state(host, guest)
    return state if state is not None and state.attempt == attempt else None
