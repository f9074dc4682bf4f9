"""Routes below `/rlrun`: readiness, status, three ways to change weights, and sleep.

Routes that change weights require an orchestrator with the same version of this protocol, see `engine_protocol`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from rlrun.inference.guard import GUEST
from rlrun.inference.heartbeat import Heartbeat
from rlrun.inference.weights.handover import Handover, HandoverError, Outcome
from rlrun.protocol.messages.endpoints import HEADER, OWN, REFUSED, explain_mismatch, of_header


@dataclass(frozen=True, slots=True)
class Control:
    """State of the routes, stored in `app.state.rlrun`."""

    handover: Handover
    heartbeat: Heartbeat

    @property
    def engine_alive(self) -> bool:
        """Whether the engine responded recently or is in an update, which has its own deadline."""
        return self.heartbeat.is_alive or self.handover.is_updating

    def unready_reason(self) -> str | None:
        """Return why this replica is not ready, or None. A replica with weights stays ready during an update."""
        if not self.engine_alive:
            return f"the engine does not respond{': ' + self.heartbeat.error if self.heartbeat.error else ''}"
        if self.handover.served is None:
            return self.handover.fault or "no weights were loaded since the start"
        return None if self.handover.is_updating else self.handover.fault


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


def _get_control(request: Request) -> Control:
    control: Control = request.app.state.rlrun
    return control


def _get_handover(request: Request) -> Handover:
    """Return the hand-over for a compatible orchestrator.

    Raises:
        HandoverError: the orchestrator's release has another version of these routes.
    """
    problem = explain_mismatch(OWN, of_header(request.headers.get(HEADER)))
    if problem is not None:
        raise HandoverError(REFUSED, problem)
    return _get_control(request).handover


def _served_version(handover: Handover) -> int | None:
    """Return the version of the engine's weights, or None if it is unknown."""
    return handover.served.version if handover.served is not None and handover.fault is None else None


def _outcome_response(outcome: Outcome) -> JSONResponse:
    body = {"version": outcome.version, "changed": outcome.changed, "seconds": outcome.seconds, "model": outcome.model}
    return JSONResponse(body)


def _error_response(error: HandoverError) -> JSONResponse:
    return JSONResponse({"error": {"code": error.status, "message": error.message}}, status_code=error.status)


@router.api_route("/ready", methods=["GET", "HEAD"])
async def ready(request: Request) -> JSONResponse:
    """Return 200 if this replica can receive requests, otherwise 503 with the reason."""
    control = _get_control(request)
    reason = control.unready_reason()
    body = {"ready": reason is None, "reason": reason, "weight_version": _served_version(control.handover)}
    return JSONResponse(body, status_code=200 if reason is None else 503)


@router.api_route("/status", methods=["GET", "HEAD"])
async def status(request: Request) -> JSONResponse:
    """Return the state of the engine without calling it, so the route works even if the engine hangs."""
    control = _get_control(request)
    served = control.handover.served
    body: dict[str, object] = {
        "protocol": OWN.protocol,
        "release": OWN.release,
        "weight_version": _served_version(control.handover),
        "weights_path": None if served is None else served.path,
        "model": None if served is None else served.model,
        "engine_alive": control.engine_alive,
        "updating": control.handover.is_updating,
        "fault": control.handover.fault,
        "asleep": control.handover.asleep,
    }
    return JSONResponse(body)


@router.post("/update_weights")
async def update_weights(request: Request, body: UpdateRequest) -> JSONResponse:
    """Load a published folder; requests in flight continue with the new weights. A guest can load only from its own folder."""
    guest = request.scope.get(GUEST)
    try:
        handover = _get_handover(request)
        if guest is not None and not handover.is_of(body.path, guest):
            raise HandoverError(
                403, f"path ({body.path}) is outside of the folder of run {guest}, to which this key belongs"
            )
        return _outcome_response(await handover.update(body.path, body.version, force=body.force))
    except HandoverError as error:
        return _error_response(error)


@router.post("/reload_weights")
async def reload_weights(request: Request, body: ReloadRequest) -> JSONResponse:
    """Load the model that the server was started with."""
    try:
        return _outcome_response(await _get_handover(request).reload_base(body.version, force=body.force))
    except HandoverError as error:
        return _error_response(error)


@router.post("/receive_weights")
async def receive_weights(request: Request, body: ReceiveRequest) -> JSONResponse:
    """Receive a version from the trainer's memory; requests in flight continue with the new weights."""
    try:
        return _outcome_response(
            await _get_handover(request).receive_version(body.trainer_url, body.version, force=body.force)
        )
    except HandoverError as error:
        return _error_response(error)


@router.post("/sleep")
async def sleep(request: Request) -> JSONResponse:
    """Free the GPU memory until the next hand-over."""
    try:
        seconds = await _get_handover(request).sleep()
    except HandoverError as error:
        return _error_response(error)
    return JSONResponse({"asleep": True, "seconds": seconds})
