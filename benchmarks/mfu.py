"""MFU, tokens/s and memory of the trainer's step for the shapes of Qwen3-0.6B, RL and SFT, on one CUDA GPU.

    python -m benchmarks.mfu [--seq-lens 8192,16384,65536] [--steps 5] [--write]

Random weights and fake data (`trainer --bench`), one sequence per step. `--write` keeps the tables in benchmarks/results/mfu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config

RESULTS = Path(__file__).parent / "results" / "mfu.md"
LONGEST = 131_072
TO_BEAT = "To beat, PRIME-RL on one H100: RL 16k 11.1 % and 65k 26.8 %, SFT 16k 23.7 % MFU."


def qwen3_06b() -> Qwen3Config:
    """The published shape of Qwen3-0.6B, with more positions."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )


def trainer_config(folder: Path, preset: str, task: str) -> Path:
    """A configuration of the trainer's own fields."""
    model = folder / "model"
    qwen3_06b().save_pretrained(model)
    document = {
        "name": "mfu",
        "uid": "mfu",
        "outputDir": str(folder),
        "task": task,
        "model": {"path": str(model)},
        "maxSteps": 1,
        "seqLen": LONGEST,
        "seed": 0,
        "gpusPerReplica": 1,
        "algorithm": {"preset": preset},
        "checkpoint": {},
    }
    file = folder / f"{preset}.json"
    file.write_text(json.dumps(document))
    return file


def measure(preset: str, task: str, seq_lens: str, steps: int) -> str:
    """The table of one objective."""
    with tempfile.TemporaryDirectory() as folder:
        file = trainer_config(Path(folder), preset, task)
        start = "from rlrun.cli.roles import trainer; trainer()"
        command = [sys.executable, "-c", start, "@", str(file), "--bench", "--bench.seq-lens", seq_lens]
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        done = subprocess.run(
            [*command, "--bench.steps", str(steps)], check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        return done.stdout.strip()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", default="8192,16384,65536")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the tables in benchmarks/results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.mfu needs a CUDA GPU")
    parts = ["# MFU of the trainer's step: Qwen3-0.6B shapes, random weights", "", TO_BEAT, ""]
    for title, preset, task in (("RL", "aipo", "RL"), ("SFT", "sft", "SFT")):
        parts += [f"## {title} (`{preset}`)", "", measure(preset, task, arguments.seq_lens, arguments.steps), ""]
    text = "\n".join(parts)
    print(text)
    if arguments.write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
