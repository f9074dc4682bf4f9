"""Restarts of helpers with keys of trackers and storage: each start has the configuration of the first."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlrun.runtime.processes import descriptor_path, seal_file
from rlrun.tracking.sink_starter import SinkProcess
from tests.support.programs import wait_for
from tests.support.python_path import before

PROGRAM = """
import errno, json, pathlib, sys, time
path = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
try:
    path.write_text("{}")
    change = "done"
except OSError as error:
    change = errno.errorcode[error.errno]
print(json.dumps([json.loads(path.read_text()), change]), flush=True)
time.sleep(600)
"""


def test_restarted_helper_reads_the_first_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlrun.tracking.sink_starter._PAUSE_SECONDS", 0.0)
    (tmp_path / "helper_program.py").write_text(PROGRAM)
    config, log = tmp_path / "run.json", tmp_path / "helper.log"
    config.write_text(json.dumps({"uri": "https://mine"}))
    environ = os.environ | {"PYTHONPATH": before(str(tmp_path))}
    helper = SinkProcess(config, tmp_path, environ, module="helper_program", log=log)
    config.write_text(json.dumps({"uri": "https://attacker"}))

    def has_printed(count: int) -> bool:
        helper.keep_running()
        return log.exists() and log.read_text().count("\n") >= count

    try:
        wait_for(lambda: has_printed(1))
        assert helper._process is not None
        helper._process.kill()
        wait_for(lambda: has_printed(2))
    finally:
        helper.stop(hurry=lambda: True)
    assert [json.loads(line) for line in log.read_text().splitlines()] == [[{"uri": "https://mine"}, "EPERM"]] * 2


def test_sealed_file_cannot_be_unsealed_or_changed() -> None:
    descriptor = seal_file(b"content")
    try:
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        with pytest.raises(PermissionError):
            descriptor_path(descriptor).write_bytes(b"x")
        assert descriptor_path(descriptor).read_bytes() == b"content"
    finally:
        os.close(descriptor)
