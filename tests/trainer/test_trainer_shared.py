"""Several runs in one trainer, each bitwise equal to the same run in a separate trainer."""

from __future__ import annotations

import json
import signal
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlrun.config.models.language_models import LoRAConfig, ReferenceConfig
from rlrun.config.models.learning import AlgorithmConfig, LossConfig, OptimizerConfig, RegularizerConfig
from rlrun.protocol.files import shared_trainer_files
from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.batch import write_batch
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from rlrun.protocol.files.durable import document_crc32
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared_trainer_files import SlotAnswer, SlotRequest
from rlrun.protocol.messages import trainer_channel as protocol
from rlrun.protocol.messages.endpoints import guest_key, key_digest
from rlrun.runtime import exit_codes
from tests.support.process_groups import gloo_threads
from tests.support.programs import wait_for
from tests.trainer.conftest import Orchestrator, Run, Zygote, make_batch

STEPS = 4
EXACT = ("loss", "grad_norm", "entropy", "param_checksum", "skipped_steps")
TARGETS = ["q_proj", "o_proj", "mlp.*"]
HOST: dict[str, Any] = {
    "name": "host",
    "max_steps": STEPS,
    "lora": LoRAConfig(rank=4, alpha=8, targets=TARGETS, slots=2, dropout=0.1),
}
GUEST: dict[str, Any] = {
    "name": "guest",
    "max_steps": STEPS,
    "lora": LoRAConfig(rank=4, alpha=16, targets=TARGETS),
    "optimizer": OptimizerConfig(lr=3e-3, weight_decay=0.1),
    "algorithm": AlgorithmConfig(regularizers=RegularizerConfig(kl=0.1), reference=ReferenceConfig()),
    "seed": 7,
}


OWN = "a-key-of-the-guest"


