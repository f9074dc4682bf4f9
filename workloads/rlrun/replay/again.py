"""Replay of a step: repeat its computation and compare it with the values written by the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlrun.config.named_code import code_of_trainer
from rlrun.protocol.files.batch import BatchError, read_batch
from rlrun.protocol.files.recorded_code import check_recorded_code
from rlrun.replay.advantage import advantage_settings
from rlrun.replay.compare import Row, Verdict, compare_quantities, rows_table, weights_text, weights_verdict
from rlrun.replay.compute import Start, compute_step, local_layout, run_ranks
from rlrun.replay.find import Plan, ReplayError, find_step
from rlrun.replay.sample import SampleReport, index_of, report_document, report_sample, report_text
from rlrun.runtime import exit_codes

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
        lines = self._head() if self.computed else []
        if self.sample is not None:
            lines += (
                ["", report_text(self.sample, self.objective)] if lines else [report_text(self.sample, self.objective)]
            )
        return "\n".join(lines)

    def _head(self) -> list[str]:
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
        return [*lines, self._verdict()]

    def _verdict(self) -> str:
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


def _inexact_reasons(plan: Plan, answer: dict[str, Any], ranks: int | None) -> Sequence[str]:
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
