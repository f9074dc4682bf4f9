"""Hostile environments in the whole orchestrator: the run continues and reports the cause of each failure."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from orch_simulation import FakeEngine, make_config, simulate

from rlrun.environments.process import supervised
from rlrun.orchestrator.journal.frames import Entry, RolloutEntry, read_segment
from rlrun.orchestrator.journal.journal_writer import SegmentWriter, rollout_fingerprint
from rlrun.orchestrator.rollouts.environment_pool import open_arenas
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from tests.support.python_path import before


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.full)])
async def test_run_continues_with_good_rollouts_of_hostile_environment(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(supervised, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setenv("PYTHONPATH", before(Path(__file__).parents[2] / "support" / "orchestrator" / "simulation"))
    wild = {"id": "orch_environments:wild", "name": "wild", "group_size": 2, "workers": workers}
    config = make_config(
        tmp_path, tokenizer_folder, environments=[wild], max_steps=5, max_concurrency=16, max_error_ratio=1.0
    )
    outcome = await simulate(config, open_environments=open_arenas)
    assert outcome.code == exit_codes.OK
    trained = [sample for batch in outcome.trainer.batches for sample in batch.samples]
    assert len({(sample.group, sample.rollout) for sample in trained}) == 40
    assert all(int(sample.task_id.split("-")[1]) % 16 > 5 or "-18-" in sample.task_id for sample in trained)
    assert {abs(sample.reward) for sample in trained} == {1e9}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    told: Counter[str] = Counter()
    for line in lines:
        told.update({name: value for name, value in line.items() if name.startswith(("errors/", "lost/"))})
    assert told.keys() - {"lost/wild"} == {"errors/wild/reward", "errors/wild/crash"}
    assert told["lost/wild"] > 0 or workers > 1  # With three processes, one may end without other rollouts.
    assert lines[-1]["environment/wild/restarts"] >= told["errors/wild/crash"] > 0


@pytest.mark.parametrize("bad", ["reward", "metric"])
async def test_untrainable_reward_in_journal_is_survived(tmp_path: Path, tokenizer_folder: Path, bad: str) -> None:
    config = make_config(tmp_path, tokenizer_folder, max_steps=6)
    await simulate(
        config, engines=[FakeEngine(lambda: 0.002)], hold_checkpoints=True, until=lambda t: len(t.batches) >= 1
    )
    paths = RunPaths(tmp_path)
    found: list[Entry] = []
    for segment in paths.journal_on_disk():
        found += read_segment(segment.path).entries
        segment.path.unlink()
    for batch in paths.batches_on_disk():
        for file in batch.path.iterdir():
            file.unlink()
        batch.path.rmdir()
    change = {"reward": 1e300} if bad == "reward" else {"metrics": {"x": 1e308}}
    spoiled = [replace(e, rollout=replace(e.rollout, **change)) for e in found if isinstance(e, RolloutEntry)]
    assert len(spoiled) >= 8
    writer = SegmentWriter(paths, attempt=1, fingerprint=rollout_fingerprint(config))
    writer.write(spoiled)
    writer.close()
    outcome = await simulate(config, number=2)
    assert outcome.code == exit_codes.OK
    assert len(outcome.trainer.batches) == 6
    assert max(abs(s.reward) for batch in outcome.trainer.batches for s in batch.samples) <= 1
