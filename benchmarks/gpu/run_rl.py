"""A complete run on one GPU: trainer, engine and orchestrator, in turns and side by side.

python -m benchmarks.gpu.run_rl --results FOLDER [--dry] [--only PART ...] [--seconds N]

Parts, in this order:
  nccl        NCCL with one member: init, broadcast, meet, close, and all of it again (dry: gloo)
  colocated   run A: trainer and engine take turns on the GPU, hand-over by file, a learning curve
  concurrent run B: both are awake on the GPU; for some steps the engine gets wrong weights, which must be noticed
  engine      after run B, its engine: hand-overs by phase, equal log-probs, tokens/s, a transfer over gloo
  ipc         run C: as run A over CUDA IPC

Every event is a line of events.jsonl; run.md has the tables and the goals. A part that fails does not stop the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.gpu.engine_choice import SAFE, read_choice
from benchmarks.gpu.results import Deadline
from benchmarks.gpu.run_events import (
    NOT_RUN,
    Events,
    GpuSampler,
    describe_machine,
    idle_seconds,
    memory_row,
    sleeping_engine_bytes,
)
from benchmarks.gpu.run_local import DRY, FULL, SEED, STOP_SECONDS, LocalRun, LocalRuns, Sizes, specification
from benchmarks.gpu.run_phases import phase_rows, sampled_versions, worst_of_steps
from benchmarks.gpu.run_task import WarmUp
from rlrun.protocol.messages.trainer_channel import Backend

PARTS = ("nccl", "colocated", "concurrent", "engine", "ipc")
GIB = 2**30
REPORT_SECONDS = 5.0
WRONG_KL, RIGHT_KL = 0.1, 1e-3


class CompleteRun:
    """All parts, with what a part leaves for the next one.

    Args:
        events: records.
        sizes: sizes of all parts.
        work: folder of models and runs.
        deadline: end of the script.
    """

    def __init__(self, events: Events, sizes: Sizes, work: Path, deadline: Deadline) -> None:
        self.events, self.sizes, self.work, self.deadline = events, sizes, work, deadline
        self.device = torch.device(sizes.device, 0) if sizes.gpus else torch.device("cpu")
        self.sampler = GpuSampler()
        self.runs = LocalRuns(work, events, self.sampler, deadline)
        self.versions: list[Path] = []
        """Versions of run A, for the engine of run B."""

    def measure_links(self) -> None:
        """Run the part `nccl`."""
        from benchmarks.gpu.run_engine import check_links

        backend: Backend = "nccl" if self.sizes.gpus else "gloo"
        seconds = check_links(backend, self.device, self.sizes.broadcast)
        self.events.put_row(
            "process group with one member", backend, {f"{name} s": one for name, one in seconds.items()}
        )

    def run_colocated(self) -> None:
        """Run the part `colocated`, once more with other kernels if its engine fails before the first step."""
        run = self.start_colocated("colocated")
        if not run.steps and run.code and not run.stopped and self.sizes.gpus and self.sizes.engine != SAFE:
            self.events.add("engine replaced", reason=run.end, arguments=list(SAFE.arguments))
            self.sizes = replace(self.sizes, engine=replace(SAFE, reason="the engine as released failed in run A"))
            run = self.start_colocated("colocated-safe")
        self.versions = run.weights[-2:]
        self.put_run("A, in turns", run)
        self.put_matching("A, in turns", run.values("mismatch_kl", 1), run.trained)
        rewards = run.values(f"eval/{self.evaluated(run)}/reward/mean")
        gain = rewards[-1] - rewards[0] if len(rewards) > 1 else None
        note = f"seed {SEED}, {self.sizes.warm_up.steps} supervised steps before; rewards {[round(one, 3) for one in rewards]}; {run.end}"
        self.events.put_goal("A: reward of the evaluation, last - first", gain, at_least=0.3, note=note)
        left, how = sleeping_engine_bytes(run.samples, run.steps[-1][0] if run.steps else 0.0)
        self.events.put_goal(
            "A: memory of the sleeping engine", None if left is None else left / GIB, at_most=4.0, unit="GiB",
            note=how if run.samples else self.sampler.problem or how,
        )  # fmt: skip
        versions, unknown = sampled_versions(run.folder / "traces")
        self.events.put_goal(
            "A: versions that sampled tokens", len(versions), at_least=self.sizes.steps[0], note="from its traces",
        )  # fmt: skip
        self.events.put_goal(
            "A: tokens without a version",
            unknown if versions else None,
            at_most=0,
            unit="tokens",
            note="from its traces",
        )
        self.finish_run("A", run, self.sizes.steps[0])

    def start_colocated(self, name: str) -> LocalRun:
        """Run `rlrun local` of the part `colocated`."""
        model = self.make_model("plain", seed=SEED, warm_up=self.sizes.warm_up)
        spec = specification(self.sizes, model, run=0)
        every, tasks = self.sizes.evaluation
        spec |= {"placement": {"colocate": True}, "evaluation": {"interval": every, "numTasks": tasks}}
        spec["algorithm"] = {"maxAsyncLevel": 0}
        return self.runs.start(name, spec)

    def run_concurrent(self, *, with_engine: bool) -> None:
        """Run the part `concurrent`, and with its engine the part `engine`.

        `rlrun local` assigns a GPU to one role. Engine and trainer share it here because the engine is one that already
        runs, so only the trainer is assigned a GPU.
        """
        from benchmarks.gpu.run_engine import START_SECONDS, WrongVersions, running_engine

        sharpen = self.sizes.sharpen
        right = self.make_model("sharp", seed=0, sharpen=sharpen)
        # Reversed logits: a narrow random model with tied embeddings repeats its last token, whatever its seed. Another seed
        # alone gave a mismatch_kl of 0.099 to 0.17 in dry runs.
        wrong = self.make_model("wrong", seed=1, sharpen=-sharpen)
        folder = self.work / "concurrent"
        spec = specification(self.sizes, right, run=1)
        spec["algorithm"] = {"maxAsyncLevel": 1}
        settings = {
            "model_path": str(right), "served_model_name": "concurrent", "weights_dir": str(folder / "run" / "weights"),
            "device": self.sizes.device, "dtype": self.sizes.dtype, "max_model_len": spec["inference"]["maxModelLen"],
            "gpu_memory_utilization": self.sizes.shares[1], "enforce_eager": not self.sizes.gpus, "receives": True,
            "extra_args": spec["inference"]["extraArgs"],
        }  # fmt: skip
        with running_engine(folder / "engine", settings, min(START_SECONDS, self.deadline.left)) as engine:
            self.events.add("engine started", url=engine.url)
            swap = WrongVersions(engine, wrong, self.sizes.wrong)
            run = self.runs.start("concurrent", spec, "--engine-url", engine.url, watch=swap.watch_step)
            self.put_run("B, side by side", run)
            self.events.add("wrong versions", versions=swap.replaced)
            first, end = self.sizes.wrong
            found = max((v for v, _ in self.mismatch(run, first, end + 2)), default=None)
            note = f"logits x {self.sizes.sharpen:g}, versions {swap.replaced}; {run.end}"
            self.events.put_goal("B: mismatch_kl of a wrong version", found, at_least=WRONG_KL, note=note)
            # Rollouts that started before a hand-over may be trained two steps after it.
            others = [v for v, step in self.mismatch(run, 1, run.trained) if not first <= step <= end + 2]
            expected = run.trained - len([step for step in range(1, run.trained + 1) if first <= step <= end + 2])
            self.put_matching("B, side by side, other steps", others, expected)
            self.finish_run("B", run, self.sizes.steps[1])
            if with_engine:
                self.attempt("engine", lambda: self.measure_engine(engine, run))

    @staticmethod
    def mismatch(run: LocalRun, first: int, last: int) -> list[tuple[float, int]]:
        """Return `mismatch_kl` and the step, for some steps of a run."""
        lines = [line for _, line in run.steps if first <= line["step"] <= last and "mismatch_kl" in line]
        return [(float(line["mismatch_kl"]), int(line["step"])) for line in lines]

    def measure_engine(self, engine: Any, run: LocalRun) -> None:
        """Run the part `engine`."""
        from benchmarks.gpu import run_engine as parts

        events, sizes, rng = self.events, self.sizes, random.Random(SEED)
        prompts = [[1, 5, *(rng.randrange(8, sizes.model["vocabulary"]) for _ in range(12)), 6] for _ in range(64)]
        sources = self.versions if len(self.versions) == 2 else run.weights[-2:]
        names = [parts.copy_version(path, engine, f"copy-{index}") for index, path in enumerate(sources)]
        if len(names) < 2:
            raise RuntimeError(f"found {len(names)} versions to load, expected 2: no run has published them")
        first = 10_000
        seconds = asyncio.run(parts.measure_handovers(engine, names, sizes.handovers, first))
        longest = parts.put_handovers(events, "hand-over by file, engine alone", seconds)
        events.put_goal(
            "hand-over by file, longest", longest, at_most=3.0, unit="s", note=f"{sizes.handovers} hand-overs"
        )
        last = sources[(sizes.handovers - 1) % 2]
        compared = prompts[: sizes.compared]
        answers = asyncio.run(parts.sample_greedy(engine, compared, sizes.tokens))
        errors = parts.compare_logprobs(last, compared, answers, self.device, getattr(torch, sizes.dtype))
        events.put_goal(
            "log-probs of engine and transformers in float32, largest difference", errors.largest, at_most=0.03,
            note=f"{last.name} of run {last.parents[2].name}; mean {errors.mean:.2g}; rounding of transformers alone {errors.rounding:.2g}",
        )  # fmt: skip
        count, tokens = sizes.decoded
        speed = asyncio.run(parts.tokens_per_second(engine, prompts[:count], tokens))
        events.put_goal("engine, tokens/s", speed, unit="tokens/s", note=f"{count} sequences of {tokens} tokens")
        phases = asyncio.run(parts.receive_over_gloo(engine, sources[0], first + sizes.handovers, self.device))
        events.put_row("transfer over gloo to the engine", self.device.type, {f"{k} s": v for k, v in phases.items()})

    def report_ipc(self) -> None:
        """Run the part `ipc`."""
        from rlrun.config.models.checkpoint import WeightSyncConfig

        known = get_args(WeightSyncConfig.model_fields["transport"].annotation)
        self.events.put_goal(
            "C: hand-over by CUDA IPC, longest", None, at_most=0.5, unit="s",
            note=f"weightSync.transport has {', '.join(known)}, and no CUDA IPC",
        )  # fmt: skip

    def make_model(self, name: str, *, seed: int, sharpen: float = 1.0, warm_up: WarmUp | None = None) -> Path:
        """Write a model and return its folder."""
        from benchmarks.gpu.run_task import Shape, make_model

        folder = self.work / "models" / name
        if not folder.is_dir():
            began = time.monotonic()
            losses = make_model(
                folder, Shape(**self.sizes.model), dtype=self.sizes.dtype, seed=seed, sharpen=sharpen, warm_up=warm_up,
                device=self.sizes.device,
            )  # fmt: skip
            self.events.add(
                "model made",
                name=name,
                took=round(time.monotonic() - began, 2),
                warm_up=[round(one, 4) for one in losses],
            )
        return folder

    def finish_run(self, name: str, run: LocalRun, wanted: int) -> None:
        """Add the goals of a run's length and turn-over.

        Raises:
            RuntimeError: the run ended with an error or too early.
        """
        self.events.put_goal(f"{name}: trained steps", run.trained, at_least=wanted, note=run.end)
        times = [at for at, line in run.steps if line["step"] > 0]
        samples = [one for one in run.samples if times and times[0] <= one.time <= times[-1]]
        idle = idle_seconds(samples)
        self.events.put_goal(
            f"{name}: idle GPU per step", None if idle is None else idle / max(len(times) - 1, 1), at_most=3.0, unit="s",
            note="between the first and the last step" if idle is not None else self.sampler.problem or "no samples of a GPU",
        )  # fmt: skip
        if run.code or run.trained < wanted:
            raise RuntimeError(f"run {name} of {wanted} steps: {run.end}")

    def put_run(self, name: str, run: LocalRun) -> None:
        """Add the rows of a run."""
        row: dict[str, Any] = {"steps": run.trained}
        for metric in ("time/update_weights", "time/engines_asleep", "time/step", "reward/mean", "mismatch_kl"):
            if values := run.values(metric, 1):
                row |= {f"{metric}, mean": sum(values) / len(values), f"{metric}, max": max(values)}
        self.events.put_row("runs", name, row)
        if memory := memory_row(run.samples):
            self.events.put_row("memory of the GPU", name, memory)
        clock = time.monotonic() - time.time()
        for phase, values in phase_rows([line for _, line in run.steps], run.samples, clock).items():
            self.events.put_row("phases of a step", f"{name}: {phase}", values)
        handover = run.values("time/update_weights", 2)
        self.events.put_goal(
            f"{name}: time/update_weights, longest", max(handover, default=None), at_most=3.0, unit="s",
            note="" if handover else "no step has it",
        )  # fmt: skip

    def put_matching(self, name: str, values: Sequence[float], steps: int) -> None:
        """Add the goal of equal weights in every step.

        Args:
            name: name of the run.
            values: `mismatch_kl` of its steps.
            steps: number of steps that must have the metric. With fewer values the goal is missed.
        """
        worst = worst_of_steps(values, steps)
        note = f"{len(values)} of {steps} steps have it"
        self.events.put_goal(f"{name}: mismatch_kl, largest", worst, at_most=RIGHT_KL, note=note)

    @staticmethod
    def evaluated(run: LocalRun) -> str:
        """Return the label of the evaluated environment."""
        keys = [
            key for _, line in run.steps for key in line if key.startswith("eval/") and key.endswith("/reward/mean")
        ]
        return keys[0].removeprefix("eval/").removesuffix("/reward/mean") if keys else ""

    def attempt(self, part: str, work: Callable[[], None]) -> bool:
        """Run one part if enough time is left, and record its failure. Returns whether it succeeded."""
        needed = self.sizes.part_seconds.get(part, 0.0)
        if self.deadline.left < needed:
            note = f"{self.deadline.left:.0f} s are left, and it needs {needed:.0f} s"
            self.events.put_row("parts", part, {"result": NOT_RUN, "note": note})
            return False
        began = time.monotonic()
        try:
            work()
        except Exception as error:
            self.events.put_row("parts", part, {"result": "failed", "note": f"{type(error).__name__}: {error}"[:1500]})
            return False
        self.events.put_row("parts", part, {"result": "complete", "seconds": round(time.monotonic() - began, 1)})
        return True

    def run_parts(self, parts: Sequence[str]) -> bool:
        """Run the parts in order and return whether none failed or was left out."""
        engine = self.sizes.engine
        self.events.add("started", **describe_machine(), parts=list(parts), steps=self.sizes.steps)
        self.events.put_row(
            "engine", "first choice", {"arguments": " ".join(engine.arguments), "reason": engine.reason}
        )
        work: dict[str, Callable[[], None]] = {
            "nccl": self.measure_links,
            "colocated": self.run_colocated,
            "concurrent": lambda: self.run_concurrent(with_engine="engine" in parts),
            "ipc": self.report_ipc,
        }
        results = [self.attempt(part, work[part]) for part in PARTS if part in parts and part in work]
        self.sampler.close()
        inner = self.events.report.sections["parts"].get("engine", {"result": "complete"})
        return all(results) and inner["result"] == "complete"


def main() -> int:
    """Run the script. Returns 0 if all parts are complete, whether or not their goals are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="output folder")
    parser.add_argument("--dry", action="store_true", help="on the CPU, at tiny sizes, with gloo")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run; engine needs concurrent"
    )
    parser.add_argument("--site", type=Path, help="folder of the packs, with the kernels that call 1 found to work")
    parser.add_argument("--seconds", type=float, default=480.0, help="longest time (default: 480)")
    options = parser.parse_args()
    if "engine" in options.only and "concurrent" not in options.only:
        parser.error("--only engine: its engine is the one of run B; add concurrent")
    if not options.dry and not torch.cuda.is_available():
        print(
            "error: torch finds no GPU; run this on a machine with a GPU and its driver, or with --dry", file=sys.stderr
        )
        return 1
    # `timeout` sends SIGTERM first: as an exception it stops the runs and the engine.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    events = Events(options.results)
    with tempfile.TemporaryDirectory(prefix="rlrun-complete-", ignore_cleanup_errors=True) as work:
        sizes = DRY if options.dry else replace(FULL, engine=read_choice(options.site))
        # Time to stop the processes and to write the tables.
        deadline = Deadline.after(options.seconds - STOP_SECONDS - REPORT_SECONDS)
        complete = CompleteRun(events, sizes, Path(work), deadline).run_parts(options.only)
    print(events.report.text())
    return int(not complete)


if __name__ == "__main__":
    sys.exit(main())
