"""An engine's side of a transfer: request it from the trainer, join its groups, and receive into shared memory.

Messages: `rlrun.protocol.messages.transfer`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError

from rlrun.inference.weights.preflight import Shapes, problem_of_tensors
from rlrun.inference.weights.staging import Staging
from rlrun.protocol.messages.transfer import TRANSFERS, TransferOffer, TransferRequest

ASK_SECONDS = 150.0
"""Maximum wait for the trainer's response, which arrives when all engines have sent a request and the checksums are computed."""


class RefusedError(Exception):
    """Error if the trainer cannot send the version, or sends tensors of another model. The engine is unchanged.

    Args:
        message: cause.
        gone: whether the trainer does not have this version (any more); another version may be available.
    """

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class Groups(Protocol):
    """Groups of a session that an engine has joined."""

    session: str

    def abort(self) -> None:
        """Leave the groups."""
        ...


class Fetch(Protocol):
    """One transfer."""

    def run(self) -> tuple[Path, Groups | None]:
        """Receive the version in the caller's thread; returns the folder, and the groups if they can be used again."""
        ...

    def abort(self) -> None:
        """Abort the transfer."""
        ...


MakeFetch = Callable[[str, str, TransferOffer, Groups | None, Staging], Fetch]
"""Factory of a transfer from: engine name, trainer host, offer, joined groups, staging."""


class Receiver:
    """Receiver of versions from one trainer at a time.

    A version is complete in shared memory and compared with the trainer's checksums before the engine is changed. A failure before that
    point leaves the engine with its served version.

    Args:
        api_key: API key of the run.
        expected: tensors of the served model, or None if unknown.
        make_fetch: factory of transfers: `incoming.Fetching`, which needs torch.
        staging: target of the versions. Default: the machine's shared memory.
        keeps: whether a version stays in shared memory as the base for later differences.
    """

    def __init__(
        self,
        *,
        api_key: str,
        expected: Shapes | None,
        make_fetch: MakeFetch,
        staging: Staging | None = None,
        keeps: bool = False,
    ) -> None:
        self._keeps = keeps
        self._expected, self._make_fetch, self._staging = expected, make_fetch, staging or Staging()
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._name = secrets.token_hex(8)
        self._incoming: Groups | None = None
        self._alone = False

    async def fetch(self, trainer_url: str, version: int) -> Path:
        """Receive a version from the trainer's memory and return its folder, which stays until `drop` or the next call.

        Raises:
            RefusedError: the version is not available or incomplete; the engine is unchanged.
        """
        incoming = self._incoming
        request = TransferRequest(
            version=version,
            engine=self._name,
            session=None if incoming is None else incoming.session,
            alone=self._alone,
            base=None if self._staging.whole is None else self._staging.whole.checksum,
        )
        offer = await self._post(trainer_url, request)
        self._alone, self._incoming = True, None  # until the transfer succeeds
        problem = problem_of_tensors(offer.tensors, self._expected)
        if problem is not None:
            if incoming is not None:
                incoming.abort()
            raise RefusedError(problem)
        host = urlsplit(trainer_url).hostname or ""
        # The transfer blocks, so it runs in a thread. A cancelled or failed transfer leaves the groups, and the next request joins anew.
        work = self._make_fetch(self._name, host, offer, incoming, self._staging)
        try:
            folder, self._incoming = await asyncio.to_thread(work.run)
        except asyncio.CancelledError:
            work.abort()
            raise
        except Exception as error:
            work.abort()
            raise RefusedError(
                f"the transfer of version {version} from the trainer at {trainer_url} failed: {error}"
            ) from None
        self._alone = False
        return folder

    def drop(self) -> None:
        """Free the memory of a loaded version, unless it is kept as the base for the next one."""
        if not self._keeps:
            self._staging.drop_all()

    def close(self) -> None:
        """Leave the groups and delete the shared memory."""
        if self._incoming is not None:
            self._incoming.abort()
        self._staging.close()

    async def _post(self, trainer_url: str, request: TransferRequest) -> TransferOffer:
        limit = aiohttp.ClientTimeout(total=ASK_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=limit) as http,
                http.post(
                    trainer_url.rstrip("/") + TRANSFERS, json=request.model_dump(mode="json", exclude_none=True)
                ) as answer,
            ):
                text = await answer.text()
                if answer.status != 200:
                    raise RefusedError(
                        f"the trainer at {trainer_url} returned {answer.status}: {text[:300]}",
                        gone=answer.status == HTTPStatus.NOT_FOUND,
                    )
                return TransferOffer.model_validate_json(text)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RefusedError(f"the trainer at {trainer_url} does not respond: {error or 'timeout'}") from None
        except ValidationError:
            raise RefusedError(f"{trainer_url} is not the address of a trainer") from None
