"""An engine's side of a transfer: ask the trainer, join its groups, receive into shared memory.

For the messages see `rlrun.protocol.messages.transfer`.
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
"""Longest wait for the trainer's answer, which comes when all engines have asked and the version's checksums are known."""


class RefusedError(Exception):
    """The trainer cannot send the version, or what it would send is not of this model. The engine is untouched.

    Args:
        message: why.
        gone: the trainer has not (or no longer) this version; another one may come.
    """

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


class Groups(Protocol):
    """The groups of a session that an engine is in."""

    session: str

    def abort(self) -> None:
        """Leave them."""
        ...


class Fetch(Protocol):
    """One transfer."""

    def run(self) -> tuple[Path, Groups | None]:
        """Receive it, in a thread of the caller's; returns the folder, and the groups where they can be used again."""
        ...

    def abort(self) -> None:
        """Give it up."""
        ...


MakeFetch = Callable[[str, str, TransferOffer, Groups | None, Staging], Fetch]
"""Makes a transfer of the engine's name, the trainer's host, what it offers, the groups that the engine is in, and where it is put."""


class Receiver:
    """Receives versions from one trainer at a time.

    A version is whole in shared memory, and compared with the trainer's checksums, before anything of the engine is touched. So whatever
    fails on the way leaves the engine with the version that it serves.

    Args:
        api_key: the run's.
        expected: the served model's tensors; None: unknown.
        make_fetch: `incoming.Fetching`, which needs torch.
        staging: where versions are put together; default: the machine's shared memory.
        keeps: whether a version stays in shared memory, so that what differs from it is enough for the next one.
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
        """A folder with the version as a trainer has it in memory; stays until `drop`, or the next one.

        Raises:
            RefusedError: it does not come whole; the engine is untouched.
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
        self._alone, self._incoming = True, None  # until it has come
        problem = problem_of_tensors(offer.tensors, self._expected)
        if problem is not None:
            if incoming is not None:
                incoming.abort()
            raise RefusedError(problem)
        host = urlsplit(trainer_url).hostname or ""
        work = self._make_fetch(self._name, host, offer, incoming, self._staging)
        try:
            folder, self._incoming = await asyncio.to_thread(work.run)
        except asyncio.CancelledError:
            work.abort()
            raise
        except Exception as error:
            work.abort()
            raise RefusedError(
                f"version {version} did not come whole from the trainer at {trainer_url}: {error}"
            ) from None
        self._alone = False
        return folder

    def drop(self) -> None:
        """The engine has loaded the fetched version: give its memory back, unless the next one may be made from it."""
        if not self._keeps:
            self._staging.drop_all()

    def close(self) -> None:
        """Leave the groups and the shared memory."""
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
                        f"the trainer at {trainer_url} refused with {answer.status}: {text[:300]}",
                        gone=answer.status == HTTPStatus.NOT_FOUND,
                    )
                return TransferOffer.model_validate_json(text)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RefusedError(f"the trainer at {trainer_url} does not answer: {error or 'in time'}") from None
        except ValidationError:
            raise RefusedError(f"{trainer_url} is not a trainer's channel") from None
