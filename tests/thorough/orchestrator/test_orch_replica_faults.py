"""Failure of one of two engines (death, hang, slowness, errors, old weights): the run continues with correct tokens
only.
"""

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
"""Step limit that the run does not reach before its world ends it."""
OFF_POLICY = 1000
"""Age limit that cancels no group in flight, so that only the hang ends a request."""

World = Callable[[FakeTrainer, Door, Door], Awaitable[None]]


async def orchestrate(root: Path, tokenizer: Path, world: World, pace: Pace) -> tuple[FakeTrainer, dict[str, Any]]:
    """Run on two engines behind real servers, until `world`, which controls failures of the second one, has finished.

    Return the trainer and the last line of the metrics.
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
    """Check that every token was sampled by its labeled version, and that the step may train on that version."""
    assert [batch.step for batch in trainer.batches] == list(range(1, len(trainer.batches) + 1))
    for batch in trainer.batches:
        for sample in batch.samples:
            versions = sample.versions[sample.loss_mask]
            np.testing.assert_allclose(sample.logprobs[sample.loss_mask], [truth(int(v)) for v in versions], rtol=1e-5)
            assert versions.min() >= sample.dispatch_version >= batch.step - 1 - OFF_POLICY
            assert versions.max() <= batch.step - 1


async def working(trainer: FakeTrainer, door: Door) -> None:
    """Wait until the engine has requests in flight in the middle of the run."""
    await eventually(lambda: len(trainer.batches) >= 3 and door.engine.running > 0)


async def goes_on(trainer: FakeTrainer, steps: int = 4) -> None:
    """Wait until `steps` more steps are trained."""
    seen = len(trainer.batches)
    await eventually(lambda: len(trainer.batches) >= seen + steps)


async def serves_again(good: Door, bad: Door, *, held: int, known: int) -> None:
    """Wait for the next request to the engine, which must follow an update to the weights of the others.

    `held` is the number of versions before the failure, `known` a version that the other engine certainly held when
    this one returned.
    """
    seen = len(bad.engine.requests)
    await eventually(lambda: len(bad.engine.requests) > seen)
    _, salt, version, _ = bad.engine.requests[seen]
    assert len(bad.engine.held) > held
    assert version is not None
    assert version >= max(known, int(salt or -1))


def certain(door: Door) -> int:
    """Return a version that the orchestrator has confirmed: an update starts only after the answer to the previous
    one.
    """
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
    await eventually(lambda: bad.ignored > MISSES)  # one more than the limit of the rotation
    await goes_on(trainer)
    held, bad.mode = len(bad.engine.held), "up"
    await serves_again(good, bad, held=held, known=certain(good))
    await goes_on(trainer)


async def answers_500(trainer: FakeTrainer, good: Door, bad: Door) -> None:
    await working(trainer, bad)
    # A weight update may come at any time, even before the first request with a right answer.
    held, bad.mode = len(bad.engine.held), "answers_500"
    asked = bad.asked
    await goes_on(trainer)
    # Quick errors must not attract work: after two in a row the engine gets single requests with growing pauses.
    assert bad.asked - asked <= 64 + 12
    bad.mode = "up"
    await serves_again(good, bad, held=held, known=certain(good))
    await goes_on(trainer)


async def answers_nonsense(trainer: FakeTrainer, good: Door, bad: Door) -> None:
    await working(trainer, bad)
    # A weight update may come at any time, even before the first request with a right answer.
    held, bad.mode = len(bad.engine.held), "answers_nonsense"
    await goes_on(trainer)
    bad.mode = "up"
    await serves_again(good, bad, held=held, known=certain(good))
    await goes_on(trainer)


async def restarted_with_old_weights(trainer: FakeTrainer, good: Door, bad: Door) -> None:
    await working(trainer, bad)
    held, bad.engine.version = len(bad.engine.held), 0  # the orchestrator does not know
    await eventually(lambda: len(bad.engine.held) > held)
    await goes_on(trainer)


async def ten_times_slower(trainer: FakeTrainer, good: Door, bad: Door) -> None:
    """Slow the engine down: it keeps its requests, gets every version, and receives fewer requests than the other one."""
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
async def test_run_continues_with_one_of_two_engines(
    tmp_path: Path, tokenizer_folder: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "KNOCK_SECONDS", 0.3)
    trainer, metrics = await orchestrate(tmp_path, tokenizer_folder, world, Pace(interval=0.05, answer=0.5))
    assert_right_tokens(trainer)
    if world is not restarted_with_old_weights:  # the old weights may be noticed before a request fails
        assert metrics["engines/moved_requests"] >= 1
        assert metrics["engines/lost_seconds_longest"] > 0


async def test_slow_engine_stays_in_rotation(tmp_path: Path, tokenizer_folder: Path) -> None:
    trainer, metrics = await orchestrate(tmp_path, tokenizer_folder, ten_times_slower, Pace(interval=0.05, answer=60))
    assert_right_tokens(trainer)
    assert metrics["engines/moved_requests"] == 0
    assert metrics["engines/in_rotation"] == 2
