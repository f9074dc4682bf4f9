"""`eval` and `synthesize` on a run's folder, with stubs for engine and trainer: real processes, environments and
weight updates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import read_manifest
from rlrun.cli.main import main
from rlrun.config.models.data import DataSetConfig
from rlrun.config.models.language_models import TinyModelConfig
from rlrun.environments.dataset_rows import Rows
from rlrun.local import process_plan
from rlrun.local.preflight import free_port
from rlrun.protocol.files.attempts import first_attempt, write_attempt
from rlrun.protocol.files.paths import RunPaths
from tests.e2e.local.local_run import listens
from tests.support.programs import wait_for, wait_for_exit
from tests.support.python_path import before
from tests.support.stub.model import make_model
from tests.support.stub.policy import Policy, small_files, write_adapter, write_model
from tests.support.stub.script import PolicyScript

ROOT = Path(__file__).parents[3]
ACCURACIES = {10: 0.6, 20: 1.0}
BASE = 0.05
TASKS, SAMPLES = 3, 2


@dataclass
class Folder:
    """Run with two published versions in the format of the stub's trainer."""

    manifest: Path
    paths: RunPaths
    output: Path

    def eval(self, *options: str) -> int:
        return main(
            [
                *("eval", str(self.manifest), "--run-dir", str(self.paths.root), "--output", str(self.output)),
                *("--samples-per-task", str(SAMPLES), "--max-tasks", str(TASKS), *options),
            ]
        )

    def results(self) -> dict[str, float]:
        """Return the mean reward by policy."""
        found = json.loads((self.output / "results.json").read_text())["results"]
        return {row["policy"]: row["metrics"]["reward/mean"] for row in found}

    def lines(self) -> list[dict[str, Any]]:
        """Return all answers, in no order."""
        files = sorted((self.output / "answers").rglob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """With the `indirect` parameter `lora` the versions are adapters, and the run has two engines."""
    monkeypatch.setattr(process_plan, "ENGINE_MODULE", "tests.support.stub.inference")
    monkeypatch.setenv("PYTHONPATH", before(ROOT))  # the product's programs do not import from the working directory
    lora = getattr(request, "param", None) == "lora"
    spec: dict[str, Any] = {
        "model": {"tiny": {}},
        "maxSteps": 20,
        "seqLen": 64,
        "environments": [{"id": "reverse-text", "sampling": {"maxTokens": 16}}],
    }
    if lora:
        spec |= {"trainer": {"lora": {"rank": 4}}, "inference": {"replicas": 2}}
    document = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "asked"}, "spec": spec}
    manifest = tmp_path / "run.yaml"
    manifest.write_text(yaml.safe_dump(document))
    paths = RunPaths(tmp_path / "runs" / "asked")
    make_model(paths.model, TinyModelConfig(), PolicyScript(first=BASE))
    config = resolve_spec(read_manifest(manifest).spec, name="asked", uid="uid", output_dir=str(paths.root))
    paths.run_json.write_text(config.model_dump_json())
    write_attempt(paths, first_attempt(world_size=1, config_hash="hash", uid="uid"))
    for step, accuracy in ACCURACIES.items():
        policy, path = Policy(step, accuracy), paths.version(step, 1)
        if lora:
            write_adapter(path, policy, 4)
        else:
            write_model(path, policy, small_files(paths.model), complete=True)
    return Folder(manifest, paths, tmp_path / "evaluation")


@contextmanager
def running(*modules: str, config: Path) -> Iterator[list[tuple[subprocess.Popen[bytes], Path]]]:
    """Run role processes with their logs until the block ends."""
    started = []
    for module in modules:
        log = config.with_name(f"{module}.log")
        command = [sys.executable, "-m", module, "--config", str(config)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=os.environ | {"RLRUN_ATTEMPT": "1"}, stdout=output, stderr=output)
        started.append((process, log))
    try:
        yield started
    finally:
        for process, _ in started:
            process.kill()
            process.wait()


@contextmanager
def engine_of(run: Folder) -> Iterator[str]:
    """Start the run's own engine by hand and yield its address."""
    port = free_port()
    config = json.loads(run.paths.run_json.read_text())
    config["inference"]["port"] = port
    run.paths.run_json.write_text(json.dumps(config))
    with running("tests.support.stub.inference", config=run.paths.run_json) as [(process, log)]:
        wait_for(lambda: listens(process, port, log), "the engine listens", state=log.read_text)
        yield f"http://127.0.0.1:{port}"


