"""One short run of the trainer, and how it ended."""

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
"""Between two questions after the trainer's state: its server's thread is busy while steps compute."""


@dataclass(frozen=True)
class Variant:
    """How a run differs from the others."""

    ranks: int
    steps: int
    switch_seconds: float
    """After which a thread of Python has to let another one go on."""
    save_async: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the trainer's configuration."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    codes: list[int]
    """Of the ranks; negative: the signal that ended it."""
    told: str
    """What tells most of a failure: the last frames of the ranks that crashed, or the end of the log."""

    @property
    def failed(self) -> bool:
        """Whether a rank ended otherwise than it should."""
        return any(self.codes)


def variants(runs: int, steps: int, seed: int) -> Iterator[Variant]:
    """So many runs, the same ones for the same seed."""
    chosen = random.Random(seed)
    for _ in range(runs):
        yield Variant(chosen.choice((2, 2, 4)), steps, chosen.choice((0.005, 0.0001)), chosen.random() < 0.8)


def play(variant: Variant, root: Path, model: Path, zygote: Zygote) -> Outcome:
    """Train a run to its end.

    Args:
        variant: how it differs from others.
        root: its folder, which does not exist yet.
        model: that it starts from.
        zygote: what its ranks are forked from.
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
    except AssertionError:  # it hangs, and was killed
        codes = [group.codes.get(pid, -9) for pid in group.pids]
    ended.set()
    for thread in threads:
        thread.join()
    return Outcome(codes, _told(group, crashes, variant.ranks) if any(codes) else "")


def _feed(orchestrator: Orchestrator, ended: threading.Event, steps: int) -> None:
    """Do the orchestrator's part until all is trained, or the trainer has ended."""
    orchestrator.given_up = ended.is_set
    with suppress(OSError, AssertionError):  # how the ranks ended tells more
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


def _told(group: Group, crashes: Path, ranks: int) -> str:
    dumps = {rank: stacks.crash_report(crashes, crash_file(rank)) for rank in range(ranks)}
    crashed = [f"rank {rank}:\n" + "\n".join(telling_lines(dump, 60)) for rank, dump in dumps.items() if dump]
    return "\n".join(crashed or telling_lines(group.text()))
