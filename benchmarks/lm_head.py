"""The fused LM head against the general path and against full logits: memory and time of a forward and backward pass,
vocabulary 150,000.

    python -m benchmarks.lm_head [--shapes 256x512 256x2048 1024x512] [--repeats 2] [--write]

All variants run on the same inputs, each measurement in a separate process, one after the other, so that a peak of
memory belongs to one of them only. `general` is the path of every head before the fused one, still used for a bias, a
soft cap and an entropy's gradient; `known` has its coefficients before the forward pass (SFT); `frozen` has a weight
without a gradient (LoRA). `--write` writes the table to benchmarks/results/lm_head.md.
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
"""Vocabulary size, close to that of Qwen3."""
SHAPES = ("256x512", "256x2048", "1024x512")
"""Hidden size x tokens."""
KINDS = ("full", "general", "fused", "known", "frozen")


def measure(kind: str, hidden_size: int, tokens: int, repeats: int) -> dict[str, float]:
    """Return CPU seconds of one thread (median), peak memory above the inputs (bytes), and a digest of the results of
    one kind."""
    import torch

    from rlrun.trainer.learning.lm_head import head_statistics, logits_statistics, weighted_logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = (torch.randn(tokens, hidden_size) / 8).requires_grad_()
    weight = (torch.randn(VOCABULARY, hidden_size) / 4).requires_grad_(kind != "frozen")
    targets, temperatures = torch.randint(VOCABULARY, (tokens,)), torch.full((tokens,), 0.9)
    hidden.grad = torch.zeros_like(hidden)
    if weight.requires_grad:
        weight.grad = torch.zeros_like(weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        if kind == "full":
            logprobs, entropy = logits_statistics(hidden @ weight.T, targets, temperatures)
            entropy.detach_()
            logprobs.sum().backward()
        elif kind == "known":
            weighted = weighted_logprobs(hidden, weight, targets, temperatures, torch.ones(tokens))
            assert weighted is not None
            total, logprobs, _ = weighted
            total.backward()
        else:
            logprobs, _ = head_statistics(
                hidden, weight, targets, temperatures, entropy="gradient" if kind == "general" else "value"
            )
            logprobs.sum().backward()
        seconds.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "seconds": statistics.median(seconds),
        "peak": peak * 1024.0,
        "logprobs": float(logprobs.detach().sum()),
        "gradient": float(hidden.grad.norm()),
    }


def table(shapes: list[str], repeats: int) -> str:
    """Return all measurements as Markdown."""
    rows = []
    for shape in shapes:
        found = {}
        for kind in KINDS:
            command = [sys.executable, "-m", "benchmarks.lm_head", "--measure", kind, "--shapes", shape]
            done = subprocess.run([*command, "--repeats", str(repeats)], check=True, stdout=subprocess.PIPE, text=True)
            found[kind] = json.loads(done.stdout)
        for kind in KINDS:
            for name in ("logprobs", "gradient"):
                assert abs(found[kind][name] / found["full"][name] - 1) < 1e-4, (kind, name, found)
        hidden_size, tokens = shape.split("x")
        memory = " | ".join(f"{found[kind]['peak'] / 2**20:.0f}" for kind in KINDS)
        times = " | ".join(f"{found[kind]['seconds']:.2f}" for kind in KINDS)
        rows.append(f"| {hidden_size} | {tokens} | {memory} | {times} |")
    return "\n".join(
        [
            f"# Ways through the LM head: vocabulary {VOCABULARY}, float32",
            "",
            f"`python -m benchmarks.lm_head --shapes {' '.join(shapes)} --repeats {repeats}`; one core ({platform.machine()}), no GPU.",
            "Forward and backward pass of the log-probabilities, and the entropies without a gradient. Time is the CPU's: the machine",
            "does other work too. Memory is the peak above inputs and their gradients; a new gradient of the weight (0.57 MiB per unit of",
            "hidden size) is part of it in all but `frozen`. `general` is what every head was before it was fused;",
            "0 MiB: less than what was free again after the inputs were made.",
            "",
            "| hidden size | tokens | "
            + " | ".join(f"{kind}: MiB" for kind in KINDS)
            + " | "
            + " | ".join(f"{kind}: s" for kind in KINDS)
            + " |",
            "|---" * (2 + 2 * len(KINDS)) + "|",
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
