"""Supervised fine-tuning on real parts: learning, held-out loss of the model, and exact resume after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrun.inspect.folder_reader import read_folder
from rlrun.inspect.screen import explanation_text
from rlrun.inspect.why import explain_run
from rlrun.protocol.files.batch import read_batch
from rlrun.protocol.files.checkpoint_manifest import complete_checkpoints
from rlrun.protocol.files.paths import RunPaths
from tests.e2e.local.local_run import ROOT, LocalRun, example, processes_of
from tests.support.command_line import command_line

pytestmark = pytest.mark.full
STEPS, INTERVAL = 100, 25


def by_hand(folder: Path, data: Path) -> float:
    """Return the mean negative log-probability of the replies' tokens and their ends, computed only with transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, tokens = 0.0, 0
    for line in data.read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].double().log_softmax(-1)
        total -= float(logprobs[start - 1 : -1].gather(1, ids[start:, None]).sum())
        tokens += len(ids) - start
    return total / tokens


CHANGES: dict[str, Any] = {
    "checkpoint": {"interval": INTERVAL, "keepLast": 4},
    "orchestrator": {"recordRollouts": True},
}


@pytest.fixture(scope="module")
def undisturbed(new_run: Callable[..., LocalRun]) -> LocalRun:
    run = new_run(example("sft", **CHANGES))
    run.run()
    return run


def order(run: LocalRun) -> list[list[str]]:
    """Return the rows of every step, from the newest attempt that wrote its batch."""
    newest = {found.step: found.path for found in RunPaths(run.folder).batches_on_disk()}
    return [[sample.task_id for sample in read_batch(newest[step]).samples] for step in sorted(newest)]


def kill(run: LocalRun, module: str) -> None:
    pids = [pid for pid in processes_of(run.folder) if module in command_line(pid)]
    os.kill(max(pids), signal.SIGKILL)


def test_sft_example_learns_with_exact_held_out_loss(undisturbed: LocalRun) -> None:
    run = undisturbed
    measured = {line["step"]: line["validation/loss"] for line in run.metrics() if "validation/loss" in line}
    assert list(measured) == [0, 50, 100]
    assert measured[0] > 4.0
    assert measured[100] < 0.5, measured
    final = RunPaths(run.folder).versions_on_disk()[-1]
    assert final.step == STEPS
    data = ROOT / "examples" / "data" / "reverse-text-validation.jsonl"
    assert measured[100] == pytest.approx(by_hand(final.path, data), rel=1e-4)
    assert measured[0] == pytest.approx(by_hand(run.folder / "model", data), rel=1e-4)
    assert "validation loss 4." in run.output
    seen = read_folder(run.folder, time.time())
    assert (seen.phase, seen.progress.step, seen.progress.checkpoint_step) == ("Complete", STEPS, STEPS)
    assert not [name for line in run.steps() for name in line if name.startswith("mismatch_kl")]
    assert processes_of(run.folder) == []


def curve(run: LocalRun) -> list[tuple[int, float]]:
    """Return the losses as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.folder / "tracking" / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars("loss/mean")]


def tracker() -> list[str]:
    """Return options for a tracker that CI has installed."""
    return ["--tensorboard"] if os.environ.get("CI") or find_spec("tensorboard") else []


def test_killed_and_resumed_run_equals_undisturbed_run(new_run: Callable[..., LocalRun], undisturbed: LocalRun) -> None:
    """Its tracker curve is equal too."""
    run = new_run(example("sft", **CHANGES))
    for number, module in enumerate(["rlrun.orchestrator", "rlrun.trainer"], 1):
        run.start(*tracker(), *(["--resume"] if number > 1 else []))
        run.wait_until(
            lambda wanted=INTERVAL * number: any(
                found.step >= wanted for found in complete_checkpoints(RunPaths(run.folder))
            ),
            f"checkpoint {number}",
        )
        assert read_folder(run.folder, time.time()).phase == "Running"
        kill(run, module)
        assert run.wait() != 0
        seen = read_folder(run.folder, time.time())
        assert (seen.phase, seen.failures[-1].attempt) == ("Failed", number), seen
        assert f"attempt {number} ended: {seen.failures[-1].reason}" in explanation_text(
            explain_run(seen, time.time()), time.time()
        )
    run.start(*tracker(), "--resume")
    assert run.wait() == 0, run.output + run.tails()
    if tracker():
        assert curve(run) == [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in run.steps()]
    assert {line["attempt"] for line in run.steps()} == {1, 2, 3}
    keys = ("step", "loss", "validation/loss", "grad_norm", "param_checksum", "data/epoch")
    expected = [tuple(line.get(key) for key in keys) for line in undisturbed.metrics()]
    assert [tuple(line.get(key) for key in keys) for line in run.metrics()] == expected
    assert len(expected) == 1 + STEPS
    assert order(run) == order(undisturbed)
    assert undisturbed.steps()[-1]["data/epoch"] == STEPS * 64 / 800


def test_sft_resume_with_other_ranks_keeps_row_order(new_run: Callable[..., LocalRun], undisturbed: LocalRun) -> None:
    base = 3 * INTERVAL
    checkpoint = CHANGES["checkpoint"] | {"resume": {"policy": "Step", "step": base}}
    run = new_run(example("sft", **CHANGES | {"checkpoint": checkpoint, "trainer": {"processesPerReplica": 2}}))
    shutil.copytree(undisturbed.folder, run.folder)
    document = (run.folder / "run.json").read_text()
    (run.folder / "run.json").write_text(document.replace(str(undisturbed.folder), str(run.folder)))
    run.run("--resume")
    pairs = list(zip(run.steps(), undisturbed.steps(), strict=True))
    assert {mine["attempt"] for mine, _ in pairs[base:]} == {2}
    for mine, theirs in pairs:
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    assert order(run) == order(undisturbed)
