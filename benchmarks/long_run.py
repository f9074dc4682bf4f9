"""Memory, descriptors and files of each process over many steps: `python -m benchmarks.long_run [--steps 20000] [--write]`.

`rlrun local` runs with the real launcher and the real orchestrator; trainer and engine are the stubs of the tests, whose channel,
hand-over and files are the real ones. Steps take no time, so that 20,000 steps end within an hour. Afterwards a second attempt resumes
the same folder: its orchestrator starts with a `metrics.jsonl` of all steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from rlrun.local import local_command as local
from rlrun.local import made_model, process_plan
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.bootstrap import module_command
from tests.support.stub.script import VARIABLE

RESULTS = Path(__file__).parent / "results" / "long_run.md"
ROOT = Path(__file__).parents[1]
STUB = "tests.support.stub"
MORE_STEPS = 200
"""Number of steps of the second attempt."""
ROLES = {
    "--launch": "launcher",
    "rlrun.orchestrator": "orchestrator",
    f"{STUB}.trainer": "trainer",
    f"{STUB}.inference": "engine",
}
"""Name of the process in the table, by a word of its command line."""
FOLDERS = ("traces", "rollouts", "journal", "weights", "checkpoints", "attempts", "logs")
MANIFEST = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: long-run}
spec:
  model: {tiny: {}, dtype: float32}
  maxSteps: %d
  seqLen: 64
  seed: 1
  environments: [{id: reverse-text, groupSize: 2}]
  sampling: {temperature: 1.0, maxTokens: 4}
  algorithm: {preset: grpo, maxAsyncLevel: 1}
  evaluation: {interval: %d, numTasks: 2}
  orchestrator: {batchSize: 2, maxConcurrency: 8}
  trainer: {processesPerReplica: 1}
  checkpoint: {interval: 200, keepLast: 2}
"""


@dataclass(frozen=True)
class Use:
    """Resources of one process at one moment."""

    rss: int
    """Resident memory in KiB."""
    pss: int
    """Proportional share of it in KiB."""
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """All processes and folders of the run at one step."""

    step: int
    seconds: float
    """Seconds since the start."""
    uses: Mapping[str, Use]
    files: Mapping[str, int]
    """Number of files below each folder of the run."""


def read_use(pid: int) -> Use:
    """Return resources of a process.

    Raises:
        OSError: it has ended.
    """
    folder = Path(f"/proc/{pid}")
    sums = _fields((folder / "smaps_rollup").read_text())
    threads = int(_fields((folder / "status").read_text())["Threads"])
    return Use(int(sums["Rss"]), int(sums["Pss"]), len(list((folder / "fd").iterdir())), threads)


def peak(pid: int) -> int:
    """Return the highest resident memory of a process so far, in KiB."""
    return int(_fields(Path(f"/proc/{pid}/status").read_text())["VmHWM"])


def _fields(text: str) -> dict[str, str]:
    found = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name: value.split()[0] if value.split() else "" for name, value in found}


def processes_of(launcher: int) -> dict[str, int]:
    """Return the process of each role, and the launcher, by name."""
    found = {"launcher": launcher}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            if parent == launcher:
                found |= {name: int(entry.name) for word, name in ROLES.items() if word in words}
    return found


def count_files(paths: RunPaths) -> dict[str, int]:
    """Return the number of files below each folder of a run."""
    return {name: sum(len(files) for _, _, files in os.walk(paths.root / name)) for name in FOLDERS}


class LineCount:
    """Number of complete lines of a growing file, read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self.lines = path, 0, 0

    def update(self) -> int:
        """Return the present number."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            while chunk := file.read(1 << 20):
                self._offset += len(chunk)
                self.lines += chunk.count(b"\n")
        return self.lines


def follow(process: subprocess.Popen[bytes], paths: RunPaths, every: int) -> Iterator[Sample]:
    """Return a sample every `every` steps, until the launcher ends."""
    began, count, due = time.monotonic(), LineCount(paths.metrics), min(100, every)
    while process.poll() is None:
        if (step := count.update()) >= due:
            uses = {}
            for name, pid in processes_of(process.pid).items():
                with suppress(OSError):
                    uses[name] = read_use(pid)
            yield Sample(step, time.monotonic() - began, uses, count_files(paths))
            due = step - step % every + every
        time.sleep(0.05)


