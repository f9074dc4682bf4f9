"""Whole run with an unmodified OpenAI client program as agent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stub_run import IMPORT_PATH, stub_run

from rlrun.runtime import exit_codes

PROGRAMS = Path(__file__).parent / "harness" / "programs"


@pytest.mark.full
def test_each_request_of_agent_program_is_trained(tmp_path: Path) -> None:
    orchestrator = {"batch_size": 8, "environments": [{"id": "reversing:reversing", "group_size": 4}]}
    with stub_run(tmp_path, max_steps=3, orchestrator=orchestrator) as run:
        run.script(trainer={"stepSeconds": 0}, inference={"tokenSeconds": 0})
        assert run.wait(run.start("model")) == exit_codes.OK, run.state()
        run.start("inference")
        trainer = run.start("trainer")
        playing = run.start("orchestrator", PYTHONPATH=f"{PROGRAMS}:{IMPORT_PATH}")
        assert run.wait(playing) == exit_codes.OK, run.state()
        assert run.wait(trainer) == exit_codes.OK, run.state()
        traces = sorted(run.paths.root.glob("traces/step_*.jsonl"))
        rollouts = [json.loads(line) for trace in traces for line in trace.read_text().splitlines()]
        assert len(rollouts) == 3 * 8
        for rollout in rollouts:
            (spans,) = rollout["versions"]  # One sample per rollout, because the program's conversation only grows.
            sampled = sum(span["end"] - span["start"] for span in spans)
            assert sampled == rollout["completion_tokens"] == 2 * 5  # Two replies of four letters and an end token.
            assert rollout["tokens"] == len("B") + 2 * (len("U<abcd>A") + 5)
            assert [message["role"] for message in rollout["messages"]] == ["user", "assistant"] * 2
        assert sum(rollout["reward"] for rollout in rollouts) > 0
