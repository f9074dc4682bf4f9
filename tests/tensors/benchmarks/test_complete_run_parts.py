"""Model, task and parts of the complete run, and the checks of its packs."""

from __future__ import annotations

import ast
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.gpu import check_pack, pack_run, run_engine, run_task
from benchmarks.gpu.engine_choice import RELEASED, SAFE
from benchmarks.gpu.results import Deadline
from benchmarks.gpu.run_events import Events
from benchmarks.gpu.run_local import DRY, FULL, LocalRun
from benchmarks.gpu.run_rl import CompleteRun
from rlrun.environments.protocol import Episode
from rlrun.environments.registry import load_environment
from rlrun.trainer.weights.senders import RootSender


@pytest.mark.parametrize("sizes", [DRY, FULL], ids=["dry", "full"])
def test_each_token_is_one_character(sizes: Any) -> None:
    size = sizes.model["vocabulary"]
    tokenizer = cast(Any, run_task.make_tokenizer(size))
    assert len(tokenizer) == size
    text = "".join(run_task.vocabulary_characters(size - 8))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == list(range(8, size))
    assert tokenizer.decode(ids) == text


def test_each_class_has_a_share_of_the_full_vocabulary() -> None:
    characters = run_task.vocabulary_characters(FULL.model["vocabulary"] - 8)
    for category in run_task.CLASSES.values():
        share = sum(unicodedata.category(one) == category for one in characters) / len(characters)
        assert 0.1 < share < 0.4, category
    with pytest.raises(ValueError, match="use at least"):
        run_task.vocabulary_characters(20)


async def test_reward_is_the_share_of_sampled_tokens_in_the_class() -> None:
    environment = load_environment(run_task.ENVIRONMENT, {"tokens": 4, "num_tasks": 6})
    tasks = {task.answer: task for task in environment.tasks("train")}
    rewards = {}
    for name, task in tasks.items():
        episode = Episode([*task.prompt, {"role": "assistant", "content": "A1b2"}], replies=1)
        rewards[name] = (await environment.score(task, episode)).reward
    assert rewards == {"digit": 0.5, "upper": 0.25, "lower": 0.25}
    prompts = {split: {str(task.prompt) for task in environment.tasks(split)} for split in ("train", "eval")}  # type: ignore[arg-type]
    assert len(prompts["train"]) == 6
    assert not prompts["train"] & prompts["eval"]


def test_sharpened_model_has_scaled_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    logits = []
    for name, sharpen in (("plain", 1.0), ("sharp", 20.0)):
        shape = run_task.Shape(**DRY.model)
        run_task.make_model(tmp_path / name, shape, dtype="float32", seed=0, sharpen=sharpen)
        with torch.no_grad():
            logits.append(AutoModelForCausalLM.from_pretrained(tmp_path / name)(torch.tensor([[1, 5, 30, 40]])).logits)
    torch.testing.assert_close(logits[1], 20.0 * logits[0], rtol=1e-4, atol=1e-4)


def class_shares(model: Any, tokenizer: Any) -> dict[str, float]:
    """Return the probability of the named class in the first token of a reply, by class."""
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    shares = {}
    for name, category in run_task.CLASSES.items():
        message = [{"role": "user", "content": f"{name} 7"}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        members = torch.tensor([len(one) == 1 and unicodedata.category(one) == category for one in names])
        with torch.no_grad():
            shares[name] = float(model(torch.tensor([prompt])).logits[0, -1].softmax(-1)[members].sum())
    return shares


def test_warm_up_makes_replies_depend_on_the_prompt(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape, warm_up = run_task.Shape(**DRY.model), run_task.WarmUp(60, 3e-3, share=0.5, replies=24, tokens=8)
    tokenizer, shares = run_task.make_tokenizer(shape.vocabulary), []
    for name, steps in (("random", None), ("warm", warm_up), ("again", warm_up)):
        losses = run_task.make_model(tmp_path / name, shape, dtype="float32", seed=0, warm_up=steps)
        assert len(losses) == (0 if steps is None else 60)
        shares.append(class_shares(AutoModelForCausalLM.from_pretrained(tmp_path / name), tokenizer))
    assert all(shares[1][name] > shares[0][name] + 0.2 for name in run_task.CLASSES), shares
    assert shares[1] == shares[2], "the same seed gives the same model"


def test_engine_without_a_first_step_is_replaced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, Any]] = []

    def start(name: str, spec: Any, *options: str, **more: Any) -> LocalRun:
        started.append((name, spec["inference"]["extraArgs"]))
        return LocalRun(tmp_path / name, 1, False, [], [])

    events = Events(tmp_path)
    run = CompleteRun(events, FULL, tmp_path, Deadline.after(600.0))
    monkeypatch.setattr(run, "make_model", lambda name, **_: tmp_path / name)
    monkeypatch.setattr(run.runs, "start", start)
    assert not run.run_parts(["colocated"])
    assert started == [("colocated", [*RELEASED]), ("colocated-safe", [*SAFE.arguments])]
    assert events.report.sections["parts"]["colocated"]["note"].endswith("run A of 25 steps: exit code 1, after step 0")
    goals = events.report.sections["goals"]
    assert {row["result"] for row in goals.values()} == {"not run", "missed"}
    assert all(row["note"] for row in goals.values())