def start(manifest: Path, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start `rlrun local` with stub roles; its output goes to `launcher.log` next to the folder."""
    script = json.dumps({"trainer": {"stepSeconds": 0}, "inference": {"tokenSeconds": 0}})
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'workloads'}", VARIABLE: script}
    command = [
        sys.executable,
        "-m",
        "benchmarks.long_run",
        "--launch",
        str(manifest),
        "--output-dir",
        str(folder),
        "--plain",
        *options,
    ]
    with (folder.parent / "launcher.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)


def launch(argv: Sequence[str]) -> int:
    """Run `rlrun local` in this process, with the commands of the stubs."""

    def with_stub(module: str, arguments: list[str]) -> list[str]:
        return module_command(f"{STUB}.inference" if module == process_plan.ENGINE_MODULE else module, arguments)

    def stub_trainer(config: object, *, config_file: Path, **_: object) -> list[str]:
        return module_command(f"{STUB}.trainer", ["--config", str(config_file)])

    def stub_model(module: str, arguments: list[str]) -> list[str]:
        return module_command(f"{STUB}.model", arguments)

    with (
        mock.patch.object(process_plan, "module_command", with_stub),
        mock.patch.object(process_plan, "torchrun_command", stub_trainer),
        mock.patch.object(made_model, "module_command", stub_model),
    ):
        return local.main(argv)


def measure(folder: Path, steps: int, every: int) -> tuple[list[Sample], dict[str, int], dict[str, int]]:
    """Return samples of the first attempt, and the highest memory of each process at the start of the first and of the
    second attempt, in KiB."""
    manifest, root = folder / "run.yaml", folder / "run"
    manifest.write_text(MANIFEST % (steps, max(1, steps // 20)))
    samples: list[Sample] = []
    first: dict[str, int] = {}
    process = start(manifest, root)
    for sample in follow(process, RunPaths(root), every):
        samples.append(sample)
        first = first or _peaks(process.pid)
        shares = {name: use.pss for name, use in sample.uses.items()}
        print(json.dumps({"step": sample.step, "s": round(sample.seconds)} | shares | dict(sample.files)), flush=True)
    assert process.wait() == 0, (folder / "launcher.log").read_text()[-3000:]
    manifest.write_text(MANIFEST % (steps + MORE_STEPS, max(1, steps // 20)))
    process = start(manifest, root, "--resume")
    second: dict[str, int] = {}
    count = LineCount(RunPaths(root).metrics)
    while process.poll() is None:
        if not second and count.update() >= steps + MORE_STEPS // 2:
            second = _peaks(process.pid)
        time.sleep(0.02)
    assert process.wait() == 0, (folder / "launcher.log").read_text()[-3000:]
    return samples, first, second


def _peaks(launcher: int) -> dict[str, int]:
    found = {}
    for name, pid in processes_of(launcher).items():
        with suppress(OSError):
            found[name] = peak(pid)
    return found


def growth(samples: Sequence[Sample], name: str) -> float:
    """Return the least-squares slope of a process's PSS over the second half of the samples, in bytes per step."""
    half = [s for s in samples[len(samples) // 2 :] if name in s.uses]
    if len(half) < 2:
        return math.nan
    steps, values = [s.step for s in half], [s.uses[name].pss * 1024 for s in half]
    middle, mean = sum(steps) / len(steps), sum(values) / len(values)
    return sum((x - middle) * (y - mean) for x, y in zip(steps, values, strict=True)) / sum(
        (x - middle) ** 2 for x in steps
    )


def table(samples: Sequence[Sample], first: Mapping[str, int], second: Mapping[str, int], steps: int) -> str:
    """Return the results as Markdown."""
    names = list(ROLES.values())
    lines = [
        "# Memory, descriptors and files over many steps",
        "",
        f"`python -m benchmarks.long_run --steps {steps} --write`. The launcher of `rlrun local` and the orchestrator are the real",
        "ones; trainer and engine are stubs whose channel, hand-over and files are the real ones. A step trains one group of two",
        "rollouts; a checkpoint follows every 200 steps. PSS is the proportional share of resident memory.",
        "",
        "| step | " + " | ".join(f"{name}: PSS MiB, RSS MiB, fds, threads" for name in names) + " |",
        "|" + "---|" * (len(names) + 1),
    ]
    for sample in samples:
        cells = [_cell(sample.uses.get(name)) for name in names]
        lines.append(f"| {sample.step} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| process | PSS growth in the second half, bytes per step | highest RSS at the start of attempt 1, MiB | "
        f"at the start of attempt 2, which finds {steps} steps, MiB |",
        "|---|---|---|---|",
        *(
            f"| {name} | {growth(samples, name):.0f} | {first.get(name, 0) / 1024:.0f} | {second.get(name, 0) / 1024:.0f} |"
            for name in names
        ),
        "",
        "| step | " + " | ".join(f"files in `{name}/`" for name in FOLDERS) + " |",
        "|" + "---|" * (len(FOLDERS) + 1),
        *(f"| {s.step} | " + " | ".join(str(s.files[name]) for name in FOLDERS) + " |" for s in samples),
    ]
    return "\n".join(lines) + "\n"


def _cell(use: Use | None) -> str:
    if use is None:
        return "–"
    return f"{use.pss / 1024:.1f}, {use.rss / 1024:.1f}, {use.descriptors}, {use.threads}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print or write the table."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--launch"]:
        return launch(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_run", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1000, help="steps between two samples")
    parser.add_argument("--folder", type=Path, help="existing folder for the run (default: a temporary one)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as name:
        text = table(*measure(options.folder or Path(name), options.steps, options.every), options.steps)
    if options.write:
        RESULTS.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
