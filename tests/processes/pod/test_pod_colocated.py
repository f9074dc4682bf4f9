"""Trainer pod with an engine: one container with two processes that start and end together."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pod_harness import Pod, run_config

from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import free_port
from rlrun.pod.role_process import descendant_pids
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from tests.support.command_line import command_line
from tests.support.programs import wait_for, wait_for_exit

SPEC: dict[str, Any] = {
    "model": {"tiny": {}},
    "maxSteps": 3,
    "seqLen": 64,
    "environments": [{"id": "reverse-text", "groupSize": 4, "args": {"length": 3}}],
    "sampling": {"maxTokens": 8},
    "orchestrator": {"batchSize": 8},
    "algorithm": {"maxAsyncLevel": 0},
    "placement": {"colocate": True},
}


def cluster_config(root: Path) -> RunConfig:
    """Return the operator's configuration, except for the ports."""
    config = run_config(root, **SPEC)
    trainer, engine = free_port(), free_port()
    places = {"trainer_url": f"http://127.0.0.1:{trainer}", "inference_service": f"http://127.0.0.1:{engine}"}
    return config.model_copy(
        update={
            "trainer": config.trainer.model_copy(
                update={"port": trainer, "engine_urls": [f"http://127.0.0.1:{engine}"]}
            ),
            "inference": config.inference.model_copy(update={"port": engine}),
            "orchestrator": config.orchestrator.model_copy(update={**places, "metrics_port": free_port()}),
        }
    )


def engine_of(container: int) -> int | None:
    """Return the engine process below the first process of a container."""
    for pid in descendant_pids(container):
        if "tests.support.stub.inference" in command_line(pid).split():
            return pid
    return None


@pytest.mark.full
def test_colocated_processes_end_together_with_first_cause(pods: Callable[..., Pod], tmp_path: Path) -> None:
    config = cluster_config(tmp_path / "demo")
    pod = pods("demo-trainer-0", config)
    assert pod.run_stub("model")[0] == 0
    container = pod.start_stub("trainer")
    wait_for(lambda: pod.ready()[0] == 200, "the trainer waits for batches, so that the engine sleeps")
    engine = engine_of(container.pid)
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    assert wait_for_exit(container) == 128 + signal.SIGKILL
    assert "was ended by SIGKILL" in pod.message
    assert "the engine without vLLM serves" in pod.message, "the last lines are the engine's"

    pod = pods("demo-trainer-0", config)
    container = pod.start_stub("trainer", RLRUN_ATTEMPT="2")
    wait_for(lambda: pod.ready()[0] == 200, "the trainer waits for batches, so that the engine sleeps")
    engine = engine_of(container.pid)
    container.send_signal(signal.SIGTERM)
    assert wait_for_exit(container) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{engine}").exists()
    logs = RunPaths(tmp_path / "demo").logs(2, "inference")
    assert "the engine without vLLM serves" in (logs / "demo-trainer-0.log").read_text()

    assert config.inference is not None
    model = config.inference.model.model_copy(update={"dtype": "float16"})
    wrong = config.inference.model_copy(update={"model": model})
    pod = pods("demo-trainer-0", config.model_copy(update={"inference": wrong}))
    assert pod.run_stub("trainer", RLRUN_ATTEMPT="3")[0] == exit_codes.CONFIGURATION
    said = "the engine in the trainer's pod: dtype: 'float16' does not work on cpu"
    assert pod.message.startswith(said)
