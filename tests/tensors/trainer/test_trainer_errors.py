"""Error messages, exit codes and the launcher's command."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import ModelConfig
from rlrun.diagnostics.symptoms import lost_peer
from rlrun.protocol.files.failures import ERROR_DIR_VARIABLE, RoleError, read_error, storage_errors, write_error
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.shard import check_source, load_model
from rlrun.trainer.ranks.group import device_for
from rlrun.trainer.ranks.launch import attempt_number, read_config, torchrun_command


def test_first_error_is_kept(tmp_path: Path) -> None:
    assert read_error(tmp_path) is None
    write_error(tmp_path / "logs", "trainer", RoleError("the cause", 65))
    write_error(tmp_path / "logs", "trainer", RoleError("a consequence", 1))
    error = read_error(tmp_path / "logs")
    assert error is not None
    assert (str(error), error.code) == ("the cause", 65)


def test_consequential_error_is_replaced_by_its_cause(tmp_path: Path) -> None:
    lost, cause = "Connection closed by peer", "rank 1 was ended by SIGSEGV"
    for told, found in (
        (RoleError(lost, follows=True), lost),
        (RoleError("Connection reset by peer", follows=True), lost),
        (RoleError(cause, 139), cause),
        (RoleError("a later one", 65), cause),
        (RoleError("Broken pipe", follows=True), cause),
    ):
        write_error(tmp_path, "trainer", told)
        error = read_error(tmp_path)
        assert error is not None
        assert str(error) == found
    assert (error.code, error.follows) == (139, False)


@pytest.mark.parametrize(
    ("raised", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:51000"), True),
        (RoleError("saving failed: ... Connection reset by peer"), True),
        (ZeroDivisionError("division by zero"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (RoleError("the model folder has no weights", 65), False),
    ],
)
def test_lost_connection_is_recognized(raised: Exception, lost: bool) -> None:
    assert lost_peer(raised) is lost
    wrapped = RoleError("the run failed")
    wrapped.__cause__ = raised
    assert lost_peer(wrapped) is lost


def test_error_falls_back_to_the_launchers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").write_text("in the way")
    (tmp_path / "private").mkdir()
    monkeypatch.setenv(ERROR_DIR_VARIABLE, str(tmp_path / "private"))
    write_error(tmp_path / "logs", "trainer", RoleError("the volume is full", exit_codes.STORAGE))
    write_error(None, "trainer", RoleError("a consequence"))
    error = read_error(tmp_path / "private")
    assert error is not None
    assert (str(error), error.code) == ("the volume is full", exit_codes.STORAGE)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_nested_storage_errors_are_recognized(number: int) -> None:
    wrapped = RuntimeError("wrapped")
    wrapped.__cause__ = OSError(number, "refused")
    with pytest.raises(RoleError, match="cannot save in /vol") as caught, storage_errors(Path("/vol"), "save"):
        raise wrapped
    assert caught.value.code == exit_codes.STORAGE


def test_other_errors_are_not_converted() -> None:
    with pytest.raises(PermissionError), storage_errors(Path("/vol"), "save"):
        raise PermissionError(errno.EACCES, "denied")


def test_model_folder_without_weights_is_refused_early(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = ModelConfig(path=str(folder))
    with pytest.raises(RoleError, match="is not a folder"):
        check_source(config, str(folder))
    folder.mkdir()
    with pytest.raises(RoleError, match=r"no config\.json"):
        check_source(config, str(folder))
    (folder / "config.json").write_text("{}")
    with pytest.raises(RoleError, match="no weights") as caught:
        check_source(config, str(folder))
    assert caught.value.code == exit_codes.DATA


def test_model_loading_error_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(RoleError, match=r"model_type in config\.json is 'no_such_family'") as caught:
        load_model(ModelConfig(path=str(tmp_path)), str(tmp_path))
    assert "\n" not in str(caught.value)


def test_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_for(0, 0).type == "cpu"
    with pytest.raises(RoleError, match="gpusPerReplica is 2") as caught:
        device_for(2, 0)
    assert caught.value.code == exit_codes.UNAVAILABLE


def test_configuration_and_attempt_number_are_validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RoleError, match="no such file"):
        read_config(tmp_path / "run.json")
    (tmp_path / "run.json").write_text('{"trainer": {}}')
    with pytest.raises(RoleError, match="model: required") as caught:
        read_config(tmp_path / "run.json")
    assert caught.value.code == exit_codes.CONFIGURATION
    monkeypatch.setenv("RLRUN_ATTEMPT", "0")
    with pytest.raises(RoleError, match="RLRUN_ATTEMPT"):
        attempt_number()


def test_torchrun_command_starts_every_local_rank() -> None:
    config = SimpleNamespace(world_size=4, checkpoint=CheckpointConfig(grace_period_seconds=40))
    command = torchrun_command(config, config_file=Path("/r/run.json"), rendezvous_port=1234, attempt=3)  # type: ignore[arg-type]
    assert command[:4] == [sys.executable, "-P", "-m", "rlrun.trainer.ranks.torchrun"]
    options = dict(zip(command[4::2], command[5::2], strict=False))
    assert options["--nproc-per-node"] == "4"
    assert options["--max-restarts"] == "0"
    assert int(options["--shutdown-timeout"]) > 40, "torchrun kills ranks that still save"
    assert options["--master-port"] == "1234"
    assert options["--rdzv-id"] == "3"
    assert command[-2:] == ["--config", "/r/run.json"]
