"""What a rollout costs beside the model: `python -m benchmarks.rollout_throughput [--verifiers] [--profile FILE]`.

The whole orchestrator (dispatcher, sessions, conversations, batches on disk) against a trainer that trains at once and an engine that
answers one request after the other once 2,000 rollouts are in flight, or after a second. Environments run in this process (`in process`),
or in one of their own as in a real run (`own process`). CPU is that of the orchestrator and its children, from the first request on. The
worst lag is how much later than asked the event loop woke a task that sleeps 5 ms again and again.

With `--verifiers` the same task as a taskset of verifiers 0.4: through our adapter, and by verifiers' own runner, whose agent is a program
that asks the model over HTTP (an endpoint in this process that answers at once).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import json
import pstats
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "unit" / "orchestrator" / "simulation"), str(ROOT / "benchmarks" / "tasksets")]

from orch_simulation import FakeEngine, in_process, make_config, simulate  # noqa: E402

from rlrun.inference.client import Completion  # noqa: E402
from rlrun.orchestrator.arenas import open_arenas  # noqa: E402
from rlrun.trainer.tiny_model import make_tokenizer  # noqa: E402

CONCURRENT = 2000
GROUP = 8
TASKSET_CONCURRENT = 160
PATIENCE_SECONDS = 1.0
PROFILE_LINES = 25
TASKSET = "vf_reverse"


class Lag:
    """The worst lag of the event loop inside of the block, in milliseconds."""

    def __init__(self) -> None:
        self.worst = 0.0

    async def __aenter__(self) -> Lag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            self.worst = max(self.worst, 1000 * (time.monotonic() - began - 0.005))


def cpu() -> float:
    """Seconds of CPU of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@dataclass
class InstantEngine(FakeEngine):
    """Always answers the same four letters, and all at once: when as many are in flight as may be, or none has come for a while."""

    places: int = CONCURRENT
    lag: Lag = field(default_factory=lambda: Lag())
    most: int = 0
    """Most continuations that were asked for at once."""
    began: float = 0.0
    """CPU at the first request."""
    _waiting: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)
    _answering: asyncio.Task[None] | None = None

    async def generate(self, token_ids: Sequence[int], *, n: int, **_: Any) -> list[Completion]:  # type: ignore[override]
        if not self.most:
            self.began, self.lag.worst = cpu(), 0.0
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((n, answer))
        now = sum(count for count, _ in self._waiting)
        self.most = max(self.most, now)
        if now >= self.places:
            self._answer_all()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await answer
        except TimeoutError:
            self._waiting = [one for one in self._waiting if one[1] is not answer]
        tokens = [*self.letters[:4], self.eos]
        version = self.version or 0
        return [Completion(tokens, [-0.5] * 5, [version] * 5, "stop") for _ in range(n)]

    def _answer_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._answering = asyncio.create_task(self._answer(waiting))

    async def _answer(self, waiting: Sequence[tuple[int, asyncio.Future[None]]]) -> None:
        """One after the other, as answers come from sockets."""
        for _, answer in waiting:
            if not answer.done():
                answer.set_result(None)
            await asyncio.sleep(0)


@dataclass(frozen=True)
class Cost:
    """What a number of rollouts took."""

    what: str
    rollouts: int
    seconds: float
    cpu_seconds: float
    lag_ms: float
    """Worst lag of the event loop."""
    concurrent: int
    """Most rollouts in flight."""

    @property
    def per_second(self) -> float:
        return self.rollouts / self.seconds

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_seconds / self.rollouts


