"""An engine's side of a transfer: ask the trainer, join its group, receive. For the messages see `rlrun.protocol.messages.transfer`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
from loguru import logger
from pydantic import ValidationError

from rlrun.inference.weights.preflight import Shapes
from rlrun.protocol.messages.transfer import TRANSFERS, Joining, TransferOffer, TransferRequest

ASK_SECONDS = 30.0


class RefusedError(Exception):
    """The trainer cannot send the version, or what it would send is not of this model. The engine is untouched.

    Args:
        message: why.
        gone: the trainer has not (or no longer) this version; another one may come.
    """

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class Workers(Protocol):
    """The part of vLLM's engine client that a transfer needs."""

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = ...,
        args: tuple[object, ...] = ...,
        kwargs: dict[str, object] | None = ...,
    ) -> object: ...


class Receiver:
    """Receives versions from one trainer at a time.

    Args:
        engine: whose workers receive.
        workers: how many they are.
        api_key: the run's.
        expected: the served model's tensors; None: unknown.
    """

    def __init__(self, engine: Workers, *, workers: int, api_key: str, expected: Shapes | None) -> None:
        self._engine, self._workers, self._expected = engine, workers, expected
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._session: str | None = None

    async def ask(self, trainer_url: str, version: int) -> TransferOffer:
        """Ask for a version and ensure that the workers are in the trainer's group.

        Raises:
            RefusedError: it will not come; the engine is untouched.
        """
        request = TransferRequest(version=version, workers=self._workers, session=self._session)
        offer = await self._post(trainer_url, request)
        problem = self._problem(offer)
        if problem is not None:
            self._session = None  # what is sent now, nobody receives
            raise RefusedError(problem)
        if offer.joining is not None:
            await self._join(trainer_url, offer.joining)
        self._session = offer.session
        return offer

    async def receive(self, offer: TransferOffer) -> None:
        """Load what comes. Whatever it raises leaves the weights unknown."""
        session, self._session = self._session, None
        tensors = {
            "names": [tensor.name for tensor in offer.tensors],
            "dtype_names": [tensor.dtype for tensor in offer.tensors],
            "shapes": [tensor.shape for tensor in offer.tensors],
        }
        await self._engine.collective_rpc("start_weight_update")
        await self._engine.collective_rpc("update_weights", kwargs={"update_info": tensors})
        await self._engine.collective_rpc("finish_weight_update")
        self._session = session

    async def _post(self, trainer_url: str, request: TransferRequest) -> TransferOffer:
        limit = aiohttp.ClientTimeout(total=ASK_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=limit) as http,
                http.post(trainer_url.rstrip("/") + TRANSFERS, json=request.model_dump(mode="json")) as answer,
            ):
                text = await answer.text()
                if answer.status != 200:
                    raise RefusedError(
                        f"the trainer at {trainer_url} refused with {answer.status}: {text[:300]}",
                        gone=answer.status == HTTPStatus.NOT_FOUND,
                    )
                return TransferOffer.model_validate_json(text)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RefusedError(f"the trainer at {trainer_url} does not answer: {error or 'in time'}") from None
        except ValidationError:
            raise RefusedError(f"{trainer_url} is not a trainer's channel") from None

    def _problem(self, offer: TransferOffer) -> str | None:
        """Reason to refuse an offer: exactly the served model's tensors must come, as for a published folder."""
        if self._expected is None:
            return None
        coming = {tensor.name: tuple(tensor.shape) for tensor in offer.tensors}
        for name, shape in self._expected.items():
            if coming.get(name) != shape:
                return f"the trainer's {name} has shape {coming.get(name)}, the served model's {shape}"
        if unknown := sorted(set(coming) - set(self._expected)):
            return f"the trainer sends {unknown[0]}, which the served model does not have"
        return None

    async def _join(self, trainer_url: str, joining: Joining) -> None:
        address = urlsplit(trainer_url).hostname
        rendezvous: dict[str, object]
        if joining.backend == "nccl":
            rendezvous = {"nccl_unique_id_b64": joining.unique_id, "packed": False}
        else:
            rendezvous = {"master_address": address, "master_port": joining.store_port}
        about = rendezvous | {"rank_offset": 1, "world_size": joining.world_size}
        try:
            await self._engine.collective_rpc("shutdown_weight_transfer_engine")
            await self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": about})
        except Exception as error:
            raise RefusedError(f"the workers could not join the trainer's group: {error}") from None
        logger.info(f"{self._workers} workers receive weights from {address} over {joining.backend}")