class Guest:
    """Run that requests a slot in the host's trainer."""

    def __init__(self, host: Run, run: Run, attempt: int = 1, **options: Any) -> None:
        self.host, self.run, self.attempt = host.paths, run, attempt
        run.write_config(port=host.port, shared_with="host", processes_per_replica=None, **options)
        self.name = options["name"]
        self.orchestrator = Orchestrator(run, attempt, shared_trainer_files.channel_of(self.name))

    def ask(self) -> None:
        shared_trainer_files.write_request(
            self.host,
            SlotRequest(
                run=self.name, attempt=self.attempt, folder=str(self.run.paths.root), key_digest=key_digest(OWN)
            ),
        )

    def state(self, *wanted: str) -> SlotAnswer:
        """Wait until the trainer's answer is one of these states and return it."""

        def answer() -> SlotAnswer | None:
            found = shared_trainer_files.read_state(self.host, self.name, self.attempt)
            if found is not None and found.state in wanted:
                return found
            assert found is None or found.state in ("Waiting", "Joined"), found
            return None

        found = wait_for(answer, f"{self.name} is {' or '.join(wanted)}")
        assert found is not None
        return found

    def join(self) -> Orchestrator:
        self.ask()
        self.orchestrator.key = guest_key(self.name, OWN, self.state("Joined").proof)
        return self.orchestrator


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, model: Path, zygote: Zygote, recorded: Path
) -> Callable[[str, int], list[dict[str, float]]]:
    """Return the metrics of the host's or the guest's run, trained in a separate trainer on `ranks` ranks."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}

    def metrics(name: str, ranks: int) -> list[dict[str, float]]:
        if (name, ranks) not in found:
            run = Run(RunPaths(tmp_path_factory.mktemp("alone")), model, zygote)
            found[name, ranks] = run.train(ranks=ranks, replay=recorded, **(HOST if name == "host" else GUEST))
        return found[name, ranks]

    return metrics


def assert_same(found: dict[int, dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert found.keys() == {line["step"] for line in expected}
    for line in expected:
        for metric in EXACT:
            assert found[int(line["step"])][metric] == line[metric], (line["step"], metric)


def end(orchestrator: Orchestrator) -> None:
    orchestrator.wait_for("finished", STEPS)
    orchestrator.call("POST", protocol.SHUTDOWN, {})


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_two_shared_runs_equal_separate_runs(
    make_run: Callable[[str], Run], alone: Callable[[str, int], list[dict[str, float]]], ranks: int
) -> None:
    run, other = make_run("host"), make_run("guest")
    group = run.start(ranks=ranks, **HOST)
    host = Orchestrator(run, 1)
    host.wait_for("published", 0)
    mine = {1: host.step(1)}
    guest = Guest(run, other, **GUEST)
    theirs_orchestrator = guest.join()
    late = Guest(run, make_run("late"), **GUEST | {"name": "late"})
    late.ask()
    assert late.state("Waiting").reason == "all slots are taken: host, guest"
    theirs = {}
    for step in (1, 2, 3):
        theirs_orchestrator.send_batch(step)  # both runs are present and take turns
        mine[step + 1] = host.step(step + 1)
        theirs[step] = theirs_orchestrator.wait_for("trained", step).metrics
        if step % 2 == 0:
            theirs_orchestrator.complete_checkpoint(step)
    end(host)
    theirs[STEPS] = theirs_orchestrator.step(STEPS)  # the host's run has ended, but its trainer continues
    end(theirs_orchestrator)
    left = guest.state("Left")
    assert (left.step, left.exit_code) == (STEPS, exit_codes.OK)
    late.state("Joined")  # the slot is free
    shared_trainer_files.delete_request(run.paths, "late")
    late.state("Left")
    assert group.wait() == [0] * ranks, group.text()

    assert_same(mine, alone("host", ranks))
    assert_same(theirs, alone("guest", ranks))
    assert mine[STEPS]["param_checksum"] != theirs[STEPS]["param_checksum"]
    assert [c.step for c in complete_checkpoints(other.paths)] == [2, 4]
    written = json.loads((other.paths.version(STEPS, 1) / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (4, 16)


def fail_with_nan(guest: Guest) -> None:
    """Send samples that their writer did not check, with the checksums of an undamaged batch."""
    path = guest.run.paths.batch(1, 1)
    write_batch(path, make_batch(1, 1))
    columns = load_file(path / "samples.safetensors")
    columns["advantages"][8] = np.nan
    save_file(columns, path / "samples.safetensors")
    document = json.loads((path / "batch.json").read_text())
    del document["crc32"]
    document["samples_crc32"] = zlib.crc32((path / "samples.safetensors").read_bytes())
    (path / "batch.json").write_text(json.dumps(document | {"crc32": document_crc32(document)}))
    guest.orchestrator.call("POST", protocol.BATCHES, {"step": 1, "path": str(path)})


def overflow(guest: Guest) -> None:
    """Send finite numbers whose gradient is not finite."""
    batch = make_batch(1, 1)
    huge = tuple(replace(s, advantages=np.where(s.loss_mask, 3e38, 0).astype(np.float32)) for s in batch.samples)
    path = guest.run.paths.batch(1, 1)
    write_batch(path, replace(batch, samples=huge))
    guest.orchestrator.call("POST", protocol.BATCHES, {"step": 1, "path": str(path)})


def wait_for_threads(pid: int, expected: Counter[str]) -> None:
    """Wait until a rank has at most the expected Gloo threads: each guest has a process group for checkpoints."""
    wait_for(lambda: gloo_threads(pid) <= expected, f"{dict(expected)} threads", state=lambda: gloo_threads(pid))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_failing_run_changes_no_bit_of_another(
    make_run: Callable[[str], Run], alone: Callable[[str, int], list[dict[str, float]]], ranks: int
) -> None:
    run = make_run("host")
    group = run.start(ranks=ranks, **HOST)
    host = Orchestrator(run, 1)
    host.wait_for("published", 0)
    mine = {1: host.step(1)}
    threads = [gloo_threads(pid) for pid in group.pids]

    nan = Guest(run, make_run("nan"), **GUEST | {"name": "nan"})
    nan.join()
    fail_with_nan(nan)
    failed = nan.state("Failed")
    assert failed.exit_code == exit_codes.DATA
    assert "advantages contains a value that is not finite" in failed.reason
    mine[2] = host.step(2)

    # The exception occurs after a forward pass and half of the micro-batches, with gathered weights and accumulated
    # gradients.
    raising = AlgorithmConfig(loss=LossConfig(name="raising_loss:raises_on_the_second_row"))
    thrower = Guest(run, make_run("thrower"), **GUEST | {"name": "thrower", "algorithm": raising})
    thrower.join().send_batch(1)
    failed = thrower.state("Failed")
    assert "ZeroDivisionError" in failed.reason
    assert failed.step == 0
    mine[3] = host.step(3)
    for pid, before in zip(group.pids, threads, strict=True):
        wait_for_threads(pid, before)

    overflowing = Guest(run, make_run("overflowing"), **GUEST | {"name": "overflowing"})
    orchestrator = overflowing.join()
    overflow(overflowing)
    assert orchestrator.wait_for("trained", 1).metrics["skipped_steps"] == 1.0
    mine[4] = host.step(4)
    orchestrator.send_batch(2)
    assert orchestrator.wait_for("trained", 2).metrics["skipped_steps"] == 1.0, "it goes on as a run alone does"
    orchestrator.complete_checkpoint(2)
    shared_trainer_files.delete_request(run.paths, "overflowing")
    end(host)
    overflowing.state("Left")
    assert group.wait() == [0] * ranks, group.text()
    assert_same(mine, alone("host", ranks))


@pytest.mark.full
def test_exception_on_one_rank_ends_trainer_and_blames_guest(
    make_run: Callable[[str], Run],
) -> None:
    run, other = make_run("host"), make_run("thrower")
    group = run.start(ranks=2, meeting_seconds=8.0, **HOST)  # the ranks also connect within this time
    host = Orchestrator(run, 1)
    host.wait_for("published", 0)
    host.step(1)
    raising = AlgorithmConfig(loss=LossConfig(name="raising_loss:raises_on_rank_one"))
    thrower = Guest(run, other, **GUEST | {"name": "thrower", "algorithm": raising})
    thrower.join().send_batch(1)
    assert all(group.wait()), group.text()
    assert "run thrower failed on only some ranks, so all runs must restart" in group.text()
    failed = thrower.state("Failed")
    assert (failed.reason, failed.ended_trainer) == ("ZeroDivisionError: division by zero", True)


@pytest.mark.full
def test_incompatible_runs_are_refused_with_the_reason(make_run: Callable[[str], Run], tmp_path: Path) -> None:
    run = make_run("host")
    group = run.start(**HOST)
    host = Orchestrator(run, 1)
    host.wait_for("published", 0)
    wide = Guest(run, make_run("wide"), **GUEST | {"name": "wide", "lora": LoRAConfig(rank=8, targets=TARGETS)})
    wide.ask()
    refused = wide.state("Refused")
    assert refused.exit_code == exit_codes.CONFIGURATION
    assert refused.reason == "trainer.lora.rank (8) is higher than the rank of host (4); lower it to at most 4"
    elsewhere = Guest(
        run, Run(RunPaths(tmp_path / "other" / "away"), run.model, run.zygote), **GUEST | {"name": "away"}
    )
    elsewhere.ask()
    assert "put both runs on one volume" in elsewhere.state("Refused").reason
    unknown = AlgorithmConfig(loss=LossConfig(name="raising_loss:there_is_none"))
    wrong = Guest(run, make_run("wrong"), **GUEST | {"name": "wrong", "algorithm": unknown})
    wrong.ask()
    assert "algorithm.loss" in wrong.state("Refused").reason
    host.step(1)  # no run was disturbed
    group.kill(signal.SIGTERM)
    group.wait()


@pytest.mark.full
def test_killed_shared_runs_resume_bit_for_bit(
    make_run: Callable[[str], Run], alone: Callable[[str, int], list[dict[str, float]]]
) -> None:
    run, other = make_run("host"), make_run("guest")
    first = run.start(ranks=2, **HOST)
    host = Orchestrator(run, 1)
    host.wait_for("published", 0)
    guest = Guest(run, other, **GUEST)
    theirs_orchestrator = guest.join()
    mine = {step: host.step(step) for step in (1, 2, 3)}
    theirs = {step: theirs_orchestrator.step(step) for step in (1, 2, 3)}
    first.kill(signal.SIGKILL)
    first.wait()

    second = run.start(attempt=2, ranks=2, **HOST)
    host = Orchestrator(run, 2)
    host.wait_for("published", 2)
    assert guest.state("Left").reason == "the trainer of attempt 1 has ended; request a slot with a higher attempt"
    guest = Guest(run, other, attempt=2, **GUEST)
    theirs_orchestrator = guest.join()
    assert read_attempt(other.paths.attempt_file(2)).base_step == 2
    mine |= {step: host.step(step) for step in (3,)}
    theirs |= {step: theirs_orchestrator.step(step) for step in (3,)}
    # The guest requests a slot before its trainer has ended: unsaved steps of the previous attempt are trained again.
    guest = Guest(run, other, attempt=3, **GUEST)
    theirs_orchestrator = guest.join()
    assert read_attempt(other.paths.attempt_file(3)).base_step == 2
    theirs |= {step: theirs_orchestrator.step(step) for step in (3, 4)}
    mine |= {step: host.step(step) for step in (4,)}
    end(theirs_orchestrator)
    end(host)
    assert second.wait() == [0, 0], second.text()
    assert_same(mine, alone("host", 2))
    assert_same(theirs, alone("guest", 2))


@pytest.mark.full
def test_sigterm_saves_last_step_of_every_run(make_run: Callable[[str], Run]) -> None:
    run, other = make_run("host"), make_run("guest")
    group = run.start(checkpoint={"grace_period_seconds": 60}, **HOST)
    host = Orchestrator(run, 1)
    host.wait_for("published", 0)
    guest = Guest(run, other, **GUEST).join()
    host.step(1)
    for step in (1, 2, 3):
        guest.step(step)
    parts = [
        threading.Thread(target=orchestrator.complete_checkpoint, args=(step,))
        for orchestrator, step in ((host, 1), (guest, 3))
    ]
    for part in parts:
        part.start()
    group.kill(signal.SIGTERM)
    assert group.wait() == [128 + signal.SIGTERM], group.text()
    for part in parts:
        part.join()
    assert [c.step for c in complete_checkpoints(run.paths)] == [1]
    assert [c.step for c in complete_checkpoints(other.paths)] == [2, 3]
    assert "guest: stopped by SIGTERM after step 3\n" in group.text()
    left = shared_trainer_files.read_state(run.paths, "guest", 1)
    assert left is not None
    assert (left.state, left.step, left.exit_code) == ("Left", 3, exit_codes.ATTEMPT_TAKEN)
    assert left.reason == "it was stopped by SIGTERM"
