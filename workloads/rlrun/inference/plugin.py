"""Our plugin of vLLM, which vLLM loads in every process of every server where this package is installed.

Processes of a server that a run did not start are left alone: no backend is registered there and no signal is taken.
"""

from __future__ import annotations

import os

from rlrun.inference.command import ENGINE_VARIABLE


def load() -> None:
    """Register the transfer of weights over gloo, and let a process that hangs be asked what it does."""
    if ENGINE_VARIABLE not in os.environ:
        return
    from rlrun.diagnostics.stacks import listen
    from rlrun.inference.weights.gloo_transfer import register

    register()
    listen()
