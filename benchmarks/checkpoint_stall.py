"""Time for which training waits for a checkpoint: `python -m benchmarks.checkpoint_stall [--ranks 2] [--hidden-size
512] [--steps 10]`.

A real group of ranks replays recorded batches in steps of two seconds or more, with a checkpoint after every second
step. In one run the checkpoints are written during training (`checkpoint.saveAsync`, the default), in the other
training waits for the files. Both runs alternate with the same batches on the same disk. The first checkpoint of each,
which allocates the buffers, is reported separately.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlrun.config.models.checkpoint import CheckpointConfig, ExportConfig
from rlrun.config.models.language_models import ModelConfig, TinyModelConfig
from rlrun.config.models.learning import AlgorithmConfig, OptimizerConfig
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch, Sample, write_batch
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.paths import RunPaths
from rlrun.trainer.ranks.launch import torchrun_command

SEQ_LEN = 256
INTERVAL = 2


@dataclass(frozen=True)
class Result:
    """Result of one run, in seconds."""

    steps: list[float]
    first_stall: float
    stalls: list[float]
    writes: list[float]
    checkpoint_bytes: int


def record(folder: Path, *, steps: int, samples: int, vocabulary: int) -> None:
    """Write random batches, as another run's `rollouts/`."""
    paths = RunPaths(folder)
    for step in range(1, steps + 1):
        rng = np.random.default_rng(step)
        mask = np.arange(SEQ_LEN) >= 32
        batch = [
            Sample(
                input_ids=rng.integers(8, vocabulary, SEQ_LEN).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -5.0, 0).astype(np.float32),
                versions=np.where(mask, step - 1, -1).astype(np.int32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                temperature=1.0,
                environment="random",
                task_id=str(index),
                group=index,
                rollout=0,
                dispatch_version=step - 1,
                reward=0.0,
            )
            for index in range(samples)
        ]
        write_batch(paths.batch(step, 1), Batch(step, 1, tuple(batch)))


def train(folder: Path, model: Path, replay: Path, *, ranks: int, steps: int, background: bool) -> Result:
    """Run once; return the figures from `metrics.jsonl`."""
    paths = RunPaths(folder)
    config = TrainerConfig(
        name="stall",
        uid="uid",
        output_dir=str(folder),
        model=ModelConfig(path=str(model), dtype="float32"),
        max_steps=steps,
        seq_len=SEQ_LEN,
        seed=0,
        processes_per_replica=ranks,
        optimizer=OptimizerConfig(lr=1e-4),
        algorithm=AlgorithmConfig(),
        checkpoint=CheckpointConfig(
            interval=INTERVAL, keep_last=1, save_async=background, export=ExportConfig(at_end=False)
        ),
    )
    file = folder / "trainer.json"
    write_json(file, config.model_dump(mode="json"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = torchrun_command(config, config_file=file, rendezvous_port=port, attempt=1, replay=replay)
    env = os.environ | {"RLRUN_ATTEMPT": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=env, check=True)
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    stalls = [line["time/save_ckpt"] for line in lines if line["step"] % INTERVAL == 0]
    # The trainer's work in a step of a real run; the time for publishing weights is separate, and equal in both.
    seconds = [line["time/forward_backward"] + line["time/optimizer"] for line in lines]
    writes = [line["time/write_ckpt"] for line in lines if "time/write_ckpt" in line]
    [last] = [artifact.path for artifact in paths.checkpoints_on_disk() if artifact.step == steps]
    size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
    return Result(seconds, stalls[0], stalls[1:], writes, size)


def row(name: str, result: Result) -> str:
    """Return one line of the table."""
    step, stall = statistics.median(result.steps), statistics.median(result.stalls)
    return (
        f"| {name} | {step:.2f} | {result.first_stall:.3f} | {stall:.3f} | {max(result.stalls):.3f} "
        f"| {statistics.median(result.writes):.2f} | {100 * stall / step:.1f} % |"
    )


def main() -> None:
    """Run both kinds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="folder to write to (default: the temporary folder)")
    options = parser.parse_args()
    from rlrun.trainer.modeling.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        make_tiny_model(work / "model", TinyModelConfig(hidden_size=options.hidden_size, layers=options.layers))
        vocabulary = json.loads((work / "model/config.json").read_text())["vocab_size"]
        record(work / "recorded", steps=options.steps, samples=options.samples, vocabulary=vocabulary)
        results = {}
        for background in (True, False):
            folder = work / f"run-{background}"
            folder.mkdir()
            results[background] = train(
                folder,
                work / "model",
                RunPaths(work / "recorded").rollouts,
                ranks=options.ranks,
                steps=options.steps,
                background=background,
            )
        size = results[True].checkpoint_bytes / 1e6
        print(f"\n{options.ranks} ranks, checkpoints of {size:.0f} MB\n", file=sys.stdout)
        print(
            "| checkpoints | step, s | first stall, s | stall (median), s | stall (max), s | writing, s | stall / step |"
        )
        print("|---|---:|---:|---:|---:|---:|---:|")
        print(row("beside training", results[True]))
        print(row("training waits", results[False]))


if __name__ == "__main__":
    main()
