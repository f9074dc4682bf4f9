"""Pods of a test, each with its own loopback address."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "harness"))

from pod_harness import Pod, run_config

from rlrun.config.models.run_config import RunConfig
from rlrun.local.supervisor import marked_processes
from rlrun.pod.container_settings import Signals


@pytest.fixture
def signals() -> Iterator[Signals]:
    """Signals of this process; its own handlers are restored afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    """Factory of pods of one run, each with its own loopback address."""
    made: list[Pod] = []
    # Other tests on this machine use other networks.
    net = f"127.{random.randint(1, 250)}.{random.randint(1, 250)}"

    def make(name: str = "demo-trainer-0", config: RunConfig | None = None) -> Pod:
        ip = f"{net}.{len(made) + 1}"
        pod = Pod(tmp_path, name, config or run_config(tmp_path / "demo"), ip, f"{net}.1")
        made.append(pod)
        return pod

    yield make
    for pid in (pid for pod in made for pid in marked_processes(pod.mark)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in (process for pod in made for process in pod.running):
        process.kill()  # A forked process has no mark.
        process.communicate()
