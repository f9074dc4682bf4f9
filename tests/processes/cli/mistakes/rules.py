"""Mistakes in combinations of values: intervals, GPUs and arguments of commands."""

from __future__ import annotations

from collections.abc import Sequence

from tests.processes.cli.mistakes.mistake import SPEC, Mistake, field_of_spec

_RUN = {"run/run.json": "-> ../run.json", "run/manifest.yaml": SPEC}
_GPU = "trainer: {gpusPerReplica: 0, resources: {limits: {nvidia.com/gpu: 1}}}"


def _rule(
    what: str,
    line: str,
    place: str,
    value: str,
    fix: str,
    repair: tuple[str, str] | None = None,
    *,
    notice: bool = False,
) -> Mistake:
    return field_of_spec(what, line, f"spec.{place}", value, fix, repair, notice=notice)


_STEPS = (
    _rule(
        "checkpoints beyond the end",
        "checkpoint: {interval: 100}",
        "checkpoint.interval",
        "100",
        "interval: 10",
        ("interval: 100", "interval: 10"),
        notice=True,
    ),
    _rule(
        "evaluations beyond the end",
        "evaluation: {interval: 50}",
        "evaluation.interval",
        "50",
        "interval: 10",
        ("interval: 50", "interval: 10"),
        notice=True,
    ),
    _rule(
        "a warm-up beyond the end",
        "trainer: {scheduler: {warmupSteps: 20}}",
        "trainer.scheduler.warmupSteps",
        "20",
        "warmupSteps: 1",
        ("warmupSteps: 20", "warmupSteps: 1"),
        notice=True,
    ),
    _rule(
        "exports beyond the end",
        "checkpoint: {export: {interval: 50}}",
        "checkpoint.export.interval",
        "50",
        "interval: 10",
        ("interval: 50", "interval: 10"),
        notice=True,
    ),
    _rule(
        "a rate of 1", "trainer: {optimizer: {lr: 1}}", "trainer.optimizer.lr", "1", "lr: 1e-6", ("lr: 1", "lr: 1e-6")
    ),
    _rule(
        "a rate without its exponent",
        "trainer: {optimizer: {lr: 5}}",
        "trainer.optimizer.lr",
        "5",
        "lr: 5e-6",
        ("lr: 5", "lr: 5e-6"),
    ),
    _rule(
        "a critic's rate of 2",
        "algorithm: {advantage: {name: gae}, critic: {lr: 2}}",
        "algorithm.critic.lr",
        "2",
        "lr: 2e-6",
        ("lr: 2", "lr: 2e-6"),
    ),
    _rule("GPUs in limits alone", _GPU, "trainer.resources.limits", "nvidia.com/gpu", "gpusPerReplica: 1"),
    _rule(
        "GPUs in requests alone",
        "inference: {resources: {requests: {nvidia.com/gpu: 2}, limits: {nvidia.com/gpu: 2}}}",
        "inference.resources",
        "nvidia.com/gpu",
        "gpusPerReplica: 2",
    ),
    _rule(
        "a GPU product without GPUs",
        "placement: {gpuProduct: NVIDIA-H100-80GB-HBM3}",
        "placement.gpuProduct",
        "NVIDIA-H100-80GB-HBM3",
        "gpusPerReplica: 1",
        notice=True,
    ),
    field_of_spec(
        "a batch that groups do not fill, with a name",
        "orchestrator: {batchSize: 60}",
        "orchestrator.batchSize",
        "(60)",
        "set batchSize to 56 or 64",
    ),
    _rule("a revision of a folder", "model: {tiny: {}, revision: main}", "model", "main", "remove revision"),
    _rule(
        "a hub's name for a folder",
        "model: {path: Qwen/Qwen3-8B}",
        "model.path",
        "Qwen/Qwen3-8B",
        "model: {name: Qwen/Qwen3-8B}",
        ("model: {path: Qwen/Qwen3-8B}", "model: {name: Qwen/Qwen3-8B}"),
    ),
)

_COMMANDS = (
    Mistake("a PNG for an SVG", "rlrun plot run --svg curve.png", 64, "--svg", "curve.png", "--png curve.png", _RUN),
    Mistake("an SVG for a PNG", "rlrun plot run --png curve.svg", 64, "--png", "curve.svg", "--svg curve.svg", _RUN),
    Mistake("a picture of another kind", "rlrun plot run --svg curve.pdf", 64, "--svg", "curve.pdf", "curve.svg", _RUN),
    Mistake(
        "a change without a value", "rlrun fork run --set maxSteps", 64, "--set", "maxSteps", "--set maxSteps=", _RUN
    ),
    Mistake(
        "a change with a colon",
        "rlrun fork run --set maxSteps:20",
        64,
        "--set",
        "maxSteps:20",
        "--set maxSteps=20",
        _RUN,
    ),
    Mistake(
        "a change with a slash",
        "rlrun fork run --set trainer/optimizer/lr=1e-5",
        64,
        "--set",
        "trainer/optimizer/lr",
        "trainer.optimizer.lr",
        _RUN,
    ),
    Mistake("a variation by --set", "rlrun validate run.yaml --set maxSteps=20", 64, "--set", "", "--max-steps 20"),
)

RULES: Sequence[Mistake] = (*_STEPS, *_COMMANDS)
