"""Whole runs: real orchestrator with stubs of trainer and engine, each as its own process, without torch."""

from __future__ import annotations

import json
import re
import signal
import statistics
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from stub_run import Program, StubRun, stub_forks, stub_run

from rlrun.config.models.run_config import config_fingerprint
from rlrun.local.preflight import free_port
from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints, read_manifest, verify_files
from rlrun.protocol.files.failures import read_error
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints.unsaved import FIRST_RETRY_SECONDS
from tests.support.stub.policy import Policy
from tests.support.stub.script import PolicyScript


def finish_run(run: StubRun, attempt: int = 1) -> None:
    """Start trainer and orchestrator, and assert that both succeed."""
    trainer, orchestrator = run.start("trainer", attempt), run.start("orchestrator", attempt)
    assert run.wait(orchestrator) == exit_codes.OK, run.state()
    assert run.wait(trainer) == exit_codes.OK, run.state()


def list_checkpoint_steps(run: StubRun) -> list[int]:
    """Return the steps of complete checkpoints."""
    return [checkpoint.step for checkpoint in complete_checkpoints(run.paths)]


HANG = {"attempt": 1, "step": 7, "action": "hang"}


def kill_where_it_hangs(run: StubRun, trainer: Program) -> None:
    """Kill the trainer in step 7, once the checkpoint of step 5 is complete: the duration depends on the disk."""
    run.until(lambda: len(complete_checkpoints(run.paths)) == 1, "the checkpoint of step 5 is complete")
    run.until(lambda: "script: hang in attempt 1, step 7" in run.log("trainer").read_text(), "the trainer hangs")
    trainer.kill()
    assert run.wait(trainer) == -signal.SIGKILL


def cpu_of_ended_programs() -> float:
    """Return CPU seconds; unlike wall time, they hardly depend on other load of the machine."""
    return sum(psutil.Process(stub_forks().pid).cpu_times()[2:4])


def test_thirty_steps_end_with_rising_reward_and_complete_files(tmp_path: Path) -> None:
    with stub_run(tmp_path) as run:
        last = tmp_path / "last"
        waits = {"step": 30, "action": "wait", "file": str(last)}
        run.script(trainer={"stepSeconds": 0.02, "faults": [waits]}, policy={"halfLifeSteps": 5})
        assert run.wait(run.start("model")) == exit_codes.OK, run.state()
        before = cpu_of_ended_programs()
        engine, trainer, orchestrator = run.start("inference"), run.start("trainer"), run.start("orchestrator")
        run.until(
            lambda: list_checkpoint_steps(run) == [20, 25],
            "the checkpoint of step 25 is complete, and that of step 15 gone",
        )
        last.touch()
        assert run.wait(orchestrator) == exit_codes.OK, run.state()
        assert run.wait(trainer) == exit_codes.OK, run.state()
        engine.send_signal(signal.SIGTERM)
        assert run.wait(engine) == exit_codes.OK, run.state()
        took = cpu_of_ended_programs() - before
        lines = run.metrics()
        assert [line["step"] for line in lines] == list(range(1, 31))
        first, last = (statistics.fmean(line["reward/mean"] for line in part) for part in (lines[:5], lines[-5:]))
        assert first < 0.6, first
        assert last > 0.85, last
        assert 0.2 < took < 13, f"the three processes took {took:.1f} s of CPU without imports; it was 4 s"
        attempt = read_attempt(run.paths.attempt_file(1))
        found = attempt.owned(complete_checkpoints(run.paths))
        assert [checkpoint.step for checkpoint in found] == [25, 30]
        for checkpoint in found:
            manifest = read_manifest(checkpoint.path)
            verify_files(checkpoint.path, manifest)
            assert manifest.config_hash == attempt.config_hash == config_fingerprint(run.config.trainer)
            assert {entry.path.split("/")[0] for entry in manifest.files} == {"trainer", "orchestrator"}
        # The three newest versions, and the versions of checkpoints that existed at the last publication.
        assert [version.step for version in run.paths.versions_on_disk()] == [20, 25, 28, 29, 30]
        assert not list(run.paths.root.rglob("*.tmp"))
        assert "Traceback" not in run.state()


