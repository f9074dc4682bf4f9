"""Runs the tiers of tests, those that mostly wait beside those that mostly compute: `python -m tests.tiers [TIER ...]`.

Every tier runs, whatever became of the others. Each is one pytest of its own; its output appears line by line under its name,
and its summary once more at the end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REAL_IMAGES = "tests/e2e/cluster/test_real_images.py"
TIERS: Mapping[str, Sequence[str]] = {
    "unit": ("tests/unit",),
    "controlplane": ("tests/controlplane",),
    "parts": ("tests/trainer", "tests/engine", "tests/e2e/local"),
    "cluster": ("tests/cluster/selftest", "tests/e2e/cluster", f"--ignore={REAL_IMAGES}"),
    "real": (REAL_IMAGES,),
}
"""Arguments of pytest."""
STAGES: Sequence[Sequence[str]] = (("unit", "controlplane"), ("parts", "cluster"), ("real",))
"""Tiers of one stage run side by side. `controlplane` waits for controllers, and `cluster` for stubs, nearly all of their time."""


@dataclass
class Tier:
    """One pytest.

    Attributes:
        summary: its last line.
        seconds: how long it took.
    """

    name: str
    process: subprocess.Popen[str]
    began: float
    summary: str = ""
    seconds: float = 0.0

    @classmethod
    def start(cls, name: str) -> Tier:
        """Start it; it stays in this process's group, so that Ctrl-C reaches it."""
        command = [sys.executable, "-m", "pytest", *TIERS[name]]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return cls(name, process, time.monotonic())

    def follow(self) -> None:
        """Show its output until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"[{self.name}] {line}", end="", flush=True)
            self.summary = line.strip() or self.summary
        self.process.wait()
        self.seconds = time.monotonic() - self.began

    @property
    def passed(self) -> bool:
        return self.process.returncode == 0


def run_stage(names: Sequence[str]) -> list[Tier]:
    """Run tiers side by side to their ends; a signal to end goes on to all of them."""
    tiers = [Tier.start(name) for name in names]
    followers = [threading.Thread(target=tier.follow) for tier in tiers]

    def stop(number: int, _frame: object) -> None:
        for tier in tiers:
            if tier.process.poll() is None:
                tier.process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    for follower in followers:
        follower.start()
    for follower in followers:
        follower.join()
    for number, handler in before.items():
        signal.signal(number, handler)
    return tiers


def main(wanted: Sequence[str]) -> int:
    """Run the wanted tiers, all without any.

    Returns:
        The exit code: 0 when nothing failed.
    """
    if unknown := sorted(set(wanted) - set(TIERS)):
        print(f"unknown tier {', '.join(unknown)}; there are {', '.join(TIERS)}", file=sys.stderr)
        return 2
    done: list[Tier] = []
    for stage in STAGES:
        if names := [name for name in stage if not wanted or name in wanted]:
            print(f"== {' beside '.join(names)}", flush=True)
            done += run_stage(names)
            if any(tier.process.returncode in (2, -signal.SIGINT, -signal.SIGTERM) for tier in done):
                break  # interrupted: nothing more is started
    for tier in done:
        verdict = "passed" if tier.passed else f"FAILED ({tier.process.returncode})"
        print(f"{tier.name}: {verdict} in {tier.seconds:.0f} s: {tier.summary}", flush=True)
    return 0 if all(tier.passed for tier in done) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
