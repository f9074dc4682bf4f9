"""One of two engines dies, hangs, is slow, answers errors or comes back with old weights: the run goes on, and on right tokens only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orch_doors import Door, open_doors, truth
from orch_simulation import API_KEY, FakeEngine, FakeTrainer, begin, eventually, in_process, make_config

from rlrun.orchestrator.engines import weight_sync
from rlrun.orchestrator.engines.discovery import MISSES, Pace
from rlrun.orchestrator.main import Outside, orchestrate_attempt
from rlrun.protocol.files.paths import RunPaths

STEPS = 100_000
"""The world ends the run, not this."""
OFF_POLICY = 1000
"""No group in flight is cancelled for its age: what hangs is given up because it hangs."""

World = Callable[[FakeTrainer, Door, Door], Awaitable[None]]


async def orchestrate(root: Path, tokenizer: Path, world: World, pace: Pace) -> tuple[FakeTrainer, dict[str, Any]]:
    """A run on two engines behind real servers, the second of which is `world`'s to break; it goes on until `world` has seen enough.

    With the trainer and the last line of the metrics.
    """
    algorithm = {"max_async_level": 2, "max_off_policy_steps": OFF_POLICY}
    config = make_config(root, tokenizer, max_steps=STEPS, algorithm=algorithm)
    paths = RunPaths(root)
    trainer = FakeTrainer(paths, begin(paths, 1), STEPS, STEPS, lambda: 0.02)
    engines = [FakeEngine(lambda: 0.002), FakeEngine(lambda: 0.002)]
    async with open_doors(*engines) as doors, trainer, asyncio.timeout(150):
        urls = [door.url for door in doors]
        resolved = config.model_copy(update={"trainer_url": trainer.url, "inference_urls": urls})
        here = Outside(pace=pace, open_environments=in_process)
        work = asyncio.create_task(orchestrate_attempt(resolved, attempt=1, api_key=API_KEY, outside=here))
        outside = asyncio.ensure_future(world(trainer, *doors))
        try:
            await asyncio.wait([work, outside], return_when=asyncio.FIRST_COMPLETED)
            assert not work.done(), work.exception()
            await outside
        finally:
            outside.cancel()
            work.cancel()
            await asyncio.gather(work, outside, return_exceptions=True)
    return trainer, json.loads(paths.metrics.read_text().splitlines()[-1])


def assert_right_tokens(trainer: FakeTrainer) -> None:
    """Every token was sampled by the version that it is labelled with, and that version is one that the step may train on."""
    assert [batch.step for batch in trainer.batches] == list(range(1, len(trainer.batches) + 1))
    for batch in trainer.batches:
        for sample in batch.samples:
            versions = sample.versions[sample.loss_mask]
            np.testing.assert_allclose(sample.logprobs[sample.loss_mask], [truth(int(v)) for v in versions], rtol=1e-5)
            assert versions.min() >= sample.dispatch_version >= batch.step - 1 - OFF_POLICY
            assert versions.max() <= batch.step - 1


async def working(trainer: FakeTrainer, door: Door) -> None:
    """Until the engine is in the middle of the run, with requests in flight."""
    await eventually(lambda: len(trainer.batches) >= 3 and door.engine.running > 0)


async def goes_on(trainer: FakeTrainer, steps: int = 4) -> None:
    """Until that many more steps are trained."""
    seen = len(trainer.batches)
    await eventually(lambda: len(trainer.batches) >= seen + steps)


async def serves_again(good: Door, bad: Door, *, held: int, known: int) -> None:
    """Until it is asked again, which must not be before it has got the weights of the others.

    `held` is how many versions it had got before, `known` what the other engine held for certain when this one came back.
    """
    seen = len(bad.engine.requests)
    await eventually(lambda: len(bad.engine.requests) > seen)
    _, salt, version, _ = bad.engine.requests[seen]
    assert len(bad.engine.held) > held
    assert version is not None
    assert version >= max(known, int(salt or -1))


def certain(door: Door) -> int:
    """A version that the orchestrator knows this engine to hold: one is handed over only after the answer to the one before."""
    return door.engine.held[-2]


async def killed(trainer: FakeTrainer, good: Door, bad: Door) -> None:
    await working(trainer, bad)
    await bad.close()
    await goes_on(trainer)
    held, bad.engine.version = len(bad.engine.held), None  # a new process
    await bad.open()
    await serves_again(good, bad, held=held, known=certain(good))
    await goes_on(trainer)


async def hung(trainer: FakeTrainer, good: Door, bad: Door) -> None:
    await working(trainer, bad)
    bad.mode = "hangs"
    await eventually(lambda: bad.ignored > MISSES)  # one more than take it out of rotation
    await goes_on(trainer)
    held, bad.mode = len(bad.engine.held), "up"
    await serves_again(good, bad, held=held, known=certain(good))
    await goes_on(trainer)


async def answers_500(trainer: FakeTrainer, good: Door, bad: Door) -> None:
    await working(trainer, bad)
    # It may be handed weights again at any time, also before the first request that it answers rightly.
    held, bad.mode = len(bad.engine.held), "answers_500"
    asked = bad.asked
    await goes_on(trainer)
    # Quick errors must not draw the work: after two in a row it gets one request at a time, ever more seldom.
    assert bad.asked - asked <= 64 + 12
    bad.mode = "up"
    await serves_again(good, bad, held=held, known=certain(good))
    await goes_on(trainer)


async def answers_nonsense(trainer: FakeTrainer, good: Door, bad: Door) -> None:
    await working(trainer, bad)
    # It may be handed weights again at any time, also before the first request that it answers rightly.
    held, bad.mode = len(bad.engine.held), "answers_nonsense"
    await goes_on(trainer)
    bad.mode = "up"
    await serves_again(good, bad, held=held, known=certain(good))
    await goes_on(trainer)


async def restarted_with_old_weights(trainer: FakeTrainer, good: Door, bad: Door) -> None:
    await working(trainer, bad)
    held, bad.engine.version = len(bad.engine.held), 0  # nobody has told the orchestrator
    await eventually(lambda: len(bad.engine.held) > held)
    await goes_on(trainer)


async def ten_times_slower(trainer: FakeTrainer, good: Door, bad: Door) -> None:
    """No failure: it keeps its requests, gets every version, and is asked less than the other one."""
    await working(trainer, bad)
    held, usual = len(bad.engine.held), bad.engine.seconds_per_token
    bad.engine.seconds_per_token = lambda: 10 * usual()
    await goes_on(trainer, 8)
    await eventually(lambda: len(bad.engine.held) >= held + 2)
    bad.engine.seconds_per_token = usual
    await goes_on(trainer)


@pytest.mark.parametrize(
    "world", [killed, hung, answers_500, answers_nonsense, restarted_with_old_weights], ids=lambda world: world.__name__
)
async def test_the_run_goes_on_with_one_of_two_engines(
    tmp_path: Path, tokenizer_folder: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "KNOCK_SECONDS", 0.3)
    trainer, metrics = await orchestrate(tmp_path, tokenizer_folder, world, Pace(interval=0.05, answer=0.5))
    assert_right_tokens(trainer)
    if world is not restarted_with_old_weights:  # that may be noticed before a request is spoiled
        assert metrics["engines/moved_requests"] >= 1
        assert metrics["engines/lost_seconds_longest"] > 0


async def test_a_slow_engine_stays_in_rotation(tmp_path: Path, tokenizer_folder: Path) -> None:
    trainer, metrics = await orchestrate(tmp_path, tokenizer_folder, ten_times_slower, Pace(interval=0.05, answer=60))
    assert_right_tokens(trainer)
    assert metrics["engines/moved_requests"] == 0
    assert metrics["engines/in_rotation"] == 2
