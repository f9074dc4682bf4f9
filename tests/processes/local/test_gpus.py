"""GPUs of a launch and their locks: two runs of a machine share a GPU only on request."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.run_config import RunConfig
from rlrun.local.gpus import LOCKS_VARIABLE, Claim, GpuLocks, Machine, claim_gpus, gpu_ids
from rlrun.local.preflight import PreflightError
from rlrun.local.process_plan import RoleProcess
from rlrun.local.supervisor import Supervisor
from rlrun.runtime import exit_codes

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3", "GPU-dddd-4")
BUSY = Machine(UUIDS)


def make_config(name: str = "x", **spec: object) -> RunConfig:
    blocks = {"trainer": {"gpusPerReplica": 1}, "inference": {"gpusPerReplica": 1}}
    document = {"model": {"tiny": {}}, "seqLen": 512, "environments": [{"id": "arithmetic"}], **blocks, **spec}
    return resolve_spec(RLRunSpec.model_validate(document), name=name, uid="u", output_dir=f"/runs/{name}")


def claim_run_gpus(run: RunConfig, locks: Path, **more: Any) -> Any:
    """Claim GPUs of a machine with four, with a folder of locks."""
    variables = {LOCKS_VARIABLE: str(locks)} | more.pop("variables", {})
    ids = more.pop("trainer", None), more.pop("inference", None)
    return claim_gpus(run, *ids, share=more.pop("share", False), machine=lambda: BUSY, variables=variables)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2, 0", [2, 0]),
        ("1,-1,2", [1]),
        ("GPU-cccc-3,0", ["GPU-cccc-3", 0]),
        ("GPU-c,MIG-1/2/3", ["GPU-c", "MIG-1/2/3"]),
    ],
)
def test_visible_gpus_match_cuda(text: str | None, expected: list[int | str]) -> None:
    assert BUSY.visible_gpus({} if text is None else {"CUDA_VISIBLE_DEVICES": text}) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4", "this machine has no GPU 4, only 4 GPUs"),
        ("0,GPU-aaaa-1", "contains a GPU twice"),
        ("x", "'x' is neither"),
    ],
)
def test_invalid_visible_devices_variable_is_refused(text: str, message: str) -> None:
    with pytest.raises(PreflightError, match=rf"CUDA_VISIBLE_DEVICES \({re.escape(text)}\).*{message}"):
        BUSY.visible_gpus({"CUDA_VISIBLE_DEVICES": text})


def test_gpu_has_one_key_for_all_names() -> None:
    assert BUSY.key(2) == BUSY.key("GPU-cccc-3") == BUSY.key("GPU-cc") == "GPU-cccc-3"
    assert BUSY.key("GPU-aa") == "GPU-aa"  # Two GPUs have this prefix.
    assert Machine([None]).key(0) == "index-0"
    assert BUSY.chosen_gpus([0, 3], ["GPU-aaaa-1", 1]) == ["GPU-aaaa-1", 3]


def test_gpus_are_found_without_a_library(tmp_path: Path) -> None:
    """The only GPU of a container is CUDA's first, independent of the name of its device file."""
    devices, driver = tmp_path / "dev", tmp_path / "driver"
    devices.mkdir()
    assert Machine.here(driver, devices).uuids == []
    for name in ("nvidia3", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    assert Machine.here(driver, devices).uuids == [None]
    folder = driver / "0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: NVIDIA X\nGPU UUID: \t GPU-1-2\nDevice Minor: 3\n")
    assert Machine.here(driver, devices).uuids == ["GPU-1-2"]
    (folder / "information").write_text("GPU UUID: \t GPU-????\n")
    assert Machine.here(driver, devices).uuids == [None]


def test_options_name_gpus_by_index_or_uuid() -> None:
    assert gpu_ids("2,GPU-aaaa-1") == [2, "GPU-aaaa-1"]
    with pytest.raises(Exception, match="'-1' is neither the index of a GPU nor its UUID"):
        gpu_ids("0,-1")


def test_parallel_runs_have_distinct_gpus(tmp_path: Path) -> None:
    with claim_run_gpus(make_config("a"), tmp_path) as first, claim_run_gpus(make_config("b"), tmp_path) as second:
        assert (first.inference, first.trainer) == ([0], [1])
        assert (second.inference, second.trainer) == ([2], [3])
        with pytest.raises(PreflightError) as refused, claim_run_gpus(make_config("c"), tmp_path):
            pass
    assert refused.value.code == exit_codes.UNAVAILABLE
    said = str(refused.value)
    assert f"GPU 1 is used by run a in /runs/a (process {os.getpid()})" in said
    assert "GPU 3 is used by run b in /runs/b" in said
    assert "--share-gpus" in said
    with claim_run_gpus(make_config("c"), tmp_path) as third:
        assert third.trainer == [1]


