"""Engine of the complete run that its script starts: hand-overs, equal weights, tokens/s, and transfers over gloo."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.gpu.run_events import Events
from benchmarks.gpu.run_local import API_KEY, STOP_SECONDS, run_environment, stop_process
from rlrun.inference.client.completions import EngineError
from rlrun.inference.client.engine_client import Completion, EngineClient
from rlrun.local.preflight import free_port
from rlrun.protocol.files.paths import COMPLETE
from rlrun.protocol.messages.buckets import BUCKET_BYTES, TensorInfo, plan_buckets
from rlrun.protocol.messages.trainer_channel import Backend

START_SECONDS = 240.0
REQUEST_SECONDS = 240.0


@dataclass(frozen=True)
class Engine:
    """A running engine."""

    url: str
    weights: Path
    """Folder from which it loads versions."""
    device: str

    def connect(self) -> EngineClient:
        """Return a client; each event loop needs its own."""
        return EngineClient(self.url, API_KEY, generate_timeout=REQUEST_SECONDS, update_timeout=REQUEST_SECONDS)


@contextmanager
def running_engine(folder: Path, settings: Mapping[str, Any], seconds: float = START_SECONDS) -> Iterator[Engine]:
    """Run an engine during the block.

    Args:
        folder: folder of its settings and its log.
        settings: fields of `InferenceSettings`, without address and key.
        seconds: longest start.

    Raises:
        RuntimeError: the engine ended or did not answer in time; the message contains the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    (folder / "settings.json").write_text(json.dumps({**settings, "api_key": API_KEY, "port": port}))
    command = [sys.executable, "-m", "rlrun.inference", "--settings", str(folder / "settings.json")]
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=run_environment())
    engine = Engine(f"http://127.0.0.1:{port}", Path(settings["weights_dir"]), settings["device"])
    try:
        if not asyncio.run(_wait_for_engine(engine, process, seconds)):
            state = "did not answer in time" if process.returncode is None else f"ended with {process.returncode}"
            raise RuntimeError(f"the engine {state}: {(folder / 'engine.log').read_text(errors='replace')[-2000:]}")
        yield engine
    finally:
        stop_process(process, signal.SIGTERM, STOP_SECONDS)


async def _wait_for_engine(engine: Engine, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether the engine answers within `seconds`."""
    deadline = time.monotonic() + seconds
    async with engine.connect() as client:
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(EngineError):
                await client.status()
                return True
            await asyncio.sleep(0.5)
    return False


async def sample(client: EngineClient, prompt: Sequence[int], tokens: int, *, greedy: bool) -> Completion:
    """Return one continuation of exactly `tokens` tokens."""
    (answer,) = await client.generate(
        prompt,
        n=1,
        max_tokens=tokens,
        temperature=0.0 if greedy else 1.0,
        top_p=1.0,
        stop_token_ids=[],
        cache_salt=None,
        parameters={"ignore_eos": True},
    )
    return answer


def copy_version(source: Path, engine: Engine, name: str) -> str:
    """Copy a complete version into the engine's weights folder, and return its name."""
    shutil.copytree(source, engine.weights / name)
    return name


class WrongVersions:
    """Replacement of the engine's weights by wrong ones, under the number of the version that it serves.

    Args:
        engine: engine of a run.
        model: folder of the wrong weights.
        steps: first step and end of the steps in which each new version is replaced.
    """

    def __init__(self, engine: Engine, model: Path, steps: tuple[int, int]) -> None:
        self._engine, self._model, self._steps = engine, model, steps
        self.replaced: list[int] = []
        """Replaced versions."""

    def watch_step(self, step: int) -> None:
        """Replace the served version, unless it is replaced already or the step is outside of the span."""
        if self._steps[0] <= step < self._steps[1]:
            asyncio.run(self._replace_version())

    async def _replace_version(self) -> None:
        folder = self._engine.weights / "wrong"
        if not folder.exists():
            copy_version(self._model, self._engine, folder.name)
            (folder / COMPLETE).touch()
        async with self._engine.connect() as client:
            version = (await client.status())["weight_version"]
            if isinstance(version, int) and version not in self.replaced:
                await client.update_weights(folder.name, version, force=True)
                self.replaced.append(version)


async def measure_handovers(engine: Engine, folders: Sequence[str], count: int, first: int) -> list[dict[str, float]]:
    """Load folders by turns as versions `first`, `first + 1`, and so on. Returns the seconds of each phase."""
    async with engine.connect() as client:
        return [
            await client.update_weights(folders[number % len(folders)], first + number, force=True)
            for number in range(count)
        ]


def put_handovers(events: Events, section: str, seconds: Sequence[Mapping[str, float]]) -> float:
    """Add a row for each phase, and return the longest total in seconds."""
    for phase in ("pause", "reload", "resume", "total"):
        values = [one[phase] for one in seconds]
        events.put_row(
            section, phase, {"mean s": statistics.mean(values), "max s": max(values), "hand-overs": len(values)}
        )
    return max(one["total"] for one in seconds)


async def sample_greedy(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> list[Completion]:
    """Return a greedy continuation of `tokens` tokens for each prompt."""
    async with engine.connect() as client:
        return list(await asyncio.gather(*(sample(client, prompt, tokens, greedy=True) for prompt in prompts)))


@dataclass(frozen=True)
class LogprobErrors:
    """Differences to the log-probs of transformers in float32, in nats."""

    largest: float
    mean: float
    rounding: float
    """Largest difference of transformers in the run's own dtype: what rounding alone gives."""


def compare_logprobs(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Completion],
    device: torch.device,
    dtype: torch.dtype,
) -> LogprobErrors:
    """Compare log-probs of the engine with those of transformers, for the engine's tokens.

    Args:
        folder: version that the engine serves.
        prompts: prompts as token ids.
        answers: continuations by the engine.
        device: device of transformers.
        dtype: dtype of the engine.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    pairs = list(zip(prompts, answers, strict=True))
    exact = torch.cat([continuation_logprobs(model, prompt, answer.token_ids) for prompt, answer in pairs])
    model.to(dtype)
    rounded = torch.cat([continuation_logprobs(model, prompt, answer.token_ids) for prompt, answer in pairs])
    errors = (exact - torch.tensor([value for answer in answers for value in answer.logprobs])).abs()
    return LogprobErrors(float(errors.max()), float(errors.mean()), float((exact - rounded).abs().max()))


def continuation_logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-probs of `tokens` after `prompt` by transformers, `[len(tokens)]` float32."""
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *tokens]], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).cpu().gather(1, torch.tensor(list(tokens))[:, None])[:, 0]


