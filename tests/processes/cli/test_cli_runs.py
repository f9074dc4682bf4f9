"""Commands on runs as programs: their imports, their kubectl calls, and the launcher that they stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlrun.protocol.files.launcher_record import LauncherRecord, read_record
from tests.support.programs import run_program, wait_for, wait_for_exit

HEAVY = [
    *("torch", "numpy", "rich", "plotext", "kubernetes", "aiohttp", "transformers"),
    *(
        "rlrun.config.models.run_config",
        "rlrun.local.local_command",
        "rlrun.api.resource",
        "rlrun.environments",
        "rlrun.cli.rl",
        "rlrun.fit",
    ),
]
FAKE = """#!/bin/sh
case "$*" in
  *"get rlruns.rlrun.io a"*) cat "$FAKE_RUN" ;;
  *"get rlruns"*) echo 'Error from server (NotFound): rlruns.rlrun.io "b" not found' >&2; exit 1 ;;
  *"get pods"*) cat "$FAKE_PODS" ;;
  *"tar -C /data/a"*) tar -C "$FAKE_FILES" -cf - -- metrics.jsonl; exit "${FAKE_CODE:-0}" ;;
  *get*) echo '{"items": []}' ;;
  *logs*) echo "the log of $*" ;;
esac
"""
LAUNCHER = """
import signal, sys, time
from pathlib import Path
from dataclasses import replace
from rlrun.protocol.files.launcher_record import new_record, write_record
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
path = Path(sys.argv[1])
write_record(path, new_record("a", 1, "rlrun local a.yaml --resume"))
while not asked:
    time.sleep(0.02)
