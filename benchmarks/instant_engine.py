"""An engine that answers at once, in a separate process, for benchmarks of its clients: `python -m
benchmarks.instant_engine`.

It prints its ports. Chat completions (streamed too) contain `dcba`, with log-probs on request. The routes for tokens
return the requested number of continuations with the same tokens, labelled with the version of the last hand-over. Its
CPU time does not count: benchmarks measure only the client processes.

With `--gather N --every SECONDS` it waits until N continuations are requested, and from then on answers one request per
interval, the oldest first. The number in flight stays N as long as the client continues.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from aiohttp import web

from rlrun.protocol.messages import endpoints
from rlrun.protocol.messages.packed_columns import FLOATS, INTEGERS, MEDIA_TYPE, Reader, pack_document

TEXT = "dcba"
TOKENS = [81, 80, 79, 78, 2]
"""Token ids of a reply of four letters by the tiny model's tokenizer."""


class InstantEngine:
    """Routes for our client and for verifiers' client."""

    def __init__(self, *, tokens: int = len(TOKENS), gather: int = 0, every: float = 0.0, packs: bool = True) -> None:
        self.version: int | None = None
        self.tokens = [TOKENS[i % 4] for i in range(tokens - 1)] + TOKENS[-1:]
        self._gather, self._every, self._packs = gather, every, packs
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._pacing: asyncio.Task[None] | None = None
        self.most = 0
        """Largest number of continuations requested at the same time."""
        self._columns = array(INTEGERS, self.tokens), array(FLOATS, [-0.5]) * tokens

    def app(self) -> web.Application:
        """Return the app with all routes."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post(endpoints.ENGINE_GENERATE, self._generate)
        if self._packs:
            app.router.add_post(endpoints.ENGINE_GENERATE_PACKED, self._generate_packed)
        app.router.add_post(endpoints.ENGINE_UPDATE_WEIGHTS, self._update)
        app.router.add_get(endpoints.ENGINE_STATUS, self._status)
        return app

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        message = {"role": "assistant", "content": TEXT}
        usage = {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        said = [{"token": token, "logprob": -0.5, "bytes": [*token.encode()], "top_logprobs": []} for token in TEXT]
        logprobs = {"logprobs": {"content": said}} if body.get("logprobs") else {}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"} | logprobs
            return web.json_response(answer | {"choices": [choice], "usage": usage})
        answer["object"] = "chat.completion.chunk"
        chunks = [
            answer | {"choices": [{"index": 0, "delta": message, "finish_reason": None} | logprobs]},
            answer | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            answer | {"choices": [], "usage": usage},
        ]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        n = body["sampling_params"]["n"]
        await self._turn(n)
        content = [{"token_id": token, "logprob": -0.5} for token in self.tokens]
        choice = self._choice() | {"token_ids": self.tokens, "logprobs": {"content": content}}
        return web.json_response({"choices": [choice | {"index": index} for index in range(n)]})

    async def _generate_packed(self, request: web.Request) -> web.Response:
        n = Reader(await request.read()).head["sampling_params"]["n"]
        await self._turn(n)
        choice = self._choice() | {"tokens": len(self.tokens)}
        return web.Response(
            body=pack_document({"model": "policy", "choices": [choice] * n}, self._columns * n), content_type=MEDIA_TYPE
        )

    def _choice(self) -> dict[str, object]:
        spans = [{"version": str(self.version), "start": 0, "end": len(self.tokens)}]
        return {"weight_versions": spans, "finish_reason": "stop"}

    async def _turn(self, n: int) -> None:
        """Wait until this request is answered."""
        if not self._gather:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((n, turn))
        self.most = max(self.most, sum(count for count, _ in self._waiting))
        if self.most >= self._gather and self._pacing is None:
            self._pacing = asyncio.create_task(self._pace())
        await turn

    async def _pace(self) -> None:
        while True:
            while self._waiting:
                _, turn = self._waiting.popleft()
                if not turn.done():  # otherwise the client has disconnected
                    turn.set_result(None)
                    break
            await asyncio.sleep(self._every)

    async def _update(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["version"]
        return web.json_response({"version": self.version, "changed": True, "seconds": {}, "model": None})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version, "engine_alive": True, "updating": False})


async def serve(engine: InstantEngine, ports: int) -> None:
    """Serve until killed; all ports belong to the same engine."""
    runner = web.AppRunner(engine.app(), access_log=None)
    await runner.setup()
    for _ in range(ports):
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(*[address[1] for address in runner.addresses], flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def instant_engines(ports: int, *options: str) -> Iterator[list[str]]:
    """Yield the URLs of one engine that listens on several ports, for the duration of the block."""
    command = [sys.executable, "-m", "benchmarks.instant_engine", "--ports", str(ports), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield [f"http://127.0.0.1:{port}" for port in process.stdout.readline().split()]
        finally:
            process.kill()


@contextlib.contextmanager
def instant_engine() -> Iterator[str]:
    """Yield the URL of an engine that answers four letters at once."""
    with instant_engines(1) as urls:
        yield urls[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ports", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=len(TOKENS), help="of each answer")
    parser.add_argument("--gather", type=int, default=0, help="continuations in flight before the first answer")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two answers")
    parser.add_argument("--stock", action="store_true", help="serve without the packed route")
    options = parser.parse_args(argv)
    engine = InstantEngine(tokens=options.tokens, gather=options.gather, every=options.every, packs=not options.stock)
    asyncio.run(serve(engine, options.ports))


if __name__ == "__main__":
    main()
