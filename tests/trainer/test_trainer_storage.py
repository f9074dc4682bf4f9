"""Full volume under real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlrun.protocol.files.batch import write_batch
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints, read_manifest, verify_files
from rlrun.protocol.messages import trainer_channel as protocol
from tests.small_volume import small_volume
from tests.support.programs import wait_for
from tests.support.waiting import UNREACHED_SECONDS
from tests.trainer.conftest import Orchestrator, Run, make_batch

pytestmark = pytest.mark.full


def state(orchestrator: Orchestrator, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until the trainer's state fulfills `wanted` and return it."""
    found: dict[str, Any] = {}

    def is_wanted() -> bool:
        found.clear()
        found.update(orchestrator.call("GET", protocol.STATE))
        return wanted(found)

    wait_for(is_wanted, state=lambda: f"{found}\n{orchestrator.run.groups[-1].text()}")
    return found


def storage_text(found: dict[str, Any]) -> str:
    return str((found["storage"] or {}).get("text", ""))


def test_sigterm_on_full_volume_ends_without_new_checkpoint(make_run: Callable[[str], Run], tmp_path: Path) -> None:
    with small_volume(tmp_path / "volume", "32m") as volume:
        run = make_run("unused")
        run.paths, run.logs = type(run.paths)(volume.root / "run"), tmp_path
        group = run.start(ranks=2, checkpoint={"grace_period_seconds": UNREACHED_SECONDS})
        orchestrator = Orchestrator(run, 1)
        orchestrator.wait_for("published", 0)
        for step in (1, 2):
            orchestrator.step(step)
        write_batch(run.paths.batch(3, 1), make_batch(3, 1))
        volume.fill()
        orchestrator.call("POST", protocol.BATCHES, {"step": 3, "path": str(run.paths.batch(3, 1))})
        state(orchestrator, lambda found: "; cannot publish the weights of step 3 since " in storage_text(found))
        group.kill(15)
        assert group.wait() == [143, 143], group.text()
        said = "stopped by SIGTERM after step 3, without a complete checkpoint of it: the volume is full: "
        assert said in group.text()
        (found,) = complete_checkpoints(run.paths)
        assert found.step == 2
        verify_files(found.path, read_manifest(found.path))
