"""An engine that answers at once, in a process of its own: for benchmarks of what asks it. `python -m benchmarks.instant_engine`.

It prints its port. Chat completions (streamed too) say `dcba`; `/inference/v1/generate` gives as many continuations of the same four
letters as are asked for, of the version that was handed over last. Its CPU is nobody's: whoever measures counts the processes that ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

from aiohttp import web

from rlrun.protocol import endpoints

TEXT = "dcba"
TOKENS = [81, 80, 79, 78, 2]
"""As the tiny model's tokenizer writes a reply of four letters."""


class InstantEngine:
    """The routes that our client and verifiers' ask."""

    def __init__(self) -> None:
        self.version: int | None = None

    def app(self) -> web.Application:
        """All of them."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post(endpoints.ENGINE_GENERATE, self._generate)
        app.router.add_post(endpoints.ENGINE_UPDATE_WEIGHTS, self._update)
        app.router.add_get(endpoints.ENGINE_STATUS, self._status)
        return app

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        message = {"role": "assistant", "content": TEXT}
        usage = {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response(answer | {"choices": [choice], "usage": usage})
        answer["object"] = "chat.completion.chunk"
        chunks = [
            answer | {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
            answer | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            answer | {"choices": [], "usage": usage},
        ]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        content = [{"token_id": token, "logprob": -0.5} for token in TOKENS]
        spans = [{"version": str(self.version), "start": 0, "end": len(TOKENS)}]
        choices = [
            {
                "index": index,
                "token_ids": TOKENS,
                "logprobs": {"content": content},
                "weight_versions": spans,
                "finish_reason": "stop",
            }
            for index in range(body["sampling_params"]["n"])
        ]
        return web.json_response({"choices": choices})

    async def _update(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["version"]
        return web.json_response({"version": self.version, "changed": True, "seconds": {}, "model": None})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version, "engine_alive": True, "updating": False})


async def serve() -> None:
    """Until killed."""
    runner = web.AppRunner(InstantEngine().app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def instant_engine() -> Iterator[str]:
    """Its URL; it lives as long as the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.instant_engine"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(serve())
