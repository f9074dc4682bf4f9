"""The fused LM head against full logits: memory and time of one forward and backward pass, at a vocabulary of 150 thousand.

    python -m benchmarks.lm_head [--shapes 256x512 256x2048 1024x512] [--repeats 2] [--write]

Both run on the same inputs in one run, each measurement in a process of its own, one after the other, so that a peak of memory is that
of one of them alone. `--write` keeps the table in benchmarks/results/lm_head.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "lm_head.md"
VOCABULARY = 150_000
"""About that of Qwen3."""
SHAPES = ("256x512", "256x2048", "1024x512")
"""Hidden size x tokens."""
KINDS = ("full", "fused")


def measure(kind: str, hidden_size: int, tokens: int, repeats: int) -> dict[str, float]:
    """CPU seconds of one thread (median) and peak memory above the inputs (bytes) of one kind; a digest of its results."""
    import torch

    from rlrun.trainer.learning.lm_head import head_statistics, logits_statistics

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = (torch.randn(tokens, hidden_size) / 8).requires_grad_()
    weight = (torch.randn(VOCABULARY, hidden_size) / 4).requires_grad_()
    targets, temperatures = torch.randint(VOCABULARY, (tokens,)), torch.full((tokens,), 0.9)
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        if kind == "fused":
            logprobs, _ = head_statistics(hidden, weight, targets, temperatures)
        else:
            logprobs, entropy = logits_statistics(hidden @ weight.T, targets, temperatures)
            entropy.detach_()
        logprobs.sum().backward()
        seconds.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "seconds": statistics.median(seconds),
        "peak": peak * 1024.0,
        "logprobs": float(logprobs.detach().sum()),
        "gradient": float(weight.grad.norm()),
    }


def table(shapes: list[str], repeats: int) -> str:
    """All measurements as Markdown."""
    rows = []
    for shape in shapes:
        found = {}
        for kind in KINDS:
            command = [sys.executable, "-m", "benchmarks.lm_head", "--measure", kind, "--shapes", shape]
            done = subprocess.run([*command, "--repeats", str(repeats)], check=True, stdout=subprocess.PIPE, text=True)
            found[kind] = json.loads(done.stdout)
        full, fused = found["full"], found["fused"]
        for name in ("logprobs", "gradient"):
            assert abs(fused[name] / full[name] - 1) < 1e-4, (name, found)
        hidden_size, tokens = shape.split("x")
        rows.append(
            f"| {hidden_size} | {tokens} | {full['peak'] / 2**20:.0f} | {fused['peak'] / 2**20:.0f} "
            f"| {full['peak'] / fused['peak']:.1f} | {full['seconds']:.2f} | {fused['seconds']:.2f} "
            f"| {full['seconds'] / fused['seconds']:.2f} |"
        )
    return "\n".join(
        [
            f"# Fused LM head against full logits: vocabulary {VOCABULARY}, float32",
            "",
            f"`python -m benchmarks.lm_head --shapes {' '.join(shapes)} --repeats {repeats}`; one core ({platform.machine()}), no GPU.",
            "Forward and backward pass of the log-probabilities, and the entropies without a gradient. Time is the CPU's: the machine",
            "does other work too. Memory is the peak above inputs and their gradients; a new gradient of the weight (0.57 MiB per unit of",
            "hidden size) is part of it in both.",
            "",
            "| hidden size | tokens | full: MiB | fused: MiB | ratio | full: s | fused: s | speed-up |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="HIDDENxTOKENS")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    parser.add_argument("--measure", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        hidden_size, tokens = map(int, arguments.shapes[0].split("x"))
        print(json.dumps(measure(arguments.measure, hidden_size, tokens, arguments.repeats)))
        return
    text = table(arguments.shapes, arguments.repeats)
    print(text)
    if arguments.write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
