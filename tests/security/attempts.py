"""Intruder as an environment of a product process: the command that runs one of its deeds as an ordinary user."""

from __future__ import annotations

import atexit
import functools
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.programs import wait_for
from tests.support.python_path import before

FOLDER = Path(__file__).parent / "intruder"
FIRST_PROCESS = "tests.security.intruder.first_process"
KEY = "the-runs-key"
NOBODY = 65534
RESTRICTED = "--no-new-privs"
"""Option of a pod without privilege escalation; a filter then also blocks signals."""
X86_64_ONLY = pytest.mark.skipif(platform.machine() != "x86_64", reason="the ways are x86-64's")


def ordinary_user(*more: str) -> list[str]:
    """Return the start of a command that runs as an ordinary user with read access to this checkout."""
    if os.geteuid() != 0:
        return ["setpriv", *more] if more else []
    may_read = [
        "--inh-caps=-all,+dac_read_search",
        "--ambient-caps=-all,+dac_read_search",
        "--bounding-set=-all,+dac_read_search",
    ]
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *may_read, *more]


@functools.cache
def intruder_forks(*more: str) -> Forks:
    """Return the process of an ordinary user that has imported the intruder's first process; it ends with the session.

    That process needs 1 s of CPU time for its imports, more than for most deeds. Each deed has its own processes.
    """
    forks = Forks([FIRST_PROCESS], _make_variables("/nonexistent"), ordinary_user(*more))
    atexit.register(forks.close)
    return forks


def _make_variables(home: str) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RLRUN_")},
        "PYTHONPATH": before(FOLDER),
        "TMPDIR": f"{home}/tmp",
        "HOME": home,
        "HF_HOME": f"{home}/hub",
        "RLRUN_API_KEY": KEY,
        "RLRUN_ATTEMPT": "1",
        "RLRUN_CONFIG": "/dev/null",
        "RLRUN_POD_NAME": "a-0",
        "RLRUN_POD_IP": "127.0.0.1",
    }


def attempt(entry: str, deed: str, *more: str, cwd: str = "/") -> Any:
    """Run a deed of the intruder; return its result.

    Args:
        entry: process that starts the intruder, see `first_process.py`.
        deed: name of a function of `intruder.py`.
        more: options of `setpriv`.
        cwd: working directory of the process.
    """
    # On a disk: `/dev/shm`, a possible place of temporary files, stays open to environments.
    with tempfile.TemporaryDirectory(prefix="home-", dir="/var/tmp") as home:
        Path(home, "tmp").mkdir()
        for folder in (Path(home), Path(home, "tmp")):
            folder.chmod(0o777)  # The ordinary user needs write access.
        out, err = Path(home, "out"), Path(home, "err")
        process = intruder_forks(*more).start(
            FIRST_PROCESS,
            entry,
            deed,
            log=out,
            errors=err,
            environment=_make_variables(home),
            exact=True,
            folder=Path(cwd),
        )
        wait_for(lambda: process.poll() is not None, f"the end of {deed}", state=lambda: out.read_text())
        printed = out.read_text()
        assert process.poll() == 0, printed + err.read_text()
    assert KEY not in printed
    return json.loads(printed.splitlines()[-1])


def refused(found: dict[str, str]) -> set[str]:
    """Return the names of the refused ways."""
    return {way for way, outcome in found.items() if outcome == "refused"}
