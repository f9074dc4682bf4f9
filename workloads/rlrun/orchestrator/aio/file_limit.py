"""The limit of open files: each request in flight is a connection, and each environment's process has pipes."""

from __future__ import annotations

import resource

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig

MOST = 1 << 20
"""Not raised above: programs that environments start may go through all numbers up to the limit."""
RESERVED = 256
"""Files of the process itself: libraries, logs, metrics, connections to the trainer."""
PER_PROCESS = 16
"""Pipes, log and socket of an environment's process."""


def needed_files(config: OrchestratorConfig) -> int:
    """Most files that a run has open at once."""
    return config.max_concurrency + PER_PROCESS * sum(e.workers for e in config.environments) + RESERVED


def raise_limit(config: OrchestratorConfig) -> int:
    """Raise the soft limit of open files to the hard one, and warn where that is too few for the run; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _finite_limit(hard)
    if _finite_limit(soft) < limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError) as error:
            logger.warning(f"the limit of open files stays {soft}: {error}")
            limit = soft
    else:
        limit = _finite_limit(soft)
    if limit < (files := needed_files(config)):
        logger.warning(
            f"the limit of open files (ulimit -n) is {limit}, and maxConcurrency ({config.max_concurrency}) can need {files}: raise the "
            f"hard limit, or set maxConcurrency to {max(1, config.max_concurrency - (files - limit))}"
        )
    return limit


def _finite_limit(limit: int) -> int:
    return MOST if limit == resource.RLIM_INFINITY else min(limit, MOST)
