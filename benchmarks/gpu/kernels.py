"""Kernels of a step one by one: attention by kernel, row and direction; matrix products; the LM head; and whether they are right.

    python -m benchmarks.gpu.kernels --results FOLDER [--dry] [--seconds 300]

A child process measures; one that dies of a row (an illegal access spoils the whole process) leaves the row behind, and the next child
goes on after it. So does one that hangs, once it has written nothing for a while.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Deadline, Report, reason, run_limited
from benchmarks.gpu.shapes import QWEN3_06B, ROWS, TINY, TINY_ROWS, Shape, attention_flops

NAME, TITLE = "kernels", "Kernels: ms, TFLOP/s and errors"
ROW_SECONDS = 60.0
"""A row that takes longer hangs; compiling flex_attention's backward takes about 30 s."""
HEAD_TOKENS, PRODUCT_TOKENS, CHECKED = 16_384, 16_384, (1, 2, 127, 128, 129, 4_096)
FIRST = 3
"""Kernels of attention that are measured before the head and the products; flex_attention's compiler would take the time of all of them."""
TINY_TOKENS, TINY_CHECKED = 40, (1, 2, 15, 16, 17)


@dataclass(frozen=True)
class Row:
    """One line of a table, and what measures it."""

    section: str
    name: str
    measure: Callable[[], dict[str, Any]]


def rows(dry: bool) -> Iterator[Row]:
    """All of them, by worth."""
    from benchmarks.gpu import checks, heads
    from benchmarks.gpu.attention import KERNELS
    from benchmarks.gpu.clock import CPU, CUDA

    shape, device = (TINY, CPU) if dry else (QWEN3_06B, CUDA)
    layouts, tokens = (TINY_ROWS, TINY_TOKENS) if dry else (ROWS, HEAD_TOKENS)
    checked = TINY_CHECKED if dry else CHECKED
    yield from attention_rows(shape, layouts, checked, device, [*KERNELS][:FIRST])
    for name in heads.VARIANTS:
        yield Row("LM head", name, partial(heads.head_cost, name, shape, tokens, device))
    yield Row("LM head: errors", "trainer", lambda: checks.head_errors(shape, 64 if dry else 2_048, device))
    for name, (inputs, outputs) in shape.products().items():
        count = TINY_TOKENS if dry else (4_096 if name == "head" else PRODUCT_TOKENS)
        yield Row(
            "matrix products",
            name,
            partial(product_rates, count, inputs, outputs, device),
        )
    # Padded blocks are for CPUs.
    yield from attention_rows(shape, layouts, checked, device, [*KERNELS][FIRST : None if dry else -1])


def attention_rows(
    shape: Shape, layouts: Mapping[str, Sequence[int]], checked: Sequence[int], device: Any, names: Sequence[str]
) -> Iterator[Row]:
    """Errors and rates of some kernels of attention."""
    from benchmarks.gpu import checks
    from benchmarks.gpu.attention import KERNELS

    for name in names:
        yield Row(
            "attention: errors",
            name,
            partial(checks.attention_errors, KERNELS[name], shape, checked, device),
        )
    for layout in layouts:
        for name in names:
            yield Row(
                "attention",
                f"{name}, {layout}",
                partial(attention_rates, KERNELS[name], shape, layouts[layout], device),
            )


def attention_rates(kernel: Any, shape: Shape, lengths: Any, device: Any) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of one layer's attention, forward and backward."""
    import torch

    from benchmarks.gpu.clock import milliseconds
    from rlrun.trainer.modeling.packed_attention import row_layout

    torch.manual_seed(0)
    row, total = row_layout(lengths, device), sum(lengths)
    counts = (shape.heads, shape.key_value_heads, shape.key_value_heads)
    leaves = [
        torch.randn(total, heads, shape.head_dim, device=device, dtype=torch.bfloat16).requires_grad_()
        for heads in counts
    ]
    output = kernel(*leaves, row)
    gradient = torch.randn_like(output)
    with torch.no_grad():
        forward = milliseconds(lambda: kernel(*leaves, row), device)
    backward = milliseconds(lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True), device)
    work = attention_flops(shape, lengths)
    return {
        "forward ms": forward,
        "forward TFLOP/s": work[0] / forward / 1e9,
        "backward ms": backward,
        "backward TFLOP/s": work[1] / backward / 1e9,
    }


