"""Kills and resumes: bitwise equal to the uninterrupted run, fallback after damage, and other world sizes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from tests.trainer.conftest import SHORT, Orchestrator

EXACT = ("loss", "grad_norm", "entropy", "param_checksum", "skipped_steps")


def test_killed_run_resumes_bit_for_bit(make_run: Callable[[str], Any], uninterrupted: list[dict[str, float]]) -> None:
    run = make_run("killed")
    first = run.start(attempt=1, ranks=2, **SHORT)
    orchestrator = Orchestrator(run, 1)
    assert orchestrator.wait_for("published", 0).path == str(run.paths.version(0, 1))
    found = {step: orchestrator.step(step) for step in (1, 2, 3)}
    first.kill(signal.SIGKILL)
    assert first.wait() == [-signal.SIGKILL] * 2

    second = run.start(attempt=2, ranks=2, **SHORT)
    orchestrator = Orchestrator(run, 2)
    orchestrator.wait_for("published", 2)
    assert orchestrator.call("GET", "/rlrun/trainer/state")["base_step"] == 2
    found |= {step: orchestrator.step(step) for step in (3, 4, 5, 6)}
    orchestrator.wait_for("finished", 6)
    orchestrator.call("POST", "/rlrun/trainer/shutdown", {})
    assert second.wait() == [0, 0], second.text()

    for line in uninterrupted:
        for metric in EXACT:
            assert found[line["step"]][metric] == line[metric], (line["step"], metric)
    attempt = read_attempt(run.paths.attempt_file(2))
    assert (attempt.base_step, attempt.base_attempt) == (2, 1)
    assert [c.step for c in attempt.owned(complete_checkpoints(run.paths))] == [2, 4, 6]
    kinds = [(event.kind, event.step) for event in orchestrator.events]
    assert kinds.index(("published", 4)) < kinds.index(("trained", 4)) < kinds.index(("checkpoint_saved", 4))


@pytest.mark.full
def test_damaged_checkpoint_falls_back_with_one_rank(make_run: Callable[[str], Any], recorded: Path) -> None:
    run = make_run("run")
    expected = run.train(attempt=1, ranks=2, replay=recorded)
    assert [c.step for c in complete_checkpoints(run.paths)] == [2, 4, 6]
    shard = next((run.paths.checkpoint(6, 1) / "trainer").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    found = run.train(attempt=2, ranks=1, replay=recorded)
    assert "cannot resume from step 6" in run.groups[-1].text()
    assert "differs from the manifest" in run.groups[-1].text()
    assert [line["attempt"] for line in found] == [1, 1, 1, 1, 2, 2]
    for one, other in zip(expected[4:], found[4:], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.full
def test_elastic_run_continues_with_two_and_four_ranks(make_run: Callable[[str], Any], recorded: Path) -> None:
    """An elastic trainer (`trainer.elastic`) does the same; the tolerance is that of the parallelism page."""
    expected = make_run("uninterrupted").train(ranks=1, replay=recorded)
    run = make_run("run")
    for attempt, (ranks, last) in enumerate(((4, 2), (2, 4), (4, 6)), 1):
        found = run.train(attempt=attempt, ranks=ranks, max_steps=last, replay=recorded)
    assert [(line["attempt"], line["step"]) for line in found] == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6)]
    for one, other in zip(expected, found, strict=True):
        for metric in ("loss", "grad_norm"):
            assert other[metric] == pytest.approx(one[metric], rel=1e-4, abs=1e-5), (one["step"], metric)


@pytest.mark.full
def test_run_resumes_bit_for_bit_in_another_activation_mode(make_run: Callable[[str], Any], recorded: Path) -> None:
    """`auto` may choose another mode after a change of its default, of GPUs or of the model's estimate."""
    expected = make_run("uninterrupted").train(replay=recorded)
    run = make_run("run")
    run.train(attempt=1, max_steps=2, replay=recorded, activation_checkpointing="none")
    run.train(attempt=2, max_steps=4, replay=recorded, activation_checkpointing="full")
    found = run.train(attempt=3, replay=recorded)
    assert "activationCheckpointing auto is none: the trainer computes on a CPU" in run.groups[-1].text()
    assert [(line["attempt"], line["step"]) for line in found] == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6)]
    for one, other in zip(expected, found, strict=True):
        assert [other[metric] for metric in EXACT] == [one[metric] for metric in EXACT], one["step"]