def test_fine_tuning_ends_with_data_and_resumes_mid_epoch(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}]
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    rows.write_text(f"{json.dumps({'messages': chat})}\n" * 44)
    held_out.write_text(f"{json.dumps({'messages': chat})}\n" * 3)
    data = {
        "sources": [{"path": str(rows)}],
        "batch_size": 4,
        "epochs": 1,
        "validation": {"path": str(held_out), "interval": 4},
    }
    with stub_run(tmp_path, task="SFT", orchestrator={"data": data}) as run:
        run.script(trainer={"stepSeconds": 0.02, "faults": [HANG]})
        assert run.wait(run.start("model")) == exit_codes.OK
        orchestrator = run.start("orchestrator")
        kill_where_it_hangs(run, run.start("trainer"))
        orchestrator.send_signal(signal.SIGTERM)
        run.wait(orchestrator)
        finish_run(run, attempt=2)
        lines = run.metrics()
        assert [(line["step"], line["attempt"]) for line in lines if line["step"]] == [
            *((step, 1) for step in range(1, 6)),
            *((step, 2) for step in range(6, 12)),
        ], "44 rows are 11 steps of 4, though maxSteps is 30"
        losses = {line["step"]: line["validation/loss"] for line in lines if "validation/loss" in line}
        assert list(losses) == [0, 4, 8, 11], "before the first step, every fourth, and after the last"
        assert sorted(losses.values(), reverse=True) == list(losses.values())
        found = read_attempt(run.paths.attempt_file(2)).owned(complete_checkpoints(run.paths))
        assert [checkpoint.step for checkpoint in found] == [10, 11]


def test_next_attempt_resumes_from_checkpoint_after_kill(tmp_path: Path) -> None:
    with stub_run(tmp_path, max_steps=12) as run:
        run.script(trainer={"stepSeconds": 0.02, "faults": [HANG]})
        assert run.wait(run.start("model")) == exit_codes.OK
        run.start("inference")
        orchestrator, trainer = run.start("orchestrator"), run.start("trainer")
        kill_where_it_hangs(run, trainer)
        orchestrator.send_signal(signal.SIGTERM)
        assert run.wait(orchestrator) == 128 + signal.SIGTERM
        assert run.trained(1) == [1, 2, 3, 4, 5, 6]
        finish_run(run, attempt=2)
        assert run.trained(2) == list(range(6, 13))
        second = read_attempt(run.paths.attempt_file(2))
        assert (second.base_step, second.base_attempt) == (5, 1)
        lines = run.metrics()
        assert [line["step"] for line in lines] == list(range(1, 13))
        assert [line["attempt"] for line in lines] == [1] * 5 + [2] * 7
        policy, wanted = Policy(0, PolicyScript().first), []
        for _ in lines:
            policy = policy.trained(PolicyScript())
            wanted.append(policy.checksum)
        assert [line["param_checksum"] for line in lines] == wanted


def test_engine_killed_during_update_is_replaced(tmp_path: Path) -> None:
    with stub_run(tmp_path, max_steps=8) as run:
        run.script(inference={"faults": [{"version": 3, "action": "exit", "code": 3}]})
        assert run.wait(run.start("model")) == exit_codes.OK
        engine = run.start("inference")
        trainer, orchestrator = run.start("trainer"), run.start("orchestrator")
        assert run.wait(engine) == 3, run.state()
        run.start("inference", name="replacement")
        assert run.wait(orchestrator) == exit_codes.OK, run.state()
        assert run.wait(trainer) == exit_codes.OK
        assert list_versions(run, "replacement")[0] >= 3, "a new engine gets the present version, and none of before"


def list_versions(run: StubRun, name: str = "inference") -> list[int]:
    """Return the versions that an engine received, in order."""
    return [int(step) for step in re.findall(r"holds version (\d+)", run.log(name).read_text())]


def kill_processes(run: StubRun, *processes: Program) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        assert run.wait(process) == -signal.SIGKILL


