"""Our plugin of vLLM, which vLLM loads in every process of every server where this package is installed.

Processes of a server that a run did not start are left alone: no signal is taken there.
"""

from __future__ import annotations

import os

from rlrun.inference.command import ENGINE_VARIABLE


def load() -> None:
    """Let a process that hangs be asked what it does."""
    if ENGINE_VARIABLE not in os.environ:
        return
    from rlrun.diagnostics.stacks import listen

    listen()
