"""Summary of a finished run: the curve of its reward or loss, the held-out results, and the paths of its files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import plotext
from rich.console import Console
from rich.table import Table

from rlrun.protocol.files.metrics_line import MetricsLine, metrics_lines, missing_answers
from rlrun.protocol.files.paths import ADAPTER_CONFIG, RunPaths

_ROWS = 10
_SHOWN = {"step", "reward/mean", "loss", "validation/loss", "mismatch_kl", "off_policy/mean", "time/step"}
"""Metrics of the summary, in addition to those of evaluations."""


def mean_evaluations(lines: list[MetricsLine]) -> list[tuple[int, float]]:
    """Return policy versions and their mean held-out rewards over all environments, in order."""
    found = []
    for line in lines:
        values = [value for key, value in line.items() if key.startswith("eval/") and key.endswith("/reward/mean")]
        if values:
            found.append((int(line["step"]), sum(values) / len(values)))
    return found


def mean_value(values: list[float]) -> float:
    """Return the arithmetic mean of a non-empty list."""
    return sum(values) / len(values)


def print_summary(console: Console, root: Path, *, elapsed_seconds: float, command: str) -> None:
    """Print table, plot and paths of a complete run."""
    lines = [_shown_part(line) for _, line in metrics_lines(RunPaths(root).metrics) if line is not None]
    steps = [line for line in lines if line["step"] > 0]
    if steps and "reward/mean" not in steps[0]:
        _print_losses(console, lines)
    elif steps:
        _print_rewards(console, lines, [line for line in steps if "reward/mean" in line])
    else:
        return
    _print_places(console, root, elapsed_seconds=elapsed_seconds, command=command, traces="reward/mean" in steps[0])


def _shown_part(line: MetricsLine) -> MetricsLine:
    """Keep only the values of the summary: a whole line needs 11 KB of memory, and a long run has many lines."""
    return {name: value for name, value in line.items() if name in _SHOWN or name.startswith("eval/")}


def _print_losses(console: Console, lines: list[MetricsLine]) -> None:
    """Print the losses of supervised fine-tuning."""
    steps = [line for line in lines if line["step"] > 0]
    held_out = [(int(line["step"]), float(line["validation/loss"])) for line in lines if "validation/loss" in line]
    plotext.clear_figure()
    plotext.plot([p["step"] for p in steps], [p["loss"] for p in steps], label="loss", marker="braille")
    if len(held_out) > 1:
        plotext.scatter([v for v, _ in held_out], [loss for _, loss in held_out], label="validation", marker="x")
    _print_plot(console)
    console.print(
        f"loss {steps[0]['loss']:.4f} → {steps[-1]['loss']:.4f} (steps {steps[0]['step']} and {steps[-1]['step']})",
        highlight=False,
        soft_wrap=True,
    )
    if len(held_out) > 1:
        (first, before), (last, after) = held_out[0], held_out[-1]
        console.print(
            f"validation loss {before:.4f} (step {first}) → {after:.4f} (step {last})", highlight=False, soft_wrap=True
        )


def _print_plot(console: Console) -> None:
    plotext.plot_size(min(100, console.width), 18)
    plotext.theme("clear")
    plotext.xlabel("step")
    console.print(plotext.uncolorize(plotext.build()), highlight=False, markup=False, soft_wrap=True)


def _learning_curve(steps: list[MetricsLine], held_out: list[tuple[int, float]]) -> Table:
    """Table of at most ten rows, each with the mean over an equal number of steps."""
    table = Table(title="learning curve", title_justify="left")
    for column in ("steps", "reward", "held-out reward", "mismatch_kl", "staleness", "step time"):
        table.add_column(column, justify="right")
    size = max(1, -(-len(steps) // _ROWS))
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        first, last = part[0]["step"], part[-1]["step"]
        start_too = {0} if start == 0 else set[int]()
        seen = [f"{reward:.3f}" for version, reward in held_out if version in start_too or first <= version <= last]
        table.add_row(
            f"{first}–{last}",
            _mean_of(part, "reward/mean", ".3f"),
            " ".join(seen) or "–",
            _mean_of(part, "mismatch_kl", ".1e"),
            _mean_of(part, "off_policy/mean", ".2f"),
            _mean_of(part, "time/step", ".2f"),
        )
    return table


def _mean_of(lines: list[MetricsLine], key: str, form: str) -> str:
    values = [line[key] for line in lines if key in line]
    return f"{mean_value(values):{form}}" if values else "–"


def _print_rewards(console: Console, lines: list[MetricsLine], steps: list[MetricsLine]) -> None:
    """Print the learning curve of reinforcement learning."""
    held_out = mean_evaluations(lines)
    plotext.clear_figure()
    plotext.plot([p["step"] for p in steps], [p["reward/mean"] for p in steps], label="reward", marker="braille")
    if len(held_out) > 1:
        plotext.scatter([v for v, _ in held_out], [r for _, r in held_out], label="held-out", marker="x")
    _print_plot(console)
    console.print(_learning_curve(steps, held_out))
    head, tail = steps[: max(1, len(steps) // 10)], steps[-max(1, len(steps) // 10) :]
    reward_start, reward_end = (
        mean_value([p["reward/mean"] for p in head]),
        mean_value([p["reward/mean"] for p in tail]),
    )
    console.print(
        f"reward {reward_start:.3f} → {reward_end:.3f} (first and last tenth of {len(steps)} steps)",
        highlight=False,
        soft_wrap=True,
    )
    if len(held_out) > 1:
        console.print(
            f"held-out reward {held_out[0][1]:.3f} (version {held_out[0][0]}) → {held_out[-1][1]:.3f} (version {held_out[-1][0]})",
            highlight=False,
            soft_wrap=True,
        )
    for line in missing_notes(lines):
        console.print(line, highlight=False, soft_wrap=True)


def missing_notes(lines: list[MetricsLine]) -> list[str]:
    """Return a sentence for each evaluation with missing answers."""
    found = []
    for line in lines:
        for name in sorted(line):
            if name.startswith("eval/") and name.endswith("/answers"):
                prefix = name.removesuffix("answers")
                if note := missing_answers(line, prefix):
                    found.append(f"held-out reward of {prefix[len('eval/') : -1]}, version {int(line['step'])}:{note}")
    return found


def continue_advice(command: str, root: Path) -> str:
    """Return advice on how to train a complete run further. If the command has an option for the steps, the option has to be raised."""
    more = (
        "raise --max-steps in" if re.search(r"--max[-_]?steps\b", command, re.IGNORECASE) else "raise maxSteps and run"
    )
    return f"Continue: {more} `{command} --output-dir {shlex.quote(str(root))} --resume`"


def _print_places(console: Console, root: Path, *, elapsed_seconds: float, command: str, traces: bool) -> None:
    minutes, seconds = divmod(int(elapsed_seconds), 60)
    versions = RunPaths(root).versions_on_disk()
    console.print(f"\nComplete in {minutes} min {seconds} s. Everything is in {root}:", highlight=False, soft_wrap=True)
    if versions:
        path = versions[-1].path
        adapter = (path / ADAPTER_CONFIG).exists()
        what = (
            "adapter (PEFT and vLLM load it onto the model)"
            if adapter
            else "model (transformers and vLLM load it directly)"
        )
        console.print(
            f"  {path.relative_to(root)}  the trained {what}",
            highlight=False,
            soft_wrap=True,
        )
    console.print("  metrics.jsonl                    one line per step", highlight=False, soft_wrap=True)
    if traces:
        console.print(
            "  traces/                          every rollout with its tokens' versions; eval_*.jsonl for held-out tasks",
            highlight=False,
            soft_wrap=True,
        )
    console.print(continue_advice(command, root), highlight=False, soft_wrap=True, markup=False)
