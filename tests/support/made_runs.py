"""Folders of runs as `rlrun local` leaves them, and a client that calls an application without a socket."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from starlette.types import ASGIApp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlrun.protocol.files.batch import Batch, Sample, write_batch
from rlrun.protocol.files.launcher_record import State, new_record, write_record
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import ForkedFrom, fork_document
from rlrun.ui.app import make_app
from rlrun.ui.guard import LOOPBACK, Guard, Redactor
from rlrun.ui.live import Feed
from rlrun.ui.run_registry import Registry, run_id
from rlrun.ui.shown import FolderRuns
from rlrun.ui.static_files import StaticFiles

SECRET = "hunter2-hunter2"
"""Value of a secret variable of the server's process."""
SHAPED = "hf_" + "a1B2" * 8
Row = dict[str, Any]


def metrics_line(step: int, attempt: int = 1) -> Row:
    """Return metrics of a step of 2 s: 1 s of compute, 0.5 s of waiting for rollouts."""
    return {
        "step": step,
        "attempt": attempt,
        "time": 1.7e9 + step,
        "reward/mean": step / 100,
        "off_policy/mean": 0.5,
        "time/step": 2.0,
        "time/forward_backward": 0.9,
        "time/optimizer": 0.1,
        "time/wait_for_batch": 0.5,
        "time/broadcast_weights": 0.25,
    } | ({"eval/math/reward/mean": step / 50} if step % 5 == 0 else {})


def rollout(group: int, member: int, reward: float | None = 0.5, **changed: Any) -> Row:
    """Return a line of a trace."""
    call = {"function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    return {
        "step": 3,
        "attempt": 1,
        "group": group,
        "rollout": member,
        "environment": "math" if group % 2 == 0 else "code",
        "task_id": f"t{group}",
        "dispatch_version": 1,
        "reward": reward,
        "advantage": 0.25,
        "metrics": {"exact": 0.0},
        "messages": [
            {"role": "user", "content": f"what is {group} + {member}?"},
            {"role": "assistant", "content": "let me see", "tool_calls": [call]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": f"it is {group + member}"},
        ],
        "completion": "",
        "finish_reason": "stop",
        "truncated": False,
        "tokens": 20 + member,
        "completion_tokens": 10 + member,
        "versions": [[{"version": 1, "start": 10, "end": 14}, {"version": 2, "start": 14, "end": 20 + member}]],
        "seconds": 0.5,
    } | changed


@dataclass
class Folder:
    """A run's folder."""

    root: Path

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.root)

    @property
    def id(self) -> str:
        return run_id(self.root)

    def write(self, name: str, content: object) -> Path:
        """Write a file; other values than text become JSON."""
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    def lines(self, name: str, rows: Sequence[Mapping[str, Any]], *, more: bool = False) -> Path:
        """Write a file of JSON lines; `more` appends."""
        file = self.root / name
        before = file.read_text() if more else ""
        return self.write(name, before + "".join(json.dumps(row) + "\n" for row in rows))

    def config(self, **fields: Any) -> None:
        """Write `run.json`."""
        base = {"name": self.root.name, "uid": "u", "task": "RL", "max_steps": 20, "api_key": "opensesame1"}
        self.write("run.json", {"trainer": base | fields, "orchestrator": base | fields})

    def trained(self, steps: int) -> None:
        """Write steps with metrics, and a trace of the third step."""
        self.lines("metrics.jsonl", [metrics_line(step) for step in range(1, steps + 1)])
        self.lines("traces/step_00000003.jsonl", [rollout(g, m, (g * 4 + m) / 16) for g in range(4) for m in range(4)])

    def began(self, attempt: int, base_step: int, uid: str = "u", **fields: Any) -> None:
        """Start an attempt with its copy of the configuration, which becomes `run.json`, too."""
        record = {"attempt": attempt, "base_step": base_step, "started_at": 1.7e9 + attempt, "uid": uid}
        self.write(f"attempts/{attempt:04d}.json", record)
        self.config(**fields)
        self.paths.attempt_config(attempt).write_bytes(self.paths.run_json.read_bytes())

    def forked(self, origin: Folder, step: int, *changed: str) -> None:
        """Make it a fork of the first attempt of another run, which has not started."""
        fork = ForkedFrom(origin.root.name, "u", step, 1, str(origin.root.absolute()), changed)
        self.paths.fork.write_text(fork_document(fork))

    def lives(self, **progress: Any) -> None:
        """Record this process as its live launcher."""
        known = {"step": 10, "max_steps": 20, "waiting_on": "trainer: training step 11", "waiting_role": "trainer"}
        self._record(progress=known | progress, progress_time=time.time())

    def ends(self, state: State = "Complete") -> None:
        """Record that its launcher has ended."""
        self._record(state=state)

    def _record(self, **changed: Any) -> None:
        assert write_record(
            self.paths.launcher, replace(new_record(self.root.name, 1, "rlrun local run.yaml --resume"), **changed)
        )