def test_run_that_is_stopped_at_the_time_limit_is_reported_as_such() -> None:
    step = {"step": 7, "mismatch_kl": 0.0}
    run = LocalRun(Path("run"), 0, True, [(0.0, step)], [])
    assert run.end == "stopped at the time limit, after step 7"


def test_logprobs_of_the_engine_are_compared_with_float32(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run_task.make_model(tmp_path, run_task.Shape(**DRY.model), dtype="bfloat16", seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompts, tokens = [[1, 5, 30], [1, 5, 31, 32]], ([40, 41], [42, 43])
    answers = []
    for prompt, reply, wrong in zip(prompts, tokens, (0.0, 0.5), strict=True):
        exact = run_engine.continuation_logprobs(model, prompt, reply) + torch.tensor([0.0, wrong])
        answers.append(SimpleNamespace(token_ids=reply, logprobs=exact.tolist()))
    errors = run_engine.compare_logprobs(tmp_path, prompts, cast(Any, answers), torch.device("cpu"), torch.bfloat16)
    assert errors.largest == pytest.approx(0.5, abs=1e-5)
    assert errors.mean == pytest.approx(0.125, abs=1e-5)
    assert 0.0 < errors.rounding < 0.05


def test_root_sender_backend_follows_its_device_unless_given() -> None:
    store = cast(Any, SimpleNamespace())
    for device, asked, expected in (("cuda", None, "nccl"), ("cpu", None, "gloo"), ("cuda", "gloo", "gloo")):
        sender = RootSender(0, torch.device(device), store, lambda: store, backend=cast(Any, asked))
        assert sender.backend == expected


def test_parts_without_an_engine_run_and_late_parts_are_left_out(tmp_path: Path) -> None:
    events = Events(tmp_path)
    assert CompleteRun(events, DRY, tmp_path, Deadline.after(60.0)).run_parts(["nccl", "ipc"])
    row = events.report.sections["process group with one member"]["gloo"]
    assert {f"{time} {call} s" for time in ("first", "second") for call in ("init", "broadcast", "meet", "close")} == {
        *row
    }
    assert events.report.sections["goals"]["C: hand-over by CUDA IPC, longest"]["result"] == "not run"

    assert not CompleteRun(events, FULL, tmp_path, Deadline.after(60.0)).run_parts(["colocated", "concurrent"])
    parts = events.report.sections["parts"]
    assert {parts[part]["result"] for part in ("colocated", "concurrent")} == {"not run"}
    assert "it needs 150 s" in parts["colocated"]["note"]


def test_failed_part_is_recorded_and_does_not_stop_the_next(tmp_path: Path) -> None:
    events = Events(tmp_path)
    run = CompleteRun(events, DRY, tmp_path, Deadline.after(60.0))
    run.measure_links = lambda: (_ for _ in ()).throw(RuntimeError("no such network"))  # type: ignore[method-assign]
    assert not run.run_parts(["nccl", "ipc"])
    assert events.report.sections["parts"]["nccl"] == {"result": "failed", "note": "RuntimeError: no such network"}
    assert events.report.sections["parts"]["ipc"]["result"] == "complete"


def test_import_check_reports_missing_modules_and_names() -> None:
    problems = check_pack.import_modules({"json": ("loads",), "json.decoder": ("absent",), "no_such_module": ()})
    assert problems["json"] == ""
    assert problems["json.decoder"] == "no name absent"
    assert problems["no_such_module"].startswith("ModuleNotFoundError")


def test_checked_names_are_those_of_the_engine() -> None:
    """Each name that the engine imports from vLLM is checked."""
    checked = {(module, name) for module, names in check_pack.NAMES.items() for name in names}
    missing = set()
    for file in (pack_run.ROOT / "workloads" / "rlrun" / "inference").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    if (node.module, alias.name) not in checked and module not in check_pack.NAMES:
                        missing.add(module)
    assert missing <= {"vllm.platforms.current_platform"}, (
        "current_platform needs no name of the pack: it is always there"
    )


def test_checkout_leaves_room_for_a_pack() -> None:
    assert 10_000_000 < pack_run.checkout_bytes() < pack_run.UPLOAD_LIMIT - 40_000_000
