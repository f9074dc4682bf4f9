"""The trainer's whole step by configuration: MFU, tokens/s and peak memory, each in a process of its own.

    python -m benchmarks.gpu.steps --results FOLDER [--dry] [--seconds 540] [--only NAME] [--fields '{"compile": true}']

Random weights of Qwen3-0.6B and fake data (`trainer --bench`): neither data loading nor rollouts are part of a step. The activation mode is
the one with the least work that fits (`memory.py`). `best` is the fastest configuration of RL 16k that was measured so far.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from benchmarks.gpu.memory import USABLE, fitting
from benchmarks.gpu.results import Deadline, Report, reason, run_limited
from benchmarks.gpu.shapes import QWEN3_06B, TINY, Shape, write_model
from rlrun.config.models.parallel import ActivationCheckpointing, AttentionKernel
from rlrun.config.models.roles import TrainerConfig

NAME = "steps"
TITLE = "The trainer's step: Qwen3-0.6B shapes, random weights, one sequence per micro-batch"
TO_BEAT = (
    "To beat, PRIME-RL on one H100 with FlashAttention-3, two micro-batches per step and the wait for data in its times: "
    "RL 16k 11.1 % and 65k 26.8 %, SFT 16k 23.7 % MFU."
)
SECTION = "steps"
PRESETS = {"RL": "aipo", "SFT": "sft"}
TRL = "TRL"
"""Task of a row that transformers and TRL compute; its fields are those of `trl_step.py`'s options."""


@dataclass(frozen=True)
class Step:
    """One configuration that is measured."""

    name: str
    task: str
    tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the trainer's block. The activation mode is chosen by what fits, unless it stands here."""
    best: bool = False
    """Take the fields of the fastest RL 16k instead."""
    rows: tuple[int, ...] = (1,)
    """Micro-batches per step, one measurement each; the first has all warm-ups, the others one."""
    profile: bool = False
    """Record a step afterwards, with the first number of rows."""
    warmup: int = 4
    steps: int = 5
    seconds: float = 75.0
    """Limit of its process."""


COMPILED = {"compile": True}
LADDER = (
    Step(
        "RL 16k, compiled, fa3", "RL", 16_384, {**COMPILED, "attention": "fa3"}, rows=(1, 2), profile=True, seconds=150
    ),
    Step("RL 65k, best", "RL", 65_536, best=True, warmup=2, steps=3, seconds=120),
    Step("SFT 16k, best", "SFT", 16_384, best=True, rows=(1, 2, 8)),
    Step("SFT 16k, TRL, sdpa", TRL, 16_384, {"attention": "sdpa", "arguments": {}}),
    Step("RL 16k, eager", "RL", 16_384, {"attention": "varlen"}),
    Step("RL 16k, compiled", "RL", 16_384, {**COMPILED, "attention": "varlen"}, seconds=120),
    Step("RL 16k, compiled, cudnn", "RL", 16_384, {**COMPILED, "attention": "cudnn"}, seconds=120),
    Step(
        "SFT 16k, TRL, sdpa, nothing again",
        TRL,
        16_384,
        {"attention": "sdpa", "arguments": {"gradient_checkpointing": False}},
    ),
    Step("SFT 16k, eager", "SFT", 16_384, {"attention": "varlen"}),
    Step("RL 65k, eager", "RL", 65_536, {"attention": "varlen"}, warmup=2, steps=3, seconds=100),
    Step("RL 8k, best", "RL", 8_192, best=True),
)
"""By worth. A kernel or mode that this version of the trainer does not offer is left out by its name."""
TINY_LADDER = (
    Step("RL 16k, eager", "RL", 64, warmup=1, steps=2),
    Step("RL 16k, fa3", "RL", 64, {"attention": "fa3"}),
    Step("SFT 16k, best", "SFT", 64, best=True, rows=(1, 2), profile=True, warmup=1, steps=2),
    Step("SFT 16k, TRL, sdpa", TRL, 64, {"attention": "sdpa", "arguments": {}}, warmup=1, steps=2),
)
BEST_OF = "RL 16k"


