"""An intruder as an environment of a process of the product: the command that runs one deed of it, as an ordinary user."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run_program
from tests.support.python_path import before

FOLDER = Path(__file__).parent / "intruder"
KEY = "the-runs-key"
NOBODY = 65534
RESTRICTED = "--no-new-privs"
"""As in a pod without privilege escalation: there a filter keeps signals off, too."""
X86_64_ONLY = pytest.mark.skipif(platform.machine() != "x86_64", reason="the ways are x86-64's")


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


def attempt(entry: str, deed: str, *more: str, cwd: str = "/") -> Any:
    """Run a deed of the intruder; return what it found.

    Args:
        entry: the process that starts it, see `first_process.py`.
        deed: name of a function of `intruder.py`.
        more: options of `setpriv`.
        cwd: working directory of the process.
    """
    # On a disk: `/dev/shm`, where temporary files of tests may lie, stays open to environments.
    with tempfile.TemporaryDirectory(prefix="home-", dir="/var/tmp") as home:
        Path(home, "tmp").mkdir()
        for folder in (Path(home), Path(home, "tmp")):
            folder.chmod(0o777)  # the ordinary user's
        variables = {
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
        command = [*ordinary_user(*more), sys.executable, str(FOLDER / "first_process.py"), entry, deed]
        done = run_program(command, env=variables, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert KEY not in done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def refused(found: dict[str, str]) -> set[str]:
    """Names of the ways that were refused."""
    return {way for way, outcome in found.items() if outcome == "refused"}
