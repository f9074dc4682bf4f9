"""Processes of a launch, and configurations that are refused before the first start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.run_config import RunConfig
from rlrun.local import preflight
from rlrun.local.preflight import PreflightError, check_folder, check_model, check_ports, free_port
from rlrun.local.process_plan import Ports, plan_processes, split_gpus, with_endpoints
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.launcher_record import new_record, started_ticks, write_record
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from tests.support.programs import run_program

PORTS = Ports(trainer=1001, rendezvous=1002, metrics=1003, inference=(1004, 1005))


def make_config(tmp_path: Path, **spec: object) -> RunConfig:
    document = {"model": {"tiny": {}}, "seqLen": 512, "environments": [{"id": "arithmetic"}], **spec}
    return resolve_spec(RLRunSpec.model_validate(document), name="x", uid="u", output_dir=str(tmp_path))


def test_each_role_gets_addresses_of_others(tmp_path: Path) -> None:
    first, second = with_endpoints(make_config(tmp_path, inference={"replicas": 2}), PORTS, replay=None)
    assert (first.inference.port, second.inference.port) == (1004, 1005)
    assert first.orchestrator.inference_urls == ["http://127.0.0.1:1004", "http://127.0.0.1:1005"]
    assert first.orchestrator.trainer_url == f"http://127.0.0.1:{first.trainer.port}"
    assert first.config_hash() == make_config(tmp_path, inference={"replicas": 2}).config_hash()


def test_key_is_in_no_command_line(tmp_path: Path) -> None:
    configs = with_endpoints(make_config(tmp_path, inference={"replicas": 2}), PORTS, replay=None)
    specs = plan_processes(
        configs,
        [tmp_path / "run.json", tmp_path / "run.1.json"],
        attempt=3,
        api_key="secret-key",
        launch_id="id",
        ports=PORTS,
        trainer_gpus=[],
        inference_gpus=[],
    )
    assert [s.name for s in specs] == ["inference-0", "inference-1", "trainer", "orchestrator"]
    assert all("secret-key" not in " ".join(s.command) for s in specs)
    assert all(s.environment["RLRUN_API_KEY"] == "secret-key" and s.environment["RLRUN_ATTEMPT"] == "3" for s in specs)
    assert len({s.log for s in specs}) == 4


def test_both_roles_see_the_gpu_of_both_options(tmp_path: Path) -> None:
    """The options may name the same GPU twice; without them each role needs its own."""
    run = make_config(tmp_path, trainer={"gpusPerReplica": 1}, inference={"gpusPerReplica": 1})
    with pytest.raises(ValueError, match="share GPUs with --trainer-gpu-ids and --inference-gpu-ids"):
        split_gpus(run, [0], None, None)
    trainer, inference = split_gpus(run, [0], [0], [0])
    started = plan_processes(
        with_endpoints(run, PORTS, replay=None),
        [tmp_path / "run.json"],
        attempt=1,
        api_key="key",
        launch_id="id",
        ports=PORTS,
        trainer_gpus=trainer,
        inference_gpus=inference,
    )
    devices = {one.name: one.environment["CUDA_VISIBLE_DEVICES"] for one in started}
    assert (devices["trainer"], devices["inference"]) == ("0", "0")


COLOCATED = {"algorithm": {"maxAsyncLevel": 0}, "placement": {"colocate": True}}


def test_colocated_engines_use_trainer_gpus(tmp_path: Path) -> None:
    both = {"gpusPerReplica": 2}
    inference = {**both, "tensorParallel": 2}
    run = make_config(tmp_path, **COLOCATED, trainer={**both, "replicas": 2}, inference=inference)
    assert run.inference is not None
    assert run.inference.replicas == 2, "each replica of the trainer has an engine"
    assert split_gpus(run, range(4), None, None) == ([0, 1, 2, 3], [0, 1, 2, 3])
    with pytest.raises(ValueError, match="trainer needs 4 GPUs"):
        split_gpus(run, range(3), None, None)
    with pytest.raises(ValueError, match="remove --inference-gpu-ids"):
        split_gpus(run, range(4), None, [0])
    configs = with_endpoints(run, PORTS, replay=None)
    urls = ["http://127.0.0.1:1004", "http://127.0.0.1:1005"]
    for one in configs:
        assert (one.trainer.colocated, one.trainer.engine_urls, one.orchestrator.inference_urls) == (True, urls, urls)
    started = plan_processes(
        configs,
        [tmp_path / "run.json", tmp_path / "run.1.json"],
        attempt=1,
        api_key="k",
        launch_id="id",
        ports=PORTS,
        trainer_gpus=[0, 1, 2, 3],
        inference_gpus=[0, 1, 2, 3],
    )
    devices = {one.name: one.environment["CUDA_VISIBLE_DEVICES"] for one in started}
    assert devices == {"inference-0": "0,1", "inference-1": "2,3", "trainer": "0,1,2,3", "orchestrator": ""}


def test_replay_without_engines_is_not_colocated(tmp_path: Path) -> None:
    run = make_config(tmp_path, **COLOCATED).model_copy(update={"inference": None})
    (one,) = with_endpoints(run, Ports(1001, 1002, 1003, ()), replay="rollouts")
    assert (one.trainer.colocated, one.orchestrator.colocated, one.trainer.engine_urls) == (False, False, [])


GPU = {"trainer": {"gpusPerReplica": 2}, "inference": {"replicas": 2, "gpusPerReplica": 1}}


@pytest.mark.parametrize(
    ("available", "trainer", "inference", "expected"),
    [
        (range(4), None, None, ([2, 3], [0, 1])),
        (range(4), [0, 1], None, ([0, 1], [2, 3])),
        (range(2), [0, 1], [0, 1], ([0, 1], [0, 1])),
    ],
)
def test_gpus_are_split_as_requested(
    tmp_path: Path,
    available: range,
    trainer: list[int] | None,
    inference: list[int] | None,
    expected: tuple[list[int], list[int]],
) -> None:
    assert split_gpus(make_config(tmp_path, **GPU), list(available), trainer, inference) == expected


def test_too_few_gpus_for_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer needs 2 GPUs .* but only 1 of 3 are free for it"):
        split_gpus(make_config(tmp_path, **GPU), [0, 1, 2], None, None)
    with pytest.raises(ValueError, match="this machine has no GPU 7"):
        split_gpus(make_config(tmp_path, **GPU), [0, 1, 2, 3], [0, 7], None)


def test_used_port_is_named_with_its_role() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        taken = sock.getsockname()[1]
        ports = Ports(free_port(), free_port(), free_port(), (taken,))
        with pytest.raises(PreflightError, match=rf"port {taken} \(inference\).*--inference-port") as caught:
            check_ports(ports)
    assert caught.value.code == exit_codes.UNAVAILABLE


def test_nonempty_folder_is_used_only_to_resume(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(PreflightError, match="is not empty: add --resume"):
        check_folder(tmp_path, resume=False)
    with pytest.raises(PreflightError, match=r"contains no run \(run.json is missing\)"):
        check_folder(tmp_path, resume=True)
    check_folder(tmp_path / "new", resume=False)
    assert (tmp_path / "precious").read_text() == "x"


def test_folder_of_running_launcher_is_refused(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.run_json.write_text("{}")
    with subprocess.Popen(["sleep", "60"]) as launcher:
        record = replace(
            new_record("run", 2, "rlrun local"), pid=launcher.pid, started_ticks=started_ticks(launcher.pid)
        )
        write_record(paths.launcher, record)
        with pytest.raises(
            PreflightError, match=rf"process {launcher.pid} .* runs attempt 2 .*kill -INT {launcher.pid}"
        ):
            check_folder(tmp_path, resume=True)
        check_folder(tmp_path, resume=True, take_over=True)
        launcher.kill()
    check_folder(tmp_path, resume=True)
    with pytest.raises(PreflightError, match="it needs --resume"):
        check_folder(tmp_path / "new", resume=False, take_over=True)


def test_file_in_place_of_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RoleError, match="cannot write to"):
        check_folder(tmp_path / "file", resume=False)


def test_model_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    run = make_config(tmp_path, model={"path": str(folder)})
    with pytest.raises(PreflightError, match="no folder"):
        check_model(run.trainer.model)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(PreflightError, match=r"has no weights \(\*.safetensors\)"):
        check_model(run.trainer.model)


def test_free_ports_are_distinct_and_not_ephemeral() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == len(ports)
    if first == 32768:  # The default of Linux.
        assert not [port for port in ports if first <= port <= last]
    with socket.create_server(("127.0.0.1", ports[0])):
        pass


def test_free_port_is_reserved_across_processes() -> None:
    port = free_port()
    code = (
        f"from rlrun.local import preflight; preflight._PORTS = range({port}, {port} + 1); print(preflight.free_port())"
    )

    def other() -> subprocess.CompletedProcess[str]:
        return run_program([sys.executable, "-c", code])

    refused = other()
    assert "no free port among" in refused.stderr
    assert refused.stdout == ""
    os.close(preflight._claims.pop())
    assert (other().stdout, other().stdout) == (f"{port}\n", f"{port}\n"), "each has ended before the next"