async def ours(
    what: str,
    environment: str,
    steps: int,
    *,
    own_process: bool,
    profile: cProfile.Profile | None = None,
    concurrent: int = CONCURRENT,
) -> Cost:
    """A simulated run of `steps` batches of so many rollouts."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        make_tokenizer().save_pretrained(tokenizer)
        config = make_config(
            Path(folder) / "run",
            tokenizer,
            max_steps=steps,
            seq_len=256,
            batch_size=concurrent,
            max_concurrency=concurrent,
            environments=[{"id": environment, "group_size": GROUP}],
            algorithm={"max_async_level": 1, "max_off_policy_steps": 8},
            checkpoint={"interval": steps},
        )
        engine = InstantEngine(places=concurrent)
        if profile is not None:
            profile.enable()
        async with engine.lag as lag:
            outcome = await simulate(
                config, engines=[engine], open_environments=open_arenas if own_process else in_process
            )
        if profile is not None:
            profile.disable()
        assert outcome.code == 0
        seconds = outcome.trainer.published[steps] - outcome.trainer.published[0]
        return Cost(what, steps * concurrent, seconds, cpu() - engine.began, lag.worst, engine.most)


async def theirs(rollouts: int, concurrent: int) -> Cost:
    """verifiers' own runner on the same task: its agent program asks an endpoint that answers at once."""
    import verifiers.v1 as vf
    from aiohttp import web
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import env_config_type, load_environment

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        message = {"role": "assistant", "content": "dcba"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            return web.json_response(answer | {"choices": [choice], "usage": usage})
        answer["object"] = "chat.completion.chunk"
        chunks = [
            answer | {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
            answer | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            answer | {"choices": [], "usage": usage},
        ]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    config = env_config_type(TASKSET, "").model_validate(
        {"taskset": {"id": TASKSET}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
    )
    env: vf.Env[Any] = load_environment(config)
    client = EvalClientConfig(base_url=f"http://{host}:{port}/v1", api_key_var="PATH")
    context, gate = ModelContext("policy", client), asyncio.Semaphore(concurrent)
    tasks = [task for task, _ in zip(env.taskset, range(rollouts // GROUP), strict=False)]
    slots = [slot for task in tasks for slot in env.slots(task, GROUP)]
    try:
        async with env.serving():
            await env.run_slot(env.slots(tasks[0])[0], context, gate)  # it prepares what all need
            began, used = time.monotonic(), cpu()
            async with Lag() as lag:
                episodes = await asyncio.gather(*[env.run_slot(slot, context, gate) for slot in slots])
            seconds = time.monotonic() - began
        bad = [
            error for episode in episodes for error in [*episode.errors, *[e for t in episode.traces for e in t.errors]]
        ]
        assert not bad, bad[0]
        return Cost(
            f"verifiers' runner, {concurrent} at once", len(slots), seconds, cpu() - used, lag.worst, concurrent
        )
    finally:
        await runner.cleanup()


def table(costs: Sequence[Cost]) -> str:
    """As Markdown."""
    lines = [
        "| what | rollouts | in flight | rollouts/s | CPU per rollout, ms | worst lag, ms |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {c.what} | {c.rollouts} | {c.concurrent} | {c.per_second:.0f} | {c.cpu_ms:.2f} | {c.lag_ms:.0f} |"
        for c in costs
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="rollout_throughput", description=__doc__)
    parser.add_argument("--steps", type=int, default=4, help="batches of 2,000 rollouts")
    parser.add_argument(
        "--verifiers", action="store_true", help="also a taskset, by our adapter and by verifiers' runner"
    )
    parser.add_argument("--verifiers-rollouts", type=int, default=64, help="that verifiers' runner plays")
    parser.add_argument("--profile", type=Path, help="write the 25 most expensive functions of the run in process here")
    options = parser.parse_args(argv)
    logger.remove()
    costs = [
        asyncio.run(ours("our protocol, in process", "reverse-text", options.steps, own_process=False)),
        asyncio.run(ours("our protocol, own process", "reverse-text", options.steps, own_process=True)),
    ]
    if options.profile is not None:
        profile = cProfile.Profile()
        asyncio.run(ours("", "reverse-text", options.steps, own_process=False, profile=profile))
        text = io.StringIO()
        pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(PROFILE_LINES)
        options.profile.write_text(text.getvalue())
    if options.verifiers:
        name = f"verifiers:{TASKSET}"
        costs += [
            asyncio.run(
                ours("taskset by our adapter, in process", name, 2, own_process=False, concurrent=TASKSET_CONCURRENT)
            ),
            asyncio.run(theirs(options.verifiers_rollouts, 8)),
        ]
    print(table(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
