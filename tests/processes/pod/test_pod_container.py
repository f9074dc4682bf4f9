"""`rlrun-pod` as first process of a container: one start per trainer pod, signals, orphans, and messages of failed roles."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pod_harness import PATIENT, Pod, run_config

from rlrun.config.models.run_config import RunConfig
from rlrun.pod.container import MAX_BYTES
from rlrun.protocol.files.failures import RoleError, read_error, write_error
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun_operator.render.role_containers import HEARS_SIGNALS
from tests.support.programs import finish, run_program, wait_for, wait_for_exit

FAILS = """
    import sys
    from pathlib import Path
    from rlrun.protocol.files.failures import RoleError, write_error
    write_error(None, "trainer", RoleError("checkpoint.interval: too long", 65))
    print("a line")
    sys.exit(65)
"""
HEAD_START_SECONDS = 0.5
"""A pod that does not wait for its peer ends in this time, with another message. No event marks the start of the wait."""
WAITS = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("up", flush=True)
    while True:
        time.sleep(0.05)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_failed_trainer_is_reported_once_and_never_restarted(pods: Callable[..., Pod]) -> None:
    pod = pods()
    code, out, _ = pod.run("trainer", FAILS)
    assert (code, out) == (65, "a line\n")
    assert pod.message == "checkpoint.interval: too long"
    assert "a line" in pod.log("trainer")
    again = pod.start("trainer", "print('started again')")
    status, reason = wait_for(lambda: (found := pod.ready())[0] and found, "the second start answers its probe")
    assert status == 503
    assert reason is not None
    assert "has ended" in reason
    assert again.poll() is None
    again.send_signal(signal.SIGTERM)
    out, err = finish(again)
    assert again.returncode == 0
    assert out == ""
    assert err.count("\n") == 1
    assert pod.message == "checkpoint.interval: too long"


def quantized_config(tmp_path: Path) -> RunConfig:
    (source := tmp_path / "source").mkdir(parents=True)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": quantization}))
    return run_config(tmp_path / "demo", model={"path": str(source)})


def test_trainer_starts_after_the_plain_copy_of_its_model(pods: Callable[..., Pod], tmp_path: Path) -> None:
    pod = pods(config=quantized_config(tmp_path))
    model = RunPaths(pod.root).model
    copy = f"import pathlib, time; time.sleep(0.2); pathlib.Path({str(model)!r}).mkdir(); print('copied')"
    assert pod.run("trainer", f"import os; print(os.listdir({str(pod.root)!r}).count('model'))", copy)[:2] == (
        0,
        "copied\n1\n",
    )
    other = pods(config=quantized_config(tmp_path / "other"))
    RunPaths(other.root).model.mkdir(parents=True)
    assert other.run("trainer", "print('role')", "raise SystemExit(1)")[:2] == (0, "role\n"), "the copy exists"


def test_failed_plain_copy_ends_the_trainer_with_its_message(pods: Callable[..., Pod], tmp_path: Path) -> None:
    pod = pods(config=quantized_config(tmp_path))
    code, out, _ = pod.run("trainer", "print('role')", FAILS)
    assert (code, out, pod.message) == (65, "a line\n", "checkpoint.interval: too long")


def test_signal_reaches_role_and_its_exit_code_is_returned(pods: Callable[..., Pod]) -> None:
    pod = pods()
    process = pod.start("trainer", WAITS)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert wait_for_exit(process) == 7
    assert pod.message == "", "it was asked to stop: nothing failed"


def test_early_signal_to_first_process_is_kept(pods: Callable[..., Pod], tmp_path: Path) -> None:
    """The kernel drops signals without a handler in the first process of a container: the pod would run for its whole grace period."""
    pod = pods()
    pod.run("trainer", FAILS)
    program = tmp_path / "rlrun-pod"
    program.write_text(f'#!/bin/sh\nkill -TERM $$\nexec {sys.executable} -m rlrun.pod "$@"\n')
    program.chmod(0o755)
    again = pod.start_command(["sh", "-c", HEARS_SIGNALS, str(program), "trainer"])
    _, err = finish(again)
    assert again.returncode == 0, err
    assert "waits for its deletion" in err


def test_signal_during_shell_start_ends_container(tmp_path: Path) -> None:
    looks = tmp_path / "env"
    looks.write_text("#!/bin/sh\nkill -TERM $PPID\nexit 125\n")
    looks.chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", "-c", HEARS_SIGNALS, "echo", "started"]
    end = run_program(command, env=path)
    assert (end.returncode, end.stdout) == (143, "")


def test_image_without_program_is_a_configuration_error() -> None:
    end = run_program(["sh", "-c", HEARS_SIGNALS, "rlrun-nothing", "trainer"])
    assert end.returncode == exit_codes.CONFIGURATION
    assert end.stderr == "the image has no rlrun-nothing: it needs the package rlrun\n"


def test_env_without_signal_blocking_still_starts_role(tmp_path: Path) -> None:
    old = tmp_path / "env"
    old.write_text("#!/bin/sh\necho 'env: unrecognized option' >&2\nexit 125\n")
    old.chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", "-c", HEARS_SIGNALS, "echo", "started"]
    end = run_program(command, env=path)
    assert (end.returncode, end.stdout, end.stderr) == (0, "started\n", "")


def test_native_crash_reports_python_position(pods: Callable[..., Pod]) -> None:
    pod = pods("demo-orchestrator")
    crash = """
        import ctypes, sys
        def inner():
            ctypes.string_at(0)
        def outer(depth=30):
            return outer(depth - 1) if depth else inner()
        outer()
    """
    code, _, _ = pod.run("orchestrator", crash)
    assert code == 128 + signal.SIGSEGV
    told = pod.message.splitlines()
    assert told[0] == "was ended by SIGSEGV; its last lines:"
    assert told[1] == "Fatal Python error: Segmentation fault"
    assert "in string_at" in told[3], "the latest call comes first, and is not cut off"
    assert "in inner" in told[4]


def test_lost_remote_rank_is_reported_with_its_error(pods: Callable[..., Pod]) -> None:
    pod = pods("demo-trainer-0")
    folder = RunPaths(pod.root).logs(1, "trainer")
    loses = f"""
        import os
        from pathlib import Path
        from rlrun.protocol.files.failures import RoleError, write_error
        write_error(Path({str(folder)!r}), "trainer", RoleError("RuntimeError: Connection closed by peer", follows=True))
        os._exit(1)
    """
    process = pod.start("trainer", loses, **{PATIENT: "1"})
    wait_for(lambda: read_error(folder), "the rank of this pod has told")
    time.sleep(HEAD_START_SECONDS)
    write_error(folder, "trainer", RoleError("rank 3 was ended by SIGSEGV; its last lines:\nin publish", 139))
    process.communicate()
    assert process.returncode == 1
    assert pod.message == "rank 3 was ended by SIGSEGV; its last lines:\nin publish"


def test_lost_peer_is_reported_without_better_cause(pods: Callable[..., Pod]) -> None:
    pod = pods("demo-trainer-0")
    loses = FAILS.replace(
        '"checkpoint.interval: too long", 65', '"RuntimeError: Connection closed by peer", follows=True'
    )
    pod.run("trainer", loses)
    assert pod.message == "RuntimeError: Connection closed by peer"


def test_most_informative_line_comes_first(pods: Callable[..., Pod]) -> None:
    pod = pods("demo-trainer-0")
    dies = """
        import sys, traceback
        def step():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        try:
            step()
        except RuntimeError:
            traceback.print_exc()
        print("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:" + 40 * "\\n====", file=sys.stderr)
        sys.exit(1)
    """
    pod.run("trainer", dies)
    told = pod.message.splitlines()
    assert told[0].startswith("CudaError: ended with exit code 1: RuntimeError: CUDA error: an illegal memory access")
    assert "in step)" in told[0]
    assert "===" not in pod.message


def test_child_processes_end_with_the_role(pods: Callable[..., Pod]) -> None:
    pod = pods("demo-orchestrator")
    orphan = """
        import os, subprocess, sys
        sleep = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
        inner = f"import subprocess; print(subprocess.Popen({sleep!r}, stdout=subprocess.DEVNULL, start_new_session=True).pid)"
        outer = subprocess.run([sys.executable, "-c", inner], stdout=subprocess.PIPE)
        print(int(outer.stdout), subprocess.Popen(sleep).pid, flush=True)
        sys.exit(3)
    """
    code, out, _ = pod.run("orchestrator", orphan)
    assert code == 3
    assert [pid for pid in map(int, out.split()) if is_running(pid)] == []


def test_silent_role_is_reported_with_its_last_lines(pods: Callable[..., Pod]) -> None:
    pod = pods("demo-inference-abc")
    dies = """
        import os, sys
        print("\\n".join(f"line {n} " + 300 * "x" for n in range(40)), file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
    """
    code, _, _ = pod.run("inference", dies)
    assert code == 128 + signal.SIGKILL
    assert pod.message.startswith("was ended by SIGKILL (often for lack of memory); its last lines:")
    assert "line 39" in pod.message
    assert len(pod.message.encode()) <= MAX_BYTES


def test_engine_ignores_errors_of_other_engines(pods: Callable[..., Pod]) -> None:
    pod = pods("demo-inference-abc")
    pod.run("inference", other_pod_error("of another engine", RunPaths(pod.root).logs(1, "inference")))
    assert "mine" in pod.message
    assert "of another engine" not in pod.message


def other_pod_error(message: str, folder: Path) -> str:
    """Return a role that dies with 'mine' just after another pod has written the cause."""
    document = {"role": "trainer", "message": message, "exit_code": 10}
    return f"""
        import json, sys
        from pathlib import Path
        folder = Path({str(folder)!r})
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error.json").write_text({json.dumps(document)!r})
        sys.exit("mine")
    """


def test_trainer_reports_first_cause_of_its_group(pods: Callable[..., Pod]) -> None:
    pod = pods()
    pod.run("trainer", other_pod_error("the peer's volume is full", RunPaths(pod.root).logs(1, "trainer")))
    assert pod.message == "the peer's volume is full"
    replaced = pods()
    replaced.run("trainer", "import sys; sys.exit('mine')")
    assert "mine" in replaced.message


@pytest.mark.parametrize("obstacle", ["file", "fifo"])
def test_unwritable_log_does_not_stop_role(pods: Callable[..., Pod], obstacle: str) -> None:
    pod = pods("demo-orchestrator")
    log = pod.root / "logs" / "attempt_0001" / "orchestrator" / "demo-orchestrator.log"
    log.parent.parent.mkdir(parents=True)
    if obstacle == "file":
        log.parent.write_text("in the way")
    else:
        log.parent.mkdir()
        os.mkfifo(log)  # Opening a FIFO blocks until a reader exists, like a network file system without a server.
    code, out, _ = pod.run("orchestrator", "import sys; print('x' * 10_000_000); sys.exit(4)")
    assert code == 4
    assert len(out) == 10_000_001


def test_invalid_variable_or_configuration_is_named(pods: Callable[..., Pod], tmp_path: Path) -> None:
    pod = pods()
    code, _, err = pod.run("trainer", RLRUN_ATTEMPT="zero")
    assert code == exit_codes.USAGE
    assert "RLRUN_ATTEMPT is 'zero'" in err
    code, _, err = pod.run("wrong")
    assert code == exit_codes.USAGE
    assert "usage: rlrun-pod" in err
    Path(pod.env["RLRUN_CONFIG"]).write_text('{"trainer": {}}')
    code, _, err = pod.run("orchestrator")
    assert code == exit_codes.CONFIGURATION
    assert "run.json" in pod.message
    assert "Traceback" not in err


def test_first_pod_creates_model_and_others_wait(pods: Callable[..., Pod], tmp_path: Path) -> None:
    config = run_config(tmp_path / "demo", model={"tiny": {}}, trainer={"replicas": 2})
    first, second, engine = (pods(name, config) for name in ("demo-trainer-0", "demo-trainer-1", "demo-inference-x"))
    waiting = second.start("model", "raise SystemExit('only the first pod makes it')")
    serving = engine.start("inference", "print('serving')")
    assert serving.stderr is not None
    assert "waiting for the tiny model" in serving.stderr.readline()
    folder = RunPaths(tmp_path / "demo").model
    make = f"import os; from pathlib import Path; assert 'RLRUN_API_KEY' not in os.environ; Path({str(folder)!r}).mkdir(parents=True)"
    code, _, err = first.run("model", make)
    assert (code, folder.is_dir()) == (0, True), err
    assert wait_for_exit(waiting) == 0
    assert finish(serving)[0] == "serving\n"
    assert first.run("model", "raise SystemExit('it is there')")[0] == 0
    assert RunPaths(tmp_path / "demo").run_json.is_file()


def test_pods_of_one_attempt_start_together(pods: Callable[..., Pod], tmp_path: Path) -> None:
    config = run_config(tmp_path / "demo", trainer={"replicas": 2})
    first, old, second = (pods(f"demo-trainer-{ordinal}", config) for ordinal in (0, 1, 1))
    leading = first.start("trainer", WAITS)
    wait_for(lambda: first.ready()[0], "the first pod answers")
    stray = old.start("trainer", WAITS, RLRUN_ATTEMPT="7")
    assert stray.stderr is not None
    assert "this is attempt 1" in stray.stderr.readline()
    assert first.ready() == (503, "not all pods of the trainer are up")
    late = second.start("trainer", WAITS)
    for process in (leading, late):
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    assert second.ready() == (200, None)
    assert first.ready() == (503, "the channel of rank 0 does not answer")
    stray.send_signal(signal.SIGTERM)
    assert wait_for_exit(stray) == 128 + signal.SIGTERM
    for process in (leading, late):
        process.send_signal(signal.SIGTERM)
        assert wait_for_exit(process) == 7


def test_used_attempt_number_is_refused_with_next_one(pods: Callable[..., Pod]) -> None:
    pod = pods()
    (pod.root / "attempts").mkdir(parents=True)
    (pod.root / "attempts" / "0003.json").write_text("{}")
    code, _, _ = pod.run("trainer", "print('started')")
    assert code == exit_codes.ATTEMPT_TAKEN
    assert "the next is 4" in pod.message