def product_rates(tokens: int, inputs: int, outputs: int, device: Any) -> dict[str, Any]:
    """TFLOP/s of a linear layer: forward, gradient of its input, gradient of its weight."""
    import torch

    from benchmarks.gpu.clock import milliseconds

    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
    gradient = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
    work = 2.0 * tokens * inputs * outputs
    times = {
        "forward": milliseconds(lambda: x @ weight.T, device),
        "of input": milliseconds(lambda: gradient @ weight, device),
        "of weight": milliseconds(lambda: gradient.T @ x, device),
    }
    rates = {f"{name} TFLOP/s": work / one / 1e9 for name, one in times.items()}
    return {"tokens": tokens, "inputs": inputs, "outputs": outputs, **rates, "ms": sum(times.values())}


def measure_all(report: Report, deadline: Deadline, dry: bool) -> None:
    """Every row that is not there yet, until the deadline."""
    from benchmarks.gpu.attention import UnavailableError
    from benchmarks.gpu.clock import CPU, CUDA, free

    for row in rows(dry):
        if report.has(row.section, row.name):
            continue
        if deadline.left <= 0:
            report.put(row.section, row.name, {"note": "left out: no time"})
            continue
        report.begin(row.section, row.name)
        began = time.monotonic()
        try:
            found = row.measure()
        except UnavailableError as error:
            found = {"note": f"not here: {error}"}
        except (RuntimeError, TypeError, AssertionError, NotImplementedError, ValueError) as error:
            found = {"note": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
            if "CUDA error" in str(error):  # whatever this process measures from here on is wrong
                report.put(row.section, row.name, found)
                sys.exit(f"{row.section}, {row.name}: {found['note']}")
        report.put(row.section, row.name, found)
        print(f"{row.section}, {row.name}: {time.monotonic() - began:.1f} s {found}", flush=True)
        free(CPU if dry else CUDA)


def supervise(folder: Path, deadline: Deadline, arguments: list[str], patience: float = ROW_SECONDS) -> Report:
    """Start children until all rows are there or the time is up."""
    children = 0
    (folder / f"{NAME}.json").unlink(missing_ok=True)
    while True:
        before = len(_rows(folder))
        command = [sys.executable, "-m", "benchmarks.gpu.kernels", "--child", *arguments]
        limit = deadline.left
        ended = run_limited(
            [*command, "--seconds", str(limit)], limit + 10, folder / "log.txt", {}, _stalled(folder, patience)
        )
        if ended.code == 0:
            return Report(folder, NAME, TITLE)
        children += 1
        if len(_rows(folder)) == before or deadline.left <= 0:
            report = Report(folder, NAME, TITLE)
            report.put("children that ended early", str(children), {"note": reason(ended, limit)})
            return report


def _rows(folder: Path) -> list[str]:
    sections = Report(folder, NAME, TITLE).sections
    return [f"{section}, {row}" for section, found in sections.items() for row in found]


def _stalled(folder: Path, patience: float) -> Callable[[], bool]:
    began, file = time.time(), folder / f"{NAME}.json"

    def stalled() -> bool:
        last = file.stat().st_mtime if file.exists() else began
        return time.time() - max(last, began) > patience

    return stalled


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="on the CPU, at tiny sizes")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    deadline = Deadline.after(arguments.seconds)
    if arguments.child:
        measure_all(Report(arguments.results, NAME, TITLE), deadline, arguments.dry)
        return
    dry = ["--dry"] if arguments.dry else []
    patience = arguments.seconds if arguments.dry else ROW_SECONDS
    print(supervise(arguments.results, deadline, ["--results", str(arguments.results), *dry], patience).text())


if __name__ == "__main__":
    main()
