"""Run whose trainer and engine share GPUs in turn: real orchestrator and weight transfer, and a stub trainer that checks that the engine
sleeps."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from stub_run import StubRun, stub_run

from rlrun.runtime import exit_codes

ALGORITHM = {"max_async_level": 0, "max_off_policy_steps": 4}


def make_blocks() -> dict[str, Any]:
    orchestrator = {"batch_size": 8, "evaluation": {"interval": 2, "num_tasks": 4, "samples_per_task": 1}}
    return {
        "trainer": {"colocated": True, "algorithm": ALGORITHM},
        "inference": {"colocated": True},
        "orchestrator": {"colocated": True, "algorithm": ALGORITHM} | orchestrator,
    }


def start_run(run: StubRun, **script: Any) -> None:
    run.script(**({"trainer": {"stepSeconds": 0}, "inference": {"tokenSeconds": 0}} | script))
    urls = run.config.orchestrator.inference_urls
    trainer = run.config.trainer.model_copy(update={"engine_urls": urls})
    run.file.write_text(run.config.model_copy(update={"trainer": trainer}).model_dump_json())
    assert run.wait(run.start("model")) == exit_codes.OK, run.state()


def test_colocated_run_resumes_after_killed_orchestrator(tmp_path: Path) -> None:
    """The orchestrator dies when all engines sleep and the trainer does not know it. The engine stays asleep, and the next attempt wakes
    it with its first version."""
    with stub_run(tmp_path, max_steps=4, **make_blocks()) as run:
        start_run(run)
        engine = run.start("inference")
        trainer = run.start("trainer")
        orchestrator = run.start("orchestrator", FAULT_POINTS="turn.engines_asleep=sigkill@2")
        assert run.wait(orchestrator) == -signal.SIGKILL, run.state()
        trainer.kill()
        trainer.wait()
        trainer, orchestrator = run.start("trainer", 2), run.start("orchestrator", 2)
        assert run.wait(orchestrator) == exit_codes.OK, run.state()
        assert run.wait(trainer) == exit_codes.OK, run.state()
        assert [line["step"] for line in run.metrics()] == list(range(5))
        assert all(line["off_policy/max"] == 0 for line in run.metrics() if line["step"])
        engine.send_signal(signal.SIGTERM)
        assert run.wait(engine) == exit_codes.OK, run.state()
