"""The published weights are an ordinary model: plain transformers and a fresh vLLM load them and answer the same."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.local.local_run import ROOT, LocalRun

PROMPTS = 64
NEW_TOKENS = 8
KEY = "test-key"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def final_weights(learned: LocalRun) -> Path:
    return learned.folder / "weights" / "v00000120.a0001"


@pytest.fixture(scope="module")
def prompts(learned: LocalRun, final_weights: Path) -> list[list[int]]:
    """Held-out prompts as token ids."""
    lines = (learned.folder / "traces" / "eval_00000120.jsonl").read_text().splitlines()[:PROMPTS]
    tokenizer = AutoTokenizer.from_pretrained(final_weights)
    tasks = [[m for m in json.loads(line)["messages"] if m["role"] != "assistant"] for line in lines]
    return [tokenizer.apply_chat_template(task, add_generation_prompt=True, return_dict=False) for task in tasks]


@pytest.fixture(scope="module")
def greedy(final_weights: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What plain transformers answers."""
    model = AutoModelForCausalLM.from_pretrained(final_weights, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def test_they_load_in_plain_transformers_and_answer(
    final_weights: Path, greedy: list[list[int]], learned: LocalRun
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(final_weights)
    lines = (learned.folder / "traces" / "eval_00000120.jsonl").read_text().splitlines()[:PROMPTS]
    wanted = [json.loads(line)["messages"][0]["content"].strip("<>")[::-1] for line in lines]
    right = [
        tokenizer.decode(ids, skip_special_tokens=True) == answer for ids, answer in zip(greedy, wanted, strict=True)
    ]
    assert sum(right) / len(right) >= 0.4


def test_the_code_on_the_quickstart_page_works(final_weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code, changed = re.subn(r'^folder = ".*"$', f'folder = "{final_weights}"', code, flags=re.MULTILINE)
    assert changed == 1
    exec(compile(code, "quickstart.md", "exec"), {})
    assert capsys.readouterr().out.startswith("d")


@pytest.fixture(scope="module")
def fresh_engine(final_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A stock vLLM server that knows nothing of the run."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(final_weights), "--port", str(port),
        "--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32", "--max-model-len", "64", "--enable-scale-out", "--api-key", KEY,
    ]  # fmt: skip
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


async def test_a_fresh_vllm_gives_the_same_greedy_answers(
    fresh_engine: str, prompts: list[list[int]], greedy: list[list[int]], final_weights: Path
) -> None:
    import asyncio

    import aiohttp

    eos = AutoTokenizer.from_pretrained(final_weights).eos_token_id
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        deadline = asyncio.get_running_loop().time() + 240
        while True:
            try:
                async with session.get(f"{fresh_engine}/health") as answer:
                    if answer.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            assert asyncio.get_running_loop().time() < deadline, "vLLM did not start within 240 s"
            await asyncio.sleep(0.5)

        async def ask(prompt: list[int]) -> list[int]:
            body = {
                "model": str(final_weights),
                "token_ids": prompt,
                "sampling_params": {"max_tokens": NEW_TOKENS, "temperature": 0.0, "stop_token_ids": [eos]},
            }
            async with session.post(f"{fresh_engine}/inference/v1/generate", json=body) as answer:
                assert answer.status == 200, await answer.text()
                return list((await answer.json())["choices"][0]["token_ids"])

        answers = await asyncio.gather(*[ask(prompt) for prompt in prompts])

    def until_stop(ids: list[int]) -> list[int]:
        return ids[: ids.index(eos)] if eos in ids else ids

    assert [until_stop(a) for a in answers] == [until_stop(g) for g in greedy]
