"""Final messages of a run: results, paths, and the command that continues it.

In the order of the file: the saved state and folders of a stopped or failed run; the curve of a finished run's reward or loss with its
held-out results and files; results of several policies side by side, as stored in `results.json`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import plotext
from rich.console import Console
from rich.table import Table

from rlrun.protocol.files.checkpoint_manifest import ManifestError, complete_checkpoints, read_manifest
from rlrun.protocol.files.failures import volume_is_full
from rlrun.protocol.files.metrics_line import MetricsLine, metrics_lines, missing_answers
from rlrun.protocol.files.paths import ADAPTER_CONFIG, Artifact, RunPaths
from rlrun.protocol.files.volume_faults import show_size


@dataclass(frozen=True)
class Farewell:
    """A run that has stopped.

    Args:
        paths: paths of the run's folder.
        folder: the folder as the user typed it.
        command: command that continues the run.
        trains: whether the run trains; False for an evaluation.
        failed: whether a role has failed.
    """

    paths: RunPaths
    folder: str
    command: str
    trains: bool
    failed: bool = False

    def lines(self) -> Iterator[str]:
        """Yield the lines to print, one for each fact."""
        checkpoint = max(complete_checkpoints(self.paths), key=lambda one: (one.step, one.attempt), default=None)
        rows = [*self._saved_rows(checkpoint), *self._folder_rows(checkpoint)]
        if volume_is_full(self.paths.root):
            rows.append(("full", "the volume is full: you can delete traces/, exports/ and logs/ of the folder"))
        if self.failed:
            rows.append(("why", f"rlrun why {self.folder}"))
        rows.append(("repair the cause, then continue" if self.failed else "continue", self.command))
        yield from rows_text(rows).splitlines()

    def _saved_rows(self, checkpoint: Artifact | None) -> Iterator[tuple[str, str]]:
        if not self.trains:
            yield "saved", "finished answers are saved and will not be requested again"
            return
        last = _last_step(self.paths.metrics)
        if checkpoint is None:
            trained = f"; {_show_steps(1, last)} trained again" if last else ""
            yield "saved", f"no checkpoint is complete, so the run starts again at step 1{trained}"
            return
        where = checkpoint.path.relative_to(self.paths.root)
        yield "saved", f"step {checkpoint.step} in {self.folder}/{where}{_show_size(checkpoint.path)}"
        if last > checkpoint.step:
            yield "lost", f"{_show_steps(checkpoint.step + 1, last)} trained again"

    def _folder_rows(self, checkpoint: Artifact | None) -> Iterator[tuple[str, str]]:
        logs = self.paths.root / "logs"
        newest = max((path.name for path in logs.glob("attempt_*")), default=None) if logs.is_dir() else None
        if newest is not None:
            yield "logs", f"{self.folder}/logs/{newest}"
        if self.paths.traces.is_dir():
            yield "traces", f"{self.folder}/{self.paths.traces.name}"
        if self.paths.exports.is_dir():
            yield "exports", f"{self.folder}/{self.paths.exports.name}"
        if checkpoint is not None:
            yield "model", f"rlrun export {self.folder} --output DIR"


def rows_text(rows: Iterable[tuple[str, str]]) -> str:
    """Return labels and texts as aligned lines."""
    return "\n".join(f"  {label + ':':<9} {text}" for label, text in rows)


def _show_size(checkpoint: Path) -> str:
    try:
        return f" ({show_size(sum(file.size for file in read_manifest(checkpoint).files))})"
    except ManifestError:
        return ""


def _show_steps(first: int, last: int) -> str:
    return f"step {first} is" if first == last else f"steps {first} to {last} are"


def _last_step(metrics: Path) -> int:
    """Last trained step in the metrics, or 0 if there is no such step or the file is damaged."""
    try:
        return max((int(line["step"]) for _, line in metrics_lines(metrics) if line is not None), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


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


RESULTS = "results.json"
"""File in the folder of the answers."""
_WIDTH = 160
"""Width of a table in a file or pipe, in characters."""


def print_measures(console: Console, folder: Path) -> None:
    """Print the table of a run's folder and the path of its file."""
    path = folder / RESULTS
    wide = console if console.is_terminal else Console(file=console.file, width=_WIDTH)
    wide.print(measures_table(json.loads(path.read_text())))
    console.print(f"all results: {path}", highlight=False, soft_wrap=True)


class Measure(TypedDict):
    """Results of one policy in one environment."""

    environment: str
    policy: str
    step: int | None
    tasks: int
    answers: int
    metrics: dict[str, float]
    """Metrics by their names in `metrics.jsonl` after `eval/<env>/`."""
    files: list[str]
    """Files of the answers, relative to the document's folder."""


class Measures(TypedDict):
    """Content of `results.json`."""

    run: str
    split: str
    num_tasks: int
    samples_per_task: int
    results: list[Measure]


def measures_table(document: Measures) -> Table:
    """Return a table of the results, ordered by environment and step."""
    rows = document["results"]
    names = [name for row in rows for name in row["metrics"]]
    passes = sorted({name for name in names if name.startswith("pass@")}, key=lambda name: int(name[5:]))
    drawn = Table(title=f"{document['run']}, {document['split']} tasks", title_justify="left")
    drawn.add_column("environment")
    drawn.add_column("policy")
    average = f"avg@{document['samples_per_task']}"
    for column in ("tasks", average, *passes, "tokens", "truncated", "errors"):
        drawn.add_column(column, justify="right")
    columns = {
        "reward/mean": ".4f",
        **dict.fromkeys(passes, ".4f"),
        "completion_length/mean": ".1f",
        "truncated": ".2f",
    }
    for row in sorted(rows, key=lambda row: str(row["environment"])):
        metrics = row["metrics"]
        shown = [f"{metrics[name]:{form}}" if name in metrics else "–" for name, form in columns.items()]
        drawn.add_row(row["environment"], row["policy"], str(row["tasks"]), *shown, f"{metrics.get('errors', 0):.0f}")
    return drawn