def test_named_gpu_is_not_replaced(tmp_path: Path) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "GPU-aaaa-1,GPU-cccc-3,GPU-dddd-4"}
    with claim_run_gpus(make_config("a"), tmp_path, trainer=[0], inference=[2]):
        with (
            pytest.raises(PreflightError, match=r"^GPU GPU-cccc-3 is used by run a .*choose other GPUs"),
            claim_run_gpus(make_config("b"), tmp_path, trainer=[2], inference=["GPU-dddd-4"], variables=variables),
        ):
            pass
        other = make_config("b", inference={})
        with claim_run_gpus(other, tmp_path, trainer=["GPU-dddd-4"]) as free:
            assert free.trainer == [3]


def test_gpus_are_shared_on_request(tmp_path: Path) -> None:
    both = {"trainer": [0], "inference": [1]}
    with (
        claim_run_gpus(make_config("a"), tmp_path, **both),
        claim_run_gpus(make_config("b"), tmp_path, **both, share=True) as beside,
    ):
        assert (beside.trainer, beside.inference, beside.descriptors) == ([0], [1], ())
    with (
        claim_run_gpus(make_config("a"), tmp_path, share=True),
        claim_run_gpus(make_config("b"), tmp_path, share=True) as second,
    ):
        assert second.inference == [0]
        with claim_run_gpus(make_config("c"), tmp_path) as alone:
            assert (alone.inference, alone.trainer) == ([2], [3])


def test_options_give_one_gpu_to_both_roles(tmp_path: Path) -> None:
    with claim_run_gpus(make_config("a"), tmp_path, trainer=[0], inference=[0]) as claim:
        assert (claim.trainer, claim.inference) == ([0], [0])
        assert len(claim.descriptors) == 1
        with claim_run_gpus(make_config("b"), tmp_path) as other:
            assert (other.inference, other.trainer) == ([1], [2])


def test_cpu_run_does_not_search_gpus(tmp_path: Path) -> None:
    def machine() -> Machine:
        raise AssertionError

    run = make_config(trainer={}, inference={})
    with claim_gpus(
        run, None, None, share=False, machine=machine, variables={LOCKS_VARIABLE: str(tmp_path)}
    ) as nothing:
        assert nothing == Claim()
    assert not [*tmp_path.iterdir()]


def test_too_few_gpus_on_machine_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(PreflightError, match="trainer needs 8 GPUs") as refused,
        claim_run_gpus(make_config(trainer={"gpusPerReplica": 8}), tmp_path),
    ):
        pass
    assert "is used by" not in str(refused.value)


def test_unusable_lock_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError, match=rf"{LOCKS_VARIABLE}"), claim_run_gpus(make_config(), tmp_path / "file"):
        pass
    (tmp_path / "GPU-aaaa-1.lock").symlink_to(tmp_path / "file")
    with pytest.raises(PreflightError, match=r"GPU-aaaa-1\.lock"), claim_run_gpus(make_config(), tmp_path):
        pass


HOLDS = """
import sys, time
from pathlib import Path
from rlrun.local.gpus import GpuLocks
assert GpuLocks(Path(sys.argv[1])).take_lock("GPU-aaaa-1", shared=False) is not None
print("held", flush=True)
time.sleep(600)
"""


def test_kernel_releases_lock_of_killed_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        locks = GpuLocks(tmp_path)
        assert locks.take_lock("GPU-aaaa-1", shared=False) is None
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        file = locks.take_lock("GPU-aaaa-1", shared=False)
        assert file is not None
        os.close(file)


def test_roles_keep_lock_after_launcher_ends(tmp_path: Path) -> None:
    """Only roles with GPUs keep it, so a slow orchestrator does not block the next run."""

    def role(name: str, gpus: str) -> RoleProcess:
        command = (sys.executable, "-c", "import time; time.sleep(600)")
        log = tmp_path / name / "role.log"
        return RoleProcess("trainer", name, command, {"CUDA_VISIBLE_DEVICES": gpus}, log, log.with_name("error"))

    locks = GpuLocks(tmp_path / "locks")
    for gpus, kept in (("0", True), ("", False)):
        file = locks.take_lock("GPU-aaaa-1", shared=False)
        assert file is not None
        supervisor = Supervisor(uuid.uuid4().hex, [file])
        try:
            supervisor.start([role(f"gpus-{gpus}", gpus)])
            os.close(file)
            again = locks.take_lock("GPU-aaaa-1", shared=False)
            assert (again is None) == kept
            if again is not None:
                os.close(again)
        finally:
            supervisor.stop(0)
