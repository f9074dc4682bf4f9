"""Two runs on one stub trainer and one stub engine: the basis of the cluster tests of `trainer.sharedWith`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stub_run import StubRun, stub_run

from rlrun.config.models.run_config import RunConfig
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared_trainer_files import read_state
from rlrun.runtime import exit_codes

LORA = {"rank": 8, "slots": 2}
GUEST_KEY = "a-key-of-the-guest"


def guest_of(run: StubRun, steps: int) -> tuple[Path, RunPaths]:
    """Write a guest's configuration next to the host's folder; return the file and the guest's paths."""
    paths = RunPaths(run.root / "guest")
    paths.root.mkdir()
    document = run.config.model_dump(mode="json")
    document["inference"] = None
    for role in ("trainer", "orchestrator"):
        document[role] |= {"name": "guest", "uid": "of-guest", "output_dir": str(paths.root), "max_steps": steps}
        document[role]["shared_with"] = "run"
    document["trainer"]["lora"] |= {"slots": 1, "rank": 4}
    document["orchestrator"]["metrics_port"] += 1
    paths.run_json.write_text(RunConfig.model_validate(document).model_dump_json())
    return paths.run_json, paths


def steps_of(paths: RunPaths) -> list[tuple[int, int]]:
    """Return step and attempt of each line of `metrics.jsonl`."""
    if not paths.metrics.is_file():
        return []
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    return [(line["step"], line["attempt"]) for line in lines]


@pytest.mark.full
def test_guest_trains_resumes_and_outlives_host_run(tmp_path: Path) -> None:
    lora = {"trainer": {"lora": LORA, "name": "run"}, "inference": {"lora": LORA, "name": "run"}}
    with stub_run(tmp_path, max_steps=10, **lora, orchestrator={"name": "run"}) as run:
        run.script(trainer={"stepSeconds": 0.05})
        assert run.wait(run.start("model")) == exit_codes.OK, run.state()
        run.start("inference")
        trainer, own = run.start("trainer"), run.start("orchestrator")
        file, guest = guest_of(run, 20)
        host_file, run.file = run.file, file
        first = run.start("orchestrator", name="guest", RLRUN_API_KEY=GUEST_KEY)
        run.until(lambda: any(step >= 7 for step, _ in steps_of(guest)), "the guest trains")
        first.kill()
        second = run.start("orchestrator", 2, name="guest", RLRUN_API_KEY=GUEST_KEY)
        run.file = host_file
        assert run.wait(own) == exit_codes.OK, run.state()
        run.until(lambda: read_state(run.paths, "guest", 2) is not None, "it is answered")
        assert trainer.poll() is None or second.poll() is not None, "the trainer stays while the guest is there"
        assert run.wait(second) == exit_codes.OK, run.state()
        assert run.wait(trainer) == exit_codes.OK, run.state()
        steps = steps_of(guest)
        assert [step for step, _ in steps] == list(range(1, 21)), run.state()
        assert {attempt for _, attempt in steps} == {1, 2}
        assert [step for step, _ in steps_of(run.paths)] == list(range(1, 11))
        left = read_state(run.paths, "guest", 2)
        assert left is not None
        assert (left.state, left.step) == ("Left", 20)
        assert "Traceback" not in run.state()
