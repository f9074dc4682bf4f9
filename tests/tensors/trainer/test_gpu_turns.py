"""The trainer's part of GPU sharing with engines: checks before allocation, and unchanged training."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from torch import nn

from rlrun.protocol.files.failures import RoleError
from rlrun.trainer import engines_beside as module
from rlrun.trainer.engines_beside import EnginesBeside
from rlrun.trainer.gpu_memory import GPUMemory

CPU = torch.device("cpu")


class FakeEngine:
    """Server that returns scripted answers for `/rlrun/status`, repeating the last one."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, object]] = [(200, {"asleep": True})]
        self.asked: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.headers["Authorization"])
                status, body = outer.answers[0] if len(outer.answers) == 1 else outer.answers.pop(0)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, format: str, *args: object) -> None:
                return

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.001)
    engine = FakeEngine()
    thread = threading.Thread(target=engine.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield engine
    engine.server.shutdown()
    thread.join()
    engine.server.server_close()


def test_trainer_waits_until_engines_sleep(engine: FakeEngine) -> None:
    engine.answers = [(503, {}), (200, {"asleep": False}), (200, {"asleep": True})]
    EnginesBeside([engine.url], "key").wait_until_asleep()
    assert engine.asked == ["Bearer key"] * 3
    engine.answers = [(200, {"asleep": False})]
    with pytest.raises(RoleError, match=r"did not release the GPUs within 0 s: .* is awake"):
        EnginesBeside([engine.url], "key").wait_until_asleep(0)


def test_trainer_refuses_batch_while_engine_is_awake(engine: FakeEngine) -> None:
    beside = EnginesBeside([engine.url], "key")
    engine.answers = [(500, {}), (200, {"asleep": True})]
    beside.check()
    engine.answers = [(200, {"asleep": False})]
    with pytest.raises(RoleError, match=r"received a batch while engines used its GPUs: .* is awake"):
        beside.check()
    engine.answers, engine.asked = [(500, {})], []
    with pytest.raises(RoleError, match=r"500|Internal"):
        beside.check()
    assert len(engine.asked) == module.TRIES


class Looks(EnginesBeside):
    def __init__(self) -> None:
        self.count = 0

    def check(self) -> None:
        self.count += 1


@pytest.mark.parametrize("stays", [False, True])
def test_training_in_gpu_turns_equals_plain_training(stays: bool) -> None:
    torch.manual_seed(0)
    turned = nn.Linear(4, 3)
    plain = copy.deepcopy(turned)
    looks = Looks()
    optimizers = {model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in (turned, plain)}
    memory = GPUMemory(looks, [turned], [optimizers[turned]], device=CPU, stays=stays)
    memory.move_to_gpu()
    assert looks.count == 0, "from its start to its first version it has the memory"
    memory.move_to_host()
    parameters = list(turned.parameters())
    for _ in range(3):
        memory.move_to_gpu()
        for model, optimizer in optimizers.items():
            optimizer.zero_grad(set_to_none=True)
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        memory.move_to_host()
    assert looks.count == 3
    assert [id(p) for p in turned.parameters()] == [id(p) for p in parameters], "optimizers know them by their identity"
    for mine, theirs in zip(turned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
