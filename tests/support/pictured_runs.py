"""Runs for the pictures of the web page: as long, as noisy and as uneven as real ones, and the same each time.

The first step takes twenty times as long as the others, the trainer restarts once, and answers hold long formulas and addresses.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.protocol.files.batch import Batch, write_batch
from rlrun.protocol.files.launcher_record import State, new_record, write_record
from tests.support.made_runs import Folder, Row, byte_tokenizer, rollout, sample

RUNNING, COMPLETE, FAILED, SFT, NEW = "math-7b", "math-7b-lr3e-6", "code-agent-32b", "chat-sft", "math-7b-retry"
STEPS, TRACED = 320, 320
"""Steps of the run that trains, and the one whose rollouts and batch are kept."""
FIRST_STEP_SECONDS = 312.0
_HOURS = 3600
_TASKS = (
    (
        "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive?",
        "First the time: 210 / 84 = 2.5 hours, which is 2 h 30 min.\n9:40 + 2:30 = 12:10.\n\nThe answer is \\boxed{12:10}.",
        "Speed times distance: 84 · 210 = 17640. So it takes 17640 seconds, which is 4 h 54 min.\n\nThe answer is \\boxed{14:34}.",
    ),
    (
        "Find the remainder of 7^{100} divided by 13.",
        "The order of 7 modulo 13 is 12, and 100 = 8 · 12 + 4.\n7^4 = 2401 = 184 · 13 + 9.\n\nThe answer is \\boxed{9}.",
        "7^{100} = " + "7·" * 99 + "7, which is odd, so the remainder is \\boxed{1}.",
    ),
    (
        "How many positive divisors does 360 have?",
        "360 = 2^3 · 3^2 · 5, so (3+1)(2+1)(1+1) = 24.\n\nThe answer is \\boxed{24}.",
        "see https://example.com/problems/number-theory/divisors?q=360&sort=asc&page=1#how-many-positive-divisors-does-360-have for it",
    ),
    (
        "What is the area of a triangle with the sides 13, 14 and 15?",
        "Heron: s = 21, and √(21 · 8 · 7 · 6) = √7056 = 84.\n\nThe answer is \\boxed{84}.",
        "It is nearly equilateral: 14² · √3 / 4 ≈ 84.87.\n\nThe answer is \\boxed{84.87}.",
    ),
)


def make_pictured_runs(folder: Path) -> dict[str, Folder]:
    """Make all runs, by name."""
    now = time.time()
    running = _running(folder / RUNNING, now)
    complete = _complete(folder / COMPLETE, now, running)
    sft = _sft(folder / SFT, now)
    failed = _failed(folder / FAILED, now)
    new = Folder(folder / NEW)
    _configure(new, _grpo(1e-6))
    return {RUNNING: running, COMPLETE: complete, SFT: sft, FAILED: failed, NEW: new}


def _running(root: Path, now: float) -> Folder:
    run, lines = Folder(root), list(_rl_lines(STEPS, seed=1, begin=0, attempts={1: 1, 141: 2, 221: 3}))
    begin = now - lines[-1]["time"] - 4
    for attempt, step, lr in ((1, 0, 1e-6), (2, 140, 1e-6), (3, 220, 2e-6)):
        _begin(run, attempt, step, begin + 15 * step, _grpo(lr))
    ends = (
        (1, "trainer", 140, 1, "rank 3: CUDA error: uncorrectable ECC error encountered, on node gpu-07"),
        (2, "orchestrator", 220, 75, "no engine answered for 300 s"),
    )
    for attempt, role, step, code, message in ends:
        error = run.write(f"logs/attempt_{attempt:04d}/{role}/error.json", {"exit_code": code, "message": message})
        os.utime(error, (begin + 15 * step, begin + 15 * step))
    run.lines("metrics.jsonl", [line | {"time": begin + line["time"]} for line in lines])
    _rollouts(run)
    run.lives(step=STEPS, max_steps=500, eta_seconds=2580.0, waiting_on="trainer: training step 321")
    return run


def _complete(root: Path, now: float, origin: Folder) -> Folder:
    run, begin = Folder(root), now - 29 * _HOURS
    _begin(run, 1, 0, begin, _grpo(3e-6))
    lines = list(_rl_lines(500, seed=2, begin=begin, attempts={1: 1}, best=0.86))
    run.lines("metrics.jsonl", lines)
    run.lines("traces/step_00000500.jsonl", list(_trace(500)))
    _end(run, "Complete", begin, lines[-1]["time"] + 20)
    run.forked(origin, 30, "trainer.optimizer.lr 1e-06 -> 3e-06")
    return run


def _sft(root: Path, now: float) -> Folder:
    run, begin = Folder(root), now - 5 * _HOURS
    sources = [{"path": "data/chats.jsonl"}]
    _begin(run, 1, 0, begin, {"task": "SFT", "model": _MODEL, "maxSteps": 240, "data": {"sources": sources}})
    draw, at = random.Random(3), begin
    lines = []
    for step in range(1, 241):
        seconds = 95.0 if step == 1 else 3.1 + 0.3 * draw.random()
        at += seconds
        loss = 1.15 + 0.95 * math.exp(-step / 45) + draw.gauss(0, 0.05)
        line = {"step": step, "attempt": 1, "time": at, "loss": loss, "grad_norm": 0.7 + draw.random() / 2, "lr": 1e-5}
        line |= {"perf/throughput": 190_000 / seconds, "time/step": seconds, "time/forward_backward": seconds - 0.4}
        line |= {"time/optimizer": 0.2, "time/wait_for_batch": 0.05}
        lines.append(line | ({"validation/loss": 1.2 + 0.9 * math.exp(-step / 45)} if step % 20 == 0 else {}))
    run.lines("metrics.jsonl", lines)
    _end(run, "Complete", begin, at + 10)
    return run


def _failed(root: Path, now: float) -> Folder:
    run, begin = Folder(root), now - 50 * _HOURS
    _begin(run, 1, 0, begin, _grpo(1e-6) | {"maxSteps": 200})
    message = "data/tasks.jsonl, line 4107: no field `prompt`; the line has question, answer"
    error = run.write("logs/attempt_0001/orchestrator/error.json", {"exit_code": 65, "message": message})
    lines = list(_rl_lines(57, seed=4, begin=begin, attempts={1: 1}, best=0.4))
    run.lines("metrics.jsonl", lines)
    ended = lines[-1]["time"] + 5
    os.utime(error, (ended, ended))
    _end(run, "Failed", begin, ended)
    return run


_MODEL = {"name": "Qwen/Qwen2.5-7B"}


def _grpo(lr: float) -> dict[str, Any]:
    """Return the specification of a run."""
    return {
        "model": _MODEL, "maxSteps": 500, "environments": [{"id": "gsm8k", "groupSize": 8}, {"id": "math"}],
        "algorithm": {"preset": "grpo"}, "orchestrator": {"batchSize": 512}, "trainer": {"optimizer": {"lr": lr}},
    }  # fmt: skip


def _configure(run: Folder, spec: Mapping[str, Any]) -> bytes:
    config = resolve_spec(
        RLRunSpec.model_validate(spec), name=run.root.name, uid=run.root.name, output_dir=str(run.root)
    )
    content = config.model_dump_json(indent=1, by_alias=False)
    run.write("run.json", content)
    return content.encode()


def _begin(run: Folder, attempt: int, base_step: int, at: float, spec: Mapping[str, Any]) -> None:
    record = {"attempt": attempt, "base_step": base_step, "started_at": at, "uid": run.root.name}
    run.write(f"attempts/{attempt:04d}.json", record)
    run.paths.attempt_config(attempt).write_bytes(_configure(run, spec))


def _end(run: Folder, state: State, began: float, at: float) -> None:
    record = new_record(run.root.name, 1, "rlrun local run.yaml --resume")
    assert write_record(run.paths.launcher, replace(record, state=state, began=began, time=at))


def _rl_lines(steps: int, *, seed: int, begin: float, attempts: dict[int, int], best: float = 0.78) -> Iterator[Row]:
    draw, attempt, reward, at = random.Random(seed), 1, 0.0, begin
    for step in range(1, steps + 1):
        attempt = attempts.get(step, attempt)
        learned = 1 - math.exp(-step / 110)
        reward = 0.12 + best * learned + draw.gauss(0, 0.045)
        waits = 4.5 + 2 * math.sin(step / 21) ** 2 + abs(draw.gauss(0, 1))
        parts = {"time/forward_backward": 5.6 + draw.random(), "time/optimizer": 0.5, "time/broadcast_weights": 0.9}
        parts |= {"time/wait_for_batch": waits, "time/save_ckpt": 2.2 if step % 40 == 0 else 0.0}
        if step in attempts:
            longer = FIRST_STEP_SECONDS if step == 1 else 160.0
            parts["time/wait_for_batch"] = longer - 60
            parts["time/forward_backward"] = 48.0
        seconds = sum(parts.values()) + 0.4
        at += seconds
        length = 480 + 620 * learned + draw.gauss(0, 25)
        yield parts | {
            "step": step, "attempt": attempt, "time": at, "reward/mean": reward, "reward/gsm8k/mean": reward + 0.05,
            "reward/math/mean": reward - 0.05, "loss": draw.gauss(0, 0.012), "entropy": 0.9 - 0.6 * learned + draw.gauss(0, 0.02),
            "mismatch_kl": abs(draw.gauss(8e-4, 2e-4)), "grad_norm": 6.2 if step == 203 else abs(draw.gauss(0.3, 0.05)),
            "off_policy/mean": abs(draw.gauss(0.8, 0.15)), "completion_length/mean": length,
            "perf/throughput": 512 * length / seconds, "perf/mfu": 0.38 + draw.gauss(0, 0.01),
            "perf/peak_memory": (68 + draw.random()) * 2**30, "batch/solve_none": max(0.0, 0.5 - 0.45 * learned),
            "batch/truncated": 0.03, "lr": 1e-6, "time/step": seconds,
        } | (_evaluation(draw, learned, best) if step % 20 == 0 else {})  # fmt: skip


def _evaluation(draw: random.Random, learned: float, best: float) -> Row:
    found: Row = {}
    for name, level in (("gsm8k", 0.02), ("math", -0.11)):
        mean = 0.1 + (best + level) * learned + draw.gauss(0, 0.012)
        found |= {
            f"eval/{name}/reward/mean": mean,
            f"eval/{name}/pass@1": mean,
            f"eval/{name}/pass@4": 1 - (1 - mean) ** 1.7,
        }
    return found


def _rollouts(run: Folder) -> None:
    """Traces of the last steps and of an evaluation, with the batch of the last step and the tokenizer that reads it."""
    for step in range(TRACED - 5, TRACED + 1):
        run.lines(f"traces/step_{step:08d}.jsonl", list(_trace(step)))
    run.lines("traces/eval_00000320.jsonl", list(_trace(TRACED)))
    tokenizer = byte_tokenizer(run)
    samples = []
    for row in _trace(TRACED):
        asked, *_, said = (str(one["content"]) for one in row["messages"])
        ids = tokenizer.encode(asked + said).ids
        one = sample(row["group"], row["rollout"], ids, len(tokenizer.encode(asked).ids))
        advantages = np.where(one.loss_mask, row["advantage"], 0).astype(np.float32)
        versions = np.where(one.versions > 0, one.versions + TRACED - 3, -1).astype(np.int32)
        found = {"task_id": row["task_id"], "environment": row["environment"], "dispatch_version": TRACED - 2}
        samples.append(replace(one, reward=row["reward"], advantages=advantages, versions=versions, **found))
    run.paths.rollouts.mkdir(exist_ok=True)
    write_batch(run.paths.batch(TRACED, 3), Batch(TRACED, 3, tuple(samples)))


def _trace(step: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(step)
    for group in range(8):
        asked, right, wrong = _TASKS[group % len(_TASKS)]
        solved = [draw.random() < 0.7 for _ in range(8)]
        mean = sum(solved) / len(solved)
        for member, good in enumerate(solved):
            said = right if good else wrong
            count = len(said.encode())
            cut = not good and member == 7
            yield rollout(
                group, member, float(good), step=step, attempt=3, environment="gsm8k" if group % 2 else "math",
                task_id=f"train-{4000 + group}", advantage=round(good - mean, 4), metrics={"exact_match": float(good), "format": 1.0},
                messages=[{"role": "user", "content": asked}, {"role": "assistant", "content": said}],
                completion_tokens=count, tokens=count + len(asked.encode()), truncated=cut, finish_reason="length" if cut else "stop",
                versions=[[{"version": step - 2, "start": 40, "end": 44}, {"version": step - 1, "start": 44, "end": 40 + count}]],
                seconds=4.0 + draw.random(),
            )  # fmt: skip
