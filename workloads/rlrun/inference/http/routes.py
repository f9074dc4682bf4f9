"""The routes under `/rlrun`: readiness, status, the three ways to change weights, and sleep.

Weights are changed only for an orchestrator that speaks the same version of this protocol: see `engine_protocol`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from rlrun.inference.guard import GUEST
from rlrun.inference.heartbeat import Heartbeat
from rlrun.inference.weights.handover import Handover, HandoverError, Outcome
from rlrun.protocol.messages.engine_protocol import HEADER, OWN, REFUSED, explain_mismatch, of_header


@dataclass(frozen=True, slots=True)
class Control:
    """State behind the routes; `app.state.rlrun` holds it."""

    handover: Handover
    heartbeat: Heartbeat

    @property
    def engine_alive(self) -> bool:
        """True if the engine answered lately, or is inside an update, which has a deadline of its own."""
        return self.heartbeat.alive or self.handover.busy

    def reason(self) -> str | None:
        """Reason why this replica is not ready; None when it is. Once synced it stays ready while an update is running."""
        if not self.engine_alive:
            return f"the engine does not answer{': ' + self.heartbeat.error if self.heartbeat.error else ''}"
        if self.handover.served is None:
            return self.handover.fault or "no weights were handed over since the start"
        return None if self.handover.busy else self.handover.fault


class UpdateRequest(BaseModel):
    """Body of `/rlrun/update_weights`."""

    model_config = ConfigDict(extra="forbid")
    path: str = Field(min_length=1)
    version: int = Field(ge=0, strict=True)
    force: bool = False


class ReloadRequest(BaseModel):
    """Body of `/rlrun/reload_weights`."""

    model_config = ConfigDict(extra="forbid")
    version: int = Field(ge=0, strict=True)
    force: bool = False


class ReceiveRequest(BaseModel):
    """Body of `/rlrun/receive_weights`."""

    model_config = ConfigDict(extra="forbid")
    trainer_url: str = Field(min_length=1)
    version: int = Field(ge=0, strict=True)
    force: bool = False


router = APIRouter(prefix="/rlrun")


def _control(request: Request) -> Control:
    control: Control = request.app.state.rlrun
    return control


def _handover(request: Request) -> Handover:
    """The engine's, for one who is understood.

    Raises:
        HandoverError: the orchestrator is of a release with another version of these routes.
    """
    problem = explain_mismatch(OWN, of_header(request.headers.get(HEADER)))
    if problem is not None:
        raise HandoverError(REFUSED, problem)
    return _control(request).handover


def _version(handover: Handover) -> int | None:
    """The version that the engine holds for certain."""
    return handover.served.version if handover.served is not None and handover.fault is None else None


def _done(outcome: Outcome) -> JSONResponse:
    body = {"version": outcome.version, "changed": outcome.changed, "seconds": outcome.seconds, "model": outcome.model}
    return JSONResponse(body)


def _failed(error: HandoverError) -> JSONResponse:
    return JSONResponse({"error": {"code": error.status, "message": error.message}}, status_code=error.status)


@router.api_route("/ready", methods=["GET", "HEAD"])
async def ready(request: Request) -> JSONResponse:
    """200 when this replica may get requests, else 503 with the reason."""
    control = _control(request)
    reason = control.reason()
    body = {"ready": reason is None, "reason": reason, "weight_version": _version(control.handover)}
    return JSONResponse(body, status_code=200 if reason is None else 503)


@router.api_route("/status", methods=["GET", "HEAD"])
async def status(request: Request) -> JSONResponse:
    """State of the engine without a call to the engine, so it answers even when that hangs."""
    control = _control(request)
    served = control.handover.served
    body: dict[str, object] = {
        "protocol": OWN.protocol,
        "release": OWN.release,
        "weight_version": _version(control.handover),
        "weights_path": None if served is None else served.path,
        "model": None if served is None else served.model,
        "engine_alive": control.engine_alive,
        "updating": control.handover.busy,
        "fault": control.handover.fault,
        "asleep": control.handover.asleep,
    }
    return JSONResponse(body)


@router.post("/update_weights")
async def update_weights(request: Request, body: UpdateRequest) -> JSONResponse:
    """Load a published folder; requests in flight continue on the new weights. A guest loads from its own folder alone."""
    guest = request.scope.get(GUEST)
    try:
        handover = _handover(request)
        if guest is not None and not handover.is_of(body.path, guest):
            raise HandoverError(403, f"path ({body.path}) is not in the folder of run {guest}, whose key this is")
        return _done(await handover.update(body.path, body.version, force=body.force))
    except HandoverError as error:
        return _failed(error)


@router.post("/reload_weights")
async def reload_weights(request: Request, body: ReloadRequest) -> JSONResponse:
    """Load the model that the server was started with."""
    try:
        return _done(await _handover(request).reload_base(body.version, force=body.force))
    except HandoverError as error:
        return _failed(error)


@router.post("/receive_weights")
async def receive_weights(request: Request, body: ReceiveRequest) -> JSONResponse:
    """Receive a version from the trainer's memory; requests in flight continue on the new weights."""
    try:
        return _done(await _handover(request).receive(body.trainer_url, body.version, force=body.force))
    except HandoverError as error:
        return _failed(error)


@router.post("/sleep")
async def sleep(request: Request) -> JSONResponse:
    """Give the GPUs' memory up, until the next hand-over."""
    try:
        seconds = await _handover(request).sleep()
    except HandoverError as error:
        return _failed(error)
    return JSONResponse({"asleep": True, "seconds": seconds})