def configuration(
    step: Step, shape: Shape, folder: Path, *, gpus: int, fields: Mapping[str, Any], usable: float = USABLE
) -> TrainerConfig:
    """The trainer's part of a run.

    Raises:
        ValueError: a value is not offered by this version, or no activation mode fits; says which.
    """
    for name, kind in (("attention", AttentionKernel), ("activation_checkpointing", ActivationCheckpointing)):
        if name in fields and fields[name] not in get_args(kind):
            raise ValueError(f"{name} {fields[name]} is no value of this version")
    offered = [mode for mode in get_args(ActivationCheckpointing) if _accepted({**fields, "mode": mode})]
    compiled = bool(fields.get("compile"))
    asked = fields.get("activation_checkpointing")
    mode = asked or fitting(shape, step.tokens, compiled=compiled, offered=offered, usable=usable)
    if mode is None:
        raise ValueError(f"no activation mode fits into {usable / 2**30:.0f} GiB")
    common = {
        "name": "steps",
        "uid": "steps",
        "output_dir": str(folder),
        "task": step.task,
        "model": {"path": str(write_model(folder / "model", shape))},
        "max_steps": 1,
        "seq_len": step.tokens,
        "seed": 0,
        "gpus_per_replica": gpus,
        "algorithm": {"preset": PRESETS[step.task]},
        "checkpoint": {},
    }
    chosen = {"activation_checkpointing": mode, "compile": compiled}  # what a row does not name is off in it
    return TrainerConfig.model_validate(common | dict(fields) | chosen)


def _accepted(fields: Mapping[str, Any]) -> bool:
    """Support of this mode together with `compile` in the trainer."""
    from rlrun.config.models.roles import TrainerSpec

    try:
        TrainerSpec(compile=bool(fields.get("compile")), activation_checkpointing=fields["mode"])
    except ValidationError:
        return False
    return True


def best_fields(report: Report) -> dict[str, Any]:
    """The fields of the fastest RL 16k with one row; none while none was measured."""
    found = [
        row
        for name, row in report.sections.get(SECTION, {}).items()
        if name.startswith(BEST_OF) and "tokens/s" in row and row["rows"] == 1
    ]
    return dict(max(found, key=lambda row: row["tokens/s"])["fields"]) if found else {}


def rank_environment(port: int) -> dict[str, str]:
    """Environment that torchrun would give to the only rank."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "RLRUN_ATTEMPT": "1"}
    return alone | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def measure(
    step: Step, fields: Mapping[str, Any], results: Path, *, dry: bool, seconds: float, usable: float = USABLE
) -> dict[str, dict[str, Any]]:
    """The rows of a configuration by their names, or why they have no numbers."""
    if step.task == TRL:
        return {step.name: measure_trl(step, results, dry=dry, seconds=seconds)}
    from rlrun.local.preflight import free_port

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        try:
            config = configuration(
                step, TINY if dry else QWEN3_06B, folder, gpus=0 if dry else 1, fields=fields, usable=usable
            )
        except (ValueError, ValidationError) as error:
            return {step.name: {"fields": dict(fields), "note": f"left out: {' '.join(str(error).split())}"[:300]}}
        (folder / "config.json").write_text(config.model_dump_json())
        options = {"tokens": step.tokens, "rows": step.rows, "steps": step.steps, "warmup": step.warmup}
        command = [sys.executable, "-m", "benchmarks.gpu.steps", "--results", made, "--child", json.dumps(options)]
        command += ["--dry"] if dry else []
        limit = seconds if dry else min(step.seconds, seconds)
        profile = {"RLRUN_GPU_PROFILE": str(results)} if step.profile else {}
        ended = run_limited(command, limit, results / "log.txt", rank_environment(free_port()) | profile)
        file = folder / "measured.json"
        written = json.loads(file.read_text()) if file.exists() else {"measurements": {}}
    known = {"activations": config.activation_checkpointing, "fields": dict(fields)}
    found = {
        rows: {**known, "rows": rows, **_numbers(written["measurements"][str(rows)]), "measured": written["title"]}
        if str(rows) in written["measurements"]
        else {**known, "rows": rows, "note": reason(ended, limit)}
        for rows in step.rows
    }
    return {step.name if rows == 1 else f"{step.name}, {rows} rows": row for rows, row in found.items()}


def measure_in_child(folder: Path, options: Mapping[str, Any], profile: Path | None, *, dry: bool) -> None:
    """In the process of a configuration: its measurements, on the disk after each, and then the profile."""
    from benchmarks.gpu.profile_step import put_profile
    from rlrun.config.loading.loader import load_file
    from rlrun.trainer.bench import prepare_bench
    from rlrun.trainer.ranks.launch import BenchOptions

    tokens, rows = options["tokens"], options["rows"]
    config = load_file(TrainerConfig, folder / "config.json", section="trainer")
    with prepare_bench(config, longest=tokens) as bench:
        found: dict[int, Any] = {}
        for number in rows:
            asked = BenchOptions(rows=number, steps=options["steps"], warmup=1 if found else options["warmup"])
            found[number] = asdict(bench.measure(tokens, asked))
            text = json.dumps({"title": bench.table_title, "measurements": found})
            (folder / "measured.json").write_text(text)
        if profile is not None:
            title = f"{config.task} {tokens} tokens"
            put_profile(profile, title, bench, bench.update(tokens, rows[0]), dry=dry)


def measure_trl(step: Step, results: Path, *, dry: bool, seconds: float) -> dict[str, Any]:
    """The row of a configuration of transformers and TRL."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"tokens": step.tokens, "steps": step.steps, "warmup": step.warmup, **step.fields}
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.trl_step",
            "--folder",
            folder,
            "--options",
            json.dumps(options),
        ]
        limit = seconds if dry else min(step.seconds, seconds)
        environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        ended = run_limited([*command, *(["--dry"] if dry else [])], limit, results / "log.txt", environment)
        row = {"rows": 1, "fields": dict(step.fields)}
        if ended.code != 0:
            return row | {"note": reason(ended, limit)}
        found: dict[str, Any] = json.loads((Path(folder) / "measured.json").read_text())
        return row | found