@pytest.mark.full
def test_engine_loads_model_once_despite_other_failures(tmp_path: Path) -> None:
    """The trainer, the orchestrator, or both fail; each time the running engine receives the checkpoint's version again."""
    with stub_run(tmp_path, max_steps=18) as run:
        hangs = [{"attempt": n, "step": 5 * n + 2, "action": "hang"} for n in (1, 2, 3)]
        run.script(trainer={"stepSeconds": 0.02, "faults": hangs})
        assert run.wait(run.start("model")) == exit_codes.OK
        engine = run.start("inference")
        for attempt in (1, 2, 3):
            trainer, orchestrator = run.start("trainer", attempt), run.start("orchestrator", attempt)
            checkpoint = 5 * attempt
            run.until(
                lambda base=checkpoint: any(c.step == base for c in complete_checkpoints(run.paths)),
                f"the checkpoint of step {checkpoint} is complete",
            )
            run.until(
                lambda last=checkpoint + 1: list_versions(run)[-1:] == [last],
                f"the engine holds version {checkpoint + 1}",
            )
            if attempt == 2:
                kill_processes(run, orchestrator)
                kill_processes(run, trainer)  # The trainer hangs, so no other event ends it.
            else:
                kill_processes(run, trainer)
                orchestrator.send_signal(signal.SIGTERM if attempt == 1 else signal.SIGKILL)
                run.wait(orchestrator)
        finish_run(run, attempt=4)
        assert engine.poll() is None
        assert run.log("inference").read_text().count("loads the model") == 1
        versions = list_versions(run)
        assert [now for before, now in pairwise(versions) if now <= before] == [5, 10, 15]


@pytest.mark.full
def test_scripted_trainer_exit_has_its_code(tmp_path: Path) -> None:
    with stub_run(tmp_path, max_steps=6) as run:
        run.script(trainer={"stepSeconds": 0, "faults": [{"step": 2, "action": "exit", "code": 78}]})
        assert run.wait(run.start("model")) == exit_codes.OK
        run.start("inference")
        run.start("orchestrator")
        assert run.wait(run.start("trainer")) == exit_codes.CONFIGURATION, run.state()
        assert read_error(run.paths.logs(1, "trainer")) is None
        assert complete_checkpoints(run.paths) == []


@pytest.mark.full
def test_failed_checkpoint_on_full_volume_is_retried_during_training(tmp_path: Path) -> None:
    with stub_run(tmp_path, max_steps=7) as run:
        last = tmp_path / "last"
        faults = [
            {"step": 5, "action": "disk_full", "seconds": 1},
            {
                "step": 6,
                "action": "slow_step",
                "seconds": FIRST_RETRY_SECONDS,
            },  # The retry is due in this step even on a slow machine.
            {"step": 7, "action": "wait", "file": str(last)},
        ]
        run.script(trainer={"stepSeconds": 0, "faults": faults})
        assert run.wait(run.start("model")) == exit_codes.OK
        run.start("inference")
        trainer, orchestrator = run.start("trainer"), run.start("orchestrator")
        run.until(
            lambda: list_checkpoint_steps(run) == [6],
            "the checkpoint is made up for, though step 6 is not one of the interval",
        )
        last.touch()
        assert run.wait(orchestrator) == exit_codes.OK, run.state()
        assert run.wait(trainer) == exit_codes.OK, run.state()
        assert run.trained(1) == [1, 2, 3, 4, 5, 6, 7]
        log = run.log("trainer").read_text()
        assert "cannot save a checkpoint: the volume is full" in log
        assert "step 5: the checkpoint is complete" not in log
        assert list_checkpoint_steps(run) == [6, 7]
        assert "the volume works again (could not save a checkpoint since" in log


@pytest.mark.full
def test_scripted_trainer_is_slow_and_hangs(tmp_path: Path) -> None:
    with stub_run(tmp_path, max_steps=6) as run:
        faults = [
            {"step": 2, "action": "slow_step", "seconds": 2},
            {"step": 5, "action": "slow_save", "seconds": 0.4},
            {"step": 6, "action": "hang"},
        ]
        run.script(trainer={"startSeconds": 0.4, "stepSeconds": 0.1, "faults": faults})
        assert run.wait(run.start("model")) == exit_codes.OK
        run.start("inference")
        trainer, base = run.start("trainer"), run.paths.version(0, 1)
        run.until(base.exists, "the base version is published")
        assert base.stat().st_mtime - read_attempt(run.paths.attempt_file(1)).started_at > 0.4
        run.start("orchestrator")
        run.until(lambda: "script: hang in attempt 1, step 6" in run.log("trainer").read_text(), "the trainer hangs")
        run.until(lambda: len(run.metrics()) == 5, "five steps are told of")
        lines = {line["step"]: line for line in run.metrics()}
        assert lines[2]["time/forward_backward"] > 2
        assert lines[1]["time/forward_backward"] > 0.1
        assert re.findall(r"script: slow_step in attempt 1, step (\d+)", run.log("trainer").read_text()) == ["2"]
        assert lines[5]["time/save_ckpt"] > 0.4
        trainer.send_signal(signal.SIGTERM)
        assert run.wait(trainer) == 128 + signal.SIGTERM
        assert run.trained(1) == [1, 2, 3, 4, 5]


