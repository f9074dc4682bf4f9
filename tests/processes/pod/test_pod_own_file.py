"""Configuration file of a pod, and its identification."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pod_harness import Pod, run_config

from rlrun.config.models.file_mark import VARIABLE, file_mark
from rlrun.pod.container_settings import Signals, settings_from_environment
from rlrun.pod.preparation import wait_for_own_file
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from tests.support.programs import finish

ENDS = "print('the role begins', flush=True)"


def mark_of(pod: Pod, role: str) -> str:
    return file_mark(json.loads(Path(pod.env["RLRUN_CONFIG"]).read_text()), role)


def wait_for_file(
    pod: Pod, mark: str | None, signals: Signals, told: list[str], role: str = "trainer", seconds: float = 0.2
) -> None:
    settings = settings_from_environment(pod.env | ({VARIABLE: mark} if mark is not None else {}))
    wait_for_own_file(settings, role, say=told.append, signals=signals, deadline_seconds=seconds)


def test_container_waits_for_its_own_configuration(pods: Callable[..., Pod]) -> None:
    pod = pods()
    own, file = mark_of(pod, "trainer"), Path(pod.env["RLRUN_CONFIG"])
    text = file.read_text()
    file.write_text(text.replace("512", "1024"))
    process = pod.start("trainer", ENDS, **{VARIABLE: own})
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "waiting for the configuration of this pod" in line
    assert "belongs to another attempt, or was edited" in line
    file.write_text(text)
    output, _ = finish(process)
    assert "the role begins" in output


def test_wrong_configuration_fails_so_that_restart_can_repair(pods: Callable[..., Pod], signals: Signals) -> None:
    told: list[str] = []
    with pytest.raises(RoleError, match="another attempt") as failed:
        wait_for_file(pods(), "0" * 16, signals, told)
    assert failed.value.code == exit_codes.FAILURE


@pytest.mark.parametrize("text", ["", "[]", "{", '{"inference": 3}', None])
def test_unreadable_configuration_is_waited_for(pods: Callable[..., Pod], signals: Signals, text: str | None) -> None:
    pod = pods()
    file = Path(pod.env["RLRUN_CONFIG"])
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(RoleError, match="cannot read"):
        wait_for_file(pod, "0" * 16, signals, [], role="inference")


def test_pod_of_earlier_release_accepts_any_configuration(pods: Callable[..., Pod], signals: Signals) -> None:
    wait_for_file(pods(), None, signals, [])


def test_marks_depend_only_on_own_section(tmp_path: Path) -> None:
    def marks(**spec: object) -> tuple[str, str]:
        document = json.loads(run_config(tmp_path, **spec).model_dump_json(by_alias=False))
        return file_mark(document, "inference"), file_mark(document, "trainer")

    engines, others = marks()
    assert marks(inference={"replicas": 3}) == (engines, others)
    longer = marks(maxSteps=7777)
    assert longer[0] == engines
    assert longer[1] != others
    shorter = marks(inference={"maxNumSeqs": 7})
    assert shorter[0] != engines
    assert shorter[1] != others
