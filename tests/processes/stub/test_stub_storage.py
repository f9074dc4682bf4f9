"""Whole runs of stub processes on a real volume that is full, then read-only: they wait, report it, and continue."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from stub_run import API_KEY, StubRun, stub_run

from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints, read_manifest, verify_files
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from tests.small_volume import SmallVolume, small_volume
from tests.support.stub.policy import Policy
from tests.support.stub.script import PolicyScript
from tests.support.waiting import PATIENCE_SECONDS

STEPS = 14


def read_progress(run: StubRun) -> dict[str, Any]:
    """Return the progress of the orchestrator, as in the Lease."""
    url = f"http://127.0.0.1:{run.config.orchestrator.metrics_port}/rlrun/progress"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {API_KEY}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        return dict(json.load(answer))


def move_to(volume: SmallVolume, run: StubRun) -> None:
    """Move the run's folder to the volume, at its configured path, and its logs elsewhere."""
    shutil.copytree(run.paths.root, volume.root / "run")
    run.paths, run.prefix, run.root = RunPaths(volume.root / "run"), volume.enter, run.root.parent


def reports_storage(run: StubRun, reason: str) -> bool:
    return (read_progress(run)["storage"] or {}).get("reason") == reason


@pytest.mark.full
def test_run_waits_for_full_and_read_only_volume(tmp_path: Path) -> None:
    with (
        small_volume(tmp_path / "volume", "48m") as volume,
        stub_run(tmp_path / "volume", max_steps=STEPS) as run,
    ):
        move_to(volume, run)
        # Rollouts are always in flight: one that ends on the full volume makes the journal close its file.
        run.script(trainer={"stepSeconds": 0.05}, inference={"tokenSeconds": 0.02})
        assert run.wait(run.start("model")) == exit_codes.OK, run.state()
        run.start("inference")
        trainer, orchestrator = run.start("trainer"), run.start("orchestrator")
        run.until(lambda: len(complete_checkpoints(run.paths)) == 1, "the checkpoint of step 5 is complete")
        volume.fill()
        run.until(lambda: reports_storage(run, "StorageFull"), "the full volume is told")
        run.until(lambda: "the volume is full: " in read_progress(run)["waiting_on"], "the run waits for it")
        assert "free of 48 MiB" in read_progress(run)["waiting_on"]
        volume.remount("ro,size=96m")
        run.until(lambda: reports_storage(run, "StorageReadOnly"), "the read-only volume is told")
        run.until(
            lambda: read_progress(run)["waiting_on"].startswith("the volume is read-only"), "the run waits for it"
        )
        assert trainer.poll() is None
        assert orchestrator.poll() is None
        (before,) = complete_checkpoints(run.paths)
        verify_files(before.path, read_manifest(before.path))
        volume.remount("rw")
        assert run.wait(orchestrator) == exit_codes.OK, run.state()
        assert run.wait(trainer) == exit_codes.OK, run.state()
        assert run.trained(1) == list(range(1, STEPS + 1))
        lines = run.metrics()
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        policy = Policy(0, PolicyScript().first)
        for line in lines:
            policy = policy.trained(PolicyScript())
            assert line["param_checksum"] == policy.checksum
        found = complete_checkpoints(run.paths)
        assert [checkpoint.step for checkpoint in found][-1] == STEPS
        for checkpoint in found:
            verify_files(checkpoint.path, read_manifest(checkpoint.path))
        assert not list(run.paths.root.rglob("*.tmp"))
        assert run.log("trainer").read_text().count("the role retries") <= 4
        assert "Traceback" not in run.state()