def made(root: Path, steps: int = 10, **config: Any) -> Folder:
    """Return a run with steps."""
    folder = Folder(root)
    folder.config(**config)
    folder.write("attempts/0001.json", {"attempt": 1, "base_step": 0, "started_at": 1.7e9})
    folder.trained(steps)
    return folder


def trained_long(root: Path, steps: int = 120, **config: Any) -> Folder:
    """Return a realistic run: noisy curves, evaluations, a trace and the batch of the third step, and the model's
    tokenizer."""
    folder = made(root, **config)
    lines = []
    for step in range(1, steps + 1):
        wave = math.sin(step * 1.7) * math.cos(step * 0.31)
        learned = 1 - math.exp(-step / 60)
        waits = 0.6 + 0.5 * math.sin(step / 9) ** 2
        lines.append(
            metrics_line(step)
            | {
                "reward/mean": 0.9 * learned + 0.04 * wave,
                "loss": -0.05 * wave,
                "entropy": 1.6 - learned + 0.05 * wave,
                "mismatch_kl": 0.002 + 0.001 * abs(wave),
                "grad_norm": 0.8 + 0.2 * wave,
                "off_policy/mean": 0.7 + 0.3 * wave,
                "perf/throughput": 2100 + 90 * wave,
                "perf/mfu": 0.31 + 0.02 * wave,
                "perf/peak_memory": (61 + 2 * abs(wave)) * 2**30,
                "time/step": 1.6 + waits,
                "time/wait_for_batch": waits,
                "time/save_ckpt": 0.4 if step % 10 == 0 else 0.0,
            }
            | ({"eval/math/reward/mean": 0.85 * learned} if step % 5 == 0 else {})
        )
    folder.lines("metrics.jsonl", lines)
    tokenizer = byte_tokenizer(folder)
    samples = [
        sample(g, m, tokenizer.encode(f"what is {g} + {m}? it is {g + m}").ids, 10) for g in range(4) for m in range(4)
    ]
    folder.paths.rollouts.mkdir(exist_ok=True)
    write_batch(folder.paths.batch(3, 1), Batch(3, 1, tuple(samples)))
    return folder


def sample(group: int, rollout: int, ids: Sequence[int], given: int = 2) -> Sample:
    """Return a training sequence whose first tokens are given."""
    count = len(ids)
    mask = np.arange(count) >= given
    wave = np.sin(np.arange(count) * 1.3)
    return Sample(
        input_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -2.5 - 2.5 * wave, 0).astype(np.float32),
        versions=np.where(mask, np.where(np.arange(count) < given + 4, 1, 2), -1).astype(np.int32),
        advantages=np.where(mask, (rollout - 1.5) / 2, 0).astype(np.float32),
        temperature=1.0,
        environment="math",
        task_id="t",
        group=group,
        rollout=rollout,
        dispatch_version=1,
        reward=0.5,
    )


def byte_tokenizer(folder: Folder) -> Tokenizer:
    """Write a tokenizer with a token for each byte to the run's folder."""
    vocabulary = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.paths.model.mkdir(exist_ok=True)
    tokenizer.save(str(folder.paths.model / "tokenizer.json"))
    return tokenizer


@dataclass(frozen=True)
class Reply:
    """An answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Client of an application, like a browser on this machine.

    Args:
        app: application with its guard.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    def get(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        **query: Any,
    ) -> Reply:
        """Return one answer."""
        return asyncio.run(self._ask(method, path, urlencode(query, doseq=True), headers or {}, body))

    def json(self, path: str, **query: Any) -> Any:
        """Return the document of a successful answer."""
        reply = self.get(path, **query)
        assert reply.status == 200, reply.body
        return reply.json

    async def _ask(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> Reply:
        sent: list[dict[str, Any]] = []
        named = {"host": "127.0.0.1:8765"} | dict(headers)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8765),
            "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        start = next(one for one in sent if one["type"] == "http.response.start")
        found = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Reply(start["status"], found, b"".join(one.get("body", b"") for one in sent))


@contextmanager
def page_files(folder: Path) -> Iterator[StaticFiles]:
    """Yield a page of one line."""
    folder.mkdir()
    (folder / "index.html").write_text("<!doctype html><title>page</title>")
    yield StaticFiles(folder)


def client(*folders: Path, static: StaticFiles, token: str | None = None) -> tuple[Client, Registry]:
    """Return a client of a guarded application with folders, and its registry."""
    registry = Registry(folders)
    runs, feed = FolderRuns(registry, [str(one) for one in folders]), Feed(registry.fingerprint_runs, 0.01)
    app = make_app(lambda _request: runs, Redactor({"MY_PASSWORD": SECRET}), static, feed)
    names = LOOPBACK if token is None else None
    return Client(Guard(app, names=names, token=token, port=8765)), registry