@pytest.mark.full
def test_two_pod_trainer_fails_and_restarts_together(tmp_path: Path) -> None:
    pods = {"replicas": 2}
    with stub_run(tmp_path, max_steps=6, trainer=pods) as run:
        run.script(trainer={"faults": [{"attempt": 1, "step": 3, "pod": 1, "action": "sigkill"}]})
        assert run.wait(run.start("model")) == exit_codes.OK
        run.start("inference")
        environment = {"RLRUN_NNODES": "2", "RLRUN_MASTER_ADDR": "127.0.0.1"}
        for attempt, codes in ((1, [exit_codes.FAILURE, -signal.SIGKILL]), (2, [exit_codes.OK, exit_codes.OK])):
            environment["RLRUN_MASTER_PORT"] = str(free_port())
            second = run.start("trainer", attempt, name="second", RLRUN_POD_NAME="stub-trainer-1", **environment)
            first = run.start("trainer", attempt, RLRUN_POD_NAME="stub-trainer-0", **environment)
            orchestrator = run.start("orchestrator", attempt)
            assert [run.wait(first), run.wait(second)] == codes, run.state()
            if attempt == 1:
                assert "trainer pod 1 is gone" in str(read_error(run.paths.logs(1, "trainer")))
                orchestrator.send_signal(signal.SIGTERM)
            run.wait(orchestrator)
        assert read_attempt(run.paths.attempt_file(2)).world_size == 2
        assert [line["step"] for line in run.metrics()] == list(range(1, 7))


def test_second_pod_ends_with_the_first(tmp_path: Path) -> None:
    with stub_run(tmp_path, max_steps=6, trainer={"replicas": 2}) as run:
        assert run.wait(run.start("model")) == exit_codes.OK
        environment = {"RLRUN_NNODES": "2", "RLRUN_MASTER_ADDR": "127.0.0.1"}
        environment["RLRUN_MASTER_PORT"] = str(free_port())
        second = run.start("trainer", name="second", RLRUN_POD_NAME="stub-trainer-1", **environment)
        first = run.start("trainer", RLRUN_POD_NAME="stub-trainer-0", **environment)
        run.until(lambda: "is in the group" in run.log("second").read_text(), "the second pod is in the group")
        first.kill()
        assert run.wait(second) == exit_codes.FAILURE
        assert "trainer pod 0 is gone" in run.log("second").read_text()


def test_stopped_group_saves_its_last_step(tmp_path: Path) -> None:
    with stub_run(tmp_path, max_steps=1000, trainer={"replicas": 2}) as run:
        run.script(trainer={"stepSeconds": 0.05})
        assert run.wait(run.start("model")) == exit_codes.OK
        run.start("inference")
        environment = {"RLRUN_NNODES": "2", "RLRUN_MASTER_ADDR": "127.0.0.1", "RLRUN_MASTER_PORT": str(free_port())}
        second = run.start("trainer", name="second", RLRUN_POD_NAME="stub-trainer-1", **environment)
        first = run.start("trainer", RLRUN_POD_NAME="stub-trainer-0", **environment)
        run.start("orchestrator")
        run.until(lambda: run.paths.metrics.exists() and len(run.metrics()) >= 7, "seven steps are told of")
        second.send_signal(signal.SIGTERM)
        assert [run.wait(first), run.wait(second)] == [128 + signal.SIGTERM] * 2, run.state()
        assert complete_checkpoints(run.paths)[-1].step == run.trained(1)[-1], run.state()
