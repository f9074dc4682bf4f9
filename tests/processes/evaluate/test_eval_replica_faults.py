"""Evaluation with one hanging engine of two: its questions move to the other engine, and all are answered."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support" / "orchestrator" / "simulation"))

from orch_doors import open_doors
from orch_simulation import API_KEY, FakeEngine, eventually, in_process

from rlrun.evaluate import play
from rlrun.evaluate.evaluation_job import Job
from rlrun.evaluate.policies import Policy
from rlrun.orchestrator.engines.discovery import Pace
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from tests.processes.stub.harness.stub_run import StubRun
from tests.support.waiting import result_of

TASKS, SAMPLES = 8, 2


class Silent:
    """Progress display without output."""

    def tell(self, line: str) -> None:
        return

    def expect(self, answers: int) -> None:
        return

    def answered(self) -> None:
        return


def make_job(root: Path, urls: list[str]) -> Job:
    """Return a job that evaluates one policy with running engines."""
    model, weights = root / "model", root / "v1"
    make_tokenizer().save_pretrained(model)
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"weights")
    asked = {
        "model": {"path": str(model)},
        "max_concurrency": 64,
        "evaluation": {"num_tasks": TASKS, "samples_per_task": SAMPLES},
    }
    run = StubRun(root, orchestrator=asked)
    return Job(
        work=run.paths.root,
        config=run.config,
        orchestrator=run.config.orchestrator,
        policies=[Policy(1, "whole", weights, "v1")],
        split="eval",
        engine_urls=urls,
        api_key=API_KEY,
        gpu_ids=None,
        engine_weights=root / "engine",
        export=lambda policy, folder: None,
    )


async def test_hanging_engine_loses_no_evaluation_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "open_arenas", in_process)
    good, bad = (
        FakeEngine(),
        FakeEngine(lambda: 600.0),
    )  # The engine does not answer its pending requests before it hangs.
    async with open_doors(good, bad) as (good_door, bad_door):
        idle = dict.fromkeys(["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"], 0.0)
        good_door.load = bad_door.load = idle
        job = make_job(tmp_path, [good_door.url, bad_door.url])
        asking = asyncio.create_task(
            play.collect_missing(play.EngineAnswers(job, Pace(interval=0.05, answer=0.5)), Silent())
        )
        await eventually(lambda: bad.running > 0 or asking.done())
        bad_door.mode = "hangs"
        [part] = await result_of(asking, "the end of the evaluation", progress=lambda: len(good.requests))
    answers = part.answers()
    assert len(answers) == TASKS * SAMPLES
    assert all(answer.rollout is not None for answer in answers)
    assert bad_door.ignored > 0
