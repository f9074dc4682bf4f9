"""One process per test session that has imported the modules of commands and roles, for tests whose subject is not a start.

A command that checks a manifest uses 0.7 s of CPU time for its imports and 0.05 s for the check; a container's first process 0.5 s.
"""

from __future__ import annotations

import atexit
import functools

from tests.support.forks import Forks

RLRUN = "rlrun.cli.main"
"""The command `rlrun`."""
CODE = "tests.support.forked_code"
"""A program like `python -c`: the first argument is its code."""
MODULES = (
    RLRUN,
    "rlrun.cli.validate",
    "rlrun.cli.rl",
    "rlrun.environments.process.host",
    "rlrun.local.judge",
    "rlrun.local.process_plan",
    "rlrun.orchestrator.main",
    "rlrun.orchestrator.rl_pipeline",
    "rlrun.pod.container",
    "rlrun.pod.pod_command",
)


@functools.cache
def program_forks() -> Forks:
    """Return the process; it starts at the first call and ends with the session."""
    forks = Forks(MODULES, {})
    atexit.register(forks.close)
    return forks
