"""Run of stub processes whose orchestrator is killed, with checks for lost, repeated or reordered work."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlrun.inspect.small_files import json_lines
from rlrun.orchestrator.checkpoint import newest_complete
from rlrun.orchestrator.journal.frames import RolloutEntry, read_segment
from rlrun.orchestrator.staleness import too_old
from rlrun.protocol.files.attempts import Attempt, is_lost, read_attempt
from rlrun.protocol.files.batch import Batch, Sample, read_batch
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from tests.processes.stub.harness.stub_run import StubRun
from tests.support.stub.script import FAULTS_FOLDER, REQUESTS_FILE
from tests.support.waiting import PATIENCE_SECONDS

GROUP_SIZE, GROUPS_PER_STEP = 4, 4
SYNCHRONOUS = {"max_async_level": 0, "max_off_policy_steps": 0}

Prompt = tuple[int, ...]


def make_changes(max_steps: int, algorithm: dict[str, int] = SYNCHRONOUS, interval: int = 2) -> dict[str, Any]:
    """Return changes for `StubRun`: each task has its own prompt, which identifies the group in the engine's requests."""
    common = {"algorithm": algorithm, "checkpoint": {"interval": interval}}
    environment = {"id": "reverse-text", "group_size": GROUP_SIZE, "args": {"length": 16}}
    orchestrator = {
        "environments": [environment],
        "batch_size": GROUP_SIZE * GROUPS_PER_STEP,
        "sampling": {"max_tokens": 20},
        "record_rollouts": True,
    }
    return {"max_steps": max_steps, "trainer": common, "orchestrator": common | orchestrator}


def prompt_of(entry: RolloutEntry) -> Prompt:
    """Return the prompt of a single turn."""
    [sequence] = entry.rollout.sequences
    return tuple(sequence.input_ids[~sequence.loss_mask].tolist())


@dataclass
class Kill:
    """State when an orchestrator was killed, and the engine's earlier requests."""

    attempt: Attempt
    finished: list[tuple[Attempt, RolloutEntry]]
    """Rollouts of the journal, each with the attempt that wrote it."""
    asked: int
    """Number of lines in the engine's record."""


@dataclass
class KilledRun:
    """One run, its engine, and the attempts of trainer and orchestrator."""

    run: StubRun
    kills: list[Kill] = field(default_factory=list)
    number: int = 0

    def begin(self) -> None:
        """Start the engine, which outlives all attempts."""
        self.run.script(trainer={"stepSeconds": 0.05}, inference={"tokenSeconds": 0.01, "recordRequests": True})
        assert self.run.wait(self.run.start("model")) == exit_codes.OK
        self.run.start("inference")

    def start(self) -> None:
        """Start the next attempt."""
        self.number += 1
        self.trainer = self.run.start("trainer", self.number)
        self.run.until(self.run.paths.attempt_file(self.number).exists, "the attempt has begun")
        self.orchestrator = self.run.start("orchestrator", self.number)

    def kill(self) -> None:
        """Kill the orchestrator with SIGKILL and end the trainer like its supervisor."""
        for process in (self.orchestrator, self.trainer):
            process.kill()
            process.wait()
        # Earlier requests of the killed process are in the engine's sockets, and in its record after it has answered a
        # later request.
        urllib.request.urlopen(f"http://127.0.0.1:{self.run.engine_port}/health", timeout=PATIENCE_SECONDS).close()
        attempt = read_attempt(self.run.paths.attempt_file(self.number))
        self.kills.append(Kill(attempt, journal(self.run.paths), len(self.requests())))

    def finish(self) -> None:
        """Wait until all steps are trained and saved."""
        assert self.run.wait(self.orchestrator) == exit_codes.OK, self.run.state()
        assert self.run.wait(self.trainer) == exit_codes.OK, self.run.state()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; fail if the run ends first."""
        self.run.until(lambda: condition() or self.orchestrator.poll() is not None, what)

    def requests(self) -> list[dict[str, Any]]:
        """Return the requests that the engine has received, in order."""
        path = self.run.paths.root / FAULTS_FOLDER / REQUESTS_FILE
        return json_lines(path.read_text()) if path.exists() else []

    def trained(self) -> dict[int, dict[int, str]]:
        """Return step -> group -> task in order of groups, from the last training of each step."""
        batches = self._batches()
        return {batch.step: {s.group: s.task_id for s in sorted(batch.samples, key=_place)} for batch in batches}

    def _batches(self) -> list[Batch]:
        attempt = read_attempt(self.run.paths.attempt_file(self.number))
        return [read_batch(a.path) for a in attempt.owned(self.run.paths.batches_on_disk())]

    def placed(self) -> dict[int, int]:
        """Return group -> step that trained it."""
        return {group: step for step, groups in self.trained().items() for group in groups}

    def shift(self, other: KilledRun) -> int:
        """Return the largest difference in steps between the two runs for groups that both trained."""
        here, there = self.placed(), other.placed()
        return max((abs(here[group] - there[group]) for group in here.keys() & there.keys()), default=0)

    def too_old(self, limit: int) -> int:
        """Return the number of trained samples that exceed `maxOffPolicySteps`."""
        return sum(
            too_old(sample.dispatch_version, step=batch.step, max_off_policy_steps=limit)
            for batch in self._batches()
            for sample in batch.samples
        )

    def sampler(self) -> Any:
        """Return the sampler's state in the last complete checkpoint: the next draw and the known tasks."""
        snapshot = newest_complete(self.run.paths, read_attempt(self.run.paths.attempt_file(self.number)))
        assert snapshot is not None
        return snapshot.sampler

    def generated_again(self, limit: int) -> list[str]:
        """Return the rollouts that were requested again although they were finished, durable and usable.

        Args:
            limit: value of `maxOffPolicySteps`.
        """
        requests, found = self.requests(), []
        for kill, until in zip(self.kills, [*self.kills[1:], None], strict=True):
            attempt = read_attempt(self.run.paths.attempt_file(kill.attempt.attempt + 1))
            asked: Counter[Prompt] = Counter()
            for request in requests[kill.asked : until.asked if until is not None else None]:
                asked[tuple(request["prompt"])] += request["n"]
            finished: dict[Prompt, set[int]] = {}
            for writer, entry in kill.finished:
                old = too_old(entry.dispatch_version, step=attempt.base_step + 1, max_off_policy_steps=limit)
                if not old and not is_lost(entry.newest_version, writer, attempt):
                    finished.setdefault(prompt_of(entry), set()).add(entry.member)
            found += [
                f"attempt {attempt.attempt}: {asked[prompt]} more for a prompt of which {sorted(members)} were finished"
                for prompt, members in finished.items()
                if asked[prompt] > GROUP_SIZE - len(members)
            ]
        return found


def journal(paths: RunPaths) -> list[tuple[Attempt, RolloutEntry]]:
    """Return all rollouts of the journal."""
    return [
        (read_attempt(paths.attempt_file(segment.attempt)), entry)
        for segment in paths.journal_on_disk()
        for entry in read_segment(segment.path).entries
        if isinstance(entry, RolloutEntry)
    ]


def _place(sample: Sample) -> tuple[int, int]:
    return sample.group, sample.rollout
