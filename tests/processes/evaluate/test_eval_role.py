"""Attempts of a run with task Eval: kill, stop, restart without repeated requests, and reported failures."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support" / "orchestrator" / "simulation"))

from orch_simulation import API_KEY, FakeEngine, eventually, in_process, make_config

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.roles import OrchestratorConfig
from rlrun.diagnostics import heap
from rlrun.evaluate import evaluation_role
from rlrun.evaluate.answers import AnswerFile
from rlrun.evaluate.evaluation_role import begin_attempt, make_plan
from rlrun.inference.client.engine_client import Completion
from rlrun.orchestrator import attempt as attempt_module
from rlrun.orchestrator.attempt import TERMINATED, Stop, first_cause
from rlrun.orchestrator.main import Outside
from rlrun.orchestrator.progress.lease import progress_annotations
from rlrun.orchestrator.progress.progress_server import Progress
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.tiny_model import make_tokenizer
from rlrun_operator.status.run_progress import read_lease
from tests.processes.evaluate.test_eval_answers import ENVIRONMENT as WHERE
from tests.processes.evaluate.test_eval_answers import POLICY, QUESTIONS, answer
from tests.support.waiting import result_of

TASKS, SAMPLES, POLICIES = 4, 2, 3
ALL = TASKS * SAMPLES * POLICIES


@dataclass
class Gated(FakeEngine):
    """Engine that answers a limited number of requests."""

    most: int = 10**6
    full: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, token_ids: Sequence[int], *, n: int, max_tokens: int, **more: Any) -> list[Completion]:  # type: ignore[override]
        if len(self.requests) >= self.most:
            self.full.set()
            await asyncio.Event().wait()
        return await super().generate(token_ids, n=n, max_tokens=max_tokens, **more)

    async def reload_weights(self, version: int, *, force: bool = False) -> dict[str, float]:
        return await self.update_weights("", version, force=force)


def make(root: Path, **changes: Any) -> OrchestratorConfig:
    """Return a configuration that evaluates the model and two steps of another program."""
    if not (root / "model").is_dir():
        make_tokenizer().save_pretrained(root / "model")
        for step in (10, 20):
            folder = root / "trained" / f"step_{step}"
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(b"weights")
    asked = {
        "task": "Eval",
        "policies": {"from_run": "trained"},
        "evaluation": {"num_tasks": TASKS, "samples_per_task": SAMPLES},
        "inference_urls": ["http://engine"],
    }
    return make_config(root / "run", root / "model", **asked | changes)


async def attempt(
    config: OrchestratorConfig,
    number: int,
    engine: FakeEngine,
    *,
    kill: bool = False,
    stop: Stop | None = None,
    ready: Callable[[], bool] = lambda: True,
) -> int | None:
    """Run one attempt to its end. With `kill`, kill it once the engine blocks and `ready` holds, and return None."""
    work = asyncio.create_task(
        evaluation_role.run(
            config,
            attempt=number,
            api_key=API_KEY,
            stop=stop,
            outside=Outside(connect=lambda _: engine, open_environments=in_process),
        )
    )
    try:
        if isinstance(engine, Gated) and (kill or stop is not None):
            kept = sum(count_answers(config).values()) + engine.most
            await eventually(
                lambda: (
                    (engine.full.is_set() and sum(count_answers(config).values()) == kept and ready()) or work.done()
                )
            )
            if kill:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                return None
            assert stop is not None
            assert stop.act is not None
            stop.act()
        return await result_of(work, "the end of the attempt", progress=lambda: len(engine.requests))
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def count_answers(config: OrchestratorConfig) -> Counter[tuple[str, int, int]]:
    """Return how often each question was answered, over all attempts."""
    files = (Path(config.output_dir) / "answers").rglob("*.jsonl")
    found = [(file.parent.name, json.loads(line)) for file in files for line in file.read_text().splitlines()]
    return Counter((policy, line["task"], line["sample"]) for policy, line in found)


async def test_restarted_evaluation_requests_no_answer_twice(tmp_path: Path) -> None:
    config, first, second, third = make(tmp_path), Gated(most=5), Gated(most=7), Gated()
    await attempt(config, 1, first, kill=True)
    assert sum(count_answers(config).values()) == 5
    assert await attempt(config, 2, second, stop=Stop()) == TERMINATED
    assert sum(count_answers(config).values()) == 5 + 7
    assert await attempt(config, 3, third) == exit_codes.OK
    assert len(third.requests) == ALL - 5 - 7
    assert set(count_answers(config).values()) == {1}
    assert len(count_answers(config)) == ALL
    assert third.held == [1, 2], "the base model's answers are all there: it is not loaded again"
    document = json.loads((Path(config.output_dir) / "results.json").read_text())
    assert [(row["policy"], row["answers"]) for row in document["results"]] == [
        ("base", TASKS * SAMPLES),
        ("step 10", TASKS * SAMPLES),
        ("step 20", TASKS * SAMPLES),
    ]
    last = Gated()
    assert await attempt(config, 6, last) == exit_codes.OK
    assert not last.requests
    paths = RunPaths(Path(config.output_dir))
    assert paths.attempts_on_disk() == [1, 2, 3, 6]
    assert not list(paths.weights.glob(".*")), "what the engines loaded is taken away"
    with pytest.raises(RoleError, match="the next is 7") as taken:
        begin_attempt(paths, config, 5)
    assert taken.value.code == exit_codes.ATTEMPT_TAKEN


async def test_full_volume_is_reported_and_evaluation_resumes_with_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, looks, full, refused = make(tmp_path), list[Callable[[], Progress]](), [True], threading.Semaphore(0)
    real = os.fdatasync

    def flush(descriptor: int) -> None:
        if full[0] and "answers" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            refused.release()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", flush)
    monkeypatch.setattr(attempt_module, "lease_from_environment", lambda **known: looks.append(known["look"]))
    work = asyncio.create_task(attempt(config, 1, Gated()))
    await eventually(lambda: refused.acquire(blocking=False))
    await eventually(lambda: looks[0]().storage is not None)
    trouble = looks[0]().storage
    assert trouble is not None
    assert (trouble.reason, trouble.blocks) == ("StorageFull", True)
    assert "cannot keep answers" in trouble.text
    assert not count_answers(config), "what is not durable is taken back"
    assert looks[0]().step == 0, "and does not count"
    full[0] = False
    assert await work == exit_codes.OK
    assert (set(count_answers(config).values()), len(count_answers(config))) == ({1}, ALL)
    assert looks[0]().storage is None


async def test_versions_deleted_during_evaluation_are_measured(tmp_path: Path) -> None:
    class Training(Gated):
        async def update_weights(self, path: str, version: int, *, force: bool = False) -> dict[str, float]:
            shutil.rmtree(tmp_path / "trained", ignore_errors=True)
            assert not path or (Path(path) / "model.safetensors").read_bytes() == b"weights"
            return await super().update_weights(path, version, force=force)

    engine = Training()
    assert await attempt(make(tmp_path), 1, engine) == exit_codes.OK
    assert (engine.held, len(engine.requests)) == ([0, 1, 2], ALL)


async def test_progress_and_measured_rewards_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = (
        make(tmp_path, policies={"from_run": "trained", "steps": [20], "base": True}),
        list[Callable[[], Progress]](),
    )
    half = Gated(most=TASKS * SAMPLES + 2)
    monkeypatch.setattr(attempt_module, "lease_from_environment", lambda **known: seen.append(known["look"]))
    await attempt(config, 1, half, kill=True, ready=lambda: seen[0]().step == TASKS * SAMPLES + 2)
    told = seen[0]()
    assert (told.step, told.max_steps, told.resumed_from_step) == (TASKS * SAMPLES + 2, 2 * TASKS * SAMPLES, None)
    assert (told.policy_version, told.waiting_role, told.waiting_phase) == (20, "inference", "answering as step 20")
    assert len(told.results) == 1
    assert told.results[0].startswith("reverse-text, base: avg@2 0.")
    assert ", pass@2 0." in told.results[0]
    assert told.activity == told.step + 2, "answers, and two policies that were loaded"
    written = {k: v for k, v in progress_annotations(told, 1).items() if v is not None}
    heard = read_lease({"metadata": {"annotations": written}}, 1)
    assert heard is not None
    assert (heard.results, heard.total_steps) == (told.results, told.max_steps)


async def test_policy_without_answers_fails_run_permanently(tmp_path: Path) -> None:
    config = make(tmp_path, policies=None, environments=[{"id": "reverse-text", "timeout_seconds": 1e-6}])
    with pytest.raises(BaseException) as failed:
        await attempt(config, 1, Gated())
    cause = first_cause(failed.value)
    assert isinstance(cause, RoleError)
    assert cause.code == exit_codes.DATA
    assert str(cause).startswith(f"base has no answer in reverse-text; the first of {TASKS * SAMPLES} errors: ")


@pytest.mark.parametrize(
    ("policies", "problem"),
    [
        (
            {"from_run": "nobody"},
            r"policies.fromRun \(nobody\): the folder .*nobody does not exist; set a run on the same",
        ),
        ({"from_run": "model"}, r"policies.fromRun \(model\): .*model has no policy yet; wait for its first version"),
        ({"from_run": "trained", "steps": [10, 30]}, r"no policy of step 30; the steps in .*trained .* are: 10, 20"),
    ],
)
def test_missing_policies_are_named(tmp_path: Path, policies: dict[str, Any], problem: str) -> None:
    with pytest.raises(RoleError, match=problem) as refused:
        make_plan(make(tmp_path, policies=policies), 1)
    assert 64 <= refused.value.code <= 78, "starting again does not help"


@pytest.mark.parametrize(
    ("adapter", "lora", "problem"),
    [
        (
            True,
            None,
            r"trainer.lora.rank is not set, but .* for step 10, an adapter of rank 4; set trainer.lora: {rank: 4}",
        ),
        (True, 2, r"trainer.lora.rank is 2, but .* for step 10, an adapter of rank 4"),
        (True, 8, None),
        (False, 4, r"trainer.lora is set, but step 10, step 20 are complete models; remove trainer.lora"),
        (False, None, None),
    ],
)
def test_engines_need_room_for_adapters(tmp_path: Path, adapter: bool, lora: int | None, problem: str | None) -> None:
    config = make(tmp_path)
    if adapter:
        for step in (10, 20):
            folder = tmp_path / "trained" / f"step_{step}"
            (folder / "adapter_model.safetensors").write_bytes(b"weights")
            (folder / "adapter_config.json").write_text('{"r": 4}')
    spec = {"task": "Eval", "model": {"path": "m"}, "environments": [{"id": "reverse-text"}]}
    trainer = {"trainer": {"lora": {"rank": lora}}} if lora is not None else {}
    recorded = resolve_spec(
        RLRunSpec.model_validate(spec | trainer), name="test", uid="uid", output_dir=config.output_dir
    )
    paths = RunPaths(Path(config.output_dir))
    paths.root.mkdir()
    paths.run_json.write_text(recorded.model_dump_json())
    if problem is None:
        assert [policy.name for policy in make_plan(config, 1).policies] == ["base", "step 10", "step 20"]
        return
    with pytest.raises(RoleError, match=problem) as refused:
        make_plan(config, 1)
    assert refused.value.code == exit_codes.CONFIGURATION


def test_attempt_reads_all_files_and_writes_its_own(tmp_path: Path) -> None:
    def of(number: int) -> AnswerFile:
        return AnswerFile.open_in(tmp_path, POLICY, WHERE, "0123", number)

    old = of(1)
    old.add((QUESTIONS[0], answer(1.0)))
    old.add((QUESTIONS[1], answer(None)))
    with old.path.open("a") as zombie:
        zombie.write('{"task": 1, "sam')
    torn, new = old.path.read_bytes(), of(2)
    assert new.missing(QUESTIONS) == QUESTIONS[1:]
    assert old.path.read_bytes() == torn, "a zombie may be writing"
    new.add((QUESTIONS[1], answer(0.5, 1)))
    with old.path.open("a") as zombie:
        zombie.write(
            'ple": 0, "environment": "e", "task_id": "t", "reward": 1, "metrics": {}, "truncated": false, "completion_tokens": 2}\n'
        )
    newest = of(3)
    assert newest.missing(QUESTIONS) == QUESTIONS[3:], "a failure counts for less than an answer, wherever it is"
    assert [file.name for file in newest.files] == ["reverse-text.0123.a0001.jsonl", "reverse-text.0123.a0002.jsonl"]


def test_garbage_collection_is_sliced_after_load(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    def process(argv: object, module: str, begin: object) -> int:
        begun.append(begin)
        return exit_codes.OK

    monkeypatch.setattr(evaluation_role, "run_process", process)
    assert evaluation_role.main([]) == 0
    assert [begin.keywords["loaded"].__func__ for begin in begun] == [heap.Slices.begin]
