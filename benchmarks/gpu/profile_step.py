"""Profile of a step: device time by category, the longest kernels, idle gaps, and memory.

    python -m benchmarks.gpu.profile_step --results FOLDER [--dry] [--seconds 400]

Each configuration in a process of its own, with the fields of the fastest RL 16k in steps.json; four steps, then one that is recorded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Deadline, Report, reason, run_limited
from benchmarks.gpu.shapes import QWEN3_06B, TINY
from benchmarks.gpu.steps import LADDER, TINY_LADDER, Step, best_fields, configuration, rank_environment

NAME, TITLE = "profile", "One step of the trainer, recorded"
SKIPPED, LONGEST, LIMIT = 4, 40, 130.0
LONGEST_GAPS, GAP_LENGTHS = 20, (0, 2, 5, 10, 50, 200, 1_000, 1_000_000)
"""Number of gaps that are named; microseconds."""
WANTED = ("RL 16k, eager", "SFT 16k, eager", "RL 65k, eager")
"""Rows of the ladder; their fields are replaced by the best ones."""
HEAD = ("_HeadStatistics", "_HeadStatisticsBackward", "FusedHead", "FusedHeadBackward")
"""The autograd function of the LM head: what runs inside of it is the head's, whatever its kernel's name."""
CATEGORIES = (
    ("attention", r"flash|fmha|cudnn_generated|attention"),
    ("optimizer", r"multi_tensor|fused_adam|foreach|addcdiv|addcmul"),
    ("GEMM", r"gemm|cutlass|nvjet|wgmma|aten::mm$|aten::addmm|aten::bmm|aten::linear|aten::matmul"),
    ("fused", r"triton_"),
    ("copies", r"memcpy|memset|aten::copy_|aten::zero_|aten::fill_"),
    ("eager rest", r""),
)
"""By the name of the kernel, the first that matches; on the CPU by the operation's."""


@dataclass(frozen=True)
class Kernel:
    """Something that ran on the device."""

    name: str
    begin: float
    end: float
    """Microseconds."""
    head: bool = False
    """Started by the LM head."""

    @property
    def category(self) -> str:
        if self.head:
            return "LM head"
        return next(name for name, pattern in CATEGORIES if re.search(pattern, self.name, re.IGNORECASE))


def summary(kernels: Sequence[Kernel], step: tuple[float, float]) -> dict[str, dict[str, dict[str, Any]]]:
    """Tables of a step that lasted from begin to end: categories with idle time, and the longest kernels."""
    total = step[1] - step[0]
    idle = max(total - _union(kernels), 0.0)
    categories: dict[str, list[float]] = {}
    names: dict[str, list[float]] = {}
    for kernel in kernels:
        categories.setdefault(kernel.category, []).append(kernel.end - kernel.begin)
        names.setdefault(kernel.name[:120], []).append(kernel.end - kernel.begin)

    def line(times: Iterable[float]) -> dict[str, Any]:
        found = list(times)
        return {"ms": sum(found) / 1000, "% of step": 100 * sum(found) / total, "launches": len(found)}

    by_time = sorted(names, key=lambda name: -sum(names[name]))[:LONGEST]
    shares = {name: line(categories[name]) for name in sorted(categories, key=lambda name: -sum(categories[name]))}
    shares["idle"] = {"ms": idle / 1000, "% of step": 100 * idle / total}
    shares["step"] = {"ms": total / 1000, "% of step": 100.0, "launches": len(kernels)}
    return {
        "categories": shares,
        "longest": {name: line(names[name]) for name in by_time},
        "gaps": gaps(kernels, step[0]),
    }


def gaps(kernels: Sequence[Kernel], began: float) -> dict[str, dict[str, Any]]:
    """The longest times in which nothing ran: when, after what, before what; and how many there are of each length."""
    found, reached, last = [], None, ""
    for kernel in sorted(kernels, key=lambda one: one.begin):
        if reached is not None and kernel.begin > reached:
            found.append((kernel.begin - reached, reached - began, last, kernel.name))
        if reached is None or kernel.end > reached:
            reached, last = kernel.end, kernel.name
    rows: dict[str, dict[str, Any]] = {}
    for low, high in itertools.pairwise(GAP_LENGTHS):
        within = [gap[0] for gap in found if low <= gap[0] < high]
        rows[f"{low} to {high} us"] = {"ms": sum(within) / 1000, "launches": len(within)}
    for length, at, after, before in sorted(found, reverse=True)[:LONGEST_GAPS]:
        rows[f"at {at / 1000:.2f} ms"] = {"ms": length / 1000, "after": after[:80], "before": before[:80]}
    return rows


