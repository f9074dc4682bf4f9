"""Orchestrator as a process and over HTTP: exit codes, messages, progress, signals."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from orch_simulation import API_KEY, FakeEngine, FakeTrainer, eventually, make_config, simulate

import rlrun
from rlrun.config.models.roles import OrchestratorConfig
from rlrun.diagnostics import heap
from rlrun.local.preflight import free_port
from rlrun.orchestrator import main as role
from rlrun.orchestrator.aio import volume_access
from rlrun.orchestrator.attempt import first_cause
from rlrun.orchestrator.journal import journal_writer
from rlrun.orchestrator.progress import metrics_file
from rlrun.orchestrator.trainer import trainer_client
from rlrun.orchestrator.trainer.trainer_client import TrainerClient, TrainerGoneError
from rlrun.protocol.files import batch as batch_module
from rlrun.protocol.files import volume_faults
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from tests.support.program_forks import program_forks
from tests.support.programs import finish
from tests.support.python_path import before
from tests.support.waiting import UNREACHED_SECONDS, result_of, wait_until_async

ROOT = Path(rlrun.__file__).parent.parent


def write_config(tmp_path: Path, tokenizer: Path, **changes: object) -> Path:
    file = tmp_path / "run.json"
    file.write_text(make_config(tmp_path / "out", tokenizer, **changes).model_dump_json())
    return file


def error_json(tmp_path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((tmp_path / "out/logs/attempt_0001/orchestrator/error.json").read_text())
    return found


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLRUN_ATTEMPT", "1")
    monkeypatch.setenv("RLRUN_API_KEY", API_KEY)


@pytest.mark.usefixtures("identity")
def test_used_metrics_port_is_one_clear_message(tmp_path: Path, tokenizer_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = role.main(["--config", str(write_config(tmp_path, tokenizer_folder, metrics_port=port))])
    assert code == exit_codes.UNAVAILABLE
    found = error_json(tmp_path)
    assert found["role"] == "orchestrator"
    assert found["exit_code"] == exit_codes.UNAVAILABLE
    assert f"127.0.0.1:{port}" in str(found["message"])
    assert "\n" not in str(found["message"])


@pytest.mark.usefixtures("identity")
def test_unknown_environment_is_named_with_closest_name(tmp_path: Path, tokenizer_folder: Path) -> None:
    config = write_config(tmp_path, tokenizer_folder, environments=[{"id": "reverse-txt"}])
    assert role.main(["--config", str(config)]) == exit_codes.CONFIGURATION
    assert "environments[0]" in str(error_json(tmp_path)["message"])
    assert "did you mean reverse-text" in str(error_json(tmp_path)["message"])


def test_missing_configuration_and_variable_are_named(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RLRUN_ATTEMPT", raising=False)
    assert role.main(["--config", str(tmp_path / "none.json")]) == exit_codes.CONFIGURATION
    assert "none.json" in capfd.readouterr().err
    assert role.main(["--config", str(write_config(tmp_path, tokenizer_folder))]) == exit_codes.USAGE
    assert "RLRUN_ATTEMPT" in capfd.readouterr().err


@pytest.mark.usefixtures("identity")
def test_orchestrator_slices_garbage_collection_after_load(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    async def run(config: object, **options: Any) -> int:
        asked.append(options["loaded"])
        return exit_codes.OK

    monkeypatch.setattr(role, "orchestrate_attempt", run)
    assert role.main(["--config", str(write_config(tmp_path, tokenizer_folder))]) == exit_codes.OK
    assert [loaded.__func__ for loaded in asked] == [heap.Slices.begin]


def test_sigterm_ends_process_with_its_own_code(tmp_path: Path, tokenizer_folder: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, tokenizer_folder, metrics_port=port, trainer_url=f"http://127.0.0.1:{free_port()}")
    env = os.environ | {"RLRUN_ATTEMPT": "1", "RLRUN_API_KEY": API_KEY, "PYTHONPATH": before(ROOT)}
    with program_forks().open("rlrun.orchestrator", "--config", str(config), environment=env) as process:
        for line in process.stderr:
            if "waiting for the trainer" in line:
                break
        process.send_signal(signal.SIGTERM)
        _, rest = finish(cast("subprocess.Popen[str]", process))
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by a signal" in rest
    assert "Traceback" not in rest


async def test_stopped_orchestrator_helps_trainer_complete_checkpoint(tmp_path: Path, tokenizer_folder: Path) -> None:
    stop, seen = role.Stop(), {}
    config = make_config(tmp_path, tokenizer_folder, max_steps=1000, checkpoint={"interval": 1000})

    async def world(trainer: FakeTrainer) -> None:
        await eventually(lambda: len(trainer.batches) >= 3)
        trainer.task.cancel()
        assert stop.first()
        assert stop.act is not None
        stop.act()
        step = len(trainer.batches)
        folder = trainer.paths.checkpoint(step, 1)
        (folder / "trainer").mkdir(parents=True)
        trainer.channel.append_event("checkpoint_saved", step, path=folder)
        await eventually(lambda: (folder / "manifest.json").exists())
        seen["state"] = json.loads((folder / "orchestrator/state.json").read_text())["step"]
        seen["step"] = step
        await trainer.fall_silent()

    outcome = await simulate(config, during=world, step_seconds=lambda: 0.02, stop=stop)
    assert outcome.code == 128 + signal.SIGTERM
    assert seen["state"] == seen["step"] >= 3


async def test_stopped_orchestrator_makes_trainer_save(tmp_path: Path, tokenizer_folder: Path) -> None:
    stop = role.Stop()
    config = make_config(tmp_path, tokenizer_folder, max_steps=1000, checkpoint={"interval": 1000})
    asked = threading.Event()

    async def world(trainer: FakeTrainer) -> None:
        trainer.channel.stop = asked.set
        await eventually(lambda: len(trainer.batches) >= 2)
        assert stop.first()
        assert stop.act is not None
        stop.act()
        await asyncio.to_thread(asked.wait, 20)
        await trainer.fall_silent()

    outcome = await simulate(config, during=world, step_seconds=lambda: 0.02, stop=stop)
    assert asked.is_set()
    assert outcome.code == 128 + signal.SIGTERM


async def test_stop_does_not_wait_for_vanished_trainer() -> None:
    """No host refuses a connection to an address without an owner."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    client = TrainerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", API_KEY, attempt=1)
    following = asyncio.create_task(asyncio.sleep(3600))
    client.ending = True
    await result_of(client.stop_and_wait(following, UNREACHED_SECONDS), "an end before the grace period")
    assert not following.done(), "its owner ends it"
    following.cancel()
    await client.close()
    server.close()


