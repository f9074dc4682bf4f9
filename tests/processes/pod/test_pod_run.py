"""Whole run of pods without a cluster: two trainer pods, an engine and the orchestrator, started by `rlrun-pod` with the stubs."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pod_harness import Pod, run_config

from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import free_port
from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.messages.endpoints import ENGINE_READY
from rlrun.runtime import exit_codes
from tests.support.mlflow_server import Server
from tests.support.programs import wait_for, wait_for_exit

SPEC: dict[str, Any] = {
    "model": {"tiny": {}},
    "maxSteps": 6,
    "seqLen": 64,
    "environments": [{"id": "reverse-text", "groupSize": 4, "args": {"length": 3}}],
    "sampling": {"maxTokens": 8},
    "orchestrator": {"batchSize": 8},
    "trainer": {"replicas": 2},
    "checkpoint": {"interval": 2},
}


def cluster_config(root: Path, *, base: dict[str, Any] = SPEC, **spec: Any) -> RunConfig:
    """Return the operator's configuration, except for the ports: all pods share the ports of this machine."""
    config = run_config(root, **base | spec)
    trainer, engine = free_port(), free_port()
    return config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"port": trainer}),
            "inference": config.inference.model_copy(update={"port": engine}),
            "orchestrator": config.orchestrator.model_copy(
                update={
                    "trainer_url": f"http://127.0.0.1:{trainer}",
                    "inference_service": f"http://127.0.0.1:{engine}",
                    "metrics_port": free_port(),
                }
            ),
        }
    )


def engine_status(config: RunConfig) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{config.inference.port}{ENGINE_READY}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.fixture
def tracker() -> Iterator[Server]:
    with Server() as made:
        yield made


@pytest.mark.full
def test_killed_trainer_is_resumed_and_run_completes(pods: Callable[..., Pod], tmp_path: Path, tracker: Server) -> None:
    """The tracker contains one continuous curve."""
    root = tmp_path / "demo"
    # Never: the run ignores existing checkpoints, but its own restarts resume.
    config = cluster_config(
        root, checkpoint={"interval": 2, "resume": {"policy": "Never"}}, tracking={"mlflow": {"uri": tracker.url}}
    )
    paths = RunPaths(root)
    fault = {"trainer": {"faults": [{"attempt": 1, "step": 5, "action": "exit", "code": 1}]}}
    script = {"STUB_SCRIPT": json.dumps(fault)}

    def group() -> tuple[Pod, Pod, Pod]:
        names = ("demo-trainer-0", "demo-trainer-1", "demo-orchestrator")
        return tuple(pods(name, config) for name in names)  # type: ignore[return-value]

    first, second, conductor = group()
    engine = pods("demo-inference-x", config)
    # The other pods of an attempt find the trainer's first pod by its address.
    for pod in (first, second):
        pod.env["RLRUN_MASTER_ADDR"] = first.ip
        pod.env["RLRUN_MASTER_PORT"] = first.env["RLRUN_MASTER_PORT"]
    serving = engine.start_stub("inference", **script)
    assert first.run_stub("model", **script)[0] == 0
    wait_for(lambda: engine_status(config) == 503, "the engine serves without weights")
    trainers = [pod.start_stub("trainer", **script) for pod in (first, second)]
    orchestrating = conductor.start_stub("orchestrator", **script)
    wait_for(lambda: first.ready()[0] == second.ready()[0] == 200, "both trainer pods are ready")
    wait_for(lambda: engine_status(config) == 200, "the engine holds a version")
    assert wait_for_exit(trainers[0]) == 1
    assert wait_for_exit(trainers[1]) != 0
    orchestrating.send_signal(signal.SIGTERM)
    assert wait_for_exit(orchestrating) == 128 + signal.SIGTERM

    after = group()
    for pod in after[:2]:
        pod.env |= {
            "RLRUN_MASTER_ADDR": after[0].ip,
            "RLRUN_MASTER_PORT": after[0].env["RLRUN_MASTER_PORT"],
        }
    running = [
        pod.start_stub(role, RLRUN_ATTEMPT="2", **script)
        for pod, role in zip(after, ("trainer", "trainer", "orchestrator"), strict=True)
    ]
    for pod, process in zip(after, running, strict=True):
        assert wait_for_exit(process) == 0, pod.message
    assert serving.poll() is None
    serving.send_signal(signal.SIGTERM)
    assert wait_for_exit(serving) in (0, 128 + signal.SIGTERM)
    assert read_attempt(paths.attempt_file(2)).base_step in (2, 4)
    assert complete_checkpoints(paths)[-1].step == 6
    assert json.loads(paths.run_json.read_text())["trainer"]["uid"] == "uid-1"
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    curve = {(line["step"], line["loss"]) for line in lines if line["step"]}
    assert {step for step, _ in curve} == set(range(1, 7))
    assert curve <= tracker.points
    assert ([run["uid"] for run in tracker.runs], tracker.status) == (["uid-1"], "FINISHED")
    written = [root, *root.rglob("*")]
    assert len(written) > 50
    assert [path for path in written if path.stat().st_mode & 0o007] == [], "what a run writes is not for everybody"


@pytest.mark.full
def test_eval_run_creates_model_in_orchestrator_pod(pods: Callable[..., Pod], tmp_path: Path) -> None:
    left_out = ("maxSteps", "trainer", "orchestrator", "checkpoint")
    asked = {key: value for key, value in SPEC.items() if key not in left_out}
    config = cluster_config(tmp_path / "demo", base=asked, task="Eval", evaluation={"numTasks": 3})
    # The number at the end of the name is the attempt.
    engine, conductor = pods("demo-inference-x", config), pods("demo-orchestrator-2", config)
    serving = engine.start_stub("inference")
    assert conductor.run_stub("model", RLRUN_ATTEMPT="2")[0] == 0
    assert conductor.run_stub("orchestrator", RLRUN_ATTEMPT="2")[0] == 0, conductor.message
    paths = RunPaths(tmp_path / "demo")
    assert paths.attempts_on_disk() == [2]
    [found] = json.loads((paths.root / "results.json").read_text())["results"]
    assert (found["policy"], found["answers"]) == ("base", 3)
    code, _, err = conductor.run_stub("orchestrator", RLRUN_ATTEMPT="2")
    assert code == exit_codes.ATTEMPT_TAKEN, "its number is in the folder, as a trainer's is"
    assert "the next is 3" in err + conductor.message
    serving.send_signal(signal.SIGTERM)
    assert wait_for_exit(serving) in (0, 128 + signal.SIGTERM)
