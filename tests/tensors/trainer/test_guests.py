"""Admission of runs to a shared trainer: how rank 0 reads and answers requests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import CriticConfig, LoRAConfig, ModelConfig
from rlrun.config.models.learning import AdvantageConfig, AlgorithmConfig
from rlrun.config.models.parallel import ParallelismConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.config.models.run_config import sharing_refusal
from rlrun.protocol.files import shared_trainer_files
from rlrun.protocol.files.attempts import first_attempt, write_attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared_trainer_files import SlotAnswer, SlotRequest
from rlrun.protocol.messages.endpoints import guest_proof, key_digest
from rlrun.runtime import exit_codes
from rlrun.trainer.guests import guest_requests as module
from rlrun.trainer.guests.guest_requests import Change, Guests
from rlrun.trainer.guests.shared_runs import is_work_error, report_trainer_end
from rlrun.trainer.loop import Loop
from rlrun.trainer.runs import (
    CloseOrder,
    DropOrder,
    EndOrder,
    FinishOrder,
    JoinOrder,
    LeaveOrder,
    Order,
    SaveOrder,
    StepOrder,
    WaitOrder,
    read_order,
    write_order,
)


def config(name: str, root: Path = Path("/runs"), **options: Any) -> TrainerConfig:
    common: dict[str, Any] = {
        "name": name,
        "uid": name,
        "output_dir": str(root / name),
        "model": ModelConfig(path="/models/base"),
        "max_steps": 3,
        "seq_len": 32,
        "seed": 0,
        "algorithm": AlgorithmConfig(),
        "checkpoint": CheckpointConfig(),
        "lora": LoRAConfig(rank=8),
        "micro_batch_tokens": 64,
    }
    if name != "host":
        common["shared_with"] = "host"
    return TrainerConfig(**common | options)


HOST = {"lora": LoRAConfig(rank=8, slots=2)}
CRITIC = AlgorithmConfig(advantage=AdvantageConfig(name="gae"), critic=CriticConfig())


def test_guest_dropout_is_refused_with_tensor_parallelism() -> None:
    host = config("host", **HOST, processes_per_replica=2, parallelism=ParallelismConfig(tp=2))
    assert sharing_refusal(host, config("guest")) is None
    found = sharing_refusal(host, config("guest", lora=LoRAConfig(rank=8, dropout=0.1)))
    assert found is not None
    assert found.startswith(
        "trainer.lora.dropout (0.1) needs a trainer without tensor parallelism, but host has parallelism.tp 2"
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"lora": LoRAConfig(rank=4, alpha=3, dropout=0.1), "seed": 3, "seq_len": 16}, None),
        ({"shared_with": "other"}, "trainer.sharedWith is other, but this is the trainer of host; set it to host"),
        ({"shared_with": None}, "trainer.sharedWith is None"),
        ({"lora": LoRAConfig(rank=9)}, r"trainer.lora.rank \(9\) is higher than the rank of host \(8\); lower it"),
        ({"lora": LoRAConfig(rank=8, targets=["q_proj"])}, r"trainer.lora.targets \(\['q_proj'\]\) .* host \(all\)"),
        ({"model": ModelConfig(path="/models/other")}, "model differs from the model of host"),
        ({"algorithm": CRITIC}, "algorithm.critic is a full model"),
        ({"micro_batch_tokens": 65}, r"trainer.microBatchTokens \(65\) is higher than the limit of host \(64\)"),
    ],
)
def test_incompatible_guest_is_refused_with_field_and_fix(options: dict[str, Any], reason: str | None) -> None:
    found = sharing_refusal(config("host", **HOST), config("guest", **options))
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(reason, found), found


KEY, DIGEST = "the-hosts-key", key_digest("the-guests-key")


class Bench:
    """Folder of a host and those of its guest runs."""

    def __init__(self, root: Path) -> None:
        self.root, self.host = root, RunPaths(root / "host")
        self.guests = Guests(config("host", root, **HOST), world_size=2, api_key=KEY)

    def ask(self, run: str, attempt: int = 1, *, folder: Path | None = None, **options: Any) -> RunPaths:
        paths = RunPaths(self.root / run)
        paths.root.mkdir(exist_ok=True)
        document = {"trainer": config(run, self.root, **options).model_dump(mode="json")}
        paths.run_json.write_text(json.dumps(document))
        shared_trainer_files.write_request(
            self.host, SlotRequest(run=run, attempt=attempt, folder=str(folder or paths.root), key_digest=DIGEST)
        )
        return paths

    def state(self, run: str, attempt: int = 1) -> SlotAnswer:
        state = shared_trainer_files.read_state(self.host, run, attempt)
        assert state is not None
        return state


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    return Bench(tmp_path)


def test_guest_joins_with_its_own_attempt(bench: Bench) -> None:
    paths = bench.ask("guest", 3)
    bench.guests.list_requests()
    assert bench.guests.admit_next({"other": 1}, free=False) is None
    assert bench.state("guest", 3).state == "Waiting"
    assert bench.state("guest", 3).reason == "all slots are taken: host, other"
    assert bench.guests.has_open_requests()
    guest = bench.guests.admit_next({}, free=True)
    assert guest is not None
    assert (guest.config.name, guest.attempt.attempt, guest.attempt.world_size, guest.attempt.uid) == (
        "guest",
        3,
        2,
        "guest",
    )
    assert paths.attempts_on_disk() == [3]
    assert bench.guests.admit_next({"guest": 3}, free=True) is None
    assert bench.state("guest", 3).proof == ""
    bench.guests.report_state("guest", 3, "Joined", slot=1)
    assert bench.state("guest", 3).proof == guest_proof(KEY, "guest", DIGEST), "its key is confirmed when it joins"


def test_attempt_trained_elsewhere_must_request_again(bench: Bench) -> None:
    paths = bench.ask("guest", 2)
    write_attempt(paths, first_attempt(world_size=1, config_hash="", attempt=2))
    shared_trainer_files.write_answer(bench.host, SlotAnswer(run="guest", attempt=2, slot=1, state="Joined"))
    bench.guests.list_requests()
    assert bench.guests.admit_next({}, free=True) is None
    left = bench.state("guest", 2)
    assert (left.state, left.exit_code) == ("Left", exit_codes.ATTEMPT_TAKEN)
    assert "request a slot with a higher attempt" in left.reason
    assert not bench.guests.has_open_requests()
    bench.ask("guest", 3)
    bench.guests.list_requests()
    assert bench.guests.admit_next({}, free=True) is not None


def test_run_that_ended_shared_trainer_is_refused_once(bench: Bench) -> None:
    failure = RoleError("ZeroDivisionError: division by zero")
    report_trainer_end(bench.host, "guest", 2, failure)
    bench.ask("guest", 3)
    bench.guests.list_requests()
    assert bench.guests.admit_next({}, free=True) is None
    refused = bench.state("guest", 3)
    assert (refused.state, refused.exit_code) == ("Refused", exit_codes.DATA)
    assert "its attempt 2 failed on only some ranks" in refused.reason
    assert "ZeroDivisionError: division by zero; repair the cause" in refused.reason
    bench.ask("guest", 4)
    bench.guests.list_requests()
    assert bench.guests.admit_next({}, free=True) is not None


def fail_between_ranks() -> None:
    """Fail like a collective whose peer has ended."""
    source = "def broken():\n    raise RuntimeError('Connection closed by peer')\n"
    scope: dict[str, Any] = {}
    exec(compile(source, "/usr/lib/torch/distributed/distributed_c10d.py", "exec"), scope)
    scope["broken"]()


@pytest.mark.parametrize(
    ("act", "blamed"),
    [
        (lambda: 1 / 0, True),
        (lambda: torch.zeros(2) @ torch.zeros(3), True),
        (fail_between_ranks, False),
        (lambda: Path("/nowhere/at/all").read_bytes(), False),
    ],
)
def test_error_blames_the_run_except_volume_or_peer(act: Callable[[], object], blamed: bool) -> None:
    with pytest.raises(Exception) as raised:
        act()
    assert is_work_error(raised.value) is blamed
    assert is_work_error(torch.OutOfMemoryError("memory"))
    assert not is_work_error(RoleError("the volume is full", exit_codes.STORAGE))


def test_refused_guests_do_not_block_others(bench: Bench) -> None:
    bench.ask("a", lora=LoRAConfig(rank=16))
    bench.ask("b", folder=bench.root / "elsewhere" / "b")
    bench.ask("c").run_json.write_text("{")
    bench.ask("d").run_json.unlink()
    bench.ask("e")
    bench.guests.list_requests()
    guest = bench.guests.admit_next({}, free=True)
    assert guest is not None
    assert guest.config.name == "e"
    assert [bench.state(run).state for run in "abcd"] == ["Refused"] * 4
    assert "put both runs on one volume" in bench.state("b").reason
    assert "run.json" in bench.state("c").reason
    assert all(bench.state(run).exit_code for run in "abcd")


def test_guest_with_new_or_no_request_leaves_slot(bench: Bench) -> None:
    bench.ask("a", 2)
    bench.ask("b", 1)
    bench.guests.list_requests()
    assert list(bench.guests.required_changes({"a": 2, "b": 1})) == []
    assert list(bench.guests.required_changes({"a": 1, "b": 1, "c": 1})) == [
        Change("a", at_once=True, reason="its attempt 2 requested a slot"),
        Change("c", at_once=False, reason="the run requested to leave"),
    ]


DROP, JOIN = (
    DropOrder("guest", "Left", "the run has ended"),
    JoinOrder({"name": "guest"}, {"attempt": 1}, "/runs/guest"),
)


@pytest.mark.parametrize(("order", "collects"), [(DROP, True), (JOIN, True), (WaitOrder(), False)])
def test_garbage_of_removed_or_refused_run_is_collected(
    order: Order, collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused guest has loaded objects too, and sharded models are reference cycles."""
    calls: list[int] = []
    monkeypatch.setattr("rlrun.trainer.loop.Garbage.after_run", lambda self: calls.append(1))
    runs: Any = SimpleNamespace(runs=["host", "guest"])
    runs.apply_order = lambda order: runs.runs.pop() if isinstance(order, DropOrder) else None
    nothing: Any = None
    Loop(runs, nothing, nothing, threading.Event())._carry_out(order)
    assert bool(calls) == collects


@pytest.mark.parametrize(
    ("order", "document"),
    [
        (StepOrder("a", "/b", save=True), {"do": "step", "run": "a", "path": "/b", "save": True}),
        (SaveOrder("a"), {"do": "save", "run": "a"}),
        (FinishOrder("a"), {"do": "finish", "run": "a"}),
        (LeaveOrder("a"), {"do": "leave", "run": "a"}),
        (CloseOrder("a"), {"do": "close", "run": "a"}),
        (
            JOIN,
            {"do": "join", "config": {"name": "guest"}, "attempt": {"attempt": 1}, "folder": "/runs/guest"},
        ),
        (DROP, {"do": "drop", "run": "guest", "state": "Left", "reason": "the run has ended", "code": 0}),
        (WaitOrder(), {"do": "wait"}),
        (EndOrder(), {"do": "end"}),
    ],
)
def test_order_keeps_its_wire_format(order: Order, document: dict[str, Any]) -> None:
    assert json.dumps(write_order(order)) == json.dumps(document)
    assert read_order(json.loads(json.dumps(document))) == order
