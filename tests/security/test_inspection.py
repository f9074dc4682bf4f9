"""Inspection of product processes by an environment of the same ordinary user: each way is tried on real processes."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import pytest
from loguru import logger

from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.environments.process.containment import enclosure
from rlrun.environments.process.containment.enclosure import CREDENTIALS
from rlrun.environments.process.worker import MAX_FILES
from rlrun.environments.rewards.sandbox import UnavailableError
from rlrun.orchestrator.rollouts.environment_pool import open_arenas
from rlrun_operator.render.role_containers import CREDENTIALS_FOLDER
from tests.security.attempts import RESTRICTED, X86_64_ONLY, attempt, refused
from tests.support.programs import run_program

pytestmark = X86_64_ONLY


def test_all_inspection_ways_work_on_unprotected_process() -> None:
    found = attempt("nothing", "inspects_an_ordinary_process")
    assert refused(found) == set()


@pytest.mark.parametrize(
    ("entry", "more"),
    [
        ("orchestrator", ()),
        ("orchestrator", (RESTRICTED,)),
        ("pod", (RESTRICTED,)),
        ("container", (RESTRICTED,)),
        ("shared container", (RESTRICTED,)),
        ("command line", ()),
    ],
)
def test_process_with_api_key_cannot_be_inspected(entry: str, more: tuple[str, ...]) -> None:
    found = attempt(entry, "inspects_the_orchestrator", *more)
    assert refused(found) == set(found), found


@pytest.mark.parametrize("more", [(), (RESTRICTED,)], ids=["user", "pod"])
def test_keeper_cannot_be_inspected(more: tuple[str, ...]) -> None:
    found = attempt("nothing", "inspects_its_keeper", *more)
    assert refused(found) == set(found), found


def test_enclosed_environment_cannot_inspect_other_processes() -> None:
    """Those processes refuse nothing themselves; the environment's process is enclosed."""
    found = attempt("nothing", "inspects_the_orchestrator", RESTRICTED)
    assert set(found) - refused(found) == {"write oom_score_adj", "write coredump_filter"}


def test_environment_cannot_open_files_beyond_its_limit() -> None:
    most = min(MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert most - 64 < attempt("nothing", "opens_files") < most


def test_enclosed_environment_can_inspect_its_own_processes() -> None:
    assert refused(attempt("nothing", "inspects_an_ordinary_process", RESTRICTED)) <= {"write oom_score_adj"}


READS = """
import os, sys
from pathlib import Path
from rlrun.environments.process.containment.enclosure import enclose_process
folder = Path(sys.argv[1])
assert enclose_process([str(folder / "run" / "secrets" / "link"), str(folder / "none")])
for name in sys.argv[2:]:
    try:
        print((folder / name).read_text())
    except PermissionError:
        print("refused")
(folder / "other" / "new").write_text("1")
os.rename(folder / "other" / "new", folder / "third" / "new")
print((folder / "third" / "new").read_text())
"""


def test_enclosed_process_cannot_read_pod_credentials(tmp_path: Path) -> None:
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


def test_credentials_include_folder_mounted_by_operator() -> None:
    assert CREDENTIALS_FOLDER in CREDENTIALS


@pytest.mark.parametrize(
    ("version", "gave_up", "says"),
    [(0, True, "has no Landlock"), (1, True, "Landlock 1 .* too old"), (2, True, None), (0, False, None)],
)
async def test_unsuitable_kernel_is_reported_without_error(
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
    assert version >= 2 or not enclosure.enclose_process()