def _union(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one kernel ran."""
    covered, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda one: one.begin):
        covered += max(kernel.end - max(kernel.begin, reached), 0.0)
        reached = max(reached, kernel.end)
    return covered


def kernels_of(events: Sequence[Any], *, cuda: bool) -> list[Kernel]:
    """Kernels and copies on the device among torch.profiler's events; on the CPU the outermost operations."""
    found = []
    for event in events:
        if not cuda:
            if event.name.startswith("aten::") and not (
                event.cpu_parent and event.cpu_parent.name.startswith("aten::")
            ):
                found.append(Kernel(event.name, event.time_range.start, event.time_range.end, _in_head(event)))
        elif str(event.device_type).endswith("CUDA") and not getattr(event, "is_user_annotation", False):
            found.append(Kernel(event.name, event.time_range.start, event.time_range.end))
    if not cuda:
        return found
    # An operation knows names and lengths of what it started, not when: of one name the head's are marked by their number.
    heads: dict[tuple[str, float], int] = {}
    for event in events:
        for started in getattr(event, "kernels", ()):
            if _in_head(event):
                key = (started.name, round(float(started.duration), 1))
                heads[key] = heads.get(key, 0) + 1
    marked = []
    for kernel in found:
        key = (kernel.name, round(kernel.end - kernel.begin, 1))
        left = heads.get(key, 0)
        heads[key] = left - 1
        marked.append(replace(kernel, head=left > 0))
    return marked


def _in_head(event: Any) -> bool:
    while event is not None:
        if any(name in event.name for name in HEAD):
            return True
        event = event.cpu_parent
    return False


def record(config_file: Path, tokens: int, folder: Path, dry: bool) -> None:
    """In the process of a configuration: record a step, and write its tables as JSON to stdout's file."""
    from rlrun.config.loading.loader import load_file
    from rlrun.config.models.roles import TrainerConfig
    from rlrun.trainer.bench import prepare_bench

    with prepare_bench(load_file(TrainerConfig, config_file, section="trainer"), longest=tokens) as bench:
        update = bench.update(tokens, 1)
        for _ in range(1 if dry else SKIPPED):
            bench.step(update)
        (folder / "summary.json").write_text(json.dumps(recorded(bench, update, dry=dry)))
        (folder / "memory.txt").write_text(_memory(bench, dry))


def recorded(bench: Any, update: Any, *, dry: bool) -> dict[str, dict[str, dict[str, Any]]]:
    """Tables of one step of a bench that is warm."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([] if dry else [ProfilerActivity.CUDA])]
    with profile(activities=activities) as seen:
        bench.step(update)
    kernels = kernels_of(seen.events(), cuda=not dry)
    return summary(kernels, (min(kernel.begin for kernel in kernels), max(kernel.end for kernel in kernels)))


def put_profile(results: Path, title: str, bench: Any, update: Any, *, dry: bool) -> None:
    """Add the tables of one step of a bench that is warm to the report, and its memory."""
    report = Report(results, NAME, TITLE)
    for part, rows in recorded(bench, update, dry=dry).items():
        for name, row in rows.items():
            report.put(f"{title}: {part}", name, row)
    with (results / "memory.txt").open("a") as file:
        file.write(f"{title}: {_memory(bench, dry)}\n")


def _memory(bench: Any, dry: bool) -> str:
    import torch

    return f"{bench.table_title}\n{torch.cuda.memory_summary() if not dry else 'no CUDA'}\n"


def profile_all(report: Report, steps: Sequence[Step], results: Path, *, dry: bool, deadline: Deadline) -> None:
    """A recorded step of each configuration, until the deadline."""
    from rlrun.local.preflight import free_port

    fields = best_fields(Report(results, "steps", ""))
    (results / "memory.txt").write_text("")
    for step in steps:
        if deadline.left <= 0:
            report.put(step.name, "all", {"note": "left out: no time"})
            continue
        with tempfile.TemporaryDirectory() as made:
            folder, shape = Path(made), TINY if dry else QWEN3_06B
            config = configuration(step, shape, folder, gpus=0 if dry else 1, fields=fields)
            file, limit = folder / "config.json", deadline.left if dry else min(LIMIT, deadline.left)
            file.write_text(config.model_dump_json())
            command = [sys.executable, "-m", "benchmarks.gpu.profile_step", "--results", made, "--child", str(file)]
            command += ["--tokens", str(step.tokens), *(["--dry"] if dry else [])]
            ended = run_limited(command, limit, results / "log.txt", rank_environment(free_port()))
            title = step.name.partition(",")[0]
            if ended.code != 0:
                report.put(title, "all", {"note": reason(ended, limit)})
                continue
            for part, rows in json.loads((folder / "summary.json").read_text()).items():
                for name, row in rows.items():
                    report.put(f"{title}: {part}", name, row)
            with (results / "memory.txt").open("a") as memory:
                memory.write(f"{title}: {(folder / 'memory.txt').read_text()}\n")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="on the CPU, at tiny sizes")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument(
        "--rows", metavar="NAME;NAME", default=";".join(WANTED), help="rows of the ladder, for their lengths and tasks"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        record(arguments.child, arguments.tokens, arguments.results, arguments.dry)
        return
    steps = TINY_LADDER[:1] if arguments.dry else [step for step in LADDER if step.name in arguments.rows.split(";")]
    report = Report(arguments.results, NAME, TITLE, fresh=True)
    deadline = Deadline.after(arguments.seconds)
    profile_all(report, steps, arguments.results, dry=arguments.dry, deadline=deadline)
    print(report.text())


if __name__ == "__main__":
    main()