write_record(path, replace(new_record("a", 1, "rlrun local a.yaml --resume"), state="Interrupted"))
"""


def run_rlrun(*words: str, path: str = os.environ["PATH"], **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path, **more}
    command = [sys.executable, "-m", "rlrun.cli.main", *words]
    return run_program(command, env=environment)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    (root / "run.json").write_text(json.dumps({"trainer": {"name": "a", "max_steps": 10}}))
    return root


@pytest.mark.parametrize(
    "words", [["--help"], ["get", "RUN"], ["status", "RUN"], ["why", "RUN"], ["completion", "bash"]]
)
def test_run_commands_import_no_slow_modules(run: Path, words: list[str]) -> None:
    code = (
        "import sys; from rlrun.cli.main import main; code = main(sys.argv[2:]); "
        "heavy = [name for name in sys.argv[1].split() if name in sys.modules]; sys.exit(f'imported: {heavy}' if heavy else code)"
    )
    argv = [str(run) if word == "RUN" else word for word in words]
    done = run_program([sys.executable, "-c", code, " ".join(HEAVY), *argv])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["version"]])
def test_command_imports_no_other_commands(words: list[str]) -> None:
    code = (
        "import sys; from rlrun.cli.main import main; main(sys.argv[1:]); "
        "print(*sorted(name for name in sys.modules if name.startswith('rlrun.cli.')))"
    )
    done = run_program([sys.executable, "-c", code, *words], check=True)
    commands = {"rlrun.cli.version"} if words == ["version"] else set()
    assert set(done.stdout.splitlines()[-1].split()) == {"rlrun.cli.command_options", "rlrun.cli.main"} | commands


def test_each_command_is_importable() -> None:
    code = "from rlrun.cli.main import COMMANDS; [one.run.import_function() for one in COMMANDS.values()]"
    done = run_program([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_cluster_commands_use_kubectl_on_path(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(FAKE)
    kubectl.chmod(0o755)
    answer = tmp_path / "run.json"
    status = {"phase": "Running", "attempt": 1, "conditions": [], "storage": {"claimName": "c", "path": "/data/a"}}
    answer.write_text(json.dumps({"metadata": {"name": "a", "namespace": "team"}, "spec": {}, "status": status}))
    none = tmp_path / "none.json"
    none.write_text('{"items": []}')
    path = f"{tmp_path}:{os.environ['PATH']}"
    told = run_rlrun("why", "a", path=path, FAKE_RUN=str(answer), FAKE_PODS=str(none))
    assert (told.returncode, told.stdout.splitlines()[0]) == (0, "a (namespace team): Running (attempt 1)"), told.stderr
    missing = run_rlrun("why", "b", path=path, FAKE_RUN=str(answer), FAKE_PODS=str(none))
    assert (missing.returncode, missing.stderr) == (
        64, "rlrun why: there is no run b in this namespace; `rlrun get -A` lists the runs of all namespaces\n",
    )  # fmt: skip
    without = run_rlrun("why", "a", path=str(tmp_path / "nothing"))
    assert without.returncode == 69
    assert "kubectl is not on PATH" in without.stderr


def test_pull_copies_files_from_cluster(tmp_path: Path) -> None:
    (tmp_path / "kubectl").write_text(FAKE)
    (tmp_path / "kubectl").chmod(0o755)
    files = tmp_path / "volume"
    files.mkdir()
    (files / "metrics.jsonl").write_text("x" * 300_000)
    labels = {"rlrun.io/role": "orchestrator", "rlrun.io/attempt": "1"}
    container = {"name": "orchestrator", "ready": True, "state": {"running": {}}}
    pod = {"metadata": {"name": "a-orchestrator-1", "labels": labels}, "status": {"containerStatuses": [container]}}
    (tmp_path / "pods.json").write_text(json.dumps({"items": [pod]}))
    status = {"phase": "Running", "attempt": 1, "storage": {"claimName": "c", "path": "/data/a"}}
    (tmp_path / "run.json").write_text(json.dumps({"metadata": {"name": "a", "namespace": "team"}, "status": status}))
    more = {"FAKE_RUN": str(tmp_path / "run.json"), "FAKE_PODS": str(tmp_path / "pods.json"), "FAKE_FILES": str(files)}
    path, target = f"{tmp_path}:{os.environ['PATH']}", tmp_path / "copy.jsonl"
    done = run_rlrun("pull", "a", "metrics", "--to", str(target), path=path, **more)
    assert (done.returncode, target.read_text()) == (0, "x" * 300_000), done.stderr
    (files / "metrics.jsonl").unlink()
    lost = run_rlrun("pull", "a", "metrics", "--to", str(tmp_path / "b"), path=path, **more, FAKE_CODE="2")
    assert lost.returncode == 69, lost.stderr
    assert "kubectl exec failed: tar: metrics.jsonl" in lost.stderr
    assert not (tmp_path / "b").exists()


def wait_for_record(path: Path, state: str) -> LauncherRecord:
    def record_in_state() -> LauncherRecord | None:
        record = read_record(path)
        return record if record is not None and record.state == state else None

    found = wait_for(record_in_state, f"a record with the state {state}")
    assert found is not None
    return found


def test_local_run_is_suspended(run: Path) -> None:
    record = run / "launcher.json"
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(record)])
    try:
        wait_for_record(record, "Running")
        assert "Starting" in run_rlrun("get", str(run)).stdout
        asked = run_rlrun("suspend", str(run))
        assert (asked.returncode, f"sent process {launcher.pid}" in asked.stderr) == (0, True), asked.stderr
        wait_for_record(record, "Interrupted")
        assert wait_for_exit(launcher) == 0
    finally:
        launcher.kill()
        launcher.wait()
    told = run_rlrun("why", str(run))
    assert "Continue with `rlrun local a.yaml --resume`" in " ".join(told.stdout.split())
    again = run_rlrun("suspend", str(run))
    assert (again.returncode, "is not running" in again.stderr) == (64, True), again.stderr


def test_killed_launcher_is_reported_as_gone(run: Path) -> None:
    record = run / "launcher.json"
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(record)])
    try:
        wait_for_record(record, "Running")
    finally:
        launcher.kill()
        launcher.wait()
    assert "LauncherGone" in run_rlrun("why", str(run)).stdout
