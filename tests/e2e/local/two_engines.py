"""Whole run of processes with two engines, whose second engine a test may break."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlrun.local.preflight import free_port
from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.batch import Batch, read_batch
from rlrun.runtime import exit_codes
from tests.processes.stub.harness.stub_run import Program, StubRun, stub_run
from tests.support.stub.policy import Policy
from tests.support.stub.script import PolicyScript

ASYNC_LEVEL, OFF_POLICY = 2, 8
POLICY = {"half_life_steps": 200.0}
"""Low learning rate, which keeps the log-probs of neighboring versions different until the end of a long run."""
EVERYTHING = 1e-4
"""Smallest significant difference between log-probs; neighboring versions differ by more in the first hundreds of
steps.
"""


class TwoEngines:
    """One attempt of a run whose engines need 20 ms per token."""

    def __init__(self, run: StubRun) -> None:
        self.run = run
        port = free_port()
        urls = [f"http://127.0.0.1:{run.engine_port}", f"http://127.0.0.1:{port}"]
        orchestrator = run.config.orchestrator.model_copy(update={"inference_urls": urls})
        run.config = run.config.model_copy(update={"orchestrator": orchestrator})
        run.file.write_text(run.config.model_dump_json())
        assert run.config.inference is not None
        self._second = run.root / "second.json"
        inference = run.config.inference.model_copy(update={"port": port})
        self._second.write_text(run.config.model_copy(update={"inference": inference}).model_dump_json())

    def begin(self, *faults: dict[str, Any]) -> None:
        """Start all processes.

        Args:
            faults: faults of the second engine, in the format of a script.
        """
        script = {"trainer": {"stepSeconds": 0.05}, "inference": {"tokenSeconds": 0.02}, "policy": POLICY}
        self.run.script(**script)
        assert self.run.wait(self.run.start("model")) == exit_codes.OK
        self.first = self.run.start("inference")
        self._broken = json.dumps(script | {"inference": {"tokenSeconds": 0.02, "faults": list(faults)}})
        self.start_second()
        self.trainer = self.run.start("trainer")
        self.run.until(self.run.paths.attempt_file(1).exists, "the attempt has begun")
        self.orchestrator = self.run.start("orchestrator")

    def start_second(self) -> None:
        """Start the second engine, possibly again, without the run's weights."""
        self.second: Program = self.run.start("inference", name="second", file=self._second, STUB_SCRIPT=self._broken)

    @property
    def steps(self) -> int:
        """Return the number of steps with written metrics."""
        return len(self.run.metrics()) if self.run.paths.metrics.exists() else 0

    def until(self, steps: int) -> None:
        """Wait for a number of steps; fail if the run ends first."""
        self.run.until(lambda: self.steps >= steps or self.orchestrator.poll() is not None, f"{steps} steps")

    def finish(self) -> None:
        """Wait for the last step."""
        assert self.run.wait(self.orchestrator) == exit_codes.OK, self.run.state()
        assert self.run.wait(self.trainer) == exit_codes.OK, self.run.state()

    def end(self) -> None:
        """End the run from outside."""
        self.orchestrator.send_signal(signal.SIGTERM)
        assert self.run.wait(self.orchestrator) == 128 + signal.SIGTERM, self.run.state()

    def batches(self) -> list[Batch]:
        """Return all batches for training."""
        attempt = read_attempt(self.run.paths.attempt_file(1))
        return [read_batch(a.path) for a in attempt.owned(self.run.paths.batches_on_disk())]

    @cached_property
    def _accuracies(self) -> list[float]:
        script = PolicyScript(**POLICY)
        policy, found = Policy(0, float(np.float32(script.first))), []
        for _ in range(self.run.max_steps + 1):
            found.append(policy.accuracy)
            policy = policy.trained(script)
        return found

    def wrong_tokens(self) -> int:
        """Return the number of trained tokens whose log-prob does not match their labeled version, or whose version is
        too old or too new.
        """
        wrong = 0
        for batch in self.batches():
            for sample in batch.samples:
                for version, logprob in zip(
                    sample.versions[sample.loss_mask], sample.logprobs[sample.loss_mask], strict=True
                ):
                    accuracy = self._accuracies[version]
                    possible = (0.0, math.log(accuracy), math.log((1 - accuracy) / 25))
                    known = any(math.isclose(logprob, one, rel_tol=0, abs_tol=EVERYTHING) for one in possible)
                    wrong += not known or not sample.dispatch_version <= version < batch.step
                wrong += sample.dispatch_version < batch.step - 1 - OFF_POLICY
        return wrong


@contextmanager
def two_engines(root: Path, max_steps: int) -> Iterator[TwoEngines]:
    """End all processes with the block."""
    common = {
        "algorithm": {"max_async_level": ASYNC_LEVEL, "max_off_policy_steps": OFF_POLICY},
        "checkpoint": {"enabled": False},
    }
    orchestrator = common | {
        "environments": [{"id": "reverse-text", "group_size": 8, "args": {"length": 16}}],
        "sampling": {"max_tokens": 20},
        "record_rollouts": True,
    }
    with stub_run(root, max_steps=max_steps, trainer=common, orchestrator=orchestrator) as run:
        yield TwoEngines(run)
