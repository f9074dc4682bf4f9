"""One call of `rlrun local`: its parameters and its output."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from rlrun.api.resource import RLRunSpec
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.local.farewell import Farewell
from rlrun.local.measures import print_measures
from rlrun.local.record import Recorder
from rlrun.local.shared.gpu_meter import GpuMeter
from rlrun.local.shared.gpus import Claim
from rlrun.local.summary import print_summary
from rlrun.local.supervisor import Running, exit_code_of
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes


@dataclass(frozen=True)
class Call:
    """Parameters and output of one call."""

    spec: RLRunSpec
    name: str
    paths: RunPaths
    options: argparse.Namespace
    console: Console
    command: str
    """Command of the user, without the folder."""
    interrupted: list[int]
    """Received signals."""
    begun: list[Path] = field(default_factory=list)
    """Files of the configuration. Not empty after they were written, when the folder contains a run."""

    @property
    def trains(self) -> bool:
        """Whether the run trains; False for an evaluation."""
        return self.spec.task in TRAINING_TASKS

    @property
    def again(self) -> str:
        """Command that continues the run."""
        return f"{self.command} --output-dir {shlex.quote(self.folder)} --resume"

    def farewell(self, *, failed: bool) -> list[str]:
        """Return the last lines of a stopped run: its checkpoint, its folders, and how to continue."""
        farewell = Farewell(self.paths, shlex.quote(self.folder), self.again, trains=self.trains, failed=failed)
        return list(farewell.lines())

    def recorder(self, attempt: int, gpus: Claim, held: ExitStack) -> Recorder:
        """Return the writer of the launcher's record. It samples the use of the GPUs until `held` is closed."""
        roles = {"trainer": gpus.trainer, "inference": [one for one in gpus.inference if one not in gpus.trainer]}
        held.callback((meter := GpuMeter(roles)).close)
        return Recorder(
            self.paths.launcher,
            name=self.name,
            attempt=attempt,
            command=self.again,
            gpus={role: len(ids) for role, ids in roles.items()},
            use=meter.document,
        )

    @property
    def folder(self) -> str:
        """Folder of the run, relative to the working directory if possible."""
        root, here = self.paths.root, Path.cwd()
        return str(root.relative_to(here)) if root.is_relative_to(here) else str(root)

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def without_folder(words: Sequence[str]) -> list[str]:
    """Remove the options that `Call.again` adds from a command line: the run's folder and how to continue."""
    kept: list[str] = []
    skips = False
    for word in words:
        if skips or word in ("--resume", "--take-over") or word.startswith("--output-dir="):
            skips = False
        elif word == "--output-dir":
            skips = True
        else:
            kept.append(word)
    return kept


def conclude_run(call: Call, failed: Running | None, *, elapsed_seconds: float) -> int:
    """Print how the run ended and how to continue it. Returns the exit code."""
    if call.interrupted:
        return farewell_of_signal(call)
    if failed:
        print("\n".join(["everything is stopped", *call.farewell(failed=True)]), file=sys.stderr)
        return exit_code_of(failed, call.paths.root)
    if call.trains:
        print_summary(call.console, call.paths.root, elapsed_seconds=elapsed_seconds, command=call.command)
    else:
        print_measures(call.console, call.paths.root)
    return exit_codes.OK


def farewell_of_signal(call: Call) -> int:
    """Print the state of a run that a signal has ended. Returns the exit code."""
    name = (
        f" by {signal.Signals(call.interrupted[0]).name}" if call.interrupted[:1] not in ([], [signal.SIGINT]) else ""
    )
    if not call.begun:
        call.say(f"interrupted{name}: nothing was started")
    else:
        call.say("\n".join([f"interrupted{name}: everything is stopped", *call.farewell(failed=False)]))
    return exit_codes.INTERRUPTED
