"""Limit of open files. Each request in flight needs a connection, and each environment process needs pipes."""

from __future__ import annotations

import resource

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig

MOST = 1 << 20
"""Upper bound of the limit. Programs that environments start may iterate over all numbers up to the limit."""
RESERVED = 256
"""Files of the orchestrator process: libraries, logs, metrics and connections to the trainer."""
PER_PROCESS = 16
"""Files of one environment process: pipes, log and socket."""


def needed_files(config: OrchestratorConfig) -> int:
    """Return the largest number of files that a run opens at the same time."""
    return config.max_concurrency + PER_PROCESS * sum(e.workers for e in config.environments) + RESERVED


def raise_limit(config: OrchestratorConfig) -> int:
    """Raise the soft limit of open files to the hard limit and return it.

    Logs a warning if the limit is too low for the run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _finite_limit(hard)
    if _finite_limit(soft) < limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError) as error:
            logger.warning(f"cannot raise the limit of open files above {soft}: {error}")
            limit = soft
    else:
        limit = _finite_limit(soft)
    if limit < (files := needed_files(config)):
        logger.warning(
            f"the limit of open files (ulimit -n) is {limit}, but maxConcurrency ({config.max_concurrency}) can need {files}: raise the "
            f"hard limit, or set maxConcurrency to {max(1, config.max_concurrency - (files - limit))}"
        )
    return limit


def _finite_limit(limit: int) -> int:
    return MOST if limit == resource.RLIM_INFINITY else min(limit, MOST)
