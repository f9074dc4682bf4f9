"""Fixtures: one real vLLM server for all tests of this folder, with a random model of 0.8 M parameters."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlrun.local.preflight import free_port
from tests.support.forks import Forked
from tests.support.programs import wait_for, wait_for_exit
from tests.support.vllm_forks import vllm_forks

API_KEY = "engine-test-key"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-=*()<>?!., \n"


def group_members(group: int) -> list[str]:
    """Return state and name of every process of a group, except zombies."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        name, rest = text[text.index("(") : text.rindex(")") + 1], text[text.rindex(")") + 2 :].split()
        if int(rest[2]) == group and rest[0] != "Z":
            members.append(name)
    return members


def random_model(seed: int) -> LlamaForCausalLM:
    """Build random weights wide enough that two seeds disagree about every token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.08,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).float().eval()


def sampled_logprobs(model: LlamaForCausalLM, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """Return the log-probs of `tokens` after `prompt` by transformers, in float32."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@dataclass
class Server:
    """Server process with its weights folder and its log."""

    process: subprocess.Popen[bytes] | Forked
    url: str
    root: Path
    log: Path
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(10))
    api_key: str = API_KEY

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def serving(self) -> bool:
        assert self.process.poll() is None, f"the server exited: {self.log.read_text()[-3000:]}"
        return self.get("/health")[0] == 200

    def stop(self, signum: int) -> int:
        """Send a signal only to the server, like a supervisor, and return its exit code."""
        self.process.send_signal(signum)
        return wait_for_exit(self.process, state=self.log.read_text)

    def publish(self, model: LlamaForCausalLM, name: str, complete: bool = True) -> Path:
        """Write a weight folder like the trainer."""
        folder = self.root / "weights" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tensors = {k: v.contiguous() for k, v in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if complete:
            (folder / "COMPLETE").touch()
        return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {c: 4 + i for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    fast.save_pretrained(folder)
    random_model(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def launch(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Return a function that starts servers; those still running are killed at the end.

    Servers are forked from a process that has imported vLLM; with `own_python` a server is a command, as users start
    it.
    """
    servers: list[Server] = []

    def start(*, own_python: bool = False, **overrides: Any) -> Server:
        root = tmp_path_factory.mktemp("run")
        (root / "weights").mkdir()
        port = free_port()
        settings = {
            "model_path": str(model_folder),
            "served_model_name": "tiny",
            "weights_dir": str(root / "weights"),
            "api_key": API_KEY,
            "port": port,
            "dtype": "float32",
            "max_model_len": 1024,
            "enforce_eager": True,
            "heartbeat_interval": 0.5,
        } | overrides
        file, log = root / "settings.json", root / "server.log"
        file.write_text(json.dumps(settings))
        process: subprocess.Popen[bytes] | Forked
        if own_python:
            with log.open("wb") as output:
                command = [sys.executable, "-m", "rlrun.inference", "--settings", str(file)]
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        else:
            process = vllm_forks().start("rlrun.inference", "--settings", str(file), log=log)
        server = Server(process, f"http://127.0.0.1:{settings['port']}", root, log)
        servers.append(server)
        return server

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            wait_for_exit(server.process)


@pytest.fixture(scope="session")
def server(launch: Callable[..., Server]) -> Iterator[Server]:
    """Shared server, which loads versions from files and from the trainer's memory, also as differences, and sleeps.

    Its end is a test too: SIGTERM, exit code 0 and no remaining process.
    """
    running = launch(receives=True, deltas=True, colocated=True)
    wait_for(running.serving, "the server answers")
    yield running
    group = running.process.pid
    assert running.stop(signal.SIGTERM) == 0
    wait_for(lambda: not group_members(group), "all processes of the server are gone")
