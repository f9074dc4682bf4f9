"""An environment looks into the processes that started it, as the same ordinary user: each way is tried on real processes."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.environments.process.containment import enclosure
from rlrun.environments.process.containment.enclosure import CREDENTIALS
from rlrun.environments.process.worker import MAX_FILES
from rlrun.environments.rewards.sandbox import UnavailableError
from rlrun.orchestrator.rollouts.environment_pool import open_arenas
from rlrun_operator.render.containers import CREDENTIALS_FOLDER
from tests.support.programs import run_program
from tests.support.python_path import before

FOLDER = Path(__file__).parent / "intruder"
KEY = "the-runs-key"
NOBODY = 65534
RESTRICTED = "--no-new-privs"
"""As in a pod without privilege escalation: there a filter keeps signals off, too."""
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the ways are x86-64's")


def ordinary_user(*more: str) -> list[str]:
    """The beginning of a command that runs as an ordinary user, who may read this checkout."""
    if os.geteuid() != 0:
        return ["setpriv", *more] if more else []
    may_read = [
        "--inh-caps=-all,+dac_read_search",
        "--ambient-caps=-all,+dac_read_search",
        "--bounding-set=-all,+dac_read_search",
    ]
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *may_read, *more]


def attempt(entry: str, deed: str, *more: str) -> Any:
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RLRUN_")},
        "PYTHONPATH": before(FOLDER),
        "TMPDIR": "/tmp",
        "HOME": "/tmp",
        "RLRUN_API_KEY": KEY,
        "RLRUN_ATTEMPT": "1",
        "RLRUN_CONFIG": "/dev/null",
        "RLRUN_POD_NAME": "a-0",
        "RLRUN_POD_IP": "127.0.0.1",
    }
    command = [*ordinary_user(*more), sys.executable, str(FOLDER / "first_process.py"), entry, deed]
    done = run_program(command, env=variables, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    assert KEY not in done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def refused(found: dict[str, str]) -> set[str]:
    return {way for way, outcome in found.items() if outcome == "refused"}


def test_the_ways_are_ways_where_nobody_refuses() -> None:
    found = attempt("nothing", "inspects_an_ordinary_process")
    assert refused(found) == set()


@pytest.mark.parametrize(
    ("entry", "more"),
    [
        ("orchestrator", ()),
        ("orchestrator", (RESTRICTED,)),
        ("pod", (RESTRICTED,)),
        ("container", (RESTRICTED,)),
        ("command line", ()),
    ],
)
def test_look_into_the_process_that_holds_the_runs_key(entry: str, more: tuple[str, ...]) -> None:
    found = attempt(entry, "inspects_the_orchestrator", *more)
    assert refused(found) == set(found), found


@pytest.mark.parametrize("more", [(), (RESTRICTED,)], ids=["user", "pod"])
def test_look_into_the_keeper(more: tuple[str, ...]) -> None:
    found = attempt("nothing", "inspects_its_keeper", *more)
    assert refused(found) == set(found), found


def test_look_into_other_processes_of_the_user() -> None:
    """They refuse nothing by themselves; the environment's process is enclosed."""
    found = attempt("nothing", "inspects_the_orchestrator", RESTRICTED)
    assert set(found) - refused(found) == {"write oom_score_adj", "write coredump_filter"}


def test_open_more_files_than_an_environment_may() -> None:
    most = min(MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert most - 64 < attempt("nothing", "opens_files") < most


def test_its_own_processes_stay_open_to_an_enclosed_environment() -> None:
    assert refused(attempt("nothing", "inspects_an_ordinary_process", RESTRICTED)) <= {"write oom_score_adj"}


READS = """
import os, sys
from pathlib import Path
from rlrun.environments.process.containment.enclosure import enclose
folder = Path(sys.argv[1])
assert enclose([str(folder / "run" / "secrets" / "link"), str(folder / "none")])
for name in sys.argv[2:]:
    try:
        print((folder / name).read_text())
    except PermissionError:
        print("refused")
(folder / "other" / "new").write_text("1")
os.rename(folder / "other" / "new", folder / "third" / "new")
print((folder / "third" / "new").read_text())
"""


def test_read_the_credentials_of_the_pod(tmp_path: Path) -> None:
    for name in ("run/secrets/real", "other", "third", "run/secrets/beside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "run" / "secrets" / "link").symlink_to(tmp_path / "run" / "secrets" / "real")
    (tmp_path / "run" / "file").write_text("above")
    names = ["run/secrets/real/file", "run/secrets/link/file", "other/file", "run/secrets/beside/file", "run/file"]
    command = ["setpriv", RESTRICTED, sys.executable, "-c", READS, str(tmp_path), *names]
    done = run_program(command)
    told = ["refused", "refused", "other", "run/secrets/beside", "above", "1"]
    assert done.stdout.split() == told, done.stderr


def test_the_credentials_are_those_that_the_operator_mounts() -> None:
    assert CREDENTIALS_FOLDER in CREDENTIALS


@pytest.mark.parametrize(
    ("version", "gave_up", "says"),
    [(0, True, "has no Landlock"), (1, True, "Landlock 1 .* too old"), (2, True, None), (0, False, None)],
)
async def test_a_kernel_that_cannot_enclose_is_told_and_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int, gave_up: bool, says: str | None
) -> None:
    def known(_: object) -> int:
        if not version:
            raise UnavailableError("this kernel has no Landlock")
        return version

    monkeypatch.setattr(enclosure, "landlock_version", known)
    monkeypatch.setattr(enclosure, "_gave_up_privileges", lambda: gave_up)
    told: list[str] = []
    sink = logger.add(told.append, format="{message}", level="INFO")
    async with open_arenas([EnvironmentConfig(id="reverse-text")], tmp_path, lambda work: work.close()):
        pass
    logger.remove(sink)
    assert len(told) == (says is not None)
    assert says is None or re.search(says, told[0])
    assert version >= 2 or not enclosure.enclose()
