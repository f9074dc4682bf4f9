"""Fault points: named moments of the file protocol and the weight transfer at which tests break a process."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlrun.diagnostics import fault_points
from rlrun.protocol.files import durable
from rlrun.runtime import exit_codes
from tests.support.faults import rlrun_faults
from tests.support.faults.rlrun_faults import POINTS, VARIABLE, Fault, FaultPlanError, FaultPoints, read_plan
from tests.support.programs import run_program

PACKAGE = Path(fault_points.__file__).parents[1]
FAULTS = Path(rlrun_faults.__file__).parent
_NAMED = re.compile(r'(?:reach\(|before_rename=|before_link=)"([^"]+)"')


def test_table_lists_exactly_the_points_of_the_code() -> None:
    assert _find_point_names(PACKAGE) == set(POINTS)
    assert _find_point_names(FAULTS.parent / "stub") <= set(POINTS)


def _find_point_names(folder: Path) -> set[str]:
    return {name for file in folder.rglob("*.py") for name in _NAMED.findall(file.read_text())}


def test_fault_plan_is_parsed() -> None:
    plan = read_plan(" batch.told=exit:7@3, journal.appended=enospc,engine.loaded=sigstop@12,")
    assert plan == {
        "batch.told": Fault("exit", 7, 3),
        "journal.appended": Fault("enospc"),
        "engine.loaded": Fault("sigstop", nth=12),
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("batch.told", "POINT=ACTION"),
        ("batch.told=explode", "sigkill"),
        ("batch.told=exit:256", "exit:0 to exit:255"),
        ("batch.told=hang@0", "POINT=ACTION@N"),
        ("batch.eaten=hang", "batch.told"),
        ("batch.told=hang,batch.told=eio", "twice"),
    ],
)
def test_invalid_fault_plan_lists_valid_values(text: str, told: str) -> None:
    with pytest.raises(FaultPlanError, match=re.escape(told)):
        read_plan(text)


def test_fault_happens_only_at_nth_time() -> None:
    points = FaultPoints(read_plan("batch.told=enospc@2"), None)
    points.reach("batch.told")
    points.reach("batch.written")
    with pytest.raises(OSError, match="No space left") as caught:
        points.reach("batch.told")
    assert caught.value.errno == errno.ENOSPC
    points.reach("batch.told")


def test_fault_happens_once_per_shared_folder(tmp_path: Path) -> None:
    def process() -> FaultPoints:
        return FaultPoints(read_plan("batch.told=eio"), tmp_path / "faults")

    with pytest.raises(OSError, match="Input/output"):
        process().reach("batch.told")
    process().reach("batch.told")


def _run_code(code: str, plan: str, *, installed: bool = True) -> subprocess.CompletedProcess[str]:
    path = [str(PACKAGE.parent), *([str(FAULTS)] if installed else [])]
    env = os.environ | {VARIABLE: plan, "PYTHONPATH": os.pathsep.join(path)}
    return run_program([sys.executable, "-c", code], env=env)


@pytest.mark.parametrize(("action", "code"), [("sigkill", -9), ("sigterm", -15), ("exit:7", 7)])
def test_fault_before_rename_leaves_no_final_file(action: str, code: int, tmp_path: Path) -> None:
    target = tmp_path / "manifest.json"
    write = (
        "from pathlib import Path\n"
        "from rlrun.protocol.files.durable import write_json\n"
        f"write_json(Path({str(target)!r}), 1, before_rename='checkpoint.manifest.before_rename')"
    )
    assert _run_code(write, f"checkpoint.manifest.before_rename={action}").returncode == code
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json.tmp"]
    assert _run_code(write, "").returncode == 0
    assert target.exists()


REACH = "from rlrun.diagnostics.fault_points import reach; reach('batch.told'); print('went on')"


def test_shipped_package_ignores_fault_plan() -> None:
    """Users control the variables of a pod, so no variable may end a process."""
    ended = _run_code(REACH, "batch.told=exit:7", installed=False)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
    assert _run_code(REACH, "batch.told=exit:7").returncode == 7


def test_process_with_invalid_fault_plan_does_not_start() -> None:
    ended = _run_code("print('started')", "nowhere=hang")
    assert ended.stdout == ""
    assert ended.returncode == exit_codes.USAGE
    assert ended.stderr.startswith("error: FAULT_POINTS names the point 'nowhere'")
    assert "Traceback" not in ended.stderr


def test_new_folder_and_file_have_points_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPoints(read_plan("batch.before_rename=enospc,attempt.before_link=enospc"), None)
    monkeypatch.setattr(fault_points, "_handler", plan.reach)
    with (
        pytest.raises(OSError, match="No space"),
        durable.new_folder(tmp_path / "b", before_rename="batch.before_rename"),
    ):
        pass
    with pytest.raises(OSError, match="No space"):
        durable.create_json(tmp_path / "a", {}, before_link="attempt.before_link")
    assert list(tmp_path.iterdir()) == []
