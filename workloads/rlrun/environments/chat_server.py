"""Client for servers with OpenAI's chat API, such as hosted services, vLLM, SGLang and llama.cpp.

These servers return no token ids and log-probs, and their weights are not the run's weights. Their replies can be scored and stored as
messages, but they are never trained on as rollouts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from rlrun.environments.protocol import Reply

PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""HTTP statuses after which a retry of the same request can succeed."""
_BYTES_MAX = 64 * 1024**2
_CHARACTERS = 300
"""Longest part of a server's own message that an error quotes, in characters."""
_KEPT_KEY = "***"


class ServerError(Exception):
    """Failure of one request.

    Args:
        message: the URL and the failure, without the key.
        status: HTTP status of the answer, or None if there was no readable answer.
        passing: whether a retry can succeed.
        retry_after: seconds to wait before a retry, from the server's `Retry-After` header, or None.
        said: message of the server.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        passing: bool = False,
        retry_after: float | None = None,
        said: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.passing, self.retry_after, self.said = status, passing, retry_after, said


class ChatServer:
    """Client of one server.

    Args:
        base_url: address such as `https://api.openai.com/v1`.
        api_key: bearer token, or an empty text for none.
        headers: additional headers of every request.
        timeout_seconds: time limit of one request, including its connection.
    """

    def __init__(
        self, base_url: str, *, api_key: str = "", headers: Mapping[str, str] | None = None, timeout_seconds: float
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._key, self._timeout = api_key, timeout_seconds
        self._headers = ({"Authorization": f"Bearer {api_key}"} if api_key else {}) | dict(headers or {})
        self._secrets = [value for value in (api_key, *(headers or {}).values()) if len(value) >= 8]
        self._session: Any = None

    async def models(self) -> list[str] | None:
        """Return the names of the served models, or None if the server does not list them.

        Raises:
            ServerError: the server cannot be reached, or refuses the key.
        """
        try:
            document = await self._send_request("GET", "models", None)
            return [str(one["id"]) for one in document["data"]]
        except (KeyError, TypeError):
            return None
        except ServerError as error:
            if error.status in (400, 404, 405, 501):
                return None
            raise

    async def chat(self, body: Mapping[str, object]) -> Reply:
        """Send a request to `/chat/completions` and return the reply.

        Raises:
            ServerError: the server did not return a chat completion.
        """
        document = await self._send_request("POST", "chat/completions", body)
        try:
            return _read_reply(document)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            said = self._shorten_text(json.dumps(document))
            raise ServerError(
                f"{self._full_url('chat/completions')} did not return a chat completion: {said}"
            ) from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _full_url(self, path: str) -> str:
        return f"{self.base_url}/{path}"

    async def _send_request(self, method: str, path: str, body: Mapping[str, object] | None) -> Any:
        import aiohttp

        if self._session is None:
            # `trust_env` makes aiohttp use the proxy variables of the environment: hosted servers are often reached through a proxy.
            unlimited = aiohttp.TCPConnector(limit=0)
            never = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(trust_env=True, connector=unlimited, timeout=never)
        url = self._full_url(path)
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._session.request(method, url, json=body, headers=self._headers, allow_redirects=False) as response,
            ):
                data = bytearray()
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > _BYTES_MAX:
                        raise ServerError(f"{url} returned more than {_BYTES_MAX // 1024**2} MiB")
        except TimeoutError:
            raise ServerError(f"{url} did not answer within {self._timeout:g} s", passing=True) from None
        except aiohttp.InvalidURL:
            raise ServerError(f"{url} is not a URL") from None
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
            raise ServerError(
                f"{url} stopped in the middle of its answer ({type(error).__name__})", passing=True
            ) from None
        except aiohttp.ClientSSLError as error:
            raise ServerError(f"the certificate of {url} is not trusted: {self._shorten_text(str(error))}") from None
        except (aiohttp.ClientError, OSError) as error:
            why = str(error).replace(" ssl:default", "")
            raise ServerError(f"{url} cannot be reached: {self._shorten_text(why)}", passing=True) from None
        except ValueError as error:  # an invalid header
            raise ServerError(f"cannot send a request to {url}: {self._shorten_text(str(error))}") from None
        if response.status != 200:
            raise self._status_error(url, response, bytes(data))
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            text = data.decode(errors="replace")
            if text.lstrip().startswith("{"):
                raise ServerError(
                    f"{url} stopped in the middle of its answer after {len(data)} bytes", passing=True
                ) from None
            raise ServerError(f"{url} did not return JSON: {self._shorten_text(text)}") from None

    def _status_error(self, url: str, response: Any, data: bytes) -> ServerError:
        said, status = self._shorten_text(_error_message(data)), response.status
        if status in (301, 302, 303, 307, 308):
            said = f"redirect to {response.headers.get('Location', 'nowhere')}"
        return ServerError(
            f"{url} returned status {status}{f': {said}' if said else ''}",
            status=status,
            passing=status in PASSING or status >= 500,
            retry_after=_retry_seconds(response.headers.get("Retry-After")),
            said=said,
        )

    def _shorten_text(self, text: str) -> str:
        """Return a server's text in one line. Some servers repeat the key in their errors, so it is replaced."""
        for secret in self._secrets:
            text = text.replace(secret, _KEPT_KEY)
        return " ".join(text.split())[:_CHARACTERS]


def chat_body(model: str, messages: Sequence[object], **fields: object) -> dict[str, object]:
    """Return the body of a chat request, without the fields that have no value."""
    given = {name: value for name, value in fields.items() if value is not None and value != [] and value != {}}
    return {"model": model, "messages": list(messages), **given}


def _read_reply(document: Any) -> Reply:
    choice = document["choices"][0]
    message, reason = choice["message"], choice.get("finish_reason") or "stop"
    usage = document.get("usage") or {}
    text, calls = message.get("content") or "", tuple(message.get("tool_calls") or ())
    if not isinstance(text, str) or not all(isinstance(call, dict) for call in calls):
        raise TypeError
    return Reply(
        text=text,
        finish_reason=str(reason),
        truncated=reason == "length",
        tool_calls=calls,
        content=text if calls else None,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
    )


def _error_message(data: bytes) -> str:
    """Return the message in an error's body, for the different forms that servers use."""
    text = data.decode(errors="replace")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text
    found: Any = document
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return found if isinstance(found, str) else json.dumps(found)


def _retry_seconds(text: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header, which contains a number or a date."""
    if not text:
        return None
    if text.strip().replace(".", "", 1).isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
