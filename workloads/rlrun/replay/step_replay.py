"""Replay of a step: repeat its computation and compare it with the values written by the run.

The trainer's ranks repeat the computation in a temporary folder. The comparison, quantity by quantity, is pure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlrun.config.models.roles import TrainerConfig
from rlrun.config.named_code import code_of_trainer
from rlrun.local.preflight import free_port
from rlrun.protocol.files.batch import BatchError, read_batch
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.failures import telling_lines
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.recorded_code import check_recorded_code
from rlrun.replay.advantage_explanation import advantage_settings
from rlrun.replay.sample_explanation import SampleReport, index_of, report_document, report_sample, report_text
from rlrun.replay.step_files import Plan, ReplayError, find_step
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import escape_controls
from rlrun.trainer.ranks.launch import Job, torchrun_command

Answer = dict[str, Any]
Start = Callable[[TrainerConfig, Path, Job], None]
"""Function that starts the ranks of a configuration file and waits for the answer."""


def local_layout(config: TrainerConfig, *, ranks: int | None, model: Path | None) -> TrainerConfig:
    """Adapt the run's configuration to this machine.

    Args:
        config: configuration of the run.
        ranks: number of ranks on CPUs instead of the run's layout.
        model: folder of the model on this machine.
    """
    changes: dict[str, object] = {"colocated": False, "engine_urls": []}
    if ranks is not None:
        changes |= {"replicas": 1, "gpus_per_replica": 0, "processes_per_replica": ranks}
    if model is not None:
        changes["model"] = config.model.model_copy(update={"path": str(model), "name": None, "tiny": None})
    return config.model_copy(update=changes)


def compute_step(plan: Plan, config: TrainerConfig, start: Start, *, sample: int | None = None) -> Answer:
    """Repeat the computation of a step.

    Args:
        plan: files of the step.
        config: result of `local_layout`.
        start: function that starts the ranks, such as `run_ranks`.
        sample: index of a sample to explain.

    Raises:
        ReplayError: the ranks failed; the message contains their last lines.
    """
    with tempfile.TemporaryDirectory(prefix="rlrun-replay-") as made:
        scratch = RunPaths(Path(made))
        _prepare_folder(scratch, plan.run.paths)
        job = Job(
            output=str(scratch.root / "answer.json"),
            batches=tuple((step, str(path)) for step, path in plan.batches),
            start=None if plan.start is None else str(plan.start),
            origin=plan.origin is not None,
            end=None if plan.end is None else str(plan.end),
            sample=sample,
        )
        write_json(scratch.run_json, {"trainer": _dump_config(config, scratch)})
        start(config, scratch.run_json, job)
        return job.read_result()


def _dump_config(config: TrainerConfig, scratch: RunPaths) -> dict[str, object]:
    return config.model_copy(update={"output_dir": str(scratch.root)}).model_dump(mode="json")


def _prepare_folder(scratch: RunPaths, paths: RunPaths) -> None:
    """Create the part of a trainer's folder that it reads: a link to the tiny model, and a copy of the hub's commits,
    which it may change.
    """
    if paths.model.is_dir():
        scratch.model.symlink_to(paths.model.absolute())
    if paths.revisions.is_dir():
        shutil.copytree(paths.revisions, scratch.revisions)


def run_ranks(config: TrainerConfig, file: Path, job: Job) -> None:
    """Start the ranks on this machine and wait for them.

    Raises:
        ReplayError: the ranks failed.
    """
    command = torchrun_command(config, config_file=file, rendezvous_port=free_port(), attempt=1)
    environment = {**os.environ, "RLRUN_ATTEMPT": "1"}
    if config.gpus_per_replica == 0:
        environment["OMP_NUM_THREADS"] = (
            "1"  # the same as in a run on CPUs, because more threads change the bits of sums
        )
    done = subprocess.run(
        [*command, *job.rank_arguments()], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        output = "\n".join(telling_lines(done.stdout, 15))
        raise ReplayError(
            f"the trainer failed with exit code {done.returncode} during the step:\n{output}", done.returncode
        )


Verdict = Literal["equal", "within", "different", "unknown"]
_OF_BITS = "param_checksum"
_TIMES = ("time/", "perf/")
ABSOLUTE = 1e-5
"""Absolute differences below this are ignored if bits cannot be equal, because relative differences near 0 have no
meaning.
"""


@dataclass(frozen=True)
class Row:
    """Comparison of one quantity."""

    step: int
    name: str
    stored: float | None
    """Value written by the run, or None."""
    computed: float | None
    verdict: Verdict

    @property
    def text(self) -> str:
        """Text for the table."""
        match self.verdict:
            case "equal":
                return "equal"
            case "unknown":
                return "no stored value" if self.stored is None else "not comparable"
        difference = abs((self.stored or 0.0) - (self.computed or 0.0))
        return f"{'within the tolerance' if self.verdict == 'within' else 'different'}: by {difference:.3g}"


def compare_quantities(
    step: int, stored: Mapping[str, float] | None, computed: Mapping[str, float], *, tolerance: float | None
) -> list[Row]:
    """Compare the quantities of a step, loss and gradient first.

    Args:
        step: number of the step.
        stored: the step's line of `metrics.jsonl`, or None.
        computed: metrics of the repeated step.
        tolerance: relative tolerance. None: bits must be equal.
    """
    names = [name for name in computed if name != "step" and not name.startswith(_TIMES)]
    first = ("loss", "grad_norm", _OF_BITS)
    ordered = [*(name for name in first if name in names), *sorted(name for name in names if name not in first)]
    known = stored or {}
    return [_compare_quantity(step, name, known.get(name), computed[name], tolerance) for name in ordered]


def _compare_quantity(step: int, name: str, stored: object, computed: float, tolerance: float | None) -> Row:
    if isinstance(stored, bool) or not isinstance(stored, int | float):
        return Row(step, name, None, computed, "unknown")
    value = float(stored)
    if value == computed:
        return Row(step, name, value, computed, "equal")
    if tolerance is None:
        return Row(step, name, value, computed, "different")
    if name == _OF_BITS:  # a checksum has no tolerance
        return Row(step, name, value, computed, "unknown")
    near = abs(value - computed) <= max(ABSOLUTE, tolerance * max(abs(value), abs(computed)))
    return Row(step, name, value, computed, "within" if near else "different")


def weights_verdict(found: Mapping[str, float], *, tolerance: float | None) -> Verdict:
    """Return the verdict of a comparison with a checkpoint.

    Args:
        found: result of `trainer.recompute.count_changes`.
        tolerance: absolute tolerance for values of weights and moments. None: bits must be equal.
    """
    if found["different"] == 0:
        return "equal"
    return "within" if tolerance is not None and found["largest"] <= tolerance else "different"


def weights_text(found: Mapping[str, float], name: str) -> str:
    """Return one line about a comparison with a checkpoint."""
    total, different = int(found["tensors"]), int(found["different"])
    if not different:
        return f"{name}: all {total} tensors of weights and optimizer are equal, bit for bit"
    return f"{name}: {different} of {total} tensors differ, by {found['largest']:.3g} at most"


def rows_table(found: Sequence[Row]) -> list[str]:
    """Format rows as lines for a terminal."""
    lines = [(escape_controls(r.name), _show_number(r.stored), _show_number(r.computed), r.text) for r in found]
    widths = [max(len(line[column]) for line in [("", "stored", "computed", ""), *lines]) for column in range(3)]
    head = ("", "stored", "computed", "")
    return [
        f"  {name:<{widths[0]}}  {stored:>{widths[1]}}  {computed:>{widths[2]}}  {text}".rstrip()
        for name, stored, computed, text in [head, *lines]
    ]


def _show_number(value: float | None) -> str:
    return (
        "-" if value is None else repr(int(value)) if float(value).is_integer() and abs(value) < 1e16 else repr(value)
    )


TOLERANCE = 1e-3
"""Relative tolerance if the bits cannot be equal."""


@dataclass(frozen=True)
class Replay:
    """Result of a replay."""

    plan: Plan
    rows: tuple[Row, ...] = ()
    """Quantities of the step, and differing quantities of earlier steps."""
    weights: dict[str, float] | None = None
    """Comparison with the checkpoint of the step, or None without a checkpoint."""
    weights_verdict: Verdict = "unknown"
    where: str = ""
    """Ranks and device of the computation."""
    inexact: tuple[str, ...] = ()
    """Reasons why equal bits cannot be expected."""
    sample: SampleReport | None = None
    objective: dict[str, Any] | None = None
    computed: bool = True
    stored: tuple[str, ...] = field(default=())
    """Names in `metrics.jsonl` that the trainer does not compute."""

    @property
    def code(self) -> int:
        """Exit code: 0 if equal or within the tolerance, 1 if different, 65 without values to compare with."""
        verdicts = [row.verdict for row in self.rows if row.step == self.plan.step] + [self.weights_verdict]
        if "different" in verdicts:
            return exit_codes.FAILURE
        compared = any(verdict != "unknown" for verdict in verdicts)
        return exit_codes.OK if compared or not self.computed else exit_codes.DATA

    def document(self) -> dict[str, object]:
        """Return the result as JSON."""
        plan = self.plan
        return {
            "run": plan.run.trainer.name,
            "step": plan.step,
            "startStep": plan.start_step,
            "start": None if plan.start is None else str(plan.start),
            "attempt": plan.attempt.attempt,
            "computed": self.computed,
            "where": self.where,
            "exact": not self.inexact,
            "inexact": list(self.inexact),
            "equal": self.code == exit_codes.OK,
            "quantities": [asdict(row) for row in self.rows],
            "weights": None if self.weights is None else self.weights | {"verdict": self.weights_verdict},
            "sample": None if self.sample is None else report_document(self.sample, self.objective),
        }

    def text(self) -> str:
        """Return the result as text for a terminal."""
        lines = self._head_lines() if self.computed else []
        if self.sample is not None:
            lines += (
                ["", report_text(self.sample, self.objective)] if lines else [report_text(self.sample, self.objective)]
            )
        return "\n".join(lines)

    def _head_lines(self) -> list[str]:
        plan = self.plan
        start = "the model" if plan.start is None else f"{plan.start.name}"
        first = plan.batches[0][0]
        steps = f"step {plan.step}" if first == plan.step else f"steps {first} to {plan.step}"
        lines = [f"{plan.run.trainer.name}: {steps} from {start}, {self.where}"]
        lines += [f"  bits may differ: {why}" for why in self.inexact]
        earlier = [row for row in self.rows if row.step != plan.step]
        lines += [f"  earlier difference in step {row.step}: {row.name} is {row.text}" for row in earlier]
        lines += rows_table([row for row in self.rows if row.step == plan.step])
        if self.weights is not None and plan.end is not None:
            lines.append(f"  {weights_text(self.weights, plan.end.name)}")
        if self.stored:
            lines.append(f"  {len(self.stored)} metrics of rollouts, engines and times are not recomputed")
        return [*lines, self._verdict_line()]

    def _verdict_line(self) -> str:
        match self.code:
            case exit_codes.OK if self.inexact:
                return f"step {self.plan.step} is the same within {TOLERANCE:g}"
            case exit_codes.OK:
                return f"step {self.plan.step} is the same, bit for bit"
            case exit_codes.FAILURE:
                return f"step {self.plan.step} is DIFFERENT"
        return f"step {self.plan.step} was computed, but the run has no record to compare with (metrics.jsonl, a checkpoint)"


def replay_step(
    root: Path,
    step: int,
    *,
    sample: str | None = None,
    computes: bool = True,
    ranks: int | None = None,
    model: Path | None = None,
    start: Start | None = None,
    trusts_code: bool = False,
) -> Replay:
    """Repeat the computation of a step, and explain a sample of it.

    Args:
        root: folder of the run, which is only read.
        step: step to repeat.
        sample: sample to explain, as named by a user.
        computes: whether to repeat the computation; otherwise only the batch is read.
        ranks: number of ranks on CPUs instead of the run's layout.
        model: folder of the model on this machine.
        start: function that starts the ranks. Default: torchrun.
        trusts_code: whether the caller trusts code that the folder names.

    Raises:
        RoleError: the folder names code that the caller does not trust.
        ReplayError: a file is missing, or the ranks failed.
    """
    plan = find_step(root, step, computes=computes)
    index, explained = (None, None) if sample is None else _explain_step(plan, sample)
    if not computes:
        return Replay(plan, sample=explained, computed=False)
    config = local_layout(plan.run.trainer, ranks=ranks, model=model)
    check_recorded_code(root, code_of_trainer(config), trusted=trusts_code)
    answer = compute_step(plan, config, start or run_ranks, sample=index)
    inexact = tuple(_inexact_reasons(plan, answer, ranks))
    tolerance = TOLERANCE if inexact else None
    found: list[Row] = []
    for line in answer["steps"]:
        number = int(line["step"])
        own = compare_quantities(number, plan.lines.get(number), line, tolerance=tolerance)
        found += own if number == step else [row for row in own if row.verdict == "different"]
    return Replay(
        plan,
        tuple(found),
        answer["weights"],
        "unknown" if answer["weights"] is None else weights_verdict(answer["weights"], tolerance=tolerance),
        f"{answer['ranks']} rank{'s' if answer['ranks'] > 1 else ''} on {answer['device']}",
        inexact,
        explained,
        answer["sample"],
        stored=tuple(name for name in plan.lines.get(step, {}) if name not in answer["steps"][-1]),
    )


def _explain_step(plan: Plan, sample: str) -> tuple[int, SampleReport]:
    try:
        batch = read_batch(plan.batches[-1][1])
    except BatchError as error:
        raise ReplayError(str(error)) from None
    index = index_of(batch, sample)
    trains = plan.run.orchestrator is not None and plan.run.trainer.task == "RL"
    settings = advantage_settings(plan.run.orchestrator) if trains and plan.run.orchestrator is not None else {}
    return index, report_sample(batch, index, settings)


def _inexact_reasons(plan: Plan, answer: dict[str, object], ranks: int | None) -> Sequence[str]:
    """Return the reasons why the bits may differ without an error."""
    found = []
    if answer["device"] != "cpu":
        found.append(f"sums on {answer['device']} have no fixed order")
    if answer["ranks"] != plan.attempt.world_size:
        found.append(
            f"the run had {plan.attempt.world_size} ranks and this replay {answer['ranks']}, so sums have another order"
        )
    elif ranks is not None and plan.run.trainer.gpus_per_replica:
        found.append("the run used GPUs and this replay uses CPUs")
    if plan.reconfigured:
        found.append(
            f"run.json was changed after attempt {plan.attempt.attempt} had trained the step, and its earlier content is lost"
        )
    return found
