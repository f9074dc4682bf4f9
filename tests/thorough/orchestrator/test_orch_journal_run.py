"""Journal in the whole orchestrator: rollouts that are generated again after a kill, and the reported numbers."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from orch_simulation import API_KEY, FakeEngine, FakeTrainer, eventually, make_config, simulate

from rlrun.inference.client.engine_client import Completion, EngineUnavailableError
from rlrun.orchestrator.journal.frames import RolloutEntry, read_segment
from rlrun.orchestrator.journal.journal_writer import Journal
from rlrun.orchestrator.rollouts import engine_session as sessions_module
from rlrun.protocol.files.attempts import is_lost
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes

TASKS: list[dict[str, Any]] = [{"id": "reverse-text", "group_size": 2, "args": {"length": 12}}]


class Counting(FakeEngine):
    """Engine that counts the requested continuations by prompt."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, token_ids: Sequence[int], *, n: int, **options: Any) -> list[Completion]:
        self.asked[tuple(token_ids)] += n
        await self.gate.wait()
        return await super().generate(token_ids, n=n, **options)


def prompt_of(entry: RolloutEntry) -> tuple[int, ...]:
    [sequence] = entry.rollout.sequences
    return tuple(sequence.input_ids[~sequence.loss_mask].tolist())


def journal(paths: RunPaths) -> list[RolloutEntry]:
    """Return all rollouts of the journal."""
    contents = [read_segment(segment.path) for segment in paths.journal_on_disk()]
    return [e for content in contents for e in content.entries if isinstance(e, RolloutEntry)]


@pytest.mark.parametrize("killed_after", [1, 2, 5])
async def test_finished_rollouts_survive_a_kill(tmp_path: Path, tokenizer_folder: Path, killed_after: int) -> None:
    algorithm = {"max_async_level": 2, "max_off_policy_steps": 8}
    config = make_config(tmp_path, tokenizer_folder, max_steps=9, algorithm=algorithm, environments=TASKS)
    rng = random.Random(killed_after)
    first = await simulate(
        config,
        engines=[FakeEngine(lambda: rng.random() / 500)],
        step_seconds=lambda: 0.01,
        until=lambda trainer: len(trainer.batches) >= killed_after,
    )
    before, writer = journal(first.paths), first.trainer.attempt
    engine = Counting(lambda: rng.random() / 500)
    told_of: dict[str, Any] = {}
    engine.gate.clear()

    async def world(trainer: FakeTrainer) -> None:
        # Batches are recovered before rollouts of the journal; generation starts after both are counted.
        await eventually(lambda: engine.asked.total() > 0)
        url, headers = f"http://127.0.0.1:{config.metrics_port}", {"Authorization": f"Bearer {API_KEY}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            while "restarts reused" not in told_of.get("waiting_on", ""):
                with suppress(aiohttp.ClientError):  # it does not listen yet
                    async with session.get(f"{url}/rlrun/progress") as answer:
                        told_of.update(await answer.json())
                await asyncio.sleep(0.01)
            async with session.get(f"{url}/metrics") as answer:
                told_of["metrics"] = await answer.text()
        engine.gate.set()

    second = await simulate(config, engines=[engine], number=2, during=world)
    assert second.code == exit_codes.OK
    attempt = second.trainer.attempt
    trained = {s.group for batch in first.trainer.batches[: attempt.base_step] for s in batch.samples}
    finished: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    for entry in before:
        if entry.group not in trained and not is_lost(entry.newest_version, writer, attempt):
            finished[prompt_of(entry)].add(entry.member)
    assert finished, "the kill left nothing to take over"
    for prompt, members in finished.items():
        assert engine.asked[prompt] == 2 - len(members)
    lines = [json.loads(line) for line in second.paths.metrics.read_text().splitlines()]
    told = sum(line["rollouts/readmitted"] for line in lines if line["attempt"] == 2)
    assert told == sum(map(len, finished.values()))
    lost = {(e.group, e.member) for e in before if is_lost(e.newest_version, writer, attempt)}
    assert sum(line["rollouts/discarded"] for line in lines if line["attempt"] == 2) == len(lost)
    assert told_of["readmitted"] == told
    assert told_of["waiting_on"].endswith(f"restarts reused {told:.0f} finished rollouts and lost {len(lost)}")
    assert f"rlrun_rollouts_readmitted_total {told}" in told_of["metrics"]
    assert f"rlrun_rollouts_discarded_total {len(lost)}.0" in told_of["metrics"]
    assert second.paths.journal_on_disk() == [], "the last checkpoint covers all"


async def test_rollouts_of_another_configuration_are_discarded(tmp_path: Path, tokenizer_folder: Path) -> None:
    config = make_config(tmp_path, tokenizer_folder, environments=TASKS, checkpoint={"interval": 100}, max_steps=4)
    first = await simulate(config, until=lambda trainer: len(trainer.batches) >= 1, step_seconds=lambda: 0.05)
    before = {(entry.group, entry.member) for entry in journal(first.paths)}
    for batch in first.paths.batches_on_disk():
        (batch.path / "batch.json").unlink()
    others = [TASKS[0] | {"args": {"length": 11}}]
    engine = Counting()
    config = make_config(tmp_path, tokenizer_folder, environments=others, max_steps=4)
    second = await simulate(config, engines=[engine], number=2)
    assert second.code == exit_codes.OK
    assert engine.asked.total() >= 4 * 8
    lines = [json.loads(line) for line in second.paths.metrics.read_text().splitlines()]
    assert sum(line["rollouts/discarded"] for line in lines) == len(before) >= 8


class Flaky(Counting):
    """Engine that refuses the first turn of one rollout after the other rollout of its group has finished."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.finished: list[RolloutEntry] = []
        self.refused: tuple[int, ...] | None = None

    async def generate(self, token_ids: Sequence[int], *, n: int, **options: Any) -> list[Completion]:
        prompt = tuple(token_ids)
        if self.refused is None and self.asked[prompt] == 1:
            self.refused = prompt
            self.asked[prompt] += 1
            await eventually(lambda: any(self._began(entry, prompt) for entry in self.finished))
            raise EngineUnavailableError("connection reset")
        return await super().generate(token_ids, n=n, **options)

    @staticmethod
    def _began(entry: RolloutEntry, prompt: tuple[int, ...]) -> bool:
        return tuple(entry.rollout.sequences[0].input_ids[: len(prompt)].tolist()) == prompt


async def test_failing_engine_keeps_finished_group_members(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, add = Flaky(), Journal.add

    async def told(self: Journal, entry: Any) -> None:
        await add(self, entry)
        engine.finished.append(entry)

    monkeypatch.setattr(Journal, "add", told)
    monkeypatch.setattr(sessions_module, "MAX_TRIES", 1)
    environments = [{"id": "calculator", "group_size": 2}]
    config = make_config(tmp_path, tokenizer_folder, environments=environments, seq_len=512, max_steps=3)
    outcome = await simulate(config, engines=[engine])
    assert outcome.code == exit_codes.OK
    assert engine.refused is not None
    assert engine.asked[engine.refused] == 3  # the finished rollout, the refused one, and the repeated one
    keys = [(entry.group, entry.member) for entry in engine.finished]
    assert len(keys) == len(set(keys))


async def test_run_without_checkpoints_keeps_no_journal(tmp_path: Path, tokenizer_folder: Path) -> None:
    config = make_config(tmp_path, tokenizer_folder, checkpoint={"enabled": False}, max_steps=2)
    outcome = await simulate(config, until=lambda trainer: len(trainer.batches) == 2)
    assert not outcome.paths.journal.exists()
