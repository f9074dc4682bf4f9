"""Evaluations during training: one after the other, each while an engine still holds its version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from loguru import logger

from rlrun.orchestrator.aio.volume_access import BestEffortWriter, in_thread
from rlrun.orchestrator.engines.weight_sync import WeightSync
from rlrun.orchestrator.evaluation.evaluator import Answer, Evaluator, trace_line
from rlrun.orchestrator.progress.metrics_file import MetricsFile, write_jsonl
from rlrun.orchestrator.rollouts.context import RunContext


class Evaluations:
    """Evaluations of one attempt.

    Args:
        context: context of the attempt.
        evaluator: runner of the episodes.
        sync: weight hand-over, which holds each requested version until this class releases it.
        metrics: file for the results.
        writer: writer of the traces.
    """

    def __init__(
        self,
        context: RunContext,
        evaluator: Evaluator,
        *,
        sync: WeightSync,
        metrics: MetricsFile,
        writer: BestEffortWriter,
    ) -> None:
        self._evaluator, self._sync, self._metrics, self._writer = evaluator, sync, metrics, writer
        self._paths, self._pool, self._signal = context.paths, context.pool, context.signal
        self._wanted: asyncio.Queue[int] = asyncio.Queue()
        self.pending = 0
        """Number of requested and unfinished evaluations."""
        self.rewards: dict[str, float] = {}
        """Latest mean reward of each environment."""

    @property
    def answered(self) -> int:
        """Number of answers so far."""
        return self._evaluator.answered

    def want(self, version: int) -> None:
        """Queue the evaluation of a version that is being published and held."""
        self.pending += 1
        self._wanted.put_nowait(version)

    async def run(self) -> None:
        """Evaluate the queued versions in order, until canceled."""
        while True:
            version = await self._wanted.get()
            try:
                metrics = await self._evaluate_version(version)
            finally:
                self._sync.release(version)
            self._metrics.add(version, "evaluation", metrics)
            self.pending -= 1
            self._signal.notify()

    async def _evaluate_version(self, version: int) -> dict[str, float]:
        began = time.monotonic()
        await self._signal.until(lambda: self._pool.version == version or not self._sync.held(version))
        if not self._sync.held(version):
            return {}
        answers = await self._evaluator.evaluate(version)
        trace = self._paths.evaluation_trace(version)
        self._writer.write(f"traces/{trace.name}", partial(_write_trace, trace, version, answers))
        metrics = await in_thread(partial(self._evaluator.metrics, answers))  # in a thread: it reads each token
        seconds = time.monotonic() - began
        shown = {k: round(v, 4) for k, v in metrics.items() if k.endswith(("reward/mean", "reward/mean_all"))}
        logger.info(f"version {version}: {shown} ({len(answers)} answers in {seconds:.1f} s)")
        suffix = "/reward/mean"
        self.rewards |= {k[5 : -len(suffix)]: v for k, v in metrics.items() if k.endswith(suffix)}
        return metrics | {"time/evaluate": seconds, "time/evaluate_waited": self._evaluator.waited_seconds}


def _write_trace(path: Path, version: int, answers: Sequence[Answer]) -> None:
    write_jsonl(path, ({"policy_version": version} | trace_line(answer) for answer in answers))
