"""Roles started one by one from files written by hand, and runs with an engine that outlives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlrun.config.models.language_models import TinyModelConfig
from rlrun.inspect.configurations import Change, attempts_kept, list_edits
from rlrun.local.preflight import free_port
from rlrun.protocol.files.attempts import read_attempt
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.modeling.tiny_model import make_tiny_model
from tests.e2e.local.local_run import ROOT, listens
from tests.support.programs import wait_for, wait_for_exit
from tests.support.python_path import before

pytestmark = pytest.mark.full
MODEL = 'seq_len = 64\n[model]\npath = "model"\ndtype = "float32"\n'
FILES = {
    "inference.toml": f"{MODEL}",
    "trainer.toml": f"{MODEL}[optimizer]\nlr = 1e-5\n[checkpoint]\ninterval = 2\n",
    "orchestrator.toml": f"batch_size = 32\n{MODEL}[sampling]\nmax_tokens = 8\n[checkpoint]\ninterval = 2\n"
    '[[environments]]\nid = "reverse-text"\ngroup_size = 8\n',
}
PROGRAM = "import sys; from rlrun.cli.{module} import {name}; sys.exit({name}())"


class Terminals:
    """Commands in one folder with one key, like in several terminals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = os.environ | {
            "PYTHONPATH": before(ROOT),
            "RLRUN_API_KEY": "a-key-of-this-run",
            "OMP_NUM_THREADS": "1",
        }

    @contextmanager
    def running(self, *words: str, attempt: int = 1, module: str = "roles") -> Iterator[subprocess.Popen[bytes]]:
        """Run a command until the block ends."""
        name = "main" if module == "rl" else words[0]
        program = PROGRAM.format(module=module, name=name)
        with self.log(words[0], attempt).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", program, *words[1:]],
                cwd=self.folder,
                env=self._environment | {"RLRUN_ATTEMPT": str(attempt)},
                stdout=output,
                stderr=output,
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                wait_for_exit(process)
            finally:
                process.kill()
                process.wait()

    def log(self, name: str, attempt: int = 1) -> Path:
        return self.folder / f"{name}.{attempt}.log"

    def rl(self, attempt: int, *words: str) -> None:
        """Run `rl` with the three files to its end."""
        files = [word for name in FILES for word in (f"--{name.removesuffix('.toml')}", "@", name)]
        with self.running("rl", *files, *words, attempt=attempt, module="rl") as process:
            assert wait_for_exit(process) == 0, self.log("rl", attempt).read_text()


def steps(folder: RunPaths) -> list[int]:
    """Return the trained steps, in order."""
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert all(line["grad_norm"] > 0 for line in lines if line["step"])
    return [line["step"] for line in lines if line["step"]]


def test_engine_outlives_rl_and_serves_manual_roles(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", TinyModelConfig(warmup_environment="reverse-text", warmup_steps=40))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    here, run, port = Terminals(tmp_path), RunPaths(tmp_path / "runs" / "rl"), free_port()
    url, channel = f"http://127.0.0.1:{port}", free_port()
    with here.running("inference", "@", "inference.toml", "--port", str(port)) as engine:
        wait_for(lambda: listens(engine, port, here.log("inference")), "the engine listens")
        uid = json.loads(run.identity.read_text())["uid"]

        here.rl(1, "--engine-url", url, "--max-steps", "2", "--plain")
        assert steps(run) == [1, 2]
        assert not list(run.root.glob("logs/*/inference/*.log")), "rl started an engine of its own"
        here.rl(2, "--engine-url", url, "--max-steps", "3", "--plain", "--resume")
        assert steps(run) == [1, 2, 3]
        assert engine.poll() is None, here.log("inference").read_text()

        trainer = here.running("trainer", "@", "trainer.toml", "--max-steps", "5", "--port", str(channel), attempt=3)
        words = ["@", "orchestrator.toml", "--max-steps", "5", "--trainer-url", f"http://127.0.0.1:{channel}"]
        words += ["--inference-urls", json.dumps([url]), "--metrics-port", str(free_port())]
        with trainer as training, here.running("orchestrator", *words, attempt=3) as deciding:
            assert wait_for_exit(deciding) == 0, here.log("orchestrator", 3).read_text()
            assert wait_for_exit(training) == 0, here.log("trainer", 3).read_text()
        assert steps(run) == [1, 2, 3, 4, 5]
        assert engine.poll() is None, here.log("inference").read_text()
    attempts = [read_attempt(run.attempt_file(number)) for number in (1, 2, 3)]
    assert [attempt.base_step for attempt in attempts] == [0, 2, 3]
    assert {attempt.uid for attempt in attempts} == {uid}
    kept = attempts_kept(run, lambda path: path.open("rb"), None, lambda config: config)
    changed = [change for edit in list_edits(kept) for change in edit.changes if change.field == "max_steps"]
    assert changed == [Change("max_steps", "3", "5"), Change("max_steps", "2", "3")]