async def tokens_per_second(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Return the generated tokens per second of all prompts at once."""
    async with engine.connect() as client:
        await sample(client, prompts[0], 2, greedy=False)
        began = time.monotonic()
        answers = await asyncio.gather(*(sample(client, prompt, tokens, greedy=False) for prompt in prompts))
    return sum(len(answer.token_ids) for answer in answers) / (time.monotonic() - began)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a version."""
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


async def receive_over_gloo(engine: Engine, folder: Path, version: int, device: torch.device) -> dict[str, float]:
    """Send a version from this process to the engine over gloo, as a trainer's root on `device` does.

    Returns:
        Seconds of each phase of the hand-over.
    """
    from rlrun.trainer.channel.run_channel import Channel
    from rlrun.trainer.weights.weight_transfer import Outbox

    tensors = read_tensors(folder)
    infos = [
        TensorInfo(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
        for name, tensor in tensors.items()
    ]
    buckets = {
        bucket.index: torch.cat([tensors[slot.tensor.name].reshape(-1).view(torch.uint8) for slot in bucket.slots])
        for bucket in plan_buckets(infos, bucket_bytes=BUCKET_BYTES)
    }
    outbox = Outbox(device, "127.0.0.1", backend="gloo")
    channel = Channel.start_server(attempt=1, api_key=API_KEY, host="127.0.0.1", port=0, batch_path=lambda step: Path())
    channel.offer = outbox.offer
    try:
        outbox.hold(version, infos, buckets)
        async with engine.connect() as client:
            return await client.receive_weights(f"http://127.0.0.1:{channel.port}", version, force=True)
    finally:
        channel.close()
        outbox.close()


def check_links(backend: Backend, device: torch.device, size: int) -> dict[str, float]:
    """Join a group of one member twice, broadcast and meet in it. Returns the seconds of each call.

    Args:
        backend: "nccl" or "gloo".
        device: the GPU for NCCL.
        size: bytes of the broadcast.
    """
    from rlrun.transport import links

    seconds: dict[str, float] = {}
    store, buffer = links.serve_store("127.0.0.1"), torch.arange(size, dtype=torch.int64).to(torch.uint8)
    expected = buffer.clone()
    for attempt in ("first", "second"):
        marks = [time.monotonic()]
        link = links.join_group(backend, store, attempt, rank=0, members=[], device=device)
        marks.append(time.monotonic())
        link.broadcast(buffer)
        marks.append(time.monotonic())
        link.meet()
        marks.append(time.monotonic())
        link.close()
        marks.append(time.monotonic())
        names = (f"{attempt} {name}" for name in ("init", "broadcast", "meet", "close"))
        seconds |= {name: end - start for name, start, end in zip(names, marks, marks[1:], strict=False)}
    if not torch.equal(buffer, expected):
        raise RuntimeError("the root's buffer changed during its broadcast")
    return seconds
