"""PRIME-RL's keys in v0.3 (January 2026) and in August 2026: one row per key, in the order of its tables."""

from __future__ import annotations

from rlrun.config.dialects.prime_rl import orchestrator_keys, run_keys, trainer_keys
from rlrun.config.dialects.rows import Dialect

PRIME_RL = Dialect(
    "PRIME-RL",
    (
        *run_keys.RUN_ROWS,
        *trainer_keys.TRAINER_ROWS,
        *orchestrator_keys.ORCHESTRATOR_ROWS,
        *run_keys.INFERENCE_ROWS,
        *trainer_keys.DATA_ROWS,
    ),
)
"""Dialect of files for `rl`, `sft`, `trainer`, `orchestrator` and `inference`."""
_OWN = {"client", *(row.path for row in orchestrator_keys.EVALUATION_ROWS)}
PRIME_RL_EVAL = Dialect(
    "PRIME-RL", (*orchestrator_keys.EVALUATION_ROWS, *(row for row in run_keys.RUN_ROWS if row.path not in _OWN))
)
"""Dialect of files for `eval`."""
