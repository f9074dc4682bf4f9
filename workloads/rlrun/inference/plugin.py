"""RLRun's vLLM plugin, which vLLM loads in every process of every server in an environment with this package.

It does nothing in processes of servers that no run has started.
"""

from __future__ import annotations

import os

from rlrun.inference.engine_settings import ENGINE_VARIABLE, MODEL_CLASS_VARIABLE


def load() -> None:
    """Install the signal handler that reports the stacks of a hanging engine process, and register the run's own model class."""
    if ENGINE_VARIABLE not in os.environ:
        return
    from rlrun.diagnostics.stacks import answer_requests

    answer_requests()
    if path := os.environ.get(MODEL_CLASS_VARIABLE):
        from rlrun.model_class import register_for_engine

        register_for_engine(path)
