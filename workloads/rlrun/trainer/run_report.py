"""Reports of a run's phase and metrics to the orchestrator, rank 0, the log and `metrics.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from loguru import logger

from rlrun.protocol.messages.trainer_channel import Phase
from rlrun.trainer.channel.run_channel import Channel

_OF_NEXT_STEP: tuple[Phase, ...] = ("training", "waiting_for_batch", "waiting_for_turn")
"""Phases that belong to the step after the last finished one."""


class RunReport:
    """Reports of one rank about a run during training.

    Args:
        channel: channel to the run's orchestrator, on rank 0 only.
        report_phase: receiver of this rank's phase, step and micro-batch, called on each change.
        label: prefix of log lines.
        leads: whether this is rank 0.
    """

    def __init__(
        self, channel: Channel | None, report_phase: Callable[[Phase, int, int], None], *, label: str, leads: bool
    ) -> None:
        self._channel, self._report_phase, self._leads, self.label = channel, report_phase, leads, label
        self._micro_batch = 0

    def log_line(self, message: str) -> None:
        """Log a line about the run."""
        logger.info(f"{self.label}{message}")

    def phase(self, phase: Phase, trained: int) -> None:
        """Report the start of a phase; `trained` is the last finished step."""
        self._micro_batch = 0
        self._report_phase(phase, trained + (phase in _OF_NEXT_STEP), 0)
        if self._channel is not None:
            self._channel.phase(phase)

    def start_micro_batch(self, trained: int) -> None:
        """Report the start of the next micro-batch; `trained` is the last finished step."""
        self._micro_batch += 1
        self._report_phase("training", trained + 1, self._micro_batch)
        if self._channel is not None:
            self._channel.part()

    def report_step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        """Report a trained step; only rank 0 does so."""
        if not self._leads:
            return
        self.log_line(step_summary(step, max_steps, metrics))
        if self._channel is not None:
            self._channel.append_event("trained", step, metrics=metrics)


def step_summary(step: int, max_steps: int, metrics: Mapping[str, float]) -> str:
    """Return the log line of a trained step.

    Args:
        step: number of the trained step.
        max_steps: number of steps of the run.
        metrics: metrics of the step, by their names in `metrics.jsonl`.
    """
    return (
        f"step {step}/{max_steps}: loss {metrics['loss']:.4g}, grad_norm {metrics['grad_norm']:.4g}, "
        f"lr {metrics['lr']:.3g}, {metrics['perf/throughput']:.0f} tokens/s, step {metrics['time/step']:.2f} s, "
        f"waited {metrics['time/wait_for_batch']:.2f} s"
    )


def append_line(path: Path, step: int, attempt: int, metrics: Mapping[str, float]) -> None:
    """Append the metrics of a step; used in replays, which have no orchestrator. Values that are not finite are left out.

    Args:
        path: file `metrics.jsonl`.
        step: number of the trained step.
        attempt: number of the attempt that trained it.
        metrics: metrics of the step.
    """
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    line = json.dumps({"step": step, "attempt": attempt, **finite})
    try:
        with path.open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        logger.warning(f"cannot write the metrics of step {step} to {path}: {error}")