async def test_stop_tolerates_trainer_that_stopped_first(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = role.Stop()
    real, told = TrainerClient.batch_ready, asyncio.Event()

    async def ready(client: TrainerClient, step: int, path: str) -> None:
        if step < 3:
            await real(client, step, path)
            return
        assert stop.first()
        assert stop.act is not None
        stop.act()
        told.set()
        raise TrainerGoneError  # The error comes in the same turn of the event loop, before any cancellation.

    async def world(trainer: FakeTrainer) -> None:
        await told.wait()
        await trainer.fall_silent()

    monkeypatch.setattr(TrainerClient, "batch_ready", ready)
    config = make_config(tmp_path, tokenizer_folder, max_steps=1000, checkpoint={"interval": 1000})
    outcome = await simulate(config, during=world, stop=stop)
    assert outcome.code == 128 + signal.SIGTERM


async def test_progress_and_metrics_show_state_of_run(tmp_path: Path, tokenizer_folder: Path) -> None:
    seen: dict[str, object] = {}
    config = make_config(tmp_path, tokenizer_folder, evaluation={"interval": 100, "num_tasks": 2}, max_steps=4)

    async def world(trainer: FakeTrainer) -> None:
        base = f"http://127.0.0.1:{seen['port']}"
        async with aiohttp.ClientSession() as session:
            await eventually(lambda: len(trainer.batches) == 2)
            async with session.get(f"{base}/rlrun/progress") as answer:
                seen["refused"] = answer.status
            async with session.get(f"{base}/health") as answer:
                seen["health"] = answer.status
            headers = {"Authorization": f"Bearer {API_KEY}"}
            progress: dict[str, object] = {}
            while progress.get("policy_version") != 2 or "training, step 3" not in str(progress["waiting_on"]):
                async with session.get(f"{base}/rlrun/progress", headers=headers) as answer:
                    progress = await answer.json()
            seen["progress"] = progress
            async with session.get(f"{base}/metrics") as answer:
                seen["metrics"] = await answer.text()
        seen["done"] = True

    seen["port"] = config.metrics_port
    seconds = iter([0.3, 0.3])  # The third step is observed for this long.
    await simulate(config, during=world, step_seconds=lambda: next(seconds, 60), until=lambda trainer: "done" in seen)
    assert seen["refused"] == 401
    assert seen["health"] == 200
    progress = seen["progress"]
    assert isinstance(progress, dict)
    assert progress["max_steps"] == 4
    assert progress["step"] == 2
    assert progress["policy_version"] == 2
    assert progress["checkpoint_step"] in (None, 2)
    assert progress["resumed_from_step"] is None
    assert 0 <= progress["reward"] <= 1
    assert "reverse-text" in progress["eval"]
    assert progress["tokens_per_second"] == 10.0
    assert progress["eta_seconds"] > 0
    assert progress["waiting_on"].startswith("trainer: training, step 3 since ")
    text = str(seen["metrics"])
    assert "rlrun_step 2.0" in text
    assert "rlrun_policy_version 2.0" in text
    assert "rlrun_rollouts_readmitted_total 0.0" in text
    assert 'rlrun_eval_reward_mean{environment="reverse-text"}' in text


async def read_progress_while_waiting(config: OrchestratorConfig, waiting_on: str) -> dict[str, Any]:
    """Return the progress of the run once it waits for `waiting_on`; the endpoint responds even if the volume does not."""
    url, headers = f"http://127.0.0.1:{config.metrics_port}/rlrun/progress", {"Authorization": f"Bearer {API_KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        told: dict[str, Any] = {}

        async def waits() -> bool:
            with suppress(aiohttp.ClientConnectionError):  # The server is not up yet.
                async with session.get(url) as answer:
                    told.update(await answer.json())
            return waiting_on in told.get("waiting_on", "")

        await wait_until_async(waits, f"the run waits: {waiting_on}", state=lambda: told)
        return told


@pytest.mark.parametrize("end", ["space", "signal"])
async def test_run_waits_for_full_volume_until_space_or_stop(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    config, stop, seen = make_config(tmp_path, tokenizer_folder, max_steps=3), role.Stop(), dict[str, Any]()
    real = batch_module.save

    def full(columns: Any) -> bytes:
        if "space" not in seen:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(columns)

    monkeypatch.setattr(batch_module, "save", full)

    async def world(trainer: FakeTrainer) -> None:
        seen["told"] = await read_progress_while_waiting(config, "cannot write the batch of step 1 since")
        if end == "space":
            seen["space"] = True
            return
        assert stop.first()
        assert stop.act is not None
        stop.act()
        await trainer.fall_silent()

    outcome = await simulate(config, during=world, stop=stop)
    assert seen["told"]["storage"]["reason"] == "StorageFull"
    assert seen["told"]["waiting_on"].startswith("the volume is full: ")
    if end == "signal":
        assert outcome.code == 128 + signal.SIGTERM
        assert outcome.paths.batches_on_disk() == []
    else:
        assert outcome.code == exit_codes.OK
        assert len(outcome.trainer.batches) == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
async def test_failed_writes_of_optional_files_do_not_stop_run(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    for write in ("append_line", "keep_metrics", "write_bytes"):
        monkeypatch.setattr(metrics_file, write, refuse)
    evaluation = {"interval": 2, "num_tasks": 2}
    outcome = await simulate(make_config(tmp_path, tokenizer_folder, max_steps=4, evaluation=evaluation))
    assert outcome.code == exit_codes.OK
    assert len(outcome.trainer.batches) == 4
    assert not (tmp_path / "metrics.jsonl").exists()


async def test_hanging_volume_blocks_neither_progress_nor_stop(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stop, seen = make_config(tmp_path, tokenizer_folder, max_steps=3), role.Stop(), dict[str, Any]()
    hanging = threading.Event()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if "hangs" in seen:
            hanging.wait()  # Like a missing NFS server.
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "fdatasync", fsync)
    monkeypatch.setattr(volume_faults, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr(journal_writer, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(volume_access, "CLOSE_SECONDS", 0.1)

    async def world(trainer: FakeTrainer) -> None:
        await eventually(lambda: bool(trainer.batches))
        seen["hangs"] = True
        seen["told"] = (await read_progress_while_waiting(config, "the volume does not answer"))["storage"]
        assert stop.first()
        assert stop.act is not None
        stop.act()
        await trainer.fall_silent()

    try:
        outcome = await simulate(config, during=world, stop=stop, step_seconds=lambda: 0.2)
    finally:
        hanging.set()
    assert seen["told"]["reason"] == "StorageSlow"
    assert outcome.code == 128 + signal.SIGTERM


async def test_run_without_engines_fails_with_reason(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlrun.orchestrator.engines import weight_sync

    monkeypatch.setattr(weight_sync, "STARTUP_SECONDS", 2.0)
    monkeypatch.setattr(weight_sync, "_CHECK_SECONDS", 0.05)
    with pytest.raises(ExceptionGroup) as caught:
        await simulate(make_config(tmp_path, tokenizer_folder), engines=[FakeEngine(down=True)])
    cause = first_cause(caught.value)
    assert isinstance(cause, RoleError)
    assert cause.code == exit_codes.FAILURE
    assert "http://engine-0: connection refused" in str(cause)


async def test_silent_trainer_ends_run_for_restart(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_client, "SILENCE_SECONDS", 0.2)

    async def world(trainer: FakeTrainer) -> None:
        await eventually(lambda: bool(trainer.batches))
        await trainer.fall_silent()

    with pytest.raises(ExceptionGroup) as caught:
        await simulate(make_config(tmp_path, tokenizer_folder, max_steps=1000), during=world, step_seconds=lambda: 0.05)
    cause = first_cause(caught.value)
    assert isinstance(cause, RoleError)
    assert cause.code == exit_codes.FAILURE
    assert "has not answered for" in str(cause)


async def test_wrong_trainer_key_is_a_configuration_error(tmp_path: Path, tokenizer_folder: Path) -> None:
    refused: list[BaseException] = []

    async def world(trainer: FakeTrainer) -> None:
        client = TrainerClient(trainer.url, "wrong", attempt=1)
        try:
            await client.wait_until_ready(60.0)
        except RoleError as error:
            refused.append(error)
        finally:
            await client.close()

    await simulate(make_config(tmp_path, tokenizer_folder), during=world, until=lambda trainer: bool(refused))
    (error,) = refused
    assert isinstance(error, RoleError)
    assert error.code == exit_codes.CONFIGURATION
    assert "RLRUN_API_KEY" in str(error)
