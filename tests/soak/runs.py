"""One short run of the trainer and its result."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlrun.diagnostics import stacks
from rlrun.protocol.files.failures import telling_lines
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.messages import trainer_channel as protocol
from rlrun.trainer.ranks.launch import crash_file
from tests.trainer.conftest import Group, Orchestrator, Run, Zygote

ASK_SECONDS = 0.02
"""Time between two requests for the trainer's state: its server's thread is busy while steps compute."""


@dataclass(frozen=True)
class Variant:
    """Differences between one run and the others."""

    ranks: int
    steps: int
    switch_seconds: float
    """Python's switch interval between threads, in seconds."""
    save_async: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the trainer's configuration."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    codes: list[int]
    """Exit codes of the ranks; negative: the signal that ended the rank."""
    told: str
    """Text about a failure: the last frames of the crashed ranks, or the end of the log."""

    @property
    def failed(self) -> bool:
        """Whether a rank ended incorrectly."""
        return any(self.codes)


def variants(runs: int, steps: int, seed: int) -> Iterator[Variant]:
    """Return `count` variants, equal for equal seeds."""
    chosen = random.Random(seed)
    for _ in range(runs):
        yield Variant(chosen.choice((2, 2, 4)), steps, chosen.choice((0.005, 0.0001)), chosen.random() < 0.8)


def play(variant: Variant, root: Path, model: Path, zygote: Zygote) -> Outcome:
    """Train a run to its end.

    Args:
        variant: differences from other runs.
        root: folder of the run, which does not exist yet.
        model: model that it starts from.
        zygote: process from which ranks are forked.
    """
    crashes = root / "crashes"
    crashes.mkdir(parents=True)
    run = Run(RunPaths(root), model, zygote)
    group = run.start(
        ranks=variant.ranks,
        max_steps=variant.steps,
        checkpoint={"save_async": variant.save_async, "keep_last": 2},
        environment={
            stacks.FOLDER_VARIABLE: str(crashes),
            "TEST_SWITCH_SECONDS": str(variant.switch_seconds),
        },
        **variant.options,
    )
    ended = threading.Event()
    threads = [
        threading.Thread(target=target, args=(Orchestrator(run, 1), ended, variant.steps)) for target in (_feed, _ask)
    ]
    for thread in threads:
        thread.start()
    try:
        codes = group.wait()
    except AssertionError:  # a rank hung and was killed
        codes = [group.codes.get(pid, -9) for pid in group.pids]
    ended.set()
    for thread in threads:
        thread.join()
    return Outcome(codes, _describe_failure(group, crashes, variant.ranks) if any(codes) else "")


def _feed(orchestrator: Orchestrator, ended: threading.Event, steps: int) -> None:
    """Act as the orchestrator until all steps are trained or the trainer has ended."""
    orchestrator.given_up = ended.is_set
    with suppress(OSError, AssertionError):  # the exit codes of the ranks explain more
        orchestrator.wait_for("published", 0)
        for step in range(1, steps + 1):
            orchestrator.step(step)
        orchestrator.wait_for("finished", steps)
        orchestrator.call("POST", protocol.SHUTDOWN, {})


def _ask(orchestrator: Orchestrator, ended: threading.Event, steps: int) -> None:
    while not ended.is_set():
        with suppress(OSError):
            orchestrator.call("GET", protocol.STATE)
        time.sleep(ASK_SECONDS)


def _describe_failure(group: Group, crashes: Path, ranks: int) -> str:
    dumps = {rank: stacks.crash_report(crashes, crash_file(rank)) for rank in range(ranks)}
    crashed = [f"rank {rank}:\n" + "\n".join(telling_lines(dump, 60)) for rank, dump in dumps.items() if dump]
    return "\n".join(crashed or telling_lines(group.text()))
