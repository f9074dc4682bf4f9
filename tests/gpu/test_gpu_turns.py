"""GPU memory of a trainer and of an engine that take turns on one GPU."""

from __future__ import annotations

import gc
import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlrun.config.models.learning import OptimizerConfig
from rlrun.trainer.bench import fake_batch
from rlrun.trainer.engines_beside import EnginesBeside
from rlrun.trainer.gpu_memory import GPUMemory
from rlrun.trainer.learning.forward import token_statistics
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.modeling import packed_attention
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group

VOCABULARY = 32_000
MIB = 2**20
LEFT_OF_A_TRAINER = 64 * MIB
"""Bytes of a trainer's tensors after it has released its memory."""
LEFT_OF_AN_ENGINE = 4096 * MIB
"""Bytes of a sleeping engine: context, CUDA graphs, buffers of kernels."""
START_SECONDS = 600.0


class Asleep(EnginesBeside):
    def __init__(self) -> None:
        return

    def check(self) -> None:
        return


def model() -> Any:
    packed_attention.register_attention()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
    )
    return Qwen3ForCausalLM._from_config(config, attn_implementation=packed_attention.NAME).train()


@pytest.mark.measures_gpu_memory
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_trainer_releases_gpu_memory_and_keeps_losses(alone: Group, name: Any) -> None:
    losses: dict[bool, list[float]] = {}
    for in_turns in (False, True):
        gc.collect()
        before = torch.cuda.memory_allocated()
        sharded = model()
        shard_model(sharded, alone)
        optimizer = make_optimizer(sharded, OptimizerConfig(name=name), alone.device)
        memory = GPUMemory(Asleep(), [sharded], [optimizer], device=alone.device, stays=False)
        inputs = micro_batch(fake_batch(256, 1, VOCABULARY).samples, alone.device)
        losses[in_turns] = []
        for _ in range(3):
            memory.move_to_gpu()
            held = torch.cuda.memory_allocated() - before
            loss = -token_statistics(sharded, inputs).logprobs.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses[in_turns].append(float(loss.detach()))
            del loss
            if in_turns:
                memory.move_to_host()
                left = torch.cuda.memory_allocated() - before
                assert held > 300 * MIB > LEFT_OF_A_TRAINER > left, (held, left)
        del sharded, optimizer, memory, inputs
        torch.cuda.empty_cache()
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


@pytest.mark.measures_gpu_memory
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, the engine")
@pytest.mark.timeout(START_SECONDS + 300)
def test_engine_releases_gpu_memory_and_wakes_with_weights(tmp_path: Path) -> None:
    folder, weights = tmp_path / "model", tmp_path / "weights"
    made = model().to(torch.bfloat16)
    made.config._attn_implementation = "sdpa"
    made.save_pretrained(folder)
    from tokenizers import Tokenizer, models

    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1").save_pretrained(folder)
    version = weights / "v1"
    made.save_pretrained(version)
    (version / "COMPLETE").touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "model_path": str(folder),
        "served_model_name": "m",
        "weights_dir": str(weights),
        "api_key": "gpu-test-key",
        "port": port,
        "device": "cuda",
        "max_model_len": 1024,
        "gpu_memory_utilization": 0.6,
        "enforce_eager": True,
        "colocated": True,
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    before, total = torch.cuda.mem_get_info()
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen(
        [sys.executable, "-m", "rlrun.inference", "--settings", str(tmp_path / "settings.json")],
        stdout=log,
        stderr=subprocess.STDOUT,
    )

    def ask(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": "Bearer gpu-test-key", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def used() -> int:
        return int(before - torch.cuda.mem_get_info()[0])

    try:
        beside, deadline = EnginesBeside([f"http://127.0.0.1:{port}"], "gpu-test-key"), time.monotonic() + START_SECONDS
        while beside._find_awake() is not None:
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(1)
        assert used() < LEFT_OF_AN_ENGINE, "it begins asleep"
        prompt = {
            "token_ids": [5, 6, 7],
            "sampling_params": {"max_tokens": 8, "logprobs": 0, "temperature": 1.0, "seed": 1},
        }
        answers = []
        for number in (1, 2):
            ask("/rlrun/update_weights", {"path": "v1", "version": number, "force": True})
            assert used() > total * 0.4, "awake it has its share"
            answers.append(ask("/inference/v1/generate", prompt)["choices"][0])
            assert answers[-1]["weight_versions"][0]["version"] == str(number)
            ask("/rlrun/sleep", {})
            assert used() < LEFT_OF_AN_ENGINE
        assert answers[0]["token_ids"] == answers[1]["token_ids"], "weights that were dropped are loaded whole"
    finally:
        server.kill()
        server.wait()
        log.close()