def _numbers(measured: Mapping[str, Any]) -> dict[str, Any]:
    seconds = measured["seconds"]
    found: dict[str, Any] = {
        "MFU %": None if measured["mfu"] is None else 100 * statistics.mean(measured["mfu"]),
        "tokens/s": statistics.mean(measured["tokens"] / one for one in seconds),
        "step ms": 1000 * statistics.mean(seconds),
        "± ms": 1000 * statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        "each ms": ", ".join(f"{1000 * one:.0f}" for one in seconds),
        "peak GiB": measured["peak_memory"] / 2**30,
        "graphs": measured["graphs"],
    }
    if measured["late_graphs"]:
        found["note"] = f"{measured['late_graphs']} graphs were compiled in measured steps"
    return found


def measure_all(
    report: Report, ladder: Sequence[Step], results: Path, *, dry: bool, deadline: Deadline, usable: float = USABLE
) -> None:
    """Every row of the ladder, by worth, until the deadline."""
    for step in ladder:
        if deadline.left <= 0:
            report.put(SECTION, step.name, {"note": "left out: no time"})
            continue
        report.begin(SECTION, step.name)
        fields = best_fields(report) if step.best else step.fields
        for name, row in measure(step, fields, results, dry=dry, seconds=deadline.left, usable=usable).items():
            report.put(SECTION, name, row)
            print(f"{name}: {row}", flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="on the CPU, at tiny sizes")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--only", metavar="NAME", help="one row of the ladder")
    parser.add_argument("--rows", metavar="NAME;NAME", help="these rows of the ladder, beside those that are there")
    parser.add_argument(
        "--fields", type=json.loads, metavar="JSON", help="other fields for --only, as a row of its own"
    )
    parser.add_argument(
        "--usable-gib", type=float, default=USABLE / 2**30, help="memory of the GPU (default: %(default)s)"
    )
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        profile = os.environ.get("RLRUN_GPU_PROFILE")
        measure_in_child(arguments.results, arguments.child, Path(profile) if profile else None, dry=arguments.dry)
        return
    ladder: tuple[Step, ...] = TINY_LADDER if arguments.dry else LADDER
    if arguments.only is not None:
        ladder = tuple(step for step in ladder if step.name == arguments.only)
        if not ladder:
            parser.error(f"--only {arguments.only!r} is no row; choose one of {[s.name for s in LADDER]}")
    if arguments.rows is not None:
        wanted = arguments.rows.split(";")
        ladder = tuple(step for name in wanted for step in ladder if step.name == name)
        if len(ladder) != len(wanted):
            parser.error(f"--rows {arguments.rows!r}: choose of {[s.name for s in LADDER]}")
    if arguments.fields is not None:
        if arguments.only is None:
            parser.error("--fields needs --only: the row that it changes")
        one = ladder[0]
        name = f"{one.name}, {json.dumps(arguments.fields)}"
        changed = {**one.fields, **arguments.fields}
        ladder = (replace(one, name=name, fields=changed, best=False),)
    report = Report(arguments.results, NAME, TITLE, fresh=arguments.only is None and arguments.rows is None)
    report.put("goal", "PRIME-RL", {"value": TO_BEAT})
    deadline, usable = Deadline.after(arguments.seconds), arguments.usable_gib * 2**30
    measure_all(report, ladder, arguments.results, dry=arguments.dry, deadline=deadline, usable=usable)
    print(report.text())


if __name__ == "__main__":
    main()
