"""A real vLLM engine on the CPU with a tiny random model, whose answers have lengths chosen by a benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.long_tail import Pace, fit, lengths, steps_when_full
from rlrun.config.models.language_models import TinyModelConfig
from rlrun.inference.client.completions import EngineMetrics
from rlrun.inference.client.engine_client import Completion, EngineClient, EngineError
from rlrun.local.preflight import free_port
from rlrun.protocol.messages.endpoints import ENGINE_METRICS
from rlrun.trainer.modeling.tiny_model import make_tiny_model

API_KEY = "benchmark-key"
START_SECONDS = 240.0
LOOK_SECONDS = 0.25
ALONE_TOKENS = 192
Lengths = Callable[[Sequence[int], int], list[int]]
"""Function from a prompt to the tokens of each of its continuations."""


def long_tailed(mean: int) -> Lengths:
    """Return lognormal lengths with this mean, fixed for each prompt."""
    return lambda prompt, n: [max(1, round(length)) for length in lengths(prompt, n, mean)]


class LengthyClient(EngineClient):
    """Client that requests each continuation with a separate length and answers when the longest is complete, as one
    request does.

    Published folders are filled with the engine's own weights, because a trainer that only keeps time publishes empty
    ones.
    """

    def __init__(self, url: str, model: Path, wanted: Lengths) -> None:
        super().__init__(url, API_KEY, generate_timeout=600, update_timeout=START_SECONDS)
        self._model, self._wanted = model, wanted
        self.spent: dict[tuple[int, ...], list[int]] = {}
        """Tokens of each continuation of a prompt."""

    async def generate(self, token_ids: Sequence[int], *, n: int, **options: Any) -> list[Completion]:
        wanted = self._wanted(token_ids, n)
        parameters = {**(options.get("parameters") or {}), "ignore_eos": True}
        fixed = options | {"parameters": parameters, "stop_token_ids": []}
        one = super().generate
        answers = [one(token_ids, n=1, **(fixed | {"max_tokens": length})) for length in wanted]
        completions = [completion for answer in await asyncio.gather(*answers) for completion in answer]
        self.spent[tuple(token_ids)] = wanted
        return completions

    async def metrics_text(self) -> str:
        """Return all of the engine's metrics in their text form."""
        return (await self._send_request("GET", ENGINE_METRICS, 30.0))[1].decode()

    def _fill(self, folder: Path) -> None:
        if (folder / "COMPLETE").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        for file in self._model.glob("*.safetensors"):
            os.link(file, folder / file.name)
        (folder / "COMPLETE").touch()

    async def update_weights(self, path: str, version: int, *, force: bool = False) -> dict[str, float]:
        self._fill(Path(path))
        return await super().update_weights(path, version, force=force)


@dataclass(frozen=True)
class RealEngine:
    """A running server."""

    url: str
    model: Path
    root: Path
    """Folder that contains all folders of weights."""
    pid: int

    def client(self, wanted: Lengths) -> LengthyClient:
        """Return a separate client for each run, because a run closes it."""
        return LengthyClient(self.url, self.model, wanted)


@contextlib.contextmanager
def real_engine(root: Path, **settings: Any) -> Iterator[RealEngine]:
    """Provide a server for the duration of the block.

    Args:
        root: an empty folder for the model and for weights of hand-overs.
        settings: fields of `InferenceSettings`, in addition to those shared by all benchmarks.
    """
    model, port = root / "model", free_port()
    make_tiny_model(model, TinyModelConfig(max_length=2048))
    document = {
        "model_path": str(model),
        "served_model_name": "tiny",
        "weights_dir": str(root),
        "api_key": API_KEY,
        "port": port,
        "dtype": "float32",
        "enforce_eager": True,
    }
    (root / "settings.json").write_text(json.dumps(document | settings))
    with (root / "server.log").open("wb") as log:
        command = [sys.executable, "-m", "rlrun.inference", "--settings", str(root / "settings.json")]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        engine = RealEngine(f"http://127.0.0.1:{port}", model, root, process.pid)
        asyncio.run(_until_it_answers(engine, process))
        yield engine
    finally:
        process.terminate()
        process.wait(60)


async def _until_it_answers(engine: RealEngine, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with engine.client(long_tailed(1)) as client:
        while True:
            try:
                await client.update_weights(str(engine.root / "weights" / "first"), 0, force=True)
                return
            except EngineError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    log = (engine.root / "server.log").read_text()
                    raise RuntimeError(f"the engine does not start: {error}\n{log[-6000:]}") from error
            await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Load:
    """Averages of the engine's own reports over a period."""

    running: float
    waiting: float
    preemptions: int


@contextlib.asynccontextmanager
async def watched(client: EngineClient) -> AsyncIterator[Callable[[], Load]]:
    """Poll the engine's metrics during the block."""
    looks: list[EngineMetrics] = []

    async def look() -> None:
        while True:
            looks.append(await client.metrics())
            await asyncio.sleep(LOOK_SECONDS)

    def load() -> Load:
        first, last = looks[0].preemptions or 0, looks[-1].preemptions or 0
        return Load(
            statistics.fmean(one.running for one in looks), statistics.fmean(one.waiting for one in looks), last - first
        )

    looking = asyncio.create_task(look())
    try:
        yield load
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


OPTIONS: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": [], "cache_salt": None}


async def measure_pace(
    engine: RealEngine, prompts: Sequence[Sequence[int]], n: int, wanted: Lengths, slots: int
) -> Pace:
    """Measure the pace with one single sequence, and with `n` continuations of each prompt requested at once.

    Args:
        engine: engine with `slots` places and without other work.
        prompts: token ids.
        n: continuations of each.
        wanted: their lengths.
        slots: most sequences that run at once.
    """
    async with engine.client(lambda _, n: [ALONE_TOKENS] * n) as client:
        began = time.monotonic()
        await client.generate(prompts[0], n=1, **OPTIONS)
        alone = time.monotonic() - began
    every = [length for prompt in prompts for length in wanted(prompt, n)]
    async with engine.client(wanted) as client:
        began = time.monotonic()
        await asyncio.gather(*[client.generate(prompt, n=n, **OPTIONS) for prompt in prompts])
        full = time.monotonic() - began
    return fit((ALONE_TOKENS, alone), (steps_when_full(every, slots), sum(every), full))
