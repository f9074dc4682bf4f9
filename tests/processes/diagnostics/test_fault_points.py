"""Named moments of the file protocol and of the hand-over at which tests break a process."""

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


def test_the_table_names_every_point_of_the_code_and_no_other() -> None:
    assert _named(PACKAGE) == set(POINTS)
    assert _named(FAULTS.parent / "stub") <= set(POINTS)


def _named(folder: Path) -> set[str]:
    return {name for file in folder.rglob("*.py") for name in _NAMED.findall(file.read_text())}


def test_a_plan_is_read() -> None:
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
def test_a_wrong_plan_says_what_may_stand_there(text: str, told: str) -> None:
    with pytest.raises(FaultPlanError, match=re.escape(told)):
        read_plan(text)


def test_it_happens_at_the_nth_time_alone() -> None:
    points = FaultPoints(read_plan("batch.told=enospc@2"), None)
    points.reach("batch.told")
    points.reach("batch.written")
    with pytest.raises(OSError, match="No space left") as caught:
        points.reach("batch.told")
    assert caught.value.errno == errno.ENOSPC
    points.reach("batch.told")


def test_it_happens_once_for_all_processes_that_share_a_folder(tmp_path: Path) -> None:
    def process() -> FaultPoints:
        return FaultPoints(read_plan("batch.told=eio"), tmp_path / "faults")

    with pytest.raises(OSError, match="Input/output"):
        process().reach("batch.told")
    process().reach("batch.told")


def _run(code: str, plan: str, *, installed: bool = True) -> subprocess.CompletedProcess[str]:
    path = [str(PACKAGE.parent), *([str(FAULTS)] if installed else [])]
    env = os.environ | {VARIABLE: plan, "PYTHONPATH": os.pathsep.join(path)}
    return run_program([sys.executable, "-c", code], env=env)


@pytest.mark.parametrize(("action", "code"), [("sigkill", -9), ("sigterm", -15), ("exit:7", 7)])
def test_a_process_ends_at_a_point_and_leaves_nothing_under_the_final_name(
    action: str, code: int, tmp_path: Path
) -> None:
    target = tmp_path / "manifest.json"
    write = (
        "from pathlib import Path\n"
        "from rlrun.protocol.files.durable import write_json\n"
        f"write_json(Path({str(target)!r}), 1, before_rename='checkpoint.manifest.before_rename')"
    )
    assert _run(write, f"checkpoint.manifest.before_rename={action}").returncode == code
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json.tmp"]
    assert _run(write, "").returncode == 0
    assert target.exists()


REACH = "from rlrun.diagnostics.fault_points import reach; reach('batch.told'); print('went on')"


def test_what_ships_reads_no_plan() -> None:
    """A pod's variables are its users'; none of them ends a process."""
    ended = _run(REACH, "batch.told=exit:7", installed=False)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
    assert _run(REACH, "batch.told=exit:7").returncode == 7


def test_a_process_with_a_wrong_plan_does_not_start() -> None:
    ended = _run("print('started')", "nowhere=hang")
    assert ended.stdout == ""
    assert ended.returncode == exit_codes.USAGE
    assert ended.stderr.startswith("error: FAULT_POINTS names the point 'nowhere'")
    assert "Traceback" not in ended.stderr


def test_a_folder_and_a_new_file_have_their_points_before_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
