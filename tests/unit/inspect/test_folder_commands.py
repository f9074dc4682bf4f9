"""Commands on run folders as `rlrun local` leaves them, in every state of a run."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlrun.cli import logs
from rlrun.cli.main import main
from rlrun.inspect import role_logs
from rlrun.inspect.folder_reader import read_folder
from rlrun.inspect.screen import explanation_text
from rlrun.inspect.source import NotFoundError
from rlrun.inspect.why import explain_run
from rlrun.protocol.files.launcher_record import LauncherRecord, new_record, read_record, write_record
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import ForkedFrom, fork_document
from rlrun.runtime import exit_codes
from tests.unit.inspect.recorded import Recorded, Use

AGAIN = "rlrun local run.yaml --output-dir runs/a --resume"
PROGRESS = {
    "step": 3,
    "max_steps": 10,
    "policy_version": 2,
    "waiting_on": "trainer: training step 4",
    "waiting_role": "trainer",
    "waiting_phase": "training",
    "waiting_since": 1.0,
    "eta_seconds": 60.0,
    "checkpoint_step": 2,
    "resumed_from_step": None,
}


class Folder:
    """Folder of one run."""

    def __init__(self, root: Path) -> None:
        self.root, self.paths = root, RunPaths(root)
        root.mkdir(parents=True)
        self.config: dict[str, Any] = {
            "name": "a",
            "uid": "u",
            "task": "RL",
            "max_steps": 10,
            "checkpoint": {"enabled": True},
        }
        self.write("run.json", {"trainer": self.config})
        self.begin(1)

    def write(self, name: str, content: Any) -> Path:
        """Write a file; content other than text is written as JSON."""
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    def begin(self, attempt: int, base: int = 0) -> None:
        """Write an attempt with its logs."""
        self.write(
            f"attempts/{attempt:04d}.json", {"attempt": attempt, "base_step": base, "started_at": 1_700_000_000.0}
        )
        for name in ("trainer/trainer", "inference/inference-0", "inference/inference-1", "orchestrator/orchestrator"):
            self.write(f"logs/attempt_{attempt:04d}/{name}.log", f"{name} of attempt {attempt}\n")

    def train(self, last: int, attempt: int = 1) -> None:
        """Write steps with metrics, traces and a checkpoint."""
        shared = {"attempt": attempt, "off_policy/mean": 0.5}
        lines = [{"step": n, "time": 1.7e9 + n, "reward/mean": n / 10} | shared for n in range(1, last + 1)]
        self.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "torn')
        call = {"function": {"name": "add", "arguments": "{}"}}
        answer = {"role": "assistant", "content": "x" * 3000, "tool_calls": [call]}
        shown = {
            "messages": [{"role": "user", "content": "2+2?"}, answer],
            "versions": [[{"version": 4}]],
            "task_id": "t",
        }
        rows = [
            {"step": last, "attempt": attempt, "reward": reward, "environment": name} | shown
            for reward, name in ((0.5, "math"), (0.0, "math"), (1.0, "code"))
        ]
        self.write(f"traces/step_{last:08d}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self.write(f"checkpoints/step_{last:08d}.a{attempt:04d}/manifest.json", {})

    def record(self, **changed: Any) -> LauncherRecord:
        """Write a launcher record; by default, its launcher is this process."""
        record = replace(new_record("a", 1, AGAIN), **changed)
        assert write_record(self.paths.launcher, record)
        return record

    def told(self, now: float | None = None) -> str:
        """Return the output of `rlrun why` on one line."""
        at = time.time() if now is None else now
        return " ".join(explanation_text(explain_run(read_folder(self.root, at), at), at).split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path / "runs" / "a")


def living(folder: Folder, **progress: Any) -> None:
    folder.train(3)
    folder.record(progress=PROGRESS | progress, progress_time=time.time())


def test_running_local_run_is_shown_by_status_and_get(
    folder: Folder, use: Use, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "HOME"):
        monkeypatch.delenv(name, raising=False)
    living(folder)
    assert main(["status", "runs/a"]) == 0
    text = capsys.readouterr().out
    expected = ["Running (Training)", "3/10 (30 %)", "in 1m00s", "0.3000", "version 2", "trainer: training step 4"]
    assert [part for part in [*expected, "step 3 is complete"] if part not in text] == []
    use(Recorded())
    assert main(["get"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[1].split()[:3] == ["runs/a", "Running", "3/10"]
    assert told.err == "", "no cluster is configured"
    monkeypatch.setenv("KUBECONFIG", "some")
    assert main(["get"]) == 0
    assert "runs of the cluster are not listed: kubectl get failed" in capsys.readouterr().err


def test_local_run_phase_follows_record_and_logs(folder: Folder) -> None:
    def phase(**changed: Any) -> tuple[str, str | None]:
        folder.record(**changed)
        seen = read_folder(folder.root, time.time())
        return seen.phase, seen.reason

    assert phase() == ("Starting", "WaitingForFirstStep")
    at_base = PROGRESS | {"step": 2, "resumed_from_step": 2}
    assert phase(progress=at_base, progress_time=time.time())[0] == "Starting"
    folder.write("metrics.jsonl", json.dumps({"step": 3, "attempt": 1}) + "\n")
    assert phase(progress=at_base, progress_time=time.time()) == ("Running", "Training"), "its record is older"
    assert (phase()[0], read_folder(folder.root, time.time()).progress.step) == ("Running", 3), (
        "nobody has answered yet"
    )
    folder.paths.metrics.unlink()
    assert phase(progress=PROGRESS, progress_time=time.time()) == ("Running", "Training")
    assert phase(progress=PROGRESS, progress_time=time.time() - 300) == ("Running", "HeartbeatLost")
    assert phase(state="Complete") == ("Complete", "Completed")
    assert phase(state="Interrupted") == ("Suspended", "Interrupted")
    assert phase(state="Failed") == ("Failed", "RoleFailed")
    assert phase(started_ticks=1) == ("Failed", "LauncherGone"), "the pid was given to another process"
    assert phase(host="elsewhere", time=time.time() - 5)[0] == "Starting"
    assert phase(host="elsewhere", time=time.time() - 600) == ("Failed", "LauncherGone")
    folder.paths.launcher.unlink()
    assert read_folder(folder.root, time.time()).phase == "Starting", "roles by hand write their logs"
    assert read_folder(folder.root, time.time() + 600).reason == "NotRunning"


BROKEN: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "DataError (orchestrator, exit code 65)": (
        {"code": 65, "message": "rewards were NaN"},
        ("rewards were NaN", "The data, or code that reads it, is wrong"),
    ),
    "ConfigurationError": ({"code": 78, "message": "lr: too large"}, ("lr: too large", "names field, value and fix")),
    "StorageError": ({"code": 10, "message": "cannot write: the volume is full"}, ("Free space on the volume",)),
    "CudaOutOfMemory": (
        {"code": 1, "message": "torch: CUDA out of memory. Tried"},
        ("Decrease trainer.microBatchTokens",),
    ),
    "PermanentError": ({"code": 69, "message": "port 8000 is in use"}, ("a port or a device (69)",)),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_why_names_cause_of_failed_local_run(folder: Folder, reason: str) -> None:
    report, expected = BROKEN[reason]
    error = {"role": "orchestrator", "message": report["message"], "exit_code": report["code"], "follows": False}
    folder.write("logs/attempt_0001/orchestrator/error.json", error)
    folder.write(
        "logs/attempt_0001/trainer/error.json",
        error | {"message": "the orchestrator is gone", "exit_code": 1, "follows": True},
    )
    folder.record(state="Failed", failed_role="trainer", exit_code=1)
    text = folder.told()
    assert reason in text
    assert [part for part in expected if part not in text] == []
    assert f"continue with `{AGAIN}`" in text


def test_fork_shows_source_step_and_start_command(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.write("fork.json", fork_document(ForkedFrom("other", "u", 4, 1, "/runs/other")))
    seen = read_folder(folder.root, time.time())
    assert (seen.phase, seen.reason, seen.forked_from) == ("Suspended", "NotRunning", "step 4 of other (/runs/other)")
    assert f"start it with `rlrun local {seen.where}/manifest.yaml --output-dir {seen.where} --resume`" in str(
        seen.message
    )
    folder.begin(2)
    assert read_folder(folder.root, time.time()).restarts == 0, "the first attempt is the other run's"
    assert main(["status", str(folder.root)]) == exit_codes.OK
    assert "from step 4 of other (/runs/other)" in capsys.readouterr().out


def test_process_without_error_report_is_explained_by_log(folder: Folder) -> None:
    folder.write("logs/attempt_0001/inference/inference-1.log", "loading\nRuntimeError: no such head\n")
    folder.record(state="Failed", failed_role="inference-1", exit_code=-9)
    text = folder.told()
    assert "Killed (inference-1, exit code -9)" in text
    assert "was ended by SIGKILL (often for lack of memory)" in text
    assert "no such head" in text


def test_secondary_role_failure_is_not_the_cause(folder: Folder) -> None:
    lost = {"role": "trainer", "message": "the orchestrator is gone", "exit_code": 1, "follows": True}
    folder.write("logs/attempt_0001/trainer/error.json", lost)
    folder.record(state="Failed", failed_role="orchestrator", exit_code=-9)
    assert "Killed (orchestrator, exit code -9)" in folder.told()
    folder.paths.launcher.unlink()
    assert "ExitCode (trainer, exit code 1)" in folder.told(), "where nothing else is known"


def test_killed_launcher_and_full_volume_are_explained(folder: Folder) -> None:
    folder.record(started_ticks=1)
    assert f"The launcher was killed, or the machine restarted: continue with `{AGAIN}`" in folder.told()
    trouble = {"reason": "StorageFull", "text": "the volume is full: 1 MiB free", "blocks": True}
    folder.record(progress=PROGRESS | {"storage": trouble}, progress_time=time.time())
    text = folder.told()
    assert "StorageReady: StorageFull" in text
    assert "1 MiB free" in text
    assert "Free space" in text


def test_launcher_record_tolerates_new_fields_and_rejects_damaged_files(folder: Folder) -> None:
    record = folder.record()
    document = json.loads(folder.paths.launcher.read_text())
    folder.write("launcher.json", document | {"new_field": 1})
    assert read_record(folder.paths.launcher) == record
    for content in (
        "",
        "[]",
        json.dumps(document | {"state": "Odd"}),
        json.dumps({"name": "a"}),
        json.dumps(document | {"progress": 3}),
    ):
        folder.write("launcher.json", content)
        assert read_record(folder.paths.launcher) is None
        assert folder.told()


def test_folder_with_invalid_files_is_read_without_error(folder: Folder) -> None:
    for name in ("run.json", "attempts/0001.json", "metrics.jsonl", "logs/attempt_0001/trainer/error.json"):
        folder.write(name, '{"trainer": ["x"], "step": "y"')
    folder.write("logs/attempt_x/file", "")
    folder.write("identity.json", {"name": "\x1b[2J"})
    assert "\x1b" not in folder.told()
    (folder.root / "identity.json").unlink()
    assert "a (runs/a)" in folder.told()


def test_nan_loss_is_shown_and_valid_json(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.write("metrics.jsonl", '{"step": 3, "attempt": 1, "time": 1.7e9, "loss": NaN}\n')
    assert main(["status", "runs/a"]) == 0
    assert "loss        nan" in capsys.readouterr().out
    assert main(["status", "runs/a", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["progress"]["loss"] == "nan"


def test_status_shows_start_phases_of_newest_attempt(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """The metrics file also contains integers that exceed the range of a float; they must be ignored."""
    first = {"step": 1, "attempt": 1, "time/start_imports": 99.0, "time/step": 1.0}
    again = {"step": 2, "attempt": 2, "time/start_imports": 9.0, "time/start_model": 3.0, "time/step": 6.0}
    lines = [first, again | {"time/wait_for_batch": 4.0, "loss": 10**400}, {"step": 3, "attempt": 2, "time/step": 2.0}]
    folder.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert main(["status", "runs/a"]) == 0
    told = "attempt 2 took 18 s to its first new step: imports 9 s, batch 4 s, model 3 s, step 2 s"
    assert f"start       {told}\n" in capsys.readouterr().out


def test_logs_of_roles_ranks_and_attempts(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.begin(2)
    folder.write("logs/attempt_0002/trainer/trainer.log", "start\n[rank0]: zero\n[default1]:one\n[rank1]: \x1b[2Jone\n")

    def printed(*more: str) -> list[str]:
        assert main(["logs", "runs/a", *more]) == 0
        return capsys.readouterr().out.splitlines()

    assert printed() == ["orchestrator/orchestrator of attempt 2"]
    assert printed("--attempt", "1", "--role", "trainer") == ["trainer/trainer of attempt 1"]
    assert printed("--role", "trainer", "--rank", "1") == ["[default1]:one", "[rank1]: \\x1b[2Jone"]
    assert printed("--role", "inference", "--rank", "1") == ["inference/inference-1 of attempt 2"]
    assert printed("--role", "all", "--tail", "1")[-1] == "orchestrator | orchestrator/orchestrator of attempt 2"
    assert main(["logs", "runs/a", "--attempt", "7"]) == exit_codes.USAGE
    assert "it has 1, 2" in capsys.readouterr().err
    assert main(["logs", "runs/a", "--role", "inference", "--rank", "5"]) == exit_codes.USAGE
    assert "inference has ranks 0 to 1 in attempt 2; write --rank 1" in capsys.readouterr().err


def test_log_follow_prints_last_line_of_ended_run(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_text("old\n")
    steps = iter(["one\ntw", "o\n", "cut", "last"])

    def pause(_seconds: float) -> None:
        step = next(steps)
        if step == "cut":
            path.write_text("")
        else:
            with path.open("a") as file:
                file.write(step)

    looks = iter([True, True, True, True, False])
    found = role_logs.follow_lines([(role_logs.LogFile(path, "trainer"), 4)], lambda: next(looks), pause)
    assert [line for _, line in found] == ["one", "two", "last"]


def test_log_follow_prints_lines_written_during_the_tail(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write("logs/attempt_0001/orchestrator/orchestrator.log", "one\ntw")
    log, show = folder.root / "logs/attempt_0001/orchestrator/orchestrator.log", role_logs.show_line

    def show_and_write(*arguments: Any, **options: Any) -> str:
        if log.read_text() == "one\ntw":
            log.write_text("one\ntwo\nthree\n")
        return show(*arguments, **options)

    monkeypatch.setattr(role_logs, "show_line", show_and_write)
    monkeypatch.setattr(logs, "_may_write_logs", lambda _root: False)
    assert main(["logs", "runs/a", "-f"]) == 0
    assert capsys.readouterr().out.splitlines() == ["one", "two", "three"]


def test_rollouts_are_chosen_and_shown(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.train(4)
    assert main(["rollouts", "runs/a", "--step", "4", "--worst", "2"]) == 0
    text = capsys.readouterr().out
    assert "step 4: 2 of 3 rollouts; reward 0.5000 on average, from 0.0000 to 1.0000" in text
    assert [line.split(";")[0] for line in text.splitlines() if line.startswith("──")] == [
        "── reward 0",
        "── reward 0.5",
    ]
    assert "calls       add({})" in text
    assert "versions 4" in text
    assert ("x" * 1999 + "…" in text, "x" * 2001 in text) == (True, False)
    assert main(["rollouts", "runs/a", "--best", "1", "--full"]) == 0
    assert "x" * 3000 in capsys.readouterr().out
    assert main(["rollouts", "runs/a", "--environment", "code", "-o", "json"]) == 0
    assert [row["reward"] for row in json.loads(capsys.readouterr().out)] == [1.0]
    assert main(["rollouts", "runs/a", "--environment", "mat"]) == exit_codes.USAGE
    assert "did you mean math?" in capsys.readouterr().err
    assert main(["rollouts", "runs/a", "--step", "5"]) == exit_codes.USAGE
    assert "the run has traces of steps 4 to 4" in capsys.readouterr().err


def test_runs_are_compared(folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.train(6)
    other = Folder(tmp_path / "runs" / "b")
    other.train(4)
    other.write("run.json", {"trainer": other.config | {"max_steps": 20, "uid": "v"}})
    assert main(["compare", "runs/a", "runs/b"]) == 0
    text = capsys.readouterr().out
    assert [line.split() for line in text.splitlines()][1] == ["1–1", "0.1", "0.1"]
    assert "maxSteps" in text
    assert "uid" not in text
    assert main(["compare", "runs/a"]) == exit_codes.USAGE


def test_debug_bundle_excludes_models_rollouts_and_secrets(folder: Folder, tmp_path: Path) -> None:
    living(folder)
    folder.write("weights/v00000001.a0001/model.safetensors", "WEIGHTS")
    folder.write("logs/attempt_0001/orchestrator/config.json", {"judge": {"api_key": "topsecret1"}, "seq_len": 512})
    folder.write("logs/attempt_0001/trainer/trainer.log", "api_key=topsecret2 tokens: 512\n")
    file = tmp_path / "bundle.tar.gz"
    assert main(["debug", "runs/a", "--file", str(file)]) == 0
    with tarfile.open(file) as bundle:
        parts = {one.name.partition("/")[2]: bundle.extractfile(one).read().decode() for one in bundle.getmembers()}  # type: ignore[union-attr]
    whole = "\n".join(parts.values())
    assert "topsecret" not in whole
    assert "WEIGHTS" not in whole
    assert "2+2?" not in whole
    assert '"seq_len": 512' in whole
    assert "tokens: 512" in whole
    assert "v00000001.a0001/model.safetensors" in parts["files.txt"]
    assert {
        "why.txt",
        "status.txt",
        "launcher.json",
        "metrics.jsonl",
        "logs/attempt_0001/trainer/trainer.log",
    } <= parts.keys()


def test_suspend_signals_only_the_launcher(
    folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    folder.record()
    assert main(["suspend", "runs/a"]) == 0
    assert sent == [(os.getpid(), 2)]
    assert main(["suspend", "runs/a", "--dry-run"]) == 0
    for changed, expected in (
        ({"started_ticks": 1}, f"is not running; resume it with: {AGAIN}"),
        ({"state": "Complete"}, "is not running"),
        ({"host": "elsewhere"}, "runs on elsewhere"),
    ):
        folder.record(**changed)
        assert main(["suspend", "runs/a"]) == exit_codes.USAGE
        assert expected in capsys.readouterr().err
    folder.paths.launcher.unlink()
    assert main(["suspend", "runs/a"]) == exit_codes.USAGE
    assert len(sent) == 1


def test_local_run_resume_prints_its_own_command(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.record(state="Interrupted")
    assert main(["resume", "runs/a"]) == exit_codes.USAGE
    assert AGAIN in capsys.readouterr().err
    assert main(["restart", "runs/a"]) == 0
    assert AGAIN in capsys.readouterr().out
    assert main(["set", "runs/a", "maxSteps=3"]) == exit_codes.USAGE
    assert main(["scale", "runs/a", "--inference", "3"]) == exit_codes.USAGE


def test_watch_ends_with_the_run(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.record(state="Complete")
    assert main(["watch", "runs/a"]) == 0
    folder.record(state="Failed")
    assert main(["watch", "runs/a"]) == exit_codes.FAILURE
    folder.record(state="Interrupted")
    assert main(["watch", "runs/a"]) == exit_codes.FAILURE


def test_path_without_run_is_refused_with_suggestion(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    for word, expected in (
        ("runs/", "it contains 1 runs, such as runs/a"),
        ("runs/none", "there is no folder runs/none"),
    ):
        assert main(["why", word]) == exit_codes.USAGE
        assert expected in capsys.readouterr().err


FORK = (
    "it is Suspended (NotRunning): this fork has not been started yet; start it with `rlrun local runs/a/manifest.yaml"
)
"""State of a fork."""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("logs runs/a", f"runs/a has no logs; roles that were started by hand write only to their terminals: {FORK}"),
        ("rollouts runs/a", f"runs/a has no traces yet (task RL); the first trained step writes one: {FORK}"),
        ("plot runs/a", "runs/a has no trained step yet, so it has no curve; see `rlrun status runs/a`"),
        ("compare runs/a runs/a", "the runs have no common trained step: runs/a, runs/a has none yet; `rlrun status runs/a`"),
        ("cost runs/a", "runs/a"),
        ("why runs/a", "Continue with: rlrun local runs/a/manifest.yaml --output-dir runs/a --resume"),
        ("status runs/a", "Suspended (NotRunning)"),
        ("debug runs/a", "files,"),
    ],
)  # fmt: skip
def test_unstarted_fork_is_explained_by_each_command(
    command: str, expected: str, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder.root / "logs")
    folder.write("fork.json", fork_document(ForkedFrom("other", "u", 4, 1, "/runs/other")))
    main(command.split())
    told = capsys.readouterr()
    assert expected in " ".join((told.out + told.err).split())


def test_folder_without_attempt_is_reported_as_not_started(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder.root / "logs")
    shutil.rmtree(folder.root / "attempts")
    for command in ("logs", "rollouts"):
        assert main([command, "runs/a"]) == exit_codes.USAGE
        told = capsys.readouterr().err
        assert "runs/a has not started: it is " in told
        assert "`rlrun why runs/a` explains the cause and the fix" in told


def test_status_shows_transferred_size_of_newest_version(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    living(folder)
    assert main(["status", "runs/a"]) == exit_codes.OK
    assert "the newest was transferred as" not in capsys.readouterr().out
    line = {"step": 4, "attempt": 1, "time": 1.7e9, "weights/sent_bytes": 3.0 * 2**20, "weights/bytes": 2.0 * 2**30}
    folder.write("metrics.jsonl", json.dumps(line) + "\n")
    assert main(["status", "runs/a"]) == exit_codes.OK
    assert "version 2; the newest was transferred as 3.0 MiB of 2.0 GiB" in " ".join(capsys.readouterr().out.split())


def test_rank_beyond_the_ranks_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "runs" / "a")
    folder.config |= {"replicas": 2, "processes_per_replica": 2}
    folder.write("run.json", {"trainer": folder.config})
    folder.write("logs/attempt_0001/trainer/trainer.log", "[rank3]: done\n")
    assert role_logs.list_log_files(folder.root, role_logs.LogSelection(("trainer",), 3, None, 10))
    with pytest.raises(NotFoundError, match="got 4, but trainer has ranks 0 to 3 in attempt 1; write --rank 3"):
        role_logs.list_log_files(folder.root, role_logs.LogSelection(("trainer",), 4, None, 10))
    with pytest.raises(NotFoundError, match="got 9, but inference has ranks 0 to 1 in attempt 1; write --rank 1"):
        role_logs.list_log_files(folder.root, role_logs.LogSelection(("inference",), 9, None, 10))