def test_eval_measures_base_and_steps_without_repeated_requests(
    run: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.eval("--steps", "20", "--max-tasks", str(TASKS - 1)) == 0
    assert run.results() == {"step 20": 1.0}
    first = run.lines()
    assert len(first) == (TASKS - 1) * SAMPLES
    assert not RunPaths(run.output).weights.exists(), "what the engine loaded is taken away"

    monkeypatch.setenv("RLRUN_API_KEY", "a-key-of-this-run")
    monkeypatch.setattr(process_plan, "ENGINE_MODULE", "rlrun.no_engine")
    with engine_of(run) as url:
        assert run.eval("--engine-url", url) == 0
    found = run.results()
    assert list(found) == ["base", "step 10", "step 20"]
    assert found["step 20"] == 1.0
    assert found["base"] < found["step 10"] < 1.0
    lines = run.lines()
    assert len(lines) == 3 * TASKS * SAMPLES
    assert all(line in lines for line in first), "those of before are kept as they are"
    assert sorted(path.name for path in run.paths.weights.iterdir()) == ["v00000010.a0001", "v00000020.a0001"]
    out = capsys.readouterr()
    assert "18 answers of 3 policies requested, 4 already saved" in out.err
    assert "avg@2" in out.out
    assert "pass@2" in out.out

    assert run.eval() == 0
    assert run.results() == found
    assert "starting" not in capsys.readouterr().err, "no engine is needed"


@pytest.mark.full
def test_eval_ends_when_its_engine_ends(
    run: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_plan, "ENGINE_MODULE", "rlrun.no_engine")
    assert run.eval("--base") == 1
    err = capsys.readouterr().err
    assert "error: inference ended with exit code 1" in err
    assert "No module named rlrun.no_engine" in err
    assert "eval: all engines were stopped; finished answers are saved" in err
    assert "Traceback" not in err


@pytest.mark.full
def test_synthesized_data_trains_an_sft_run(
    run: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.parquet"
    options = ("--run-dir", str(run.paths.root), "--max-tasks", "8", "--min-reward", "1")
    assert main(["synthesize", str(run.manifest), "--output", str(data), *options]) == 0
    assert f"{data}: 8 rollouts" in capsys.readouterr().out, "the newest policy makes no mistake"
    assert [path.name for path in tmp_path.glob("data.*")] == [data.name], "nothing is left to go on with"

    spec = {
        "task": "SFT",
        "model": {"path": str(run.paths.model)},
        "maxSteps": 1,
        "seqLen": 64,
        "data": {"sources": [{"path": str(data)}], "batchSize": 8},
    }
    paths = RunPaths(tmp_path / "sft")
    config = resolve_spec(RLRunSpec.model_validate(spec), name="sft", uid="uid", output_dir=str(paths.root))
    ports = process_plan.Ports(free_port(), free_port(), free_port(), ())
    [placed] = process_plan.with_endpoints(config, ports, None)
    paths.root.mkdir()
    paths.run_json.write_text(placed.model_dump_json())
    monkeypatch.setenv("RLRUN_API_KEY", "a-key-of-this-run")
    with running("tests.support.stub.trainer", "rlrun.orchestrator", config=paths.run_json) as started:
        for process, log in started:
            assert wait_for_exit(process) == 0, log.read_text()
    [line] = [json.loads(text) for text in paths.metrics.read_text().splitlines()]
    assert (line["step"], line["batch/samples"], line["data/epoch"]) == (1, 8, 1)
    learned = "".join(row["messages"][-1]["content"] for row in data_rows(data))
    assert line["batch/loss_tokens"] == len(learned) + 8, "every character of every reply, and its end"


def data_rows(path: Path) -> list[dict[str, Any]]:
    rows = Rows(DataSetConfig(path=str(path)), "data")
    return [rows.row(index) for index in range(len(rows))]


@pytest.mark.full
@pytest.mark.parametrize("run", ["lora"], indirect=True)
def test_eval_serves_adapters_and_unmodified_base(run: Folder) -> None:
    assert run.eval("--steps", "10,20", "--base") == 0
    found = run.results()
    assert found["step 20"] == 1.0
    assert 0.2 < found["step 10"] < 1.0
    assert set(found) == {"base", "step 10", "step 20"}
    logs = [path.name for path in RunPaths(run.output).logs(1, "inference").glob("*.log")]
    assert sorted(logs) == ["inference-0.log", "inference-1.log"]


@pytest.mark.full
def test_eval_run_measures_another_run_and_reuses_answers(
    run: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec: dict[str, Any] = {
        "task": "Eval",
        "model": {"path": str(run.paths.model)},
        "seqLen": 64,
        "policies": {"fromRun": "asked", "steps": [20]},
        "environments": [{"id": "reverse-text", "sampling": {"maxTokens": 16}}],
        "evaluation": {"numTasks": TASKS - 1, "samplesPerTask": SAMPLES},
    }
    manifest, folder = tmp_path / "measured.yaml", run.paths.root.with_name("measured")
    output = Folder(manifest, RunPaths(folder), folder)

    def local(*options: str) -> int:
        head = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "measured"}}
        manifest.write_text(yaml.safe_dump(head | {"spec": spec}))
        return main(["local", str(manifest), "--output-dir", str(folder), "--plain", *options])

    assert local() == 0
    assert output.results() == {"step 20": 1.0}
    first = output.lines()
    assert len(first) == (TASKS - 1) * SAMPLES
    out = capsys.readouterr().out
    assert "avg@2" in out
    assert f"all results: {folder / 'results.json'}" in out

    del spec["policies"]["steps"]
    spec["evaluation"]["numTasks"] = TASKS
    assert local("--resume") == 0
    found = output.results()
    assert list(found) == ["base", "step 10", "step 20"]
    assert found["base"] < found["step 10"] < found["step 20"] == 1.0
    lines = output.lines()
    assert len(lines) == 3 * TASKS * SAMPLES
    assert all(line in lines for line in first), "those of before are kept as they are"
    assert output.paths.attempts_on_disk() == [1, 2]
    assert sorted(path.name for path in (folder / "logs" / "attempt_0002").iterdir()) == ["inference", "orchestrator"]
    assert local("--resume", "--replay", str(folder)) == 78
    assert "--replay works only for task RL: this task does not train" in capsys.readouterr().err
