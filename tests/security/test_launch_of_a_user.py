"""Launcher of an ordinary user: it finds and ends roles whose variables it cannot read."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.security.attempts import ordinary_user
from tests.support.programs import run_program

STUCK = """
import signal, time
from rlrun.diagnostics import stacks
from rlrun.runtime.processes import refuse_inspection
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stacks.answer_requests()
refuse_inspection()
def waits_for_ever():
    print("up", flush=True)
    time.sleep(600)
waits_for_ever()
"""
LAUNCHER = """
import sys, time, uuid
from pathlib import Path
from rlrun.diagnostics import stacks
from rlrun.local.process_plan import RoleProcess
from rlrun.local.supervisor import Supervisor, marked_processes, stacks_file
from rlrun.runtime.processes import LAUNCH_VARIABLE
folder, code, mark = Path(sys.argv[1]), sys.argv[2], uuid.uuid4().hex
stacks.ANSWER_SECONDS = 60.0
spec = RoleProcess(
    "orchestrator", "orchestrator", (sys.executable, "-c", code), {LAUNCH_VARIABLE: mark}, folder / "a.log", folder / "e"
)
supervisor = Supervisor(mark)
supervisor.start([spec])
while "up" not in spec.log.read_text():
    time.sleep(0.05)
print("readable:", len(marked_processes(mark)))
supervisor.stop(grace_seconds=60, hurry=lambda: str(stacks_file(spec)) in spec.log.read_text())
print("ended:", not Path("/proc", str(supervisor.running[0].process.pid)).exists())
print("told:", "in waits_for_ever" in stacks_file(spec).read_text())
"""


def test_role_that_refuses_inspection_is_dumped_and_ended() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        command = [*ordinary_user(), sys.executable, "-c", LAUNCHER, folder, STUCK]
        done = run_program(command, cwd="/")
    assert done.stdout.splitlines() == ["readable: 0", "ended: True", "told: True"], done.stderr
