"""PRIME-RL's keys in v0.3 (January 2026) and in August 2026: one row per key, in the order of its tables."""

from __future__ import annotations

from rlrun.config.dialects.prime_rl import data, evaluation, inference, orchestrator, run, trainer
from rlrun.config.dialects.rows import Dialect

PRIME_RL = Dialect("PRIME-RL", (*run.RUN_ROWS, *trainer.TRAINER_ROWS, *orchestrator.ORCHESTRATOR_ROWS, *inference.INFERENCE_ROWS, *data.DATA_ROWS))
"""Dialect of files for `rl`, `sft`, `trainer`, `orchestrator` and `inference`."""
_OWN = {"client", *(row.path for row in evaluation.EVALUATION_ROWS)}
PRIME_RL_EVAL = Dialect("PRIME-RL", (*evaluation.EVALUATION_ROWS, *(row for row in run.RUN_ROWS if row.path not in _OWN)))
"""Dialect of files for `eval`."""
